"""Error of the gradient by group size: predicted, with the best size, and found in the pools of a fixed policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from grpo_sweeps.maths.ustatistics import error_by_rollouts
from grpo_sweeps.publish.drawing import LINES, MARKERS, Panel, Plot
from grpo_sweeps.report.design.best_size import BestSize, levels, shown
from grpo_sweeps.report.design.pool import PoolStudy, found_words
from grpo_sweeps.report.figures.look import Style, finish, panel_title, styles
from grpo_sweeps.report.measure.pool import ESTIMATORS
from grpo_sweeps.report.read.query import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def best_size_figure(sweep: Sweep, sizes: list[BestSize]) -> list[Plot]:
    """One panel per arm whose V's are known for some R; none without."""
    panels = []
    for arm in dict.fromkeys(one.arm for one in sizes):
        known = [one for one in sizes if one.arm == arm and one.known]
        here = [one for one in sizes if one.arm == arm and "error_here" in one.values]
        if known:
            panels.append(Panel(panel_title(sweep, arm), _sizes_in_words(known), _drawing(sweep, known, here)))
    if not panels:
        return []
    caption = (
        "N times the mean squared error of the leave-one-out gradient against the group size R, at a fixed number N of "
        "rollouts, predicted from what the runs of each R (colour) measured. Bands: 95%, steps drawn with replacement. "
        "Filled: R*, with its interval where the axis holds it. Open: measured at the runs' own R from the norms of "
        "the gradients, without the formula. Along the training, so each curve has its own policies."
    )
    return [Plot("best_size", "Error of the gradient by group size", caption, tuple(panels))]


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


def _sizes_in_words(known: list[BestSize]) -> str:
    parts = [f"R = {one.R}: R* {shown(one, 'best_R')}" for one in known]
    return f"Curves of the predicted error of the gradient by group size. {'; '.join(parts)}."


def pool_figure(sweep: Sweep, studies: list[PoolStudy]) -> list[Plot]:
    """Two panels per arm and R: error by size with the predicted curve's R*, and cosine by size."""
    panels = []
    for study in studies:
        title = panel_title(sweep, study.arm, f"pools of {study.R}")
        for what, draw in (("error", _draw_error), ("cosine", _draw_cosine)):

            def drawing(ax: Axes, study: PoolStudy = study, draw=draw) -> None:  # type: ignore[no-untyped-def]
                draw(ax, sweep, study)

            panels.append(
                Panel(f"{title}: {what}", f"{what} by size of the sub-group. {found_words(study, True)}", drawing)
            )
    if not panels:
        return []
    caption = (
        "Sub-groups of R' rollouts out of the pools of a fixed policy. Error: N times the mean squared error of the "
        "leave-one-out gradient at N rollouts, with 95% bars by drawing steps with replacement; dashed: R* by the "
        "formula. Cosine of one group's gradient with its prompt's, by estimator."
    )
    return [Plot("pool", "Group sizes at a fixed policy", caption, tuple(panels))]


def _draw_error(ax: Axes, sweep: Sweep, study: PoolStudy) -> None:
    rows = study.table[study.table["estimator"] == "leave-one-out"].dropna(subset=["error"])
    style = styles(sweep)[study.R]
    if len(rows):
        known = rows[["error_low", "error_high"]].notna().all(axis=1).all()
        bars = [rows["error"] - rows["error_low"], rows["error_high"] - rows["error"]] if known else None
        ax.errorbar(
            rows["size"], rows["error"], yerr=None if bars is None else [b.clip(lower=0) for b in bars],
            color=style.color, marker=style.marker, ls=style.line, capsize=2, elinewidth=1, label=f"R = {study.R}",
        )  # fmt: skip
        best = study.predicted.values.get("best_R", math.inf)
        if best <= study.R:
            ax.axvline(best, color="0.35", lw=0.9, ls="--", label="R* by the formula")
    finish(ax, "size R' of the sub-group", "N × mean squared error", whole=True)


def _draw_cosine(ax: Axes, sweep: Sweep, study: PoolStudy) -> None:
    style = styles(sweep)[study.R]
    for i, estimator in enumerate(e for e in ESTIMATORS if e != "group mean"):  # which is leave-one-out times a factor
        rows: pd.DataFrame = study.table[study.table["estimator"] == estimator].dropna(subset=["cosine"])
        if len(rows):
            label = f"R = {study.R}, {estimator}"
            ax.plot(rows["size"], rows["cosine"], color=style.color, ls=LINES[i], marker=MARKERS[i], label=label)
    finish(ax, "size R' of the sub-group", "cosine", whole=True)
