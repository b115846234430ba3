"""Exact policies with a binary and a graded outcome: sequences of one to four tokens."""

from __future__ import annotations

import pytest

from grpo_sweeps.exact import Enumeration, SoftmaxPolicy, binary, enumerate_policy, graded

REWARDS = {"binary": binary(3), "graded": graded(4)}


@pytest.fixture(scope="session", params=REWARDS)
def e(request: pytest.FixtureRequest) -> Enumeration:
    return enumerate_policy(SoftmaxPolicy(prompts=1, tokens=4, max_length=4, seed=5), 0, REWARDS[request.param])
