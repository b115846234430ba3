"""How exactly a run checks its own Grams, and what the ranks and the top-1 fraction could have been within a Gram's
precision (see `spectra.ranks`). Needs no torch, so that a report can read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from grpo_sweeps.spectra.ranks import (
    effective_rank,
    entropy_rank,
)
from grpo_sweeps.types import Array

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

# In machine epsilons. Seen: 1 (float64), 0.05 (float32), 0.004 (half types; the ghost form rounds the weighted
# gradients once more).
CHECK_FACTOR = {"float64": 1e4, "float32": 40.0, "float16": 2.0, "bfloat16": 0.5}
FLOOR_BISECTIONS = 80
"""Halvings in `floor_interval`; each halves the bracket of the common level, so 80 reach float64's resolution."""


def tolerance(dtype: str) -> float:
    """Allowed miss of w'Kw against the squared norm of the gradient that was applied, relative to |w|'|K||w|.

    Both are made from the same rows, so only the roundings of their sums (and of the gradient to its dtype) separate
    them.

    >>> tolerance("bfloat16")
    0.00390625
    """
    return CHECK_FACTOR[dtype] * EPS[dtype]


def coarsest() -> float:
    """The largest `tolerance`: what is known where a run does not say its dtype.

    >>> coarsest() == tolerance("bfloat16")
    True
    """
    return max(map(tolerance, EPS))


def _level_effective(s: Array) -> Array:
    """Where d/ds_j of (sum s)^2 / sum s^2 changes sign: it grows in s_j below sum s^2 / sum s and falls above."""
    total = s.sum(axis=-1)
    return np.divide((s**2).sum(axis=-1), total, out=np.zeros_like(total), where=total > 0)


def _level_entropy(s: Array) -> Array:
    """Where d/ds_j of the entropy rank changes sign: p_j = exp(-H)."""
    return np.nan_to_num(s.sum(axis=-1) / entropy_rank(s))


_LEVELS: dict[Callable[[ArrayLike], Any], Callable[[Array], Array]] = {
    effective_rank: _level_effective,
    entropy_rank: _level_entropy,
}


def interval_of(
    eigenvalues_R: Array, error_R: Array, active: ArrayLike, quantity: Callable[[ArrayLike], Any] = effective_rank
) -> tuple[Array, Array]:
    """Least and greatest value that `quantity` (effective_rank or entropy_rank) can have, given K's own precision.

    Eigenvalue e_j is known to +-delta_j (`ranks.eigenvalue_error`), so s_j lies in [sqrt(max(0, e_j - delta_j)),
    sqrt(e_j + delta_j)]. Both quantities first grow and then fall in each s_j, so the minimum is at a corner of that
    box, with the largest values at their upper and the rest at their lower ends. Their super-level sets are convex, so
    the maximum brings every s_j as near as it may to one common level, found by bisection. Shape (...) each.

    active: how many rows have a weight; rows of zero weight add nothing.
    """
    R = eigenvalues_R.shape[-1]
    inside_R = np.arange(R) < np.asarray(active)[..., None]
    low_R = np.where(inside_R, np.sqrt(np.clip(eigenvalues_R - error_R, 0.0, None)), 0.0)
    high_R = np.where(inside_R, np.sqrt(eigenvalues_R + error_R), 0.0)

    corners = [quantity(np.where(np.arange(R) < m, high_R, low_R)) for m in range(1, R + 1)]
    least = np.min(np.stack([np.asarray(c, dtype=np.float64) for c in corners]), axis=0)

    top = _common_level(low_R, high_R, _LEVELS[quantity])
    greatest = np.asarray(quantity(np.clip(top[..., None], low_R, high_R)), dtype=np.float64)
    middle = np.asarray(quantity(np.sqrt(eigenvalues_R)), dtype=np.float64)  # in the box, but for rounding at its edge
    return np.minimum(least, middle), np.maximum(greatest, middle)


def energy_intervals(
    eigenvalues_R: Array, error_R: Array, error: Array, active: ArrayLike
) -> dict[str, tuple[Array, Array]]:
    """Least and greatest top-1 fraction, stable rank and participation ratio, by name; shape (...) each.

    They come from tr H, its largest eigenvalue e_1 and its Frobenius norm F. `error`, floor * tr H (`absolute_error`),
    bounds the errors of tr H and F; `error_R` those of the eigenvalues. `active`: rows that are not empty, the most
    that the two ranks can be.
    """
    trace, norm = eigenvalues_R.sum(axis=-1), np.sqrt(np.square(eigenvalues_R).sum(axis=-1))
    first, most = eigenvalues_R[..., 0], np.asarray(active, dtype=np.float64)
    top_low = _over(first - error_R[..., 0], trace + error, 0.0)
    top_high = np.clip(_over(first + error_R[..., 0], trace - error, 1.0), 0.0, 1.0)
    top_low = np.clip(top_low, 1.0 / np.maximum(most, 1.0), None)
    ratio_low = _over(trace - error, norm + error, 0.0) ** 2
    ratio_high = _over(trace + error, norm - error, np.inf) ** 2
    ends = {
        "top1_fraction": (top_low, np.maximum(top_low, top_high)),
        "stable_rank": (1.0 / np.maximum(top_low, top_high), 1.0 / top_low),
        "participation_ratio": (np.maximum(1.0, ratio_low), np.maximum(1.0, np.minimum(most, ratio_high))),
    }
    unknown = np.where(trace > 0, 0.0, np.nan)
    return {name: (low + unknown, high + unknown) for name, (low, high) in ends.items()}


def _over(numerator: Array, denominator: Array, otherwise: float) -> Array:
    """Quotient of what cannot be negative; `otherwise` where the denominator may be 0."""
    numerator = np.clip(numerator, 0.0, None)
    return np.divide(numerator, denominator, out=np.full(numerator.shape, otherwise), where=denominator > 0)


def _common_level(low_R: Array, high_R: Array, level_of: Callable[[Array], Array]) -> Array:
    """The upper end of the bisection's last bracket; it ends as soon as a halving moves no end of any bracket."""
    bottom, top = np.zeros(high_R.shape[:-1]), high_R.max(axis=-1)
    for _ in range(FLOOR_BISECTIONS):
        level = 0.5 * (bottom + top)
        above = level_of(np.clip(level[..., None], low_R, high_R)) > level
        ends = np.where(above, level, bottom), np.where(above, top, level)
        if np.array_equal(ends[0], bottom) and np.array_equal(ends[1], top):
            break
        bottom, top = ends
    return top
