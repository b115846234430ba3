"""Many processes want one run's folder on a file system without locks."""

from __future__ import annotations

import fcntl
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.tracking import locks
from tests.unit.sweep.test_lock import refuse

pytestmark = pytest.mark.integration


def contend(folder: Path, start: float, out: Any) -> None:
    fcntl.flock = refuse  # type: ignore[assignment]
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
