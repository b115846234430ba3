"""Ranks against the number k of right rollouts, with their nulls: fig4, and every definition, from `pooled.by_k`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from grpo_sweeps.publish.drawing import DOTTED, Panel, Plot
from grpo_sweeps.report.figures.look import Style, arm_cells, curves_in_words, finish, panel_title, styles, whose
from grpo_sweeps.report.measure.spectral import BELOW, QUANTITIES
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.spectra import null_effective_rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "ranks_by_k"
MOST_ARMS = 3  # that are drawn: six panels each, half a second per panel
NULLS: dict[str, dict[str, Any]] = {
    "null_closed_form": {"ls": DOTTED, "lw": 1.0, "marker": "o", "mfc": "white", "ms": 4.0},
    "null_gaussian": {"ls": "-", "lw": 0.8, "marker": "x", "ms": 4.0},
}
OF_GROUPS: dict[str, tuple[dict[str, Any], str]] = {
    "null_distinct": ({"ls": "", "marker": "x", "ms": 4.0}, "equal texts once"),
    "null_both": ({"ls": "-", "lw": 0.7, "marker": "+", "ms": 6.0}, "norms and texts"),
}
"""Nulls of fig4 that the groups make, with their looks and words."""
WORDS = {"null_closed_form": "orthogonal", "null_gaussian": "Gaussian"}
CAPTION = (
    "The gradient matrix by six definitions: effective rank (sum s)²/sum s², top-1 fraction s₁²/sum s², participation "
    "ratio (sum s²)²/sum s⁴, stable rank sum s²/s₁², entropy rank exp(−sum p log p) with p = s/sum s, numerical rank "
    "(number of s above the precision). Filled: means over the groups with k right rollouts, bars 95% intervals "
    "clustered by prompt and seed. Open, dotted: orthogonal scores of equal norm under group-mean advantages. "
    f"Crosses: Gaussian scores with each group's own spectrum, which {BELOW}. Nulls with the measured norms and the "
    "other four matrices are in the table."
)


NOT_DRAWN = "Figure 4, effective rank against correct rollouts, is not drawn: no measured group has rewards of 0 and 1."


def by_k_figure(sweep: Sweep, table: pd.DataFrame) -> list[Plot]:
    """The figure, or none where no measured group has rewards of 0 and 1."""
    measured = table[table["groups"] > 0] if len(table) else table
    if not len(measured):
        return []
    arms = list(arm_cells(sweep))
    drawn = arms[:MOST_ARMS]
    panels = [_panel(sweep, arm, measured[measured["arm"] == arm], name) for arm in drawn for name in QUANTITIES]
    rest = f" Drawn: the first {len(drawn)} of {len(arms)} arms; by_k.csv has them all." if drawn != arms else ""
    return [Plot(NAME, "Every definition of rank against correct rollouts", CAPTION + rest, tuple(panels))]


def _panel(sweep: Sweep, arm: str, rows: pd.DataFrame, name: str) -> Panel:
    label = name.replace("_", " ").replace("top1", "top-1")
    of_R = {int(str(R)): part for R, part in rows.groupby("R")}
    looks = {R: style for R, style in styles(sweep).items() if R in of_R}

    def draw(ax: Axes) -> None:
        for R, style in looks.items():
            _nulls(ax, of_R[R], name, style)
            _bars(ax, of_R[R], name, style, R)
        for null, look in NULLS.items():
            ax.plot([], [], color="0.35", label=WORDS[null], **look)
        finish(ax, "correct rollouts k", label, whole=True)

    said = []
    for R, part in of_R.items():
        values = part.set_index("k")[name].astype(float)
        most, least = f"{values.max():.2f} (k = {values.idxmax()})", f"{values.min():.2f} (k = {values.idxmin()})"
        said.append(f"R = {R}: most {most}, least {least}")
    title = panel_title(sweep, arm, label)
    return Panel(title, f"Chart of {label} by k{whose(arm)}. {'; '.join(said)}.", draw)


def _bars(ax: Axes, rows: pd.DataFrame, name: str, style: Style, R: int) -> None:
    bounds = (1.0 / R, 1.0) if name == "top1_fraction" else (1.0, float(R))
    mean, low, high = (rows[column].to_numpy(float) for column in (name, f"{name}_low", f"{name}_high"))
    ends = np.nan_to_num([mean - low.clip(*bounds), high.clip(*bounds) - mean]).clip(0)
    ax.errorbar(
        rows["k"], mean, yerr=ends, color=style.color, ls=style.line, marker=style.marker, capsize=2, elinewidth=1,
        label=f"R = {R}", zorder=3,
    )  # fmt: skip


def _nulls(ax: Axes, rows: pd.DataFrame, name: str, style: Style) -> None:
    for null, look in NULLS.items():
        column = null if name == "effective_rank" else f"{null}_{name}"
        ax.plot(rows["k"], rows[column].astype(float), color=style.color, zorder=2, **look)


def rank_by_k_plot(sweep: Sweep, table: pd.DataFrame) -> list[Plot]:
    """fig4: effective rank by k beside its closed form and the nulls of the groups, one panel per arm that has measured
    groups with rewards of 0 and 1; none without such an arm."""
    panels = []
    for arm, Rs in arm_cells(sweep).items():
        curves = {
            R: table[(table["arm"] == arm) & (table["R"] == R) & (table["groups"] > 0)].rename(
                columns={"effective_rank": "mean", "effective_rank_low": "low", "effective_rank_high": "high"}
            )
            for R in Rs
        }
        if not any(map(len, curves.values())):
            continue

        def draw(ax: Axes, curves: dict[int, pd.DataFrame] = curves) -> None:
            for R, curve in curves.items():
                _null_curve(ax, R, styles(sweep)[R])
                _rank_bars(ax, curve, R, styles(sweep)[R])
                for null, (look, _) in OF_GROUPS.items() if len(curve) else ():
                    ax.plot(curve["k"], curve[null].astype(float), color=styles(sweep)[R].color, zorder=2, **look)
            ax.plot([], [], color="0.35", ls=DOTTED, lw=1.0, marker="o", mfc="white", ms=3.5, label="null 4k(R−k)/R")
            for look, words in OF_GROUPS.values():
                ax.plot([], [], color="0.35", label=words, **look)
            finish(ax, "correct rollouts k", "effective rank", whole=True)

        panels.append(Panel(panel_title(sweep, arm), curves_in_words("effective rank by k", arm, curves), draw))
    if not panels:
        return []
    caption = (
        "Mean effective rank of the gradient matrix against the number k of correct rollouts (filled markers; bars: "
        "95% intervals clustered by prompt and seed). Open markers: orthogonal scores of equal norm, 4k(R−k)/R. "
        "Crosses: the same with equal texts counted once; plus signs: with the measured norms as well."
    )
    return [Plot("fig4", "Effective rank against correct rollouts", caption, tuple(panels))]


def _rank_bars(ax: Axes, curve: pd.DataFrame, R: int, style: Style) -> None:
    if not len(curve):
        return
    mean = curve["mean"].to_numpy(float)
    low = np.nan_to_num(mean - curve["low"].to_numpy(float).clip(1.0, R))
    high = np.nan_to_num(curve["high"].to_numpy(float).clip(1.0, R) - mean)
    ax.errorbar(
        curve["k"], mean, yerr=[low.clip(0), high.clip(0)], color=style.color, ls=style.line, marker=style.marker,
        capsize=2, elinewidth=1, label=f"R = {R}",
    )  # fmt: skip


def _null_curve(ax: Axes, R: int, style: Style) -> None:
    k = np.linspace(1, R - 1, 60) if R > 2 else np.array([1.0])
    ax.plot(k, null_effective_rank(k, R), color=style.color, ls=DOTTED, lw=1.0, alpha=0.9)
    whole = np.arange(1, R)
    ax.plot(whole, null_effective_rank(whole, R), color=style.color, ls="", marker=style.marker, mfc="white", ms=4)
