"""Verdicts on the claims of arXiv 2606.29238, computed from a sweep's records by the rules of `report.rules`.

Here the list of them is made, and three are judged:

    C7   the zero sum of the advantages leaves the gradient matrix a rank of at most R - 1
    C8   the effective rank is about 2 for every R, because of the zero-sum constraint
    C10  Table 1's pairs of top-1 fraction and effective rank

C2 to C4 are in `claims_advantages`, C5 and shuffled advantages in `claims_gradient`, C6 in `claims_training`, C9 in
`claims_scores`, C11 where a sweep has both budgets in `claims_budget`, exact assertions in `controls`, what no such
record decides in `undecided`, and the open question Q3 in `longitudinal`.

Every claim says what the paper says, what was measured with its interval, what the null gives, and the verdict in
words.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd

from grpo_sweeps.maths.feasibility import cell_range, effective_rank_ranges, energy_in_two
from grpo_sweeps.maths.intervals import Interval, bounded_interval, linked, share_over
from grpo_sweeps.publish.formats import markdown, with_interval
from grpo_sweeps.report.claims import advantages as claims_advantages
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.budget import budget_pairs, c11, extra_cells
from grpo_sweeps.report.claims.finding import EVERY_ARM, UNKNOWN, Claim, Finding, estimator_of, records_of
from grpo_sweeps.report.claims.gradient import c5, shuffled
from grpo_sweeps.report.claims.rules import ABOUT_TWO, HOLDS, MARGIN, UNDECIDED, all_of, judge
from grpo_sweeps.report.claims.training import c6
from grpo_sweeps.report.claims_ranks import other_definitions
from grpo_sweeps.report.claims_scores import c9
from grpo_sweeps.report.controls import controls
from grpo_sweeps.report.longitudinal import q3
from grpo_sweeps.report.measure.spectral import CONTROLS
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.tables.pooled import PAPER_TABLE1, clusters, pooled, pooled_difference, usable_groups
from grpo_sweeps.report.undecided import undecided

PAPER_MODEL = "nemotron"
SAYS = {
    "C7": "The zero-sum advantages bound the rank of the gradient matrix by R - 1.",
    "C8": "The effective rank is about 2 for every R, a consequence of the zero-sum constraint.",
    "C10": "Table 1: top-1 fraction 0.6-0.7, 0.7-0.8, 0.5-0.6 with effective rank about 2 at R = 2, 4, 8.",
}


def judge_claims(sweep: Sweep) -> list[Claim]:
    """All claims for all arms, by number, exact controls and the null last. An arm's findings are for the R values that
    its runs have, measured or not."""
    pairs = budget_pairs(sweep)
    alpha = rules.simultaneous_alpha(len(sweep.cells) + extra_cells(pairs))
    claims: list[Claim] = [c11(sweep, pair, alpha) for pair in pairs]
    for arm in sorted({arm for arm, _ in sweep.cells}):
        groups = {R: usable_groups(sweep, arm, R) for a, R in sweep.cells if a == arm}
        records = {R: records_of(sweep, arm, R) for R in groups}
        scope, kind = _scope(sweep, arm), estimator_of(sweep, arm)
        claims += [judge_one(arm, kind, records) for judge_one in claims_advantages.CLAIMS]
        measured = [c5(arm, kind, groups, records, alpha), c6(arm, records, sweep), c9(arm, groups, alpha)]
        claims += [replace(claim, remarks=(*scope, *claim.remarks)) for claim in measured]
        claims += [_c7(arm, groups, alpha), _c8(arm, groups, alpha, scope), _c10(arm, groups, alpha, scope)]
        claims += [controls(arm, groups), shuffled(arm, groups, alpha), q3(arm, groups)]
    judged = {claim.id for claim in claims}
    return sorted([*claims, *(claim for claim in undecided() if claim.id not in judged)], key=_order)


def _order(claim: Claim) -> tuple[int, str]:
    number = claim.id.removeprefix("C")
    return (int(number) if number.isdigit() else 100), claim.id


def error_lines(claims: list[Claim]) -> list[str]:
    """One line for each exact assertion that failed."""
    return [f"{claim.id}: {error}" for claim in claims for error in claim.errors]


def _scope(sweep: Sweep, arm: str) -> tuple[str, ...]:
    """Which model the verdict is about, and that it says nothing about another one."""
    runs = sweep.runs[sweep.runs["arm"] == arm]
    models = sorted({str(m) for m in runs["model"].dropna()})
    if models and all(PAPER_MODEL in m.lower() for m in models):
        return ()
    named = ", ".join(models) or "an unnamed model"
    return (
        f"The paper's figures are about Nemotron-4B, these runs about {named}. "
        "A claim about Nemotron-4B is not decided by another model.",
    )


def rank_with_floor(groups: pd.DataFrame, alpha: float, rank: str = "effective_rank") -> Interval:
    """Mean effective rank (or another of `measure.WITH_FLOOR`), its interval widened at each end to what the Grams' own
    precision allows."""
    by = clusters(groups)
    middle, low, high = (pooled(groups, name, alpha, by) for name in (rank, f"{rank}_floor_low", f"{rank}_floor_high"))
    return Interval(middle.mean, low.low, high.high, middle.n, middle.clusters)


def rank_of_few(R: int, groups: pd.DataFrame, alpha: float) -> Interval:
    """As `rank_with_floor`, by Hoeffding's interval. Groups that share a prompt depend on one another, and where there
    are several seeds those that share a seed: what hangs together by either counts as one."""
    labels = pd.factorize(groups["prompt_id"])[0]
    if groups["seed"].nunique() > 1:
        labels = linked(labels, pd.factorize(groups["seed"])[0])
    middle, low, high = (
        bounded_interval(groups[f"effective_rank{end}"].astype(float), labels, 1.0, R, alpha)
        for end in ("", "_floor_low", "_floor_high")
    )
    return Interval(middle.mean, low.low, high.high, middle.n, middle.clusters)


def _c7(arm: str, groups: dict[int, pd.DataFrame], alpha: float) -> Claim:
    findings = tuple(_c7_at(R, g, alpha) for R, g in groups.items())
    remarks = (
        "The zero sum binds the advantages, not the rows: R rows of non-zero weight can have rank R. Only centring the "
        "rows brings the bound R - 1.",
        "A theorem that says 'at most' falls to a counterexample from any model.",
        *(_repeats(R, g) for R, g in groups.items() if len(g)),
    )
    return Claim("C7", arm, SAYS["C7"], all_of([f.verdict for f in findings]), findings, remarks)


def _repeats(R: int, groups: pd.DataFrame) -> str:
    """Rollouts of the same text have equal rows, which lower the rank for a reason of their own."""
    different = groups[groups["distinct"] == R]
    above = (different["numerical_rank"] > R - 1).mean() if len(different) else math.nan
    tail = f"of those, {above:.0%} have a rank above {R - 1}" if len(different) else "so the rank says little here"
    count = f"{len(different)} of {len(groups)}"
    return f"R = {R}: in {count} groups no text came twice; {tail}."


def _c7_at(R: int, groups: pd.DataFrame, alpha: float) -> Finding:
    share = share_over(groups["numerical_rank"] > R - 1, clusters(groups), alpha)
    verdict = judge(share, 0.0, rules.TOLERATED_SHARE, len(groups))
    witnesses = int((groups["numerical_rank"] > R - 1).sum())
    if witnesses >= rules.WITNESSES and len(groups) >= rules.MIN_GROUPS:
        verdict = rules.CONTRADICTED
    blurred = float((groups["resolution"] > rules.RESOLUTION).mean()) if len(groups) else math.nan
    if verdict == HOLDS and blurred > rules.TOLERATED_SHARE:
        verdict = UNDECIDED  # a low rank seen through a coarse K is no low rank
    measured = (
        f"rank above {R - 1} in {witnesses} groups, {with_interval(share.mean, share.low, share.high)} of them; "
        f"mean rank {groups['numerical_rank'].mean():.2f}, after centring the rows "
        f"{groups['centred_numerical_rank'].mean():.2f}"
        if len(groups)
        else "nothing measured"
    )
    null = f"independent rows: rank {R} in every group"
    return Finding(R, len(groups), measured, null, verdict, share, f"at most {R - 1}")


def _c8(arm: str, groups: dict[int, pd.DataFrame], alpha: float, scope: tuple[str, ...]) -> Claim:
    findings = tuple(_c8_at(R, g, alpha) for R, g in groups.items())
    verdict = all_of([f.verdict for f in findings])
    remarks = [*scope, *(_distinct_rank(R, g) for R, g in groups.items() if len(g))]
    columns = ["effective_rank", *CONTROLS]
    measured = [g[columns] for g in groups.values() if len(g)]
    controls = control_changes(pd.concat(measured) if measured else pd.DataFrame())
    if controls is None:
        remarks.append("Exact negative controls: none could be computed (the records hold no Gram of the scores).")
    elif max(controls.values()) > rules.CONTROL_TOLERANCE:
        verdict = UNDECIDED
        remarks.append(f"Exact negative controls FAILED, so the records do not fit together: {_in_words(controls)}.")
    else:
        remarks.append(
            f"Exact negative controls passed (largest relative change of the effective rank: {_in_words(controls)}). "
            "Neither the signs of the weights nor one factor a group can touch the spectrum, so it is not the zero sum "
            "of the advantages that sets the effective rank."
        )
    if verdict == HOLDS and max(groups) < 4:
        verdict = UNDECIDED
        remarks.append("At R = 2 no effective rank exceeds 2: 'for every R' needs a larger R.")
    remarks += other_definitions(groups, alpha, rank_with_floor)
    return Claim("C8", arm, SAYS["C8"], verdict, findings, tuple(remarks))


def control_changes(groups: pd.DataFrame) -> dict[str, float] | None:
    """Largest relative change of the effective rank under each exact control; None when there is nothing to compare."""
    if not len(groups) or not groups[list(CONTROLS)].notna().any().any():
        return None
    return {name.removeprefix("control_").replace("_", " "): float(groups[name].max()) for name in CONTROLS}


def _in_words(controls: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.0e}" if value else f"{name} 0" for name, value in controls.items())


def _distinct_rank(R: int, groups: pd.DataFrame) -> str:
    """The effective rank where repeated texts play no part, beside its null: a subset, with its own mix of k."""
    different = groups[groups["distinct"] == R]
    if not len(different):
        return f"R = {R}: every group holds some text twice, so its effective rank is partly a count of texts."
    rank = different["effective_rank"].astype(float).mean()
    null = different["null_effective_rank"].astype(float).mean()
    return (
        f"R = {R}: {groups['distinct'].mean():.2f} different texts a group on average; in the {len(different)} groups "
        f"without a repeat the effective rank is {rank:.2f}, orthogonal scores {null:.2f}."
    )


def _c8_at(R: int, groups: pd.DataFrame, alpha: float) -> Finding:
    if not len(groups):
        return Finding(R, 0, "nothing measured", "", UNDECIDED, UNKNOWN, "about 2")
    few = len(groups) < rules.MIN_GROUPS
    rank = rank_of_few(R, groups, alpha) if few else rank_with_floor(groups, alpha)
    difference = pooled_difference(groups, alpha)
    by = " by Hoeffding's interval" if few else ""
    measured = f"effective rank {with_interval(rank.mean, rank.low, rank.high)}{by}"
    null = (
        f"orthogonal scores {groups['null_effective_rank'].mean():.2f}, measured minus null "
        f"{with_interval(difference.mean, difference.low, difference.high)}"
    )
    if groups["null_distinct"].notna().any():
        null += f"; equal texts counted once {groups['null_distinct'].mean():.2f}"
    if groups["null_gaussian"].notna().any():
        null += f"; Gaussian scores with each group's own spectrum {groups['null_gaussian'].mean():.2f}"
    verdict = judge(rank, ABOUT_TWO - MARGIN, ABOUT_TWO + MARGIN, len(groups))
    if few and rank.outside(ABOUT_TWO - MARGIN, ABOUT_TWO + MARGIN):
        verdict = rules.CONTRADICTED
    return Finding(R, len(groups), measured, null, verdict, rank, "about 2")


def _c10(arm: str, groups: dict[int, pd.DataFrame], alpha: float, scope: tuple[str, ...]) -> Claim:
    findings = tuple(_c10_at(R, g, alpha) for R, g in groups.items() if R in PAPER_TABLE1)
    remarks = [*scope, *(_feasibility(R) for R in groups if R in PAPER_TABLE1)]
    if 2 in groups:
        remarks.append("With a rank of at most R - 1 (C7) the R = 2 row would be effective rank 1, top-1 fraction 1.")
    broken = sum(_infeasible(R, g) for R, g in groups.items())
    remarks.append(
        "Every measured group lies within the single-matrix range of its own top-1 fraction."
        if not broken
        else f"{broken} groups lie outside the range of their own top-1 fraction: the records do not fit together."
    )
    verdict = all_of([f.verdict for f in findings])
    if broken or (verdict == HOLDS and set(PAPER_TABLE1) - set(groups)):
        verdict = UNDECIDED  # the table is confirmed only when each of its rows is
    return Claim("C10", arm, SAYS["C10"], verdict, findings, tuple(remarks))


def _infeasible(R: int, groups: pd.DataFrame) -> int:
    low_N, high_N = effective_rank_ranges(np.clip(groups["top1_fraction"].to_numpy(np.float64), 1.0 / R, 1.0), R)
    rank_N = groups["effective_rank"].astype(float).to_numpy()
    inside_N = (low_N - rules.CONTROL_TOLERANCE <= rank_N) & (rank_N <= high_N + rules.CONTROL_TOLERANCE)
    return int((~inside_N).sum())


def _feasibility(R: int) -> str:
    """What Table 1's cell allows, by arithmetic on the printed ranges alone."""
    cell = PAPER_TABLE1[R]
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
    cell = PAPER_TABLE1[R]
    paper = f"top-1 {cell.top1_low:g}-{cell.top1_high:g}, effective rank about {cell.effective_rank:g}"
    if not len(groups):
        return Finding(R, 0, "nothing measured", "", UNDECIDED, UNKNOWN, paper)
    top1, rank = rank_with_floor(groups, alpha, "top1_fraction"), rank_with_floor(groups, alpha)
    pair = [
        judge(top1, cell.top1_low, cell.top1_high, len(groups)),
        judge(rank, cell.effective_rank - MARGIN, cell.effective_rank + MARGIN, len(groups)),
    ]
    measured = (
        f"top-1 {with_interval(top1.mean, top1.low, top1.high)} with effective rank "
        f"{with_interval(rank.mean, rank.low, rank.high)}; two values hold {groups['top2_fraction'].mean():.0%} of "
        "the energy"
    )
    return Finding(R, len(groups), measured, _top1_null(R, groups), all_of(pair), top1, paper)


def _top1_null(R: int, groups: pd.DataFrame) -> str:
    """Orthogonal scores of equal norm: the energies are w^2, so the top-1 fraction is max w^2 / sum w^2."""
    k = groups["k"].dropna()
    if not len(k):
        return "orthogonal scores: not in closed form for these rewards"
    top1 = np.maximum(k, R - k) ** 2 / (k * (R - k) * R)
    return f"orthogonal scores: top-1 {top1.mean():.2f} with effective rank {groups['null_effective_rank'].mean():.2f}"


CLAIM_COLUMNS = [
    "claim", "arm", "R", "groups", "paper", "measured", "decisive", "decisive_low", "decisive_high", "null", "verdict",
    "remarks",
]  # fmt: skip


def claims_frame(claims: list[Claim]) -> pd.DataFrame:
    """One row a claim, arm and R, and one with no R for the claim as a whole."""
    rows: list[tuple[object, ...]] = []
    none = float("nan")
    for c in claims:
        total = sum(f.groups for f in c.findings)
        rows.append((c.id, c.arm, None, total, c.paper, "", none, none, none, "", c.verdict, " ".join(c.remarks)))
        for f in c.findings:
            decisive = f.interval.mean, f.interval.low, f.interval.high
            rows.append((c.id, c.arm, f.R, f.groups, f.paper, f.measured, *decisive, f.null, f.verdict, ""))
    frame = pd.DataFrame(rows, columns=CLAIM_COLUMNS)
    return frame.astype({"R": "Int64"})


def claims_markdown(claims: list[Claim]) -> str:
    """The claims for a reader: a heading and verdict each, a table by R, the remarks, and the rules at the end."""
    several = len({c.arm for c in claims} - {EVERY_ARM}) > 1
    text = ["# Claims of arXiv 2606.29238\n"]
    for claim in claims:
        arm = f" ({claim.arm})" if several or claim.arm == EVERY_ARM else ""
        text.append(f"## {claim.id}{arm}: {claim.verdict}\n")
        text.append(f"{claim.lead}: {claim.paper}\n")
        rows = [[str(f.R), str(f.groups), f.paper, f.measured, f.null, f.verdict] for f in claim.findings]
        if rows:
            text.append(markdown(["R", "groups", "the paper", "measured", "null", "verdict"], rows))
        text.append("\n".join(f"- {remark}" for remark in claim.remarks) + "\n")
    return "\n".join([*text, rules.IN_WORDS, ""])
