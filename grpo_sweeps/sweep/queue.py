"""SLURM's queue: which jobs it still knows, and why one of them does not start.

One call of squeue answers for all jobs of a command and is remembered for a few seconds. There are five answers,
because a slow controller has not forgotten a job: `yes`, `no`, `unknown` (squeue is there but does not answer: whoever
asks takes the job to be alive), `elsewhere` (the job is of another cluster) and `absent` (no squeue on this machine:
the status files are all there is to go by). sacct is not asked: it may be missing or minutes late. Whether the job of
a number is the run's own is not told here but in `jobs`.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

KEEP_S = 3.0  # seconds for which an answer is good: many runs are asked about at once
TIMEOUT_S = 20.0
FIELDS = "%i|%T|%r|%N|%V|%k"  # the comment last, because it may hold anything
# squeue leaves ended jobs out, but some releases show them while the controller remembers them.
ENDED_STATES = (
    "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "REVOKED",
)  # fmt: skip
# SLURM's reasons of a job that waits for a person, in words. What passes by itself (Resources, Priority, a limit on
# the number of jobs) is none of them.
STUCK = {
    r"JobHeld|\bheld\b": "is held; scontrol release lets it start",
    r"PartitionConfig|BadConstraints|PartitionNodeLimit|PartitionTimeLimit|PerJobLimit|DependencyNeverSatisfied|"
    r"Invalid(Account|QOS)|(Account|QOS)NotAllowed": "can never start as it was asked for",
    r"ReqNodeNotAvail|PartitionDown|PartitionInactive|NodeDown|DOWN": "waits for nodes that are not available",
}


@dataclass(frozen=True)
class Answer:
    """What the queue says about one job: its state, reason and comment as SLURM writes them, its node once it has one,
    and when it was submitted, in seconds since the epoch. sure: no other job can be meant."""

    kind: Literal["yes", "no", "unknown", "elsewhere", "absent"]
    state: str = ""
    reason: str = ""
    node: str = ""
    submitted: float | None = None
    comment: str = ""
    sure: bool = True

    @property
    def alive(self) -> bool:
        return self.kind in ("yes", "unknown", "elsewhere")

    @property
    def stuck(self) -> str:
        """Why the job does not start before somebody does something, in words; "" where it may."""
        if not self.pending:
            return ""
        return next((f"{words} ({self.reason})" for found, words in STUCK.items() if re.search(found, self.reason)), "")

    @property
    def pending(self) -> bool:
        return self.kind == "yes" and self.state == "PENDING"

    def text(self) -> str:
        """The answer in a few words: "PENDING, Resources", or why nothing is known."""
        if self.kind == "unknown":
            return f"squeue does not answer ({self.reason}), so the job is taken to be alive"
        if self.kind == "elsewhere":
            return f"of cluster {self.reason}, which cannot be asked from here, so the job is taken to be alive"
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
        command = ["squeue", "-h", "-r", "-o", FIELDS, "-j", ",".join(sorted(self._ids))]
        environment = {**os.environ, "SLURM_TIME_FORMAT": "%s"}  # seconds since the epoch, whatever the time zones
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=self._timeout_s, check=False,
                env=environment,
            )  # fmt: skip
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
    """The jobs that have not ended, from squeue's lines of `FIELDS`."""
    found = {}
    for line in listing.splitlines():
        job_id, state, reason, node, submitted, comment = (line.strip() + "|||||").split("|", 5)
        if job_id and state not in ENDED_STATES:
            when = float(submitted) if submitted.isdigit() else None
            found[job_id] = Answer("yes", state, reason, node, when, comment.rstrip("|"))
    return found


def main_id(job_id: str) -> str:
    """The array's id, "12" of "12_3": what sbatch printed, and what squeue and scancel take for the whole array."""
    return job_id.partition("_")[0]


def cluster_config(key: str, timeout_s: float = TIMEOUT_S) -> str:
    """A value of the configuration of the cluster that this machine's commands reach; "" where it does not say."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "config"], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(rf"^{key}\s*=\s*(\S+)", done.stdout, re.M)
    return found.group(1) if found else ""


def cluster_name() -> str:
    """The cluster's name, asked for once; "" where it is not known."""
    return _cluster_name(shutil.which("scontrol"), os.environ.get("SLURM_CONF"))


@functools.cache
def _cluster_name(scontrol: str | None, conf: str | None) -> str:
    """The name that this scontrol gives with this configuration."""
    return cluster_config("ClusterName") if scontrol else ""
