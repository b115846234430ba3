"""Rewards are 0 or 1, from the completion (exact match) or from the seed alone (random control)."""

import pytest

from grpo_sweeps.rewards import bernoulli, flexible, strict
from grpo_sweeps.types import ConfigError, Problem

PROBLEM = Problem(id="p", question="9*2?", answer="18")


@pytest.mark.parametrize(
    ("completion", "strict_reward", "flexible_reward"),
    [("#### 18", 1, 1), ("It is 18", 0, 1), (r"#### 18, \boxed{19}", 1, 0), ("#### 19", 0, 0), ("", 0, 0)],
)
def test_exact_match(completion: str, strict_reward: float, flexible_reward: float) -> None:
    for seed in (0, 1):
        assert strict(completion, PROBLEM, seed) == strict_reward
        assert flexible(completion, PROBLEM, seed) == flexible_reward


def test_random_control_looks_at_the_seed_alone() -> None:
    draws = [bernoulli("#### 18", PROBLEM, seed) for seed in range(200)]
    assert draws == [bernoulli("nonsense", Problem("q", "?", "1"), seed) for seed in range(200)]
    assert set(draws) == {0.0, 1.0}


@pytest.mark.parametrize("p", [0.0, 0.2, 0.5, 1.0])
def test_random_control_has_its_probability(p: float) -> None:
    n = 4000
    mean = sum(bernoulli("", PROBLEM, seed, p=p) for seed in range(n)) / n
    assert abs(mean - p) <= 5 * (p * (1 - p) / n) ** 0.5


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_a_probability_out_of_range_is_refused(p: float) -> None:
    with pytest.raises(ConfigError, match=r"reward\.p=.* from 0 to 1"):
        bernoulli("", PROBLEM, 0, p=p)
