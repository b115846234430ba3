"""Figures 1-4 as PNG and PDF for print, and panel by panel as SVG for the page.

    fig1  effective rank by step for each R          fig3  held-out accuracy by step and by rollouts used
    fig2  top-1 fraction by step for each R          fig4  effective rank against the number of correct rollouts k

A figure is a list of panels, one an arm (fig3: two), each 3.5 inches wide, a journal's column. R is told by colour (a
colour-blind safe palette), line style and marker at once. Bands and bars are 95% intervals clustered by prompt and
seed, cut at the values a quantity can take.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from grpo_sweeps.report.query import Sweep
from grpo_sweeps.report.table import ABOUT, accuracy_by_step, by_k, by_step
from grpo_sweeps.spectra import null_effective_rank

PANEL = (3.5, 2.6)  # inches: one column of a two-column page
DPI = 200
STEP_WINDOWS = 20
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
DOTTED = (0, (2, 2))  # of what is not measured: the null, the paper's value
MARKERS = ("o", "s", "^", "D", "v", "P")
RC: dict[Any, Any] = {
    "font.size": 8, "axes.labelsize": 9, "axes.titlesize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "legend.fontsize": 8, "pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "grpo_sweeps",
    "axes.edgecolor": "0.3", "grid.color": "0.88", "lines.linewidth": 1.6, "lines.markersize": 4.5,
    "axes.spines.top": False, "axes.spines.right": False, "font.family": "DejaVu Sans",
}  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """One axes: its title, the sentence that stands for it when it cannot be seen, and the function that draws it."""

    title: str
    alt: str
    draw: Callable[[Axes], None]


@dataclass(frozen=True)
class Plot:
    """One figure: file name, caption, panels."""

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Style:
    """How one R is drawn."""

    color: tuple[float, float, float]
    line: Any
    marker: str


def styles(sweep: Sweep) -> dict[int, Style]:
    """The same R looks the same in every figure."""
    Rs = sorted({R for _, R in sweep.cells})
    colours = sns.color_palette("colorblind", max(len(Rs), 1))
    return {R: Style(colours[i], LINES[i % len(LINES)], MARKERS[i % len(MARKERS)]) for i, R in enumerate(Rs)}


def figures(sweep: Sweep) -> list[Plot]:
    """All figures of a sweep, not yet drawn."""
    return [
        _spectral(sweep, "fig1", "Effective rank by training step", "effective_rank", "effective rank"),
        _spectral(sweep, "fig2", "Top-1 fraction by training step", "top1_fraction", "top-1 fraction"),
        _accuracy(sweep),
        _rank_by_k(sweep),
    ]


def _arm_cells(sweep: Sweep) -> dict[str, list[int]]:
    cells: dict[str, list[int]] = {}
    for arm, R in sweep.cells:
        cells.setdefault(arm, []).append(R)
    return cells


def _arm_title(sweep: Sweep, arm: str) -> str:
    return arm if len(_arm_cells(sweep)) > 1 else ""


def _spectral(sweep: Sweep, name: str, title: str, column: str, label: str) -> Plot:
    panels = []
    for arm, Rs in _arm_cells(sweep).items():
        curves = {R: by_step(sweep, arm, R, column, STEP_WINDOWS) for R in Rs}
        bounds = {R: (1.0, float(R)) if column == "effective_rank" else (1.0 / R, 1.0) for R in Rs}

        def draw(ax: Axes, curves: dict[int, pd.DataFrame] = curves, bounds: dict = bounds) -> None:
            for R, curve in curves.items():
                _line(ax, curve, "step", R, styles(sweep)[R], bounds[R])
            if column == "effective_rank":
                ax.axhline(ABOUT, color="0.35", lw=0.9, ls=DOTTED, zorder=1, label="paper: about 2")
            _finish(ax, "training step", label, whole=True)

        panels.append(Panel(_arm_title(sweep, arm), _alt(label, arm, curves), draw))
    caption = (
        f"Mean {label} of the gradient matrix over the measured mixed groups in windows of training steps (at most "
        f"{STEP_WINDOWS}). Bands: 95% intervals clustered by prompt and seed."
    )
    return Plot(name, title, caption, tuple(panels))


def _accuracy(sweep: Sweep) -> Plot:
    panels = []
    for arm, Rs in _arm_cells(sweep).items():
        curves = {R: accuracy_by_step(sweep, arm, R) for R in Rs}
        for x, label in (("step", "training step"), ("rollouts", "rollouts used")):

            def draw(ax: Axes, x: str = x, label: str = label, curves: dict[int, pd.DataFrame] = curves) -> None:
                for R, curve in curves.items():
                    _line(ax, curve, x, R, styles(sweep)[R], (0.0, 1.0))
                _finish(ax, label, "held-out accuracy", whole=True)

            title = ", ".join(t for t in (_arm_title(sweep, arm), f"by {label}") if t)
            panels.append(Panel(title, _alt(f"held-out accuracy by {label}", arm, curves), draw))
    caption = (
        "Held-out accuracy (strict parsing, or flexible where that is the reward; sampled as in training where "
        "samples were drawn, else greedy) by "
        "training step and by rollouts used in training. Bands: 95% intervals clustered by problem and seed. A larger "
        "R uses more rollouts a step, so the two panels rank the R differently."
    )
    return Plot("fig3", "Held-out accuracy", caption, tuple(panels))


def _rank_by_k(sweep: Sweep) -> Plot:
    table = by_k(sweep)
    panels = []
    for arm, Rs in _arm_cells(sweep).items():
        curves = {
            R: table[(table["arm"] == arm) & (table["R"] == R) & (table["groups"] > 0)].rename(
                columns={"effective_rank": "mean", "effective_rank_low": "low", "effective_rank_high": "high"}
            )
            for R in Rs
        }

        def draw(ax: Axes, curves: dict[int, pd.DataFrame] = curves) -> None:
            for R, curve in curves.items():
                _null_curve(ax, R, styles(sweep)[R])
                _bars(ax, curve, R, styles(sweep)[R])
            ax.plot([], [], color="0.35", ls=DOTTED, lw=1.0, marker="o", mfc="white", ms=3.5, label="null 4k(R−k)/R")
            _finish(ax, "correct rollouts k", "effective rank", whole=True)

        panels.append(Panel(_arm_title(sweep, arm), _alt("effective rank by k", arm, curves), draw))
    caption = (
        "Mean effective rank of the gradient matrix against the number k of correct rollouts (filled markers; bars: "
        "95% intervals clustered by prompt and seed). Open markers: orthogonal scores of equal norm, 4k(R−k)/R."
    )
    return Plot("fig4", "Effective rank against correct rollouts", caption, tuple(panels))


def _line(ax: Axes, curve: pd.DataFrame, x: str, R: int, style: Style, bounds: tuple[float, float]) -> None:
    if not len(curve):
        return
    ax.plot(
        curve[x], curve["mean"], color=style.color, ls=style.line, marker=style.marker, label=f"R = {R}",
        markeredgecolor="white", markeredgewidth=0.5,
    )  # fmt: skip
    low, high = curve["low"].astype(float).clip(*bounds), curve["high"].astype(float).clip(*bounds)
    ax.fill_between(curve[x].astype(float), low, high, color=style.color, alpha=0.16, lw=0)


def _bars(ax: Axes, curve: pd.DataFrame, R: int, style: Style) -> None:
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


def _finish(ax: Axes, x: str, y: str, whole: bool) -> None:
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if whole:
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    low, high = ax.get_ylim()
    ax.set_ylim(max(0.0, low), high)
    handles, labels = ax.get_legend_handles_labels()
    if not any(label.startswith("R = ") for label in labels):
        ax.text(0.5, 0.5, "nothing measured", transform=ax.transAxes, ha="center", va="center", color="0.35")
        return
    order = sorted(range(len(labels)), key=lambda i: not labels[i].startswith("R = "))  # what is no R comes last
    ax.legend(
        [handles[i] for i in order], [labels[i] for i in order], loc="lower center", bbox_to_anchor=(0.5, 1.0),
        ncols=_legend_columns(labels), frameon=False, handlelength=2.4, columnspacing=1.0, handletextpad=0.5,
        borderaxespad=0.2,
    )  # fmt: skip


def _legend_columns(labels: Sequence[str]) -> int:
    """As many as fit above axes one column wide: a legend wider than the axes would make the layout shrink them."""
    return min(len(labels), 3 if all(len(label) < 8 for label in labels) else 2)


def _alt(what: str, arm: str, curves: dict[int, pd.DataFrame]) -> str:
    """First and last value of each curve, for readers who cannot see the picture."""
    parts = []
    for R, curve in curves.items():
        mean = curve["mean"].dropna() if "mean" in curve else pd.Series(dtype=float)
        parts.append(f"R = {R}: from {mean.iloc[0]:.2f} to {mean.iloc[-1]:.2f}" if len(mean) else f"R = {R}: no values")
    return f"Line chart of {what}{'' if arm == 'all' else f' for {arm}'}. " + "; ".join(parts) + "."


def _canvas(panels: Sequence[Panel]) -> Figure:
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    fig, axes = plt.subplots(
        lines, columns, figsize=(PANEL[0] * columns, PANEL[1] * lines), squeeze=False, layout="constrained"
    )
    for ax, panel in zip(axes.flat, panels, strict=False):
        panel.draw(ax)
        if panel.title and len(panels) > 1:
            ax.set_title(panel.title, pad=6 + 12 * _legend_lines(ax), wrap=True)
    for ax in list(axes.flat)[len(panels) :]:
        ax.set_visible(False)
    return fig


def render(plot: Plot) -> dict[str, bytes]:
    """{file name: content}: the whole figure as PNG and PDF, each panel as SVG (`fig1_1.svg`)."""
    files: dict[str, bytes] = {}
    with sns.axes_style("whitegrid", rc=RC), plt.rc_context(RC):
        fig = _canvas(plot.panels)
        files[f"{plot.name}.png"] = _saved(fig, "png")
        files[f"{plot.name}.pdf"] = _saved(fig, "pdf")
        plt.close(fig)
        for i, panel in enumerate(plot.panels, start=1):
            fig = _canvas([panel])
            files[f"{plot.name}_{i}.svg"] = _saved(fig, "svg")
            plt.close(fig)
    return files


def _legend_lines(ax: Axes) -> int:
    labels = [text.get_text() for text in legend.get_texts()] if (legend := ax.get_legend()) else []
    return math.ceil(len(labels) / _legend_columns(labels)) if labels else 0


def _saved(fig: Figure, kind: str) -> bytes:
    """The figure's file, without dates in it: the same records give the same bytes."""
    metadata = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}[kind]
    out = io.BytesIO()
    fig.savefig(out, format=kind, dpi=DPI, metadata=metadata, facecolor="white")
    return out.getvalue()
