"""A run on a random model and a made-up task that is settled in a few tokens, so that a step takes milliseconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_sweeps.config import (
    AnalysisConfig,
    FunctionConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TaskConfig,
    TrackingConfig,
    TrainerConfig,
)
from grpo_sweeps.types import Problem, TaskData

MakeConfig = Callable[..., RunConfig]


def letters() -> TaskData:
    """Problems without meaning; the rewards below decide what counts."""
    problems = [Problem(f"p{i}", f"{i}?", str(i)) for i in range(40)]
    return TaskData(train=problems[:30], held_out=problems[30:])


def even_length(completion: str, problem: Problem, seed: int) -> float:
    return float(len(completion) % 2 == 0)


def dice(completion: str, problem: Problem, seed: int) -> float:
    """A reward that draws from every global generator: what a resumed run must find as it was."""
    import random

    import numpy as np

    return float(random.random() + np.random.random() + float(torch.rand(())) > 1.5)


def always(completion: str, problem: Problem, seed: int) -> float:
    return 1.0


def nothing(completion: str, problem: Problem, seed: int) -> None:
    return None


def text(completion: str, problem: Problem, seed: int) -> str:
    return "1"


def not_a_number(completion: str, problem: Problem, seed: int) -> float:
    return float("nan")


def mean_only(rewards_GR: torch.Tensor) -> torch.Tensor:
    return rewards_GR.mean(dim=1)


def explode(rewards_GR: torch.Tensor) -> torch.Tensor:
    return rewards_GR * float("nan")


@pytest.fixture
def make_config(random_model_folder: Path, tmp_path: Path) -> MakeConfig:
    def make(
        reward: str = "even_length", estimator: str = "grpo_sweeps.estimators.group.grpo", **changes: Any
    ) -> RunConfig:
        here = "loop_functions"
        trainer = {
            "steps": 4,
            "prompts": 4,
            "lr": 1e-2,
            "eval_problems": 4,
            "eval_samples": 2,
            "eval_every": 2,
        } | changes.pop("trainer", {})
        analysis = changes.pop("analysis", {})
        config = RunConfig(
            R=4,
            seed=0,
            sweep="test",
            aggregation="sum",
            runs_dir=str(tmp_path),
            model=ModelConfig(name="random", path=str(random_model_folder), dtype="float64"),
            task=TaskConfig("letters", FunctionConfig(f"{here}.letters"), prompt="Q{question}"),
            reward=FunctionConfig(f"{here}.{reward}"),
            estimator=FunctionConfig(estimator),
            rollout=RolloutConfig(max_new_tokens=8),
            analysis=AnalysisConfig(**analysis),
            trainer=TrainerConfig(**({"checkpoint_every": 2, "device": "cpu"} | trainer)),
            tracking=TrackingConfig(kind="local"),
        )
        return dataclasses.replace(config, **changes)

    return make


@pytest.fixture(autouse=True)
def loop_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of this file under a name that a dotted path can reach."""
    import sys
    import types

    module = types.ModuleType("loop_functions")
    for function in (letters, even_length, dice, always, nothing, text, not_a_number, mean_only, explode):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "loop_functions", module)
