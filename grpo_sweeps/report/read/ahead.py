"""Makes what is kept of large runs in several processes, before this one reads it.

A run's groups are many small arrays, for which numpy leaves the interpreter to other threads too seldom: threads share
two processors as if they were one and a fifth. A helper keeps what it makes beside the run (`cache`, `alternatives`),
where it is read as if an earlier report had made it. What a helper does not make is made here: nothing depends on one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_sweeps.report.read.alternatives import run_values
from grpo_sweeps.report.read.cache import GroupRows, RowCache
from grpo_sweeps.report.read.kept import CacheUse
from grpo_sweeps.text import show
from grpo_sweeps.tracking.children import python_path

LEAST = 5 * 10**6  # bytes of records to go through: of fewer, the start of a process takes longer than it saves
MOST_HELPERS = 16


@dataclass(frozen=True)
class RunToRead:
    """A run of group size R, its seed and its model's dtype, as `cache` and `alternatives` are given them."""

    path: str
    seed: int
    R: int
    dtype: str | None

    @property
    def rows(self) -> GroupRows:
        folder = Path(self.path)
        return GroupRows(folder, self.seed, self.dtype, RowCache(folder, self.seed, self.dtype, CacheUse()))


def make_ahead(runs: Sequence[RunToRead], processors: int, progress: Callable[[str], None]) -> None:
    """Have the kept tables of the runs that lack them made by as many helpers as there are processors; returns when all
    have ended. Does nothing where that would not pay."""
    sizes = {run: run.rows.bytes_to_measure() for run in runs}
    lacking = sorted((run for run in runs if sizes[run]), key=lambda run: -sizes[run])
    number = min(processors, len(lacking), MOST_HELPERS)
    if number < 2 or sum(sizes.values()) < LEAST:
        return
    command, lock, done = [sys.executable, "-m", __name__], threading.Lock(), 0

    def count(helper: subprocess.Popen[str]) -> None:
        nonlocal done
        assert helper.stdout is not None
        for _ in helper.stdout:
            with lock:
                done += 1
                progress(f"{done} of {len(lacking)} runs are measured")

    helpers = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "PYTHONPATH": python_path()},
        )
        for _ in range(number)
    ]  # fmt: skip
    try:
        threads = [threading.Thread(target=count, args=(helper,), daemon=True) for helper in helpers]
        for at, (helper, thread) in enumerate(zip(helpers, threads, strict=True)):
            thread.start()
            _send(helper, lacking[at::number])
        for helper, thread in zip(helpers, threads, strict=True):
            thread.join()
            helper.wait()
    finally:
        for helper in helpers:
            helper.kill()
            helper.wait()


def _send(helper: subprocess.Popen[str], runs: Sequence[RunToRead]) -> None:
    assert helper.stdin is not None
    try:
        helper.stdin.write(json.dumps([asdict(run) for run in runs]))
        helper.stdin.close()
    except BrokenPipeError:
        return  # it could not start; its runs are read here


def main() -> int:
    """A helper: reads a list of runs from its standard input and prints a line for each."""
    for given in json.load(sys.stdin):
        run = RunToRead(**given)
        try:
            run.rows.rows()
            run_values(Path(run.path), run.seed, run.R, run.dtype)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # whoever reads the run says what is wrong with it
        show(run.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
