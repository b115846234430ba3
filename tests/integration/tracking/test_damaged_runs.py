"""A refused address in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.tracking import test_damaged_runs as unit

pytestmark = pytest.mark.integration
sweep = unit.sweep  # the fixture of the unit tests


def test_a_refused_address_ends_the_command_before_mlflow_is_imported(sweep: Path) -> None:
    code = "import sys; from grpo_sweeps import sync; c = sync.main(sys.argv[1:]); assert 'mlflow' not in sys.modules;"
    words = ["sweep=mine", f"runs_dir={sweep.parent}", "uri=ftp://x"]
    done = subprocess.run([sys.executable, "-c", code + "sys.exit(c)", *words], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "ftp://" in done.stderr
