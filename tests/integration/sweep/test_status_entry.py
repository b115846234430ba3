"""python -m grpo_sweeps.status in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.sweep import test_status_entry as unit

pytestmark = pytest.mark.integration
runs = unit.runs  # the fixture of the unit tests


def test_a_reader_that_has_seen_enough(runs: Path) -> None:
    command = f"{sys.executable} -m grpo_sweeps.status runs_dir={runs} json=true"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -c 1"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    # the code of `head`, or with pipefail that of a process that SIGPIPE ended
    assert done.returncode in (0, 141)
    assert all(
        "cannot be read" in line for line in done.stderr.splitlines()
    )  # of the damaged run, where it came to that


def test_heavy_packages_stay_out(runs: Path) -> None:
    program = (
        "import sys; from grpo_sweeps.status import main; code = main([sys.argv[1]]); "
        "print(code, sorted({'torch', 'mlflow', 'pandas', 'hydra'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program, f"runs_dir={runs}"], capture_output=True, text=True, cwd=root, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []"
