"""Policies small enough for slow oracles, made once."""

from __future__ import annotations

import pytest

from grpo_sweeps.exact import Enumeration, SoftmaxPolicy, binary, by_token, enumerate_policy, graded, several_prompts

REWARDS = {"binary": binary(), "graded": graded(), "by_token": by_token()}


@pytest.fixture(scope="session")
def policy() -> SoftmaxPolicy:
    """Three prompts, three symbols and the end, up to four tokens: 121 sequences a prompt, 142 parameters."""
    return SoftmaxPolicy(prompts=3, temperature=1.5, seed=1)


@pytest.fixture(scope="session", params=REWARDS)
def enumeration(request: pytest.FixtureRequest, policy: SoftmaxPolicy) -> Enumeration:
    return enumerate_policy(policy, 1, REWARDS[request.param])


@pytest.fixture(scope="session")
def binary_enumeration(policy: SoftmaxPolicy) -> Enumeration:
    return enumerate_policy(policy, 1, REWARDS["binary"])


@pytest.fixture(scope="session")
def prompts(policy: SoftmaxPolicy) -> list[Enumeration]:
    return several_prompts(policy, [*REWARDS.values()])


@pytest.fixture(scope="session")
def small() -> Enumeration:
    """Two symbols and the end, two tokens: 7 sequences with the rewards 0, 0.5 and 1, so that tuples can be listed."""
    return enumerate_policy(SoftmaxPolicy(prompts=1, tokens=3, max_length=2, width=3, seed=2), 0, graded(3))
