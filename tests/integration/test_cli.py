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
        "    door = f'grpo_sweeps.{name}' + '.__main__' * (name in ('report', 'credit', 'control', 'export'))\n"
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


PRINTING = (
    "grpo_sweeps", "grpo_sweeps --version", "grpo_sweeps.run --help", "grpo_sweeps.run R=2 --cfg job",
    "grpo_sweeps.run R=2 dry_run=true tracking=local", "grpo_sweeps.run -m R=2,4 dry_run=true tracking=local",
    "grpo_sweeps.check --help", "grpo_sweeps.bench --help", "grpo_sweeps.bench gram --help",
    "grpo_sweeps.bench gram help", "grpo_sweeps.theory --help", "grpo_sweeps.status runs_dir=.",
    "grpo_sweeps.pretrain_tiny --version",
)  # fmt: skip
REFUSED = ("grpo_sweeps.run R=x", "grpo_sweeps.sync nope")  # these write errors alone


@pytest.mark.parametrize(
    ("command", "both"),
    [*((one, False) for one in PRINTING), *((one, True) for one in (*PRINTING, *REFUSED))],
)
def test_nobody_reads_any_more(command: str, both: bool, tmp_path: Path) -> None:
    """`| head` has seen enough, of the output alone or of the errors too: as of a process that SIGPIPE ended."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        stdout=writer, stderr=subprocess.STDOUT if both else subprocess.PIPE, cwd=tmp_path, env=ENVIRONMENT, text=True,
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == 141, done.stderr
    assert both or not any(word in done.stderr for word in ("error", "Traceback", "Broken", "Exception")), done.stderr


def test_without_an_output_a_page_is_no_fault(tmp_path: Path) -> None:
    command = f"{sys.executable} -m grpo_sweeps.theory --help >&- 2>&-"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0


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
