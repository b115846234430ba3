"""Rollouts of one text: their rows of the Gram are made one row before its spectrum is taken.

Two rollouts of a prompt with the same tokens have the same score, so their rows and columns of K are equal but for the
rounding of the sums behind them. `same_as` names them: (..., R) integers, for each rollout the first of its group with
the same tokens. Over such a class the entries of K are averaged, and its rows w_i psi are one row of weight
sqrt(sum w_i^2): the Gram of the weighted rows keeps its eigenvalues that are not zero. The others, which equal rows
make, are then zeros exactly and no rounding noise of 1e-8 of the largest singular value.

Shapes: `gram_RR` is (..., R, R), `weights_R` and `same_as_R` (..., R); leading axes are a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from grpo_sweeps.types import Array

Labels = NDArray[np.int64]

EQUAL_COSINE = 1.0 - 1e-9
"""Cosine from which rows count as equal where a record does not say which rollouts have the same tokens."""


def first_equal(labels_R: ArrayLike) -> Labels:
    """For each entry the position of the first one with the same label: `same_as` of any labels. Shape (..., R).

    >>> first_equal([7, 3, 7, 3]).tolist()
    [0, 1, 0, 1]
    """
    labels = np.asarray(labels_R)
    return np.asarray((labels[..., :, None] == labels[..., None, :]).argmax(axis=-1), dtype=np.int64)


def same_as_by_cosine(gram_RR: ArrayLike) -> Labels:
    """`same_as` from K alone, for records without it: rows i and j are equal where 2 K_ij / (K_ii + K_jj) >= 1 - 1e-9.

    That ratio is the cosine for rows of one norm and less for others: parallel rows of different lengths are not those
    of one text. A row of norm zero equals none. Different texts this near would move the effective rank by less than
    1e-4 when they are made one.

    >>> same_as_by_cosine([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]).tolist()
    [0, 0, 2]
    """
    gram = np.asarray(gram_RR, dtype=np.float64)
    R = gram.shape[-1]
    squares_R = np.diagonal(gram, axis1=-2, axis2=-1)
    equal = gram + np.swapaxes(gram, -1, -2) >= EQUAL_COSINE * (squares_R[..., :, None] + squares_R[..., None, :])
    equal &= (squares_R > 0)[..., :, None] & (squares_R > 0)[..., None, :]
    equal |= np.eye(R, dtype=bool)
    for _ in range(R.bit_length()):  # what equals a row that equals a third one belongs to that one's class
        equal = equal @ equal
    return np.asarray(equal.argmax(axis=-1), dtype=np.int64)


def same_rows_of_the_loss(same_as_R: ArrayLike, weights_R: ArrayLike) -> Labels:
    """`same_as` for Grams of the loss's own rows, which have the weights in them: equal texts of equal weight.

    >>> same_rows_of_the_loss([0, 0, 0], [0.5, -0.5, 0.5]).tolist()
    [0, 1, 0]
    """
    same, weights = np.asarray(same_as_R), np.asarray(weights_R, dtype=np.float64)
    equal = (same[..., :, None] == same[..., None, :]) & (weights[..., :, None] == weights[..., None, :])
    return np.asarray(equal.argmax(axis=-1), dtype=np.int64)


def averaged(gram_RR: ArrayLike, same_as_R: ArrayLike) -> Array:
    """K with each entry replaced by the mean over the classes of its row and of its column. Without equal rows K.

    >>> averaged([[4.0, 2.0, 1.0], [2.0, 4.0, 3.0], [1.0, 3.0, 5.0]], [0, 0, 2]).tolist()
    [[3.0, 3.0, 2.0], [3.0, 3.0, 2.0], [2.0, 2.0, 5.0]]
    """
    gram, same = np.asarray(gram_RR, dtype=np.float64), np.asarray(same_as_R)
    if (same == np.arange(same.shape[-1])).all():
        return gram
    together = (same[..., :, None] == same[..., None, :]).astype(np.float64)
    mean = together / together.sum(axis=-1, keepdims=True)
    return np.asarray(mean @ gram @ mean)


def merged_weights(weights_R: ArrayLike | None, same_as_R: ArrayLike) -> Array:
    """sqrt(sum w_i^2) of each class at its first row, 0 at the others. `weights_R` None means w = 1. Shape (..., R).

    >>> merged_weights([3.0, 1.0, -4.0], [0, 1, 0]).tolist()
    [5.0, 1.0, 0.0]
    """
    same = np.asarray(same_as_R)
    weights = np.ones(same.shape) if weights_R is None else np.asarray(weights_R, dtype=np.float64)
    if (same == np.arange(same.shape[-1])).all():
        return weights
    together = same[..., :, None] == same[..., None, :]
    size_R = np.abs(weights).max(axis=-1, keepdims=True)  # so that squares neither overflow nor vanish
    scaled_R = np.divide(weights, size_R, out=np.zeros(weights.shape), where=size_R > 0)
    energy_R = (together * np.square(scaled_R)[..., None, :]).sum(axis=-1)
    found_R = np.where(together.sum(axis=-1) == 1, weights, size_R * np.sqrt(energy_R))
    return np.asarray(np.where(same == np.arange(same.shape[-1]), found_R, 0.0))


def merged(gram_RR: ArrayLike, weights_R: ArrayLike | None, same_as_R: ArrayLike) -> tuple[Array, Array]:
    """(K averaged, merged weights): what a spectrum is taken of; see the module. Shapes (..., R, R) and (..., R).

    >>> gram, weights = merged([[1.0, 1.0], [1.0, 1.0]], [0.6, -0.8], [0, 0])
    >>> gram.tolist(), weights.round(12).tolist()
    ([[1.0, 1.0], [1.0, 1.0]], [1.0, 0.0])
    """
    return averaged(gram_RR, same_as_R), merged_weights(weights_R, same_as_R)


def distinct_rows(same_as_R: ArrayLike) -> Any:
    """Number of different texts: rollouts that are the first with their tokens. Shape (..., R) -> (...).

    >>> distinct_rows([0, 0, 2])
    2
    """
    same = np.asarray(same_as_R)
    count = (same == np.arange(same.shape[-1])).sum(axis=-1)
    return count if np.ndim(count) else int(count)


def centred_rank_bound(weights_R: ArrayLike, same_as_R: ArrayLike) -> Any:
    """Largest rank of the centred rows w_i psi_i, by counting alone. Shape (..., R) -> (...).

    m classes with a weight that is not 0 have rank m at most. Centring costs one more where the column of ones is a
    combination of theirs (every row counts, with one weight per class); where it is not, the bound R - 1 stays.

    >>> centred_rank_bound([0.5, 0.5, -1.0], [0, 0, 2]), centred_rank_bound([1.0, 0.5, -1.5], [0, 0, 2])
    (1, 2)
    """
    weights, same = np.asarray(weights_R, dtype=np.float64), np.asarray(same_as_R)
    own_R = np.take_along_axis(weights, np.broadcast_to(same, weights.shape), axis=-1)
    spans = ((weights == own_R) & (weights != 0)).all(axis=-1)
    classes = (merged_weights(weights, same) != 0).sum(axis=-1)
    bound = np.minimum(classes - spans, weights.shape[-1] - 1)
    return bound if np.ndim(bound) else int(bound)
