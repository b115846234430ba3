"""Group records, as the Arrow table of the local record -> one row of numbers per group, without an object for each.

The spectral columns are those of `measure.spectral`, inner products, norms and estimates for the best group size those
of `measure.pairs`, shuffled advantages those of `measure.permutation`; here stand those that need no Gram, the numbers
of the advantages behind C2 to C5 among them, and which groups are measured together.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from grpo_sweeps.paper import EPSILONS
from grpo_sweeps.report.measure.pairs import PAIRS, UNBIASED, pair_columns, unbiased_columns
from grpo_sweeps.report.measure.permutation import PERMUTED, permutation_columns
from grpo_sweeps.report.measure.spectral import NULL_DRAWS, SPECTRAL, Groups, spectral
from grpo_sweeps.spectra.equal import Labels, same_as_by_cosine
from grpo_sweeps.spectra.floor import coarsest, tolerance
from grpo_sweeps.tracking.status import RecordError
from grpo_sweeps.types import Array

ADVANTAGES = (
    "advantage_sum", "weight_sum", "advantage_max", "advantage_square", "advantage_product", "reward_variance",
    "lone_right", *(f"advantage_above_{eps}" for eps in EPSILONS),
)  # fmt: skip
KEYS = ["step", "prompt_id", "group"]  # name a group within its run
PLAIN = (
    "step", "group", "prompt_id", "R", "mixed", "measured", "rows", "binary", "k", "correct", "reward_mean",
    "mean_length", "floor", "older", "precision",
)  # fmt: skip
MEASURED = (*SPECTRAL, *PAIRS, *PERMUTED, *UNBIASED)  # NaN where there is no Gram
COLUMNS = (*PLAIN, *ADVANTAGES, *MEASURED)
AT_ONCE = 2**18  # numbers of the Gaussian null drawn at once: more than a processor's cache holds is slower


def advantage_columns(rewards_NR: Array, advantages_NR: Array, weights_NR: Array, k_N: Array) -> dict[str, NDArray]:
    """{column of ADVANTAGES: (N,) values}, all groups of one R, the all-equal ones too.

    advantage_sum, weight_sum   |sum| over the group's largest absolute value; NaN where all are zero
    advantage_max               largest |A|
    advantage_square, advantage_product   mean of A_i^2, and of A_i A_j over i != j
    reward_variance             of the rewards, ddof 1: without bias for sigma^2 of the prompt
    lone_right                  advantage of the one right rollout where k_N is 1; else NaN
    advantage_above_EPS         share of the rollouts with |A| > EPS
    """
    R = rewards_NR.shape[1]
    square_N = np.square(advantages_NR).sum(axis=1)
    best_N = np.take_along_axis(advantages_NR, rewards_NR.argmax(axis=1)[:, None], axis=1)[:, 0]
    size_NR = np.abs(advantages_NR)
    columns = {
        "advantage_sum": _relative_sum(advantages_NR),
        "weight_sum": _relative_sum(weights_NR),
        "advantage_max": size_NR.max(axis=1),
        "advantage_square": square_N / R,
        "advantage_product": (np.square(advantages_NR.sum(axis=1)) - square_N) / (R * (R - 1)),
        "reward_variance": rewards_NR.var(axis=1, ddof=1),
        "lone_right": np.where(k_N == 1, best_N, np.nan),
    }
    return columns | {f"advantage_above_{eps}": (size_NR > eps).mean(axis=1) for eps in EPSILONS}


def _relative_sum(values_NR: Array) -> Array:
    largest_N = np.abs(values_NR).max(axis=1)
    return np.divide(np.abs(values_NR.sum(axis=1)), largest_N, out=np.full(len(largest_N), np.nan), where=largest_N > 0)


def table_rows(table: pa.Table, seed: int, dtype: str | None) -> pd.DataFrame:
    """One row per group of a table of GroupRecords, in its order: identity, rewards, k, advantages, all measurements.

    What needs a Gram is NaN where a group was not measured. k counts the rollouts of reward 1 where all rewards are 0
    or 1 (NaN otherwise). `seed`, `dtype`: the run's. Of a measured group that does not say which rollouts have the same
    tokens (`older`) `precision`, how exactly its K is known, is the tolerance of the run's own check, else its `floor`.
    Raises RecordError where a list is not of its group's length.
    """
    table = table.combine_chunks()
    plain = {name: table[name].to_pandas() for name in ("step", "group", "prompt_id", "R", "rows", "floor")}
    N = table.num_rows
    measured_N = table["gram"].is_valid().to_numpy()
    older_N = measured_N & (pc.list_value_length(table["same_as"]).to_numpy() == 0)
    own = tolerance(dtype) if dtype else coarsest()
    found: dict[str, NDArray] = {
        "older": older_N, "precision": np.where(older_N, own, plain["floor"].to_numpy()), "measured": measured_N,
        "mixed": np.zeros(N, bool), "binary": np.zeros(N, bool), "correct": np.zeros(N, np.int64),
    }  # fmt: skip
    found |= {name: np.full(N, np.nan) for name in ("k", "reward_mean", "mean_length", *ADVANTAGES, *MEASURED)}
    R_N = plain["R"].to_numpy()
    for R in np.unique(R_N):
        rows = np.flatnonzero(R_N == R)
        part = table.take(pa.array(rows))
        for name, values in _plain(part, int(R)).items():
            found[name][rows] = values
        for index, groups in _together(part, int(R), found["binary"][rows], found["precision"][rows]):
            columns = spectral(groups, seed) | pair_columns(groups) | permutation_columns(groups)
            for name, values in (columns | unbiased_columns(groups)).items():
                found[name][rows[index]] = values
    return pd.DataFrame({name: plain[name] if name in plain else found[name] for name in COLUMNS})


def _plain(table: pa.Table, R: int) -> dict[str, NDArray]:
    """The columns that need no Gram, for groups of one R."""
    rewards_NR = matrix_of(table, "rewards", R)
    binary_N = np.isin(rewards_NR, (0.0, 1.0)).all(axis=1)
    k_N = np.where(binary_N, rewards_NR.sum(axis=1), np.nan)
    own = {
        "mixed": rewards_NR.max(axis=1) > rewards_NR.min(axis=1),
        "binary": binary_N,
        "k": k_N,
        "correct": matrix_of(table, "strict", R).sum(axis=1),
        "reward_mean": rewards_NR.mean(axis=1),
        "mean_length": matrix_of(table, "lengths", R).mean(axis=1),
    }
    return own | advantage_columns(rewards_NR, matrix_of(table, "advantages", R), matrix_of(table, "weights", R), k_N)


def _together(table: pa.Table, R: int, binary_N: NDArray, precision_N: Array) -> Iterator[tuple[NDArray, Groups]]:
    """The measured groups, so many at a time, with the positions of each lot in `table`."""
    measured_N = table["gram"].is_valid().to_numpy()
    rows_N = table["rows"].to_numpy()
    at_once = max(1, AT_ONCE // (NULL_DRAWS * R * R))
    for kind in ("scores", "loss"):
        alike = np.flatnonzero(measured_N & (rows_N == kind))
        for index in np.array_split(alike, range(at_once, len(alike), at_once)) if len(alike) else ():
            chosen = table.take(pa.array(index))
            yield index, _groups(chosen, R, binary_N[index], precision_N[index], kind == "scores")


def _groups(table: pa.Table, R: int, binary_N: NDArray, precision_N: Array, scores: bool) -> Groups:
    gram_NRR = matrix_of(table, "gram", R * R).reshape(-1, R, R)
    return Groups(
        step_N=table["step"].to_numpy(),
        group_N=table["group"].to_numpy(),
        gram_NRR=gram_NRR,
        weights_NR=matrix_of(table, "weights", R),
        rewards_NR=matrix_of(table, "rewards", R),
        advantages_NR=matrix_of(table, "advantages", R),
        binary_N=binary_N,
        floor_N=precision_N,
        same_NR=same_of(table, R, gram_NRR),
        scores=scores,
    )


def same_of(table: pa.Table, R: int, gram_NRR: Array) -> Labels:
    """(N, R) for each rollout the first with the same text; where a record does not say, by the rows' cosine."""
    found = same_as_by_cosine(gram_NRR)
    said = np.flatnonzero(pc.list_value_length(table["same_as"]).to_numpy() > 0)
    if len(said):
        found[said] = matrix_of(table.take(pa.array(said)), "same_as", R)
    return found


def matrix_of(table: pa.Table, name: str, length: int) -> Array:
    """(N, length) of a column of lists that all have this length."""
    column = table[name]
    if not pc.all(pc.equal(pc.list_value_length(column), length)).as_py():
        raise RecordError(f"a group's {name} does not have {length} values.")
    flat = pc.list_flatten(column).to_numpy()
    return flat.reshape(-1, length)
