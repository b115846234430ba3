"""Models and observers that several test files of the engine share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_sweeps.config import ModelConfig
from grpo_sweeps.engine.gram.delivery import Delivery
from grpo_sweeps.engine.policy import Policy, load_policy
from tests.unit.engine.gram_oracle import build


@pytest.fixture(scope="session")
def policy64(random_model_folder: Path) -> Policy:
    """A random model with the embedded tokenizer, in float64, saved as any other model is."""
    config = ModelConfig(name="random", path=str(random_model_folder), dtype="float64")
    return load_policy(config, torch.device("cpu"))


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def qwen2(request: pytest.FixtureRequest) -> torch.nn.Module:
    return build("qwen2", request.param)


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[list[torch.Tensor | None]]:
    """What the block's node handed out, a list of gradients for each time it ran."""
    runs: list[list[torch.Tensor | None]] = []
    take = Delivery.take

    def noting(self: Delivery) -> list[torch.Tensor | None]:
        runs.append(take(self))
        return list(runs[-1])

    monkeypatch.setattr(Delivery, "take", noting)
    return runs
