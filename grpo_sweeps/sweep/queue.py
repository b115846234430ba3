"""SLURM's queue: which jobs it still knows, and which of them are a sweep's.

One call of squeue answers for all jobs of a command and is remembered for a few seconds. There are four answers,
because a slow controller has not forgotten a job: `yes`, `no`, `unknown` (squeue is there but does not answer: whoever
asks takes the job to be alive) and `absent` (no squeue on this machine: the status files are all there is to go by).
sacct is not asked: it may be missing or minutes late.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

KEEP_S = 3.0  # seconds for which an answer is good: many runs are asked about at once
TIMEOUT_S = 20.0
JOBS_FILE = ".jobs"  # in a sweep's folder: the ids of what was submitted for it, one per line
# squeue leaves ended jobs out, but some releases show them while the controller remembers them.
ENDED_STATES = (
    "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "REVOKED",
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What the queue says about one job: its state and reason as SLURM writes them, and its node once it has one."""

    kind: Literal["yes", "no", "unknown", "absent"]
    state: str = ""
    reason: str = ""
    node: str = ""

    @property
    def alive(self) -> bool:
        return self.kind in ("yes", "unknown")

    @property
    def pending(self) -> bool:
        return self.kind == "yes" and self.state == "PENDING"

    def text(self) -> str:
        """The answer in a few words: "PENDING, Resources", or why nothing is known."""
        if self.kind == "unknown":
            return f"squeue does not answer ({self.reason}), so the job is taken to be alive"
        if self.kind == "absent":
            return "no squeue on this machine"
        return ", ".join(part for part in (self.state, self.reason) if part and part != "None")


class Queue:
    """Asks squeue and remembers. Every id that was ever asked about is in each later call: answers come together."""

    def __init__(self, keep_s: float = KEEP_S, timeout_s: float = TIMEOUT_S) -> None:
        self._keep_s, self._timeout_s = keep_s, timeout_s
        self._ids: set[str] = set()
        self._found: dict[str, Answer] | None = None  # None: squeue gave no answer, and _failed is each job's
        self._failed = Answer("absent")
        self._asked = float("-inf")

    def ask(self, job_ids: Iterable[str]) -> dict[str, Answer]:
        """The answer for each job id ("12", or "12_3" for an array's task)."""
        wanted = list(job_ids)
        fresh = {main_id(job_id) for job_id in wanted} - self._ids
        if wanted and (fresh or time.monotonic() - self._asked > self._keep_s):
            self._ids |= fresh
            self._look()
        return {job_id: self._answer(job_id) for job_id in wanted}

    def one(self, job_id: str) -> Answer:
        return self.ask([job_id])[job_id]

    def _answer(self, job_id: str) -> Answer:
        if self._found is None:
            return self._failed
        found = self._found.get(job_id)
        if found is None and "_" not in job_id:  # an array is alive while one of its tasks is
            found = next((one for key, one in self._found.items() if main_id(key) == job_id), None)
        return found or Answer("no")

    def _look(self) -> None:
        self._found = None
        if shutil.which("squeue") is None:
            self._failed = Answer("absent")
            return
        command = ["squeue", "-h", "-r", "-o", "%i|%T|%r|%N", "-j", ",".join(sorted(self._ids))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self._timeout_s, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            self._failed = Answer("unknown", reason=type(error).__name__)
        else:
            if done.returncode == 0:
                self._found = read(done.stdout)
            elif "Invalid job id" in done.stderr:  # squeue's error for a single job that it has forgotten
                self._found = {}
            else:
                lines = done.stderr.strip().splitlines()
                self._failed = Answer("unknown", reason=lines[-1] if lines else f"exit code {done.returncode}")
        self._asked = time.monotonic()


def read(listing: str) -> dict[str, Answer]:
    """The jobs that have not ended, from squeue's lines of "id|state|reason|nodes"."""
    found = {}
    for line in listing.splitlines():
        job_id, *rest = line.strip().split("|")
        state, reason, node = (*rest, "", "", "")[:3]
        if job_id and state not in ENDED_STATES:
            found[job_id] = Answer("yes", state, reason, node)
    return found


def main_id(job_id: str) -> str:
    """The array's id, "12" of "12_3": what sbatch printed, and what squeue and scancel take for the whole array."""
    return job_id.partition("_")[0]


def note_jobs(sweep_folder: Path, job_ids: Iterable[str]) -> None:
    """Write down that these jobs were submitted for the sweep."""
    with open(sweep_folder / JOBS_FILE, "a", encoding="utf-8") as file:
        file.writelines(f"{job_id}\n" for job_id in sorted({main_id(job_id) for job_id in job_ids}))


def noted_jobs(sweep_folder: Path) -> frozenset[str]:
    """The ids of the jobs that were submitted for a sweep.

    A run that was trained inside somebody's interactive allocation carries that allocation's id and is none of these:
    the allocation does not say whether the run lives, and must not be cancelled.
    """
    try:
        words = (sweep_folder / JOBS_FILE).read_text(encoding="utf-8", errors="replace").split()
    except OSError:  # none, or nothing that can be read: then the status files are all there is to go by
        return frozenset()
    return frozenset(word for word in words if word.isdigit())
