"""The commands in examples/ and the README are understood: each is composed and checked as a dry run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.integration


def documented(file: Path, start: str) -> list[str]:
    """The commands of a file that begin with `start`, continued lines joined, comments cut off."""
    text = file.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = (line.strip() for line in text.splitlines())
    return [line.split("  #")[0].strip() for line in lines if line.startswith(start)]


def dry_run(command: str, runs_dir: Path) -> subprocess.CompletedProcess[str]:
    words = [word for word in shlex.split(command)[3:] if not word.startswith(("hydra/launcher", "hydra.launcher"))]
    return subprocess.run(
        [sys.executable, "-m", "grpo_sweeps.run", *words, "dry_run=true", f"runs_dir={runs_dir}"],
        cwd=EXAMPLES,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


COMMANDS = [
    command
    for file in (ROOT / "README.md", *sorted(EXAMPLES.glob("my_*.py")))
    for command in documented(file, "python -m grpo_sweeps.run ")
]


def test_every_example_names_its_command() -> None:
    for file in EXAMPLES.glob("my_*.py"):
        assert documented(file, "python -m grpo_sweeps.run "), file
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_command_composes(command: str, tmp_path: Path) -> None:
    if "$HOME" in command:  # the files it names are the reader's: stand-ins, since the paths are checked
        folder = tmp_path / "data" / "gsm8k"
        folder.mkdir(parents=True)
        for split in ("train", "test"):
            lines = [
                {"question": f"{split}: {i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"} for i in range(256)
            ]
            (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
        command = command.replace("$HOME", str(tmp_path))
    done = dry_run(command, tmp_path / "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dry run" in done.stdout + done.stderr
    assert not (tmp_path / "runs").exists()
