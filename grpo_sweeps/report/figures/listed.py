"""The figures of a sweep.

    fig1  effective rank by step for each R          fig3  held-out accuracy by step and by rollouts used
    fig2  top-1 fraction by step for each R          fig4  effective rank against the number of correct rollouts k
    fig5  effective rank and share of gradient energy by depth and kind of parameter, where `analysis.by` kept them
          (`layer_figure`)
    ranks_by_k    every definition of rank against k (`by_k_figure`)
    rank_change   what of the effective rank's change over training is k and what is not (`longitudinal_figure`)
    updates       what steps do to the weights, where `analysis.update_every` measured them (`update_figure`)

One panel an arm (fig3 and rank_change: two, fig5: four, updates and ranks_by_k: six); how they look is in `drawing`.
Bands and bars are 95% intervals clustered by prompt and seed, cut at the values a quantity can take.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from grpo_sweeps.publish.drawing import DOTTED, Panel, Plot, Style, arm_cells, arm_title, finish, styles
from grpo_sweeps.report.figures.by_k import by_k_figure
from grpo_sweeps.report.figures.layers import layer_figure
from grpo_sweeps.report.figures.rank_change import longitudinal_figure
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.tables.pooled import ABOUT, accuracy_by_step, by_step
from grpo_sweeps.report.update_figure import update_figure
from grpo_sweeps.spectra import null_effective_rank

STEP_WINDOWS = 20


def figures(
    sweep: Sweep,
    by_k: pd.DataFrame,
    layers: pd.DataFrame,
    steps: pd.DataFrame | None = None,
    parts: pd.DataFrame | None = None,
) -> list[Plot]:
    """All figures of a sweep, not yet drawn. `by_k` is `table.by_k`'s, `layers` `layer_table`'s, `steps` and `parts`
    are of `updates`; what is drawn of them is there where they have rows."""
    return [
        _spectral(sweep, "fig1", "Effective rank by training step", "effective_rank", "effective rank"),
        _spectral(sweep, "fig2", "Top-1 fraction by training step", "top1_fraction", "top-1 fraction"),
        _accuracy(sweep),
        _rank_by_k(sweep, by_k),
        *layer_figure(sweep, layers),
        *by_k_figure(sweep, by_k),
        *longitudinal_figure(sweep),
        *(update_figure(sweep, steps, parts) if steps is not None and parts is not None else ()),
    ]


def _spectral(sweep: Sweep, name: str, title: str, column: str, label: str) -> Plot:
    panels = []
    for arm, Rs in arm_cells(sweep).items():
        curves = {R: by_step(sweep, arm, R, column, STEP_WINDOWS) for R in Rs}
        bounds = {R: (1.0, float(R)) if column == "effective_rank" else (1.0 / R, 1.0) for R in Rs}

        def draw(ax: Axes, curves: dict[int, pd.DataFrame] = curves, bounds: dict = bounds) -> None:
            for R, curve in curves.items():
                _line(ax, curve, "step", R, styles(sweep)[R], bounds[R])
            if column == "effective_rank":
                ax.axhline(ABOUT, color="0.35", lw=0.9, ls=DOTTED, zorder=1, label="paper: about 2")
            finish(ax, "training step", label, whole=True)

        panels.append(Panel(arm_title(sweep, arm), _alt(label, arm, curves), draw))
    caption = (
        f"Mean {label} of the gradient matrix over the measured mixed groups in windows of training steps (at most "
        f"{STEP_WINDOWS}). Bands: 95% intervals clustered by prompt and seed."
    )
    return Plot(name, title, caption, tuple(panels))


def _accuracy(sweep: Sweep) -> Plot:
    panels = []
    for arm, Rs in arm_cells(sweep).items():
        curves = {R: accuracy_by_step(sweep, arm, R) for R in Rs}
        for x, label in (("step", "training step"), ("rollouts", "rollouts used")):

            def draw(ax: Axes, x: str = x, label: str = label, curves: dict[int, pd.DataFrame] = curves) -> None:
                for R, curve in curves.items():
                    _line(ax, curve, x, R, styles(sweep)[R], (0.0, 1.0))
                finish(ax, label, "held-out accuracy", whole=True)

            title = ", ".join(t for t in (arm_title(sweep, arm), f"by {label}") if t)
            panels.append(Panel(title, _alt(f"held-out accuracy by {label}", arm, curves), draw))
    caption = (
        "Held-out accuracy (strict parsing, or flexible where that is the reward; sampled as in training where "
        "samples were drawn, else greedy) by "
        "training step and by rollouts used in training. Bands: 95% intervals clustered by problem and seed. A larger "
        "R uses more rollouts a step, so the two panels rank the R differently."
    )
    return Plot("fig3", "Held-out accuracy", caption, tuple(panels))


def _rank_by_k(sweep: Sweep, table: pd.DataFrame) -> Plot:
    panels = []
    for arm, Rs in arm_cells(sweep).items():
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
            finish(ax, "correct rollouts k", "effective rank", whole=True)

        panels.append(Panel(arm_title(sweep, arm), _alt("effective rank by k", arm, curves), draw))
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


def _alt(what: str, arm: str, curves: dict[int, pd.DataFrame]) -> str:
    """First and last value of each curve, for readers who cannot see the picture."""
    parts = []
    for R, curve in curves.items():
        mean = curve["mean"].dropna() if "mean" in curve else pd.Series(dtype=float)
        parts.append(f"R = {R}: from {mean.iloc[0]:.2f} to {mean.iloc[-1]:.2f}" if len(mean) else f"R = {R}: no values")
    return f"Line chart of {what}{'' if arm == 'all' else f' for {arm}'}. " + "; ".join(parts) + "."
