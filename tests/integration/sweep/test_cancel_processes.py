"""python -m grpo_sweeps.cancel on a sweep that runs in processes of this machine."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_sweeps.tracking.status import read_status
from tests.slurm.conftest import LOOP
from tests.unit.sweep.conftest import BASE

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("launcher", ["basic", "submitit_local"])
def test_processes_of_this_machine_are_interrupted(launcher: str, workplace: Path) -> None:
    (workplace / "site" / "sitecustomize.py").write_text(LOOP)
    (workplace / "hold").touch()
    command = [sys.executable, "-m", "grpo_sweeps.run", "-m", *BASE, "R=2,4", f"hydra/launcher={launcher}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    folder = workplace / "runs" / "adhoc"
    deadline = time.monotonic() + 60
    while sorted(read_status(path.parent).state for path in folder.glob("*/status.json")) != ["queued", "running"]:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    while not list(folder.glob("*/metrics.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    done = subprocess.run(
        [sys.executable, "-m", "grpo_sweeps.cancel", "sweep=adhoc"], capture_output=True, text=True, timeout=120
    )
    said = process.communicate(timeout=60)[1]
    assert done.returncode == 0 and "sweep adhoc: 2 runs cancelled" in done.stderr, (done.stderr, said)
    assert process.returncode == 130, said
    statuses = [read_status(path.parent) for path in folder.glob("*/status.json")]
    assert {(status.state, status.error) for status in statuses} == {("interrupted", "cancelled")}
    (workplace / "hold").unlink()
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0 and "2 of 2 runs finished" in again.stderr, again.stderr
