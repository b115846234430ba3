"""C11 of arXiv 2606.29238, where a sweep has arms at equal prompts and at equal rollouts a step.

At equal prompts a larger R also has more rollouts a step. Whether R itself speeds learning up is seen at equal
rollouts, and with leave-one-out, the group mean rescaled by R/(R-1). What is compared is the gain in held-out accuracy
from the first to the last evaluation, problem by problem and seed by seed, between runs of equally many steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from grpo_sweeps.maths.intervals import Interval, mean_interval
from grpo_sweeps.paper import STATEMENTS
from grpo_sweeps.publish.formats import with_interval_of
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.finding import UNKNOWN, Claim, Finding, estimator_of, not_about
from grpo_sweeps.report.claims.rules import CONTRADICTED, GAIN_MARGIN, HOLDS, UNDECIDED, all_of
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.tables.pooled import CHANGE, drawn_besides, first_and_last

KEY = "budget="
PAIRS = "problems x seeds"
"""What C11 counts in the place of groups."""


@dataclass(frozen=True)
class Pair:
    """Two arms that differ in the budget alone, and the R that both have, sorted."""

    prompts: str
    rollouts: str
    Rs: tuple[int, ...]


def budget_pairs(sweep: Sweep) -> list[Pair]:
    """The pairs of arms with the same settings but `budget` that have two R or more in common."""
    found: dict[str, dict[str, str]] = {}
    for arm in sweep.arm_names:
        parts = arm.split(", ")
        budgets = [part.removeprefix(KEY) for part in parts if part.startswith(KEY)]
        if len(budgets) == 1:
            found.setdefault(", ".join(part for part in parts if not part.startswith(KEY)), {})[budgets[0]] = arm
    pairs = []
    for arms in found.values():
        if {"prompts", "rollouts"} <= set(arms):
            Rs = [{R for a, R in sweep.cells if a == arms[budget]} for budget in ("prompts", "rollouts")]
            both = tuple(sorted(Rs[0] & Rs[1]))
            pairs += [Pair(arms["prompts"], arms["rollouts"], both)] if len(both) > 1 else []
    return pairs


def extra_cells(pairs: list[Pair]) -> int:
    """How many cells' worth of tests C11 adds."""
    return math.ceil(sum(len(pair.Rs) - 1 for pair in pairs) / rules.CELLS_OF_C11)


def c11(sweep: Sweep, pair: Pair, alpha: float) -> Claim:
    """The decisive interval at each R: gain there less gain at the least R, equal rollouts a step."""
    kind = estimator_of(sweep, pair.rollouts)
    rescaled = kind == "leave-one-out"
    equal = drawn_besides(sweep.metrics[sweep.metrics["arm"] == pair.rollouts]) == 0
    findings = tuple(_at(sweep, pair, R, alpha, rescaled and equal) for R in pair.Rs[1:])
    remarks = [
        f"The rule: at equal rollouts the whole interval above 0, a larger R learns faster; below {GAIN_MARGIN:g}, it "
        "does not. At equal prompts a larger R has more rollouts a step, so that column decides nothing.",
        "Judged is that a larger R learns faster. That it refines the same two directions is not: a record keeps inner "
        "products within one group.",
        "One learning rate for all R, unless the sweep says otherwise. Figure 3 has the curves by rollouts used; the "
        "error of the gradient by R is under “Best group size”.",
    ]
    if kind == "group mean":
        remarks.append("Nothing is decided: the factor (R-1)/R is between the arms; estimator=rloo takes it out.")
    elif not rescaled:
        remarks.append(
            "Nothing is decided: the claim is about a group's baseline without a factor between sizes: estimator=rloo."
        )
    if not equal:
        remarks.append(
            "Nothing is decided: resampling or continuations drew further rollouts, not equally many at each R."
        )
    if sweep.runs.loc[sweep.runs["arm"] == pair.rollouts, "seed"].nunique() < 2:
        remarks.append("Nothing is decided: one seed says nothing of the differences between training runs.")
    name = f"{pair.prompts} and {pair.rollouts}"
    verdict = all_of([f.verdict for f in findings])
    found = Claim("C11", name, STATEMENTS["C11"].brief, verdict, findings, tuple(remarks), counted=PAIRS)
    return found if kind else not_about(found, "The claim is about the size of the group that makes the baseline.")


def _at(sweep: Sweep, pair: Pair, R: int, alpha: float, comparable: bool) -> Finding:
    least = pair.Rs[0]
    rollouts, prompts = (gain_difference(sweep, arm, R, least, alpha) for arm in (pair.rollouts, pair.prompts))
    words = ", ".join(
        f"equal {name} {with_interval_of(i, 3) if i.n else 'not comparable'}"
        for name, i in (("rollouts", rollouts), ("prompts", prompts))
    )
    verdict = UNDECIDED
    if comparable and rollouts.known and len(rollouts.clusters) > 1 and rollouts.clusters[1] > 1:
        verdict = HOLDS if rollouts.low > 0 else CONTRADICTED if rollouts.high < GAIN_MARGIN else UNDECIDED
    return Finding(
        R, rollouts.n, f"gain less that at R = {least}: {words}", "no difference 0", verdict, rollouts, "above 0"
    )


def gain_difference(sweep: Sweep, arm: str, R: int, least: int, alpha: float) -> Interval:
    """Mean over problems and seeds of the gain in accuracy at R less that at `least`, clustered by problem and seed.

    UNKNOWN where the runs differ in their steps or have no problem and seed in common. `n` counts pairs.
    """
    large, small = (_gains(sweep, arm, size) for size in (R, least))
    both = large.merge(small, on=["seed", "problem_id"], suffixes=("", "_least"))
    steps = {*large["last_step"], *small["last_step"]}
    if not len(both) or len(steps) > 1:
        return UNKNOWN
    difference = both["gain"] - both["gain_least"]
    found = mean_interval(difference, both["problem_id"], both["seed"], alpha=alpha)
    return found.within((2 * CHANGE[0], 2 * CHANGE[1]))


def _gains(sweep: Sweep, arm: str, R: int) -> pd.DataFrame:
    """seed, problem_id, last_step, gain; sampled as in training where samples were drawn, else greedy."""
    ends = first_and_last(sweep, arm, R)
    kind = "sampled" if ends["sampled_last"].notna().any() else "greedy"
    ends = ends.assign(gain=(ends[f"{kind}_last"] - ends[f"{kind}_first"]).astype(float))
    return ends.loc[ends["gain"].notna(), ["seed", "problem_id", "last_step", "gain"]]
