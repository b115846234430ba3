"""One claim as the theory report shows it, and the rules by which it is judged.

Rules, fixed before anything was computed: an identity *holds* when its largest relative error is below `EXACT`; a
bound holds when no case exceeds it by more than `EXACT`; one case that can be computed exactly and contradicts a
statement made without exception refutes it. Monte Carlo figures never decide where an exact one exists: they are a
check of the code, and agree when the exact value lies in their interval.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

EXACT = 1e-10  # largest relative error of an exact identity in float64
Z = 4.5  # standard errors to either side: with 150 checks, one report of a thousand has a miss by chance

Judgement = Literal["holds", "holds, corrected", "does not hold", "undefined", "undecided"]


@dataclass(frozen=True)
class Claim:
    """`where`: the place in the paper, or a few words. `says`: what the paper says, in our words. `holds`: what is
    true. `exact` and `measured`: figures in words. `error`: largest relative error of the exact identities behind it,
    NaN where there is none."""

    id: str
    where: str
    says: str
    holds: str
    exact: str
    measured: str
    judgement: Judgement
    error: float = float("nan")


@dataclass(frozen=True)
class Estimate:
    """A Monte Carlo mean with its standard error."""

    mean: float
    error: float

    @property
    def low(self) -> float:
        return self.mean - Z * self.error

    @property
    def high(self) -> float:
        return self.mean + Z * self.error

    def agrees(self, exact: float) -> bool:
        return self.low - 1e-12 <= exact <= self.high + 1e-12

    def __str__(self) -> str:
        return f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}]"

    @staticmethod
    def of(values: np.ndarray) -> Estimate:
        """Of independent draws, (M,)."""
        return Estimate(float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))))


def relative(found: float | np.ndarray, expected: float | np.ndarray, scale: float | None = None) -> float:
    """|found - expected| over |expected| (or `scale`, where the expected value may be 0), in the Euclidean norm."""
    found, expected = np.asarray(found, dtype=float), np.asarray(expected, dtype=float)
    size = float(np.linalg.norm(expected)) if scale is None else scale
    return float(np.linalg.norm(found - expected)) / size


def worst(errors: Iterable[float]) -> float:
    return max(errors, default=float("nan"))


def agreement(checks: Iterable[tuple[Estimate, float]]) -> str:
    """How many Monte Carlo intervals hold the exact value, in words."""
    found = [estimate.agrees(exact) for estimate, exact in checks]
    return f"{sum(found)} of {len(found)} intervals hold the exact value"
