"""The numbers of the report: Table 1, every rank of every matrix, the values by k, and the accuracies.

A pooled value is the mean, over the measured mixed groups of an arm and R, of the per-group value; all-equal groups
have no gradient and are counted, never averaged as 0. Intervals are 95%, clustered by prompt and by seed
(`maths.intervals`), and cut to what the quantity can take.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pandas as pd

from grpo_sweeps.config.choices import function_name
from grpo_sweeps.maths.intervals import SHARE, Clusters, Interval, mean_interval, mean_over, paired_difference
from grpo_sweeps.paper import TABLE1
from grpo_sweeps.publish.formats import number, with_interval
from grpo_sweeps.report.measure.spectral import (
    MATRICES,
    OTHER_NULLS,
    OTHERS,
    QUANTITIES,
    WITH_FLOOR,
    range_of,
    range_of_difference,
)
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.rewards.verdicts import is_own
from grpo_sweeps.spectra import null_effective_rank

FLEXIBLE_REWARD = "grpo_sweeps.rewards.exact_match.flexible"
CHANGE = (-1.0, 1.0)
"""The range of the change of a share."""
NULLS = (
    "null_effective_rank", "null_distinct", "null_closed_form", "null_measured_norms", "null_gaussian", "null_both",
)  # fmt: skip


SHOWN_NULLS = ("null_effective_rank", "null_distinct", "null_both")
"""Beside a measured effective rank everywhere: orthogonal scores of equal norm, the same with equal texts once, and the
strongest, the measured norms with equal texts once."""


def usable_groups(sweep: Sweep, arm: str, R: int) -> pd.DataFrame:
    """The measured mixed groups of an arm and R whose gradient is not zero."""
    g = sweep.groups
    if not len(g):
        return g
    return g[(g["arm"] == arm) & (g["R"] == R) & g["mixed"].astype(bool) & g["effective_rank"].notna()]


def records_of(sweep: Sweep, arm: str, R: int) -> pd.DataFrame:
    """Every group of an arm and R, measured or not."""
    return sweep.groups[(sweep.groups["arm"] == arm) & (sweep.groups["R"] == R)]


def clusters(groups: pd.DataFrame) -> Clusters:
    """Prompt and seed of each group, numbered once for the intervals of several columns."""
    return Clusters(pd.factorize(groups["prompt_id"], sort=True)[0], groups["seed"])


def pooled(groups: pd.DataFrame, column: str, alpha: float = 0.05, by: Clusters | None = None) -> Interval:
    """Mean of a column over groups of one R, with its interval clustered by prompt and seed, cut to what the column can
    take. `by`: `clusters(groups)`."""
    found = mean_over(groups[column], by or clusters(groups), alpha)
    return found.within(range_of(column, int(groups["R"].iloc[0]))) if len(groups) else found


def with_ends(name: str, interval: Interval) -> dict[str, float]:
    """The columns of an interval: its mean and its two ends."""
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


def table1(sweep: Sweep) -> pd.DataFrame:
    """One row per arm and R: counts, six quantities of G with intervals, nulls, accuracies, the paper's values; and
    held-out rewards, where records have them."""
    rows = []
    for arm, R in sweep.cells:
        runs = sweep.runs[(sweep.runs["arm"] == arm) & (sweep.runs["R"] == R)]
        everything = records_of(sweep, arm, R)
        groups = usable_groups(sweep, arm, R)
        by = clusters(groups)
        row: dict[str, object] = {
            "arm": arm, "R": R, "runs": len(runs), "runs_finished": int((runs["state"] == "finished").sum()),
            "seeds": runs["seed"].nunique(), "groups": len(everything),
            "mixed_groups": int(everything["mixed"].astype(bool).sum()), "measured_mixed_groups": len(groups),
            "prompts": groups["prompt_id"].nunique(), "distinct_rollouts": groups["distinct"].astype(float).mean(),
        }  # fmt: skip
        for name in QUANTITIES:
            row |= with_ends(name, pooled(groups, name, by=by))
        for name in WITH_FLOOR:
            row |= {f"{name}_floor_{end}": groups[f"{name}_floor_{end}"].mean() for end in ("low", "high")}
        row |= {name: groups[name].astype(float).mean() for name in NULLS}
        row |= with_ends("measured_minus_null", pooled_difference(groups, by=by))
        row |= with_ends("measured_minus_null_both", pooled_difference(groups, by=by, null="null_both"))
        row |= accuracies(sweep, arm, R) | heldout_rewards(sweep, arm, R)
        paper = TABLE1.get(R)
        row["paper_effective_rank"] = f"about {paper.effective_rank:g}" if paper else ""
        row["paper_top1_fraction"] = f"{paper.top1_low:g}-{paper.top1_high:g}" if paper else ""
        rows.append(row)
    return pd.DataFrame(rows)


def headline(table: pd.DataFrame, unjudged: Collection[str] = ()) -> tuple[list[str], list[list[str]]]:
    """Table 1 as people read it: header and text cells, one row per arm and R; several arms are named.

    unjudged: the arms whose tasks have no verdicts (`unjudged_arms`). They have a held-out reward and no accuracy, and
    a column of either stands where an arm has it.
    """
    arms = table["arm"].nunique() > 1
    shown = {} if set(table["arm"]) <= set(unjudged) else {"accuracy": "accuracy before"}
    if set(table["arm"]) & set(unjudged):
        shown["heldout_reward"] = "held-out reward before"
    header = [
        "R", "effective rank", "paper", "orthogonal null", "null, equal texts once", "null, norms and texts",
        "different texts", "top-1 fraction", "paper",
        *(name for before in shown.values() for name in (before, "after", "gain, paired")), "mixed groups",
    ]  # fmt: skip
    rows = []
    for row in table.to_dict("records"):
        evaluated = [
            cell
            for name in shown
            for cell in (
                number(row.get(f"{name}_before"), 3), number(row.get(name), 3), _in_words(row, f"{name}_gain", 3)
            )
        ]  # fmt: skip
        cells = [
            number(row["R"]), _in_words(row, "effective_rank"), row["paper_effective_rank"] or "–",
            *(number(row[null]) for null in SHOWN_NULLS), number(row["distinct_rollouts"]),
            _in_words(row, "top1_fraction"), row["paper_top1_fraction"] or "–", *evaluated,
            f"{row['measured_mixed_groups']} of {row['groups']}",
        ]  # fmt: skip
        rows.append([str(row["arm"]), *cells] if arms else cells)
    return (["arm", *header] if arms else header), rows


def _in_words(row: Mapping[Any, Any], name: str, digits: int = 2) -> str:
    mean, low, high = (float(str(row.get(key, "nan"))) for key in (name, f"{name}_low", f"{name}_high"))
    return with_interval(mean, low, high, digits)


def pooled_difference(
    groups: pd.DataFrame, alpha: float = 0.05, by: Clusters | None = None, null: str = "null_effective_rank"
) -> Interval:
    """Mean over groups of effective rank minus a null of its own: that for the recorded weights (orthogonal scores of
    equal norm; for rows of the loss orthogonal rows with their own norms), or the null that is named.

    Of "null_both" the difference is never above 0: eigenvalues majorise the diagonal (Schur), so that no rows of these
    norms have a larger effective rank than orthogonal ones.
    """
    found = mean_over(groups["effective_rank"] - groups[null].astype(float), by or clusters(groups), alpha)
    if not len(groups):
        return found
    low, high = range_of_difference("effective_rank", int(groups["R"].iloc[0]))
    return found.within((low, 0.0 if null == "null_both" else high))


def accuracies(sweep: Sweep, arm: str, R: int) -> dict[str, object]:
    """Held-out accuracy at each run's last evaluation and its paired gain over the first, with intervals.

    Sampled as in training and greedy, by the parsing of `scored_evals`; the problems before and after are the same,
    so the gain is the mean of per-problem differences, clustered by problem and seed. Empty values where a sweep was
    not evaluated.
    """
    ends = first_and_last(sweep, arm, R)
    row: dict[str, object] = {"evaluated_problems": ends["problem_id"].nunique(), "eval_samples": ends["samples"].max()}
    row["final_step"] = ends["last_step"].max()
    for name, kind in (("accuracy", "sampled"), ("accuracy_greedy", "greedy")):
        clusters = ends["problem_id"], ends["seed"]
        row |= with_ends(name, mean_interval(ends[f"{kind}_last"], *clusters).within(SHARE))
        row[f"{name}_before"] = ends[f"{kind}_first"].mean()
        gain = paired_difference(ends[f"{kind}_first"], ends[f"{kind}_last"], *clusters)
        row |= with_ends(f"{name}_gain", gain.within(CHANGE))
    return row


def heldout_rewards(sweep: Sweep, arm: str, R: int) -> dict[str, object]:
    """As `accuracies`, of the run's own reward on held-out problems: heldout_reward, its value before, and its gain.

    Sampled as in training where there are samples, else greedy. No columns where the records have no such rewards.
    """
    ends = first_and_last(sweep, arm, R)
    if not ends["reward_last"].notna().any():
        return {}
    clusters = ends["problem_id"], ends["seed"]
    gain = paired_difference(ends["reward_first"], ends["reward_last"], *clusters)
    return {
        **with_ends("heldout_reward", mean_interval(ends["reward_last"], *clusters)),
        "heldout_reward_before": ends["reward_first"].mean(),
        **with_ends("heldout_reward_gain", gain),
    }


def unjudged_arms(sweep: Sweep) -> list[str]:
    """The arms whose tasks have no verdicts: their runs have a held-out reward and no accuracy."""
    judged = set(sweep.runs.loc[sweep.runs["verdict"] != "none", "arm"])
    return [arm for arm in sweep.arm_names if arm not in judged]


def evaluation_in_words(sweep: Sweep) -> str:
    """What accuracy and held-out reward are in this sweep, for captions: one sentence for each that is shown."""
    runs, found = sweep.runs, []
    judged, unjudged = runs[runs["verdict"] != "none"], unjudged_arms(sweep)
    if len(judged):
        flexible = judged["reward"] == FLEXIBLE_REWARD
        parsing = "flexible parsing" if flexible.all() else "strict parsing, the number after the first ####"
        parsing += " (flexible where that is the reward)" if flexible.any() and not flexible.all() else ""
        how = {"numbers": f"by {parsing}", **VERDICTS}
        kinds = sorted({str(kind) for kind in judged["verdict"]}, key=lambda kind: ([*how, kind].index(kind), kind))
        how |= {kind: f"where {function_name('_target_', kind)} says so" for kind in kinds if is_own(kind)}
        said = [how[kind] + (f" (task.verdict={kind})" if len(kinds) > 1 else "") for kind in kinds]
        found.append(f"Accuracy: held-out problems, {SAMPLED}, right {' or '.join(said)}.")
    if unjudged:
        of = f" of {', '.join(unjudged)}" if len(judged) else ""
        found.append(
            f"Held-out reward{of}: the run's own reward on held-out problems, {SAMPLED}; with task.verdict=none no "
            "answer is right or wrong, and there is no accuracy."
        )
    return " ".join(found)


GAIN = "Gain: last less first evaluation, paired by problem."
SAMPLED = "sampled as in training"
VERDICTS = {
    "exact": "where the text after the last #### or in the last box is that of the reference",
    "choice": "where the letter after #### or in a box is that of the reference",
    "math": "where the expression after #### or in a box equals the reference (math-verify)",
}
"""When an answer is right, strictly, by the task's kind of verdict; numbers aside (`rewards.verdicts`)."""


def first_and_last(sweep: Sweep, arm: str, R: int) -> pd.DataFrame:
    """One row per run and problem: accuracy and reward at the run's last evaluation and, where there are several, its
    first."""
    evals = scored_evals(sweep)
    evals = evals[(evals["arm"] == arm) & (evals["R"] == R)]
    keys = ["run", "seed", "problem_id"]
    bounds = evals.groupby("run")["step"].agg(first_step="min", last_step="max")
    evals = evals.join(bounds, on="run")
    last = evals[evals["step"] == evals["last_step"]]
    first = evals[(evals["step"] == evals["first_step"]) & (evals["first_step"] < evals["last_step"])]
    columns = [*keys, "sampled", "greedy", "reward"]
    return last[[*columns, "samples", "last_step"]].merge(
        first[columns], on=keys, how="left", suffixes=("_last", "_first"), validate="one_to_one"
    )


def scored_evals(sweep: Sweep) -> pd.DataFrame:
    """`evals` with `sampled` (share of correct samples; NaN without samples), `greedy` (0 or 1) and `reward` (the run's
    own, mean over the samples or, without these, greedy; NaN in records that have none).

    A run that is rewarded for the flexible parsing is scored by it, every other run by the strict one; one whose task
    has no verdicts has NaN for the first two.
    """
    names = ["strict", "flexible", "greedy_strict", "greedy_flexible", "reward", "greedy_reward"]
    evals = sweep.evals.reindex(columns=["run", "arm", "R", "seed", "step", "problem_id", "samples", *names]).copy()
    flexible = evals["run"].isin(sweep.runs.loc[sweep.runs["reward"] == FLEXIBLE_REWARD, "run"])
    samples = evals["samples"].astype(float)
    correct = evals["flexible"].where(flexible, evals["strict"]).astype(float)
    evals["sampled"] = correct / samples.where(samples > 0)
    evals["greedy"] = evals["greedy_flexible"].where(flexible, evals["greedy_strict"]).astype(float)
    rewards = evals[["reward", "greedy_reward"]].astype(float)
    evals["reward"] = rewards["reward"].where(samples > 0, rewards["greedy_reward"])
    judged = ~evals["run"].isin(sweep.runs.loc[sweep.runs["verdict"] == "none", "run"])
    evals[["sampled", "greedy"]] = evals[["sampled", "greedy"]].where(judged, axis=0)
    return evals


def ranks(sweep: Sweep) -> pd.DataFrame:
    """Long form: each quantity of each matrix (G, scores, unit rows, centred) for each arm and R, with its interval."""
    rows = []
    for arm, R in sweep.cells:
        groups = usable_groups(sweep, arm, R)
        by = clusters(groups)
        for prefix, matrix in MATRICES.items():
            for name in QUANTITIES:
                interval = pooled(groups, prefix + name, by=by)
                rows.append(
                    {"arm": arm, "R": R, "matrix": matrix, "quantity": name, "groups": interval.n}
                    | {"mean": interval.mean, "low": interval.low, "high": interval.high}
                )
    return pd.DataFrame(rows)


def by_k(sweep: Sweep) -> pd.DataFrame:
    """One row per arm, R and k = 1 .. R - 1 (binary rewards): every quantity of each of the five matrices with its
    interval (those of G without a prefix, the others with that of `spectral.MATRICES`), and the nulls of those of G.

    A null is named null_closed_form, null_measured_norms, null_both or null_gaussian, for another quantity than the
    effective rank with its name behind it. The closed form is of group-mean advantages over orthogonal scores of equal
    norm, for the effective rank 4k(R-k)/R. A k without groups has its row too, with 0 groups and no values but the
    closed forms.
    """
    rows = []
    for arm, R in sweep.cells:
        groups = usable_groups(sweep, arm, R)
        if not groups["k"].notna().any():
            continue
        for k in range(1, R):
            part = groups[groups["k"] == k]
            by = clusters(part)
            row: dict[str, object] = {"arm": arm, "R": R, "k": k, "groups": len(part)}
            row["distinct_rollouts"] = part["distinct"].astype(float).mean()
            row |= with_ends("gradient_norm", pooled(part, "gradient_norm", by=by))
            row["null_closed_form"] = null_effective_rank(k, R)
            row |= {f"null_closed_form_{name}": closed_form(name, k, R) for name in OTHERS}
            measured = [name for name in (*NULLS, *OTHER_NULLS) if name != "null_closed_form"]
            row |= {name: part[name].astype(float).mean() for name in measured}
            for prefix in MATRICES:
                for name in QUANTITIES:
                    row |= with_ends(prefix + name, pooled(part, prefix + name, by=by))
            rows.append(row)
    empty = ["arm", "R", "k", "groups", "effective_rank", "null_closed_form"]
    return pd.DataFrame(rows, columns=None if rows else empty)


def closed_form(quantity: str, k: int, R: int) -> float:
    """A quantity of group-mean advantages over orthogonal scores of equal norm, k of R rollouts right: the singular
    values are 1 - k/R, k times, and k/R, R - k times.

    >>> round(closed_form("effective_rank", 2, 8), 12), round(closed_form("participation_ratio", 4, 8), 12)
    (6.0, 8.0)
    """
    return float(QUANTITIES[quantity](np.repeat([1.0 - k / R, k / R], [k, R - k])))


def by_step(sweep: Sweep, arm: str, R: int, column: str, windows: int) -> pd.DataFrame:
    """Mean of a column over windows of steps (at most `windows` of equal width), with intervals: step, mean, low, high.

    `step` is the mean step of the window's groups.
    """
    groups = usable_groups(sweep, arm, R)
    if not len(groups):
        return pd.DataFrame(columns=["step", "mean", "low", "high", "groups"])
    width = int(np.ceil((groups["step"].max() + 1) / windows))
    rows = []
    groups = groups[["R", "step", "prompt_id", "seed", column]]
    for _, part in groups.groupby(groups["step"] // width):
        interval = pooled(part, column)
        rows.append((part["step"].mean(), interval.mean, interval.low, interval.high, interval.n))
    return pd.DataFrame(rows, columns=["step", "mean", "low", "high", "groups"])


def accuracy_by_step(sweep: Sweep, arm: str, R: int, reward: bool = False) -> pd.DataFrame:
    """Held-out accuracy at each evaluation with intervals: step, rollouts (used in training by then), mean, low, high.
    reward: the run's own reward on the same problems instead; no rows where records have none.

    Sampled as in training where there are samples, else greedy. `rollouts` is the record's own count, which knows of
    those that were drawn and not trained on, or else made from the configuration and those.
    """
    evals = scored_evals(sweep)
    evals = evals[(evals["arm"] == arm) & (evals["R"] == R)]
    value = "reward" if reward else "sampled" if evals["sampled"].notna().any() else "greedy"
    evals = evals[evals["reward"].notna()] if reward else evals
    prompts = dict(zip(sweep.runs["run"], sweep.runs["prompts"], strict=True))
    counts = [name for name in ("rollouts", *BESIDES) if name in sweep.metrics]
    of_run = dict(iter(sweep.metrics[["run", "step", *counts]].groupby("run")))
    none = sweep.metrics.iloc[:0]
    rows = []
    for step, part in evals.groupby("step"):
        interval = mean_interval(part[value], part["problem_id"], part["seed"])
        interval = interval if reward else interval.within(SHARE)
        runs = part["run"].unique()
        used = [_rollouts(of_run.get(run, none), int(str(step)), R, prompts.get(run)) for run in runs]
        rows.append((step, float(np.mean(used)), interval.mean, interval.low, interval.high))
    return pd.DataFrame(rows, columns=["step", "rollouts", "mean", "low", "high"])


BESIDES = ("resample/discarded_rollouts", "value/continuations")  # of metrics: rollouts that nothing is trained on


def discarded(metrics: pd.DataFrame) -> float:
    """Rollouts that these steps drew and did not keep (objective.resample): no group's record has them."""
    return _total(metrics, BESIDES[0])


def drawn_besides(metrics: pd.DataFrame) -> float:
    """Rollouts that these steps drew and did not train on: discarded ones, and continuations of prefixes."""
    return sum(_total(metrics, column) for column in BESIDES)


def _total(metrics: pd.DataFrame, column: str) -> float:
    return float(metrics[column].sum()) if column in metrics else 0.0


def _rollouts(metrics: pd.DataFrame, step: int, R: int, prompts: object) -> float:
    """Rollouts of a run, given its metrics, before an evaluation at `step`."""
    if "rollouts" in metrics:
        value = metrics.loc[metrics["step"] == step, "rollouts"].dropna()
        if len(value):
            return float(value.iloc[-1])
    if prompts is None:
        return float("nan")
    return step * R * float(str(prompts)) + drawn_besides(metrics[metrics["step"] < step])
