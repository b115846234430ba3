"""One writer a run, with locks and on a file system that has none."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.sweep.execute import ELSEWHERE, execute
from grpo_sweeps.tracking import locks
from grpo_sweeps.tracking.status import RunStatus, process_started, read_status, write_status
from tests.unit.sweep.conftest import frozen_config


def refuse(*_: Any) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(locks, "SETTLE_S", 0.3)


def test_a_lock_keeps_the_second_out(tmp_path: Path) -> None:
    with locks.only_writer(tmp_path) as first, locks.only_writer(tmp_path) as second:
        assert first is not None and first() and second is None
    with locks.only_writer(tmp_path) as third:
        assert third is not None


def test_a_refused_second_does_not_free_the_first(tmp_path: Path) -> None:
    """Closing any descriptor of the file would free the lock towards other processes."""
    with locks.only_writer(tmp_path) as first:
        opened = set(os.listdir("/proc/self/fd"))
        with locks.only_writer(tmp_path) as second:
            assert second is None and set(os.listdir("/proc/self/fd")) == opened
        assert first is not None and first()


def test_a_waiting_lock_is_had_once_it_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    free, has = threading.Event(), threading.Event()

    def hold() -> None:
        with locks.locked(path, 0.0) as held:
            assert held
            has.set()
            free.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert has.wait(10)
    with locks.locked(path, 0.0) as held:
        assert not held
    free.set()
    with locks.locked(path, 10.0) as held:
        assert held
    thread.join()


def test_an_error_that_is_no_missing_lock_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "lockf", broken)
    with pytest.raises(OSError, match="Input/output"), locks.only_writer(tmp_path):
        pass


def test_without_locks_a_running_run_is_left_alone(no_locks: None, tmp_path: Path) -> None:
    own = dict(host=socket.gethostname(), pid=os.getpid(), pid_started=process_started(os.getpid()))
    write_status(tmp_path, RunStatus("running", **own))  # type: ignore[arg-type]
    with locks.only_writer(tmp_path) as mine:
        assert mine is None
    write_status(tmp_path, RunStatus("running", **{**own, "pid_started": 1}))  # type: ignore[arg-type]
    with locks.only_writer(tmp_path, 0.0) as mine:
        assert mine is not None and mine()


def test_a_run_whose_folder_is_taken_stops_and_writes_nothing(
    no_locks: None, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []

    def train(config: Any, run_dir: Path, watch: Any, name: str) -> None:
        watch.begin(0)
        for step in range(3):
            done.append(step)
            if step == 1:  # another host has waited for this one's heartbeat in vain, and goes on with the run
                (run_dir / locks.OWNER_FILE).write_text("another\n")
                write_status(run_dir, RunStatus("running", host="another", step=7, heartbeat=time.time()))
            watch(step + 1, 3, {})

    monkeypatch.setitem(sys.modules, "grpo_sweeps.loop.train", types.SimpleNamespace(train=train))
    monkeypatch.setattr(locks, "SETTLE_S", 0.0)
    result = execute(frozen_config(), workplace / "one", name="mine")
    assert result.elsewhere and result.ok and result.error == ELSEWHERE and done == [0, 1]
    assert (read_status(workplace / "one").host, read_status(workplace / "one").step) == ("another", 7)
