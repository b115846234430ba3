"""The jobs that were submitted for a sweep, and whether a job in SLURM's queue is one of them.

A job's number alone does not tell: once a controller has lost its state, and on another cluster of a shared home, a
stranger's job has the same one. So each submission puts a token, a random word, into the comment of its jobs, and a
line into the sweep's folder: number, token, cluster, time. Number and token must agree. Where one of the two has no
token (a line of an earlier version, a site that overwrites comments), cluster and time of the submission must agree
instead; then the job is taken to be the run's, but nobody cancels it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_sweeps.sweep.queue import Answer, cluster_name, main_id

JOBS_FILE = ".jobs"  # in a sweep's folder: one line per array or job
SIGN = "grpo_sweeps:"  # a word of a job's comment that begins so holds its token
SAME_TIME_S = 60.0  # between our note of a submission and SLURM's: their clocks differ, and a controller may be slow
SCRIPT = "{id}_submission.sh"  # as Submitit names it
ANOTHER = "the queue's job of that number is another one"
UNKNOWN = "the queue's job of that number may be another one (nothing but the number is known), so it is not believed"
NOTHING = "-"  # stands in a line for what is not known


@dataclass(frozen=True)
class Submission:
    """One array or job. `time` in seconds since the epoch; what is empty or None is not known."""

    job_id: str
    token: str = ""
    cluster: str = ""
    time: float | None = None


Jobs = tuple[Submission, ...]


def new_token() -> str:
    return secrets.token_hex(8)


def comment(token: str, own: str | None = None) -> str:
    """The comment of a job: the user's own and the token."""
    return f"{own} {SIGN}{token}" if own else f"{SIGN}{token}"


def note_jobs(sweep_folder: Path, job_ids: Iterable[str], token: str, cluster: str = "") -> None:
    """Write down that these jobs were submitted for the sweep just now."""
    rest = f"{token or NOTHING} {cluster or NOTHING} {time.time():.1f}"
    with open(sweep_folder / JOBS_FILE, "a", encoding="utf-8") as file:
        file.writelines(f"{job_id} {rest}\n" for job_id in sorted({main_id(job_id) for job_id in job_ids}))


def noted_jobs(sweep_folder: Path) -> Jobs:
    """What was submitted for a sweep, in the order of time; lines that cannot be read are left out.

    A run that was trained inside somebody's interactive allocation carries that allocation's id and is none of these:
    the allocation does not say whether the run lives, and must not be cancelled.
    """
    try:
        lines = (sweep_folder / JOBS_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # none, or nothing that can be read: then the status files are all there is to go by
        return ()
    found = (_read(line.split(), sweep_folder.parent) for line in lines)
    return tuple(one for one in found if one is not None)


def _read(words: list[str], runs_dir: Path) -> Submission | None:
    if not words or not words[0].isdigit():
        return None
    if len(words) == 1:  # of a version that wrote no more; Submitit wrote its script just before the submission
        script = runs_dir / ".submitit" / words[0] / SCRIPT.format(id=words[0])
        return Submission(words[0], time=script.stat().st_mtime if script.is_file() else None)
    job_id, token, cluster, when = (*words, NOTHING, NOTHING, NOTHING)[:4]
    token, cluster = ("" if word == NOTHING else word for word in (token, cluster))
    return Submission(job_id, token, cluster, _number(when))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def submission_of(job_id: str | None, token: str | None, jobs: Jobs) -> Submission | None:
    """The submission of the job that a run's status names; None where it is none of ours."""
    if job_id is None:
        return None
    same = [one for one in jobs if one.job_id == main_id(job_id) and token in (None, one.token)]
    if same:
        return same[-1]
    return Submission(main_id(job_id), token) if token else None  # the launcher died before it noted the job


def told(answer: Answer, submission: Submission) -> Answer:
    """What the queue's answer for a job's number says about the job itself."""
    if answer.kind == "yes":
        signs = [word for word in answer.comment.split() if word.startswith(SIGN)]
        if submission.token and SIGN + submission.token in signs:
            return answer
        certain = bool(signs and submission.token) or None not in (answer.submitted, submission.time)
        if not (signs and submission.token) and _same_time(answer, submission) and not _elsewhere(submission):
            return replace(answer, sure=False)
        answer = Answer("no", reason=ANOTHER if certain else UNKNOWN)
    if answer.kind == "no" and _elsewhere(submission):
        return Answer("elsewhere", reason=submission.cluster)
    return answer


def _same_time(answer: Answer, submission: Submission) -> bool:
    known = answer.submitted is not None and submission.time is not None
    return known and abs((answer.submitted or 0.0) - (submission.time or 0.0)) <= SAME_TIME_S


def _elsewhere(submission: Submission) -> bool:
    """True when the job is of another cluster than the one that is asked."""
    return bool(submission.cluster) and cluster_name() not in ("", submission.cluster)
