"""status.json: the state of a run. Small, written atomically, read without torch, pandas or MLflow."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from grpo_sweeps.files import write_text
from grpo_sweeps.redaction import redact
from grpo_sweeps.text import show
from grpo_sweeps.tracking.lines import is_whole

State = Literal["queued", "running", "finished", "failed", "interrupted"]
STATES: tuple[str, ...] = get_args(State)
ENDED: tuple[str, ...] = ("finished", "failed", "interrupted")

FILE_NAME = "status.json"
HEARTBEAT_EVERY = 15.0  # seconds between heartbeats of a living run
MOST_NOTES = 50
STALE_AFTER = 300.0  # seconds without one after which a run is taken for dead (clocks of nodes differ; disks stall)


class RecordError(ValueError):
    """A file of a run's folder is missing or damaged: one sentence that names it."""


@dataclass(frozen=True)
class RunStatus:
    """One run's state. Times are seconds since the epoch; `step` counts updates done, of `total`.

    ended_by: the key whose budget ended the run before or at `trainer.steps`; `total` is then the steps that it took.
    """

    state: State
    identity: str = ""
    name: str = ""  # what varies in the sweep: "R=8 seed=0"
    sweep: str = ""
    step: int = 0
    total: int = 0
    host: str = ""
    pid: int = 0
    job_id: str | None = None  # SLURM's
    job_token: str | None = None  # in the comment of a job that was submitted for the run; None in any other job
    heartbeat: float = 0.0
    started: float | None = None
    ended: float | None = None
    error: str | None = None
    commit: str | None = None
    dirty: bool | None = None
    versions: dict[str, str] = field(default_factory=dict)
    command: str = ""
    pid_started: int | None = None  # of process `pid`, as `process_started` gives it: detects a reused process id
    traceback: str | None = None  # the last lines of a failed run's; all of it is in log.txt
    notes: list[str] = field(default_factory=list)  # what happened to the run and did not stop it, one sentence each
    ended_by: str | None = None

    def reached(self, steps: int) -> bool:
        """True for a run that has nothing left of so many steps, by them or by its budget."""
        return self.step >= steps or self.ended_by is not None

    def stale(self, now: float | None = None, limit: float = STALE_AFTER) -> bool:
        """True for a run that says "running" but does not run any more (killed without a word).

        On the run's own host its process is looked up, and where its start time is known, nothing else counts: neither
        a clock that was set nor a heartbeat that a full disk held back makes a living run look dead. Elsewhere the age
        of the heartbeat decides.
        """
        if self.state != "running":
            return False
        if self.host == socket.gethostname() and self.pid:
            if not process_lives(self.pid):
                return True
            began = process_started(self.pid)
            if began is not None and self.pid_started is not None:
                return began != self.pid_started
        return (time.time() if now is None else now) - self.heartbeat > limit


def another(run_dir: Path, status: RunStatus) -> str:
    """The identity of the run whose record a folder holds where that is not the folder's own; "" where it is."""
    mine = status.identity in ("", run_dir.name)
    return "" if mine else status.identity


def copied(run_dir: Path, status: RunStatus) -> str:
    """A sentence where a folder holds the record of another run, "" otherwise: a copy would be counted twice."""
    if not (other := another(run_dir, status)):
        return ""
    there = f", which is in {other} too" if (run_dir.parent / other / FILE_NAME).is_file() else ""
    return (
        f"{run_dir} holds the record of run {other}{there}: a copied or renamed folder is no run and is not counted; "
        f"name it {other} or move it out of the sweep's folder."
    )


def process_lives(pid: int) -> bool:
    """True when a process of this id runs on this host. A zombie does not."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # no process can have this id
        return False
    except PermissionError:
        return True  # it lives, and is another user's
    return _proc_stat(pid)[:1] != ["Z"]  # without /proc the signal was the answer


def process_started(pid: int) -> int | None:
    """When a process of this host began, in clock ticks since boot (which nobody can set); None if unknown."""
    rest = _proc_stat(pid)
    return int(rest[19]) if len(rest) > 19 else None


def seconds_since_start() -> float | None:
    """Seconds since this process started; None where the system does not say."""
    began = process_started(os.getpid())
    return None if began is None else time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")


def _proc_stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the third, the state, on; empty where there are none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def write_status(run_dir: Path | str, status: RunStatus) -> None:
    """Replace run_dir/status.json atomically."""
    if status.state not in STATES:
        raise RecordError(f"status: state {status.state!r} is not one of {', '.join(STATES)}.")
    content = asdict(status) | {
        "name": redact(status.name),
        "command": redact(status.command),
        "error": None if status.error is None else redact(status.error),
        "notes": [redact(note) for note in status.notes],
    }
    write_text(Path(run_dir) / FILE_NAME, json.dumps(content, indent=1) + "\n")


def read_status(run_dir: Path | str) -> RunStatus:
    """The run's status. Keys that this version does not know are ignored; missing ones take their default.

    Raises RecordError, one sentence, when the file is missing, is no JSON object, names no known state,
    or holds a value of another type than the field's.
    """
    path = Path(run_dir) / FILE_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordError(f"{path} does not exist: this folder holds no run.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict) or content.get("state") not in STATES:
        raise RecordError(f"{path} names no state out of {', '.join(STATES)}.")
    known = {f.name: content[f.name] for f in fields(RunStatus) if f.name in content}
    wrong = [f.name for f in fields(RunStatus) if f.name in known and not _fits(known[f.name], str(f.type))]
    if wrong:
        raise RecordError(f"{path} is damaged: {', '.join(f'{name} is {known[name]!r:.40}' for name in wrong)}.")
    return RunStatus(**known)


def _fits(value: Any, kind: str) -> bool:
    """True when a JSON value is of the type that a field of RunStatus is annotated with."""
    if kind.endswith(" | None"):
        return value is None or _fits(value, kind.removesuffix(" | None"))
    if kind == "int":
        return is_whole(value)
    if kind == "float":
        return isinstance(value, float) or is_whole(value)
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "list[str]":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if kind == "dict[str, str]":
        return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
    return isinstance(value, str)


class StatusWriter:
    """Keeps one run's status.json up to date; usable from the training thread while a heartbeat thread writes too.

        with StatusWriter(run_dir, status) as writer:      # starts the heartbeat
            writer.step(3)                                 # written at most once a second
            writer.update(state="finished", ended=time.time())

    Leaving the context stops the heartbeat and writes the last step; it does not judge how the run ended.
    mine: called before every write; once it returns False, the folder is another process's and nothing is written.
    """

    def __init__(
        self,
        run_dir: Path | str,
        status: RunStatus,
        every: float = HEARTBEAT_EVERY,
        mine: Callable[[], bool] = lambda: True,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.status = status
        self._mine = mine
        self._every = every
        self._lock = threading.Lock()
        self._written = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def update(self, **changes: Any) -> None:
        """Change fields and write at once; the heartbeat is set to now."""
        with self._lock:
            self.status = replace(self.status, **{"heartbeat": time.time(), **changes})
            self._write()

    def note(self, sentence: str) -> None:
        """Add a sentence to the notes, once."""
        if sentence not in self.status.notes:
            self.update(notes=[*self.status.notes, sentence][-MOST_NOTES:])

    def _write(self) -> None:
        if self._mine():
            write_status(self.run_dir, self.status)
        self._written = time.monotonic()

    def step(self, step: int) -> None:
        """Note the updates done; written at most once a second, so that short steps do not wait for the disk."""
        with self._lock:
            self.status = replace(self.status, step=step, heartbeat=time.time())
            if time.monotonic() - self._written < 1.0:
                return
            self._write()

    def _beat(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self.update()
            except OSError as error:  # a full or stalled disk must not end the thread: the next beat tries again
                show(f"status: the heartbeat could not be written ({error}); trying again.")

    def __enter__(self) -> StatusWriter:
        self.update()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.update()
