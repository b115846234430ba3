"""What is there already, and what it means for a run that is asked for again.

Without `redo` a finished run is skipped and an unfinished one (failed, interrupted, killed) goes on from its last
checkpoint. `redo` starts afresh: `failed` those that failed, `stale` those made by another commit, `all` every one.
The folder that is replaced is moved aside, not deleted.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo_sweeps.tracking.status import RecordError, RunStatus, process_lives, read_status

Action = Literal["skip", "start", "continue", "redo"]
REPLACED = ".replaced"


@dataclass(frozen=True)
class Decision:
    """What to do with one run, and why, in words for one line."""

    action: Action
    reason: str


def status_or_none(run_dir: Path) -> RunStatus | None:
    """The status of a run's folder; None when there is none or it cannot be read."""
    try:
        return read_status(run_dir)
    except RecordError:
        return None


def decide(run_dir: Path, steps: int, redo: str | None, commit: str | None) -> Decision:
    """Compare what is asked for (`steps` updates, `redo`) with the run's status."""
    status = status_or_none(run_dir)
    if status is None:
        return Decision("start", "new")
    if is_alive(status):
        where = f"job {status.job_id}" if status.job_id else f"{status.host}, process {status.pid}"
        return Decision("skip", f"{status.state} already ({where})")
    other_commit = status.commit != commit
    if redo == "all" or (redo == "failed" and status.state == "failed") or (redo == "stale" and other_commit):
        return Decision(
            "redo", f"was {status.state} at step {status.step}" + (", by another commit" if other_commit else "")
        )
    if status.state == "finished" and status.step >= steps:
        return Decision("skip", f"finished already ({status.step} steps)")
    if status.step == 0:
        return Decision("start", f"was {status.state} before its first step")
    return Decision("continue", f"was {status.state} at step {status.step} of {status.total}")


def is_alive(status: RunStatus) -> bool:
    """True for a run that runs now, or waits for a launcher or a job that exists."""
    if status.state == "running":
        return not status.stale()
    if status.state != "queued":
        return False
    if status.host == socket.gethostname() and status.pid and process_lives(status.pid):
        return True
    return status.job_id is not None and job_is_queued(status.job_id)


def job_is_queued(job_id: str) -> bool:
    """Does SLURM's queue know the job? False where there is no squeue or it does not answer."""
    if shutil.which("squeue") is None:
        return False
    try:
        done = subprocess.run(["squeue", "-h", "-j", job_id], capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and bool(done.stdout.strip())


def set_aside(run_dir: Path) -> None:
    """Move a folder that is to be made again to <sweep>/.replaced/<identity>-<time>."""
    if not run_dir.exists():
        return
    target = run_dir.parent / REPLACED / f"{run_dir.name}-{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 10**6:06d}"
    target.parent.mkdir(parents=True, exist_ok=True)
    run_dir.rename(target)
