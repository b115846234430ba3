"""Claims that binary rewards of independent rollouts decide by counting: k ~ Binomial(R, p) right ones of R."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from grpo_sweeps.science.claim import EXACT, Claim

HOEFFDING_R = (2, 4, 8, 16)
HOEFFDING_EPS = (0.3, 0.2, 0.1)


def binomial(R: int, p: float) -> np.ndarray:
    """(R + 1,) P(k of R), by exact integers and one product each."""
    return np.array([math.comb(R, k) * p**k * (1 - p) ** (R - k) for k in range(R + 1)])


def chance_of_advantage_above(R: int, p: float, eps: float) -> float:
    """P(|r_1 - mean| > eps) for binary rewards: of k right rollouts the right ones have |A| = 1 - k/R, the others
    k/R."""
    k = np.arange(R + 1)
    share = np.where(1 - k / R > eps, k / R, 0.0) + np.where(k / R > eps, 1 - k / R, 0.0)
    return float(binomial(R, p) @ share)


def tail_bound(R: int, p: float, eps: float) -> float:
    """Chebyshev's bound of 4.1(iv)."""
    return (R - 1) * p * (1 - p) / (R * eps**2)


def concentration(ps: Sequence[float], Rs: Sequence[int], epsilons: Sequence[float]) -> Claim:
    """C4: the tail of an advantage against the bound."""
    cases = [(R, p, eps) for R in Rs for p in ps for eps in epsilons]
    exact = np.array([chance_of_advantage_above(*case) for case in cases])
    bounds = np.array([tail_bound(*case) for case in cases])
    vacuous = int((bounds >= 1).sum())
    mixed = [case for case in cases if case[2] < 1 / case[0]]
    closed = [1 - p**R - (1 - p) ** R for R, p, _ in mixed]
    errors = [abs(chance_of_advantage_above(*case) - value) / value for case, value in zip(mixed, closed, strict=True)]
    rising = [1 - 0.5**R - 0.5**R for R in (2, 4, 8)]
    return Claim(
        "C4",
        "4.1(iv)",
        "The chance of an advantage above eps is at most (R-1) sigma^2 / (R eps^2).",
        "True, and often says nothing. For binary rewards and eps < 1/R the chance is exactly 1 - p^R - (1-p)^R, "
        "the share of mixed groups, which rises with R while R < 1/eps: larger groups have fewer zero gradients, "
        "not more.",
        f"{len(cases)} cases of R, p, eps: none above its bound; {vacuous} bounds are 1 or more; p = 0.5: "
        + ", ".join(f"R={R} {value:.3f}" for R, value in zip((2, 4, 8), rising, strict=True)),
        "",
        "holds" if bool((exact <= bounds + EXACT).all()) else "does not hold",
        max(errors),
    )


def hoeffding(R: int, eps: float) -> float:
    """2 exp(-2 R eps^2): bound on P(|mean of R rewards in [0, 1] - p| > eps)."""
    return 2 * math.exp(-2 * R * eps**2)


def chance_of_mean_off(R: int, p: float, eps: float) -> float:
    """P(|k/R - p| > eps), exact."""
    k = np.arange(R + 1)
    return float(binomial(R, p)[np.abs(k / R - p) > eps].sum())


def hoeffding_rows(ps: Sequence[float] = (0.5, 0.25)) -> list[dict[str, float]]:
    """For each R and eps: the bound, and the exact chance at each p."""
    return [
        {"R": R, "eps": eps, "bound": hoeffding(R, eps)}
        | {f"exact at p={p:g}": chance_of_mean_off(R, p, eps) for p in ps}
        for R in HOEFFDING_R
        for eps in HOEFFDING_EPS
    ]


def hoeffding_table() -> Claim:
    """C12: the table of A.2, computed from its own formula."""
    rows = hoeffding_rows()
    useful = [row for row in rows if row["bound"] < 1]
    within = all(row[key] <= row["bound"] + EXACT for row in rows for key in row if key.startswith("exact"))
    cells = "; ".join(f"R={R}: " + ", ".join(f"{hoeffding(R, eps):.2f}" for eps in HOEFFDING_EPS) for R in HOEFFDING_R)
    return Claim(
        "C12",
        "A.2",
        "A table of Hoeffding's bound on the error of the group mean for R = 2 to 16 and eps = 0.3, 0.2, 0.1, with "
        "R = 4, eps = 0.3 called vacuous.",
        "The formula 2 exp(-2 R eps^2) gives other numbers in eight of the twelve places, and R = 4, eps = 0.3 is "
        f"below 1: {len(useful)} of the {len(rows)} bounds say something. The exact chance is far below each of them.",
        cells + " (eps = 0.3, 0.2, 0.1)",
        "",
        "does not hold" if within and hoeffding(4, 0.3) < 1 else "holds",
    )
