"""The best group size as the report shows it: a section of the page and a figure."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes

from grpo_sweeps.maths.ustatistics import error_by_rollouts, near_best
from grpo_sweeps.publish.drawing import Panel, Plot, Style, arm_title, finish, styles
from grpo_sweeps.report.claims.finding import figures
from grpo_sweeps.report.design.best_size import DECIDED, BestSize, levels
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.section import Section

NAME = "best_size"
WORDS = (
    "At a fixed number N of rollouts, N times the mean squared error of the leave-one-out gradient is R V_between + "
    "E V1 + E V2/(R - 1) (arXiv 2603.01162), which is least at R* = 1 + sqrt(E V2/V_between). The constants are "
    "unbiased estimates from each group's rewards and Gram, groups of equal rewards counted as the zeros they are, and "
    "from the norm of each step's whole gradient before clipping.",
    "The policy moves while it is measured: every value is an average along the training of its row. Intervals: 95%, "
    "steps drawn with replacement; they do not cover differences between training runs. A smaller error of the "
    "gradient is not yet faster learning.",
)
LEFT_OUT = (
    "Nothing is left out for want of a Gram: a group of equal rewards is 0 in all three estimates whatever its scores. "
    "R* is never below 1 + sqrt 2, because E V2 >= 2 V_between for every policy; noise below it is moved there."
)


def best_size_section(sizes: list[BestSize]) -> Section:
    """The table of the page, a row an arm and R."""
    arms = len({one.arm for one in sizes}) > 1
    header = (
        "R",
        "steps",
        "||E grad J||²",
        "V_between",
        "E V1",
        "E V2",
        "R*",
        "within 5%",
        "signal to noise",
        "verdict",
    )
    rows = [(*((one.arm,) if arms else ()), *_row(one)) for one in sizes]
    skipped = sum(one.left_out for one in sizes)
    after = (
        LEFT_OUT,
        *((f"{skipped} steps with a mixed group that was not measured are left out.",) if skipped else ()),
    )
    return Section(
        NAME, "Best group size", WORDS, (*(("arm",) if arms else ()), *header), tuple(rows), after, ("best_size.csv",)
    )


def _row(one: BestSize) -> tuple[str, ...]:
    near = near_best(*(one.values[n] for n in ("V1", "V2", "V_between"))) if one.known else (math.nan, math.nan)
    names = ("signal_of_mean", "V_between", "V1", "V2")
    verdict = one.verdict if one.verdict == DECIDED else f"{one.verdict}: {one.reason}"
    return (
        str(one.R), str(one.steps), *(shown(one, name) for name in names), shown(one, "best_R"),
        "–" if math.isnan(near[0]) else f"{near[0]:.0f} to {_end(near[1])}", shown(one, "snr"), verdict,
    )  # fmt: skip


def shown(one: BestSize, name: str) -> str:
    """A value with its interval, infinite ends in words."""
    value = one.values.get(name, math.nan)
    low, high = one.interval(name)
    if math.isnan(value):
        return "–"
    if math.isfinite(value) and math.isfinite(low) and math.isfinite(high):
        return figures(value, low, high)
    ends = f" [{_end(low)}, {_end(high)}]" if not math.isnan(low) else ""
    return f"{_end(value)}{ends}"


def _end(value: float) -> str:
    return "no upper end" if math.isinf(value) else f"{value:.3g}"


def best_size_figure(sweep: Sweep, sizes: list[BestSize]) -> list[Plot]:
    """One panel an arm whose V's are known for some R; none without."""
    panels = []
    for arm in dict.fromkeys(one.arm for one in sizes):
        known = [one for one in sizes if one.arm == arm and one.known]
        here = [one for one in sizes if one.arm == arm and "error_here" in one.values]
        if known:
            panels.append(Panel(arm_title(sweep, arm), _alt(known), _drawing(sweep, known, here)))
    if not panels:
        return []
    caption = (
        "N times the mean squared error of the leave-one-out gradient against the group size R, at a fixed number N of "
        "rollouts, predicted from what the runs of each R (colour) measured. Bands: 95%, steps drawn with replacement. "
        "Filled: R*, with its interval where the axis holds it. Open: measured at the runs' own R from the norms of "
        "the gradients, without the formula. Along the training, so each curve has its own policies."
    )
    return [Plot(NAME, "Error of the gradient by group size", caption, tuple(panels))]


def _drawing(sweep: Sweep, known: list[BestSize], here: list[BestSize]) -> Callable[[Axes], None]:
    last = max(16, 2 * max(one.R for one in known))

    def draw(ax: Axes) -> None:
        x = np.geomspace(2, last, 80)
        for one in known:
            _curve(ax, one, x, styles(sweep)[one.R])
        for one in here:
            style = styles(sweep)[one.R]
            label = "" if one.known else f"R = {one.R}"
            y = one.values["error_here"]
            ax.plot([one.R], [y], color=style.color, marker=style.marker, mfc="white", ls="", label=label)
        ax.set_xscale("log", base=2)
        ax.set_xticks([2**i for i in range(1, int(math.log2(last)) + 1)])
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        finish(ax, "group size R", "N × mean squared error", whole=False)

    return draw


def _curve(ax: Axes, one: BestSize, x: np.ndarray, style: Style) -> None:
    V = [one.values[n] for n in ("V1", "V2", "V_between")]
    ax.plot(x, error_by_rollouts(x, *V), color=style.color, ls=style.line, label=f"R = {one.R}")
    if one.draws:
        drawn = error_by_rollouts(x, *(one.draws[n][:, None] for n in ("V1", "V2", "V_between")))
        ax.fill_between(x, *np.quantile(drawn, levels(one.steps), axis=0), color=style.color, alpha=0.16, lw=0)
    best = one.values["best_R"]
    if best > x[-1]:
        return
    y = float(error_by_rollouts(best, *V))
    low, high = one.interval("best_R")
    if not math.isnan(low):
        ax.plot([low, min(high, x[-1])], [y, y], color=style.color, lw=1.0)
    ax.plot([best], [y], color=style.color, marker=style.marker, ms=6, ls="")


def _alt(known: list[BestSize]) -> str:
    parts = [f"R = {one.R}: R* {shown(one, 'best_R')}" for one in known]
    return f"Curves of the predicted error of the gradient by group size. {'; '.join(parts)}."
