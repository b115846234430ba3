"""The slow way to the rows of `report.rows`: record by record where it can be, one generator a group for the null."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from grpo_sweeps import spectra
from grpo_sweeps.report.draws import NULL_SEED
from grpo_sweeps.report.measure import (
    CONTROLS,
    MATRICES,
    NULL_DRAWS,
    OTHER_NULLS,
    QUANTITIES,
    RANK_NULLS,
    STD_EPS,
)
from grpo_sweeps.report.rows import ADVANTAGES, MEASURED, PLAIN
from grpo_sweeps.spectra import Array
from grpo_sweeps.spectra_floor import floor_interval
from grpo_sweeps.types import GroupRecord
from tests.unit.report.slow_pairs import advantages, pairs_and_shuffles


def group_rows(records: Sequence[GroupRecord], seed: int) -> pd.DataFrame:
    """One row a group, index as in `records`: identity, rewards, k, and for measured groups everything spectral.

    k counts the rollouts of reward 1 where all rewards are 0 or 1 (NaN otherwise). Where `rows` is "loss" the Gram is
    that of the loss's own rows: it is taken as G as it stands, and what needs the scores is NaN.
    """
    plain = [(*_plain(r), *(advantages(r)[name] for name in ADVANTAGES)) for r in records]
    frame = pd.DataFrame(plain, columns=[*PLAIN, *ADVANTAGES])
    measured: dict[tuple[int, str], list[int]] = {}
    for i, record in enumerate(records):
        if record.gram is not None:
            measured.setdefault((record.R, record.rows), []).append(i)
    parts = [
        pd.DataFrame(_spectral([records[i] for i in index], rows == "scores", seed), index=index).join(
            pd.DataFrame([pairs_and_shuffles(records[i]) for i in index], index=index)
        )
        for (_, rows), index in measured.items()
    ]
    return frame.join(pd.concat(parts)) if parts else frame.reindex(columns=[*PLAIN, *ADVANTAGES, *MEASURED])


def _binary(record: GroupRecord) -> bool:
    return set(record.rewards) <= {0.0, 1.0}


def _plain(record: GroupRecord) -> tuple[object, ...]:
    binary = _binary(record)
    return (
        record.step, record.group, record.prompt_id, record.R, record.mixed, record.gram is not None, record.rows,
        binary, float(sum(record.rewards)) if binary else float("nan"), sum(record.strict),
        float(np.mean(record.rewards)), float(np.mean(record.lengths)), record.floor,
    )  # fmt: skip


def _spectral(records: Sequence[GroupRecord], scores: bool, seed: int) -> dict[str, Array]:
    """Columns for N groups of one R whose Gram is of the scores (or, else, of the rows of the loss)."""
    gram_NRR = np.stack([r.gram for r in records if r.gram is not None])
    recorded_NR = np.array([r.weights for r in records])
    weights_NR = recorded_NR if scores else np.ones_like(recorded_NR)
    floor_N = np.array([r.floor for r in records])
    values = {"": spectra.singular_values(gram_NRR, weights_NR, floor_N)}
    error_N = spectra.absolute_error(gram_NRR, weights_NR, floor_N)
    centred = spectra.centred_values(spectra.weighted_gram(gram_NRR, weights_NR), floor_N)
    values |= {"unit_": spectra.singular_values(spectra.unit_rows(gram_NRR), None, floor_N), "centred_": centred}
    if scores:
        values["scores_"] = spectra.singular_values(gram_NRR, None, floor_N)
        values["scores_centred_"] = spectra.centred_values(gram_NRR, floor_N)
    columns: dict[str, Array] = {}
    for prefix in MATRICES:
        for name, quantity in QUANTITIES.items():
            missing = np.full(len(records), np.nan)
            columns[prefix + name] = np.asarray(quantity(values[prefix]), dtype=float) if prefix in values else missing
    for name in ("effective_rank", "entropy_rank"):
        low, high = floor_interval(gram_NRR, weights_NR, floor_N, QUANTITIES[name])
        columns |= {f"{name}_floor_low": low, f"{name}_floor_high": high}
    largest = np.square(values[""][..., 0])
    columns["resolution"] = np.divide(error_N, largest, out=np.full(len(records), np.inf), where=largest > 0)
    columns["top2_fraction"] = np.asarray(spectra.top_fraction(values[""], 2))
    columns["distinct"] = np.asarray(spectra.distinct_rows(gram_NRR, floor_N), dtype=float)
    columns |= _nulls(records, gram_NRR, recorded_NR, floor_N, scores, seed)
    return columns | _controls(records, gram_NRR, recorded_NR, floor_N, scores)


def _nulls(
    records: Sequence[GroupRecord], gram_NRR: Array, weights_NR: Array, floor_N: Array, scores: bool, seed: int
) -> dict[str, Array]:
    """Effective rank without structure in the scores; see `spectra` for each null."""
    k_N = np.array([sum(r.rewards) if _binary(r) else np.nan for r in records])
    missing = np.full(len(records), np.nan)
    return {
        "null_effective_rank": np.asarray(spectra.null_orthogonal(weights_NR)),
        "null_closed_form": np.asarray(spectra.null_effective_rank(k_N, gram_NRR.shape[-1])),
        "null_distinct": np.asarray(spectra.null_distinct(gram_NRR, weights_NR, floor_N)) if scores else missing,
        "null_measured_norms": np.asarray(spectra.null_measured_norms(gram_NRR, weights_NR)) if scores else missing,
        "null_gaussian": np.array([_gaussian(r, seed) for r in records]) if scores else missing,
    } | {name: np.array([_other_null(r, name, scores, seed) for r in records]) for name in OTHER_NULLS}


def _other_null(record: GroupRecord, name: str, scores: bool, seed: int) -> float:
    """A null of another quantity: `null_<which>_<quantity>`, NaN where it needs scores and there are none."""
    (which,) = (null for null in RANK_NULLS if name.startswith(null))
    of = QUANTITIES[name.removeprefix(f"{which}_")]
    if which == "null_orthogonal":
        return float(of(np.abs(record.weights)))
    if not scores:
        return float("nan")
    if which == "null_measured_norms":
        return float(of(np.sqrt(np.diag(record.gram)) * np.abs(record.weights)))
    return _gaussian(record, seed, of)


def _gaussian(record: GroupRecord, seed: int, quantity: Callable[[Array], object] = spectra.effective_rank) -> float:
    """The mean over draws of the effective rank (or `quantity`) of diag(w) Z diag(spectrum / R) Z' diag(w)."""
    bits = np.random.Philox(
        key=np.array([NULL_SEED, seed], np.uint64), counter=[0, record.R, record.group, record.step]
    )
    scale_R = np.sqrt(spectra.eigenvalues(record.gram) / record.R)
    ranks = []
    for Z in np.random.Generator(bits).standard_normal((NULL_DRAWS, record.R, record.R)):
        ranks.append(quantity(spectra.singular_values((Z * scale_R) @ (Z * scale_R).T, record.weights)))
    return float(np.mean(ranks))


def _controls(
    records: Sequence[GroupRecord], gram_NRR: Array, weights_NR: Array, floor_N: Array, scores: bool
) -> dict[str, Array]:
    """Relative change of the effective rank where theory says there is none: exact negative controls of C8.

    Sign flip: w against |w|. Leave-one-out and std scaling: their own advantages, made from the rewards, against
    those of the group mean (NaN for an all-equal group, which has no gradient).
    """
    if not scores:
        return {name: np.full(len(records), np.nan) for name in CONTROLS}
    rewards_NR = np.array([r.rewards for r in records])
    R = rewards_NR.shape[1]
    mean = rewards_NR - rewards_NR.mean(axis=1, keepdims=True)
    others = (rewards_NR.sum(axis=1, keepdims=True) - rewards_NR) / (R - 1)
    scaled = mean / (rewards_NR.std(axis=1, ddof=1, keepdims=True) + STD_EPS)

    def rank(weights: Array) -> Array:
        return np.asarray(spectra.effective_rank(spectra.singular_values(gram_NRR, weights, floor_N)))

    base = rank(mean)
    return {
        "control_sign_flip": np.abs(rank(np.abs(weights_NR)) / rank(weights_NR) - 1.0),
        "control_leave_one_out": np.abs(rank(rewards_NR - others) / base - 1.0),
        "control_std": np.abs(rank(scaled) / base - 1.0),
    }
