"""What updates do to the weights, as a figure: share that moves and sparsity by step, size and rank of the change by
depth and by kind of parameter. Drawn from `updates.update_steps` and `updates.update_parts`."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from grpo_sweeps.publish.drawing import DOTTED, Panel, Plot, Style, arm_cells, arm_title, finish, styles
from grpo_sweeps.report.figures.layers import DODGE, TITLES, depth_axis, kind_axis, name_ticks, points
from grpo_sweeps.report.part_names import ALL
from grpo_sweeps.report.read.query import Sweep

NAME = "updates"
BY_STEP = {
    "changed_share": ("share of weights changed", "changed_share_float32", "in float32"),
    "gradient_hoyer": ("Hoyer sparsity", "update_hoyer", "of the update"),
}
BY_PART = {"effective_rank": "effective rank of the change", "energy_share": "share of squared change"}
CAPTION = (
    "Above: the share of weights that a step changes, in the training precision (filled) and in the optimiser's "
    "float32 weights (open, dotted), and the Hoyer sparsity of the step's gradient before clipping (filled) and of the "
    "change of the weights (open, dotted): 0 where all entries are of one size, 1 where one alone is not 0. Middle: "
    "effective rank of one step's change of a matrix, mean over the matrices of a layer or kind. Below: their share of "
    "the sum of squared changes, logarithmic, a share of 0 left out. Means over runs, by part over measured steps too, "
    "of the steps that had a gradient, with 95% intervals clustered by seed (none with one seed). Seen: where one step "
    "of the optimiser goes. Not seen: whether steps add up or cancel; and AdamW gives every weight a change of about "
    "the learning rate in its first steps, whatever the size of its gradient."
)


def update_figure(sweep: Sweep, steps: pd.DataFrame, parts: pd.DataFrame) -> list[Plot]:
    """The figure, or none where no update was measured."""
    if not len(steps) or not len(parts):
        return []
    panels = []
    for arm in arm_cells(sweep):
        by_step, by_part = steps[steps["arm"] == arm], parts[parts["arm"] == arm]
        panels += [_step_panel(sweep, arm, by_step, column) for column in BY_STEP]
        panels += [_part_panel(sweep, arm, by_part, level, column) for column in BY_PART for level in TITLES]
    return [Plot(NAME, "What a step does to the weights", CAPTION, tuple(panels))]


def _step_panel(sweep: Sweep, arm: str, rows: pd.DataFrame, column: str) -> Panel:
    label, other, other_label = BY_STEP[column]
    of_R = {int(str(R)): part for R, part in rows.groupby("R")}
    looks = {R: style for R, style in styles(sweep).items() if R in of_R}

    def draw(ax: Axes) -> None:
        for R, style in looks.items():
            _curve(ax, of_R[R], other, style, "", filled=False)
            _curve(ax, of_R[R], column, style, f"R = {R}", filled=True)
        ax.plot([], [], color="0.35", ls=DOTTED, lw=1.0, marker="o", mfc="white", ms=3.5, label=other_label)
        ax.set_ylim(0.0, 1.05)
        finish(ax, "training step", label, whole=True)

    said = [f"R = {R}: {_ends(part, column)}, {other_label} {_ends(part, other)}" for R, part in of_R.items()]
    title = ", ".join(t for t in (arm_title(sweep, arm), "by step") if t)
    return Panel(title, f"Line chart of {label} by training step{_whose(arm)}. {'; '.join(said)}.", draw)


def _curve(ax: Axes, rows: pd.DataFrame, column: str, style: Style, label: str, filled: bool) -> None:
    x, mean = rows["step"].to_numpy(float), rows[column].to_numpy(float)
    look = {"ls": style.line, "mec": "white", "mew": 0.5, "label": label, "zorder": 3}
    if not filled:
        look = {"ls": DOTTED, "lw": 1.0, "mfc": "none", "ms": 6.0, "zorder": 2}
    ax.plot(x, mean, color=style.color, marker=style.marker, **look)
    low, high = (rows[f"{column}_{end}"].to_numpy(float).clip(0.0, 1.0) for end in ("low", "high"))
    if filled and np.isfinite(low).any():
        ax.fill_between(x, low, high, color=style.color, alpha=0.16, lw=0)


def _part_panel(sweep: Sweep, arm: str, rows: pd.DataFrame, level: str, column: str) -> Panel:
    shown = rows[(rows["level"] == level) & rows[column].notna()]
    keys = sorted({str(key) for key in shown[level]})
    axis = depth_axis(keys) if level == "layer" else kind_axis(keys)
    of_R = {int(str(R)): part for R, part in shown.groupby("R")}
    looks = {R: style for R, style in styles(sweep).items() if R in of_R}
    bounds = (1.0, np.inf) if column == "effective_rank" else (0.0, 1.0)

    def draw(ax: Axes) -> None:
        if column == "energy_share":
            ax.set_yscale("log", nonpositive="clip")
        for i, (R, style) in enumerate(looks.items()):
            shift = DODGE * (i - (len(looks) - 1) / 2) / max(1, len(looks) - 1)
            part = (
                of_R[R]
                .drop(columns="name")
                .rename(columns={level: "key", column: "mean", f"{column}_low": "low", f"{column}_high": "high"})
            )
            points(ax, part, axis, shift, style, bounds, f"R = {R}")
        if keys:
            name_ticks(ax, axis, log=column == "energy_share")
        finish(ax, axis.label, BY_PART[column], whole=False)

    said = []
    for R, part in of_R.items():
        values = part.set_index(level)[column].astype(float)
        most, least = f"{values.max():.3g} ({values.idxmax()})", f"{values.min():.3g} ({values.idxmin()})"
        said.append(f"R = {R}: most {most}, least {least}")
    title = ", ".join(t for t in (arm_title(sweep, arm), TITLES[level]) if t)
    return Panel(title, f"Chart of {BY_PART[column]} {TITLES[level]}{_whose(arm)}. {'; '.join(said)}.", draw)


def _whose(arm: str) -> str:
    return "" if arm == ALL else f" for {arm}"


def _ends(rows: pd.DataFrame, column: str) -> str:
    values = rows[column].dropna()
    return f"from {values.iloc[0]:.3g} to {values.iloc[-1]:.3g}" if len(values) else "no values"
