"""A stand-in for the training loop, in this process and in jobs: the launchers are tested without training."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
# The seed says what happens: 1 raises, 2 is killed, 3 gets Ctrl-C, 4 cannot use its configuration, others are well.
FAKE_LOOP = """
import json, os, signal, sys, types

def train(config, run_dir, heartbeat=None, name=""):
    from grpo_sweeps.types import ConfigError
    if config.seed == 1:
        raise RuntimeError("boom\\nsecond line")
    if config.seed == 4:
        raise ConfigError("model.path=x: not in the cache")
    for step in range(config.trainer.steps):
        with open(run_dir / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "time": float(step), "reward": 0.5, "R": config.R,
                                   "spectral/effective_rank": 1.5}) + "\\n")
        heartbeat(step + 1, config.trainer.steps, {"reward": 0.5, "spectral/effective_rank": 1.5})
        if config.seed == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if config.seed == 3:
            os.kill(os.getpid(), signal.SIGINT)
    (run_dir / "cuda").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "unset"))

sys.modules["grpo_sweeps.loop.train"] = types.SimpleNamespace(train=train)
"""
BASE = ("tracking=local", "trainer.steps=3", "estimator._target_=plain_functions.estimator")


def frozen_config() -> dict[str, Any]:
    return {
        "R": 4, "seed": 0, "sweep": "adhoc", "aggregation": "sum", "runs_dir": "runs",
        "model": {"name": "tiny", "path": "embedded"},
        "task": {"_target_": "grpo_sweeps.tasks.arithmetic.arithmetic", "prompt": "{question}"},
        "reward": {"_target_": "grpo_sweeps.rewards.exact_match.strict"},
        "estimator": {"_target_": "plain_functions.estimator"},
        "rollout": {}, "analysis": {}, "trainer": {"steps": 2}, "tracking": {"kind": "local"},
    }  # fmt: skip


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a user's module in it; jobs started from it get the stand-in too."""
    (tmp_path / "plain_functions.py").write_text("def estimator(rewards_GR):\n    return rewards_GR\n")
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(FAKE_LOOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT)]))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "plain_functions", raising=False)
    monkeypatch.setitem(sys.modules, "grpo_sweeps.loop.train", types.ModuleType("unused"))
    exec(FAKE_LOOP, {"__name__": "fake_loop"})  # sets the entry above; monkeypatch takes it away again
    return tmp_path


@pytest.fixture
def run(workplace: Path) -> Callable[..., int]:
    """The run entry point on a few cheap overrides, in this process; gives the exit code."""
    from grpo_sweeps.run import main

    def call(*arguments: str) -> int:
        given = {word.partition("=")[0] for word in arguments}
        return main([*(word for word in BASE if word.partition("=")[0] not in given), *arguments])

    return call


@pytest.fixture
def statuses(workplace: Path) -> Callable[..., dict[str, Any]]:
    """name -> RunStatus of every run of a sweep."""
    from grpo_sweeps.tracking.status import read_status

    def read(sweep: str = "adhoc") -> dict[str, Any]:
        found = [read_status(path.parent) for path in (workplace / "runs" / sweep).glob("*/status.json")]
        return {status.name: status for status in found}

    return read
