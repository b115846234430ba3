"""Open question 3 as a figure: the mean effective rank by step, beside it with the numbers k of right rollouts held
fixed, and the two parts that its change over training is made of (`claims.training`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FixedLocator, NullLocator

from grpo_sweeps.maths.intervals import Interval
from grpo_sweeps.publish.drawing import DOTTED, Panel, Plot
from grpo_sweeps.report.claims.training import parts_of_change, third_of
from grpo_sweeps.report.figures.look import Style, arm_cells, finish, first_to_last, panel_title, styles, whose
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.tables.pooled import pooled, usable_groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "rank_change"
WINDOWS = 9  # of the steps: three per third
MATCHED = 0.9  # of the first third's groups have a k that a window must have as well
PARTS = ("total", "composition", "geometry")
WIDTH = 0.8  # of the distance between two parts, shared by the bars of the R
LEAST = 0.02  # of the axis to either side of 0: rounding is not blown up to a picture
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "ooo")
CAPTION = (
    "Left: mean effective rank over the measured mixed groups with known k in windows of training steps (filled; "
    "bands: 95% intervals clustered by prompt and seed), and the same with k held fixed (open, dotted): the mean at "
    "each k, weighted by the first third's shares of k. A window without a k that more than "
    f"{1 - MATCHED:.0%} of the first third's groups have has no such value. Right: the change from the first to the "
    "last third of the steps over the k that both have, total = composition (the shares of k moved) + geometry (the "
    "rank at fixed k moved), with 95% intervals by a bootstrap over prompts. Seen: whether the rank fell because "
    "right rollouts became more or fewer, which says nothing about the scores. Not seen: why."
)


def longitudinal_figure(sweep: Sweep) -> list[Plot]:
    """The figure, or none where no arm and R has groups enough in both thirds."""
    panels = []
    for arm, Rs in arm_cells(sweep).items():
        known = {R: g[g["k"].notna()] for R in Rs if len(g := usable_groups(sweep, arm, R))}
        changes = {R: moved[1] for R, g in known.items() if (moved := parts_of_change(g)) is not None}
        if changes:
            panels += [_curves_panel(sweep, arm, {R: known[R] for R in changes}), _bars_panel(sweep, arm, changes)]
    title = "Does the effective rank fall, or the number of right rollouts move?"
    return [Plot(NAME, title, CAPTION, tuple(panels))] if panels else []


def rank_by_window(groups: pd.DataFrame, windows: int = WINDOWS) -> pd.DataFrame:
    """groups with `step`, `k`, `effective_rank`, `prompt_id`, `seed` -> one row per window of steps: step (mean), mean
    with low and high, and fixed: the means by k weighted by the first third's shares of k, NaN where the window lacks
    too many of them."""
    shares = groups.loc[third_of(groups) == 0, "k"].value_counts(normalize=True)
    low, high = int(groups["step"].min()), int(groups["step"].max()) + 1
    number = (groups["step"] - low) * windows // max(1, high - low)
    rows = []
    for _, part in groups.groupby(number):
        interval = pooled(part, "effective_rank")
        means = part.groupby("k")["effective_rank"].mean()
        weights = shares.reindex(means.index).fillna(0.0)
        matched = float(weights.sum())
        fixed = float((weights * means).sum() / matched) if matched >= MATCHED else float("nan")
        rows.append((part["step"].mean(), interval.mean, interval.low, interval.high, fixed))
    return pd.DataFrame(rows, columns=["step", "mean", "low", "high", "fixed"])


def _curves_panel(sweep: Sweep, arm: str, groups: dict[int, pd.DataFrame]) -> Panel:
    curves = {R: rank_by_window(g) for R, g in groups.items()}

    def draw(ax: Axes) -> None:
        for R, curve in curves.items():
            _curve(ax, curve, R, styles(sweep)[R])
        ax.plot([], [], color="0.35", ls=DOTTED, lw=1.0, marker="o", mfc="white", ms=3.5, label="k held fixed")
        finish(ax, "training step", "effective rank", whole=True)

    said = []
    for R, curve in curves.items():
        mean, fixed = first_to_last(curve["mean"], ".2f"), first_to_last(curve["fixed"], ".2f")
        said.append(f"R = {R}: {mean}, k held fixed {fixed}")
    title = panel_title(sweep, arm, "by step")
    return Panel(title, f"Line chart of effective rank by step{whose(arm)}. {'; '.join(said)}.", draw)


def _curve(ax: Axes, curve: pd.DataFrame, R: int, style: Style) -> None:
    look: dict[str, Any] = {"color": style.color, "marker": style.marker}
    ax.plot(curve["step"], curve["mean"], ls=style.line, label=f"R = {R}", mec="white", mew=0.5, **look)
    ax.plot(curve["step"], curve["fixed"], ls=DOTTED, lw=1.0, mfc="white", ms=4, **look)
    low, high = (curve[end].astype(float).clip(1.0, R) for end in ("low", "high"))
    ax.fill_between(curve["step"].astype(float), low, high, color=style.color, alpha=0.16, lw=0)


def _bars_panel(sweep: Sweep, arm: str, changes: dict[int, dict[str, Interval]]) -> Panel:
    looks = {R: style for R, style in styles(sweep).items() if R in changes}

    def draw(ax: Axes) -> None:
        width = WIDTH / len(looks)
        for i, (R, style) in enumerate(looks.items()):
            found = [changes[R][name] for name in PARTS]
            x = np.arange(len(PARTS)) + width * (i - (len(looks) - 1) / 2)
            mean = np.array([f.mean for f in found])
            ends = np.array([[f.mean - f.low for f in found], [f.high - f.mean for f in found]]).clip(0)
            ax.bar(
                x, mean, 0.9 * width, yerr=ends, color=(*style.color, 0.55), edgecolor=style.color, lw=1.0,
                hatch=HATCHES[i % len(HATCHES)], label=f"R = {R}", error_kw={"elinewidth": 1, "capsize": 2},
            )  # fmt: skip
        ax.axhline(0.0, color="0.35", lw=0.8)
        ax.xaxis.set_major_locator(FixedLocator(range(len(PARTS))))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xticklabels(PARTS)
        ax.grid(False, axis="x")
        low, high = ax.get_ylim()
        ax.set_ylim(min(low, -LEAST), max(high, LEAST))
        finish(ax, "", "change of effective rank", whole=False, negative=True)

    said = []
    for R, found in changes.items():
        said.append(f"R = {R}: " + ", ".join(f"{name} {found[name].mean:.3f}" for name in PARTS))
    title = panel_title(sweep, arm, "first to last third")
    return Panel(title, f"Bar chart of the change of effective rank{whose(arm)}. {'; '.join(said)}.", draw)
