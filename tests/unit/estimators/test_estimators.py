"""Every estimator against its definition, by enumeration and by the properties that must hold for it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from grpo_sweeps.estimators import DECLARATIONS, bnpo, grpo, grpo_std, opo, reinforce, reinforce_plus_plus, rloo

GROUP_BASELINES = [grpo, grpo_std, rloo]
rewards = st.integers(2, 9).flatmap(
    lambda R: st.lists(st.lists(st.floats(-10, 10, width=32), min_size=R, max_size=R), min_size=1, max_size=4)
)


# By hand for the rewards and lengths below, eps = 0: (advantages of the first group, of the second).
REWARDS, LENGTHS = [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]], [[1, 2, 3], [4, 1, 1]]
third, root = 1 / 3, math.sqrt(3)
BETA = math.gamma(19 / 6) / math.gamma(19 / 12) ** 2 * (2 / 9) ** (7 / 12)  # density of Beta(19/12, 19/12) at 1/3
GOLDEN = {
    "grpo": ([2 * third, -third, -third], [third, third, -2 * third]),  # means 1/3 and 2/3
    "dr_grpo": ([2 * third, -third, -third], [third, third, -2 * third]),
    "rloo": ([1.0, -0.5, -0.5], [0.5, 0.5, -1.0]),
    "grpo_std": ([2 / root, -1 / root, -1 / root], [1 / root, 1 / root, -2 / root]),  # 2/3 over 2: std sqrt(1/3)
    "dapo": ([2 / root, -1 / root, -1 / root], [1 / root, 1 / root, -2 / root]),
    "opo": ([5 / 6, -1 / 6, -1 / 6], [1 / 6, 1 / 6, -5 / 6]),  # baselines 1/6 and (4 + 1)/6
    "reinforce": ([1.0, 0.0, 0.0], [1.0, 1.0, 0.0]),
    "batch_mean": ([0.5, -0.5, -0.5], [0.5, 0.5, -0.5]),  # mean 3/6
    "reinforce_plus_plus": ([1.0, -1.0, -1.0], [1.0, 1.0, -1.0]),  # squares 6/4, over 6: std 1/2
    "reinforce_plus_plus_baseline": (  # squares 2/3 + 2/3, over 6: std sqrt(2)/3
        [math.sqrt(2), -math.sqrt(0.5), -math.sqrt(0.5)], [math.sqrt(0.5), math.sqrt(0.5), -math.sqrt(2)],
    ),
    # means 1/3, 2/3: mean 1/2, variance 1/18, a = b = 7/4, Beta(19/12, 19/12)
    "bnpo": ([2 * third / BETA, -third / BETA, -third / BETA], [third / BETA, third / BETA, -2 * third / BETA]),
}  # fmt: skip


def test_golden_values_of_every_estimator() -> None:
    assert set(GOLDEN) == set(DECLARATIONS)
    for name, wanted in GOLDEN.items():
        declared = DECLARATIONS[name]
        arguments: dict[str, Any] = {} if declared.eps is None else {"eps": 0.0}
        if declared.needs_lengths:
            arguments["lengths_GR"] = torch.tensor(LENGTHS)
        for found, row in zip(declared.function(torch.tensor(REWARDS), **arguments).tolist(), wanted, strict=True):
            assert found == pytest.approx(row, abs=1e-15), name


@pytest.mark.parametrize(("ddof", "eps", "size"), [(0, 0.5, 0.5), (1, 0.0, math.sqrt(0.5)), (0, 0.0, 1.0)])
def test_ddof_and_eps_of_a_step(ddof: int, eps: float, size: float) -> None:
    step = torch.tensor([[1.0], [0.0]])  # two prompts, one rollout each: deviations of 1/2
    assert reinforce_plus_plus(step, ddof, eps).flatten().tolist() == pytest.approx([size, -size])


@given(st.lists(st.lists(st.integers(0, 4), min_size=4, max_size=4), min_size=1, max_size=5))
def test_bnpo_divides_by_the_density_that_scipy_has(rows: list[list[int]]) -> None:
    r = np.array(rows) / 4
    p = r.mean(axis=1)
    alpha = beta = 1.0
    if len(set(p.tolist())) > 1:
        m, v = p.mean(), p.var(ddof=1)
        alpha, beta = max(1, 1 + (m * (1 - m) / v - 1) * m / 3), max(1, 1 + (m * (1 - m) / v - 1) * (1 - m) / 3)
    for found, group, mean in zip(bnpo(r), r, p, strict=True):
        scale = min(1e6, 1 / stats.beta(alpha, beta).pdf(mean)) if group.min() < group.max() else 0.0
        assert found == pytest.approx((group - mean) * scale, rel=1e-9, abs=1e-12)


def test_bnpo_of_one_group_and_of_equal_means_is_the_group_mean() -> None:
    r = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert np.array_equal(bnpo(r[:1]), grpo(r[:1])) and np.array_equal(bnpo(r), grpo(r))
    far = np.zeros((400, 100))
    far[0], far[:, 0] = 1.0, 1.0
    far[0, 0] = 0.0
    assert np.abs(bnpo(far)).max() <= 1e6, "a mean that the density all but excludes"


@given(rewards, st.integers(0, 99))
def test_opo_is_weighted_by_length(rows: list[list[float]], seed: int) -> None:
    lengths = torch.randint(1, 50, (len(rows), len(rows[0])), generator=torch.Generator().manual_seed(seed))
    advantages = opo(torch.tensor(rows, dtype=torch.float64), lengths)
    for row, tokens, found in zip(rows, lengths.tolist(), advantages.tolist(), strict=True):
        # one entry for each token: the mean over tokens is the baseline
        spread = [r for r, n in zip(row, tokens, strict=True) for _ in range(n)]
        baseline = math.fsum(spread) / len(spread)
        assert found == pytest.approx([r - baseline for r in row], abs=1e-11)
    assert np.allclose((advantages * lengths.numpy()).sum(axis=1), 0, atol=1e-8)


def test_opo_refuses_lengths_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        opo(torch.zeros(2, 3), torch.ones(2, 2))
    with pytest.raises(ValueError, match="a length of 0: a completion has at least 1 token"):
        opo(torch.zeros(1, 2), torch.tensor([[1, 0]]))


@given(rewards)
def test_grpo_is_reward_less_group_mean(rows: list[list[float]]) -> None:
    advantages = grpo(torch.tensor(rows, dtype=torch.float64))
    for row, found in zip(rows, advantages.tolist(), strict=True):
        mean = math.fsum(row) / len(row)
        assert found == pytest.approx([r - mean for r in row], abs=1e-12)


@given(rewards)
def test_rloo_is_reward_less_mean_of_the_others(rows: list[list[float]]) -> None:
    advantages = rloo(torch.tensor(rows, dtype=torch.float64))
    for row, found in zip(rows, advantages.tolist(), strict=True):
        others = [math.fsum(row[:i] + row[i + 1 :]) / (len(row) - 1) for i in range(len(row))]
        assert found == pytest.approx([r - o for r, o in zip(row, others, strict=True)], abs=1e-11)


@pytest.mark.parametrize("estimator", GROUP_BASELINES)
@given(rows=rewards)
def test_advantages_of_a_group_sum_to_zero(estimator, rows: list[list[float]]) -> None:  # type: ignore[no-untyped-def]
    advantages = estimator(torch.tensor(rows, dtype=torch.float64))
    assert np.allclose(advantages.sum(axis=1), 0, atol=1e-8)


@pytest.mark.parametrize("estimator", GROUP_BASELINES)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e17 + 1])
def test_an_all_equal_group_is_exactly_zero(estimator, value: float) -> None:  # type: ignore[no-untyped-def]
    # 0.1 summed three times is not 0.3: the mean's rounding must not make a gradient
    assert np.array_equal(estimator(np.full((2, 3), value)), np.zeros((2, 3)))


@pytest.mark.parametrize(("ddof", "size"), [(0, 1.0), (1, math.sqrt(0.5))])
def test_grpo_std_of_one_right_one_wrong(ddof: int, size: float) -> None:
    advantages = grpo_std(torch.tensor([[1.0, 0.0]]), ddof=ddof, eps=0.0)
    assert advantages[0].tolist() == pytest.approx([size, -size])


@pytest.mark.parametrize("R", [2, 3, 4])
@pytest.mark.parametrize("p", [0.2, 0.5, 0.9])
def test_variance_and_covariance_by_enumeration(R: int, p: float) -> None:
    """arXiv 2606.29238, section 4.1 (ii) and (iii): Var A = (R-1)/R sigma^2, Cov(A_i, A_j) = -sigma^2/R."""
    variance = p * (1 - p)
    second = torch.zeros(R, R, dtype=torch.float64)
    for outcome in itertools.product([0.0, 1.0], repeat=R):
        probability = math.prod(p if r else 1 - p for r in outcome)
        a = torch.from_numpy(grpo([outcome])[0])
        second += probability * torch.outer(a, a)
    assert torch.allclose(second.diagonal(), torch.full((R,), (R - 1) / R * variance, dtype=torch.float64))
    off = second[~torch.eye(R, dtype=torch.bool)]
    assert torch.allclose(off, torch.full_like(off, -variance / R))


def test_reinforce_keeps_the_reward_and_a_copy_of_it() -> None:
    given_rewards = np.array([[1.0, 1.0], [0.0, 2.0]])
    found = reinforce(given_rewards)
    assert np.array_equal(found, given_rewards)
    found += 1
    assert given_rewards[0, 0] == 1.0


@pytest.mark.parametrize("estimator", GROUP_BASELINES)
@pytest.mark.parametrize("shape", [(3,), (3, 1), (2, 2, 2)])
def test_a_wrong_shape_is_refused(estimator, shape: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"R >= 2"):
        estimator(torch.zeros(shape))


@pytest.mark.parametrize("arguments", [{"ddof": 2}, {"eps": -1.0}])
def test_grpo_std_refuses_what_it_does_not_mean(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        grpo_std(torch.tensor([[0.0, 1.0]]), **arguments)  # type: ignore[arg-type]
