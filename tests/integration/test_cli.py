"""Commands in processes of their own: what a page or a refusal loads, and the list of commands as a way in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_cli import ROOT

pytestmark = pytest.mark.integration

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def test_pages_and_refusals_load_nothing_heavy(tmp_path: Path) -> None:
    heavy = ["torch", "transformers", "datasets", "mlflow", "pandas", "matplotlib"]
    program = (
        "import importlib, json, sys\n"
        "from grpo_sweeps.__main__ import COMMANDS\n"
        "codes = []\n"
        "for name in COMMANDS:\n"
        "    door = f'grpo_sweeps.{name}' + '.__main__' * (name in ('report', 'credit'))\n"
        "    for words in (['--help'], ['--version'], ['nope']):\n"
        "        codes.append(importlib.import_module(door).main(words))\n"
        "        if name == 'bench':\n"
        "            codes.append(importlib.import_module(door).main(['gram', *words]))\n"
        f"print(); print(json.dumps([sorted(set(codes)), [n for n in {heavy!r} if n in sys.modules]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[0, 2], []]


@pytest.mark.parametrize("name", ["report", "status", "run"])
def test_words_exit_code_and_output_pass_through(name: str, tmp_path: Path) -> None:
    words = ["runs_dir=nowhere", "redo=maybe"] if name == "run" else ["runs_dir=nowhere"]
    ways = ([sys.executable, "-m", f"grpo_sweeps.{name}"], [sys.executable, "-m", "grpo_sweeps", name])
    one, two = (
        subprocess.run([*way, *words], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
        for way in ways
    )
    assert one.returncode == two.returncode == 2 and one.stdout == two.stdout == ""
    assert one.stderr == two.stderr and one.stderr.startswith("error: ")
