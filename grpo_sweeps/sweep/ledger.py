"""Decides what to do with a run that is asked for again, from what is there already.

| what is there | without redo |
|---|---|
| nothing, or something that made no step | start |
| queued or running: a living process, or a job that SLURM's queue knows | skip |
| made a step, by other functions of the user's own, data or weights than now (changed) | refuse the command |
| finished, with as many steps as are asked for | skip; where other code of the package made it, say so |
| finished with fewer, interrupted or killed, by the same code | continue from the last checkpoint |
| the same by other code of the package (stale) | skip, and say so |
| failed, or a record that is not whole or another run's, or no checkpoint left to continue from | skip, and say so |
| records without a status that can be read | as the status says that is recovered from them, else skip and say so |

What made a run is told by digests (`tracking/made_by.py`). A record without them is told by its commit alone.

`redo` makes runs afresh: `failed` those that failed, whose status is lost or whose record is not whole, `stale` those
made by something else, `all` every one that is not alive. The folder that is replaced is moved aside, not deleted.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from grpo_sweeps.sweep.jobs import Jobs, noted_jobs, submission_of, told
from grpo_sweeps.sweep.origin import told_apart
from grpo_sweeps.sweep.queue import Answer, Queue
from grpo_sweeps.sweep.recover import recovered
from grpo_sweeps.text import count
from grpo_sweeps.tracking import provenance
from grpo_sweeps.tracking.checkpoints import FOLDER
from grpo_sweeps.tracking.glance import AFRESH, glance, in_words, lost_checkpoints
from grpo_sweeps.tracking.lines import METRICS
from grpo_sweeps.tracking.made_by import REMEDY, STALE, UNKNOWN, MadeBy, changes, other_code
from grpo_sweeps.tracking.seal import Seal
from grpo_sweeps.tracking.seal import read as read_seal
from grpo_sweeps.tracking.status import RecordError, RunStatus, another, process_lives, process_started, read_status

Action = Literal["skip", "start", "continue", "redo"]
Why = Literal["", "alive", "finished", "failed", "stale", "changed"]  # why a run is skipped
REPLACED = ".replaced"
QUEUE = Queue()  # one per process, so that all its questions share one call of squeue


@dataclass(frozen=True)
class Decision:
    """What to do with one run, and why, in a few words."""

    action: Action
    reason: str
    why: Why = ""


def status_or_none(run_dir: Path) -> RunStatus | None:
    """The status of a run's folder; None when there is none or it cannot be read."""
    try:
        return read_status(run_dir)
    except RecordError:
        return None


def seal_or_none(run_dir: Path) -> Seal | None:
    """What the run's record held at its last checkpoint; None where that cannot be read."""
    try:
        return read_seal(run_dir)
    except RecordError:
        return None


def decide(
    run_dir: Path,
    steps: int,
    redo: str | None,
    commit: str | None,
    queue: Queue | None = None,
    made_by: MadeBy = UNKNOWN,
) -> Decision:
    """Compare what is asked for (`steps` updates, `redo`) with the run's status, and `made_by`, what would make the run
    now, with its record."""
    try:
        status = read_status(run_dir)
    except RecordError as error:
        return _without_status(run_dir, steps, str(error).rstrip("."), redo, commit, made_by)
    jobs = noted_jobs(run_dir.parent)
    life = where_alive(status, jobs, queue)
    if life:
        state = "running" if status.state == "running" and not status.stale() else "queued"
        return Decision("skip", f"{state} already ({life})", "alive")
    if other := another(run_dir, status):
        if redo == "all":
            return Decision("redo", f"held the record of run {other}")
        return Decision(
            "skip", f"its folder holds the record of run {other}, a copy; redo=all makes this run afresh", "failed"
        )
    found = _of_status(run_dir, status, steps, redo, commit, made_by)
    stranger = not_its_own(status, jobs, queue)
    return replace(found, reason=f"{found.reason}; {stranger}") if stranger else found


def _of_status(
    run_dir: Path, status: RunStatus, steps: int, redo: str | None, commit: str | None, made_by: MadeBy
) -> Decision:
    """The decision for a run that is not alive."""
    made = _made(run_dir, status, commit, made_by)
    lacking = [] if status.state == "failed" else glance(run_dir, status)
    what = "its record is not whole"
    if status.state == "finished" and not status.reached(steps) and not lacking:
        lacking, what = lost_checkpoints(status.name, run_dir, status, seal_or_none(run_dir)), "it cannot go on"
    at = f"{status.state} at step {status.step}"
    bad, stale = status.state == "failed" or bool(lacking), bool(made.by or made.changed)
    if redo == "all" or (redo == "failed" and bad) or (redo == "stale" and stale):
        return Decision("redo", f"was {at}{made.by}")
    if lacking:
        return Decision("skip", f"{at}, but {what}: {in_words(lacking)}; {AFRESH}", "failed")
    if status.state == "failed":
        return Decision("skip", f"{at}: {status.error or 'no reason recorded'}; redo=failed runs it again", "failed")
    begun = status.step > 0 or status.state == "finished" or _has_checkpoint(run_dir)
    if made.changed and begun:
        return Decision("skip", f"{STALE}{at}, and since then {made.changed}; {REMEDY}", "changed")
    if status.state == "finished" and status.reached(steps):
        by = f", by {status.ended_by}" if status.ended_by else ""
        return Decision("skip", f"finished already ({count(status.step, 'step')}{by}){made.told}", "finished")
    if not begun:
        return Decision("start", f"was {status.state} before its first step")
    if made.by:
        return Decision("skip", f"{STALE}{at} of {status.total}{made.by}; {REMEDY}", "stale")
    return Decision("continue", f"was {at} of {status.total}")


def _has_checkpoint(run_dir: Path) -> bool:
    """True for a run that goes on from a step, whatever its status says: that is written at most once a second."""
    return next((run_dir / FOLDER).glob("step_*"), None) is not None


@dataclass(frozen=True)
class _Made:
    """by: " by other code ..." where the package's code, or without digests the commit, differs. told: the same for a
    finished run; only where it is certain. changed: how the rest differs."""

    by: str
    told: str
    changed: str


def _made(run_dir: Path, status: RunStatus, commit: str | None, now: MadeBy) -> _Made:
    before = provenance.read(run_dir, with_diff=False) or provenance.Source()
    changed = "; ".join(changes(before.made_by, now))
    other = other_code(before.made_by, now)
    if other is None:
        by = f" by another commit ({(status.commit or 'unknown')[:7]})" if status.commit != commit else ""
        return _Made(by, "", changed)
    by = f" by other code of the package ({told_apart(before, now, commit)})" if other else ""
    return _Made(by, f",{by}" if by else "", changed)


def _without_status(
    run_dir: Path, steps: int, problem: str, redo: str | None, commit: str | None, made_by: MadeBy
) -> Decision:
    """The decision for a run whose status is lost: by its records, where they say who made them and how far; else none
    are added to them."""
    records = run_dir / METRICS
    if not records.exists() or not records.stat().st_size:
        return Decision("start", "new")
    if redo == "all":
        return Decision("redo", f"has records, but {problem}")
    if (status := recovered(run_dir)) is not None:  # the opening of the sweep writes it
        found = _of_status(run_dir, status, steps, redo, commit, made_by)
        return replace(found, reason=f"its status was lost, and its records say: {found.reason}")
    if redo == "failed":
        return Decision("redo", f"has records, but {problem}")
    return Decision("skip", f"has records, but {problem}; redo=failed makes it afresh", "failed")


def where_alive(status: RunStatus, jobs: Jobs = (), queue: Queue | None = None) -> str:
    """Where a run lives, in words; "" for one that does not.

    A run that says `running` or `interrupted` may be waiting again (a requeued job), so the queue is asked for both.
    jobs: what was submitted for the run's sweep (`noted_jobs`).
    """
    if status.state not in ("queued", "running", "interrupted"):
        return ""
    process = f"{status.host}, process {status.pid}"
    if status.state == "running" and not status.stale():
        return f"job {status.job_id}" if status.job_id else process
    if status.state == "queued" and process_is_here(status):
        return f"job {status.job_id}" if status.job_id else process
    answer = job_of(status, jobs, queue)
    return f"job {status.job_id}: {answer.text()}" if answer.alive else ""


def not_its_own(status: RunStatus, jobs: Jobs, queue: Queue | None = None) -> str:
    """A few words where the queue has a job of the number of an open run's job that is another one; "" otherwise."""
    if status.state in ("finished", "failed"):
        return ""
    answer = job_of(status, jobs, queue)
    return f"job {status.job_id}: {answer.reason}" if answer.kind == "no" and answer.reason else ""


def process_is_here(status: RunStatus) -> bool:
    """True when the process that wrote the status lives on this host (and not another one that got its id)."""
    if status.host != socket.gethostname() or status.pid <= 0 or not process_lives(status.pid):
        return False
    began = process_started(status.pid)
    return None in (began, status.pid_started) or began == status.pid_started


def job_of(status: RunStatus, jobs: Jobs = (), queue: Queue | None = None) -> Answer:
    """What the queue says about a run's job; `no` for a run that has none of its own.

    A job of another cluster counts only for a run that still waits for it: one that has begun tells by its heartbeat
    whether it lives.
    """
    submission = submission_of(status.job_id, status.job_token, jobs)
    if submission is None or status.job_id is None:
        return Answer("no")
    answer = told((queue or QUEUE).one(status.job_id), submission)
    return Answer("no") if answer.kind == "elsewhere" and status.state != "queued" else answer


def ask_queue(run_dirs: Iterable[Path]) -> None:
    """Ask SLURM's queue once for the jobs of all these runs: the single questions that follow are answered from it."""
    jobs: dict[Path, Jobs] = {}
    ids = []
    for run_dir in run_dirs:
        status = status_or_none(run_dir)
        if status is None or status.job_id is None or status.state in ("finished", "failed"):
            continue
        if run_dir.parent not in jobs:
            jobs[run_dir.parent] = noted_jobs(run_dir.parent)
        if submission_of(status.job_id, status.job_token, jobs[run_dir.parent]):
            ids.append(status.job_id)
    QUEUE.ask(ids)


def set_aside(run_dir: Path) -> Path | None:
    """Move a folder that is to be made again to <sweep>/.replaced/<identity>-<time>; returns its new place."""
    if not run_dir.exists():
        return None
    target = run_dir.parent / REPLACED / f"{run_dir.name}-{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 10**6:06d}"
    target.parent.mkdir(parents=True, exist_ok=True)
    run_dir.rename(target)
    return target
