"""Which of the queue's jobs are a sweep's own: by number and token, never by the number alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.sweep.jobs import Submission, comment, new_token, note_jobs, noted_jobs, submission_of, told
from grpo_sweeps.sweep.ledger import decide, job_of
from grpo_sweeps.sweep.queue import Answer, main_id
from grpo_sweeps.tracking.status import RunStatus, write_status

NOW = 1_800_000_000.0
Here = Callable[[str], None]
OURS = Submission("17", "aa", "east", NOW)
RUNS = Answer("yes", "RUNNING", submitted=NOW + 5, comment="mine grpo_sweeps:aa")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    """Sets the cluster that is asked; east at first."""

    def set_name(name: str) -> None:
        monkeypatch.setattr("grpo_sweeps.sweep.jobs.cluster_name", lambda: name)

    set_name("east")
    return set_name


def asked(answer: Answer, submission: Submission = OURS) -> Answer:
    """What the queue's answer means for the job that was submitted as `submission`."""
    return told(answer, submission)


def test_number_and_token_agree(here: Here) -> None:
    assert asked(RUNS) == RUNS and RUNS.sure
    assert asked(replace(RUNS, submitted=None), replace(OURS, time=None)).sure, "a requeue sets the time anew"
    stranger = asked(replace(RUNS, comment="grpo_sweeps:bb"))
    assert (stranger.kind, stranger.reason) == ("no", "the queue's job of that number is another one")
    assert asked(replace(RUNS, comment="grpo_sweeps:aab")).kind == "no", "a token is a whole word"


@pytest.mark.parametrize(("tokens", "comments"), [("aa", ""), ("", "words"), ("", "grpo_sweeps:bb"), ("", "")])
def test_without_a_token_on_one_side_cluster_and_time_decide(tokens: str, comments: str, here: Here) -> None:
    submission, answer = replace(OURS, token=tokens), replace(RUNS, comment=comments)
    assert asked(answer, submission) == replace(answer, sure=False)
    assert asked(replace(answer, submitted=NOW + 3600), submission).kind == "no"
    assert asked(replace(answer, submitted=None), submission).kind == "no"
    unknown = asked(answer, replace(submission, time=None))
    assert unknown.kind == "no" and "may be another one" in unknown.reason, "nothing is known but the number"
    here("west")
    assert asked(answer, submission).kind == "elsewhere"
    here("")
    assert asked(answer, submission).alive, "no scontrol: the time is all there is"


def test_the_job_of_another_cluster_is_not_forgotten(here: Here) -> None:
    """On a shared home: this cluster knows nothing about it, or has a stranger's job of its number."""
    assert asked(Answer("no")).kind == "no"
    here("west")
    for answer in (Answer("no"), replace(RUNS, comment="grpo_sweeps:bb")):
        found = asked(answer)
        assert found.alive and found.text() == (
            "of cluster east, which cannot be asked from here, so the job is taken to be alive"
        )
    assert asked(Answer("unknown")).kind == "unknown"


def test_a_run_that_has_begun_is_not_waited_for_elsewhere(here: Here) -> None:
    here("west")
    queue: Any = Told(Answer("no"))
    kinds = {
        state: job_of(RunStatus(state, job_id="17_0", job_token="aa"), (OURS,), queue).kind  # type: ignore[arg-type]
        for state in ("queued", "running", "interrupted")
    }
    assert kinds == {"queued": "elsewhere", "running": "no", "interrupted": "no"}


class Told:
    """A queue that says what it is told."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def one(self, job_id: str) -> Answer:
        return self.answer


def test_a_strangers_job_is_not_queued_already(tmp_path: Path) -> None:
    run_dir = tmp_path / "abc"
    run_dir.mkdir()
    note_jobs(tmp_path, ["17_3"], "aa")
    write_status(run_dir, RunStatus("queued", job_id="17_3", job_token="aa", host="elsewhere", total=5))
    stranger: Any = Told(Answer("yes", "RUNNING", submitted=time.time(), comment="grpo_sweeps:bb"))
    found = decide(run_dir, 5, None, "abc", stranger)
    assert found.action == "start"
    assert found.reason == "was queued before its first step; job 17_3: the queue's job of that number is another one"
    ours: Any = Told(Answer("yes", "RUNNING", comment="grpo_sweeps:aa"))
    assert decide(run_dir, 5, None, "abc", ours).why == "alive"


def test_a_damaged_list_of_jobs_names_those_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / ".jobs").write_bytes(b"12\n\xff\xfe garbage\n\n13 aa east soon\n14 - -\n")
    assert noted_jobs(tmp_path) == (Submission("12"), Submission("13", "aa", "east"), Submission("14"))
    (tmp_path / "folder" / ".jobs").mkdir(parents=True)
    assert noted_jobs(tmp_path / "folder") == ()


def test_jobs_of_a_sweep_are_written_down(tmp_path: Path) -> None:
    assert noted_jobs(tmp_path) == ()
    note_jobs(tmp_path, ["17_0", "17_1"], "aa", "east")
    note_jobs(tmp_path, ["21"], "bb")
    first, second = noted_jobs(tmp_path)
    assert (first.job_id, first.token, first.cluster) == ("17", "aa", "east")
    assert (second.job_id, second.token, second.cluster) == ("21", "bb", "")
    assert first.time is not None and abs(first.time - time.time()) < 60
    assert main_id("17_3") == main_id("17") == "17"


def test_a_line_of_an_earlier_version_has_the_time_of_its_script(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".jobs").write_text("12\n13\n")
    script = tmp_path / ".submitit" / "12" / "12_submission.sh"
    script.parent.mkdir(parents=True)
    script.touch()
    os.utime(script, (NOW, NOW))
    assert noted_jobs(tmp_path / "mine") == (Submission("12", time=NOW), Submission("13"))


def test_the_submission_of_a_run() -> None:
    again = replace(OURS, token="bb")
    jobs = (OURS, again, Submission("18"))
    assert submission_of("17_3", "aa", jobs) == OURS and submission_of("17", "bb", jobs) == again
    assert submission_of("17_3", None, jobs) == again, "the last one of that number"
    assert submission_of("18_0", None, jobs) == Submission("18")
    assert submission_of("99", None, jobs) is None, "somebody's allocation, in which the run was trained"
    assert submission_of("99", "cc", jobs) == Submission("99", "cc"), "the launcher died before it noted the job"
    assert submission_of(None, None, jobs) is None


def test_the_comment_keeps_the_users_words() -> None:
    assert comment("aa") == "grpo_sweeps:aa" and comment("aa", "my words") == "my words grpo_sweeps:aa"
    assert len({new_token() for _ in range(100)}) == 100
