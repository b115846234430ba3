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

import numpy as np
from numpy.typing import ArrayLike


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
