"""What a status on disk means for a run that is asked for again."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.sweep.jobs import note_jobs
from grpo_sweeps.sweep.ledger import decide, set_aside, where_alive
from grpo_sweeps.sweep.queue import Answer
from grpo_sweeps.tracking.status import RunStatus, write_status

DEAD = 2**22 + 1  # above any process id of Linux


def status(state: Any, **fields: Any) -> RunStatus:
    base: dict[str, Any] = {"step": 5, "total": 5, "host": socket.gethostname(), "pid": DEAD, "commit": "abc"}
    return RunStatus(state=state, heartbeat=time.time(), **(base | fields))


@pytest.mark.parametrize(
    ("fields", "redo", "action"),
    [
        ({"state": "finished"}, None, "skip"),
        ({"state": "finished", "step": 3, "total": 3}, None, "continue"),
        ({"state": "finished", "step": 9, "total": 9}, None, "skip"),
        ({"state": "finished", "step": 3, "total": 3, "ended_by": "trainer.tokens"}, None, "skip"),
        ({"state": "interrupted", "step": 3, "total": 3, "ended_by": "trainer.tokens"}, None, "continue"),
        ({"state": "failed", "step": 2}, None, "skip"),
        ({"state": "failed", "step": 0}, None, "skip"),
        ({"state": "interrupted", "step": 2}, None, "continue"),
        ({"state": "interrupted", "step": 0}, None, "start"),
        ({"state": "interrupted", "step": 2, "commit": "old"}, None, "skip"),
        ({"state": "interrupted", "step": 2, "commit": "old"}, "failed", "skip"),
        ({"state": "interrupted", "step": 2, "commit": "old"}, "stale", "redo"),
        ({"state": "interrupted", "step": 0, "commit": "old"}, None, "start"),
        ({"state": "running", "step": 2, "commit": "old"}, None, "skip"),
        ({"state": "running", "step": 2, "commit": "old", "pid": os.getpid()}, "stale", "skip"),
        ({"state": "queued", "step": 0, "commit": None}, None, "start"),
        ({"state": "finished", "step": 3, "total": 3, "commit": "old"}, None, "skip"),
        ({"state": "running", "step": 2}, None, "continue"),
        ({"state": "queued", "step": 0}, None, "start"),
        ({"state": "running", "pid": os.getpid()}, None, "skip"),
        ({"state": "running", "pid": os.getpid()}, "all", "skip"),
        ({"state": "queued", "pid": os.getpid()}, None, "skip"),
        ({"state": "finished"}, "all", "redo"),
        ({"state": "finished"}, "failed", "skip"),
        ({"state": "failed"}, "failed", "redo"),
        ({"state": "finished"}, "stale", "skip"),
        ({"state": "finished", "commit": "old"}, "stale", "redo"),
    ],
)
def test_decision(tmp_path: Path, fields: dict[str, Any], redo: str | None, action: str) -> None:
    write_status(tmp_path, status(**fields))
    assert decide(tmp_path, 5, redo, "abc").action == action


def test_new_and_unreadable_folders_start(tmp_path: Path) -> None:
    assert decide(tmp_path / "none", 5, None, "abc").action == "start"
    (tmp_path / "status.json").write_text("{half")
    assert decide(tmp_path, 5, None, "abc").action == "start"


@pytest.mark.parametrize("content", [None, b"", b'{"state": "fin', b"\xff\xfe\x00"])
def test_records_without_a_status_wait_for_redo(tmp_path: Path, content: bytes | None) -> None:
    """By whom they were made is not known, so nothing may be added to them."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": 0.5}\n')
    if content is not None:
        (tmp_path / "status.json").write_bytes(content)
    found = decide(tmp_path, 5, None, "abc")
    assert (found.action, found.why) == ("skip", "failed") and "redo=failed makes it afresh" in found.reason
    assert {redo: decide(tmp_path, 5, redo, "abc").action for redo in ("all", "failed", "stale")} == {
        "all": "redo", "failed": "redo", "stale": "skip",
    }  # fmt: skip


def test_a_run_of_another_host_lives_by_its_heartbeat() -> None:
    assert where_alive(status("running", host="elsewhere"))
    old = RunStatus(state="running", host="elsewhere", pid=1, heartbeat=time.time() - 10_000)
    assert not where_alive(old)


class Told:
    """A queue that says what it is told."""

    def __init__(self, *answer: Any) -> None:
        self.answer = Answer(*answer)

    def one(self, job_id: str) -> Answer:
        return self.answer


NOW = time.time()
YES, NO, UNKNOWN, ABSENT = (
    ("yes", "PENDING", "Resources", "", NOW, "grpo_sweeps:aa"),
    ("no",),
    ("unknown", "", "TimeoutExpired"),
    ("absent",),
)


@pytest.mark.parametrize("state", ["queued", "running", "interrupted"])
@pytest.mark.parametrize(
    ("answer", "action"), [(YES, "skip"), (UNKNOWN, "skip"), (NO, "continue"), (ABSENT, "continue")]
)
def test_a_job_that_the_queue_knows_is_alive_whatever_the_status_says(
    tmp_path: Path, state: Any, answer: Any, action: str
) -> None:
    """A requeued job has left `running` or `interrupted` behind and is pending again."""
    run_dir = tmp_path / "abc"
    run_dir.mkdir()
    note_jobs(tmp_path, ["17_3"], "aa")
    write_status(run_dir, status(state, step=2, job_id="17_3", job_token="aa"))
    decision = decide(run_dir, 5, None, "abc", Told(*answer))  # type: ignore[arg-type]
    assert decision.action == action
    if answer == YES:
        assert decision.reason == "queued already (job 17_3: PENDING, Resources)" and decision.why == "alive"
    if answer == UNKNOWN:
        assert "squeue does not answer (TimeoutExpired), so the job is taken to be alive" in decision.reason


@pytest.mark.parametrize("state", ["finished", "failed"])
def test_an_ended_run_is_not_asked_about(tmp_path: Path, state: Any) -> None:
    write_status(tmp_path, status(state, job_id="17_3"))
    assert decide(tmp_path, 5, None, "abc", Told(*YES)).why == state  # type: ignore[arg-type]


def test_the_allocation_that_a_run_was_trained_in_is_not_its_job(tmp_path: Path) -> None:
    write_status(tmp_path, status("interrupted", step=2, job_id="99"))
    assert decide(tmp_path, 5, None, "abc", Told(*YES)).action == "continue"  # type: ignore[arg-type]


def test_reasons_name_what_to_do(tmp_path: Path) -> None:
    write_status(tmp_path, status("failed", step=2, error="RuntimeError: boom"))
    assert decide(tmp_path, 5, None, "abc").reason == "failed at step 2: RuntimeError: boom; redo=failed runs it again"
    write_status(tmp_path, status("interrupted", step=2, commit="0123456789"))
    assert decide(tmp_path, 5, None, "abc").reason == (
        "stale: interrupted at step 2 of 5 by another commit (0123456); redo=stale makes it afresh"
    )


def test_a_replaced_folder_is_kept(tmp_path: Path) -> None:
    run_dir = tmp_path / "abc"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("1")
    set_aside(run_dir)
    assert not run_dir.exists()
    (kept,) = (tmp_path / ".replaced").iterdir()
    assert (kept / "metrics.jsonl").read_text() == "1"
    set_aside(run_dir)  # nothing there: nothing to do
