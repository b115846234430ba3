"""Groups -> one row of numbers a group: spectra of five matrices, nulls, exact controls. Vectorised over groups.

The matrices, by column prefix:

    ""                  G = diag(w) Psi, the paper's gradient matrix
    "scores_"           Psi, the scores alone (w = 1)
    "unit_"             rows of unit norm (the signs of w cannot matter, so G and Psi give the same)
    "centred_"          G after its mean row is subtracted from every row
    "scores_centred_"   Psi after its mean row is subtracted

A row's numbers depend on its own group and the run's seed alone, never on the groups beside it: what was measured of
a part of a run (`report.cache`) holds for the whole of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_sweeps import spectra
from grpo_sweeps.report.draws import RowNormals
from grpo_sweeps.spectra import Array
from grpo_sweeps.spectra_floor import interval_of

QUANTITIES = {
    "effective_rank": spectra.effective_rank,
    "top1_fraction": spectra.top1_fraction,
    "participation_ratio": spectra.participation_ratio,
    "stable_rank": spectra.stable_rank,
    "entropy_rank": spectra.entropy_rank,
    "numerical_rank": spectra.numerical_rank,
}
OTHERS = {name: quantity for name, quantity in QUANTITIES.items() if name != "effective_rank"}
MATRICES = {
    "": "G = diag(w) Psi",
    "scores_": "scores (w = 1)",
    "unit_": "rows of unit norm",
    "centred_": "G, rows centred",
    "scores_centred_": "scores, rows centred",
}
RANK_NULLS = ("null_orthogonal", "null_measured_norms", "null_gaussian")
OTHER_NULLS = tuple(f"{null}_{name}" for null in RANK_NULLS for name in OTHERS)
"""Nulls of the other quantities of G; those of the effective rank are null_effective_rank (orthogonal scores of equal
norm), null_measured_norms and null_gaussian."""

CONTROLS = ("control_sign_flip", "control_leave_one_out", "control_std")
NULL_DRAWS = 32  # of the Gaussian null, for each group
STD_EPS = 1e-6  # added to the standard deviation in the std control; any value is one factor a group
SPECTRAL = (
    *(prefix + name for prefix in MATRICES for name in QUANTITIES),
    "effective_rank_floor_low", "effective_rank_floor_high", "entropy_rank_floor_low", "entropy_rank_floor_high",
    "resolution", "top2_fraction", "distinct", "null_distinct", "null_effective_rank", "null_closed_form",
    "null_measured_norms", "null_gaussian", *OTHER_NULLS,
    *CONTROLS,
)  # fmt: skip


@dataclass(frozen=True)
class Groups:
    """N measured groups of one R, all of them with Grams of the scores or all of the rows of the loss (`scores`).

    binary: all rewards are 0 or 1.
    """

    step_N: NDArray[np.int64]
    group_N: NDArray[np.int64]
    gram_NRR: Array
    weights_NR: Array
    rewards_NR: Array
    advantages_NR: Array
    binary_N: NDArray[np.bool_]
    floor_N: Array
    scores: bool

    @property
    def R(self) -> int:
        return self.gram_NRR.shape[-1]


def spectral(groups: Groups, seed: int) -> dict[str, Array]:
    """{column of SPECTRAL: (N,) values}; NaN for what needs the scores where the Gram is of the rows of the loss.

    Such a Gram is taken as G as it stands. `seed`: the run's, for the draws of the Gaussian null.
    """
    gram_NRR, floor_N, N = groups.gram_NRR, groups.floor_N, len(groups.gram_NRR)
    weights_NR = groups.weights_NR if groups.scores else np.ones_like(groups.weights_NR)
    weighted_NRR = spectra.weighted_gram(gram_NRR, weights_NR)
    own_NR = spectra.eigenvalues(weighted_NRR)
    error_NR = spectra.graded_error(own_NR, weighted_NRR, floor_N)
    values = {
        "": spectra.truncated(own_NR, error_NR),
        "unit_": spectra.singular_values(spectra.unit_rows(gram_NRR), None, floor_N),
        "centred_": spectra.centred_values(weighted_NRR, floor_N),
    }
    if groups.scores:
        values["scores_"] = spectra.singular_values(gram_NRR, None, floor_N)
        values["scores_centred_"] = spectra.centred_values(gram_NRR, floor_N)
    columns: dict[str, Array] = {}
    for prefix in MATRICES:
        for name, quantity in QUANTITIES.items():
            missing = np.full(N, np.nan)
            columns[prefix + name] = np.asarray(quantity(values[prefix]), dtype=float) if prefix in values else missing
    for name in ("effective_rank", "entropy_rank"):
        low, high = interval_of(own_NR, error_NR, (weights_NR != 0).sum(axis=-1), QUANTITIES[name])
        columns |= {f"{name}_floor_low": low, f"{name}_floor_high": high}
    largest = np.square(values[""][..., 0])
    error_N = spectra.absolute_error(weighted_NRR, None, floor_N)
    columns["resolution"] = np.divide(error_N, largest, out=np.full(N, np.inf), where=largest > 0)
    columns["top2_fraction"] = np.asarray(spectra.top_fraction(values[""], 2))
    columns["distinct"] = np.asarray(spectra.distinct_rows(gram_NRR, floor_N), dtype=float)
    return columns | _nulls(groups, seed) | _controls(groups)


def _nulls(groups: Groups, seed: int) -> dict[str, Array]:
    """Effective rank, and the other quantities, without structure in the scores; see `spectra` for each null."""
    gram_NRR, weights_NR = groups.gram_NRR, groups.weights_NR
    k_N = np.where(groups.binary_N, groups.rewards_NR.sum(axis=1), np.nan)
    found = {
        "null_effective_rank": _floats(spectra.null_orthogonal(weights_NR)),
        "null_closed_form": _floats(spectra.null_effective_rank(k_N, groups.R)),
    }
    found |= {f"null_orthogonal_{name}": _floats(of(np.abs(weights_NR))) for name, of in OTHERS.items()}
    if not groups.scores:
        names = ("null_distinct", "null_measured_norms", "null_gaussian", *OTHER_NULLS)
        return dict.fromkeys(names, np.full(len(k_N), np.nan)) | found
    normal = RowNormals(seed, groups.R).draw(groups.step_N, groups.group_N, NULL_DRAWS)
    drawn_NSR = spectra.gaussian_values(gram_NRR, weights_NR, normal)
    found["null_distinct"] = _floats(spectra.null_distinct(gram_NRR, weights_NR, groups.floor_N))
    for name, of in QUANTITIES.items():
        ending = "" if name == "effective_rank" else f"_{name}"
        found[f"null_measured_norms{ending}"] = _floats(spectra.null_measured_norms(gram_NRR, weights_NR, of))
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
        return np.asarray(spectra.effective_rank(spectra.singular_values(groups.gram_NRR, weights, groups.floor_N)))

    base = rank(mean)
    return {
        "control_sign_flip": np.abs(rank(np.abs(weights_NR)) / rank(weights_NR) - 1.0),
        "control_leave_one_out": np.abs(rank(rewards_NR - others) / base - 1.0),
        "control_std": np.abs(rank(scaled) / base - 1.0),
    }
