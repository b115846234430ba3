"""What changes from the first to the last third of training: question 3 of arXiv 2606.29238.

Open question 3: does the effective rank fall as sigma_r falls? Over training the numbers k of right rollouts move
towards 0 and R, and with them the null 4k(R-k)/R: a rank that falls may say nothing about the scores. Between the first
and the last third of the steps the mean rank over mixed groups changes by two parts that add up exactly (the
decomposition of rates of Kitagawa 1955):

    composition   sum_k (w1_k - w0_k) (m0_k + m1_k) / 2    the shares w of the numbers k
    geometry      sum_k (m1_k - m0_k) (w0_k + w1_k) / 2    the mean ranks m at fixed k

over the k that both thirds have. Intervals: 95%, by a bootstrap over prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from grpo_sweeps.maths.intervals import Interval
from grpo_sweeps.paper import OPEN_QUESTION_3
from grpo_sweeps.publish.formats import with_interval_of
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.finding import Claim, Finding, nothing

LEAD = "The paper asks"
DRAWS = 400
MIN_PROMPTS = 10  # that a bootstrap over them means something


@dataclass(frozen=True)
class Change:
    """Last third less first: of the mean effective rank over the matched k, and of its two parts."""

    total: float
    composition: float
    geometry: float
    matched: float  # share of the two thirds' groups whose k both have


def third_of(groups: pd.DataFrame) -> pd.Series:
    """0, 1 or 2 for each group: which third of the steps that were measured it lies in."""
    low, high = int(groups["step"].min()), int(groups["step"].max()) + 1
    return ((groups["step"] - low) * 3 // max(1, high - low)).astype(int)


def steps_of_ends(groups: pd.DataFrame) -> tuple[int, int]:
    """How many measured steps lie in the first and in the last third."""
    steps = groups["step"].groupby(third_of(groups)).nunique()
    return int(steps.get(0, 0)), int(steps.get(2, 0))


def tables(groups: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """groups with `third`, `k`, `prompt_id`, `effective_rank` -> how many there are and the sum of their ranks, each
    (prompts, 2, numbers of k): first and last third."""
    ends = groups[groups["third"] != 1]
    prompt, prompts = pd.factorize(groups["prompt_id"], sort=True)
    k, ks = pd.factorize(ends["k"], sort=True)
    where = (prompt[(groups["third"] != 1).to_numpy()], (ends["third"] == 2).to_numpy(np.intp), k)
    counts, sums = np.zeros((2, len(prompts), 2, len(ks)))
    np.add.at(counts, where, 1.0)
    np.add.at(sums, where, ends["effective_rank"].to_numpy(float))
    return counts, sums


def change(counts_2K: np.ndarray, sums_2K: np.ndarray) -> Change | None:
    """The change over all prompts together; None where no k is in both thirds."""
    both = (counts_2K > 0).all(axis=0)
    if not both.any():
        return None
    n, total = counts_2K[:, both], sums_2K[:, both]
    (w0, w1), (m0, m1) = n / n.sum(axis=1, keepdims=True), total / n
    composition = float(((w1 - w0) * (m0 + m1)).sum() / 2)
    geometry = float(((m1 - m0) * (w0 + w1)).sum() / 2)
    return Change(float(w1 @ m1 - w0 @ m0), composition, geometry, float(n.sum() / counts_2K.sum()))


def intervals(counts: np.ndarray, sums: np.ndarray, seed: int = 0) -> dict[str, Interval]:
    """Each part's value with its interval, prompts drawn with replacement."""
    middle = change(counts.sum(axis=0), sums.sum(axis=0))
    assert middle is not None
    rng, P = np.random.default_rng(seed), len(counts)
    drawn = []
    for _ in range(DRAWS):
        times_P = np.bincount(rng.integers(P, size=P), minlength=P).astype(float)
        found = change(np.tensordot(times_P, counts, 1), np.tensordot(times_P, sums, 1))
        if found is not None:
            drawn.append((found.total, found.composition, found.geometry))
    low, high = np.quantile(np.array(drawn), [0.025, 0.975], axis=0)
    values = {"total": middle.total, "composition": middle.composition, "geometry": middle.geometry}
    return {
        name: Interval(value, float(low[i]), float(high[i]), int(counts.sum()), (P,))
        for i, (name, value) in enumerate(values.items())
    }


def parts_of_change(groups: pd.DataFrame) -> tuple[Change, dict[str, Interval]] | None:
    """`change` and `intervals` of groups of known k; None with too few prompts or measured steps in an end's third, or
    where no k is in both thirds."""
    if groups["prompt_id"].nunique() < MIN_PROMPTS or min(steps_of_ends(groups)) < rules.MIN_THIRD_STEPS:
        return None
    counts, sums = tables(groups.assign(third=third_of(groups)))
    found = change(counts.sum(axis=0), sums.sum(axis=0))
    return None if found is None else (found, intervals(counts, sums))


def q3(arm: str, groups: dict[int, pd.DataFrame]) -> Claim:
    """groups: the usable ones of each R. Shown, never judged: a question has no verdict, and the parts answer it."""
    findings = tuple(_q3_at(R, g) for R, g in groups.items())
    remarks = (
        "The change of the mean effective rank from the first to the last third of the steps, over the numbers k of "
        "right rollouts that both have: composition is the change of the shares of k, geometry that of the rank at "
        "fixed k.",
        "sigma_r falls where k moves towards 0 or R. A rank that falls by composition alone says nothing about the "
        "scores.",
    )
    return Claim("Q3", arm, OPEN_QUESTION_3, rules.ASKED, findings, remarks, LEAD)


def _q3_at(R: int, groups: pd.DataFrame) -> Finding:
    known = groups[groups["k"].notna()]
    moved = parts_of_change(known)
    if moved is None:
        return nothing(R)
    found, parts = moved
    spread, thirds = np.sqrt(known["k"] * (R - known["k"])) / R, third_of(known)
    sigma = [float(spread[thirds == third].mean()) for third in (0, 2)]
    words = ", ".join(f"{name} {with_interval_of(i, 3)}" for name, i in parts.items())
    first, last = steps_of_ends(known)
    measured = (
        f"rank {words}; sigma_r of mixed groups {sigma[0]:.3f} to {sigma[1]:.3f}; {found.matched:.0%} of groups "
        f"matched; {first} and {last} measured steps in the two thirds"
    )
    return Finding(R, len(known), measured, "no change 0", rules.ASKED, parts["geometry"])
