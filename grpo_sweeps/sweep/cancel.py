"""Ends the running and waiting runs of a sweep, and leaves each so that the same command takes it further.

Jobs are cancelled by scancel, processes of this machine get SIGTERM; both stop after their step with a checkpoint
where there is time. Only jobs that were submitted for the sweep, that the queue knows and whose comment holds the
submission's token are cancelled: an interactive allocation in which a run was trained stays, and so does a stranger's
job that has got the number of one of ours.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_sweeps.sweep.jobs import Jobs, noted_jobs, submission_of
from grpo_sweeps.sweep.ledger import job_of, process_is_here, status_or_none
from grpo_sweeps.sweep.queue import Answer, Queue
from grpo_sweeps.tracking.status import RunStatus, write_status

WORD = "cancelled"
WAIT_S = 90.0  # for jobs to leave the queue: SLURM kills the others after KillWait, by default 30 s
OURS = ("grpo_sweeps.", "submitit.")  # the command line of a process of ours has a word that begins so


@dataclass(frozen=True)
class Cancelled:
    """What was done: names of the runs that were cancelled, and a sentence for each that could not be."""

    jobs: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def cancel(folder: Path, wait_s: float = WAIT_S, poll_s: float = 1.0) -> Cancelled:
    """Cancel the sweep whose runs are in `folder`; returns when everything has ended or the time is up."""
    queue, jobs = Queue(keep_s=poll_s / 2), noted_jobs(folder)
    runs = {path.parent: status_or_none(path.parent) for path in sorted(folder.glob("*/status.json"))}
    open_runs = {path: status for path, status in runs.items() if status and status.state not in ("finished", "failed")}
    answers = _answers(open_runs, jobs, queue)
    problems = [
        f"{status.name}: job {status.job_id}: {answers[path].text()}; cancel it yourself if it lives"
        for path, status in open_runs.items()
        if answers[path].kind in ("unknown", "elsewhere")
    ]
    problems += [
        f"{status.name}: job {status.job_id} cannot be told from another one of that number (no token of ours in its "
        f"comment or in our record); if it is yours: scancel {status.job_id}"
        for path, status in open_runs.items()
        if answers[path].kind == "yes" and not answers[path].sure
    ]
    in_queue = {path: status for path, status in open_runs.items() if answers[path].kind == "yes"}
    in_queue = {path: status for path, status in in_queue.items() if answers[path].sure}
    living = {
        path: status
        for path, status in open_runs.items()
        if path not in in_queue and status.state != "interrupted" and process_is_here(status)
    }
    here = {path: status for path, status in living.items() if _is_ours(status.pid)}
    problems += [
        f"{status.name}: process {status.pid} is no command of this package; end it yourself"
        for path, status in living.items()
        if path not in here
    ]
    problems += _scancel([str(status.job_id) for status in in_queue.values()])
    problems += _terminate({status.pid for status in here.values()})
    problems += _wait(in_queue, here, jobs, queue, wait_s, poll_s)
    for path in (*in_queue, *here):
        _leave_resumable(path)
    jobs_ended, processes_ended = (tuple(status.name for status in found.values()) for found in (in_queue, here))
    return Cancelled(jobs_ended, processes_ended, tuple(problems))


def _answers(runs: dict[Path, RunStatus], jobs: Jobs, queue: Queue) -> dict[Path, Answer]:
    """What the queue says about each run's job, all at once."""
    ours = [status for status in runs.values() if submission_of(status.job_id, status.job_token, jobs)]
    queue.ask([str(status.job_id) for status in ours])
    return {path: job_of(status, jobs, queue) for path, status in runs.items()}


def _is_ours(pid: int) -> bool:
    """True when a command of ours started the process (and not, say, a notebook that called the training loop)."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", errors="replace").split("\0")
    except OSError:  # no /proc: the status is all there is to go by
        return True
    return any(word.startswith(OURS) for word in words)


def _scancel(job_ids: list[str]) -> list[str]:
    """Sentences about what scancel refused."""
    if not job_ids:
        return []
    try:
        done = subprocess.run(["scancel", *job_ids], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"scancel {' '.join(job_ids)}: {type(error).__name__}"]
    return [] if done.returncode == 0 else [f"scancel: {done.stderr.strip() or done.returncode}"]


def _terminate(pids: set[int]) -> list[str]:
    problems = []
    for pid in sorted(pids):
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            continue  # it has ended by itself
        except PermissionError:
            problems.append(f"process {pid}: is another user's")
    return problems


def _wait(
    in_queue: dict[Path, RunStatus], here: dict[Path, RunStatus], jobs: Jobs, queue: Queue, wait_s: float, poll_s: float
) -> list[str]:
    """Wait until nothing lives any more; return sentences about what still does when the time is up."""
    deadline = time.monotonic() + wait_s
    again: set[str] = set()
    while True:
        answers = _answers(in_queue, jobs, queue)
        found = {str(status.job_id): answers[path] for path, status in in_queue.items()}
        living = [job_id for job_id, answer in found.items() if answer.alive]
        requeued = [job_id for job_id in living if found[job_id].pending and found[job_id].sure and job_id not in again]
        if requeued and time.monotonic() > deadline - wait_s + 2 * poll_s:  # the job queued itself again as it ended
            again |= set(requeued)
            _scancel(requeued)
        pids = [status.pid for status in here.values() if process_is_here(status)]
        if not living and not pids:
            return []
        if time.monotonic() > deadline:
            return [f"job {job_id}: still in the queue after {wait_s:.0f} s" for job_id in living] + [
                f"process {pid}: still there after {wait_s:.0f} s" for pid in sorted(set(pids))
            ]
        time.sleep(poll_s)


def _leave_resumable(run_dir: Path) -> None:
    """Mark a run that has not ended otherwise as interrupted, with the reason in its status."""
    status = status_or_none(run_dir)
    if status is not None and status.state not in ("finished", "failed"):
        write_status(run_dir, replace(status, state="interrupted", error=WORD, ended=status.ended or time.time()))
