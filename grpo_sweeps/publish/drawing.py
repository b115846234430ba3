"""How every figure of the report looks: panels, the style of each R, legends, and the files a figure becomes.

A figure is a list of panels, each 3.5 inches wide, a journal's column; PNG and PDF for print, and panel by panel SVG
for the page. R is told by colour (a colour-blind safe palette), line style and marker at once.
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
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from grpo_sweeps.report.read.query import Sweep

PANEL = (3.5, 2.6)  # inches: one column of a two-column page
DPI = 200
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


def arm_cells(sweep: Sweep) -> dict[str, list[int]]:
    cells: dict[str, list[int]] = {}
    for arm, R in sweep.cells:
        cells.setdefault(arm, []).append(R)
    return cells


def arm_title(sweep: Sweep, arm: str) -> str:
    return arm if len(arm_cells(sweep)) > 1 else ""


def finish(ax: Axes, x: str, y: str, whole: bool, negative: bool = False) -> None:
    """Labels and the legend; `whole`: the x axis counts, `negative`: values may be below 0."""
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if whole:
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    low, high = ax.get_ylim()
    ax.set_ylim(low if negative else max(0.0, low), high)
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
