"""What a status on disk means for a run that is asked for again."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.sweep.ledger import decide, is_alive, job_is_queued, set_aside
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
        ({"state": "failed", "step": 2}, None, "continue"),
        ({"state": "failed", "step": 0}, None, "start"),
        ({"state": "interrupted", "step": 2}, None, "continue"),
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


def test_a_run_of_another_host_lives_by_its_heartbeat() -> None:
    assert is_alive(status("running", host="elsewhere"))
    old = RunStatus(state="running", host="elsewhere", pid=1, heartbeat=time.time() - 10_000)
    assert not is_alive(old)


def test_queue_is_asked_by_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not job_is_queued("17_3")  # no squeue
    fake = tmp_path / "squeue"
    fake.write_text('#!/bin/sh\n[ "$3" = 17_3 ] && echo RUNNING\nexit 0\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert job_is_queued("17_3")
    assert not job_is_queued("18")
    assert is_alive(status("queued", job_id="17_3"))


def test_a_replaced_folder_is_kept(tmp_path: Path) -> None:
    run_dir = tmp_path / "abc"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("1")
    set_aside(run_dir)
    assert not run_dir.exists()
    (kept,) = (tmp_path / ".replaced").iterdir()
    assert (kept / "metrics.jsonl").read_text() == "1"
    set_aside(run_dir)  # nothing there: nothing to do
