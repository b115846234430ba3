"""How every figure looks: panels, line styles and markers, legends, and the files that a figure becomes.

A figure is a list of panels, each 3.5 inches wide, a journal's column. It becomes PNG and PDF for print, and one SVG
per panel for the page. What draws is imported where it draws: a report whose figures are kept needs none of it.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib

from grpo_sweeps.text import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

matplotlib.use("Agg")

PANEL = (3.5, 2.6)  # inches: one column of a two-column page
TITLE_WIDTH = 42  # characters of a panel's title side by side
DPI = 200
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
DOTTED = (0, (2, 2))  # of what is not measured: the null, the paper's value
MARKERS = ("o", "s", "^", "D", "v", "P")
RC: dict[Any, Any] = {
    "font.size": 8, "axes.labelsize": 9, "axes.titlesize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "legend.fontsize": 8, "pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "grpo_sweeps",
    "axes.edgecolor": "0.3", "grid.color": "0.88", "lines.linewidth": 1.6, "lines.markersize": 4.5,
    "text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False, "font.family": "DejaVu Sans",
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


def legend_columns(labels: Sequence[str]) -> int:
    """How many labels fit side by side above axes one column wide; a wider legend would make the layout shrink them."""
    return min(len(labels), 3 if all(len(label) < 8 for label in labels) else 2)


def _canvas(panels: Sequence[Panel]) -> Figure:
    import matplotlib.pyplot as plt
    from matplotlib.text import Text

    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    fig, axes = plt.subplots(
        lines, columns, figsize=(PANEL[0] * columns, PANEL[1] * lines), squeeze=False, layout="constrained"
    )
    for ax, panel in zip(axes.flat, panels, strict=False):
        panel.draw(ax)
        if panel.title and len(panels) > 1:
            # not by wrap=True, with which the layout would lose the labels on the left
            title = textwrap.fill(panel.title, TITLE_WIDTH)
            ax.set_title(title, pad=6 + 12 * _legend_lines(ax))
    for ax in list(axes.flat)[len(panels) :]:
        ax.set_visible(False)
    for text in fig.findobj(Text):  # names of arms and models
        text.set_text(visible(text.get_text()))
    fig.draw_without_rendering()
    fig.set_layout_engine("none")  # the layout is found: each file would find it twice more
    return fig


def render(plot: Plot) -> dict[str, bytes]:
    """{file name: content}: the whole figure as PNG and PDF, each panel as SVG (`fig1_1.svg`)."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    files: dict[str, bytes] = {}
    with sns.axes_style("whitegrid", rc=RC), plt.rc_context(RC):
        whole = _canvas(plot.panels)
        files[f"{plot.name}.png"] = _saved(whole, "png")
        files[f"{plot.name}.pdf"] = _saved(whole, "pdf")
        for i, panel in enumerate(plot.panels, start=1):
            fig = whole if len(plot.panels) == 1 else _canvas([panel])
            files[f"{plot.name}_{i}.svg"] = _saved(fig, "svg")
            plt.close(fig)
        plt.close(whole)
    return files


def rendered(plots: Iterable[Plot]) -> dict[str, bytes]:
    """{file name: content} of several figures, as `render` gives them for one."""
    return {name: content for plot in plots for name, content in render(plot).items()}


def _legend_lines(ax: Axes) -> int:
    labels = [text.get_text() for text in legend.get_texts()] if (legend := ax.get_legend()) else []
    return math.ceil(len(labels) / legend_columns(labels)) if labels else 0


def _saved(fig: Figure, kind: str) -> bytes:
    """The figure's file, without dates in it: the same records give the same bytes."""
    metadata = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}[kind]
    out = io.BytesIO()
    fig.savefig(out, format=kind, dpi=DPI, metadata=metadata, facecolor="white")
    return out.getvalue()
