"""The pools of a sweep's runs of a fixed policy -> pool.csv, one row per arm, R, size and estimator; the best size.

Intervals: of the shares, spectra and errors against a prompt's own gradient 95% clustered by prompt and seed; of
`error` and of the best size 95% by drawing steps with replacement, the same draws that `design.best_size` makes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from grpo_sweeps.maths.intervals import POSITIVE, SHARE, Clusters, Interval, mean_over
from grpo_sweeps.publish.formats import number, three_digits, with_interval
from grpo_sweeps.publish.page import Section
from grpo_sweeps.report.design.best_size import KINDS, MIN_STEPS, BestSize, drawn, levels, plain_step, shown, step_sums
from grpo_sweeps.report.measure.pool import (
    ESTIMATORS,
    LEAST_POOL,
    QUANTITIES,
    STD_EPS,
    SUBSETS,
    Pools,
    moments,
    pool_values,
    sizes_of,
)
from grpo_sweeps.report.measure.spectral import range_of
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.tables.pooled import clusters, records_of, with_ends
from grpo_sweeps.spectra.records import same_rows
from grpo_sweeps.types import Array

COLUMNS = [
    "arm", "R", "size", "estimator", "pools", "prompts",
    *(f"{name}{end}" for name in ("mixed", *QUANTITIES, "error_prompt") for end in ("", "_low", "_high")), "cosine",
    "error", "error_low", "error_high",
]  # fmt: skip
NAME = "pool"
WORDS = (
    "Runs of a fixed policy: each group is a pool, and any R' of its rollouts are a group of that size. Shares, "
    "spectra and errors at R' are means over a pool's sub-groups, then over pools, those of equal rewards as zeros.",
    "“Error” is N times the mean squared error of a step of N rollouts in groups of R', against the gradient of the "
    "average objective; its least size is found here without the formula, among the sizes of the table. “Own prompt” "
    "is the mean squared error of one group's gradient against its own prompt's, “cosine” that with it, which no scale "
    "changes.",
)


@dataclass(frozen=True)
class PoolStudy:
    """One arm and R: its rows of pool.csv, and the size of least `error` of leave-one-out with its interval (NaN where
    the runs do not say). predicted: R* by the formula from the same records."""

    arm: str
    R: int
    table: pd.DataFrame
    found: float
    low: float
    high: float
    predicted: BestSize

    @property
    def at_the_end(self) -> bool:
        """The least error is at the whole pool: the best size may be larger."""
        return self.found == self.R


def pool_studies(sweep: Sweep, sizes: list[BestSize]) -> list[PoolStudy]:
    """One for each arm and R of 6 or more of plain steps with `trainer.lr=0` that has pools; sizes: `best_sizes`'."""
    found = []
    for one in sizes:
        runs = sweep.runs.loc[(sweep.runs["arm"] == one.arm) & (sweep.runs["R"] == one.R), "run"]
        if one.R >= LEAST_POOL and all(_fixed(sweep.configs[str(run)]) for run in runs):
            groups = usable_pools(records_of(sweep, one.arm, one.R))
            if len(groups):
                found.append(pool_study(sweep, groups, one))
    return found


def _fixed(config: Mapping[str, Any]) -> bool:
    trainer = config.get("trainer")
    rate = trainer.get("lr") if isinstance(trainer, dict) else None
    return isinstance(rate, int | float) and rate == 0 and plain_step(config)


def pools_of(sweep: Sweep, groups: pd.DataFrame) -> Pools:
    """The pools of rows of `sweep.groups`, all of one R, each with its Gram of the scores or all rewards equal."""
    records = [sweep.record(int(i)) for i in groups.index]
    R = records[0].R
    return Pools(
        np.array([r.rewards for r in records]),
        np.array([np.zeros((R, R)) if r.gram is None else r.gram for r in records]),
        np.array([np.arange(R) if r.gram is None else same_rows(r) for r in records]),
        tuple((int(s), r.step, r.group) for s, r in zip(groups["seed"], records, strict=True)),
    )


def usable_pools(groups: pd.DataFrame) -> pd.DataFrame:
    """Groups of equal rewards, and mixed ones with a Gram of their scores; steps with another mixed one go whole, so
    that mixed groups are as frequent as they were."""
    if not len(groups):
        return groups
    lacking = groups["mixed"].astype(bool) & (~groups["measured"].astype(bool) | (groups["rows"] != "scores"))
    bad = groups.loc[lacking, ["run", "step"]].drop_duplicates()
    return groups[~pd.MultiIndex.from_frame(groups[["run", "step"]]).isin(pd.MultiIndex.from_frame(bad))]


def pool_study(sweep: Sweep, groups: pd.DataFrame, predicted: BestSize) -> PoolStudy:
    """groups: `usable_pools` of one arm and R."""
    arm, R = predicted.arm, predicted.R
    pools = pools_of(sweep, groups)
    by, sizes = clusters(groups), sizes_of(R)
    values = {n: _of_all(pools, n) for n in sizes}
    errors = _errors(sweep, groups, predicted, np.stack([values[n]["square"] for n in sizes], axis=1), sizes)
    rows = []
    for i, n in enumerate(sizes):
        common = {"arm": arm, "R": R, "size": n, "pools": len(groups), "prompts": groups["prompt_id"].nunique()}
        common |= with_ends("mixed", mean_over(values[n]["mixed"], by).within(SHARE))
        for name in QUANTITIES:
            common |= with_ends(name, ratio(values[n][name], values[n]["listed"], by).within(range_of(name, n)))
        for estimator in ESTIMATORS:
            square, product = moments(values[n], n, estimator)
            signal = values[n]["signal"]
            row = (
                common
                | {"estimator": estimator}
                | with_ends("error_prompt", mean_over(square - 2 * product + signal, by).within(POSITIVE))
            )
            scale = float(square.mean() * signal.mean())
            row["cosine"] = float(product.mean()) / math.sqrt(scale) if scale > 0 else math.nan
            rows.append(row | _error_at(errors.get(estimator), i, predicted.steps))
    curve = errors.get("leave-one-out")
    best = (math.nan,) * 3 if curve is None else _best(curve, sizes, predicted.steps)
    return PoolStudy(arm, R, pd.DataFrame(rows, columns=COLUMNS), *best, predicted)


def _of_all(pools: Pools, size: int) -> dict[str, Array]:
    """`pool_values`, the pools of equal rewards (no sub-group of theirs has a gradient) without work."""
    mixed_P = pools.rewards_PR.max(axis=1) > pools.rewards_PR.min(axis=1)
    index = np.flatnonzero(mixed_P)
    if not len(index):
        return dict.fromkeys(
            ("mixed", "signal", "square", "listed", *QUANTITIES, "std_square", "std_product"), np.zeros(len(mixed_P))
        )
    part = Pools(
        pools.rewards_PR[index], pools.gram_PRR[index], pools.same_PR[index], tuple(pools.seeds_P[i] for i in index)
    )
    found = {}
    for name, values in pool_values(part, size).items():
        found[name] = np.full(len(mixed_P), np.nan if np.isnan(values).any() else 0.0)
        found[name][index] = values
    return found


def ratio(values_P: Array, weights_P: Array, by: Clusters) -> Interval:
    """sum of values over sum of weights, its interval by the delta method; unknown where no weight is above 0.

    >>> ratio(np.array([2.0, 0.0]), np.array([1.0, 0.0]), Clusters(["p", "q"])).mean
    2.0
    """
    total = float(weights_P.sum())
    if not total > 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    value = float(values_P.sum()) / total
    around = mean_over((values_P - value * weights_P) * len(weights_P) / total, by)
    return Interval(value, value + around.low, value + around.high, around.n, around.clusters)


def _errors(
    sweep: Sweep, groups: pd.DataFrame, predicted: BestSize, squares_PS: Array, sizes: list[int]
) -> dict[str, Array]:
    """{estimator: (1 + draws, sizes)} of N MSE, the first row of all steps; N: the rollouts of the runs' own step.

    leave-one-out   R' (E||g||^2 - ||E grad J||^2), whatever N
    group mean      f^2 times it + N (1 - f)^2 ||E grad J||^2, f = (R' - 1)/R'

    Empty where ||E grad J||^2 is not known. That of std scaling needs products of different prompts' gradients.
    """
    if predicted.kind not in KINDS or "signal_of_mean" not in predicted.values:
        return {}
    steps, _ = step_sums(sweep, predicted.arm, predicted.R, predicted.kind)
    squares = pd.DataFrame(squares_PS).assign(run=groups["run"].to_numpy(), step=groups["step"].to_numpy())
    sums = steps[["run", "step", "groups", "signal_of_mean"]].merge(
        squares.groupby(["run", "step"]).sum().reset_index(), on=["run", "step"], validate="one_to_one"
    )
    table_TK = sums.drop(columns=["run", "step"]).to_numpy(dtype=float)
    T = len(table_TK)
    times_BT = np.concatenate([np.ones((1, T)), drawn(T)]) if T >= MIN_STEPS else np.ones((1, T))
    total_BK = times_BT @ table_TK
    of_mean_B1, squares_BS = total_BK[:, 1:2] / total_BK[:, :1], total_BK[:, 2:] / total_BK[:, :1]
    n = np.array(sizes, dtype=float)
    best = n * (squares_BS - of_mean_B1)
    factor, N = (n - 1) / n, predicted.R * predicted.groups_a_step
    return {"leave-one-out": best, "group mean": factor**2 * best + N * (1 - factor) ** 2 * of_mean_B1}


def _error_at(curve_BS: Array | None, i: int, steps: int) -> dict[str, float]:
    if curve_BS is None:
        return dict.fromkeys(("error", "error_low", "error_high"), math.nan)
    low, high = np.quantile(curve_BS[1:, i], levels(steps)) if len(curve_BS) > 1 else (math.nan, math.nan)
    return {"error": float(curve_BS[0, i]), "error_low": float(low), "error_high": float(high)}


def _best(curve_BS: Array, sizes: list[int], steps: int) -> tuple[float, float, float]:
    """The size of least error, of all steps and the ends of its interval."""
    best_B = np.array(sizes, dtype=float)[curve_BS.argmin(axis=1)]
    if len(best_B) == 1:
        return float(best_B[0]), math.nan, math.nan
    low, high = np.quantile(best_B[1:], levels(steps), method="nearest")
    return float(best_B[0]), float(low), float(high)


def pool_table(studies: list[PoolStudy]) -> pd.DataFrame:
    """pool.csv."""
    return pd.concat([study.table for study in studies], ignore_index=True)


def pool_section(studies: list[PoolStudy]) -> Section:
    """The table of the page: leave-one-out, and std scaling's cosine beside it; all else is in pool.csv."""
    arms = len({study.arm for study in studies}) > 1
    header = (
        "R", "R'", "mixed", "effective rank", "top-1 fraction", "participation ratio", "error", "own prompt", "cosine",
        "cosine, std",
    )  # fmt: skip
    rows = [((study.arm,) if arms else ()) + row for study in studies for row in _rows(study)]
    after = tuple(found_words(study, arms) for study in studies)
    notes = (
        f"Error, own prompt and cosine: leave-one-out. Std scaling: ddof 1, eps {STD_EPS:g}; against the average "
        "objective its error needs products of different prompts' gradients, which no record has. Sub-groups one by "
        f"one (spectra, std): all where there are at most {SUBSETS}, else {SUBSETS} drawn ones of each pool.",
    )
    lead = ("arm",) if arms else ()
    return Section(
        NAME, "Group sizes at a fixed policy", WORDS, (*lead, *header), tuple(rows), after + notes, ("pool.csv",)
    )


def _rows(study: PoolStudy) -> list[tuple[str, ...]]:
    rows = []
    for size, part in study.table.groupby("size"):
        of = {str(row["estimator"]): row for row in part.to_dict("records")}
        row = of["leave-one-out"]

        def cell(name: str, row: dict = row) -> str:
            return with_interval(row[name], row[f"{name}_low"], row[f"{name}_high"])

        rows.append(
            (
                str(study.R), str(size), cell("mixed"), cell("effective_rank"), cell("top1_fraction"),
                cell("participation_ratio"), *(_figures(row, name) for name in ("error", "error_prompt")),
                number(row["cosine"]), number(of["std"]["cosine"]),
            )
        )  # fmt: skip
    return rows


def _figures(row: dict, name: str) -> str:
    return three_digits(row[name], row[f"{name}_low"], row[f"{name}_high"])


def found_words(study: PoolStudy, arms: bool) -> str:
    """The size found, its interval, and the predicted one."""
    where = f"{study.arm}, R = {study.R}" if arms else f"R = {study.R}"
    if math.isnan(study.found):
        return (
            f"{where}: the best size cannot be decided from these runs: ||E grad J||² needs estimator=grpo or rloo "
            "with aggregation=sum and steps of two groups or more."
        )
    ends = "" if math.isnan(study.low) else f", 95% interval {study.low:g} to {study.high:g}"
    beyond = " (the whole pool: the best size may be larger)" if study.at_the_end else ""
    formula = shown(study.predicted, "best_R")
    return f"{where}: least error found at R' = {study.found:g}{beyond}{ends}; by the formula R* = {formula}."
