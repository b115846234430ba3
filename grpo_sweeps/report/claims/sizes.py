"""C18, C20 and C21 of arXiv 2606.29238: what k makes of a group's norm, the groups of a step together, the order of R.

C18   a curriculum: prompts of middling difficulty weigh most
C20   each step moves along about 2 directions
C21   the top-1 fraction is largest at R = 4
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd

from grpo_sweeps.maths.intervals import Clusters, Interval, mean_over
from grpo_sweeps.paper import ABOUT_TWO, LARGEST_TOP1, MARGIN, STATEMENTS, TABLE1
from grpo_sweeps.publish.formats import with_interval_of
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.finding import UNKNOWN, Claim, Finding, nothing
from grpo_sweeps.report.claims.rules import CONTRADICTED, HOLDS, UNDECIDED, all_of
from grpo_sweeps.report.measure.spectral import range_of_difference
from grpo_sweeps.report.tables.pooled import clusters
from grpo_sweeps.spectra.stacked import stacked_bounds_by

ABOUT = (ABOUT_TWO - MARGIN, ABOUT_TWO + MARGIN)
STACKED = "stacked/effective_rank"
"""The metric of the steps whose groups were measured together."""


def c18(arm: str, groups: dict[int, pd.DataFrame], records: dict[int, pd.DataFrame]) -> Claim:
    """Which part of the squared norms comes from groups of middling k. Shown and never judged."""
    findings = tuple(_c18_at(R, g, records[R]) for R, g in groups.items())
    remarks = (
        f"It is {rules.NOT_FOR_RUNS}: the weight on a prompt is the factor between E g and its grad J, and E g takes "
        "all-equal groups in. It is (R-1)/R for the group mean, 1 for leave-one-out, at every success rate: exact, see "
        "the theory report. No record can say otherwise.",
        "Shown is the squared norm by k, most of it noise: that groups of middling k have longer gradients is no "
        "weight on their prompts.",
    )
    return Claim("C18", arm, STATEMENTS["C18"].brief, rules.by_theory("C18"), findings, remarks)


def _c18_at(R: int, groups: pd.DataFrame, records: pd.DataFrame) -> Finding:
    known = records[records["k"].notna()] if len(records) else records
    squares = groups["gradient_norm"].astype(float) ** 2 if len(groups) else pd.Series(dtype=float)
    if not len(known) or not squares.sum() > 0 or not groups["k"].notna().all():
        return nothing(R, "the middle most")
    low, high = math.ceil(rules.MIDDLE[0] * R), math.floor(rules.MIDDLE[1] * R)
    occur = float(known["k"].between(low, high).mean())
    carried = float(squares[groups["k"].between(low, high)].sum() / squares.sum())
    middle = f"k = {low}" if low == high else f"k from {low} to {high}"
    measured = (
        f"groups of {middle} are {occur:.1%} of all and carry {carried:.1%} of the squared norm of "
        "the gradients of the measured mixed groups"
    )
    verdict = rules.by_theory("C18")
    return Finding(R, len(known), measured, "weight the same at every k", verdict, UNKNOWN, "the middle most")


def step_bounds(groups: pd.DataFrame) -> pd.DataFrame:
    """run, seed, step, groups, low, high: the least and largest effective rank of each step's mixed groups stacked, by
    `spectra.stacked` and as far as the precision of the Grams allows."""
    by_step = groups.groupby(["run", "step"])
    labels, energies = by_step.ngroup().to_numpy(), groups["energy"].to_numpy(dtype=float)
    ends = [groups[f"effective_rank_floor_{end}"].to_numpy(dtype=float) for end in ("low", "high")]
    found = by_step.agg(seed=("seed", "first"), groups=("seed", "size")).reset_index()
    return found.assign(
        low=stacked_bounds_by(labels, ends[0], energies)[0], high=stacked_bounds_by(labels, ends[1], energies)[1]
    )


def c20(
    arm: str, groups: dict[int, pd.DataFrame], records: dict[int, pd.DataFrame], metrics: pd.DataFrame, alpha: float
) -> Claim:
    """The effective rank of each step's groups stacked: measured where it was, else what the groups' own allow.

    groups: the usable ones by R; records: all. metrics: the arm's, one row per run and step.
    """
    findings = tuple(_c20_at(R, g, records[R], metrics[metrics["R"] == R], alpha) for R, g in groups.items())
    remarks = [
        "The matrix of a step has the rows of all its groups; here those of its mixed groups that were measured. Its "
        "effective rank is at least the mean of the groups' own, weighted by their squared norms, and at most what it "
        "is when different groups are orthogonal; both follow from the groups' own Grams. With analysis.stacked_every "
        "above 0 it is measured.",
        f"The rule, with {rules.MIN_STEPS} steps or more: measured, the whole interval within {ABOUT[0]:g} to "
        f"{ABOUT[1]:g} or outside it; else it falls where the least value is above {ABOUT[1]:g} or the largest below "
        f"{ABOUT[0]:g}, and holds where both are within.",
        "Steps that share prompts depend on one another: where prompts recur the interval over steps is widened by as "
        "much as that can matter.",
    ]
    return Claim("C20", arm, STATEMENTS["C20"].brief, all_of([f.verdict for f in findings]), findings, tuple(remarks))


def recurrence(records: pd.DataFrame) -> float:
    """How many times the variance of a mean over independent steps that over steps which share prompts can be:
    sum_p n_p^2 / sum_p n_p, n_p the groups of prompt p; 1 where no prompt recurs.

    Two values that are the same function of G independent draws each and share m of them have a covariance of at most
    m/G times their variance (Hoeffding, "A class of statistics with asymptotically normal distribution", 1948).

    >>> recurrence(pd.DataFrame({"prompt_id": ["a", "b", "a", "b"]}))
    2.0
    """
    times_P = records["prompt_id"].value_counts().to_numpy(dtype=float)
    return float((times_P**2).sum() / times_P.sum())


def _over_steps(values: pd.Series, seeds: pd.Series, records: pd.DataFrame, alpha: float) -> Interval:
    """Mean effective rank over steps, its interval widened by `recurrence` and cut to what a stack's can be."""
    found = mean_over(values.astype(float), Clusters(np.arange(len(values)), seeds), alpha)
    wide = math.sqrt(recurrence(records))
    low, high = (found.mean + wide * (end - found.mean) for end in (found.low, found.high))
    rows = float(records.groupby(["run", "step"]).size().max() * records["R"].iloc[0])
    return Interval(found.mean, low, high, found.n, found.clusters).within((1.0, rows))


def _c20_at(R: int, groups: pd.DataFrame, records: pd.DataFrame, metrics: pd.DataFrame, alpha: float) -> Finding:
    steps = step_bounds(groups) if len(groups) else pd.DataFrame()
    if not len(steps):
        return nothing(R, "about 2")
    low, high = (_over_steps(steps[end], steps["seed"], records, alpha) for end in ("low", "high"))
    null = f"groups orthogonal to one another {high.mean:.2f}"
    words = (
        f"at least {with_interval_of(low)}, at most {with_interval_of(high)} in {len(steps)} steps of "
        f"{steps['groups'].mean():.1f} groups"
    )
    known = metrics[metrics[STACKED].notna()] if STACKED in metrics else metrics.iloc[:0]
    if len(known):
        found = _over_steps(known[STACKED], known["seed"], records, alpha)
        words = f"effective rank of the stack {with_interval_of(found)} in {len(known)} steps; {words}"
        if len(known) >= rules.MIN_STEPS:
            verdict = rules.judge(found, *ABOUT, len(known))
            return Finding(R, len(groups), words, null, verdict, found, "about 2")
    verdict = UNDECIDED
    if len(steps) >= rules.MIN_STEPS and low.known and high.known:
        if low.low > ABOUT[1] or high.high < ABOUT[0]:
            verdict = CONTRADICTED
        elif low.low >= ABOUT[0] and high.high <= ABOUT[1]:
            verdict = HOLDS
    return Finding(R, len(groups), words, null, verdict, low, "about 2")


def difference(first: pd.DataFrame, second: pd.DataFrame, column: str, alpha: float) -> Interval:
    """Mean of a column over the groups of `first` less that over those of `second`, clustered by prompt and seed
    through both, widened by what the precision of the Grams allows where the column says (`..._floor_low`), and cut to
    what the difference can be."""
    if not len(first) or not len(second):
        return UNKNOWN
    both, in_first = pd.concat([first, second]), np.repeat([True, False], [len(first), len(second)])
    values = both[column].to_numpy(dtype=float)
    means = values[in_first].mean(), values[~in_first].mean()
    moves = np.where(in_first, (values - means[0]) / len(first), (means[1] - values) / len(second))
    around = mean_over(len(both) * moves, clusters(both), alpha)
    found, slack = float(means[0] - means[1]), [0.0, 0.0]
    if f"{column}_floor_low" in both:
        below, above = (both[f"{column}_floor_{end}"].to_numpy(dtype=float) - values for end in ("low", "high"))
        slack = [below[in_first].mean() - above[~in_first].mean(), above[in_first].mean() - below[~in_first].mean()]
    low, high = found + around.low + slack[0], found + around.high + slack[1]
    sizes = int(first["R"].iloc[0]), int(second["R"].iloc[0])
    interval = Interval(found, float(low), float(high), len(both), around.clusters)
    return interval.within(range_of_difference(column, *sizes))


def c21(arm: str, groups: dict[int, pd.DataFrame], alpha: float, scope: tuple[str, ...]) -> Claim:
    """The top-1 fraction at the R of Figure 2 less that at each other R of Table 1. One model's order: others are
    compared with it and not judged, as in C10."""
    others = [R for R in groups if R in TABLE1 and R != LARGEST_TOP1 and LARGEST_TOP1 in groups]
    findings = tuple(_c21_at(R, groups[LARGEST_TOP1], groups[R], alpha) for R in others)
    if scope:
        findings = tuple(replace(f, verdict=rules.COMPARED) if f.groups else f for f in findings)
    verdict = all_of([f.verdict for f in findings])
    if verdict == HOLDS and {LARGEST_TOP1, *others} != set(TABLE1):
        verdict = UNDECIDED
    remarks = [
        *scope,
        "Beside it the same difference for orthogonal scores of the measured norms with equal texts made one: the "
        "numbers of right rollouts alone can give the order, without structure.",
    ]
    if not findings:
        remarks.append(f"It {UNDECIDED}: needed are R = {', '.join(map(str, sorted(TABLE1)))} in one arm.")
    if scope and any(f.groups for f in findings):
        verdict = rules.COMPARED
    return Claim("C21", arm, STATEMENTS["C21"].brief, verdict, findings, tuple(remarks))


def _c21_at(R: int, largest: pd.DataFrame, other: pd.DataFrame, alpha: float) -> Finding:
    paper = f"R = {LARGEST_TOP1} above R = {R}"
    if not len(largest) or not len(other):
        return nothing(R, paper)
    found = difference(largest, other, "top1_fraction", alpha)
    null = difference(largest, other, "null_both_top1_fraction", alpha)
    rank = difference(largest, other, "effective_rank", alpha)
    tops = [float(part["top1_fraction"].astype(float).mean()) for part in (largest, other)]
    measured = (
        f"top-1 fraction {tops[0]:.2f} at R = {LARGEST_TOP1} less {tops[1]:.2f} here: "
        f"{with_interval_of(found)}; effective rank there less here {with_interval_of(rank)}"
    )
    verdict = UNDECIDED
    if min(len(largest), len(other)) >= rules.MIN_GROUPS and found.known:
        verdict = HOLDS if found.low > 0 else CONTRADICTED if found.high < 0 else UNDECIDED
    words = f"orthogonal scores, measured norms and equal texts once: {null.mean:.2f}"
    return Finding(R, len(other), measured, words, verdict, found, paper)
