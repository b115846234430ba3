"""Exact assertions on a sweep's records: what no data can break; a failure is an error of records or code."""

from __future__ import annotations

import math

import pandas as pd

from grpo_sweeps.publish.formats import with_interval
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.finding import ERROR, UNKNOWN, Claim, Finding, nothing
from grpo_sweeps.report.claims.rules import CONTRADICTED, HOLDS, UNDECIDED, all_of
from grpo_sweeps.report.measure.spectral import CONTROLS
from grpo_sweeps.report.tables.pooled import pooled

SAYS = (
    "Neither the signs of the row weights, nor leave-one-out, nor division by the standard deviation changes the "
    "effective rank of a group; centred rows have a rank of at most R - 1."
)


def controls(arm: str, groups: dict[int, pd.DataFrame]) -> Claim:
    """The controls of one arm; `groups` by R, from `usable_groups`."""
    findings, errors = [], []
    for R, part in groups.items():
        finding, failed = _at(R, part)
        findings.append(finding)
        errors += [f"{ERROR}{arm}, R = {R}: {words}." for words in failed]
    remarks = (
        *errors,
        "Changes are relative, the largest of all groups; up to "
        f"{rules.CONTROL_TOLERANCE:.0e} counts as rounding. Leave-one-out and std are made from the recorded rewards.",
        "With row weights of 1/length, for stacked groups or after centring the rows leave-one-out and std need not "
        "agree with the group mean: nothing of that is asserted.",
    )
    verdict = all_of([f.verdict for f in findings])
    return Claim("Controls", arm, SAYS, verdict, tuple(findings), remarks, "Exact, whatever the data")


def _at(R: int, groups: pd.DataFrame) -> tuple[Finding, list[str]]:
    if not len(groups):
        return nothing(R), []
    largest = {name: float(groups[name].max()) for name in CONTROLS}
    scores = not all(math.isnan(value) for value in largest.values())
    centred = float(groups["centred_numerical_rank"].max())
    failed = [
        f"{_name(name)} changes the effective rank by {value:.1e} of itself"
        for name, value in largest.items()
        if value > rules.CONTROL_TOLERANCE
    ]
    if centred > R - 1:
        failed.append(f"centred rows have rank {centred:g}, above {R - 1}")
    unit = pooled(groups, "unit_effective_rank")
    changes = ", ".join(
        f"{_name(name)} {value:.0e}" if value else f"{_name(name)} 0" for name, value in largest.items()
    )
    measured = (
        f"largest change: {changes if scores else 'not known (no Gram of the scores)'}; largest rank after centring "
        f"{centred:g}; rows of unit norm have effective rank {with_interval(unit.mean, unit.low, unit.high)}"
    )
    verdict = CONTRADICTED if failed else HOLDS if scores else UNDECIDED
    return Finding(R, len(groups), measured, f"0, 0, 0; at most {R - 1}", verdict, UNKNOWN), failed


def _name(column: str) -> str:
    return column.removeprefix("control_").replace("_", " ")
