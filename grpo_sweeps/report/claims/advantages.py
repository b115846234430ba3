"""C2, C3 and C4 of arXiv 2606.29238: what the records of the rewards and advantages say, all-equal groups included."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from grpo_sweeps.maths.intervals import share_over
from grpo_sweeps.paper import STATEMENTS, TAILS
from grpo_sweeps.publish.formats import number, three_digits, with_interval_of
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.finding import ERROR, UNKNOWN, Claim, Finding, not_about, nothing
from grpo_sweeps.report.claims.rules import CONTRADICTED, HOLDS, UNDECIDED, all_of
from grpo_sweeps.report.tables.pooled import clusters
from grpo_sweeps.text import count

OTHER_ESTIMATOR = "The claim is about the advantages of the group mean, and this arm's estimator is another one"


def _why_open(records: pd.DataFrame) -> str:
    """Why the groups of an R decide none of C2 to C4, whatever they hold; empty where they do.

    An identity that is broken, or a bound, is so in any number of groups: this keeps from 'holds' alone.
    """
    if len(records) < rules.MIN_GROUPS:
        return f"{count(len(records), 'recorded group')}, fewer than {rules.MIN_GROUPS}"
    if not records["mixed"].astype(bool).any():
        return f"none of {len(records)} groups is mixed: sigma^2 and every advantage of a group mean are 0"
    return ""


def _judged(verdict: str, records: pd.DataFrame) -> str:
    """A verdict of an identity or bound, open where `_why_open` says why and nothing is broken."""
    return UNDECIDED if verdict != CONTRADICTED and _why_open(records) else verdict


def _open(records: dict[int, pd.DataFrame]) -> list[str]:
    """The remarks on the R that decide nothing, one per reason."""
    reasons: dict[str, list[str]] = {}
    for R, groups in records.items():
        if why := _why_open(groups):
            reasons.setdefault(why, []).append(str(R))
    return [f"R = {', '.join(Rs)}: {UNDECIDED} ({why})." for why, Rs in reasons.items()]


def c2(arm: str, kind: str, records: dict[int, pd.DataFrame]) -> Claim:
    """The largest sum of the advantages of a group.

    kind: see `finding.ESTIMATORS`; empty for an estimator of which no zero sum is asserted.
    """
    findings = tuple(_c2_at(R, g, kind) for R, g in records.items())
    broken = [f for f in findings if f.verdict == CONTRADICTED]
    remarks = [f"{ERROR}{arm}, R = {f.R}: advantages that must sum to zero do not ({f.measured})." for f in broken]
    remarks.append(
        "Each sum is relative to its group's largest value. The zero sum is one of advantages: weights of 1/length, "
        "or any that differ in a factor between rollouts, do not keep it."
    )
    remarks += _open(records) if kind else []
    found = Claim("C2", arm, STATEMENTS["C2"].brief, all_of([f.verdict for f in findings]), findings, tuple(remarks))
    return found if kind else not_about(found, f"{OTHER_ESTIMATOR}; its sums are shown.")


def _c2_at(R: int, records: pd.DataFrame, kind: str) -> Finding:
    sums = records["advantage_sum"].dropna().astype(float)
    if not len(sums):
        return nothing(R, "0")
    worst = float(sums.max())
    weights = records["weight_sum"].dropna().astype(float)
    measured = f"largest |sum of advantages| {worst:.1e} in {len(sums)} groups that have any"
    if len(weights):
        measured += f"; |sum of row weights| {weights.mean():.1e} on average, at most {weights.max():.1e}"
    small = worst <= rules.SUM_TOLERANCE
    verdict = _judged(HOLDS if small else CONTRADICTED, records) if kind else UNDECIDED
    return Finding(R, len(sums), measured, "0 to rounding", verdict, UNKNOWN, "0")


FACTORS = {"group mean": "(R-1)/R and -1/R", "leave-one-out": "R/(R-1) and -R/(R-1)^2"}
"""Kinds of advantages whose variance and covariance are factors of sigma^2, in words."""


def _factors(R: int, kind: str) -> tuple[float, float] | None:
    """Var A and Cov(A_i, A_j) over sigma^2, for i.i.d. rollouts of a prompt; None where there is no such factor."""
    if kind == "group mean":
        return (R - 1) / R, -1 / R
    return (R / (R - 1), -R / (R - 1) ** 2) if kind == "leave-one-out" else None


def c3(arm: str, kind: str, records: dict[int, pd.DataFrame]) -> Claim:
    """Variance and covariance of the advantages over the variance of the rewards within groups."""
    findings = tuple(_c3_at(R, g, kind) for R, g in records.items())
    broken = [f for f in findings if f.verdict == CONTRADICTED]
    remarks = [f"{ERROR}{arm}, R = {f.R}: {f.measured}; expected {f.null}." for f in broken]
    if kind in FACTORS:
        remarks.append(
            "An identity here: sigma^2 is the mean over groups of the variance of the rewards within one (ddof 1), so "
            "the ratios are right in every group. It checks the records. A test of its own would need sigma^2 of a "
            "prompt from other rollouts at the same weights, that is prompts drawn repeatedly within a step."
        )
    remarks += _open(records) if kind == "group mean" else []
    verdict = all_of([f.verdict for f in findings])
    found = Claim("C3", arm, STATEMENTS["C3"].brief, verdict, findings, tuple(remarks))
    if kind == "group mean" or broken:
        return found
    own = f", which has {FACTORS[kind]}." if kind in FACTORS else ", which has no such factors of sigma^2."
    return not_about(found, OTHER_ESTIMATOR + own)


def _c3_at(R: int, records: pd.DataFrame, kind: str) -> Finding:
    paper = f"{(R - 1) / R:.3f}, {-1 / R:.3f}"
    variance = float(records["reward_variance"].astype(float).mean()) if len(records) else 0.0
    if not variance > 0:
        return nothing(R, paper)
    square, product = (
        float(records[name].astype(float).mean()) / variance for name in ("advantage_square", "advantage_product")
    )
    expected = _factors(R, kind)
    measured = f"Var A {number(square, 3)}, Cov {number(product, 3)} of sigma^2 = {number(variance, 3)}"
    null, verdict = "no factor for this estimator", UNDECIDED
    if expected is not None:
        near = np.allclose((square, product), expected, rtol=rules.SUM_TOLERANCE, atol=rules.SUM_TOLERANCE)
        null, verdict = f"{expected[0]:.3f}, {expected[1]:.3f}", _judged(HOLDS if near else CONTRADICTED, records)
    return Finding(R, len(records), measured, null, verdict, UNKNOWN, paper)


def c4(arm: str, kind: str, records: dict[int, pd.DataFrame]) -> Claim:
    """The shares of advantages above each eps beside the bound, and the share of mixed groups."""
    findings = tuple(_c4_at(R, g, kind) for R, g in records.items())
    if kind != "group mean":
        found = Claim("C4", arm, STATEMENTS["C4"].brief, UNDECIDED, findings, ())
        return not_about(found, f"{OTHER_ESTIMATOR}: its shares stand beside the group mean's bound.")
    remarks = (
        "Chebyshev's inequality, which holds within every group for the variance of its own rewards: the records "
        "cannot break it. A bound says nothing that is not below what is possible: 1, and for rewards of 0 and 1 the "
        "largest chance of a mixed group, at p = 1/2.",
        "For rewards of 0 and 1 and eps < 1/R the exact chance is that of a mixed group, 1 - p^R - q^R, which rises "
        "with R. Whether the share of mixed groups follows it "
        f"{rules.UNDECIDED.removesuffix(' from these runs')} from these runs: p of a prompt at the same weights is "
        "needed, that is prompts drawn repeatedly within a step.",
        *_open(records),
    )
    return Claim("C4", arm, STATEMENTS["C4"].brief, all_of([f.verdict for f in findings]), findings, remarks)


def _c4_at(R: int, records: pd.DataFrame, kind: str) -> Finding:
    if not len(records):
        return nothing(R)
    variance = float(records["reward_variance"].astype(float).mean())
    shares = [float(records[f"advantage_above_{eps}"].astype(float).mean()) for eps in TAILS]
    bounds = [(R - 1) * variance / (R * eps**2) for eps in TAILS]
    mixed = share_over(records["mixed"].astype(bool), clusters(records))
    measured = "; ".join(f"|A| > {eps:g}: {share:.3f}" for eps, share in zip(TAILS, shares, strict=True))
    measured += f"; mixed groups {with_interval_of(mixed, 3)}"
    binary = bool(records["binary"].astype(bool).all())
    possible = 1 - 2 * math.pow(0.5, R) if binary else 1.0
    empty = sum(bound >= possible for bound in bounds)
    paper = "at most " + ", ".join(three_digits(bound) for bound in bounds)
    paper += f" ({empty} of {len(bounds)} say nothing)"
    within = all(share <= bound + rules.SUM_TOLERANCE for share, bound in zip(shares, bounds, strict=True))
    verdict = _judged((rules.SAYS_NOTHING if empty == len(bounds) else HOLDS) if within else CONTRADICTED, records)
    if kind != "group mean":
        null = "no bound for this estimator"
    else:
        null = f"0 unless mixed; mixed at most {possible:.3f} at any p" if binary else "no share above 1"
    return Finding(R, len(records), measured, null, verdict, mixed, paper)
