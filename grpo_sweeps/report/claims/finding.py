"""One claim as the report shows it, and what the modules that judge claims share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from grpo_sweeps.estimators.declared import DECLARATIONS
from grpo_sweeps.maths.intervals import Interval
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.read.query import Sweep

UNKNOWN = Interval(math.nan, math.nan, math.nan, 0)
EVERY_ARM = "every arm"
ERROR = "ERROR: "
PAPER_SAYS = "The paper says"
ESTIMATORS = {one.name: one.kind for one in DECLARATIONS.values() if one.zero_sum_group}
"""The kind of an estimator by its function's name: those whose advantages sum to zero in a group."""


@dataclass(frozen=True)
class Finding:
    """One claim at one R: `measured` and `null` in words, the decisive interval, the verdict.

    groups: how many values are behind it, groups where `Claim.counted` names nothing else.
    """

    R: int
    groups: int
    measured: str
    null: str
    verdict: str
    interval: Interval
    paper: str = ""


@dataclass(frozen=True)
class Claim:
    """One claim in one arm: the overall verdict, one finding per R, and remarks that bear on it.

    lead: who says what stands in `paper`; the paper, or for a control the mathematics. counted: what the findings
    count.
    """

    id: str
    arm: str
    paper: str
    verdict: str
    findings: tuple[Finding, ...]
    remarks: tuple[str, ...] = field(default=())
    lead: str = PAPER_SAYS
    counted: str = "groups"

    @property
    def header(self) -> tuple[str, ...]:
        """The head of the table of its findings."""
        return ("R", self.counted, "the paper", "measured", "null", "verdict")

    @property
    def errors(self) -> tuple[str, ...]:
        """Remarks on exact assertions that failed: the records, or this package, are wrong."""
        return tuple(remark for remark in self.remarks if remark.startswith(ERROR))


def nothing(R: int, paper: str = "") -> Finding:
    """The finding at an R without a group to judge."""
    return Finding(R, 0, "nothing measured", "", rules.UNDECIDED, UNKNOWN, paper)


def not_about(claim: Claim, *why: str) -> Claim:
    """The claim with its figures, where the arm is not what it is about: shown, and no verdict on it."""
    findings = tuple(replace(finding, verdict=rules.NOT_ABOUT) for finding in claim.findings)
    return replace(claim, verdict=rules.NOT_ABOUT, findings=findings, remarks=(*why, *claim.remarks))


def by_length(sweep: Sweep, arm: str) -> bool:
    """Do an arm's advantages depend on the lengths of its rollouts?"""
    names = {str(t).rpartition(".")[2] for t in sweep.runs.loc[sweep.runs["arm"] == arm, "estimator"]}
    return any(name in DECLARATIONS and DECLARATIONS[name].needs_lengths for name in names)


def estimator_of(sweep: Sweep, arm: str) -> str:
    """A value of ESTIMATORS for an arm's estimator; empty where it is another one or not recorded."""
    targets = sweep.runs.loc[sweep.runs["arm"] == arm, "estimator"]
    kinds = {str(ESTIMATORS.get(str(target).rpartition(".")[2], "")) for target in targets}
    return kinds.pop() if len(kinds) == 1 else ""
