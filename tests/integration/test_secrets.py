"""A run that is given a secret has it, goes on with it, and writes it nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_sweeps import verify
from grpo_sweeps.sweep.named import frozen_config
from grpo_sweeps.types import ConfigError

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
SECRET = "Zq7xW2mK9vB4tR8y"
REWARD = f"""
def judge(completion, problem, seed, api_key=""):
    if api_key != {SECRET[::-1]!r}[::-1]:
        raise ValueError("another key")
    return float(seed % 2)
"""


def run(place: Path, *words: str) -> str:
    """The end of a command in `place`, whose own module the reward is of."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{place}", "MY_KEY": SECRET}
    command = [
        sys.executable, "-m", "grpo_sweeps.run", "R=2", "trainer.prompts=1", "trainer.eval_every=0", "analysis.every=0",
        "tracking=local", "reward=custom", "reward._target_=mine.judge", *words,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("given", [f"+reward.api_key={SECRET}", "+reward.api_key=${oc.env:MY_KEY}"])
def test_a_run_has_its_secret_and_writes_it_nowhere(tmp_path: Path, given: str) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    said = run(tmp_path, given, "trainer.steps=1")
    said += run(tmp_path, given, "trainer.steps=2")
    assert "finished already (2 steps)" in run(tmp_path, given, "trainer.steps=2")
    (folder,) = (tmp_path / "runs").glob("*/*/status.json")
    for path in (tmp_path / "runs").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    assert SECRET not in said
    assert (folder.parent / "config.yaml").stat().st_mode & 0o777 == 0o600
    assert verify.main([f"runs_dir={tmp_path / 'runs'}", "copies=false"]) == 0  # not taken for another run's
    with pytest.raises(ConfigError, match="reward was given a secret, which is stored nowhere"):
        frozen_config("credit", folder.parent)
