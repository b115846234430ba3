"""The slow way to the rows of `report.rows`: record by record where it can be, one generator a group for the null."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from grpo_sweeps import spectra
from grpo_sweeps.report.measure.rows import ADVANTAGES, MEASURED, PLAIN
from grpo_sweeps.report.measure.spectral import (
    CONTROLS,
    MATRICES,
    NULL_DRAWS,
    NULL_SEED,
    OTHER_NULLS,
    QUANTITIES,
    RANK_NULLS,
    STD_EPS,
)
from grpo_sweeps.spectra.equal import merged
from grpo_sweeps.spectra.records import own_precision, same_rows, same_texts
from grpo_sweeps.types import Array, GroupRecord
from tests.floors import floor_interval
from tests.unit.report.slow_pairs import DTYPE, advantages, pairs_and_shuffles


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
        record.gram is not None and not record.same_as, own_precision(record, DTYPE),
    )  # fmt: skip


def _spectral(records: Sequence[GroupRecord], scores: bool, seed: int) -> dict[str, Array]:
    """Columns for N groups of one R whose Gram is of the scores (or, else, of the rows of the loss)."""
    gram_NRR = np.stack([r.gram for r in records if r.gram is not None])
    recorded_NR = np.array([r.weights for r in records])
    weights_NR = recorded_NR if scores else np.ones_like(recorded_NR)
    floor_N = np.array([own_precision(r, DTYPE) for r in records])
    psi_NRD = np.stack([rows_behind(r) for r in records])
    G_NRD, unit_NRD = weights_NR[:, :, None] * psi_NRD, psi_NRD / np.linalg.norm(psi_NRD, axis=2, keepdims=True)
    rows = {"": G_NRD, "unit_": unit_NRD, "centred_": G_NRD - G_NRD.mean(axis=1, keepdims=True)}
    if scores:
        rows |= {"scores_": psi_NRD, "scores_centred_": psi_NRD - psi_NRD.mean(axis=1, keepdims=True)}
    columns: dict[str, Array] = {}
    for prefix in MATRICES:
        for name, quantity in QUANTITIES.items():
            found = quantity(np.linalg.svd(rows[prefix], compute_uv=False)) if prefix in rows else None
            columns[prefix + name] = np.full(len(records), np.nan) if found is None else np.asarray(found, dtype=float)
        if prefix in rows:
            columns[f"{prefix}numerical_rank"] = np.array(
                [_told_from_zero(r, w, prefix, f) for r, w, f in zip(records, weights_NR, floor_N, strict=True)]
            )
    one = [merged(r.gram, w, same_rows(r)) for r, w in zip(records, weights_NR, strict=True)]
    for name in ("effective_rank", "entropy_rank"):
        ends = [floor_interval(*m, f, QUANTITIES[name]) for m, f in zip(one, floor_N, strict=True)]
        columns |= {f"{name}_floor_{end}": np.array([e[i] for e in ends]) for i, end in enumerate(("low", "high"))}
    for name in ("top1_fraction", "participation_ratio", "stable_rank"):
        ends = [_of_energies(r, w, f, name) for r, w, f in zip(records, weights_NR, floor_N, strict=True)]
        columns |= {f"{name}_floor_{end}": np.array([e[i] for e in ends]) for i, end in enumerate(("low", "high"))}
    largest = np.square(np.linalg.svd(G_NRD, compute_uv=False)[:, 0])
    error_N = np.array([spectra.absolute_error(*m, f) for m, f in zip(one, floor_N, strict=True)])
    columns["resolution"] = np.divide(error_N, largest, out=np.full(len(records), np.inf), where=largest > 0)
    columns["top2_fraction"] = np.asarray(spectra.top_fraction(np.linalg.svd(G_NRD, compute_uv=False), 2))
    columns["distinct"] = np.array([float(len(set(same_texts(r).tolist()))) for r in records])
    columns |= _nulls(records, gram_NRR, recorded_NR, scores, seed)
    return columns | _controls(records, psi_NRD, recorded_NR, scores)


def _of_energies(record: GroupRecord, weights_R: Array, floor: float, name: str) -> tuple[float, float]:
    """The interval of a quantity that trace, Frobenius norm and largest eigenvalue make, written out."""
    gram, weights = merged(record.gram, weights_R, same_rows(record))
    H, e = spectra.weighted_gram(gram, weights), float(spectra.absolute_error(gram, weights, floor))
    first, d = spectra.eigenvalues(gram, weights)[0], spectra.eigenvalue_error(gram, weights, floor)[0]
    trace, norm, rows = np.trace(H), np.linalg.norm(H), int((weights != 0).sum())
    low = max((first - d) / (trace + e), 1 / rows)
    high = min((first + d) / (trace - e), 1.0) if e < trace else 1.0
    if name == "top1_fraction":
        return low, high
    if name == "stable_rank":
        return 1 / high, 1 / low
    least = max(1.0, (max(trace - e, 0.0) / (norm + e)) ** 2)
    return least, min(float(rows), ((trace + e) / (norm - e)) ** 2) if e < norm else float(rows)


def rows_behind(record: GroupRecord) -> Array:
    """(R, R) rows whose products are K averaged over equal rows, equal rows exactly equal."""
    same = same_rows(record)
    first = np.unique(same)
    mean = np.array([[record.gram[np.ix_(same == i, same == j)].mean() for j in first] for i in first])
    values, basis = np.linalg.eigh(0.5 * (mean + mean.T))
    rows = np.zeros((record.R, record.R))
    rows[:, : len(first)] = (basis * np.sqrt(np.clip(values, 0, None)))[np.searchsorted(first, same)]
    return rows


def _told_from_zero(record: GroupRecord, weights_R: Array, prefix: str, floor: float) -> float:
    """The numerical rank of one matrix, by the stated threshold."""
    rows, same = rows_behind(record), same_rows(record)
    w = np.ones(record.R) if prefix.startswith(("scores", "unit")) else weights_R
    if prefix == "unit_":
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    G = w[:, None] * rows
    G = G - G.mean(axis=0) if "centred" in prefix else G
    own = np.square(np.linalg.svd(G, compute_uv=False))
    gram, of_classes = merged(rows @ rows.T, w, same)
    return spectra.rank_above(own, spectra.graded_error(own, spectra.weighted_gram(gram, of_classes), floor))


def _nulls(
    records: Sequence[GroupRecord], gram_NRR: Array, weights_NR: Array, scores: bool, seed: int
) -> dict[str, Array]:
    """Effective rank without structure in the scores; see `spectra` for each null."""
    k_N = np.array([sum(r.rewards) if _binary(r) else np.nan for r in records])
    missing = np.full(len(records), np.nan)
    return {
        "null_effective_rank": np.array([_of_norms(r, r.rows == "loss", False) for r in records]),
        "null_closed_form": np.asarray(spectra.null_effective_rank(k_N, gram_NRR.shape[-1])),
        "null_distinct": np.array([_of_texts(r) for r in records]) if scores else missing,
        "null_measured_norms": np.array([_of_norms(r, True, False) for r in records]),
        "null_both": np.array([_of_norms(r, True, True) for r in records]),
        "null_gaussian": np.array([_gaussian(r, seed) for r in records]) if scores else missing,
    } | {name: np.array([_other_null(r, name, scores, seed) for r in records]) for name in OTHER_NULLS}


def _of_texts(record: GroupRecord) -> float:
    """Effective rank of orthogonal scores of equal norm, equal texts having equal ones."""
    rows = np.array(record.weights)[:, None] * np.eye(record.R)[same_texts(record)]
    return float(spectra.effective_rank(np.linalg.svd(rows, compute_uv=False)))


def _other_null(record: GroupRecord, name: str, scores: bool, seed: int) -> float:
    """A null of another quantity: `null_<which>_<quantity>`, NaN where it needs scores and there are none."""
    (which,) = (null for null in RANK_NULLS if name.startswith(null))
    of = QUANTITIES[name.removeprefix(f"{which}_")]
    if which != "null_gaussian":
        return _of_norms(record, which != "null_orthogonal" or not scores, which == "null_both", of)
    return _gaussian(record, seed, of) if scores else float("nan")


def _of_norms(
    record: GroupRecord, measured: bool, merge: bool, quantity: Callable[[Array], object] = spectra.effective_rank
) -> float:
    """Orthogonal rows: of the measured norms, or else of norm |w|; `merge`: equal rows are one and the same."""
    rows, same = rows_behind(record), same_rows(record)
    norms = np.linalg.norm(rows, axis=1) if measured else np.ones(record.R)
    weighted = norms if record.rows == "loss" else norms * np.array(record.weights)
    direction = np.eye(record.R)[same] if merge else np.eye(record.R)
    return float(quantity(np.linalg.svd(weighted[:, None] * direction, compute_uv=False)))


def _gaussian(record: GroupRecord, seed: int, quantity: Callable[[Array], object] = spectra.effective_rank) -> float:
    """The mean over draws of the effective rank (or `quantity`) of diag(w) Z diag(spectrum / R) Z' diag(w)."""
    bits = np.random.Philox(
        key=np.array([NULL_SEED, seed], np.uint64), counter=[0, record.R, record.group, record.step]
    )
    scale_R = np.linalg.svd(rows_behind(record), compute_uv=False) / np.sqrt(record.R)
    ranks = []
    for Z in np.random.Generator(bits).standard_normal((NULL_DRAWS, record.R, record.R)):
        rows = np.array(record.weights)[:, None] * Z * scale_R
        ranks.append(quantity(np.linalg.svd(rows, compute_uv=False)))
    return float(np.mean(ranks))


def _controls(records: Sequence[GroupRecord], psi_NRD: Array, weights_NR: Array, scores: bool) -> dict[str, Array]:
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
        return np.asarray(spectra.effective_rank(np.linalg.svd(weights[:, :, None] * psi_NRD, compute_uv=False)))

    base = rank(mean)
    return {
        "control_sign_flip": np.abs(rank(np.abs(weights_NR)) / rank(weights_NR) - 1.0),
        "control_leave_one_out": np.abs(rank(rewards_NR - others) / base - 1.0),
        "control_std": np.abs(rank(scaled) / base - 1.0),
    }
