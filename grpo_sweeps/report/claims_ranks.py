"""C8 by the other definitions of rank: the paper's number is the effective rank, and the rule is for that alone."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from grpo_sweeps.maths.intervals import Interval
from grpo_sweeps.publish.formats import with_interval
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.tables.pooled import pooled

DEFINITIONS = {
    "participation_ratio": "participation ratio",
    "stable_rank": "stable rank",
    "entropy_rank": "entropy rank",
    "numerical_rank": "numerical rank",
}


Rank = Callable[[pd.DataFrame, float, str], Interval]


def other_definitions(groups: dict[int, pd.DataFrame], alpha: float, with_floor: Rank) -> list[str]:
    """One sentence a definition: what C8's rule would say, had the paper meant it, and the values by R.

    with_floor: the interval of a mean, widened by what the Grams' own precision allows. The numerical rank, which that
    precision makes, has none: a coarse K can only lower it, so that it does not hold where too many groups are known
    too coarsely (C7's rule).
    """
    measured = {R: g for R, g in groups.items() if len(g)}
    return [_sentence(name, measured, alpha, with_floor) for name in DEFINITIONS] if measured else []


def _sentence(name: str, groups: dict[int, pd.DataFrame], alpha: float, with_floor: Rank) -> str:
    verdicts, said = [], []
    for R, g in groups.items():
        has_floor = f"{name}_floor_low" in g
        found = with_floor(g, alpha, name) if has_floor else pooled(g, name, alpha)
        coarse = not has_floor and float((g["resolution"] > rules.RESOLUTION).mean()) > rules.TOLERATED_SHARE
        low, high = rules.ABOUT_TWO - rules.MARGIN, rules.ABOUT_TWO + rules.MARGIN
        judged = rules.judge(found, low, high, len(g))
        too_low = coarse and (judged == rules.HOLDS or found.high < low)
        verdicts.append(rules.UNDECIDED if too_low else judged)
        null = g[f"null_orthogonal_{name}"].astype(float).mean()
        words = f"R = {R}: {with_interval(found.mean, found.low, found.high)}, orthogonal scores {null:.2f}"
        said.append(words + (", the Grams too coarse" if too_low else ""))
    verdict = rules.all_of(verdicts)
    if verdict == rules.HOLDS and max(groups) < 4:
        verdict = rules.UNDECIDED
    return f"By {DEFINITIONS[name]}, by the same rule: {verdict} ({'; '.join(said)})."
