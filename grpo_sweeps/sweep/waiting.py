"""Wait for jobs of Submitit: the runs' own status files first, SLURM's queue second, Submitit's view (sacct) last.

A run has ended when it says so and its job is not coming back. A job that the queue still knows is waited for whatever
the status says, because it may have been killed and put back in the queue; one whose status says nothing about an end
and whose job the queue has forgotten has died without a word, and that is written down for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_sweeps.sweep.execute import RunResult, result_of
from grpo_sweeps.sweep.ledger import QUEUE, status_or_none
from grpo_sweeps.sweep.planned import PlannedRun
from grpo_sweeps.sweep.queue import Answer, Queue
from grpo_sweeps.sweep.say import say
from grpo_sweeps.tracking.status import RunStatus, write_status

GONE_S = 10.0  # for which the queue must have forgotten a job: its last status may still be on its way over the network
TAIL_LINES, TAIL_BYTES, TAIL_CHARS = 3, 4096, 300


def wait(
    waiting: Mapping[PlannedRun, Any], poll_s: float, queue: Queue | None = None, gone_s: float | None = None
) -> list[RunResult]:
    """One result a run, when every one of them has ended. Runs -> Submitit's jobs."""
    left, results = dict(waiting), list[RunResult]()
    gone: dict[str, float] = {}  # job -> when the queue was first found to have forgotten it
    queue, told = queue or QUEUE, False
    gone_s = min(GONE_S, 5 * poll_s) if gone_s is None else gone_s
    while left:
        answers = queue.ask([job.job_id for job in left.values()])
        unknown = next((answer for answer in answers.values() if answer.kind == "unknown"), None)
        if unknown and not told:
            say(f"still waiting: {unknown.text()}")
        told = unknown is not None
        for run, job in list(left.items()):
            if _has_ended(run, job, answers[job.job_id], gone, gone_s):
                results.append(result_of_job(run, job))
                del left[run]
        if left:
            time.sleep(poll_s)
    return results


def _has_ended(run: PlannedRun, job: Any, answer: Answer, gone: dict[str, float], gone_s: float) -> bool:
    result = result_of(run.run_dir)
    if result is not None and result.state in ("finished", "failed"):
        return True
    if answer.kind == "absent":  # no queue to ask: a status that is over, a silent process or Submitit's own view
        status = status_or_none(run.run_dir)
        return result is not None or (status is not None and status.stale()) or bool(job.done())
    if answer.alive:
        gone.pop(job.job_id, None)
        return False
    since = gone.setdefault(job.job_id, time.monotonic())
    return result is not None or time.monotonic() - since >= gone_s


def result_of_job(run: PlannedRun, job: Any) -> RunResult:
    """The run's own account of its end; where the job was killed without a word, that is written down for it."""
    result, error = result_of(run.run_dir), ""
    if result is None:
        status = status_or_none(run.run_dir)
        if status is not None and _is_anothers(status, job):  # to which the job has left it
            return RunResult(run.identity, run.name, "running", str(run.run_dir), status.step, status.total)
        error = _silent_end(job)
        end(run, "interrupted", error)
        result = result_of(run.run_dir)
    return result or RunResult(run.identity, run.name, "interrupted", str(run.run_dir), error=error)


def _is_anothers(status: RunStatus, job: Any) -> bool:
    """Does another process than this job run the run?"""
    return status.state == "running" and status.job_id != job.job_id and not status.stale()


def _silent_end(job: Any) -> str:
    """Why a job may have ended that has left no word: its state where SLURM tells it, and what it printed last."""
    state = str(job.state).upper()
    known = f" (state {state})" if state != "UNKNOWN" else ""
    path = Path(job.paths.stderr)
    words = last_words(path)
    said = f"; its last words: {words}" if words else ""
    return f"job {job.job_id} ended without a word{known}{said}; its output: {path}"


def last_words(path: Path) -> str:
    """The last lines of a job's error output, in one; "" where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-TAIL_LINES:])[-TAIL_CHARS:]


def end(run: PlannedRun, state: Any, error: str) -> None:
    """Write down how a run ended that could not say so itself."""
    before = status_or_none(run.run_dir) or RunStatus(state="queued", identity=run.identity, name=run.name)
    write(run, replace(before, state=state, error=error, ended=time.time()))


def write(run: PlannedRun, status: RunStatus) -> None:
    """Where the status cannot be written (a full disk), the other runs are still waited for."""
    try:
        write_status(run.run_dir, status)
    except OSError as error:
        say(f"{run.name}: its status could not be written ({error})")
