"""When a job counts as ended: its run's status, SLURM's queue, Submitit's own view."""

from __future__ import annotations

import time
import types
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.sweep.queue import Answer
from grpo_sweeps.sweep.submit import last_words, wait
from grpo_sweeps.tracking.status import RunStatus, read_status, write_status

YES, NO, UNKNOWN, ABSENT = (
    Answer("yes", "PENDING", "Resources", comment="grpo_sweeps:aa"), Answer("no"),
    Answer("unknown", reason="TimeoutExpired"), Answer("absent"),
)  # fmt: skip


class Script:
    """A queue that gives one answer after the other, the last one for ever, and acts before some of them."""

    def __init__(self, *answers: Answer, actions: dict[int, Any] | None = None) -> None:
        self.answers, self.actions, self.asked = answers, actions or {}, 0

    def ask(self, job_ids: Any) -> dict[str, Answer]:
        if action := self.actions.get(self.asked):
            action()
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        return dict.fromkeys(job_ids, answer)


class Job:
    job_id, state = "17_3", "UNKNOWN"

    def __init__(self, folder: Path, done: bool = False) -> None:
        self.paths = types.SimpleNamespace(stderr=folder / "17_3_0_log.err")
        self._done = done

    def done(self) -> bool:
        return self._done


class Run(types.SimpleNamespace):
    __hash__ = object.__hash__


def waited(folder: Path, queue: Script, done: bool = False, gone_s: float = 0.0) -> Any:
    run: Any = Run(run_dir=folder, identity="abc", name="R=4")
    job = Job(folder, done)
    (result,) = wait({run: job}, 0.01, "aa", queue, gone_s)  # type: ignore[arg-type]
    return result


def note(folder: Path, state: Any, **more: Any) -> None:
    write_status(
        folder,
        RunStatus(state=state, identity="abc", heartbeat=time.time(), host="elsewhere", **({"job_id": "17_3"} | more)),
    )


def test_a_killed_run_whose_job_waits_again_is_waited_for(tmp_path: Path) -> None:
    """Its status is stale (or says interrupted): both were taken for the end once."""
    for state in ("running", "interrupted"):
        write_status(tmp_path, RunStatus(state=state, identity="abc", heartbeat=0.0, step=2, host="elsewhere"))
        queue = Script(YES, YES, YES, actions={3: lambda: note(tmp_path, "finished", step=5)})
        result = waited(tmp_path, queue)
        assert (result.state, result.step) == ("finished", 5) and queue.asked >= 4


def test_a_silent_controller_ends_nothing_and_is_mentioned_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_status(tmp_path, RunStatus(state="running", identity="abc", heartbeat=0.0, host="elsewhere"))
    queue = Script(UNKNOWN, UNKNOWN, UNKNOWN, NO)
    assert waited(tmp_path, queue).state == "interrupted"
    assert queue.asked >= 4 and capfd.readouterr().err.count("squeue does not answer") == 1


def test_a_strangers_job_of_the_same_number_is_not_waited_for(tmp_path: Path) -> None:
    """After a controller has lost its state, it gives numbers a second time."""
    note(tmp_path, "running")
    queue = Script(YES, Answer("yes", "RUNNING", comment="grpo_sweeps:bb"))
    result = waited(tmp_path, queue)
    assert result.state == "interrupted" and "ended without a word" in result.error


def test_a_job_that_does_not_start_by_itself_is_mentioned_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    note(tmp_path, "queued")
    held = Answer("yes", "PENDING", "job requeued in held state", comment="grpo_sweeps:aa")
    waited(tmp_path, Script(YES, held, held, held, NO))
    err = capfd.readouterr().err
    assert err == ("still waiting: job 17_3 is held; scontrol release lets it start (job requeued in held state)\n")


def test_a_forgotten_job_is_given_time_for_its_last_word(tmp_path: Path) -> None:
    note(tmp_path, "running", step=4)
    queue = Script(NO, actions={5: lambda: note(tmp_path, "finished", step=5)})
    assert waited(tmp_path, queue, gone_s=60.0).state == "finished"


def test_a_job_that_died_before_it_could_write_anything(tmp_path: Path) -> None:
    note(tmp_path, "queued")
    (tmp_path / "17_3_0_log.err").write_text(
        "loading\n\nbash: line 3: module: command not found\n/opt/python: \x1bNot found\n"
    )
    result = waited(tmp_path, Script(NO))
    assert result.state == "interrupted"
    assert "job 17_3 ended without a word; its last words: loading | bash: line 3: module: command not found" in str(
        result.error
    )


def test_the_queue_decides_before_submitit(tmp_path: Path) -> None:
    """Submitit's done() asks sacct, which may be missing: it is asked only where there is no squeue."""
    note(tmp_path, "running", step=1)
    queue = Script(YES, actions={2: lambda: note(tmp_path, "failed", error="boom")})
    assert waited(tmp_path, queue, done=True).error == "boom"
    note(tmp_path, "running", step=1)
    assert waited(tmp_path, Script(ABSENT), done=True).state == "interrupted"
    write_status(tmp_path, RunStatus(state="running", identity="abc", heartbeat=0.0, host="elsewhere"))
    assert waited(tmp_path, Script(ABSENT)).state == "interrupted"


def test_a_run_that_another_process_holds_is_left_to_it(tmp_path: Path) -> None:
    """The job ended at once because somebody else runs the run: its status is not this job's to end."""
    note(tmp_path, "running", step=4, total=9, job_id="16_3")
    result = waited(tmp_path, Script(NO))
    assert (result.state, result.step, result.total) == ("running", 4, 9)
    assert read_status(tmp_path).state == "running"


def test_last_words_are_short(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert last_words(path) == ""
    path.write_bytes(b"x" * 10_000 + b"\na\xff\n  b   c\n\nd\n")
    assert last_words(path) == "a\ufffd | b c | d"
