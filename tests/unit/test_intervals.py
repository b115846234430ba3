"""intervals: against the textbook t interval, a brute-force cluster bootstrap, and coverage by simulation."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_sweeps.maths import intervals
from grpo_sweeps.maths.intervals import (
    Interval,
    bounded_interval,
    mean_interval,
    paired_difference,
    share_interval,
    skewed_interval,
)


def clustered(rng, seeds=4, prompts=30, per_seed=40, seed_sd=0.0, prompt_sd=1.0, noise=0.5):
    """(values, prompt labels, seed labels) with a shared effect of each prompt and each seed."""
    seed = np.repeat(np.arange(seeds), per_seed)
    prompt = rng.integers(0, prompts, len(seed))
    shared = rng.normal(0, seed_sd, seeds)[seed] + rng.normal(0, prompt_sd, prompts)[prompt]
    values = shared + rng.normal(0, noise, len(seed))
    return values, np.array([f"p{i}" for i in prompt]), seed


def test_one_value_a_cluster_is_the_t_interval():
    x = np.random.default_rng(0).normal(size=25)
    got = mean_interval(x, np.arange(25))
    half = 2.0638985616 * x.std(ddof=1) / 5  # t(24), 97.5%
    assert (got.low, got.high) == pytest.approx((x.mean() - half, x.mean() + half))


def test_cluster_variance_against_a_bootstrap_of_clusters():
    values, prompt, _ = clustered(np.random.default_rng(1), seeds=1, per_seed=300)
    names = np.unique(prompt)
    members = [values[prompt == name] for name in names]
    rng = np.random.default_rng(2)
    means = []
    for _ in range(3000):
        chosen = [members[i] for i in rng.integers(0, len(names), len(names))]
        means.append(np.concatenate(chosen).mean())
    got = mean_interval(values, prompt)
    half = intervals.t_quantile(0.975, len(names) - 1) * np.std(means) * np.sqrt(len(names) / (len(names) - 1))
    assert (got.high - got.low) / 2 == pytest.approx(half, rel=0.08)
    assert got.high - got.low > 1.3 * (mean_interval(values).high - mean_interval(values).low)


@pytest.mark.parametrize(("seeds", "seed_sd"), [(1, 0.0), (3, 0.0), (3, 1.0), (6, 0.5)])
def test_coverage(seeds, seed_sd):
    rng = np.random.default_rng(7)
    hits = []
    for _ in range(400):
        values, prompt, seed = clustered(rng, seeds, 150, 60, seed_sd, 0.5, 1.0)
        interval = mean_interval(values, prompt, seed)
        hits.append(interval.low <= 0 <= interval.high)
    assert 0.91 <= np.mean(hits) <= 1.0


@pytest.mark.parametrize("x", [[0.0, 0.1, 0.2, 0.4, 3.0], [-5.0, 1.0, 1.5, 2.0], [0.0, 0.0, 0.0, 1.0]])
def test_the_ends_of_a_skewed_interval_solve_halls_equation(x):
    """By bisection of the increasing g, from the definition."""
    x = np.array(x)
    n, s = len(x), x.std(ddof=1)
    c = n / ((n - 1) * (n - 2)) * sum(((v - x.mean()) / s) ** 3 for v in x)
    q = intervals.t_quantile(0.975, n - 1)

    def g(t):
        return t + c * t**2 / (3 * n**0.5) + c**2 * t**3 / (27 * n) + c / (6 * n**0.5)

    got = skewed_interval(x)
    for end, wanted in ((got.low, q), (got.high, -q)):
        assert g(n**0.5 * (x.mean() - end) / s) == pytest.approx(wanted)
    assert (got.high - x.mean() > x.mean() - got.low) == (c > 0), "longer on the side of the long tail"


def test_a_skewed_interval_of_few_or_equal_values():
    assert not skewed_interval([1.0]).known and not skewed_interval([1.0, 4.0]).known
    for x in ([1.0, 3.0, 5.0], [2.0, 2.0, 2.0], [1.0, 2.0, 4.0, 5.0]):
        plain, got = mean_interval(x), skewed_interval(x)
        assert (got.mean, got.low, got.high) == pytest.approx((plain.mean, plain.low, plain.high))


def test_a_skewed_interval_holds_the_mean_of_skewed_values_more_often():
    rng = np.random.default_rng(5)
    drawn = rng.gamma(0.5, size=(4000, 10))
    plain, skewed = (
        np.mean([one.low <= 0.5 <= one.high for one in map(of, drawn)]) for of in (mean_interval, skewed_interval)
    )
    assert plain < 0.88 and skewed > plain + 0.03, (plain, skewed)


def test_two_way_is_never_narrower_in_variance_than_either_way():
    values, prompt, seed = clustered(np.random.default_rng(3), seed_sd=2.0)
    both, by_prompt = mean_interval(values, prompt, seed), mean_interval(values, prompt)
    assert both.high - both.low > 2 * (by_prompt.high - by_prompt.low)
    assert both.clusters == (len(np.unique(prompt)), 4) and both.n == len(values)


def test_a_smaller_alpha_widens_and_nan_is_dropped():
    x = np.array([1.0, 2.0, np.nan, 4.0])
    wide, narrow = mean_interval(x, alpha=0.01), mean_interval(x)
    assert wide.low < narrow.low and narrow.n == 3 and narrow.mean == pytest.approx(7 / 3)


def test_too_little_data_has_no_interval():
    assert not mean_interval([1.0]).known and mean_interval([1.0]).mean == 1.0
    assert mean_interval([]).n == 0 and np.isnan(mean_interval([]).mean)
    assert not mean_interval([1.0, 2.0], ["a", "a"], [0, 0]).known
    assert not mean_interval([1.0, 2.0], [0, 1]).known, "two values do not tell how far values differ"
    assert not mean_interval([1.0, 2.0, 3.0, 4.0], ["a", "a", "b", "b"], [0, 1, 0, 1]).known
    assert mean_interval([1.0, 2.0, 3.0], ["a", "b", "c"], [0, 0, 0]).known
    with pytest.raises(ValueError, match="at most two"):
        mean_interval([1.0], [0], [0], [0])


def test_an_interval_is_cut_to_what_the_quantity_can_take_and_keeps_its_mean():
    wide = Interval(2.0, -39.0, 44.0, 12, (6, 2))
    assert wide.within((1.0, 4.0)) == Interval(2.0, 1.0, 4.0, 12, (6, 2))
    assert wide.within(intervals.ANY) == wide
    off = Interval(-0.1, -0.3, 0.1, 9).within(intervals.POSITIVE)  # an estimate may lie outside
    assert (off.low, off.high) == (-0.1, 0.1)
    assert not Interval(2.0, np.nan, np.nan, 1).within((1.0, 4.0)).known


def test_paired_difference_is_sharper_than_unpaired():
    rng = np.random.default_rng(4)
    before = rng.random(100)
    after = before + 0.1 + rng.normal(0, 0.02, 100)
    paired = paired_difference(before, after, np.arange(100))
    assert paired.low > 0.09 and paired.high < 0.11
    assert paired.high - paired.low < 0.2 * (mean_interval(after).high - mean_interval(after).low)


def test_share_interval_is_wilson_without_clusters_and_wider_with_them():
    got = share_interval(np.arange(50) < 10)
    z, p, n = intervals.t_quantile(0.975, 49), 0.2, 50
    centre, half = (p + z**2 / 100) / (1 + z**2 / n), z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    assert (got.low, got.high) == pytest.approx((centre - half, centre + half), rel=0.02)
    clumped = share_interval(np.arange(50) < 10, np.arange(50) // 5)
    assert clumped.high - clumped.low > 1.5 * (got.high - got.low)
    certain = share_interval([True] * 40, np.arange(40))
    assert certain.high == 1.0 and 0.85 < certain.low < 0.95


def test_inside_and_outside_need_the_whole_interval():
    interval = Interval(2.0, 1.9, 2.1, 50)
    assert interval.inside(1.75, 2.25) and not interval.outside(1.75, 2.25)
    assert interval.outside(2.2, 3) and not interval.inside(2.0, 2.25)
    unknown = Interval(2.0, float("nan"), float("nan"), 1)
    assert not unknown.inside(0, 9) and not unknown.outside(5, 9)


def test_hoeffdings_interval_covers_whatever_the_distribution():
    """Few, skewed values in [0, 1], three by three under one label: the mean is missed at most as often as stated."""
    rng, missed = np.random.default_rng(5), 0
    for _ in range(2000):
        prompts = rng.beta(0.1, 0.4, size=12)
        values, labels = np.repeat(prompts, 3), np.repeat(np.arange(12), 3)
        found = bounded_interval(values, labels, 0.0, 1.0, alpha=0.2)
        missed += not found.low <= 0.2 <= found.high
        alone = bounded_interval(prompts, range(12), 0.0, 1.0, alpha=0.2)
        assert (found.low, found.high) == pytest.approx((alone.low, alone.high)), "copies tell nothing more"
    assert missed / 2000 < 0.2


@pytest.mark.parametrize(
    "values", [[3, 0, 3, 7], [5], [9_000_000, 2], [-1, 4, -1], ["b", "a"], [True, False], [2.5, 1.0]]
)
def test_labels_are_numbered_in_their_order(values: list[object]) -> None:
    expected = np.unique(np.asarray(values), return_inverse=True)[1]
    assert intervals.Clusters(values).codes[0].tolist() == expected.tolist()
