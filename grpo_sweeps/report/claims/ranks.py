"""C7 and C8 of arXiv 2606.29238, the ranks of a group's gradient matrix, and what no data can break of them.

    C7   the zero sum of the advantages leaves the gradient matrix a rank of at most R - 1
    C8   the effective rank is about 2 for every R, because of the zero-sum constraint; beside it the same rule for the
         other definitions of rank, which the paper does not mean

The exact assertions (`controls`) hold for any records; where one fails, the records or the code are wrong.
"""

from __future__ import annotations

import math

import pandas as pd

from grpo_sweeps.maths.intervals import Interval, bounded_interval, linked, mean_over, share_over
from grpo_sweeps.paper import ABOUT_TWO, MARGIN, STATEMENTS, TABLE1
from grpo_sweeps.publish.formats import with_interval_of
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.finding import ERROR, UNKNOWN, Claim, Finding, not_about, nothing
from grpo_sweeps.report.claims.rules import CONTRADICTED, HOLDS, UNDECIDED, all_of, for_every_R, judge
from grpo_sweeps.report.measure.spectral import BELOW, CONTROLS
from grpo_sweeps.report.tables.pooled import (
    clusters,
    pooled,
    pooled_difference,
)

DEFINITIONS = {
    "participation_ratio": "participation ratio",
    "stable_rank": "stable rank",
    "entropy_rank": "entropy rank",
    "numerical_rank": "numerical rank",
}
ABOUT = (ABOUT_TWO - MARGIN, ABOUT_TWO + MARGIN)
OWN_NULLS = (("null_measured_norms", "null_both"), ("null_effective_rank", "null_distinct"))
"""A group's own nulls, each with the one that differs from it in equal texts alone."""

CONTROLS_SAY = (
    "Neither the signs of the row weights, nor leave-one-out, nor division by the standard deviation changes the "
    "effective rank of a group; centred rows have a rank of at most R - 1."
)


def rank_with_floor(groups: pd.DataFrame, alpha: float, rank: str = "effective_rank") -> Interval:
    """Mean effective rank, or another of `spectral.WITH_FLOOR`, its interval widened at each end to what the Grams' own
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


NOT_ZERO = "The claim is about what follows from a zero sum, and this arm's advantages do not sum to zero in a group."


def c7(arm: str, kind: str, groups: dict[int, pd.DataFrame], alpha: float) -> Claim:
    """The share of groups whose rank is above R - 1; `groups` by R, from `usable_groups`.

    kind: as for `c2`; the claim is about advantages that sum to zero, and is not judged where they do not.
    """
    findings = tuple(_c7_at(R, g, alpha) for R, g in groups.items())
    remarks = (
        "The zero sum binds the advantages, not the rows: R rows of non-zero weight can have rank R. Only centring the "
        "rows brings the bound R - 1.",
        "A theorem that says 'at most' falls to a counterexample from any model.",
        *(_repeats(R, g) for R, g in groups.items() if len(g)),
    )
    found = Claim("C7", arm, STATEMENTS["C7"].brief, all_of([f.verdict for f in findings]), findings, remarks)
    return found if kind else not_about(found, NOT_ZERO)


def _repeats(R: int, groups: pd.DataFrame) -> str:
    """Rollouts of the same text have equal rows, which lower the rank for a reason of their own."""
    different = groups[groups["distinct"] == R]
    above = (different["numerical_rank"] > R - 1).mean() if len(different) else math.nan
    tail = f"of those, {above:.0%} have a rank above {R - 1}" if len(different) else "so the rank says little here"
    count = f"{len(different)} of {len(groups)}"
    return f"R = {R}: in {count} groups no text came twice; {tail}."


def _c7_at(R: int, groups: pd.DataFrame, alpha: float) -> Finding:
    share = share_over(groups["numerical_rank"] > R - 1, clusters(groups), alpha)
    witnesses = int((groups["numerical_rank"] > R - 1).sum())
    if witnesses >= rules.WITNESSES and len(groups) >= rules.MIN_GROUPS:
        verdict = rules.CONTRADICTED  # whatever their share
    else:
        verdict = judge(share, 0.0, rules.TOLERATED_SHARE, len(groups))
    blurred = float((groups["resolution"] > rules.RESOLUTION).mean()) if len(groups) else math.nan
    if verdict == HOLDS and blurred > rules.TOLERATED_SHARE:
        verdict = UNDECIDED  # a low rank seen through a coarse K is no low rank
    measured = (
        f"rank above {R - 1} in {witnesses} groups, {with_interval_of(share)} of them; "
        f"mean rank {groups['numerical_rank'].mean():.2f}, after centring the rows "
        f"{groups['centred_numerical_rank'].mean():.2f}"
        if len(groups)
        else "nothing measured"
    )
    null = f"independent rows: rank {R} in every group"
    return Finding(R, len(groups), measured, null, verdict, share, f"at most {R - 1}")


def c8(arm: str, kind: str, groups: dict[int, pd.DataFrame], alpha: float, scope: tuple[str, ...]) -> Claim:
    """The mean effective rank of each R, its exact negative controls, and the other definitions of rank.

    kind: as for `c2`; the claim derives "about 2" from the zero sum and is not judged where there is none.
    """
    findings = tuple(_c8_at(R, g, alpha) for R, g in groups.items())
    verdict = all_of([f.verdict for f in findings])
    remarks = [*scope, *(_distinct_rank(R, g) for R, g in groups.items() if len(g))]
    if of_the_loss(groups):
        remarks.append(OF_THE_LOSS)
    remarks += ["Judged is “for every R, because of the zero sum”: the value at each R, and where it comes from."]
    remarks += [
        f"R = {R}: about 2 without structure, by repeated texts and the norms of the rows: with equal texts made one "
        "the null is about 2 too, or the measured value is not told from it."
        for R, g in groups.items()
        if len(g) and ABOUT[0] <= g["effective_rank"].astype(float).mean() <= ABOUT[1] and by_repeats(R, g, alpha)
    ]
    columns = ["effective_rank", *CONTROLS]
    measured = [g[columns] for g in groups.values() if len(g)]
    changes = control_changes(pd.concat(measured) if measured else pd.DataFrame())
    if changes is None:
        remarks.append("Exact negative controls: none could be computed (the records hold no Gram of the scores).")
    elif max(changes.values()) > rules.CONTROL_TOLERANCE:
        verdict = UNDECIDED
        remarks.append(f"Exact negative controls FAILED, so the records do not fit together: {_in_words(changes)}.")
    else:
        remarks.append(
            f"Exact negative controls passed (largest relative change of the effective rank: {_in_words(changes)}). "
            "Neither the signs of the weights nor one factor a group can touch the spectrum, so it is not the zero sum "
            "of the advantages that sets the effective rank."
        )
    if verdict == HOLDS and for_every_R(verdict, groups) != HOLDS:
        verdict = UNDECIDED
        every = ", ".join(map(str, sorted(TABLE1)))
        remarks.append(f"'For every R' needs R = {every} together; at R = 2 no effective rank exceeds 2.")
    if not kind:
        return not_about(Claim("C8", arm, STATEMENTS["C8"].brief, verdict, findings, tuple(remarks)), NOT_ZERO)
    remarks += other_definitions(groups, alpha)
    return Claim("C8", arm, STATEMENTS["C8"].brief, verdict, findings, tuple(remarks))


def control_changes(groups: pd.DataFrame) -> dict[str, float] | None:
    """Largest relative change of the effective rank under each exact control; None when there is nothing to compare."""
    if not len(groups) or not groups[list(CONTROLS)].notna().any().any():
        return None
    return {_control(name): float(groups[name].max()) for name in CONTROLS}


def _in_words(changes: dict[str, float]) -> str:
    """Changes that are rounding differ between processors: that they are is said, not how large they are."""
    rounding = f"below {rules.ROUNDING:.0e}"
    return ", ".join(f"{name} {rounding if v < rules.ROUNDING else f'{v:.0e}'}" for name, v in changes.items())


def of_the_loss(groups: dict[int, pd.DataFrame]) -> bool:
    """Are all measured groups of an arm of rows of the loss, which have no weight per rollout in front of a score?"""
    measured = [g for g in groups.values() if len(g)]
    return bool(measured) and all(bool((g["rows"] == "loss").all()) for g in measured)


def orthogonal_rows(groups: pd.DataFrame) -> str:
    """What is orthogonal in the null of the groups' matrices, in words: rows of the loss have no weight per rollout."""
    return "orthogonal rows of the loss, of their own norms," if of_the_loss({0: groups}) else "orthogonal scores"


OF_THE_LOSS = (
    "The rows are those of the loss, sum_t c_t grad log pi(a_t | s_t) of a rollout: tokens have factors of their own, "
    "so that no weight per rollout is in front of a score. The null's rows are orthogonal and of these rows' measured "
    "norms; 4k(R-k)/R, which weights of r - mean give, is none of theirs."
)


def _distinct_rank(R: int, groups: pd.DataFrame) -> str:
    """The effective rank where repeated texts play no part, beside its null: a subset, with its own mix of k."""
    different = groups[groups["distinct"] == R]
    if not len(different):
        return f"R = {R}: every group holds some text twice, so its effective rank is partly a count of texts."
    rank = different["effective_rank"].astype(float).mean()
    null = different["null_effective_rank"].astype(float).mean()
    return (
        f"R = {R}: {groups['distinct'].mean():.2f} different texts a group on average; in the {len(different)} groups "
        f"without a repeat the effective rank is {rank:.2f}, {orthogonal_rows(different)} {null:.2f}."
    )


def by_repeats(R: int, groups: pd.DataFrame, alpha: float, rank: str = "effective_rank") -> bool:
    """Do repeated texts alone bring a group's own null, orthogonal scores of the measured or of equal norms, to "about
    2", or to the measured mean as far as it is told from it? `rank`: another of `DEFINITIONS`."""
    if not (groups["distinct"] < R).any():
        return False
    ending = "" if rank == "effective_rank" else f"_{rank}"
    pairs = OWN_NULLS if not ending else OWN_NULLS[:1]
    for plain, merged in ((f"{a}{ending}", f"{b}{ending}") for a, b in pairs):
        if not groups[merged].notna().any() or ABOUT[0] <= groups[plain].astype(float).mean() <= ABOUT[1]:
            continue
        less = mean_over(groups[rank].astype(float) - groups[merged].astype(float), clusters(groups), alpha)
        if ABOUT[0] <= groups[merged].astype(float).mean() <= ABOUT[1] or not less.outside(0.0, 0.0):
            return True
    return False


def _c8_at(R: int, groups: pd.DataFrame, alpha: float) -> Finding:
    if not len(groups):
        return Finding(R, 0, "nothing measured", "", UNDECIDED, UNKNOWN, "about 2")
    few = len(groups) < rules.MIN_GROUPS
    rank = rank_of_few(R, groups, alpha) if few else rank_with_floor(groups, alpha)
    difference = pooled_difference(groups, alpha)
    by = " by Hoeffding's interval" if few else ""
    measured = f"effective rank {with_interval_of(rank)}{by}"
    null = (
        f"{orthogonal_rows(groups)} {groups['null_effective_rank'].mean():.2f}, measured minus null "
        f"{with_interval_of(difference)}"
    )
    if groups["null_distinct"].notna().any():
        null += f"; equal texts counted once {groups['null_distinct'].mean():.2f}"
    null += (
        f"; measured norms {groups['null_measured_norms'].mean():.2f}; these and equal texts once "
        f"{groups['null_both'].mean():.2f}, the most that such rows can have, measured less it "
        f"{with_interval_of(pooled_difference(groups, alpha, null='null_both'), 3)}"
    )
    if groups["null_gaussian"].notna().any():
        null += f"; Gaussian scores with each group's own spectrum {groups['null_gaussian'].mean():.2f}, which {BELOW}"
    verdict = judge(rank, *ABOUT, len(groups))
    if few and rank.outside(*ABOUT):
        verdict = CONTRADICTED
    if verdict == HOLDS and by_repeats(R, groups, alpha):
        verdict = UNDECIDED
    return Finding(R, len(groups), measured, null, verdict, rank, "about 2")


def other_definitions(groups: dict[int, pd.DataFrame], alpha: float) -> list[str]:
    """One sentence per definition: what C8's rule would say, had the paper meant it, and the values by R.

    The numerical rank, which the Grams' own precision makes, has no floor: a coarse K can only lower it, so that it
    does not hold where too many groups are known too coarsely (C7's rule).
    """
    measured = {R: g for R, g in groups.items() if len(g)}
    return [_sentence(name, measured, alpha) for name in DEFINITIONS] if measured else []


def _sentence(name: str, groups: dict[int, pd.DataFrame], alpha: float) -> str:
    verdicts, said = [], []
    for R, g in groups.items():
        has_floor = f"{name}_floor_low" in g
        found = rank_with_floor(g, alpha, name) if has_floor else pooled(g, name, alpha)
        coarse = not has_floor and float((g["resolution"] > rules.RESOLUTION).mean()) > rules.TOLERATED_SHARE
        judged = judge(found, *ABOUT, len(g))
        too_low = coarse and (judged == HOLDS or found.high < ABOUT[0])
        repeats = judged == HOLDS and by_repeats(R, g, alpha, name)
        verdicts.append(UNDECIDED if too_low or repeats else judged)
        null = g[f"null_orthogonal_{name}"].astype(float).mean()
        words = f"R = {R}: {with_interval_of(found)}, {orthogonal_rows(g)} {null:.2f}"
        said.append(words + (", the Grams too coarse" if too_low else ""))
    verdict = for_every_R(all_of(verdicts), groups)
    return f"By {DEFINITIONS[name]}, by the same rule: {verdict} ({'; '.join(said)})."


def controls(arm: str, groups: dict[int, pd.DataFrame]) -> Claim:
    """The controls of one arm; `groups` by R, from `usable_groups`."""
    findings, errors = [], []
    for R, part in groups.items():
        finding, failed = _controls_at(R, part)
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
    found = Claim("Controls", arm, CONTROLS_SAY, verdict, tuple(findings), remarks, "Exact, whatever the data")
    return not_about(found, OF_THE_LOSS) if of_the_loss(groups) and not errors else found


def _controls_at(R: int, groups: pd.DataFrame) -> tuple[Finding, list[str]]:
    if not len(groups):
        return nothing(R), []
    largest = {_control(name): float(groups[name].max()) for name in CONTROLS}
    scores = not all(math.isnan(value) for value in largest.values())
    centred = float(groups["centred_numerical_rank"].max())
    failed = [
        f"{name} changes the effective rank by {value:.1e} of itself"
        for name, value in largest.items()
        if value > rules.CONTROL_TOLERANCE
    ]
    if centred > R - 1:
        failed.append(f"centred rows have rank {centred:g}, above {R - 1}")
    unit = pooled(groups, "unit_effective_rank")
    measured = (
        f"largest change: {_in_words(largest) if scores else 'not known (no Gram of the scores)'}; largest rank "
        f"after centring {centred:g}; rows of unit norm have effective rank "
        f"{with_interval_of(unit)}"
    )
    verdict = CONTRADICTED if failed else HOLDS if scores else UNDECIDED
    return Finding(R, len(groups), measured, f"0, 0, 0; at most {R - 1}", verdict, UNKNOWN), failed


def _control(column: str) -> str:
    """The name of a control without its prefix."""
    return column.removeprefix("control_").replace("_", " ")
