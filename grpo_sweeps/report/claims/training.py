"""What changes from the first to the last third of training: C6 of arXiv 2606.29238, sparsity, and its question 3.

Open question 3: does the effective rank fall as sigma_r falls? Over training the numbers k of right rollouts move
towards 0 and R, and with them the null 4k(R-k)/R: a rank that falls may say nothing about the scores. Between the first
and the last third of the steps the mean rank over mixed groups changes by two parts that add up exactly (the
decomposition of rates of Kitagawa 1955):

    composition   sum_k (w1_k - w0_k) (m0_k + m1_k) / 2    the shares w of the numbers k
    geometry      sum_k (m1_k - m0_k) (w0_k + w1_k) / 2    the mean ranks m at fixed k

over the k that both thirds have. Intervals: 95%, by a bootstrap over prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from grpo_sweeps.maths.intervals import Interval, paired_difference
from grpo_sweeps.paper import OPEN_QUESTION_3, STATEMENTS
from grpo_sweeps.publish.formats import with_interval
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.finding import Claim, Finding, nothing
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.tables.layers import measured_updates

READINGS = {
    "update/changed_share": "weights that a step changes",
    "update/changed_share_float32": "in float32",
    "gradient/hoyer": "Hoyer sparsity of the gradient",
    "update/hoyer": "of the update",
}
NOT_RECORDED = (
    "Nothing else of that name is in these records: with analysis.update_every above 0 a run keeps the Hoyer sparsity "
    "of the gradient and the share of weights that a step changes, in the training precision and in float32."
)
RECORDED = (
    "Beside it the share of weights that a step changes, in the training precision and in the optimiser's float32, and "
    "the Hoyer sparsity (0: all entries of one size, 1: one alone is not 0) of the step's whole gradient before "
    "clipping and of the change of the weights. One can rise while another falls. Steps without a "
    "gradient move nothing and take no part in these."
)
LEAD = "The paper asks"
DRAWS = 400
MIN_PROMPTS = 10  # that a bootstrap over them means something


def c6(arm: str, records: dict[int, pd.DataFrame], sweep: Sweep) -> Claim:
    """`records`: all groups by R."""
    findings = tuple(_c6_at(R, g, measured_updates(sweep, arm, R)) for R, g in records.items())
    measured = any(len(measured_updates(sweep, arm, R)) for R in records)
    remarks = (
        "The paper does not define sparsity, and one factor a group cannot make a dense score sparse. The share of "
        "all-equal groups, which have no gradient, is one thing it may mean; it is shown, not judged.",
        RECORDED if measured else NOT_RECORDED,
        "First and last third of each run's steps, paired by run; the interval is over runs, clustered by seed, and "
        "with one seed there is none.",
    )
    found = any(f.groups for f in findings)
    return Claim("C6", arm, STATEMENTS["C6"].brief, rules.UNDEFINED if found else rules.UNDECIDED, findings, remarks)


def thirds(records: pd.DataFrame, column: str) -> pd.DataFrame:
    """One row per run: mean of a column over the first and over the last third of its steps, and the seed."""
    rows = []
    for run, part in records.groupby("run"):
        low, high = int(part["step"].min()), int(part["step"].max()) + 1
        if high - low < 3:
            continue
        width = (high - low) // 3
        values = part[column].astype(float)
        first, last = values[part["step"] < low + width], values[part["step"] >= high - width]
        rows.append((run, part["seed"].iloc[0], float(first.mean()), float(last.mean())))
    return pd.DataFrame(rows, columns=["run", "seed", "first", "last"]).dropna()


def _c6_at(R: int, records: pd.DataFrame, metrics: pd.DataFrame) -> Finding:
    shares = thirds(records.copy().assign(equal=~records["mixed"].astype(bool)), "equal")
    if not len(shares):
        return nothing(R)
    change, measured = _words(shares, "all-equal groups")
    runs = f"{len(shares)} run{'s' if len(shares) > 1 else ''}"
    for name, words in READINGS.items():
        found = thirds(metrics, name) if name in metrics else shares.iloc[:0]
        if len(found):
            measured += f"; {_words(found, words)[1]}"
    return Finding(R, len(records), f"{measured} ({runs})", "no change 0", rules.UNDEFINED, change, "grows")


def _words(ends: pd.DataFrame, what: str) -> tuple[Interval, str]:
    change = paired_difference(ends["first"], ends["last"], ends["seed"])
    return change, (
        f"{what} {ends['first'].mean():.3f} in the first third, {ends['last'].mean():.3f} in the last, change "
        f"{with_interval(change.mean, change.low, change.high, 3)}"
    )


@dataclass(frozen=True)
class Change:
    """Last third less first: of the mean effective rank over the matched k, and of its two parts."""

    total: float
    composition: float
    geometry: float
    matched: float  # share of the two thirds' groups whose k both have


def third_of(groups: pd.DataFrame) -> pd.Series:
    """0, 1 or 2 for each group: which third of the steps that were measured it lies in."""
    low, high = int(groups["step"].min()), int(groups["step"].max()) + 1
    return ((groups["step"] - low) * 3 // max(1, high - low)).astype(int)


def tables(groups: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """groups with `third`, `k`, `prompt_id`, `effective_rank` -> how many there are and the sum of their ranks, each
    (prompts, 2, numbers of k): first and last third."""
    ends = groups[groups["third"] != 1]
    prompt, prompts = pd.factorize(groups["prompt_id"], sort=True)
    k, ks = pd.factorize(ends["k"], sort=True)
    where = (prompt[(groups["third"] != 1).to_numpy()], (ends["third"] == 2).to_numpy(np.intp), k)
    counts, sums = np.zeros((2, len(prompts), 2, len(ks)))
    np.add.at(counts, where, 1.0)
    np.add.at(sums, where, ends["effective_rank"].to_numpy(float))
    return counts, sums


def change(counts_2K: np.ndarray, sums_2K: np.ndarray) -> Change | None:
    """The change over all prompts together; None where no k is in both thirds."""
    both = (counts_2K > 0).all(axis=0)
    if not both.any():
        return None
    n, total = counts_2K[:, both], sums_2K[:, both]
    (w0, w1), (m0, m1) = n / n.sum(axis=1, keepdims=True), total / n
    composition = float(((w1 - w0) * (m0 + m1)).sum() / 2)
    geometry = float(((m1 - m0) * (w0 + w1)).sum() / 2)
    return Change(float(w1 @ m1 - w0 @ m0), composition, geometry, float(n.sum() / counts_2K.sum()))


def intervals(counts: np.ndarray, sums: np.ndarray, seed: int = 0) -> dict[str, Interval]:
    """Each part's value with its interval, prompts drawn with replacement."""
    middle = change(counts.sum(axis=0), sums.sum(axis=0))
    assert middle is not None
    rng, P = np.random.default_rng(seed), len(counts)
    drawn = []
    for _ in range(DRAWS):
        times_P = np.bincount(rng.integers(P, size=P), minlength=P).astype(float)
        found = change(np.tensordot(times_P, counts, 1), np.tensordot(times_P, sums, 1))
        if found is not None:
            drawn.append((found.total, found.composition, found.geometry))
    low, high = np.quantile(np.array(drawn), [0.025, 0.975], axis=0)
    values = {"total": middle.total, "composition": middle.composition, "geometry": middle.geometry}
    return {
        name: Interval(value, float(low[i]), float(high[i]), int(counts.sum()), (P,))
        for i, (name, value) in enumerate(values.items())
    }


def parts_of_change(groups: pd.DataFrame) -> tuple[Change, dict[str, Interval]] | None:
    """`change` and `intervals` of groups of known k; None with too few prompts, or where no k is in both thirds."""
    if groups["prompt_id"].nunique() < MIN_PROMPTS:
        return None
    counts, sums = tables(groups.assign(third=third_of(groups)))
    found = change(counts.sum(axis=0), sums.sum(axis=0))
    return None if found is None else (found, intervals(counts, sums))


def q3(arm: str, groups: dict[int, pd.DataFrame]) -> Claim:
    """groups: the usable ones of each R. Shown, never judged: a question has no verdict, and the parts answer it."""
    findings = tuple(_q3_at(R, g) for R, g in groups.items())
    remarks = (
        "The change of the mean effective rank from the first to the last third of the steps, over the numbers k of "
        "right rollouts that both have: composition is the change of the shares of k, geometry that of the rank at "
        "fixed k.",
        "sigma_r falls where k moves towards 0 or R. A rank that falls by composition alone says nothing about the "
        "scores.",
    )
    return Claim("Q3", arm, OPEN_QUESTION_3, rules.ASKED, findings, remarks, LEAD)


def _q3_at(R: int, groups: pd.DataFrame) -> Finding:
    known = groups[groups["k"].notna()]
    moved = parts_of_change(known)
    if moved is None:
        return nothing(R)
    found, parts = moved
    spread, thirds = np.sqrt(known["k"] * (R - known["k"])) / R, third_of(known)
    sigma = [float(spread[thirds == third].mean()) for third in (0, 2)]
    words = ", ".join(f"{name} {with_interval(i.mean, i.low, i.high, 3)}" for name, i in parts.items())
    measured = (
        f"rank {words}; sigma_r of mixed groups {sigma[0]:.3f} to {sigma[1]:.3f}; {found.matched:.0%} of groups matched"
    )
    return Finding(R, len(known), measured, "no change 0", rules.ASKED, parts["geometry"])
