"""C16 and C19 of arXiv 2606.29238: arms that differ in the objective, compared on the same groups.

    C16   credit by token would raise the rank
    C19   clipping and a KL term do not affect the structure

Runs are paired that agree in all but objective and estimator (C19: objective alone), R and seed included. What can be
compared are groups of one policy: those of the first step, before any arm has been updated, and of every step where the
policy is fixed (trainer.lr = 0). There both arms have the same prompts and, drawn from the same seeds, the same
rollouts. Later steps are of different policies: they stand beside and decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from grpo_sweeps.config.choices import objective_of
from grpo_sweeps.maths.intervals import Interval, mean_interval
from grpo_sweeps.paper import STATEMENTS
from grpo_sweeps.publish.formats import with_interval_of
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.finding import ESTIMATORS, UNKNOWN, Claim, Finding, nothing
from grpo_sweeps.report.claims.rules import CONTRADICTED, HOLDS, UNDECIDED, all_of
from grpo_sweeps.report.measure.spectral import range_of_difference
from grpo_sweeps.report.read.arms import flatten, makes_no_arm
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.text import natural

KEYS = ["seed", "step", "group", "prompt_id"]  # of a group within the runs of one R that are compared
COLUMNS = ("effective_rank", "null_both")


@dataclass(frozen=True)
class Pair:
    """Two arms to compare: the first is the reference. runs: by R, (reference, other) of each seed that both have."""

    reference: str
    other: str
    runs: Mapping[int, list[tuple[str, str]]]

    @property
    def name(self) -> str:
        return f"{self.other} against {self.reference}"


def by_token(config: Mapping[str, Any]) -> bool:
    return objective_of(config).by_token


def plain(config: Mapping[str, Any]) -> bool:
    """One update on the scores, by advantages that sum to zero in a group."""
    objective = objective_of(config)
    return objective.on_policy and not objective.kl_beta and zero_sum(config)


def unclipped(config: Mapping[str, Any]) -> bool:
    """Any number of updates on the plain loss, by advantages that sum to zero in a group."""
    objective = objective_of(config)
    away = objective.ratio != "none" or objective.kl_beta or objective.critic or objective.continuations
    return not away and zero_sum(config)


def zero_sum(config: Mapping[str, Any]) -> bool:
    estimator = config.get("estimator")
    target = str(estimator.get("_target_") if isinstance(estimator, Mapping) else "").rpartition(".")[2]
    return bool(ESTIMATORS.get(target))


def clipped_or_kl(config: Mapping[str, Any]) -> bool:
    """Clipping or KL in the loss or the reward, with one advantage per rollout."""
    objective = objective_of(config)
    away = objective.ratio != "none" or objective.kl_beta > 0
    return bool(away and not objective.critic and not objective.continuations)


def of_the_value(config: Mapping[str, Any]) -> bool:
    """One plain update with one advantage per rollout, whose baseline is the prompt's value: the oracle's."""
    objective = objective_of(config)
    return objective.choice == "oracle" and objective.ratio == "none" and not objective.kl_beta


def token_pairs(sweep: Sweep) -> list[Pair]:
    """C16: arms with credit by token against a plain arm of a group baseline, and against one of the oracle's."""
    free = ("objective.", "estimator.")
    return [pair for reference in (plain, of_the_value) for pair in _pairs(sweep, by_token, reference, free)]


def uniform_pairs(sweep: Sweep) -> list[Pair]:
    """Beside C16: other arms with one advantage per rollout against the same plain arm."""
    return _pairs(sweep, lambda c: not by_token(c) and not clipped_or_kl(c), plain, ("objective.", "estimator."))


def clipping_pairs(sweep: Sweep) -> list[Pair]:
    """C19: arms with clipping or KL against one without either, of the same estimator and where there is one of as many
    minibatches: its policy is then the same when it comes to the second."""
    return _pairs(sweep, clipped_or_kl, unclipped, ("objective.",))


def extra_cells(sweep: Sweep) -> int:
    """How many cells' worth of tests C16 and C19 add."""
    tests = sum(len(pair.runs) for pair in (*token_pairs(sweep), *clipping_pairs(sweep)))
    return math.ceil(tests / rules.TESTS_PER_CELL)


Kind = Callable[[Mapping[str, Any]], bool]


def _pairs(sweep: Sweep, is_other: Kind, is_reference: Kind, free: tuple[str, ...]) -> list[Pair]:
    """Each arm whose runs are `is_other` with an arm that `is_reference` and whose runs agree in all but the `free`
    keys: the first one, of as many minibatches where there is one."""
    settings = {run: _settings(config, free) for run, config in sweep.configs.items()}
    columns = (sweep.runs[name].tolist() for name in ("run", "arm", "R", "seed"))
    rows = {str(run): (str(arm), int(R), int(seed)) for run, arm, R, seed in zip(*columns, strict=True)}
    references = {run for run in rows if is_reference(sweep.configs[run])}
    cuts = {run: objective_of(config).minibatches for run, config in sweep.configs.items()}
    found: dict[tuple[str, str], dict[int, list[tuple[str, str]]]] = {}
    for run, (arm, R, seed) in rows.items():
        if not is_other(sweep.configs[run]):
            continue
        alike = sorted(
            (cuts[one] != cuts[run], cuts[one], rows[one][0], one)
            for one in references
            if rows[one][1:] == (R, seed) and settings[one] == settings[run] and rows[one][0] != arm
        )
        for *_, reference, one in alike[:1]:
            found.setdefault((reference, arm), {}).setdefault(R, []).append((one, run))
    return [Pair(*arms, dict(sorted(runs.items()))) for arms, runs in sorted(found.items(), key=_by_arms)]


def _by_arms(item: tuple[tuple[str, str], Any]) -> list[list[str | float]]:
    return [natural(arm) for arm in item[0]]


def _settings(config: Mapping[str, Any], free: tuple[str, ...]) -> dict[str, str]:
    flat = {"budget": "prompts", **flatten(config)}
    return {k: v for k, v in flat.items() if not makes_no_arm(k) and not k.startswith(free) and k != "budget_R"}


def same_groups(sweep: Sweep, runs: list[tuple[str, str]]) -> pd.DataFrame:
    """One row per mixed group that both runs of a pair measured: KEYS, `effective_rank` and `null_both` of the
    reference, the same with `_other`, `first` (one policy: the first step, or every step of a fixed policy) and `moved`
    (the other arm had updated within its step before it came to this group)."""
    parts = []
    for reference, other in runs:
        left, right = (_usable(sweep, run) for run in (reference, other))
        both = left.merge(right, on=KEYS, suffixes=("", "_other"))
        fixed = all(_rate(sweep.configs[run]) == 0 for run in (reference, other))
        cuts = objective_of(sweep.configs[other]).minibatches
        prompts = sweep.runs.loc[sweep.runs["run"] == other, "prompts"].iloc[0]
        first_cut = int(prompts) // cuts if pd.notna(prompts) else 0
        both["first"] = fixed | (both["step"] == 0)
        both["moved"] = (cuts > 1) & (both["group"] >= first_cut) & (not fixed)
        parts.append(both)
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*KEYS, "first", "moved"])


def _usable(sweep: Sweep, run: str) -> pd.DataFrame:
    g = sweep.groups
    return g.loc[(g["run"] == run) & g["mixed"].astype(bool) & g["effective_rank"].notna(), [*KEYS, *COLUMNS]]


def _rate(config: Mapping[str, Any]) -> float:
    trainer = config.get("trainer")
    return float((trainer.get("lr") or 0) if isinstance(trainer, Mapping) else math.nan)


def change(groups: pd.DataFrame, R: int, alpha: float, beyond: bool = False) -> Interval:
    """Mean change of the effective rank from the reference to the other arm, clustered by prompt and seed; with
    `beyond` that of the effective rank less the null of the rows' own norms with equal texts made one."""
    if not len(groups):
        return UNKNOWN
    moved = groups["effective_rank_other"].astype(float) - groups["effective_rank"].astype(float)
    if beyond:
        moved = moved - groups["null_both_other"].astype(float) + groups["null_both"].astype(float)
    found = mean_interval(moved, pd.factorize(groups["prompt_id"])[0], groups["seed"], alpha=alpha)
    low, high = range_of_difference("effective_rank", R)
    return found.within((2 * low, 2 * high) if beyond else (low, high))


def _ranks(groups: pd.DataFrame) -> str:
    values = [groups[f"effective_rank{end}"].astype(float).mean() for end in ("", "_other")]
    return f"effective rank {values[1]:.2f}, where the other arm has {values[0]:.2f}"


def c16(sweep: Sweep, pair: Pair, alpha: float) -> Claim:
    """The change of the rank from the plain arm to the one with credit by token, in the same groups."""
    findings = tuple(_c16_at(sweep, R, runs, alpha) for R, runs in pair.runs.items())
    of_value = all(of_the_value(sweep.configs[one]) for runs in pair.runs.values() for one, _ in runs)
    remarks = [
        "The rule: the effective rank, and what it has beyond orthogonal rows of the same norms with equal texts made "
        f"one, both rise; a rise by less than {rules.RISE:g} is none. Norms alone can raise a rank, which is no "
        "structure.",
        "Both arms have an estimate of the value for the baseline, and one of them at each token: what differs is the "
        "credit, and how good the estimate is (a critic's may be far off)."
        if of_value
        else "Two things differ between the arms, the baseline and the credit by token: against the arm of "
        "objective=oracle, whose baseline is the prompt's value, the credit alone differs.",
        "Compared are the same groups at one policy: the first step's, and every step's where trainer.lr = 0.",
    ]
    for other in uniform_pairs(sweep):
        if other.reference == pair.reference:
            said = [
                f"R = {R} {with_interval_of(change(groups[groups['first'].astype(bool)], R, alpha))}"
                for R, groups in ((R, same_groups(sweep, runs)) for R, runs in other.runs.items())
            ]
            remarks.append(
                f"Beside it, with one advantage per rollout and not judged: {other.name}, change of the effective rank "
                f"{', '.join(said)}."
            )
    verdict = all_of([f.verdict for f in findings])
    return Claim("C16", pair.name, STATEMENTS["C16"].brief, verdict, findings, tuple(remarks))


def _c16_at(sweep: Sweep, R: int, runs: list[tuple[str, str]], alpha: float) -> Finding:
    every = same_groups(sweep, runs)
    here, later = every[every["first"].astype(bool) & ~every["moved"].astype(bool)], every[~every["first"].astype(bool)]
    if not len(here):
        return nothing(R, "a higher rank")
    rise, structure = (change(here, R, alpha / 2, beyond) for beyond in (False, True))
    beyond = f"beyond orthogonal rows of these norms, equal texts once, {with_interval_of(structure)}"
    measured = f"{_ranks(here)}, change {with_interval_of(rise)}; {beyond}"
    if len(later):
        measured += f"; later steps, of other policies, {with_interval_of(change(later, R, alpha / 2))}"
    least = min(rise, structure, key=lambda one: one.high)
    return Finding(R, len(here), measured, "no change 0", raised(rise, structure), least, "a higher rank")


def raised(rise: Interval, structure: Interval) -> str:
    """The verdict of C16 from both changes."""
    if min(rise.n, structure.n) < rules.MIN_GROUPS or not (rise.known and structure.known):
        return UNDECIDED
    if rise.low > 0 and structure.low > 0:
        return HOLDS
    return CONTRADICTED if min(rise.high, structure.high) < rules.RISE else UNDECIDED


def c19(sweep: Sweep, pair: Pair, alpha: float) -> Claim:
    """The change of the rank from the plain arm to the one with clipping or KL, in groups of the first step that were
    differentiated after an update."""
    findings = tuple(_c19_at(sweep, R, runs, alpha) for R, runs in pair.runs.items())
    remarks = (
        f"The rule: the change of the effective rank lies within {rules.SAME:g} of 0, in the first step's groups that "
        "the arm differentiated after an update (objective.minibatches above 1): their rollouts are those of the other "
        "arm, and the ratio is no longer 1. An arm of as many minibatches has the same policy there, up to what "
        "clipping itself has changed.",
        "Groups of the first update decide nothing: the ratio is 1 and the reference is the policy, so the rows are "
        "the same whatever is clipped. Later steps are of different policies.",
    )
    verdict = all_of([f.verdict for f in findings])
    return Claim("C19", pair.name, STATEMENTS["C19"].brief, verdict, findings, remarks)


def _acted(sweep: Sweep, run: str) -> bool:
    """Was a token clipped in the run's first step, or is there a KL?"""
    m = sweep.metrics[(sweep.metrics["run"] == run) & (sweep.metrics["step"] == 0)]
    clipped = m.get("clip_ratio/region_mean", pd.Series(dtype=float)).astype(float)
    return bool(objective_of(sweep.configs[run]).kl_beta > 0 or (clipped > 0).any())


def _c19_at(sweep: Sweep, R: int, runs: list[tuple[str, str]], alpha: float) -> Finding:
    every = same_groups(sweep, runs)
    first, moved = every["first"].astype(bool), every["moved"].astype(bool)
    here, judged, later = every[first & ~moved], every[first & moved], every[~first]
    if not len(every):
        return nothing(R, "no change")
    words = [
        f"{name} ({len(part)} groups): {_ranks(part)}, change {with_interval_of(change(part, R, alpha))}"
        for name, part in (("first update", here), ("after an update", judged), ("later steps", later))
        if len(part)
    ]
    found = change(judged, R, alpha)
    verdict = rules.judge(found, -rules.SAME, rules.SAME, len(judged))
    verdict = rules.WITHIN if verdict == HOLDS else verdict
    if not any(_acted(sweep, other) for _, other in runs):
        words.append("nothing was clipped in the first step and there is no KL")
        verdict = UNDECIDED
    return Finding(R, len(judged), "; ".join(words), "no change 0", verdict, found, "no change")
