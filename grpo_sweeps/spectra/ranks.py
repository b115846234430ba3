"""Spectral quantities of a group's R x R Gram matrix: five ranks, the top-1 fraction, and how far to trust them.

The gradient matrix of a group (arXiv 2606.29238) is G = diag(w) Psi: row i is the score psi_i = sum_t grad log
pi(a_t|s_t) of rollout i over all D parameters, times its weight w_i in the loss. Everything here needs only the Gram
of the scores, K_ij = <psi_i, psi_j>, since G G' = diag(w) K diag(w). The singular values s_j of G are the square
roots of its eigenvalues.

Shapes: `gram_RR` is (..., R, R) float64, `weights_R` (..., R), `values_R` (..., R) singular values; leading axes are
a batch. Intervals of means over groups are in `maths.intervals`.

Nulls, weakest assumption last: orthogonal scores of equal norm (`null_effective_rank`, `null_orthogonal`), orthogonal
scores with the measured norms (`null_measured_norms`), Gaussian scores with the group's own spectrum (`null_gaussian`).

What a value is. Ranks, fractions and nulls come from the eigenvalues of diag(w) K diag(w) alone: those that rounding
made negative are 0, and nothing else is altered. Rows of equal texts are made one first (`equal.merged`). For
one matrix stable <= participation <= effective <= entropy always holds.

Precision. `floor` says how exactly K is the Gram of the gradients that were applied: entry K_ij is taken to be known
to +-floor * sqrt(K_ii K_jj). It decides the numerical rank, which may therefore lie below the other ranks, and gives
the interval of a value (`floor`); it changes none. Two bounds on the eigenvalues of H = diag(w) K diag(w)
follow, and the smaller counts (`eigenvalue_error`). Weyl: none is off by more than floor * tr H. Relative, for a graded
matrix (Demmel and Veselic 1992): with A the Gram of the unit rows, none is off by more than the part R * floor /
lambda_min(A) of itself; a row of small weight is known as well, relative to its size, as a row of large weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from grpo_sweeps.spectra.equal import centred_rank_bound, merged, merged_weights
from grpo_sweeps.types import Array

ROUNDING_FLOOR = 2.0**-46
"""Least relative precision assumed of a float64 Gram: 64 units in the last place, for the sums behind its entries."""


def checked(gram_RR: ArrayLike) -> Array:
    gram = np.asarray(gram_RR, dtype=np.float64)
    if gram.ndim < 2 or gram.shape[-1] != gram.shape[-2]:
        raise ValueError(f"a Gram matrix must be square, got shape {gram.shape}")
    if not np.isfinite(gram).all():
        raise ValueError("a Gram matrix must be finite")
    return gram


def weighted_gram(gram_RR: ArrayLike, weights_R: ArrayLike | None = None) -> Array:
    """diag(w) K diag(w), symmetrised: the Gram of the weighted rows. `weights_R` None means w = 1.

    Shapes (..., R, R) and (..., R) -> (..., R, R). Raises ValueError on a shape that does not fit or a value not
    finite.

    >>> weighted_gram([[1.0, 0.5], [0.5, 1.0]], [2.0, -1.0]).tolist()
    [[4.0, -1.0], [-1.0, 1.0]]
    """
    gram = checked(gram_RR)
    gram = 0.5 * (gram + np.swapaxes(gram, -1, -2))
    if weights_R is None:
        return gram
    weights = np.asarray(weights_R, dtype=np.float64)
    if weights.shape[-1:] != gram.shape[-1:] or not np.isfinite(weights).all():
        raise ValueError(f"weights must be {gram.shape[-1]} finite numbers a group, got shape {weights.shape}")
    return weights[..., :, None] * gram * weights[..., None, :]


def centred(gram_RR: ArrayLike) -> Array:
    """H M H with H = I - 11'/R: the Gram after the mean row is subtracted from every row; its rank is at most R - 1.

    Pass `weighted_gram(K, w)` to centre the rows of G, K itself to centre the scores.

    >>> centred([[1.0, 0.0], [0.0, 1.0]]).tolist()
    [[0.5, -0.5], [-0.5, 0.5]]
    """
    gram = checked(gram_RR)
    gram = gram - gram.mean(axis=-1, keepdims=True)
    return gram - gram.mean(axis=-2, keepdims=True)


def unit_rows(gram_RR: ArrayLike) -> Array:
    """K_ij / sqrt(K_ii K_jj): the Gram of the rows scaled to unit norm. A row of norm zero stays zero.

    >>> unit_rows([[4.0, 1.0], [1.0, 1.0]]).tolist()
    [[1.0, 0.5], [0.5, 1.0]]
    """
    gram = checked(gram_RR)
    norms_R = np.sqrt(np.clip(np.diagonal(gram, axis1=-2, axis2=-1), 0.0, None))
    scale_R = np.divide(1.0, norms_R, out=np.zeros_like(norms_R), where=norms_R > 0)
    return weighted_gram(gram, scale_R)


def absolute_error(gram_RR: ArrayLike, weights_R: ArrayLike | None = None, floor: ArrayLike = 0.0) -> Array:
    """Weyl's bound on the error of every eigenvalue of H = diag(w) K diag(w): max(floor, 2^-46) * tr H, shape (...).

    The Frobenius norm of the entrywise bound floor * |w_i| sqrt(K_ii) |w_j| sqrt(K_jj) is floor * tr H.
    """
    diagonal_R = np.diagonal(weighted_gram(gram_RR, weights_R), axis1=-2, axis2=-1)
    relative = np.maximum(np.asarray(floor, dtype=np.float64), ROUNDING_FLOOR)
    return np.asarray(relative * np.abs(diagonal_R).sum(axis=-1))


def eigenvalue_error(gram_RR: ArrayLike, weights_R: ArrayLike | None = None, floor: ArrayLike = 0.0) -> Array:
    """Bound on the error of each eigenvalue of diag(w) K diag(w), largest eigenvalue first, shape (..., R).

    The smaller of `absolute_error` and, where R * floor < lambda_min(A), the relative bound: x' dH x = (Dx)' E (Dx) <=
    |E| |Dx|^2 <= |E| / lambda_min(A) x' H x, with D the row norms of H, |E| <= R * floor, and then Courant-Fischer.
    This is the stated threshold of the numerical rank: an eigenvalue at or below it is not told from zero.
    """
    gram = weighted_gram(gram_RR, weights_R)
    return graded_error(eigenvalues(gram), gram, floor)


def centred_values(gram_RR: ArrayLike, weights_R: ArrayLike | None = None, same_as_R: ArrayLike | None = None) -> Array:
    """Singular values of the rows w_i psi_i less their mean, largest first and the last of them 0. Shape (..., R).

    gram_RR: K, averaged over equal texts (`equal.averaged`) where `same_as_R` names them.

    >>> centred_values([[1.0, 0.0], [0.0, 1.0]]).round(12).tolist()
    [1.0, 0.0]
    """
    return np.sqrt(centred_eigenvalues(gram_RR, weights_R, same_as_R))


def centred_eigenvalues(
    gram_RR: ArrayLike, weights_R: ArrayLike | None = None, same_as_R: ArrayLike | None = None
) -> Array:
    """The squares of `centred_values`: eigenvalues of Q' diag(w) K diag(w) Q, Q (R, R - 1) an orthonormal basis of what
    is orthogonal to the ones. What counting rows shows to be 0 (`centred_rank_bound`) is 0."""
    H = weighted_gram(gram_RR, weights_R)
    R = H.shape[-1]
    Q = complement_of_ones(R)
    weights = np.ones(H.shape[:-1]) if weights_R is None else np.broadcast_to(weights_R, H.shape[:-1])
    same = np.broadcast_to(np.arange(R) if same_as_R is None else same_as_R, H.shape[:-1])
    found = np.zeros(H.shape[:-1])
    found[..., : R - 1] = np.linalg.eigvalsh(Q.T @ H @ Q)[..., ::-1]
    return first_of(found, centred_rank_bound(weights, same))


def complement_of_ones(R: int) -> Array:
    """(R, R - 1): column j is orthogonal to the ones and to the other columns (Helmert's basis).

    >>> complement_of_ones(2).round(3).tolist()
    [[0.707], [-0.707]]
    """
    j = np.arange(1, R)
    rows = np.arange(R)[:, None]
    return np.asarray(np.where(rows < j, 1.0, np.where(rows == j, -j, 0.0)) / np.sqrt(j * (j + 1.0)))


def graded_error(own_R: Array, gram: Array, floor: ArrayLike) -> Array:
    """`eigenvalue_error` for the eigenvalues `own_R` of C M C', M = `gram` and C the identity or a projection."""
    R = gram.shape[-1]
    relative = np.maximum(np.asarray(floor, dtype=np.float64), ROUNDING_FLOOR)
    # A row of weight zero takes no part; 1 on its diagonal cannot be the least eigenvalue of a unit-diagonal matrix.
    empty_R = np.diagonal(gram, axis1=-2, axis2=-1) <= 0
    least = np.linalg.eigvalsh(unit_rows(gram) + empty_R[..., None] * np.eye(R))[..., 0]
    share = np.divide(R * relative, least, out=np.full(np.shape(least), np.inf), where=least > 0)
    absolute = absolute_error(gram, None, floor)[..., None]
    share = np.where(share < 1, share, np.inf)[..., None]
    graded = np.multiply(own_R, share, out=np.full(own_R.shape, np.inf), where=np.isfinite(share))
    # the eigenvalue solver itself is exact to a part of the largest only
    return np.maximum(np.minimum(absolute, graded), absolute_error(gram)[..., None])


def eigenvalues(gram_RR: ArrayLike, weights_R: ArrayLike | None = None) -> Array:
    """Eigenvalues of diag(w) K diag(w), largest first, those that rounding made negative set to 0. Shape (..., R).

    A row of zeros makes one eigenvalue zero: so many of the smallest are 0 exactly.
    """
    gram = weighted_gram(gram_RR, weights_R)
    rows = (np.diagonal(gram, axis1=-2, axis2=-1) > 0).sum(axis=-1)
    return first_of(np.asarray(np.linalg.eigvalsh(gram)[..., ::-1], dtype=np.float64), rows)


def first_of(eigenvalues_R: Array, rank: ArrayLike) -> Array:
    """The first `rank` eigenvalues, negative ones set to 0, and zeros: what a matrix of this rank at most can have."""
    inside = np.arange(eigenvalues_R.shape[-1]) < np.asarray(rank)[..., None]
    return np.where(inside, np.clip(eigenvalues_R, 0.0, None), 0.0)


def singular_values(gram_RR: ArrayLike, weights_R: ArrayLike | None = None) -> Array:
    """Singular values s_j of diag(w) Psi from K = Psi Psi', largest first. Shapes (..., R, R), (..., R) -> (..., R).

    >>> singular_values([[4.0, 0.0], [0.0, 1.0]], [1.0, -1.0]).tolist()
    [2.0, 1.0]
    """
    return np.sqrt(eigenvalues(gram_RR, weights_R))


def _ratio(numerator: Array, denominator: Array) -> Any:
    """numerator / denominator, NaN where the matrix is zero (no quantity here is defined for it)."""
    ratio = np.divide(numerator, denominator, out=np.full(np.shape(denominator), np.nan), where=denominator > 0)
    return ratio if np.ndim(ratio) else float(ratio)


def _scaled(values_R: ArrayLike) -> Array:
    """Values over their largest, so that squares and fourth powers neither overflow nor vanish."""
    values = np.asarray(values_R, dtype=np.float64)
    largest = values.max(axis=-1, keepdims=True)
    return np.divide(values, largest, out=np.zeros_like(values), where=largest > 0)


def effective_rank(values_R: ArrayLike) -> Any:
    """The paper's effective rank (sum s)^2 / sum s^2, from 1 to the number of non-zero s (arXiv 2606.29238, section 5).

    >>> effective_rank([1.0, 1.0, 0.0])
    2.0
    """
    s = _scaled(values_R)
    return _ratio(s.sum(axis=-1) ** 2, (s**2).sum(axis=-1))


def top1_fraction(values_R: ArrayLike) -> Any:
    """s_1^2 / sum s^2: the share of the squared norm along the first singular direction.

    >>> top1_fraction([2.0, 1.0])
    0.8
    """
    return top_fraction(values_R, 1)


def top_fraction(values_R: ArrayLike, n: int) -> Any:
    """(s_1^2 + ... + s_n^2) / sum s^2: the share of the squared norm along the first n singular directions.

    >>> top_fraction([2.0, 1.0, 0.0], 2)
    1.0
    """
    energy_R = np.sort(_scaled(values_R) ** 2, axis=-1)[..., ::-1]
    return _ratio(energy_R[..., :n].sum(axis=-1), energy_R.sum(axis=-1))


def participation_ratio(values_R: ArrayLike) -> Any:
    """(sum s^2)^2 / sum s^4, the participation ratio of the eigenvalues.

    >>> participation_ratio([3.0, 3.0])
    2.0
    """
    energy_R = _scaled(values_R) ** 2
    return _ratio(energy_R.sum(axis=-1) ** 2, (energy_R**2).sum(axis=-1))


def stable_rank(values_R: ArrayLike) -> Any:
    """sum s^2 / s_1^2, one over the top-1 fraction.

    >>> stable_rank([2.0, 1.0])
    1.25
    """
    energy_R = _scaled(values_R) ** 2
    return _ratio(energy_R.sum(axis=-1), energy_R.max(axis=-1))


def entropy_rank(values_R: ArrayLike) -> Any:
    """exp(-sum p log p), p = s / sum s: the effective rank of Roy & Vetterli (2007).

    >>> round(entropy_rank([1.0, 1.0, 1.0]), 12)
    3.0
    """
    s = _scaled(values_R)
    total = s.sum(axis=-1, keepdims=True)
    p = np.divide(s, total, out=np.zeros_like(s), where=total > 0)
    entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0).sum(axis=-1)
    rank = np.where(total[..., 0] > 0, np.exp(entropy), np.nan)
    return rank if rank.ndim else float(rank)


def numerical_rank(gram_RR: ArrayLike, weights_R: ArrayLike | None = None, floor: ArrayLike = 0.0) -> Any:
    """Number of eigenvalues of diag(w) K diag(w) above their own errors, `eigenvalue_error`. (..., R, R) -> (...).

    >>> numerical_rank([[1.0, 0.0], [0.0, 1e-3]], None, 1e-4), numerical_rank([[1.0, 1.0], [1.0, 1.0]])
    (2, 1)
    """
    gram = weighted_gram(gram_RR, weights_R)
    own_R = eigenvalues(gram)
    return rank_above(own_R, graded_error(own_R, gram, floor))


def rank_above(eigenvalues_R: Array, error_R: ArrayLike) -> Any:
    """Number of eigenvalues (largest first) above their errors; 1 at least where the matrix is not zero."""
    above = eigenvalues_R > np.asarray(error_R, dtype=np.float64)
    count = np.maximum(above.sum(axis=-1), eigenvalues_R[..., 0] > 0)
    return count if np.ndim(count) else int(count)


def nonzero_values(values_R: ArrayLike) -> Any:
    """Number of singular values that float64 tells from zero: the rank where no measurement stands behind them.

    >>> nonzero_values([2.0, 1e-3, 1e-9])
    2
    """
    energy_R = _scaled(values_R) ** 2
    count = (energy_R > ROUNDING_FLOOR * energy_R.sum(axis=-1, keepdims=True)).sum(axis=-1)
    return count if np.ndim(count) else int(count)


def null_effective_rank(k: ArrayLike, R: ArrayLike) -> Any:
    """4 k (R - k) / R: effective rank of group-mean advantages over orthogonal scores of equal norm, k of R correct.

    Binary rewards give abs(w) = 1 - k/R (k times) and k/R (R - k times), put into (sum |w|)^2 / sum w^2. NaN for k =
    0 and k = R, where the group has no gradient. In a mixed group it is at least 4 (R - 1) / R.

    >>> [null_effective_rank(k, 4) for k in (1, 2, 3)]
    [3.0, 4.0, 3.0]
    """
    k, R = np.asarray(k, dtype=np.float64), np.asarray(R, dtype=np.float64)
    value = np.where((k > 0) & (k < R), 4.0 * k * (R - k) / R, np.nan)
    return value if value.ndim else float(value)


def null_orthogonal(weights_R: ArrayLike) -> Any:
    """(sum |w|)^2 / sum w^2: effective rank of orthogonal scores of equal norm, any weights. Shape (..., R) -> (...).

    >>> round(null_orthogonal([0.75, -0.25, -0.25, -0.25]), 12)
    3.0
    """
    return effective_rank(np.abs(np.asarray(weights_R, dtype=np.float64)))


def null_distinct(weights_R: ArrayLike, same_as_R: ArrayLike) -> Any:
    """Effective rank of orthogonal scores of equal norm where equal texts count as one: s_u^2 = sum over them of w^2.

    What is left between this null and the measured value is structure in the scores of different texts.

    >>> round(null_distinct([0.5, 0.5, -0.5 * 2**0.5], [0, 0, 2]), 12)
    2.0
    """
    return effective_rank(np.abs(merged_weights(weights_R, same_as_R)))


def null_measured_norms(
    gram_RR: ArrayLike, weights_R: ArrayLike | None = None, quantity: Callable[[ArrayLike], Any] = effective_rank
) -> Any:
    """Effective rank of orthogonal scores with the measured norms: s_i = |w_i| sqrt(K_ii). Shape (..., R, R) -> (...).
    `quantity`: another one of these singular values.

    >>> null_measured_norms([[4.0, 3.0], [3.0, 4.0]], [1.0, -1.0])
    2.0
    """
    gram = np.asarray(gram_RR, dtype=np.float64)
    norms_R = np.sqrt(np.clip(np.diagonal(gram, axis1=-2, axis2=-1), 0.0, None))
    return quantity(norms_R if weights_R is None else np.abs(np.asarray(weights_R)) * norms_R)


def null_gaussian(gram_RR: ArrayLike, weights_R: ArrayLike | None, normal_SRR: ArrayLike) -> Array:
    """Mean effective rank of the draws of `gaussian_values`. Shape (..., R, R) -> (...)."""
    return np.asarray(effective_rank(gaussian_values(gram_RR, weights_R, normal_SRR))).mean(axis=-1)


def gaussian_values(gram_RR: ArrayLike, weights_R: ArrayLike | None, normal_SRR: ArrayLike) -> Array:
    """Singular values of weighted Gaussian scores that have the group's own spectrum. Shape (..., R, R) -> (..., S, R).

    psi_i ~ N(0, Sigma) independently, Sigma with the eigenvalues of K / R: then K* = Z diag(eigenvalues of K / R) Z'
    with Z an (R, R) standard normal matrix; `normal_SRR`, (..., S, R, R), holds S of them for each group. R rows
    sampled from R directions are less spread than the directions themselves, so this null lies below the spectrum it
    is drawn from; compare it with the measured value for the same weights only.
    """
    gram = np.asarray(gram_RR, dtype=np.float64)
    R = gram.shape[-1]
    scale_R = np.sqrt(eigenvalues(gram) / R)
    weights_R = np.ones(gram.shape[:-1]) if weights_R is None else np.asarray(weights_R, dtype=np.float64)
    rows_SRR = np.asarray(normal_SRR, dtype=np.float64) * scale_R[..., None, None, :] * weights_R[..., None, :, None]
    drawn_SRR = rows_SRR @ np.swapaxes(rows_SRR, -1, -2)
    rank = np.minimum((scale_R > 0).sum(axis=-1), (weights_R != 0).sum(axis=-1))
    return np.sqrt(first_of(np.linalg.eigvalsh(drawn_SRR)[..., ::-1], rank[..., None]))


def summary(
    gram_RR: ArrayLike, weights_R: ArrayLike | None = None, floor: float = 0.0, same_as_R: ArrayLike | None = None
) -> dict[str, float]:
    """The values logged for one group, by metric name (what follows `spectral/`, or `scores/` where w = 1).

    `floor` decides `numerical_rank` alone. same_as_R: the first rollout with the same tokens; None where all differ.
    `null_effective_rank` is what orthogonal scores of equal norm would give with these weights, (sum |w|)^2 / sum w^2.
    A Gram that is zero has no spectrum: its values are NaN, and the caller leaves them out.

    >>> summary([[1.0, 0.0], [0.0, 1.0]], [0.5, -0.5])["effective_rank"]
    2.0
    """
    weights = np.ones(np.shape(gram_RR)[-1]) if weights_R is None else np.asarray(weights_R, dtype=np.float64)
    one = merged(checked(gram_RR), weights, np.arange(len(weights)) if same_as_R is None else same_as_R)
    s = singular_values(*one)
    return {
        "effective_rank": effective_rank(s),
        "top1_fraction": top1_fraction(s),
        "participation_ratio": participation_ratio(s),
        "stable_rank": stable_rank(s),
        "entropy_rank": entropy_rank(s),
        "numerical_rank": float(numerical_rank(*one, floor)) if s.any() else float("nan"),
        "null_effective_rank": null_orthogonal(weights),
    }
