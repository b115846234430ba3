"""The spectrum of several groups' rows together, from their own spectra: what it can be, whatever they have in common.

The groups of a step stacked, M = [G_1; ...; G_n], have the energy |M|_F^2 = sum E_g, E_g = |G_g|_F^2. For the nuclear
norm N_g = sum_j s_j(G_g), of which E_g and the effective rank r_g = N_g^2 / E_g tell,

    sum_g N_g^2  <=  |M|_*^2  <=  (sum_g N_g)^2

The right end is the triangle inequality, reached where rows of different groups are orthogonal. The left one is
Minkowski's inequality turned round (traces of square roots of positive matrices, M'M = sum_g G_g'G_g), reached where
all G_g'G_g are multiples of one. So the effective rank of the stack is at least the mean of the groups' own, weighted
by their energies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from grpo_sweeps.spectra.equal import merged
from grpo_sweeps.spectra.ranks import (
    effective_rank,
    entropy_rank,
    participation_ratio,
    singular_values,
    stable_rank,
    top1_fraction,
    top_fraction,
)
from grpo_sweeps.types import Array


def stacked_bounds(ranks_G: ArrayLike, energies_G: ArrayLike) -> tuple[float, float]:
    """Least and largest effective rank of the groups' rows stacked, from each group's own and its energy.

    ranks_G: effective ranks, 1 or more. energies_G: squared Frobenius norms, above 0. NaN for no group.

    >>> stacked_bounds([2.0, 2.0], [1.0, 1.0])
    (2.0, 4.0)
    """
    ranks, energies = np.asarray(ranks_G, dtype=np.float64), np.asarray(energies_G, dtype=np.float64)
    total = energies.sum()
    if not total > 0:
        return float("nan"), float("nan")
    shares = energies / total
    return float(shares @ ranks), float(np.sqrt(shares * ranks).sum() ** 2)


def stacked_bounds_by(labels_G: ArrayLike, ranks_G: ArrayLike, energies_G: ArrayLike) -> tuple[Array, Array]:
    """`stacked_bounds` of the groups of each label, numbers from 0 to S - 1: least (S,) and largest (S,).

    >>> stacked_bounds_by([0, 1, 1], [4.0, 2.0, 2.0], [5.0, 1.0, 1.0])[0].tolist()
    [4.0, 2.0]
    """
    labels = np.asarray(labels_G, dtype=np.intp)
    ranks, energies = np.asarray(ranks_G, dtype=np.float64), np.asarray(energies_G, dtype=np.float64)
    total = np.asarray(np.bincount(labels, energies), np.float64)
    total[~(total > 0)] = np.nan
    shares = energies / total[labels]
    least, roots = (np.asarray(np.bincount(labels, x), np.float64) for x in (shares * ranks, np.sqrt(shares * ranks)))
    return least, roots**2


def stacked_summary(
    gram_NN: ArrayLike, weights_N: ArrayLike | None, sizes: Sequence[int], same_as_N: ArrayLike
) -> dict[str, float]:
    """The values logged for the groups of one step stacked, by metric name (what follows `stacked/`).

    gram_NN: K of all rows with the products between groups; weights_N: None where the rows have their weights in them.
    sizes: rows of each group, back to back. same_as_N: for each row the first that is equal. `null_groups` is the
    effective rank where rows of different groups are orthogonal, `null_both` where all rows are, equal ones made one.
    Empty where every row is zero.

    >>> stacked_summary([[1.0, 1.0], [1.0, 1.0]], None, [1, 1], [0, 1])["null_groups"]
    2.0
    """
    K, weights = merged(gram_NN, weights_N, same_as_N)
    values = singular_values(K, weights)
    if not values.any():
        return {}
    group = np.repeat(np.arange(len(sizes)), sizes)
    apart = singular_values(np.where(group[:, None] == group, K, 0.0), weights)
    norms = np.abs(weights) * np.sqrt(np.clip(np.diagonal(K), 0.0, None))
    active = np.add.reduceat(norms, np.cumsum([0, *sizes])[:-1]) > 0
    return {
        "groups": float(active.sum()),
        "effective_rank": effective_rank(values),
        "top1_fraction": top1_fraction(values),
        "top2_fraction": top_fraction(values, 2),
        "participation_ratio": participation_ratio(values),
        "stable_rank": stable_rank(values),
        "entropy_rank": entropy_rank(values),
        "null_groups": effective_rank(apart),
        "null_both": effective_rank(norms),
    }
