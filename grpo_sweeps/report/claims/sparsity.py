"""C6 of arXiv 2606.29238: does sparsity grow over training?

What the paper defines is 4.1(iv), which its appendix calls a bound on sparsity: few rollouts are eps-effective, the
share being rho_eps = P(|A| > eps). With eps fixed beforehand (`paper.SPARSE`) "grows" is "rho_eps falls".
It is judged from the first to the last third of the steps, over all groups, all-equal ones included. The sparse
gradient of 5.1 has no definition: what it may mean is shown and not judged.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from grpo_sweeps.maths.intervals import MIN_CLUSTERS, Interval, mean_over, paired_difference
from grpo_sweeps.paper import SPARSE, STATEMENTS
from grpo_sweeps.publish.formats import with_interval_of
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.finding import UNKNOWN, Claim, Finding, not_about, nothing
from grpo_sweeps.report.claims.rules import CONTRADICTED, HOLDS, UNDECIDED, all_of
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.tables.layers import measured_updates
from grpo_sweeps.report.tables.pooled import CHANGE, clusters, discarded
from grpo_sweeps.text import count

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


def c6(arm: str, kind: str, records: dict[int, pd.DataFrame], sweep: Sweep, alpha: float) -> Claim:
    """`records`: all groups by R. kind: as for `c2`."""
    whole = discarded(sweep.metrics[sweep.metrics["arm"] == arm]) == 0
    judged = whole and kind == "group mean"
    findings = tuple(_c6_at(R, g, measured_updates(sweep, arm, R), alpha, judged) for R, g in records.items())
    measured = any(len(measured_updates(sweep, arm, R)) for R in records)
    remarks = [
        "Judged is 4.1(iv): rho_eps = P(|A| > eps) over all rollouts, at "
        f"{' and '.join(f'eps = {eps:g}' for eps in SPARSE)}. It falls where both intervals lie below 0; it does not "
        "where one lies above 0. Where eps < 1/R and rewards are 0 and 1 rho is the share of mixed groups, which must "
        "rise where p starts below one half and learns.",
        "The sparse gradient of 5.1 is undefined in the paper: one factor a group cannot make a dense score sparse. "
        "The share of all-equal groups, which have no gradient, is one thing it may mean; it is shown, not judged.",
        RECORDED if measured else NOT_RECORDED,
        f"First and last third of each run's steps; a run of which fewer than {rules.MIN_THIRD_STEPS} steps of a third "
        "were measured takes no part. The intervals of rho are over groups, clustered by prompt and seed; "
        "with one seed they cover the draw of prompts alone. The other intervals are over runs, paired, clustered by "
        "seed, and with one seed or two there is none.",
    ]
    if not whole:
        remarks.append("Not judged: resampling discarded groups of equal rewards, which are among those that count.")
    found = Claim("C6", arm, STATEMENTS["C6"].brief, all_of([f.verdict for f in findings]), findings, tuple(remarks))
    if kind == "group mean":
        return found
    return not_about(found, "eps is a size of the group mean's advantages, and this arm's estimator has others.")


def third_of_run(measured: pd.DataFrame, whole: pd.DataFrame | None = None) -> pd.Series:
    """-1 in the first third of its run's steps, 1 in the last, 0 between; 0 throughout a run that was measured in fewer
    than `rules.MIN_THIRD_STEPS` steps of its first or last third.

    measured: run and step, any number of rows each; whole: those of all steps of the runs, where not all were measured.
    """
    third = _third(measured, measured if whole is None else whole)
    counts = measured_steps(measured, third)
    enough = counts.index[counts.min(axis=1) >= rules.MIN_THIRD_STEPS]
    return third.where(measured["run"].isin(enough), 0)


def _third(measured: pd.DataFrame, whole: pd.DataFrame) -> pd.Series:
    """`third_of_run`, however few steps were measured."""
    bounds = whole.groupby("run")["step"].agg(["min", "max"])
    codes, runs = pd.factorize(measured["run"])
    low, high = (bounds[end].reindex(runs).to_numpy()[codes] for end in ("min", "max"))
    width = (high - low + 1) // 3
    return (measured["step"] > high - width).astype(int) - (measured["step"] < low + width).astype(int)


def measured_steps(measured: pd.DataFrame, third: pd.Series) -> pd.DataFrame:
    """By run: how many steps of its first (-1) and of its last third (1) were measured."""
    steps = measured.assign(third=third).drop_duplicates(["run", "step"])
    counts = steps.groupby("run")["third"].value_counts().unstack(fill_value=0)
    return counts.reindex(columns=[-1, 1], fill_value=0)


def steps_in_words(measured: pd.DataFrame, whole: pd.DataFrame | None = None) -> str:
    """The measured steps in both thirds, the least of the runs that take part, or of all where none does."""
    third = _third(measured, measured if whole is None else whole)
    counts = measured_steps(measured, third)
    enough = counts[counts.min(axis=1) >= rules.MIN_THIRD_STEPS]
    first, last = (int(n) for n in (enough if len(enough) else counts).min())
    few = "" if len(enough) else f", fewer than {rules.MIN_THIRD_STEPS}: no change is told"
    return f"{first} and {last} measured steps in the first and the last third{few}"


def fall_of(records: pd.DataFrame, third: pd.Series, eps: float, alpha: float) -> tuple[float, float, Interval]:
    """rho_eps in the first and in the last third, and the change, its interval by the moves of the two means.

    third: `third_of_run` of the records.
    """
    share = records[f"advantage_above_{eps}"].astype(float)
    first, last = share[third == -1], share[third == 1]
    if not len(first) or not len(last):
        return float("nan"), float("nan"), UNKNOWN
    ends = records[third != 0]
    moves = np.where(third == 1, (share - last.mean()) / len(last), (first.mean() - share) / len(first))
    around = mean_over(len(ends) * moves[third != 0], clusters(ends), alpha)
    change = float(last.mean() - first.mean())
    interval = Interval(change, change + around.low, change + around.high, len(ends), around.clusters)
    return float(first.mean()), float(last.mean()), interval.within(CHANGE)


def thirds(measured: pd.DataFrame, column: str, whole: pd.DataFrame) -> pd.DataFrame:
    """One row per run that `third_of_run` takes: mean of a column over the first and the last third, and the seed."""
    known = measured[measured[column].notna()]
    ends = known.assign(third=third_of_run(known, whole), value=known[column].astype(float))
    means = ends[ends["third"] != 0].groupby(["run", "seed", "third"])["value"].mean().unstack()
    means = means.reindex(columns=[-1, 1]).rename(columns={-1: "first", 1: "last"})
    return means.dropna().reset_index()[["run", "seed", "first", "last"]]


def _c6_at(R: int, records: pd.DataFrame, metrics: pd.DataFrame, alpha: float, judged: bool) -> Finding:
    if not len(records):
        return nothing(R)
    used = ["run", "seed", "prompt_id", "step", *(f"advantage_above_{eps}" for eps in SPARSE)]
    records = records[used].assign(equal=~records["mixed"].astype(bool))
    shares = thirds(records, "equal", records)
    counted = steps_in_words(records)
    if not len(shares):
        return Finding(R, len(records), counted, "no change 0", UNDECIDED, UNKNOWN, "rho falls")
    third = third_of_run(records)
    falls = {eps: fall_of(records, third, eps, alpha / len(SPARSE)) for eps in SPARSE}
    said = [
        f"|A| > {eps:g}: {first:.3f} in the first third, {last:.3f} in the last, change {with_interval_of(change, 3)}"
        for eps, (first, last, change) in falls.items()
    ]
    runs = count(len(shares))
    said += [_words(shares, "all-equal groups"), counted]
    said += _readings(records, metrics)
    changes = [change for _, _, change in falls.values()]
    verdict = _verdict(changes) if judged else UNDECIDED
    return Finding(R, len(records), f"{'; '.join(said)} ({runs})", "no change 0", verdict, changes[0], "rho falls")


def _readings(records: pd.DataFrame, metrics: pd.DataFrame) -> list[str]:
    """The logged readings of a sparse gradient in words; those of as many measured steps share one count."""
    by_steps: dict[str, list[str]] = {}
    for name, words in READINGS.items():
        known = metrics[metrics[name].notna()] if name in metrics else metrics.iloc[:0]
        if len(known):
            found = thirds(known, name, records)
            by_steps.setdefault(steps_in_words(known, records), []).append(
                _words(found, words) if len(found) else words
            )
    return [f"{'; '.join(words)}: {steps}" for steps, words in by_steps.items()]


def _verdict(changes: list[Interval]) -> str:
    if min(change.n for change in changes) < 2 * rules.MIN_GROUPS:
        return UNDECIDED
    if any(change.known and change.low > 0 for change in changes):
        return CONTRADICTED
    return HOLDS if all(change.known and change.high < 0 for change in changes) else UNDECIDED


def _words(ends: pd.DataFrame, what: str) -> str:
    change = paired_difference(ends["first"], ends["last"], ends["seed"]).within(CHANGE)
    none = "" if change.known else f" (no interval from fewer than {MIN_CLUSTERS} seeds)"
    return (
        f"{what} {ends['first'].mean():.3f} in the first third, {ends['last'].mean():.3f} in the last, change "
        f"{with_interval_of(change, 3)}{none}"
    )
