"""What each estimator would have given on recorded groups: from their rewards, lengths and Grams of scores alone.

A group of R rollouts with advantages A has the gradient g = sum_i w_i psi_i, w = A / R, or w_i = A_i / (R l_i) where a
loss divides by the length l_i. With K the Gram of the scores, for every alternative

    effective_rank   of diag(w) K diag(w), rows of equal texts made one
    gradient_norm    sqrt(w'K w)
    cosine           w'K m / sqrt(w'K w m'K m), m the weights of the group mean
    variance         tr Cov(g) of the group's prompt: ||g||^2 - c^2 u, u the unbiased estimate of ||grad J||^2 from
                     products of four distinct rollouts (`maths.ustatistics.signal`), c the factor with E g = c grad J

The first three are of mixed groups. The last is unbiased where a factor is declared and a group of equal rewards has no
gradient: its mean is over all groups, those of equal rewards as the zeros that they are.

An estimator that looks at the whole step is given the rewards of the whole step, measured or not.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from grpo_sweeps import spectra
from grpo_sweeps.estimators.declared import DECLARATIONS, DISTINCT, FROM_GRAM, Declaration
from grpo_sweeps.maths.ustatistics import signal
from grpo_sweeps.report.measure.pairs import LEAST_R
from grpo_sweeps.report.measure.rows import matrix_of, same_of
from grpo_sweeps.spectra.equal import Labels, merged
from grpo_sweeps.spectra.floor import coarsest, tolerance
from grpo_sweeps.types import Array

QUANTITIES = ("effective_rank", "gradient_norm", "cosine", "variance")
OF_MEAN = "grpo"  # what the cosine is with


@dataclass(frozen=True)
class Alternative:
    """One row of the table: an estimator and whether the loss divides by lengths.

    also: objectives that have this gradient at one update per batch, up to one factor for the step.
    """

    declared: Declaration
    by_length: bool = False
    also: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.declared.name}, 1/length" if self.by_length else self.declared.name

    @property
    def same(self) -> tuple[str, ...]:
        """Declared estimators of these advantages, but for eps, and the objectives of `also`."""
        others = [one.name for one in DECLARATIONS.values() if one.advantages_of == self.declared.name]
        return (*(() if self.by_length else others), *self.also)

    def factor(self, R: int, G: int) -> float:
        """c with E g = c grad J in a step of G groups; NaN where no factor holds for every reward."""
        return np.nan if self.by_length or self.declared.factor is None else self.declared.factor(R, G)

    @property
    def has_variance(self) -> bool:
        """Can the variance be had from mixed groups alone?"""
        return not self.by_length and self.declared.factor is not None and self.declared.zero_when_equal


def alternatives() -> tuple[Alternative, ...]:
    """Every estimator with advantages of its own, in the order of `estimators.declared`; std scaling with the length,
    as it was published, behind it; those that need the Gram last."""
    found = []
    for one in (*DISTINCT, *FROM_GRAM):
        std = one.kind == "std"
        found.append(Alternative(one, also=("CISPO",) if std else ()))
        if std:
            found.append(Alternative(one, by_length=True, also=("GRPO (2402.03300)", "GMPO")))
    return tuple(found)


@dataclass(frozen=True)
class StepGroups:
    """All N groups of a run of one R, step by step. gram_NRR: NaN where `usable_N` is False.

    usable: mixed and measured, with the Gram of its scores. lacking: mixed and not so.
    """

    step_N: NDArray[np.int64]
    prompt_N: NDArray[np.object_]
    rewards_NR: Array
    lengths_NR: Array
    gram_NRR: Array
    same_NR: Labels
    floor_N: Array
    usable_N: NDArray[np.bool_]
    lacking_N: NDArray[np.bool_]

    @property
    def R(self) -> int:
        return self.rewards_NR.shape[1]

    # Of the U usable groups, what every alternative is compared with.
    @functools.cached_property
    def mean_UR(self) -> Array:
        """The w of the group mean."""
        return weights_of(Alternative(DECLARATIONS[OF_MEAN]), self)[self.usable_N]

    @functools.cached_property
    def signal_U(self) -> Array:
        """Unbiased estimates of ||grad J||^2; R of LEAST_R or more."""
        return signal(self.rewards_NR[self.usable_N], self.gram_NRR[self.usable_N])


def step_groups(table: pa.Table, R: int, dtype: str | None = None) -> StepGroups:
    """The groups of a run's table of GroupRecords, R rollouts each. dtype: of the run's model, for older records.

    Raises RecordError where a list is not of its group's length.
    """
    table = table.combine_chunks()
    rewards_NR = matrix_of(table, "rewards", R)
    mixed_N = rewards_NR.max(axis=1) > rewards_NR.min(axis=1)
    scores_N = table["gram"].is_valid().to_numpy() & (table["rows"].to_numpy() == "scores")
    usable_N = mixed_N & scores_N
    index = np.flatnonzero(usable_N)
    gram_NRR, same_NR = np.full((len(mixed_N), R, R), np.nan), np.tile(np.arange(R), (len(mixed_N), 1))
    if len(index):
        part = table.take(pa.array(index))
        gram_NRR[index] = matrix_of(part, "gram", R * R).reshape(-1, R, R)
        same_NR[index] = same_of(part, R, gram_NRR[index])
    older_N = pc.list_value_length(table["same_as"]).to_numpy() == 0
    floor_N = np.where(older_N, tolerance(dtype) if dtype else coarsest(), table["floor"].to_numpy())
    return StepGroups(
        table["step"].to_numpy(), np.array(table["prompt_id"].to_pylist(), dtype=object), rewards_NR,
        matrix_of(table, "lengths", R).astype(float), gram_NRR, same_NR, floor_N, usable_N,
        mixed_N & ~scores_N,
    )  # fmt: skip


def advantages_of(declared: Declaration, groups: StepGroups) -> Array:
    """(N, R) advantages, NaN in groups without a Gram where that is needed. Raises ValueError for rewards that the
    estimator refuses."""
    N, found = len(groups.rewards_NR), np.full(groups.rewards_NR.shape, np.nan)
    if declared.needs_gram:
        index = np.flatnonzero(groups.usable_N)
        if len(index):
            found[index] = declared.function(groups.rewards_NR[index], groups.gram_NRR[index])
        return found
    parts = [np.arange(N)]
    if declared.batch_dependent:
        parts = np.split(np.arange(N), np.flatnonzero(np.diff(groups.step_N)) + 1)
    known: dict[bytes, Array] = {}  # of steps with the same rewards, which rewards of 0 and 1 often have
    for index in parts if N else ():
        rewards = groups.rewards_NR[index]
        lengths = {"lengths_GR": groups.lengths_NR[index]} if declared.needs_lengths else {}
        key = b"".join(part.tobytes() for part in (rewards, *lengths.values()))
        if key not in known:
            known[key] = declared.function(rewards, **lengths)
        found[index] = known[key]
    return found


def values_of(one: Alternative, groups: StepGroups) -> dict[str, Array]:
    """{quantity: (N,)}; NaN in groups that do not count. A group counts for `variance` in steps whose mixed groups are
    all usable."""
    R, found = groups.R, {name: np.full(len(groups.rewards_NR), np.nan) for name in QUANTITIES}
    index = np.flatnonzero(groups.usable_N)
    weights = weights_of(one, groups)[index]
    mean, K = groups.mean_UR, groups.gram_NRR[index]
    square, error = _square(weights, K), _error(weights, K, groups.floor_N[index])
    across = np.sqrt(square * _square(mean, K))
    known = (square > error) & (_square(mean, K) > _error(mean, K, groups.floor_N[index]))
    product = np.einsum("nr,nrs,ns->n", weights, K, mean)
    cosine = np.divide(product, across, out=np.full(len(index), np.nan), where=known)
    found["cosine"][index] = np.clip(cosine, -1.0, 1.0)
    found["gradient_norm"][index] = np.sqrt(square)
    singular = spectra.singular_values(*merged(K, weights, groups.same_NR[index]))
    singular[singular[:, 0] == 0] = np.nan
    found["effective_rank"][index] = spectra.effective_rank(singular)
    if one.has_variance and R >= LEAST_R:
        found["variance"][~np.isin(groups.step_N, groups.step_N[groups.lacking_N])] = 0.0
        own = square - one.factor(R, 1) ** 2 * groups.signal_U
        found["variance"][index] = np.where(np.isnan(found["variance"][index]), np.nan, own)
    return found


def weights_of(one: Alternative, groups: StepGroups) -> Array:
    """(N, R) the w of the module's docstring."""
    weights = advantages_of(one.declared, groups) / groups.R
    return weights / groups.lengths_NR if one.by_length else weights


def _square(weights_NR: Array, gram_NRR: Array) -> Array:
    return np.clip(np.einsum("nr,nrs,ns->n", weights_NR, gram_NRR, weights_NR), 0.0, None)


def _error(weights_NR: Array, gram_NRR: Array, floor_N: Array) -> Array:
    """How far off `_square` may be: rows that cancel to within it have no direction."""
    sizes = np.abs(weights_NR) * np.sqrt(np.clip(np.diagonal(gram_NRR, axis1=1, axis2=2), 0.0, None))
    return np.asarray(np.maximum(floor_N, spectra.ROUNDING_FLOOR) * sizes.sum(axis=1) ** 2)


def mean_factor(one: Alternative, groups: StepGroups) -> float:
    """The factor, a mean over the steps where it depends on their number of groups."""
    sizes, steps = np.unique(np.unique(groups.step_N, return_counts=True)[1], return_counts=True)
    return float(steps @ [one.factor(groups.R, int(G)) for G in sizes] / steps.sum()) if len(sizes) else np.nan


def why_no_variance(one: Alternative, R: int) -> str:
    """Why a row has no variance; empty where it has."""
    if one.by_length or one.declared.factor is None:
        return "no factor holds for every reward, so the mean of g is not known"
    if not one.declared.zero_when_equal:
        return "a group of equal rewards has a gradient, and no Gram is kept of it"
    return f"products of four rollouts need an R of {LEAST_R} or more" if R < LEAST_R else ""


def why_no_factor(one: Alternative) -> str:
    """Why a row has no factor; empty where it has."""
    return "" if np.isfinite(one.factor(2, 2)) else "no factor holds for every reward"


NOT_HERE: Mapping[str, str] = {
    "OTB (arXiv 2602.07078)": "it needs the squared norm of the score of each prefix, which no record holds",
}
"""Estimators that no record is enough for."""
