"""The sample completions that a report shows: of each arm and R one group that taught something, if one was kept."""

from __future__ import annotations

from typing import Any

import pandas as pd

from grpo_sweeps.report.read.query import Sweep


def samples(sweep: Sweep) -> list[dict[str, Any]]:
    """Two completions of one kept group for each arm and R, the best and the worst rewarded (right before wrong at
    equal reward): a row of `completions` each, with `taught`.

    The group is the latest with different rewards and an advantage that is not 0; without such a one the latest with
    such an advantage, else the latest of all, which taught nothing: `taught` is False.
    """
    if not len(sweep.completions):
        return []
    shown: list[dict[str, Any]] = []
    for _, cell in sweep.completions.groupby(["arm", "R"]):
        groups = [part for _, part in cell.groupby(["run", "step", "group", "prompt_id"], sort=False)]
        best = max(groups, key=lambda part: (*_worth(part), int(part["step"].iloc[0]), -int(part["seed"].iloc[0])))
        ordered = best.sort_values(["reward", "strict"], kind="stable", ascending=False)
        chosen = pd.concat([ordered.head(1), ordered.iloc[1:].tail(1)])
        taught, _ = _worth(best)
        shown += [{str(k): v for k, v in row.items()} | {"taught": taught} for row in chosen.to_dict("records")]
    return shown


def silent_cells(shown: list[dict[str, Any]]) -> str:
    """The arms and R whose sample taught nothing, in words; empty where each taught something."""
    arms = len({row["arm"] for row in shown}) > 1
    cells = {f"{row['arm']}, R = {row['R']}" if arms else f"R = {row['R']}": None for row in shown if not row["taught"]}
    return "; ".join(cells)


def _worth(group: pd.DataFrame) -> tuple[bool, bool]:
    """Did the group teach something, and do its rewards differ?"""
    rewards = group["reward"].astype(float)
    return bool((group["advantage"].astype(float) != 0).any()), bool(rewards.max() > rewards.min())
