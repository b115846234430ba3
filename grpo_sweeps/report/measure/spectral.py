"""Groups -> one row of numbers per group: spectra of five matrices, nulls, exact controls. Vectorised over groups.

The matrices, by column prefix:

    ""                  G = diag(w) Psi, the paper's gradient matrix
    "scores_"           Psi, the scores alone (w = 1)
    "unit_"             rows of unit norm (the signs of w cannot matter, so G and Psi give the same)
    "centred_"          G after its mean row is subtracted from every row
    "scores_centred_"   Psi after its mean row is subtracted

Each from K averaged over equal texts, whose rows are made one (`spectra.equal`). How exactly K is known decides the
numerical ranks and gives the columns `..._floor_low` and `..._floor_high` and `resolution`; it changes nothing else.

A row's numbers depend on its own group and the run's seed alone, never on the groups beside it: what was measured of
a part of a run (`read.cache`) holds for the whole of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from grpo_sweeps import spectra
from grpo_sweeps.maths.intervals import ANY, POSITIVE
from grpo_sweeps.spectra.equal import Labels, averaged, distinct_rows, merged_weights, same_rows_of_the_loss
from grpo_sweeps.spectra.floor import energy_intervals, interval_of
from grpo_sweeps.types import Array

NULL_SEED = 2606_29238  # of the Gaussian null, beside the run's own
_WORD = 2**64 - 1
QUANTITIES = {
    "effective_rank": spectra.effective_rank,
    "top1_fraction": spectra.top1_fraction,
    "participation_ratio": spectra.participation_ratio,
    "stable_rank": spectra.stable_rank,
    "entropy_rank": spectra.entropy_rank,
    "numerical_rank": spectra.nonzero_values,  # of a null; of a measured matrix `spectra.rank_above`
}
OTHERS = {name: quantity for name, quantity in QUANTITIES.items() if name != "effective_rank"}
MATRICES = {
    "": "G = diag(w) Psi",
    "scores_": "scores (w = 1)",
    "unit_": "rows of unit norm",
    "centred_": "G, rows centred",
    "scores_centred_": "scores, rows centred",
}
RANK_NULLS = ("null_orthogonal", "null_measured_norms", "null_both", "null_gaussian")
OTHER_NULLS = tuple(f"{null}_{name}" for null in RANK_NULLS for name in OTHERS)
"""Nulls of the other quantities of G; those of the effective rank are null_effective_rank (orthogonal scores of equal
norm), null_measured_norms, null_both (the measured norms, rows of equal texts made one) and null_gaussian."""
WITH_FLOOR = ("effective_rank", "entropy_rank", "top1_fraction", "participation_ratio", "stable_rank")
"""Quantities of G with columns `..._floor_low` and `..._floor_high`: what they could be, given K's own precision."""
CONTROLS = ("control_sign_flip", "control_leave_one_out", "control_std")
FROM_ZERO = ("gradient_norm", "pair_norm", "pair_square", "variance")
"""Columns of groups that are sizes: 0 or more."""


def range_of(column: str, R: int) -> tuple[float, float]:
    """The least and the largest value that a column of groups of R rollouts can take, those with a floor included.

    >>> range_of("effective_rank", 4), range_of("top1_fraction_floor_low", 4), range_of("pair_null", 4)
    ((1.0, 4.0), (0.25, 1.0), (-inf, inf))
    """
    name = column.removesuffix("_low").removesuffix("_high").removesuffix("_floor")
    rows = float(R - 1 if "centred_" in name and R > 1 else R)
    if name.endswith("top1_fraction"):
        return 1.0 / rows, 1.0
    if name.endswith("numerical_rank"):
        return 0.0, rows
    if name.endswith(tuple(QUANTITIES)) or name.startswith("null_"):
        return 1.0, rows
    return POSITIVE if name in FROM_ZERO else ANY


def range_of_difference(column: str, R: int, other: int | None = None) -> tuple[float, float]:
    """That of a value of a column at R less one at `other` (R where it is None).

    >>> range_of_difference("effective_rank", 4), range_of_difference("effective_rank", 4, 8)
    ((-3.0, 3.0), (-7.0, 3.0))
    """
    (low, high), (least, most) = range_of(column, R), range_of(column, R if other is None else other)
    return low - most, high - least


BELOW = "lies below the spectrum that it is drawn from: a measured value above it is no sign of structure"
"""What is said wherever null_gaussian stands beside the other nulls."""
NULL_DRAWS = 32  # of the Gaussian null, for each group
STD_EPS = 1e-6  # added to the standard deviation in the std control; any value is one factor a group
SPECTRAL = (
    *(prefix + name for prefix in MATRICES for name in QUANTITIES),
    *(f"{name}_floor_{end}" for name in WITH_FLOOR for end in ("low", "high")),
    "resolution", "top2_fraction", "distinct", "null_distinct", "null_effective_rank", "null_closed_form",
    "null_measured_norms", "null_both", "null_gaussian", *OTHER_NULLS, *CONTROLS,
)  # fmt: skip


@dataclass(frozen=True)
class Groups:
    """N measured groups of one R, all of them with Grams of the scores or all of the rows of the loss (`scores`).

    binary: all rewards are 0 or 1. floor: how exactly each K is known (`spectra.records.own_precision`). same: for each
    rollout the first of its group with the same text.
    """

    step_N: NDArray[np.int64]
    group_N: NDArray[np.int64]
    gram_NRR: Array
    weights_NR: Array
    rewards_NR: Array
    advantages_NR: Array
    binary_N: NDArray[np.bool_]
    floor_N: Array
    same_NR: Labels
    scores: bool

    @property
    def R(self) -> int:
        return self.gram_NRR.shape[-1]

    @cached_property
    def rows_NR(self) -> Labels:
        """For each row of K the first of its group that is equal, rounding aside."""
        return self.same_NR if self.scores else same_rows_of_the_loss(self.same_NR, self.weights_NR)

    @cached_property
    def averaged_NRR(self) -> Array:
        """K averaged over equal rows: what every spectrum is taken of."""
        return averaged(self.gram_NRR, self.rows_NR)


class RowNormals:
    """Standard normal matrices for groups of R rollouts of a run with this seed.

    The numbers belong to one row: they are the same for a run's seed, R, step and group whatever rows stand beside it.
    One counter-based generator (Philox) serves all rows; each row begins at a counter of its own, 2^64 numbers from any
    other row's. To make a generator for each row would take longer than to draw from it.
    """

    def __init__(self, seed: int, R: int) -> None:
        self._bits = np.random.Philox(key=np.array([NULL_SEED, seed & _WORD], dtype=np.uint64))
        self._generator = np.random.Generator(self._bits)
        self._start = self._bits.state
        self.R = R

    def draw(self, step_N: NDArray[np.int64], group_N: NDArray[np.int64], draws: int) -> Array:
        """(N, draws, R, R), row i those of step_N[i] and group_N[i]."""
        out = np.empty((len(step_N), draws, self.R, self.R))
        for row, step, group in zip(out, step_N.tolist(), group_N.tolist(), strict=True):
            self._start["state"]["counter"][:] = (0, self.R, group & _WORD, step & _WORD)
            self._bits.state = self._start
            self._generator.standard_normal(out=row)
        return out


def spectral(groups: Groups, seed: int) -> dict[str, Array]:
    """{column of SPECTRAL: (N,) values}; NaN for what needs the scores where the Gram is of the rows of the loss.

    Such a Gram is taken as G as it stands. `seed`: the run's, for the draws of the Gaussian null.
    """
    N = len(groups.gram_NRR)
    matrices = {prefix: (own_NR, error_NR) for prefix, own_NR, error_NR in _eigenvalues(groups)}
    columns: dict[str, Array] = {}
    for prefix in MATRICES:
        if prefix not in matrices:
            columns |= {prefix + name: np.full(N, np.nan) for name in QUANTITIES}
            continue
        own_NR, error_NR = matrices[prefix]
        values_NR = np.sqrt(own_NR)
        columns |= {prefix + name: _floats(quantity(values_NR)) for name, quantity in QUANTITIES.items()}
        columns[f"{prefix}numerical_rank"] = _floats(spectra.rank_above(own_NR, error_NR))
    own_NR, error_NR = matrices[""]
    weights_NR = groups.weights_NR if groups.scores else np.ones_like(groups.weights_NR)
    active_N = (merged_weights(weights_NR, groups.rows_NR) != 0).sum(axis=-1)
    error_N = spectra.absolute_error(groups.averaged_NRR, weights_NR, groups.floor_N)
    ends = energy_intervals(own_NR, error_NR, error_N, active_N)
    ends |= {name: interval_of(own_NR, error_NR, active_N, QUANTITIES[name]) for name in WITH_FLOOR if name not in ends}
    for name, (low, high) in ends.items():
        columns |= {f"{name}_floor_low": low, f"{name}_floor_high": high}
    columns["resolution"] = np.divide(error_N, own_NR[:, 0], out=np.full(N, np.inf), where=own_NR[:, 0] > 0)
    columns["top2_fraction"] = np.asarray(spectra.top_fraction(np.sqrt(own_NR), 2))
    columns["distinct"] = _floats(distinct_rows(groups.same_NR))
    return columns | _nulls(groups, seed) | _controls(groups)


def _eigenvalues(groups: Groups) -> Iterator[tuple[str, Array, Array]]:
    """Prefix of each of MATRICES that there is, its eigenvalues (N, R) and how far off they can be (N, R)."""
    K_NRR, rows_NR, floor_N = groups.averaged_NRR, groups.rows_NR, groups.floor_N
    ones_NR = np.ones_like(groups.weights_NR)

    def of(prefix: str, gram_NRR: Array, weights_NR: Array) -> tuple[str, Array, Array]:
        one_NRR = spectra.weighted_gram(gram_NRR, merged_weights(weights_NR, rows_NR))
        own_NR = spectra.eigenvalues(one_NRR)
        if "centred" in prefix:
            own_NR = spectra.centred_eigenvalues(gram_NRR, weights_NR, rows_NR)
        return prefix, own_NR, spectra.graded_error(own_NR, one_NRR, floor_N)

    weights_NR = groups.weights_NR if groups.scores else ones_NR
    yield of("", K_NRR, weights_NR)
    yield of("unit_", spectra.unit_rows(K_NRR), ones_NR)
    yield of("centred_", K_NRR, weights_NR)
    if groups.scores:
        yield of("scores_", K_NRR, ones_NR)
        yield of("scores_centred_", K_NRR, ones_NR)


def _nulls(groups: Groups, seed: int) -> dict[str, Array]:
    """Effective rank, and the other quantities, without structure in the scores; see `spectra` for each null.

    Rows of the loss have their own norms, which no factor of the rollout gives: theirs are what is orthogonal in every
    null that they have.
    """
    gram_NRR = groups.averaged_NRR
    weights_NR = groups.weights_NR if groups.scores else np.ones_like(groups.weights_NR)
    own_NR = groups.weights_NR if groups.scores else np.sqrt(np.clip(np.diagonal(gram_NRR, axis1=1, axis2=2), 0, None))
    k_N = np.where(groups.binary_N, groups.rewards_NR.sum(axis=1), np.nan)
    found = {
        "null_effective_rank": _floats(spectra.null_orthogonal(own_NR)),
        "null_closed_form": _floats(spectra.null_effective_rank(k_N, groups.R)),
    }
    found |= {f"null_orthogonal_{name}": _floats(of(np.abs(own_NR))) for name, of in OTHERS.items()}
    merged_NR = merged_weights(weights_NR, groups.rows_NR)
    for name, of in QUANTITIES.items():
        ending = "" if name == "effective_rank" else f"_{name}"
        found[f"null_measured_norms{ending}"] = _floats(spectra.null_measured_norms(gram_NRR, weights_NR, of))
        found[f"null_both{ending}"] = _floats(spectra.null_measured_norms(gram_NRR, merged_NR, of))
    if not groups.scores:
        names = ("null_distinct", "null_gaussian", *OTHER_NULLS)
        return dict.fromkeys(names, np.full(len(k_N), np.nan)) | found
    normal = RowNormals(seed, groups.R).draw(groups.step_N, groups.group_N, NULL_DRAWS)
    one_NR = spectra.singular_values(gram_NRR, merged_weights(None, groups.same_NR))
    drawn_NSR = spectra.gaussian_values(np.square(one_NR)[:, :, None] * np.eye(groups.R), weights_NR, normal)
    found["null_distinct"] = _floats(spectra.null_distinct(weights_NR, groups.same_NR))
    for name, of in QUANTITIES.items():
        ending = "" if name == "effective_rank" else f"_{name}"
        found[f"null_gaussian{ending}"] = _floats(of(drawn_NSR)).mean(axis=-1)
    return found


def _floats(values: object) -> Array:
    return np.asarray(values, dtype=float)


def _controls(groups: Groups) -> dict[str, Array]:
    """Relative change of the effective rank where theory says there is none: exact negative controls of C8.

    Sign flip: w against |w|. Leave-one-out and std scaling: their own advantages, made from the rewards, against
    those of the group mean (NaN for an all-equal group, which has no gradient).
    """
    rewards_NR, weights_NR = groups.rewards_NR, groups.weights_NR
    if not groups.scores:
        return dict.fromkeys(CONTROLS, np.full(len(rewards_NR), np.nan))
    mean = rewards_NR - rewards_NR.mean(axis=1, keepdims=True)
    others = (rewards_NR.sum(axis=1, keepdims=True) - rewards_NR) / (groups.R - 1)
    scaled = mean / (rewards_NR.std(axis=1, ddof=1, keepdims=True) + STD_EPS)

    def rank(weights: Array) -> Array:
        one_NR = merged_weights(weights, groups.rows_NR)
        return np.asarray(spectra.effective_rank(spectra.singular_values(groups.averaged_NRR, one_NR)))

    base = rank(mean)
    return {
        "control_sign_flip": np.abs(rank(np.abs(weights_NR)) / rank(weights_NR) - 1.0),
        "control_leave_one_out": np.abs(rank(rewards_NR - others) / base - 1.0),
        "control_std": np.abs(rank(scaled) / base - 1.0),
    }
