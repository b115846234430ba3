"""How many prompts a sweep needs for an interval of a given width: from the spread between the prompts of its records.

A mean over n independent prompts of standard deviation s has the 95% interval +- t s / sqrt(n), t of n - 1 degrees of
freedom. s is measured: with V the cluster-robust variance of the mean over the P prompts of a record
(`grpo_sweeps.maths.intervals`), s = sqrt(P V), whatever number of groups each prompt has. For R*, which is no mean, the
units are steps, and s follows from its bootstrap interval: halving an interval takes four times the steps.

What a further seed brings is not in it: where runs differ by more than their prompts do, only more seeds help.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from grpo_sweeps.maths.intervals import Clusters, t_quantile
from grpo_sweeps.publish.formats import number
from grpo_sweeps.publish.page import Section
from grpo_sweeps.report.claims.gradient import slope_moves
from grpo_sweeps.report.design.best_size import BestSize
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.tables.pooled import discarded, records_of, usable_groups

WIDTHS = {"mean effective rank": (0.1, 0.05), "norm slope": (0.25, 0.1), "R*": (1.0, 0.5)}
"""Half-widths of the table, by quantity."""
MOST = 10**9


@dataclass(frozen=True)
class Need:
    """What one quantity at an arm and R has and needs. unit: prompts or steps; have: how many there are now; spread: s,
    of one unit; groups: groups behind one unit, all-equal and discarded ones included."""

    arm: str
    R: int
    quantity: str
    unit: str
    have: int
    spread: float
    groups: float

    @property
    def half_width(self) -> float:
        """The half-width of the present 95% interval, differences between seeds aside."""
        return t_quantile(0.975, self.have - 1.0) * self.spread / math.sqrt(self.have)

    def needs(self, half_width: float) -> float:
        return units_needed(self.spread, half_width)


def units_needed(spread: float, half_width: float, alpha: float = 0.05) -> float:
    """Least n with t(1 - alpha/2, n - 1) spread / sqrt(n) <= half_width; NaN where the spread is not known.

    Raises ValueError unless half_width > 0.

    >>> units_needed(0.5, 0.1), units_needed(0.5, 0.05)
    (99.0, 387.0)
    """
    if not half_width > 0:
        raise ValueError(f"half_width={half_width}: a number above 0 is needed")
    if not math.isfinite(spread):
        return math.nan

    def enough(n: int) -> bool:
        return t_quantile(1.0 - alpha / 2.0, n - 1.0) * spread / math.sqrt(n) <= half_width

    low, high = 2, 2  # the left side falls with n
    while not enough(high):
        low, high = high, 2 * high
        if high > MOST:
            return math.inf
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return float(high)


def spread_of(values: np.ndarray, prompts: np.ndarray) -> tuple[int, float]:
    """(P, s) of the mean of values over groups: its prompts, and the spread of the module's docstring."""
    keep = np.isfinite(values)
    by = Clusters(prompts[keep])
    variance, _, (P,) = by.variance(values[keep] - values[keep].mean()) if keep.any() else (math.nan, math.nan, (0,))
    return P, math.sqrt(P * variance) if variance >= 0 else math.nan


def needs(sweep: Sweep, sizes: list[BestSize]) -> list[Need]:
    """For each arm and R: effective rank, norm slope, R*, where there are two units or more. sizes: `best_sizes`'."""
    found = []
    for one in sizes:
        groups = usable_groups(sweep, one.arm, one.R)
        steps = sweep.metrics[(sweep.metrics["arm"] == one.arm) & (sweep.metrics["R"] == one.R)]
        everything = len(records_of(sweep, one.arm, one.R)) + discarded(steps) / one.R
        values = {"mean effective rank": groups["effective_rank"] if len(groups) else pd.Series(dtype=float)}
        if len(groups) and groups["k"].notna().any():
            values["norm slope"] = slope_moves(groups[groups["k"].notna()])
        for quantity, column in values.items():
            prompts = pd.factorize(groups["prompt_id"].loc[column.index])[0] if len(column) else np.zeros(0)
            P, spread = spread_of(column.to_numpy(dtype=float), np.asarray(prompts))
            if P > 1 and math.isfinite(spread):
                found.append(Need(one.arm, one.R, quantity, "prompts", P, spread, everything / P))
        low, high = one.interval("best_R")
        if math.isfinite(low) and math.isfinite(high) and high > low:
            spread = (high - low) / 2 / t_quantile(0.975, one.steps - 1.0) * math.sqrt(one.steps)
            found.append(Need(one.arm, one.R, "R*", "steps", one.steps, spread, one.groups_a_step))
    return found


def power_table(found: list[Need]) -> pd.DataFrame:
    """power.csv: one row per arm, R, quantity and half-width; `groups` and `rollouts` are those behind `needed`."""
    rows = []
    for need in found:
        for width in (need.half_width / 2, *WIDTHS[need.quantity]):
            n = need.needs(width) if width > 0 else math.nan
            rows.append(
                {"arm": need.arm, "R": need.R, "quantity": need.quantity, "unit": need.unit, "have": need.have,
                 "spread": need.spread, "half_width_now": need.half_width, "half_width": width, "needed": n,
                 "groups": n * need.groups, "rollouts": n * need.groups * need.R}
            )  # fmt: skip
    return pd.DataFrame(rows)


def power_section(found: list[Need]) -> Section:
    """The small table of the page."""
    arms = len({need.arm for need in found}) > 1
    rows = []
    for need in found:
        now = need.half_width
        wanted = ", ".join(f"±{width:g}: {_count(need.needs(width))}" for width in WIDTHS[need.quantity])
        halved = _count(need.needs(now / 2)) if now > 0 else "–"
        cells = (str(need.R), need.quantity, f"{need.have} {need.unit}", number(need.spread), f"±{number(now, 3)}")
        rows.append((*((need.arm,) if arms else ()), *cells, f"{halved} {need.unit}", f"{wanted} {need.unit}"))
    header = ("R", "quantity", "now", "spread of one", "interval now", "to halve this interval", "for")
    words = (
        "Prompts (with a mixed group) or steps that a 95% interval of a given half-width takes, from the spread "
        "between those that were measured, at the same share of mixed groups. It leaves out how runs of "
        "other seeds differ.",
    )
    lead = ("arm",) if arms else ()
    return Section("power", "How many prompts", words, (*lead, *header), tuple(rows), (), ("power.csv",))


def _count(n: float) -> str:
    return f"{n:.0f}" if math.isfinite(n) else "–"
