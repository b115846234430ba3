"""A random model with the embedded tokenizer, in float64, saved as any other model is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_sweeps.config import ModelConfig
from grpo_sweeps.engine.policy import Policy, load_policy


@pytest.fixture(scope="session")
def policy64(random_model_folder: Path) -> Policy:
    config = ModelConfig(name="random", path=str(random_model_folder), dtype="float64")
    return load_policy(config, torch.device("cpu"))
