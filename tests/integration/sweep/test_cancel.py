"""python -m grpo_sweeps.cancel beside other processes and in one of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.sweep.cancel import cancel
from tests.unit.sweep import test_cancel as unit
from tests.unit.sweep.test_cancel import ROOT, note

pytestmark = pytest.mark.integration
slurm = unit.slurm  # the fixture of the unit tests


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_process_that_is_no_command_of_ours_is_left_alone(tmp_path: Path, stranger: Any, slurm: Any) -> None:
    slurm("")
    folder = tmp_path / "runs" / "mine"
    note(folder, "one", "running", host=socket.gethostname(), pid=stranger.pid)
    found = cancel(folder, wait_s=1, poll_s=0.01)
    assert found.problems == (f"one: process {stranger.pid} is no command of this package; end it yourself",)
    assert stranger.poll() is None
    note(folder, "two", "running", host=socket.gethostname(), pid=stranger.pid, pid_started=1)
    assert len(cancel(folder, wait_s=1, poll_s=0.01).problems) == 1, "the id was given to another process"


def test_heavy_packages_stay_out(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    program = (
        "import sys; from grpo_sweeps.cancel import main; code = main([sys.argv[1], 'sweep=mine']); "
        "print(code, sorted({'torch', 'mlflow', 'pandas', 'hydra', 'submitit'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, f"runs_dir={tmp_path}"],
        capture_output=True, text=True, cwd=ROOT, check=True, env={**os.environ},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "0 []"
