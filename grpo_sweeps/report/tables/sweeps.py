"""Several sweeps in one report: what differs between their configurations, and their arms side by side, paired where
the problems are the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_sweeps.config import TASK_KEYS
from grpo_sweeps.config.choices import ABSENT, PLACES
from grpo_sweeps.config.schema import flatten, shown
from grpo_sweeps.maths.intervals import Interval, paired_difference
from grpo_sweeps.publish.formats import number, with_interval
from grpo_sweeps.publish.page import Section
from grpo_sweeps.report.measure.spectral import range_of_difference
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.tables.pooled import CHANGE, first_and_last, records_of, unjudged_arms, usable_groups
from grpo_sweeps.text import natural
from grpo_sweeps.tracking import provenance

NO_DIFFERENCE = (*PLACES, "seed")  # that says nothing of what was compared
GROUP = ["seed", "step", "group", "prompt_id"]
PROBLEM = ["seed", "problem_id"]
COLUMNS = [
    "R", "arm", "reference", "quantity", "pairs", "mean_reference", "mean", "difference", "difference_low",
    "difference_high",
]  # fmt: skip
SIDE = "side_by_side"
WORDS = (
    "Each arm against the first one of the same R. Differences are means over pairs with 95% intervals clustered by "
    "problem and seed: held-out problems of the last evaluation for the accuracy (the held-out reward where neither "
    "task has verdicts), groups of the same seed, step and problem for reward and effective rank. After the first "
    "update the policies of two arms differ.",
)
UNPAIRED = "Where no problems are the same, the means stand side by side without a difference."


def differences(sweep: Sweep) -> pd.DataFrame:
    """One row per key of the configuration whose values are not the same in every sweep, one column per sweep with its
    values; `key` first. Also the commit."""
    values: dict[str, dict[str, set[str]]] = {}
    names = [path.name for path in sweep.paths]
    for row in sweep.runs.to_dict("records"):
        flat = flatten(sweep.configs[str(row["run"])]) | {"(commit)": str(row["commit"] or "unknown")[:12]}
        for key, value in flat.items():
            if key.split(".")[0] not in NO_DIFFERENCE:
                values.setdefault(key, {}).setdefault(str(row["sweep"]), set()).add(shown(value))
    rows = []
    for key, of in sorted(values.items()):
        if any(of.get(name) != of.get(names[0]) for name in names):
            listed = {name: ", ".join(sorted(of.get(name, {ABSENT}), key=natural)) for name in names}
            rows.append({"key": key, **listed})
    return pd.DataFrame(rows, columns=["key", *names])


def side_by_side(sweep: Sweep) -> pd.DataFrame:
    """One row per R, arm after the first of that R, and quantity: accuracy (or, where neither arm's task has verdicts,
    held-out_reward), reward, effective_rank. `pairs` 0: the means are over what each arm has, and there is no
    difference."""
    rows, unjudged = [], unjudged_arms(sweep)
    for R in sorted({R for _, R in sweep.cells}):
        reference, *others = [arm for arm, own in sweep.cells if own == R]
        for arm in others:
            same = _problems(sweep, reference, R) == _problems(sweep, arm, R)
            evaluated = "held-out_reward" if {reference, arm} <= set(unjudged) else "accuracy"
            for quantity in (evaluated, "reward", "effective_rank"):
                first, second = (_values(sweep, one, R, quantity) for one in (reference, arm))
                row = {"R": R, "arm": arm, "reference": reference, "quantity": quantity}
                rows.append(row | _compared(first, second, quantity, R, same))
    return pd.DataFrame(rows, columns=COLUMNS)


def _problems(sweep: Sweep, arm: str, R: int) -> set[str]:
    """What tells the problems of an arm's runs: the digest of the data where it was kept, else the task's arguments."""
    runs = sweep.runs[(sweep.runs["arm"] == arm) & (sweep.runs["R"] == R)]
    found = set()
    for run, path in zip(runs["run"], runs["path"], strict=True):
        data: Mapping[str, Any] = provenance.read_made_by(Path(str(path))).data
        task = sweep.configs[str(run)].get("task")
        if not data and isinstance(task, Mapping):
            data = {key: value for key, value in task.items() if key not in TASK_KEYS}
        found.add(json.dumps(data, sort_keys=True, default=str))
    return found


def _values(sweep: Sweep, arm: str, R: int, quantity: str) -> pd.DataFrame:
    """The keys of a pair, `problem` and `value`."""
    if quantity in ("accuracy", "held-out_reward"):
        ends = first_and_last(sweep, arm, R)
        value = ends["sampled_last"].where(ends["sampled_last"].notna(), ends["greedy_last"])
        value = value if quantity == "accuracy" else ends["reward_last"]
        return ends[PROBLEM].assign(problem=ends["problem_id"], value=value)
    groups = usable_groups(sweep, arm, R) if quantity == "effective_rank" else records_of(sweep, arm, R)
    value = groups["effective_rank" if quantity == "effective_rank" else "reward_mean"].astype(float)
    return groups[GROUP].assign(problem=groups["prompt_id"], value=value)


def _compared(first: pd.DataFrame, second: pd.DataFrame, quantity: str, R: int, same: bool) -> dict[str, object]:
    keys = [name for name in first.columns if name not in ("problem", "value")]
    both = first.merge(second.drop(columns="problem"), on=keys, suffixes=("", "_other")) if same else first[:0]
    both = both.dropna(subset=["value", "value_other"]) if len(both) else both
    if not len(both):
        means = {"mean_reference": first["value"].mean(), "mean": second["value"].mean()}
        return {"pairs": 0, **means, "difference": float("nan")}
    found: Interval = paired_difference(both["value"], both["value_other"], both["problem"], both["seed"])
    if quantity in ("accuracy", "effective_rank"):
        found = found.within(CHANGE if quantity == "accuracy" else range_of_difference("effective_rank", R))
    return {
        "pairs": len(both), "mean_reference": both["value"].mean(), "mean": both["value_other"].mean(),
        "difference": found.mean, "difference_low": found.low, "difference_high": found.high,
    }  # fmt: skip


def sweeps_sections(sweep: Sweep, differ: pd.DataFrame, side: pd.DataFrame) -> list[Section]:
    """The two sections of a report on several sweeps."""
    cells = tuple(tuple(map(str, row)) for row in differ.itertuples(index=False))
    before = () if cells else ("Nothing differs between the configurations of these sweeps.",)
    found = [Section("differences", "What differs between the sweeps", before, tuple(differ.columns), cells)]
    rows = []
    for row in side.to_dict("records"):
        difference = with_interval(row["difference"], row["difference_low"], row["difference_high"], 3)
        means = (number(row[name], 3) for name in ("mean_reference", "mean"))
        shown_as = str(row["quantity"]).replace("_", " ")
        rows.append((str(row["R"]), row["arm"], row["reference"], shown_as, str(row["pairs"]), *means, difference))
    header = ("R", "arm", "against", "quantity", "pairs", "the other", "this arm", "difference")
    after = (UNPAIRED,) if (side["pairs"] == 0).any() else ()
    found += [Section(SIDE, "Arms side by side", WORDS, header, tuple(rows), after, (f"{SIDE}.csv",))] if rows else []
    return found
