"""spectra: closed forms, order of the ranks, numerical rank, interval, nulls; each against a slow or exact oracle."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_sweeps.spectra import (
    absolute_error,
    centred,
    centred_eigenvalues,
    centred_values,
    effective_rank,
    eigenvalue_error,
    entropy_rank,
    graded_error,
    nonzero_values,
    null_effective_rank,
    null_gaussian,
    null_measured_norms,
    null_orthogonal,
    numerical_rank,
    participation_ratio,
    rank_above,
    singular_values,
    stable_rank,
    summary,
    top1_fraction,
    top_fraction,
    unit_rows,
    weighted_gram,
)
from grpo_sweeps.spectra.floor import energy_intervals
from tests.floors import floor_interval

SEEDS = st.integers(0, 2**32 - 1)


def random_gram(seed: int, R: int, D: int, decay: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """(K, Psi) with Psi (R, D) Gaussian, its rows shrinking by `decay` a row."""
    psi = np.random.default_rng(seed).standard_normal((R, D)) * np.exp(-decay * np.arange(R))[:, None]
    return psi @ psi.T, psi


@given(SEEDS, st.integers(2, 9), st.integers(1, 20), st.floats(0, 2))
@settings(deadline=None, max_examples=60)
def test_singular_values_against_svd_of_the_rows(seed, R, D, decay):
    gram, psi = random_gram(seed, R, D, decay)
    weights = np.random.default_rng(seed + 1).standard_normal(R)
    expected = np.zeros(R)
    svd = np.linalg.svd(weights[:, None] * psi, compute_uv=False)
    expected[: len(svd)] = svd
    threshold = np.sqrt(eigenvalue_error(gram, weights))
    got = singular_values(gram, weights)
    clear = expected > 10 * threshold
    assert np.allclose(got[clear], expected[clear], rtol=1e-6)
    assert np.all(got[~clear] <= 20 * threshold[~clear] + 1e-12)


@given(SEEDS, st.integers(2, 9), st.integers(1, 12), st.floats(0, 6), st.sampled_from([0.0, 1e-6, 1e-2, 0.165]))
@settings(deadline=None, max_examples=100)
def test_order_of_the_ranks(seed, R, D, decay, floor):
    """The first four always; the numerical rank, which goes by the precision of K, may lie below them."""
    gram, _ = random_gram(seed, R, D, decay)
    weights = np.random.default_rng(seed + 1).standard_normal(R)
    s = singular_values(gram, weights)
    ranks = [stable_rank(s), participation_ratio(s), effective_rank(s), entropy_rank(s), R]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(ranks))
    assert ranks[0] >= 1 - 1e-12 and 1 <= numerical_rank(gram, weights, floor) <= min(R, D)
    assert top1_fraction(s) == pytest.approx(1 / stable_rank(s))


def test_the_precision_of_k_moves_the_numerical_rank_alone():
    """k = 1 of R = 8 right: squared weights in the ratio 49 to 1, so that within a floor of .165 one value is told."""
    weights = np.array([7.0, *[-1.0] * 7]) / 8
    exact, coarse = summary(np.eye(8), weights, 1e-6), summary(np.eye(8), weights, 0.165)
    assert (exact.pop("numerical_rank"), coarse.pop("numerical_rank")) == (8, 1)
    assert exact == coarse and exact["effective_rank"] == pytest.approx(null_effective_rank(1, 8), rel=1e-14)
    assert coarse["entropy_rank"] > coarse["effective_rank"] > 1


def test_a_zero_matrix_has_no_ranks():
    s = singular_values(np.zeros((3, 3)))
    assert all(np.isnan(of(s)) for of in (stable_rank, participation_ratio, effective_rank, entropy_rank))
    assert numerical_rank(np.zeros((3, 3))) == nonzero_values(s) == 0


def test_ranks_by_hand():
    s = [3.0, 2.0, 1.0]
    assert effective_rank(s) == pytest.approx(36 / 14)
    assert top1_fraction(s) == pytest.approx(9 / 14)
    assert top_fraction(s, 2) == pytest.approx(13 / 14)
    assert participation_ratio(s) == pytest.approx(14**2 / 98)
    assert stable_rank(s) == pytest.approx(14 / 9)
    assert entropy_rank(s) == pytest.approx(np.exp(-(0.5 * np.log(0.5) + np.log(1 / 3) / 3 + np.log(1 / 6) / 6)))
    assert numerical_rank(np.diag(np.square(s))) == nonzero_values(s) == 3


@given(SEEDS, st.integers(2, 8))
@settings(deadline=None, max_examples=30)
def test_signs_and_scale_cannot_touch_the_spectrum(seed, R):
    gram, _ = random_gram(seed, R, 30)
    rng = np.random.default_rng(seed + 1)
    weights = rng.standard_normal(R)
    base = effective_rank(singular_values(gram, weights))
    assert effective_rank(singular_values(gram, weights * rng.choice([-1, 1], R))) == pytest.approx(base, rel=1e-9)
    assert effective_rank(singular_values(gram, weights * 1e-3)) == pytest.approx(base, rel=1e-9)
    assert effective_rank(singular_values(gram * 1e200, weights)) == pytest.approx(base, rel=1e-9)


def test_duplicated_rows_lower_the_numerical_rank():
    gram, psi = random_gram(0, 4, 50)
    psi[3] = psi[2]
    gram = psi @ psi.T
    assert numerical_rank(gram) == 3
    assert numerical_rank(gram + np.diag([0, 0, 0, 1e-6 * gram.max()])) == 4
    assert numerical_rank(gram + np.diag([0, 0, 0, 1e-6 * gram.max()]), floor=1e-5) == 3


def test_centring_and_unit_rows_against_the_rows():
    gram, psi = random_gram(3, 6, 40)
    weights = np.random.default_rng(4).standard_normal(6)
    rows = weights[:, None] * psi
    moved = rows - rows.mean(axis=0)
    assert np.allclose(centred(weighted_gram(gram, weights)), moved @ moved.T)
    assert np.allclose(centred_values(gram, weights)[:5], np.linalg.svd(moved, compute_uv=False)[:5], rtol=1e-12)
    assert centred_values(gram, weights)[5] == 0 and numerical_rank(centred(weighted_gram(gram, weights))) == 5
    unit = psi / np.linalg.norm(psi, axis=1, keepdims=True)
    assert np.allclose(unit_rows(gram), unit @ unit.T)


@given(SEEDS, st.integers(2, 5), st.floats(0, 4), st.sampled_from([1e-8, 1e-4, 1e-2, 0.3]))
@settings(deadline=None, max_examples=40)
def test_floor_interval_against_every_corner_and_random_points(seed, R, decay, floor):
    gram, _ = random_gram(seed, R, 30, decay)
    rng = np.random.default_rng(seed + 1)
    weights = rng.standard_normal(R)
    values = np.clip(np.linalg.eigvalsh(weighted_gram(gram, weights))[::-1], 0, None)
    delta = eigenvalue_error(gram, weights, floor)
    low, high = np.sqrt(np.clip(values - delta, 0, None)), np.sqrt(values + delta)
    for quantity in (effective_rank, entropy_rank):
        least, greatest = floor_interval(gram, weights, floor, quantity)
        corners = [quantity(np.array(c)) for c in itertools.product(*zip(low, high, strict=True))]
        assert least == pytest.approx(np.nanmin(corners), rel=1e-9)
        points = np.sqrt(low**2 + rng.random((500, R)) * (high**2 - low**2))
        assert np.all(quantity(points) <= greatest + 1e-9) and np.all(quantity(points) >= least - 1e-9)
        assert np.nanmax(corners) <= greatest + 1e-9


@given(SEEDS, st.sampled_from([1e-7, 1e-4, 1e-2]))
@settings(deadline=None, max_examples=40)
def test_floor_interval_covers_the_truth_of_a_rounded_gram(seed, floor):
    gram, psi = random_gram(seed, 6, 40, 0.8)
    weights = np.random.default_rng(seed + 1).standard_normal(6)
    truth = np.linalg.svd(weights[:, None] * psi, compute_uv=False)
    noise = np.random.default_rng(seed + 2).uniform(-1, 1, gram.shape)
    norms = np.sqrt(np.diag(gram))
    rounded = gram + floor * np.outer(norms, norms) * (np.triu(noise) + np.triu(noise, 1).T)
    for quantity in (effective_rank, entropy_rank):
        least, greatest = floor_interval(rounded, weights, floor, quantity)
        assert least <= quantity(truth) <= greatest
        assert least <= quantity(singular_values(rounded, weights)) <= greatest


ENERGIES = {"top1_fraction": top1_fraction, "stable_rank": stable_rank, "participation_ratio": participation_ratio}


@given(SEEDS, st.integers(2, 8), st.floats(0, 2), st.sampled_from([1e-7, 1e-4, 1e-2, 0.165]))
@settings(deadline=None, max_examples=60)
def test_intervals_of_energies_cover_the_truth_and_hold_the_middle(seed, R, decay, floor):
    gram, psi = random_gram(seed, R, 40, decay)
    rng = np.random.default_rng(seed + 1)
    weights = rng.standard_normal(R)
    norms = np.sqrt(np.diag(gram))
    noise = np.triu(rng.choice([-1.0, 1.0], (R, R)))
    moved = gram + floor * np.outer(norms, norms) * (noise + np.triu(noise, 1).T)
    truth = np.linalg.svd(weights[:, None] * psi, compute_uv=False)
    own = np.clip(np.linalg.eigvalsh(weighted_gram(moved, weights))[::-1], 0, None)
    # bounds are relative to the exact Gram: they hold from the moved one with its own, slightly other, norms
    wide = floor / (1 - floor)
    errors = eigenvalue_error(moved, weights, wide), absolute_error(moved, weights, wide)
    for name, (low, high) in energy_intervals(own, *errors, R).items():
        assert low * (1 - 1e-12) <= ENERGIES[name](truth) <= high * (1 + 1e-12)
        assert low * (1 - 1e-12) <= ENERGIES[name](np.sqrt(own)) <= high * (1 + 1e-12)


@given(SEEDS, st.integers(2, 8), st.sampled_from([1e-4, 1e-2, 0.03]))
@settings(deadline=None, max_examples=60)
def test_no_eigenvalue_moves_by_more_than_its_error(seed, R, floor):
    """Graded rows (weights over four orders of magnitude), entries disturbed by as much as the floor allows."""
    gram, _ = random_gram(seed, R, 40)
    rng = np.random.default_rng(seed + 1)
    weights = 10.0 ** rng.uniform(-4, 0, R)
    norms = np.sqrt(np.diag(gram))
    noise = np.triu(rng.choice([-1.0, 1.0], (R, R)))
    moved = gram + floor * np.outer(norms, norms) * (noise + np.triu(noise, 1).T)
    before, after = (np.linalg.eigvalsh(weighted_gram(g, weights))[::-1] for g in (gram, moved))
    assert np.all(np.abs(after - before) <= eigenvalue_error(gram, weights, floor) * (1 + 1e-9))


@given(SEEDS, st.integers(2, 8), st.sampled_from([1e-4, 1e-2, 0.03]))
@settings(deadline=None, max_examples=40)
def test_centring_keeps_the_bounds(seed, R, floor):
    gram, _ = random_gram(seed, R, 40)
    rng = np.random.default_rng(seed + 1)
    weighted = weighted_gram(gram, 10.0 ** rng.uniform(-3, 0, R))
    norms = np.sqrt(np.diag(weighted))
    noise = np.triu(rng.choice([-1.0, 1.0], (R, R)))
    moved = weighted + floor * np.outer(norms, norms) * (noise + np.triu(noise, 1).T)
    exact, found = (np.linalg.eigvalsh(centred(weighted))[::-1], centred_eigenvalues(moved))
    error = graded_error(found, moved, floor)
    assert np.all(np.abs(found - exact) <= graded_error(exact, weighted, floor) * (1 + 1e-9))
    assert rank_above(found, error) <= R - 1 and found[-1] == 0


def test_floor_interval_is_a_point_without_a_floor_and_ignores_rows_of_zero_weight():
    least, greatest = floor_interval(np.eye(4), [1.0, 1.0, 0.0, 0.0], 0.0)
    assert least == pytest.approx(2, abs=1e-10) and greatest == pytest.approx(2, abs=1e-10)


def test_batch_gives_what_single_matrices_give():
    rng = np.random.default_rng(5)
    grams = np.stack([random_gram(i, 4, 9)[0] for i in range(7)])
    weights, floors = rng.standard_normal((7, 4)), rng.uniform(0, 1e-3, 7)
    s = singular_values(grams, weights)
    low, high = floor_interval(grams, weights, floors)
    for i in range(7):
        assert np.array_equal(s[i], singular_values(grams[i], weights[i]))
        assert np.allclose(centred_values(grams, weights)[i], centred_values(grams[i], weights[i]), rtol=1e-12)
        assert numerical_rank(grams, weights, floors)[i] == numerical_rank(grams[i], weights[i], floors[i])
        assert np.allclose((low[i], high[i]), floor_interval(grams[i], weights[i], floors[i]))
    for quantity in (effective_rank, top1_fraction, participation_ratio, stable_rank, entropy_rank, nonzero_values):
        assert np.allclose(quantity(s), [quantity(row) for row in s])


@pytest.mark.parametrize("R", [2, 3, 4, 8, 16])
def test_binary_null_against_orthogonal_scores(R):
    for k in range(1, R):
        rewards = np.arange(R) < k
        weights = rewards - rewards.mean()
        measured = effective_rank(singular_values(3.0 * np.eye(R), weights))
        assert null_effective_rank(k, R) == pytest.approx(measured)
        assert null_orthogonal(weights) == pytest.approx(measured)
        assert null_effective_rank(k, R) >= 4 * (R - 1) / R - 1e-12
    assert np.isnan(null_effective_rank(0, R)) and np.isnan(null_effective_rank(R, R))


def test_null_with_measured_norms_against_an_orthogonal_matrix():
    gram, psi = random_gram(1, 5, 20)
    weights = np.array([0.8, -0.2, -0.2, -0.2, -0.2])
    q, _ = np.linalg.qr(np.random.default_rng(2).standard_normal((20, 5)))
    rows = weights[:, None] * np.linalg.norm(psi, axis=1)[:, None] * q.T
    assert null_measured_norms(gram, weights) == pytest.approx(effective_rank(np.linalg.svd(rows, compute_uv=False)))


def test_gaussian_null_against_sampling_the_scores_themselves():
    rng = np.random.default_rng(0)
    spectrum = np.array([4.0, 1.0, 0.5, 0.1])
    basis, _ = np.linalg.qr(rng.standard_normal((4, 4)))
    gram = (basis * spectrum) @ basis.T
    weights = np.array([0.5, 0.5, -0.5, -0.5])
    draws = []
    for _ in range(4000):
        rows = weights[:, None] * rng.standard_normal((4, 4)) * np.sqrt(spectrum / 4)
        draws.append(effective_rank(np.linalg.svd(rows, compute_uv=False)))
    normal = np.random.default_rng(1).standard_normal((4000, 4, 4))
    got = float(null_gaussian(gram, weights, normal))
    assert got == pytest.approx(np.mean(draws), abs=5 * np.std(draws) / np.sqrt(2000))
    again = null_gaussian(np.stack([gram, gram]), np.stack([weights, weights]), normal[:16].reshape(2, 8, 4, 4))
    alone = [float(null_gaussian(gram, weights, part)) for part in (normal[:8], normal[8:16])]
    assert again == pytest.approx(alone)  # a group's value depends on its own draws alone


def test_summary_has_the_metric_names_and_no_zero_for_an_empty_spectrum():
    values = summary(np.eye(3), [1.0, -0.5, -0.5], 1e-6)
    assert list(values) == [
        "effective_rank", "top1_fraction", "participation_ratio", "stable_rank", "entropy_rank", "numerical_rank",
        "null_effective_rank",
    ]  # fmt: skip
    assert values["effective_rank"] == pytest.approx(values["null_effective_rank"])
    empty = summary(np.zeros((3, 3)))
    assert all(np.isnan(empty[name]) for name in empty if name != "null_effective_rank")


@pytest.mark.parametrize("bad", [np.zeros((2, 3)), np.array([[1.0, np.nan], [np.nan, 1.0]]), np.zeros(3)])
def test_a_gram_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="Gram matrix must be"):
        singular_values(bad)
    with pytest.raises(ValueError, match="weights must be"):
        singular_values(np.eye(2), [1.0, 2.0, 3.0])
