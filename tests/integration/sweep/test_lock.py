"""Several processes want one run's folder: with locks, whose holder may be killed, and without any."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.tracking import locks
from tests.unit.sweep.test_lock import refuse

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[3]
HOLDER = """
import os, sys, time
from pathlib import Path
from grpo_sweeps.tracking.locks import locked, only_writer
folder = Path(sys.argv[1])
with only_writer(folder) as mine, locked(folder / "waiting", 0.0) as held:
    helper = os.fork() if {forks} else 1
    if helper:
        print(helper if mine and held else "refused", flush=True)
    time.sleep(60)
"""
FORKS, HOLDER = HOLDER.format(forks=True), HOLDER.format(forks=False)


@contextlib.contextmanager
def holder(program: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that holds the locks of a folder, and the process that it has forked."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    helper = int(process.stdout.readline())
    try:
        yield process, helper
    finally:
        process.kill()
        process.wait()
        if helper != 1:
            os.kill(helper, signal.SIGKILL)
        process.stdout.close()


def test_a_killed_holder_leaves_no_lock_to_what_it_has_forked(tmp_path: Path) -> None:
    """A reward that forks a helper, and kill -9 of the run."""
    with holder(FORKS, tmp_path) as (process, helper):
        with locks.only_writer(tmp_path) as mine, locks.locked(tmp_path / "waiting", 0.0) as held:
            assert mine is None and not held
        process.kill()
        process.wait()
        os.kill(helper, 0)  # it lives
        with locks.only_writer(tmp_path) as mine, locks.locked(tmp_path / "waiting", 0.0) as held:
            assert mine is not None and mine() and held


def test_a_forked_child_does_not_hold_what_its_parent_holds(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    out = context.Queue()

    def ask() -> None:
        with locks.only_writer(tmp_path) as mine:
            out.put(mine is None)

    with locks.only_writer(tmp_path) as mine:
        assert mine is not None
        process = context.Process(target=ask)
        process.start()
        assert out.get(timeout=30)
        process.join()
        process = context.Process(target=ask)  # the first one's end has freed nothing
        process.start()
        assert out.get(timeout=30)
        process.join()


def contend(folder: Path, start: float, out: Any) -> None:
    fcntl.lockf = refuse  # type: ignore[assignment]
    time.sleep(max(0.0, start - time.time()))
    with locks.only_writer(folder, settle_s=0.5) as mine:
        time.sleep(0.5)
        out.put(mine is not None and mine())


def test_of_many_without_locks_one_has_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    start = time.time() + 0.3
    processes = [context.Process(target=contend, args=(tmp_path, start, out)) for _ in range(6)]
    for process in processes:
        process.start()
    held = [out.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(held) == [False] * 5 + [True]
