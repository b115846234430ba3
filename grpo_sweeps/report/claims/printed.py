"""C10 of arXiv 2606.29238: Table 1's pairs of top-1 fraction and effective rank, as printed.

The numbers are those of one model on one task: runs of it are judged, all others are compared with them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from grpo_sweeps.maths.feasibility import cell_range, effective_rank_ranges, energy_in_two
from grpo_sweeps.paper import ABOUT_TWO, MARGIN, STATEMENTS, TABLE1
from grpo_sweeps.publish.formats import with_interval_of
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.finding import UNKNOWN, Claim, Finding
from grpo_sweeps.report.claims.ranks import orthogonal_rows, rank_with_floor
from grpo_sweeps.report.claims.rules import UNDECIDED, all_of, for_every_R, judge


def c10(arm: str, groups: dict[int, pd.DataFrame], alpha: float, scope: tuple[str, ...]) -> Claim:
    """Each row of Table 1, and what its printed ranges allow. Its numbers are one model's: where `scope` says that the
    runs are about another model, task or reward they are compared with them and not judged."""
    findings = tuple(_c10_at(R, g, alpha) for R, g in groups.items() if R in TABLE1)
    if scope:
        findings = tuple(replace(f, verdict=rules.COMPARED) if f.groups else f for f in findings)
    remarks = [*scope, *(_feasibility(R) for R in groups if R in TABLE1)]
    if 2 in groups:
        remarks.append("With a rank of at most R - 1 (C7) the R = 2 row would be effective rank 1, top-1 fraction 1.")
    broken = sum(_infeasible(R, g) for R, g in groups.items())
    remarks.append(
        "Every measured group lies within the single-matrix range of its own top-1 fraction."
        if not broken
        else f"{broken} groups lie outside the range of their own top-1 fraction: the records do not fit together."
    )
    verdict = for_every_R(all_of([f.verdict for f in findings]), groups)
    if scope and any(f.groups for f in findings):
        verdict = rules.COMPARED
    verdict = UNDECIDED if broken else verdict
    return Claim("C10", arm, STATEMENTS["C10"].brief, verdict, findings, tuple(remarks))


def _infeasible(R: int, groups: pd.DataFrame) -> int:
    low_N, high_N = effective_rank_ranges(np.clip(groups["top1_fraction"].to_numpy(np.float64), 1.0 / R, 1.0), R)
    rank_N = groups["effective_rank"].astype(float).to_numpy()
    inside_N = (low_N - rules.CONTROL_TOLERANCE <= rank_N) & (rank_N <= high_N + rules.CONTROL_TOLERANCE)
    return int((~inside_N).sum())


def _feasibility(R: int) -> str:
    """What Table 1's cell allows, by arithmetic on the printed ranges alone."""
    cell = TABLE1[R]
    one = cell_range(cell.top1_low, cell.top1_high, R)
    averages = cell_range(cell.top1_low, cell.top1_high, R, averages=True)
    text = (
        f"R = {R}: a top-1 fraction of {cell.top1_low:g}-{cell.top1_high:g} allows an effective rank of {one[0]:.2f}-"
        f"{one[1]:.2f} in one matrix, {averages[0]:.2f}-{averages[1]:.2f} for averages of groups"
    )
    if R > 4:
        upper = ABOUT_TWO + MARGIN
        share = energy_in_two(upper, cell.top1_high)
        text += f"; {upper:g} or less needs {share:.0%} of a matrix's energy in two values"
    return text + "."


def _c10_at(R: int, groups: pd.DataFrame, alpha: float) -> Finding:
    cell = TABLE1[R]
    paper = f"top-1 {cell.top1_low:g}-{cell.top1_high:g}, effective rank about {cell.effective_rank:g}"
    if not len(groups):
        return Finding(R, 0, "nothing measured", "", UNDECIDED, UNKNOWN, paper)
    top1, rank = rank_with_floor(groups, alpha, "top1_fraction"), rank_with_floor(groups, alpha)
    pair = [
        judge(top1, cell.top1_low, cell.top1_high, len(groups)),
        judge(rank, cell.effective_rank - MARGIN, cell.effective_rank + MARGIN, len(groups)),
    ]
    measured = (
        f"top-1 {with_interval_of(top1)} with effective rank "
        f"{with_interval_of(rank)}; two values hold {groups['top2_fraction'].mean():.0%} of "
        "the energy"
    )
    return Finding(R, len(groups), measured, _top1_null(groups), all_of(pair), top1, paper)


def _top1_null(groups: pd.DataFrame) -> str:
    """Orthogonal scores of equal norm: the energies are w^2, so the top-1 fraction is max w^2 / sum w^2; those of rows
    of the loss are their squared norms."""
    top1 = groups["null_orthogonal_top1_fraction"].astype(float)
    rank = float(groups["null_effective_rank"].mean())
    return f"{orthogonal_rows(groups).rstrip(',')}: top-1 {top1.mean():.2f} with effective rank {rank:.2f}"
