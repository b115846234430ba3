"""Shares and their intervals: the definitions of science.credit, a bootstrap as the slow oracle, coverage."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from grpo_sweeps.credit.shares import Starts, Values, by_prompt, over_prompts, overlaps, ratios, root_ratio, shares
from grpo_sweeps.exact import Enumeration
from grpo_sweeps.maths.intervals import mean_interval, skewed_interval
from grpo_sweeps.science import credit
from tests.unit.credit.coverage import coverage, population
from tests.unit.credit.exact_values import drawn


def correlation(e: Enumeration) -> float:
    """Of U_t = r - v(s_0) and A_t over all tokens, from the definition."""
    A, U, p = e.advantages_NT, (e.rewards_N - e.J)[:, None] * e.mask_NT, e.p_N
    return float((p @ (A * U).sum(1)) / ((p @ A.square().sum(1)) * (p @ U.square().sum(1))).sqrt())


def test_of_one_prompt_the_shares_are_those_of_the_exact_policy(e: Enumeration) -> None:
    """So many rollouts that chance is small: a few thousandths."""
    values, starts = drawn(e, 40_000, 4, np.random.default_rng(0))
    rng = np.random.default_rng(1)
    rows = rng.choice(len(e.p_N), size=(1, 40_000), p=e.p_N.numpy())
    starts = Starts(e.rewards_N.numpy()[rows], e.lengths_N.numpy()[rows])
    found, truth = shares(values, starts), credit.credit(e)
    assert found.value.mean == pytest.approx(e.J, abs=0.01)
    assert found.variance.mean == pytest.approx(e.sigma2, rel=0.02)
    assert [one.mean for one in found.by_segment.shares] == pytest.approx(list(truth.by_position_T), abs=0.02)
    assert found.total.mean == pytest.approx(1, abs=0.03) and found.total_noisy > 1.1
    assert sum(one.mean for one in found.by_tenth.shares) == pytest.approx(found.total.mean)
    assert found.uniform.mean == pytest.approx(truth.share, abs=0.01)
    assert found.correlation.mean == pytest.approx(correlation(e), abs=0.01)
    assert not found.total.known, "one prompt tells nothing of others"


def test_at_one_common_length_uniform_credit_carries_one_part() -> None:
    rewards = np.array([[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    values = Values(np.arange(3), np.tile([0, 1, 2, 3, 4], (3, 1)), np.zeros((3, 5)), np.zeros((3, 5)))
    found = shares(values, Starts(rewards, np.full((3, 4), 4)))
    assert (found.uniform.mean, found.correlation.mean) == pytest.approx((1 / 4, 1 / 2))
    assert found.uniform.high == pytest.approx(1 / 4), "whatever the prompts"


def test_equal_rewards_leave_nothing_to_share() -> None:
    values = Values(np.array([0, 1]), np.array([[0, 2], [0, 3]]), np.ones((2, 2)), np.zeros((2, 2)))
    found = shares(values, Starts(np.ones((2, 3)), np.full((2, 3), 1)))
    assert found.variance.mean == 0
    for one in (found.total, found.uniform, found.correlation, *found.by_tenth.shares):
        assert np.isnan([one.mean, one.low, one.high]).all()


def test_a_segment_is_divided_among_the_parts_that_it_touches() -> None:
    edges_NE = np.array([[0, 1, 2, 5, 7], [0, 3, 3, 3, 3], [0, 1, 2, 3, 23]])
    found = overlaps(edges_NE, 4)
    for n, edges in enumerate(edges_NE.tolist()):
        T = edges[-1]
        for k in range(4):
            tiny = [Fraction(edges[k]) + Fraction(i, 4) for i in range(4 * (edges[k + 1] - edges[k]))]  # quarter tokens
            for part in range(4):
                inside = [x for x in tiny if Fraction(part * T, 4) <= x < Fraction((part + 1) * T, 4)]
                assert found[n, k, part] == pytest.approx(len(inside) / max(len(tiny), 1))


def test_a_mean_by_prompt_is_the_plain_one() -> None:
    x, prompt_N = np.random.default_rng(0).normal(size=(6, 3)), np.array([0, 1, 2, 0, 1, 2])
    slow = [[np.mean(x[prompt_N == p, j]) for j in range(3)] for p in range(3)]
    np.testing.assert_allclose(by_prompt(x, prompt_N), slow)


def test_the_interval_of_a_mean_is_that_of_skewed_values_and_the_ordinary_one_without_skewness() -> None:
    half = np.random.default_rng(0).gamma(1.0, size=(9, 2))
    for x, expected in ((half, skewed_interval), (np.concatenate([half, -half]), mean_interval)):
        for one, column in zip(over_prompts(lambda means: means, x), x.T, strict=True):
            wanted = expected(column)
            assert (one.mean, one.low, one.high) == pytest.approx((wanted.mean, wanted.low, wanted.high))


@pytest.mark.parametrize("statistic", [ratios, root_ratio])
def test_the_interval_is_that_of_a_bootstrap_over_prompts(statistic) -> None:
    rng = np.random.default_rng(2)
    columns = np.column_stack([rng.gamma(2, size=80), rng.gamma(4, size=80)])
    one = over_prompts(statistic, columns)[0]
    again = statistic(columns[rng.integers(80, size=(20_000, 80))].mean(axis=1))[:, 0]
    low, high = np.quantile(again, [0.025, 0.975])
    assert one.mean == pytest.approx(float(statistic(columns.mean(axis=0))[0]))
    assert (one.low, one.high) == pytest.approx((low, high), abs=0.15 * (high - low))


def test_an_interval_that_hangs_on_one_prompt_is_not_known() -> None:
    one = over_prompts(ratios, np.array([[0.1, 0.2], [0.0, 0.0], [0.0, 0.0]]))[0]
    assert one.mean == pytest.approx(0.5) and not one.known
    assert not over_prompts(ratios, np.array([[0.1, 0.2]]))[0].known


def test_intervals_over_prompts_hold_the_truth() -> None:
    """Prompts drawn from a population whose shares are known by enumeration: 95% intervals, in 300 repeats."""
    hits = coverage(population(8, 3), prompts=12, continuations=8, repeats=300, seed=4)
    assert min(hits[name] for name in ("sum", "first token", "uniform")) > 0.91, hits
