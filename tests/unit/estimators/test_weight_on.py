"""The weight on a prompt of success rate p, against closed forms and against every tuple of rollouts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_sweeps.estimators import (
    batch_mean,
    dapo,
    dr_grpo,
    grpo,
    grpo_std,
    opo,
    reinforce,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    weight_on,
)

Estimator = Callable[..., Any]
RATES = [0.0, 1e-9, 0.03, 0.25, 0.5, 0.8, 1.0]


def by_k(p: float, R: int, ddof: int, eps: float) -> float:
    """sum_k P(k) s2(k) / (std(k) + eps) / (p q), as it stands in the docstring."""
    total = 0.0
    for k in range(1, R):
        s2 = k * (R - k) / R**2
        std = math.sqrt(s2 * (R / (R - 1) if ddof else 1.0))
        total += math.comb(R, k) * p**k * (1 - p) ** (R - k) * s2 / (std + eps)
    return total / (p * (1 - p))


@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize("R", [2, 3, 8, 64])
def test_closed_forms(p: float, R: int) -> None:
    for estimator in (grpo, dr_grpo):
        assert weight_on(estimator, p, R) == pytest.approx((R - 1) / R, abs=1e-13)
    for estimator in (rloo, reinforce):
        assert weight_on(estimator, p, R) == pytest.approx(1.0, abs=1e-13)


@pytest.mark.parametrize("p", [p for p in RATES if 0 < p < 1])
@pytest.mark.parametrize("R", [2, 3, 8, 64])
@pytest.mark.parametrize(("ddof", "eps"), [(0, 0.0), (1, 0.0), (0, 1e-4), (1, 0.5)])
def test_std_scaling_is_the_sum_over_k(p: float, R: int, ddof: int, eps: float) -> None:
    for estimator in (grpo_std, dapo):
        found = weight_on(partial(estimator, ddof=ddof, eps=eps), p, R)
        assert found == pytest.approx(by_k(p, R, ddof, eps), rel=1e-9)


@pytest.mark.parametrize("estimator", [grpo, rloo, grpo_std, dapo, reinforce])
@pytest.mark.parametrize("R", [2, 3, 4])
def test_by_enumeration(estimator: Estimator, R: int) -> None:
    """Two right and two wrong outcomes with scores of their own: E[sum_i A_i psi_i / R] = c(p) grad p."""
    probabilities = torch.tensor([0.1, 0.25, 0.4, 0.25], dtype=torch.float64)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    drawn = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = drawn - probabilities @ drawn
    total = torch.zeros(5, dtype=torch.float64)
    for group in itertools.product(range(4), repeat=R):
        chosen = list(group)
        total += (
            probabilities[chosen].prod() * torch.from_numpy(estimator(rewards[None, chosen])[0]) @ scores[chosen] / R
        )
    gradient = (probabilities * rewards) @ scores
    assert torch.allclose(total, weight_on(estimator, 0.35, R) * gradient, rtol=0, atol=1e-12)


def test_golden_values() -> None:
    exact = partial(grpo_std, ddof=0, eps=0.0)
    assert [weight_on(exact, p, 2) for p in (0.0, 0.3, 1.0)] == pytest.approx([1.0, 1.0, 1.0])  # +-1 when mixed
    assert weight_on(exact, 0.0, 17) == pytest.approx(4.0)  # sqrt(R - 1): one right rollout among wrong ones
    assert weight_on(exact, 0.5, 3) == pytest.approx(1.5 * math.sqrt(2) * 2 / 3)  # P(mixed) 3/4, s2/std = sqrt(2)/3
    assert weight_on(exact, 0.2, 400) == pytest.approx(2.5, rel=0.01)  # 1/sqrt(p q) for large R
    assert weight_on(reinforce, 0.2, 1) == 1.0


def test_a_function_of_ones_own() -> None:
    def pairwise_rank(rewards_GR: Tensor) -> Tensor:
        return (rewards_GR.unsqueeze(-1) - rewards_GR.unsqueeze(-2)).sign().mean(dim=-1)

    assert weight_on(pairwise_rank, 0.3, 4) == pytest.approx(0.75)


def first_counts_twice(rewards_GR: Tensor) -> Tensor:
    return rewards_GR * torch.tensor([2.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("estimator", "words"),
    [
        (batch_mean, "batch_mean: its weight depends on the other prompts"),
        (reinforce_plus_plus, "depends on the other prompts"),
        (partial(reinforce_plus_plus_baseline, ddof=1), "reinforce_plus_plus_baseline: .*other prompts"),
        (opo, "opo: its weight depends on the lengths"),
        (first_counts_twice, "rollouts of equal reward different advantages"),
    ],
)
def test_what_does_not_depend_on_k_alone_is_refused(estimator: Estimator, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        weight_on(estimator, 0.5, 3)


@pytest.mark.parametrize(("p", "R"), [(-0.1, 2), (1.1, 2), (float("nan"), 2), (0.5, 0)])
def test_rates_and_sizes_out_of_range(p: float, R: int) -> None:
    with pytest.raises(ValueError, match="allowed are 0 <= p <= 1 and R >= 1"):
        weight_on(grpo, p, R)
