"""Equal texts: the spectrum of merged rows against the singular values of the rows themselves, exact zeros, batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_sweeps.spectra import (
    centred_values,
    effective_rank,
    gaussian_values,
    null_distinct,
    numerical_rank,
    singular_values,
    summary,
    unit_rows,
)
from grpo_sweeps.spectra.equal import (
    averaged,
    centred_rank_bound,
    distinct_rows,
    first_equal,
    merged,
    same_as_by_cosine,
    same_rows_of_the_loss,
)

SEEDS = st.integers(0, 2**32 - 1)


def rows_of_texts(seed: int, R: int, texts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(psi (R, D), weights, same_as, K) of R rollouts of at most `texts` texts."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, texts, R)
    psi = rng.standard_normal((texts, 40))[text]
    weights = rng.choice([-1.0, 1.0], R) * rng.uniform(0.3, 1.0, R)
    return psi, weights, first_equal(text), psi @ psi.T


def svd(rows: np.ndarray) -> np.ndarray:
    """(R,) of (R, D) rows, those that equal rows make zero left to rounding."""
    return np.linalg.svd(rows, compute_uv=False)


@given(SEEDS, st.integers(2, 9), st.integers(1, 9))
@settings(deadline=None, max_examples=80)
def test_merged_rows_have_the_singular_values_of_all_rows(seed, R, texts):
    psi, weights, same, gram = rows_of_texts(seed, R, texts)
    different = distinct_rows(same)
    for w in (weights, None):
        rows = psi if w is None else w[:, None] * psi
        found, exact = singular_values(*merged(gram, w, same)), svd(rows)
        assert np.allclose(found[:different], exact[:different], rtol=0, atol=1e-12 * exact[0])
        assert not found[different:].any() and exact[different:].max(initial=0) < 1e-13 * exact[0]
        assert numerical_rank(*merged(gram, w, same)) == different
    unit = psi / np.linalg.norm(psi, axis=1, keepdims=True)
    found = singular_values(*merged(unit_rows(averaged(gram, same)), None, same))
    assert np.allclose(found, svd(unit), rtol=0, atol=1e-12 * np.sqrt(R)) and not found[different:].any()


@given(SEEDS, st.integers(2, 9), st.integers(1, 9), st.booleans())
@settings(deadline=None, max_examples=80)
def test_centred_rows_of_equal_texts(seed, R, texts, one_weight):
    """With one weight a text the column of ones is a combination of theirs, and centring costs one more."""
    psi, weights, same, gram = rows_of_texts(seed, R, texts)
    weights = weights[same] if one_weight else weights
    rows = weights[:, None] * psi
    exact = svd(rows - rows.mean(axis=0))
    found = centred_values(averaged(gram, same), weights, same)
    bound = centred_rank_bound(weights, same)
    assert bound == np.linalg.matrix_rank(rows - rows.mean(axis=0), tol=1e-9 * svd(rows)[0]) <= R - 1
    assert np.allclose(found, exact, rtol=0, atol=1e-11 * svd(rows)[0]) and not found[bound:].any()


def test_without_merging_a_zero_is_rounding_noise():
    """What merging is for: many equal texts make values of 1e-8 that add up in an effective rank."""
    psi, weights, same, gram = rows_of_texts(1, 8, 2)
    gram = gram * (1 + 1e-16 * np.random.default_rng(0).standard_normal((8, 8)))
    exact = effective_rank(svd(weights[:, None] * psi))
    assert effective_rank(singular_values(*merged(gram, weights, same))) == pytest.approx(exact, rel=1e-14)
    assert abs(effective_rank(singular_values(gram, weights)) / exact - 1) > 1e-9


def test_entries_of_equal_rows_are_averaged():
    """Equal texts in a half type: entries that rounding has made different count alike."""
    _, weights, same, exact = rows_of_texts(3, 6, 3)
    noise = 1e-3 * np.random.default_rng(4).standard_normal(exact.shape)
    gram = exact + noise + noise.T
    mean = averaged(gram, same)
    for i in range(6):
        for j in range(6):
            block = gram[np.ix_(same == same[i], same == same[j])]
            assert mean[i, j] == pytest.approx(block.mean(), rel=1e-14)
    found = singular_values(*merged(gram, weights, same))
    first = np.flatnonzero(same == np.arange(6))
    energy = np.array([np.square(weights[same == f]).sum() for f in first])
    small = np.sqrt(np.outer(energy, energy)) * mean[np.ix_(first, first)]
    assert found[: len(first)] == pytest.approx(np.sqrt(np.linalg.eigvalsh(small)[::-1]), rel=1e-12)


def test_a_batch_gives_bit_for_bit_what_single_groups_give():
    made = [rows_of_texts(seed, 6, texts) for seed, texts in enumerate([1, 2, 3, 6, 60, 60])]
    weights, same, gram = (np.stack([m[i] for m in made]) for i in (1, 2, 3))
    together = merged(gram, weights, same)
    assert len(set(distinct_rows(same).tolist())) > 3
    for i in range(len(made)):
        alone = merged(gram[i], weights[i], same[i])
        assert np.array_equal(together[0][i], alone[0]) and np.array_equal(together[1][i], alone[1])
        assert null_distinct(weights, same)[i] == null_distinct(weights[i], same[i])
        assert np.array_equal(same_as_by_cosine(gram)[i], same_as_by_cosine(gram[i]))


@given(SEEDS, st.integers(2, 9), st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_equal_rows_are_found_by_their_cosine(seed, R, texts):
    psi, _, same, gram = rows_of_texts(seed, R, texts)
    assert np.array_equal(same_as_by_cosine(gram), same)
    near = psi + 1e-3 * np.random.default_rng(seed + 1).standard_normal(psi.shape)
    assert np.array_equal(same_as_by_cosine(near @ near.T), np.arange(R))  # a cosine of 1 - 1e-6 is another text


def test_rows_of_another_length_or_sign_or_none_are_not_equal():
    rows = np.array([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    assert same_as_by_cosine(rows @ rows.T).tolist() == [0, 1, 2, 3, 4, 0]


def test_rows_of_the_loss_are_equal_where_their_weights_are():
    """A random reward: two rollouts of one text, one right and one wrong, have rows of opposite signs."""
    assert same_rows_of_the_loss([0, 0, 2, 2], [0.5, -0.5, 0.25, 0.25]).tolist() == [0, 1, 2, 2]


def test_the_null_of_equal_texts_is_that_of_orthogonal_ones():
    _, weights, same, _ = rows_of_texts(5, 8, 4)
    rows = weights[:, None] * np.eye(8)[same]
    assert null_distinct(weights, same) == pytest.approx(effective_rank(svd(rows)), rel=1e-14)


def test_draws_from_a_spectrum_with_zeros_have_as_many_at_least():
    _, weights, same, gram = rows_of_texts(7, 6, 3)
    normal = np.random.default_rng(8).standard_normal((5, 6, 6))
    one = singular_values(*merged(gram, None, same))
    found = gaussian_values(np.diag(one**2), weights, normal)
    different = distinct_rows(same)
    rows = weights[:, None] * normal * one / np.sqrt(6)
    exact = np.linalg.svd(rows, compute_uv=False)
    assert np.allclose(found, exact, rtol=0, atol=1e-12 * exact.max()) and not found[:, different:].any()


def test_what_is_logged_merges_equal_texts():
    psi, weights, same, gram = rows_of_texts(9, 6, 3)
    found = summary(gram, weights, 0.0, same)
    assert found["effective_rank"] == pytest.approx(effective_rank(svd(weights[:, None] * psi)), rel=1e-12)
    assert found["numerical_rank"] == distinct_rows(same)
