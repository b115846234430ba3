"""C9 of arXiv 2606.29238: inner products of a group's scores, the score-mean null, and the number of directions."""

from __future__ import annotations

import math

import pandas as pd

from grpo_sweeps.maths.intervals import Interval, mean_over
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.finding import ERROR, UNKNOWN, Claim, Finding, nothing, of
from grpo_sweeps.report.claims.rules import UNDECIDED, UNDEFINED
from grpo_sweeps.report.tables.pooled import clusters, pooled

SAYS = "The scores of a group cluster in few directions."


def directions(groups: pd.DataFrame) -> Interval:
    """(tr F)^2 / tr F^2 from means over groups of K_ii and of K_ij^2, its interval by the delta method, clustered."""
    own, square = groups["pair_norm"].astype(float), groups["pair_square"].astype(float)
    if not len(groups) or not square.mean() > 0:
        return UNKNOWN
    found = float(own.mean() ** 2 / square.mean())
    around = mean_over(found * (2.0 * (own / own.mean() - 1.0) - (square / square.mean() - 1.0)), clusters(groups))
    return Interval(found, found + around.low, found + around.high, around.n, around.clusters)


def score_mean(groups: pd.DataFrame, alpha: float) -> Interval:
    """Mean of `pair_null`, widened by what the precision of the Grams allows: zero where sampler and trainer agree."""
    mean = pooled(groups, "pair_null", alpha)
    error = float(groups.loc[groups["pair_null"].notna(), "pair_error"].astype(float).mean())
    return Interval(mean.mean, mean.low - error, mean.high + error, mean.n, mean.clusters)


def c9(arm: str, groups: dict[int, pd.DataFrame], alpha: float) -> Claim:
    findings, errors = [], []
    for R, part in groups.items():
        finding, failed = _c9_at(R, part, alpha)
        findings.append(finding)
        errors += [f"{ERROR}{arm}, {failed}"] if failed else []
    remarks = (
        *errors,
        "The paper does not say what a cluster is or how few is few. What tells is E<psi_i, psi_j>^2 = tr F^2, so "
        "(tr F)^2 / tr F^2 directions; a mean product of zero does not exclude clusters (psi = +u or -u).",
        "Products and directions are over mixed groups, whose mean product is not zero; the score-mean null gives the "
        "mixed pairs of k = 1 and k = R - 1 half their weight, which makes up for the all-equal groups that have no "
        "Gram. It is zero when rollouts are independent draws of the policy that is differentiated, so it checks that "
        "sampler and trainer agree; R = 2 has no such combination.",
        "Expected of one prompt, with S = ||grad J||^2: S/p^2 for two right rollouts, S/q^2 for two wrong ones, "
        "-S/(pq) for one of each. Pooled over prompts the ratio of squares is one of averages.",
    )
    verdict = UNDEFINED if any(f.verdict == UNDEFINED for f in findings) else UNDECIDED
    return Claim("C9", arm, SAYS, verdict, tuple(findings), remarks)


def _c9_at(R: int, groups: pd.DataFrame, alpha: float) -> tuple[Finding, str]:
    """The finding, and what an interval that excludes zero says of the sampler."""
    part = groups[groups["pair_norm"].notna()] if len(groups) else groups
    if not len(part):
        return nothing(R), ""
    products = ", ".join(
        f"{words} {of(pooled(part, f'pair_{name}'))}" if part[f"pair_{name}"].notna().any() else f"{words} –"
        for name, words in (("all", "all pairs"), ("right", "two right"), ("wrong", "two wrong"), ("between", "mixed"))
    )
    null = score_mean(part, alpha)
    measured = (
        f"mean product: {products}; mean squared norm {of(pooled(part, 'pair_norm'))}; directions "
        f"{of(directions(part))}"
    )
    off = null.outside(0.0, 0.0) and null.n >= rules.MIN_GROUPS
    words = "score-mean null: not to be had" if math.isnan(null.mean) else f"score-mean null 0: found {of(null)}"
    failed = (
        f"R = {R}: the score-mean null is {of(null)}, not zero: the rollouts are not draws of the policy that is "
        "differentiated (temperature, top-p, precision of the sampler, stale weights), or groups were chosen."
    )
    return Finding(R, len(part), measured, words, UNDEFINED, null, "few"), failed if off else ""
