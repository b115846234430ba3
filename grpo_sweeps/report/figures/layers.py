"""Figures by depth and by kind of parameter: fig5, effective rank and share of gradient energy; what updates do.

They are drawn from `tables.layers`, whose rows they neither average nor sum: two panels by two per arm, and six.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from grpo_sweeps.publish.drawing import DOTTED, Panel, Plot
from grpo_sweeps.report.figures.look import Style, arm_cells, finish, first_to_last, panel_title, styles, whose
from grpo_sweeps.report.measure.parts import ALL, HEAD, NORM, OTHER, TIED, Part, depth_key, order
from grpo_sweeps.report.read.query import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DODGE = 0.3  # of the distance between two layers or kinds: the width over which the R stand side by side
MANY = 12  # numbered layers, beyond which bars and full-sized markers would run into each other
ROOMY = 4  # numbered layers, up to which the names of the parts after them have room side by side
NUMBERS = 8  # numbered layers named on the axis, at most
END = 0.13  # of the numbered layers' extent: the room of a part outside them
SHORT = {"embedding": "emb.", TIED: "emb.\n+head", NORM: "norm", HEAD: "head", OTHER: "other", ALL: "all"}
QUANTITIES = {
    "effective_rank": ("effective rank", "ci_low", "ci_high"),
    "energy_share": ("share of gradient energy", "energy_share_low", "energy_share_high"),
}
TITLES = {"layer": "by depth", "kind": "by kind of parameter"}
CAPTION = (
    "Effective rank (above; of one part's columns of the gradient matrix) and share of gradient energy (below; of the "
    "sum of the squared norms of the rows, logarithmic, a share of 0 left out), means over the measured mixed groups "
    "with 95% intervals clustered by prompt and seed. “all”: the whole matrix. Seen: which parts of the model the "
    "rollouts' gradients lie in, and in how many directions there. Not seen: how far each part moves (the "
    "optimiser rescales it) or matters for the reward; a share counts large parts more, it is not per parameter; and "
    "ranks of parts do not add up to that of the whole."
)
NOT_DRAWN = (
    "Figure 5, effective rank and share of gradient energy by depth and kind of parameter, is not drawn: no run kept a "
    "Gram for each parameter. Runs with analysis.by=parameter do (analysis.by=layer: by depth only)."
)
UPDATES = "updates"
BY_STEP = {
    "changed_share": ("share of weights changed", "changed_share_float32", "in float32"),
    "gradient_hoyer": ("Hoyer sparsity", "update_hoyer", "of the update"),
}
BY_PART = {"effective_rank": "effective rank of the change", "energy_share": "share of squared change"}
UPDATES_CAPTION = (
    "Above: the share of weights that a step changes, in the training precision (filled) and in the optimiser's "
    "float32 weights (open, dotted), and the Hoyer sparsity of the step's gradient before clipping (filled) and of the "
    "change of the weights (open, dotted): 0 where all entries are of one size, 1 where one alone is not 0. Middle: "
    "effective rank of one step's change of a matrix, mean over the matrices of a layer or kind. Below: their share of "
    "the sum of squared changes, logarithmic, a share of 0 left out. Means over runs, by part over measured steps too, "
    "of the steps that had a gradient, with 95% intervals clustered by seed (none with one or two). Seen: where one "
    "step of the optimiser goes. Not seen: whether steps add up or cancel; and AdamW gives every weight a change of "
    "about the learning rate in its first steps, whatever the size of its gradient."
)


@dataclass(frozen=True)
class Axis:
    """Places on the x axis: `at` each part's key (a layer or a kind), `ticks` those with a label."""

    label: str
    at: dict[str, float]
    ticks: dict[str, str]
    joined: frozenset[str]  # keys whose points a line joins: the numbered layers


def layer_figure(sweep: Sweep, table: pd.DataFrame) -> list[Plot]:
    """The figure, or none where the table is empty. Runs with Grams by layer alone have no panels by kind."""
    if not len(table):
        return []
    panels = []
    for arm in arm_cells(sweep):
        rows = table[table["arm"] == arm]
        levels = [level for level in TITLES if (rows["level"] == level).any()]
        for column in QUANTITIES:
            for level in levels:
                panels.append(_panel(sweep, arm, rows, level, column))
    depth_only = not (table["level"] == "kind").any()
    by_depth = " By depth alone: the runs kept one Gram a layer; analysis.by=parameter gives the kinds, too."
    title = f"Effective rank and gradient energy {'by depth' if depth_only else 'by depth and by kind of parameter'}"
    return [Plot("fig5", title, CAPTION + (by_depth if depth_only else ""), tuple(panels))]


def _panel(sweep: Sweep, arm: str, rows: pd.DataFrame, level: str, column: str) -> Panel:
    """One quantity by layer or by kind. The rank's panel has the whole matrix beside the parts."""
    shown = rows[(rows["level"] == level) | ((rows["level"] == "whole") & (column == "effective_rank"))]
    keys = sorted({str(key) for key in shown[level]})
    axis = depth_axis(keys) if level == "layer" else kind_axis(keys)
    of_R = {int(str(R)): part for R, part in shown.groupby("R")}
    looks = {R: style for R, style in styles(sweep).items() if R in of_R}
    label, low, high = QUANTITIES[column]

    def draw(ax: Axes) -> None:
        if column == "energy_share":
            ax.set_yscale("log", nonpositive="clip")
        for i, (R, style) in enumerate(looks.items()):
            shift = DODGE * (i - (len(looks) - 1) / 2) / max(1, len(looks) - 1)
            bounds = (1.0, float(R)) if column == "effective_rank" else (0.0, 1.0)
            part = of_R[R].rename(columns={level: "key", column: "mean", low: "low", high: "high"})
            points(ax, part, axis, shift, style, bounds, f"R = {R}")
        name_ticks(ax, axis, log=column == "energy_share")
        finish(ax, axis.label, label, whole=False)

    title = panel_title(sweep, arm, TITLES[level])
    return Panel(title, _alt(label, level, arm, column, of_R), draw)


def depth_axis(keys: Sequence[str]) -> Axis:
    """Numbered layers at their numbers; what stands before and after them, and the whole, at the ends."""
    numbered = [int(k) for k in keys if k.isdecimal()]
    first, last = (min(numbered), max(numbered)) if numbered else (0, 0)
    room = max(1.0, END * (last - first))
    outside = sorted((k for k in keys if not k.isdecimal() and k != ALL), key=depth_key)
    before = [k for k in outside if depth_key(k)[0] == 0]
    after = [k for k in outside if depth_key(k)[0] > 0] + [k for k in keys if k == ALL]
    at = {str(n): float(n) for n in numbered}
    at |= {k: first - room * (len(before) - i) for i, k in enumerate(before)}
    at |= {k: last + room * (i + bool(numbered)) for i, k in enumerate(after)}
    every = max(1, int(np.ceil((last - first + 1) / NUMBERS)))
    ticks = {str(n): str(n) for n in sorted(numbered) if (n - first) % every == 0} | {k: SHORT[k] for k in before}
    lower = "\n" if last - first > ROOMY else ""  # every other label a line lower: side by side they would meet
    ticks |= {k: lower * (i % 2) + SHORT[k] for i, k in enumerate(after)}
    return Axis("layer", at, ticks, frozenset(map(str, numbered)))


def kind_axis(keys: Sequence[str]) -> Axis:
    ordered = sorted(keys, key=lambda kind: (kind == ALL, order(Part("kind", ALL, kind))))
    ticks = {k: SHORT.get(k, k).replace("\n", "") for k in ordered}
    return Axis("", {k: float(i) for i, k in enumerate(ordered)}, ticks, frozenset())  # the title says what they are


def points(
    ax: Axes, rows: pd.DataFrame, axis: Axis, shift: float, style: Style, bounds: tuple[float, float], label: str
) -> None:
    """Markers with bars cut at `bounds`; a line through the numbered layers, with a band instead of bars where they are
    many. A share of 0 has no place on a logarithmic axis."""
    rows = rows[rows["mean"].astype(float) > 0]
    if not len(rows):
        return
    x = rows["key"].map(axis.at).to_numpy(float)
    mean, low, high = (rows[c].to_numpy(float) for c in ("mean", "low", "high"))
    bars = np.nan_to_num([mean - low.clip(*bounds), high.clip(*bounds) - mean]).clip(0)
    look: dict[str, Any] = {"color": style.color, "marker": style.marker, "mec": "white", "mew": 0.4}
    joined = rows["key"].isin(list(axis.joined)).to_numpy()
    many = len(axis.joined) > MANY
    with_bar = ~joined if many else np.full(len(x), True)
    x_bar, bars = (x + shift)[with_bar], bars[:, with_bar]
    ax.errorbar(x_bar, mean[with_bar], yerr=bars, ls="", capsize=1.5, elinewidth=0.9, zorder=3, ms=4.5, **look)
    along = np.flatnonzero(joined)[np.argsort(x[joined])]
    line_x = x[along] + (0.0 if many else shift)
    ax.plot(line_x, mean[along], ls=style.line, lw=1.1, zorder=2, **look | {"ms": 2.5 if many else 0, "mew": 0})
    if many:
        edges = (low[along].clip(*bounds), high[along].clip(*bounds))
        ax.fill_between(line_x, *edges, color=style.color, alpha=0.16, lw=0)
    ax.plot([], [], ls=style.line if axis.joined else "", lw=1.1, label=label, ms=4.5, **look)


def name_ticks(ax: Axes, axis: Axis, log: bool) -> None:
    ax.xaxis.set_major_locator(FixedLocator([axis.at[k] for k in axis.ticks]))
    slanted = not axis.joined
    ax.set_xticklabels(
        list(axis.ticks.values()), rotation=45 if slanted else 0, ha="right" if slanted else "center",
        rotation_mode="anchor" if slanted else "default",
    )  # fmt: skip
    ax.margins(x=0.04)
    if log:
        low, high = ax.get_ylim()  # a decade at least, so that two labels stand on the axis
        ax.set_ylim(10 ** np.floor(np.log10(low)), max(high, 1.0))
        ax.yaxis.set_major_locator(LogLocator(numticks=7))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:g}".replace("e-0", "e-")))
        ax.yaxis.set_minor_locator(NullLocator())


def _alt(label: str, level: str, arm: str, column: str, of_R: dict[int, pd.DataFrame]) -> str:
    """The largest and smallest value and where they are, for readers who cannot see the picture."""
    said = []
    for R, rows in of_R.items():
        values = rows[(rows["level"] == level) & rows[column].notna()].set_index(level)[column].astype(float)
        if len(values):
            top, bottom = values.idxmax(), values.idxmin()
            said.append(f"R = {R}: most {values.max():.3g} ({top}), least {values.min():.3g} ({bottom})")
    return f"Chart of {label} {TITLES[level]}{whose(arm)}. {'; '.join(said)}."


def update_figure(sweep: Sweep, steps: pd.DataFrame, parts: pd.DataFrame) -> list[Plot]:
    """The figure, or none where no update was measured."""
    if not len(steps) or not len(parts):
        return []
    panels = []
    for arm in arm_cells(sweep):
        by_step, by_part = steps[steps["arm"] == arm], parts[parts["arm"] == arm]
        panels += [_step_panel(sweep, arm, by_step, column) for column in BY_STEP]
        panels += [_part_panel(sweep, arm, by_part, level, column) for column in BY_PART for level in TITLES]
    return [Plot(UPDATES, "What a step does to the weights", UPDATES_CAPTION, tuple(panels))]


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

    said = [
        f"R = {R}: {first_to_last(part[column])}, {other_label} {first_to_last(part[other])}"
        for R, part in of_R.items()
    ]
    title = panel_title(sweep, arm, "by step")
    return Panel(title, f"Line chart of {label} by training step{whose(arm)}. {'; '.join(said)}.", draw)


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
    title = panel_title(sweep, arm, TITLES[level])
    return Panel(title, f"Chart of {BY_PART[column]} {TITLES[level]}{whose(arm)}. {'; '.join(said)}.", draw)
