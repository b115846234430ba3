"""Sub-groups of pools: against lists of all of them, by formula, and each alone."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from grpo_sweeps.estimators import grpo, grpo_std, rloo
from grpo_sweeps.report.design import pool as pool_table
from grpo_sweeps.report.design.pool import ratio
from grpo_sweeps.report.measure.pool import (
    ESTIMATORS,
    SUBSETS,
    Pools,
    mixed_share,
    moments,
    orders,
    pool_values,
    sizes_of,
)

FUNCTIONS = {"group mean": grpo, "leave-one-out": rloo, "std": grpo_std}


def listed(r, psi, size, estimator):
    """Means over every sub-group, from vectors: mixed, rank and top-1 over mixed ones, ||g||^2, <g, grad J> with grad J
    from the other rollouts."""
    R, rows, square, product = len(r), [], [], []
    for c in itertools.combinations(range(R), size):
        c, rest = list(c), [i for i in range(R) if i not in c]
        A = FUNCTIONS[estimator](r[c][None])[0]
        g = A @ psi[c] / size
        square.append(g @ g)
        if len(rest) > 1:
            product.append(g @ ((r[rest] - r[rest].mean()) @ psi[rest] / (len(rest) - 1)))
        if r[c].min() < r[c].max():
            s = np.linalg.svd(A[:, None] * psi[c], compute_uv=False)
            rows.append((s.sum() ** 2 / (s**2).sum(), s[0] ** 2 / (s**2).sum()))
    rank, top1 = np.mean(rows, axis=0) if rows else (math.nan, math.nan)
    return len(rows) / math.comb(R, size), rank, top1, np.mean(square), np.mean(product) if product else math.nan


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_a_small_pool_by_listing_every_sub_group(estimator, size):
    rng = np.random.default_rng(size)
    r = np.array([[1.0, 1, 0, 0, 0, 0], [0.2, 0.2, 0.2, 0.2, 0.2, 0.9], [0.1, 0.5, 0.4, 0.2, 0.9, 0.7]])
    psi = rng.normal(size=(3, 6, 8)) + 0.4
    pools = Pools(r, psi @ psi.transpose(0, 2, 1), np.tile(np.arange(6), (3, 1)), ((0, 0, 0),) * 3)
    found = pool_values(pools, size)
    square, product = moments(found, size, estimator)
    for p in range(3):
        mixed, rank, top1, expected_square, expected_product = listed(r[p], psi[p], size, estimator)
        assert found["mixed"][p] == pytest.approx(mixed) and found["listed"][p] == pytest.approx(mixed)
        assert found["effective_rank"][p] / mixed == pytest.approx(rank, rel=1e-6)
        assert found["top1_fraction"][p] / mixed == pytest.approx(top1, rel=1e-6)
        assert square[p] == pytest.approx(expected_square, rel=1e-9)
        if math.isfinite(expected_product):  # for the two without a formula: over all sub-groups the same
            assert product[p] == pytest.approx(expected_product, rel=1e-9, abs=1e-12)
        elif estimator == "std":
            assert np.isnan(product[p])


def test_drawn_sub_groups_have_no_rollout_twice_and_belong_to_their_pool():
    for R, size in ((6, 3), (16, 8), (16, 2)):
        order = orders(R, size, (0, 3, 1))
        assert np.array_equal(np.sort(order, axis=1), np.tile(np.arange(R), (len(order), 1)))
        assert len(order) == min(SUBSETS, math.comb(R, size))
        assert np.array_equal(order, orders(R, size, (0, 3, 1)))
    assert not np.array_equal(orders(16, 8, (0, 3, 1)), orders(16, 8, (0, 3, 2)))
    r = np.array([0.0, 0, 0, 1, 1, 2, 2])
    by_hand = [len({r[i] for i in c}) > 1 for c in itertools.combinations(range(7), 3)]
    assert mixed_share(r, 3) == pytest.approx(np.mean(by_hand))
    assert sizes_of(6) == [2, 3, 4, 5, 6] and sizes_of(32)[-4:] == [20, 24, 28, 32]


def test_a_pool_does_not_depend_on_those_beside_it():
    rng = np.random.default_rng(0)
    psi, r = rng.normal(size=(5, 12, 9)), (rng.random((5, 12)) < 0.5).astype(float)
    pools = Pools(r, psi @ psi.transpose(0, 2, 1), np.tile(np.arange(12), (5, 1)), tuple((0, 0, g) for g in range(5)))
    alone = Pools(r[3:4], pools.gram_PRR[3:4], np.arange(12)[None], ((0, 0, 3),))
    for name, values in pool_values(pools, 4).items():
        assert values[3] == pytest.approx(pool_values(alone, 4)[name][0], rel=1e-12)


def test_a_ratio_and_its_interval():
    rng = np.random.default_rng(1)
    weights = rng.random(400)
    values = 3.0 * weights + rng.normal(0, 0.1, 400)
    found = ratio(values, weights, pool_table.Clusters(np.arange(400)))
    assert found.low < 3.0 < found.high and found.high - found.low < 0.1
    assert not ratio(values, 0 * weights, pool_table.Clusters(np.arange(400))).known
    assert dataclasses.is_dataclass(found)
