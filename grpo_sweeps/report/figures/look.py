"""How the figures of a report tell arms and R apart: the style of each R, titles of panels, legends."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.ticker import MaxNLocator

from grpo_sweeps.publish.drawing import LINES, MARKERS, legend_columns
from grpo_sweeps.report.read.arms import ALL
from grpo_sweeps.report.read.query import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Style:
    """How one R is drawn: the styles of that number."""

    number: int

    @property
    def color(self) -> tuple[float, float, float]:
        import seaborn as sns

        found: tuple[float, float, float] = sns.color_palette("colorblind", self.number + 1)[self.number]
        return found

    @property
    def line(self) -> Any:
        return LINES[self.number % len(LINES)]

    @property
    def marker(self) -> str:
        return MARKERS[self.number % len(MARKERS)]


def styles(sweep: Sweep) -> dict[int, Style]:
    """The style of each R, the same in every figure."""
    return {R: Style(i) for i, R in enumerate(sorted({R for _, R in sweep.cells}))}


def arm_cells(sweep: Sweep) -> dict[str, list[int]]:
    """The R of each arm, in the order of Table 1."""
    cells: dict[str, list[int]] = {}
    for arm, R in sweep.cells:
        cells.setdefault(arm, []).append(R)
    return cells


def panel_title(sweep: Sweep, arm: str, what: str = "") -> str:
    """The arm, where there are several, and what a panel shows."""
    return ", ".join(words for words in (arm if len(arm_cells(sweep)) > 1 else "", what) if words)


def whose(arm: str) -> str:
    """ " for ARM" in the sentence that stands for a panel; empty where there is one arm."""
    return "" if arm == ALL else f" for {arm}"


def first_to_last(values: pd.Series, digits: str = ".3g") -> str:
    """The ends of a curve in words; digits: the format of a number."""
    found = values.dropna()
    return f"from {found.iloc[0]:{digits}} to {found.iloc[-1]:{digits}}" if len(found) else "no values"


def curves_in_words(what: str, arm: str, curves: dict[int, pd.DataFrame]) -> str:
    """First and last value of the `mean` of each R, for readers who cannot see the picture."""
    none = pd.Series(dtype=float)
    parts = [f"R = {R}: {first_to_last(curve.get('mean', none), '.2f')}" for R, curve in curves.items()]
    return f"Line chart of {what}{whose(arm)}. {'; '.join(parts)}."


NO_VALUE = "no value"


def without_value(ax: Axes, R: int, style: Style) -> None:
    """Name in the legend an R of which these axes have nothing to draw, so that nobody looks for its curve."""
    ax.plot([], [], color=style.color, ls=style.line, marker=style.marker, label=f"R = {R}: {NO_VALUE}")


def _legend_place(label: str) -> tuple[bool, int]:
    """Sorts labels: R by its number, what is no R last."""
    found = re.match(r"R = (\d+)", label)
    return (False, int(found[1])) if found else (True, 0)


def finish(ax: Axes, x: str, y: str, whole: bool, negative: bool = False) -> None:
    """Set the labels and the legend of axes.

    whole: the x axis counts. negative: values may be below 0.
    """
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if whole:
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        first, last = ax.dataLim.intervalx
        if first == last:  # a single step: one tick, where matplotlib would spread fractions of a step around it
            ax.set_xlim(first - 0.5, last + 0.5)
    low, high = ax.get_ylim()
    ax.set_ylim(low if negative else max(0.0, low), high)
    handles, labels = ax.get_legend_handles_labels()
    if not any(label.startswith("R = ") and not label.endswith(NO_VALUE) for label in labels):
        ax.text(0.5, 0.5, "nothing measured", transform=ax.transAxes, ha="center", va="center", color="0.35")
        return
    order = sorted(range(len(labels)), key=lambda i: _legend_place(labels[i]))
    ax.legend(
        [handles[i] for i in order], [labels[i] for i in order], loc="lower center", bbox_to_anchor=(0.5, 1.0),
        ncols=legend_columns(labels), frameon=False, handlelength=2.4, columnspacing=1.0, handletextpad=0.5,
        borderaxespad=0.2,
    )  # fmt: skip
