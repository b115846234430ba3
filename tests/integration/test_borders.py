"""What light modules and --help load, seen in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_borders import HEAVY, ROOT

pytestmark = pytest.mark.integration


def test_light_modules_load_neither_torch_nor_mlflow() -> None:
    names = ("types", "config", "config.checks", "config.functions", "cli", "status", "cancel")
    names += ("run", "report.read.query")
    modules = ["grpo_sweeps", *(f"grpo_sweeps.{name}" for name in names)]
    program = (
        "import importlib, json, sys\n"
        f"def loaded(name): importlib.import_module(name); return [n for n in {HEAVY} if n in sys.modules]\n"
        f"print(json.dumps({{name: loaded(name) for name in {modules}}}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: [] for name in modules}


def test_help_loads_neither_torch_nor_mlflow(tmp_path: Path) -> None:
    program = (
        "import atexit, runpy, sys\n"
        "sys.argv = ['grpo_sweeps.run', '--help']\n"
        f"def tell(): print('HEAVY', [n for n in {HEAVY} if n in sys.modules])\n"
        "atexit.register(tell)\n"
        "runpy.run_module('grpo_sweeps.run', run_name='__main__')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout
