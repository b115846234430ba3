from __future__ import annotations

import numpy as np
import pytest

from grpo_sweeps.exact import SoftmaxPolicy, binary, enumerate_policy, several_prompts
from grpo_sweeps.science.claim import Prompt


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    policy = SoftmaxPolicy(prompts=3, tokens=3, max_length=3, seed=4)
    return [Prompt(e) for e in several_prompts(policy, [binary(3, 0), binary(3, 1), binary(2, 0)])]


@pytest.fixture(scope="session")
def tiny() -> Prompt:
    """7 sequences: every pair and triple can be listed."""
    return Prompt(enumerate_policy(SoftmaxPolicy(1, 3, 2, seed=1), 0, binary(2, 0)))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
