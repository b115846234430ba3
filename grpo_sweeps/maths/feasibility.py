"""Which pairs of top-1 fraction and effective rank are possible at all (claim C10 of arXiv 2606.29238, Table 1).

With energies q_j = s_j^2 / sum s^2 the effective rank is (sum sqrt q_j)^2, and the top-1 fraction max q_j bounds it.
`effective_rank_range` is for one matrix, `effective_rank_hull` for averages over groups. R is the number of rows.
"""

from __future__ import annotations

import numpy as np

from grpo_sweeps.types import Array


def _check_top1(top1: float, R: int) -> None:
    if not 1.0 / R - 1e-12 <= top1 <= 1.0:
        raise ValueError(f"a top-1 fraction of {R} values lies between 1/{R} and 1, got {top1}")


def effective_rank_range(top1: float, R: int) -> tuple[float, float]:
    """Least and greatest effective rank of one matrix with R singular values whose top-1 fraction is `top1`.

    sum sqrt q is concave, so it is least where the energy sits in as few values as the cap q_j <= top1 allows, and
    greatest where the rest is spread evenly: (sqrt f + sqrt((R - 1)(1 - f)))^2.

    >>> [round(x, 2) for x in effective_rank_range(0.7, 2)]
    [1.92, 1.92]
    """
    _check_top1(top1, R)
    full = min(R, int(np.floor(1.0 / top1 + 1e-12)))
    rest = max(0.0, 1.0 - full * top1)
    least = (full * np.sqrt(top1) + np.sqrt(rest)) ** 2
    greatest = (np.sqrt(top1) + np.sqrt((R - 1) * (1.0 - top1))) ** 2
    return float(least), float(max(least, greatest))


def effective_rank_ranges(top1_N: Array, R: int) -> tuple[Array, Array]:
    """`effective_rank_range` of N matrices at once; NaN where the top-1 fraction is.

    >>> [round(float(x[0]), 2) for x in effective_rank_ranges(np.array([0.7]), 2)]
    [1.92, 1.92]
    """
    known_N = top1_N[np.isfinite(top1_N)]
    for extreme in (known_N.min(), known_N.max()) if len(known_N) else ():
        _check_top1(float(extreme), R)
    full_N = np.minimum(R, np.floor(1.0 / top1_N + 1e-12))
    rest_N = np.maximum(0.0, 1.0 - full_N * top1_N)
    least_N = (full_N * np.sqrt(top1_N) + np.sqrt(rest_N)) ** 2
    greatest_N = (np.sqrt(top1_N) + np.sqrt((R - 1) * (1.0 - top1_N))) ** 2
    return least_N, np.maximum(least_N, greatest_N)


def effective_rank_hull(top1: float, R: int) -> tuple[float, float]:
    """Least and greatest mean effective rank of groups of R whose mean top-1 fraction is `top1`.

    Averages fill the convex hull of the single-matrix region. The lower curve of that region is concave between its
    points (1/m, m), which lie on a convex curve, so the hull's lower edge joins them by chords; the upper curve is
    concave and is its own hull.

    >>> [round(effective_rank_hull(f, R)[0], 2) for f, R in ((0.7, 2), (0.8, 4), (0.6, 8))]
    [1.6, 1.4, 1.8]
    """
    _check_top1(top1, R)
    m = np.arange(R, 0, -1, dtype=np.float64)
    return float(np.interp(top1, 1.0 / m, m)), effective_rank_range(top1, R)[1]


def cell_range(top1_low: float, top1_high: float, R: int, averages: bool = False) -> tuple[float, float]:
    """Effective ranks possible for a table cell that prints a top-1 fraction between `top1_low` and `top1_high`.

    Both bounds fall as the top-1 fraction grows, so each end comes from one end of the printed range.

    >>> [round(x, 2) for x in cell_range(0.5, 0.6, 8)]
    [1.98, 6.65]
    """
    bound = effective_rank_hull if averages else effective_rank_range
    return bound(top1_high, R)[0], bound(top1_low, R)[1]


def energy_in_two(effective_rank_at_most: float, top1: float) -> float:
    """Least share of the energy in the two largest values of a matrix with this top-1 fraction (1/2 or more) and an
    effective rank at most the given one.

    For a share e the effective rank is least when what is left, 1 - e, sits in one value: (sqrt f + sqrt(e - f) +
    sqrt(1 - e))^2. Solved for e: with t = sqrt(rank) - sqrt f and c = 1 - f, the two smaller energies have sum c and
    product ((t^2 - c) / 2)^2. NaN when no matrix has this pair, or when the
    rank allows more than three values, so that the formula no longer bounds anything.

    >>> round(energy_in_two(2.25, 0.6), 3), round(energy_in_two(2.5, 0.6), 3)
    (0.99, 0.956)
    """
    if not 0.5 <= top1 <= 1.0:
        raise ValueError(f"the top-1 fraction must lie between 1/2 and 1, got {top1}")
    left = 1.0 - top1
    t = np.sqrt(effective_rank_at_most) - np.sqrt(top1)
    if t < 0 or t**2 < left - 1e-12:
        return float("nan")
    product = (max(t**2 - left, 0.0) / 2.0) ** 2
    if product > left**2 / 4.0:
        return float("nan")
    return float(top1 + (left + np.sqrt(left**2 - 4.0 * product)) / 2.0)
