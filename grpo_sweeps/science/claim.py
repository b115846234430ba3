"""A claim on exact policies: the prompt that it is tested on, how the theory report shows it, the rules that judge it.

Rules, fixed before anything was computed: an identity *holds* when its largest relative error is below `EXACT`; a
bound holds when no case exceeds it by more than `EXACT`; one case that can be computed exactly and contradicts a
statement made without exception refutes it. Monte Carlo figures never decide where an exact one exists: they are a
check of the code, and agree when the exact value lies in their interval.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from grpo_sweeps.exact import Enumeration
from grpo_sweeps.paper import STATEMENTS

EXACT = 1e-10  # largest relative error of an exact identity in float64
Z = 4.5  # standard errors to either side: with 150 checks, one report of a thousand has a miss by chance

Judgement = Literal[
    "holds", "holds, corrected", "holds, corrected: not linear", "does not hold", "possible", "undefined", "undecided"
]


@dataclass(frozen=True)
class ExactClaim:
    """One claim of the paper as judged on exact policies: a row of the theory report.

    where: the place in the paper, or a few words. says: what the paper says, in our words. holds: what is true. exact,
    measured: figures in words. error: the largest relative error of the exact identities behind it, NaN without any.
    """

    id: str
    where: str
    says: str
    holds: str
    exact: str
    measured: str
    judgement: Judgement
    error: float = float("nan")


def judged(
    id: str, holds: str, exact: str, measured: str, judgement: Judgement, error: float = float("nan")
) -> ExactClaim:  # fmt: skip
    """The claim of that number, with what the paper says and where."""
    statement = STATEMENTS[id]
    return ExactClaim(id, statement.place, statement.words, holds, exact, measured, judgement, error)


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
        """Does the interval hold the exact value?"""
        return self.low - 1e-12 <= exact <= self.high + 1e-12

    def __str__(self) -> str:
        return f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}]"

    @staticmethod
    def of(values: np.ndarray) -> Estimate:
        """The mean of independent draws (M,), with its standard error."""
        return Estimate(float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))))


def relative(found: float | np.ndarray, expected: float | np.ndarray, scale: float | None = None) -> float:
    """|found - expected| over |expected| (or `scale`, where the expected value may be 0), in the Euclidean norm."""
    found, expected = np.asarray(found, dtype=float), np.asarray(expected, dtype=float)
    size = float(np.linalg.norm(expected)) if scale is None else scale
    return float(np.linalg.norm(found - expected)) / size


def worst(errors: Iterable[float]) -> float:
    """The largest error, NaN where there is none."""
    return max(errors, default=float("nan"))


def agreement(checks: Iterable[tuple[Estimate, float]]) -> str:
    """In words, how many Monte Carlo intervals hold the exact value."""
    found = [estimate.agrees(exact) for estimate, exact in checks]
    return f"{sum(found)} of {len(found)} intervals hold the exact value"


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt of an exact policy as NumPy arrays; `e` lists its N sequences, with scores over D parameters."""

    e: Enumeration

    @cached_property
    def p_N(self) -> np.ndarray:
        return self.e.p_N.numpy()

    @cached_property
    def r_N(self) -> np.ndarray:
        return self.e.rewards_N.numpy()

    @cached_property
    def psi_ND(self) -> np.ndarray:
        return self.e.psi_ND.numpy()

    @cached_property
    def gram_NN(self) -> np.ndarray:
        return self.e.gram_NN.numpy()

    @cached_property
    def norms_N(self) -> np.ndarray:
        """Squared norms of the scores, (N,)."""
        return self.gram_NN.diagonal()

    @cached_property
    def grad_J_D(self) -> np.ndarray:
        return self.e.grad_J_D.numpy()

    @property
    def signal(self) -> float:
        """||grad J||^2."""
        return float(self.grad_J_D @ self.grad_J_D)

    def group(self, right: bool) -> tuple[float, np.ndarray, float]:
        """Probability, mean score (D,) and variance (trace) of the right or the wrong sequences; rewards are binary."""
        c = self.e.reward_classes
        one = int(right)
        if c.rewards_C.tolist() != [0.0, 1.0]:
            raise ValueError(f"rewards {c.rewards_C.tolist()}: 0 and 1 are needed, and both must occur")
        return float(c.p_C[one]), c.mean_CD[one].numpy(), float(c.variance_C[one])

    def draw(self, groups: int, R: int, rng: np.random.Generator) -> np.ndarray:
        """Indices of independent rollouts, (groups, R)."""
        return rng.choice(len(self.p_N), size=(groups, R), p=self.p_N / self.p_N.sum())
