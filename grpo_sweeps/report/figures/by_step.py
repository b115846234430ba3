"""Figures by training step: how training went, which a GRPO user looks at first; signal and noise of the gradient where
they were logged; fig1 to fig3, effective rank, top-1 fraction, and accuracy and reward on held-out problems.

The first two are drawn from `logged.curve_table`. Bands are 95% intervals, cut at the values a quantity can take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from grpo_sweeps.maths.intervals import POSITIVE, SHARE
from grpo_sweeps.paper import ABOUT_TWO
from grpo_sweeps.publish.drawing import DOTTED, Panel, Plot
from grpo_sweeps.report.figures.look import (
    Style,
    arm_cells,
    curves_in_words,
    finish,
    first_to_last,
    panel_title,
    styles,
    whose,
    without_value,
)
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.tables.pooled import accuracy_by_step, by_step, evaluation_in_words, unjudged_arms

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME, NOISE = "curves", "noise"
MOST_ARMS = 3  # that are drawn: six panels each, half a second per panel
MARKS = 12  # markers along a curve, at most
CAPTION = (
    "Cut completions reached the limit of tokens. Silent groups have equal rewards, so that under a group baseline "
    "they teach nothing: all right with a reward of 1 or more (filled), all wrong with 0 or less (open, dotted, no "
    "band){otherwise}. Entropy: mean of −log π over the sampled tokens. Gradient norm: of the step's gradient, before "
    "clipping. "
)
OTHERWISE = ", equal otherwise with any other reward, such as 0.5 (half filled, dashed, no band)"
NOISE_CAPTION = (
    "With m the estimate of the squared mean gradient of one group, from products of different groups of a step alone, "
    "and v that of its variance, each averaged over the last 20 steps: signal to noise is m G/v for G groups per step; "
    "noise scale v/m, the groups per step at which noise and signal are of one size (arXiv 1812.06162). Logarithmic. "
    "Left out where m is not above 0, so that where noise rules what is drawn is too favourable. "
)
BANDS = " Bands: 95% intervals clustered by seed (none with one or two), cut where they would flatten the curves."
STEP_WINDOWS = 20


@dataclass(frozen=True)
class Drawn:
    """One panel: its title, the unit on its axis, the values it can take (`whole`: the axis shows them all), further
    quantities, each with a look of its own (`LOOKS`), and the names of all of them."""

    title: str
    unit: str
    bounds: tuple[float, float]
    others: tuple[str, ...] = ()
    names: tuple[str, ...] = ("",)
    log: bool = False
    whole: bool = False


TRAINING = {
    "reward": Drawn("reward", "mean reward", (-np.inf, np.inf)),
    "mean_length": Drawn("completion length", "tokens", POSITIVE),
    "entropy": Drawn("entropy", "nats per token", POSITIVE),
    "cut_share": Drawn("cut completions", "share of completions", SHARE, whole=True),
    "all_right": Drawn(
        "silent groups", "share of groups", SHARE, ("all_wrong",), ("all right", "all wrong"), whole=True
    ),
    "grad_norm": Drawn("gradient norm", "norm before clipping", POSITIVE),
}
LOOKS: tuple[dict[str, Any], ...] = (
    {},
    {"ls": DOTTED, "lw": 1.0, "mfc": "white"},
    {"ls": "--", "lw": 1.0, "fillstyle": "bottom", "markerfacecoloralt": "white"},
)
"""Of the quantities of one panel beside the style of their R: filled, open and dotted, half filled and dashed."""
SIGNAL = {
    "snr": Drawn("signal to noise", "m G / v", POSITIVE, log=True),
    "noise_scale": Drawn("noise scale", "groups", POSITIVE, log=True),
}


def curves_figures(sweep: Sweep, table: pd.DataFrame) -> list[Plot]:
    """The figure of training, none without a step, and that of signal and noise where a run has logged them."""
    if not len(table):
        return []
    binary = len(sweep.groups) > 0 and bool(sweep.groups["binary"].astype(bool).all())
    training = TRAINING | ({"reward": replace(TRAINING["reward"], bounds=SHARE)} if binary else {})
    otherwise = bool((table["equal_otherwise"] > 0).any())
    if otherwise:
        silent = training["all_right"]
        others, names = (*silent.others, "equal_otherwise"), (*silent.names, "equal otherwise")
        training = training | {"all_right": replace(silent, others=others, names=names)}
    caption = CAPTION.format(otherwise=OTHERWISE if otherwise else "")
    plots = [_plot(sweep, table, NAME, "How training went", training, caption)]
    if table["snr"].notna().any():
        plots.append(_plot(sweep, table, NOISE, "Signal and noise of the gradient", SIGNAL, NOISE_CAPTION))
    return plots


def _plot(
    sweep: Sweep, table: pd.DataFrame, name: str, title: str, drawn: Mapping[str, Drawn], caption: str
) -> Plot:  # fmt: skip
    arms = list(arm_cells(sweep))
    shown = arms[:MOST_ARMS]
    panels = []
    for arm in shown:
        panels += [_panel(sweep, arm, table[table["arm"] == arm], column, drawn[column]) for column in drawn]
    rest = f" Drawn: the first {len(shown)} of {len(arms)} arms; curves.csv has them all." if shown != arms else ""
    return Plot(name, title, caption + points_in_words(table) + BANDS + rest, tuple(panels))


def points_in_words(table: pd.DataFrame) -> str:
    """What one point of a curve stands for."""
    widths = (table["last_step"] - table["first_step"] + 1).groupby([table["arm"], table["R"]]).max()
    least, most = int(widths.min()), int(widths.max())
    if most == 1:
        return "A point is one step, the mean over runs."
    steps = str(most) if least == most else f"{least} to {most}"
    return f"A point is the mean over {steps} successive steps, then over runs."


def _panel(sweep: Sweep, arm: str, rows: pd.DataFrame, column: str, drawn: Drawn) -> Panel:
    of_R = {int(str(R)): part for R, part in rows.groupby("R")}
    looks = {R: style for R, style in styles(sweep).items() if R in of_R and of_R[R][column].notna().any()}
    columns = [column, *drawn.others]

    def draw(ax: Axes) -> None:
        if drawn.log:
            ax.set_yscale("log")
        for R in [R for R in of_R if R not in looks]:
            without_value(ax, R, styles(sweep)[R])
        for R, style in looks.items():
            for other, look in zip(drawn.others, LOOKS[1:], strict=False):
                _curve(ax, of_R[R], other, style, drawn.bounds, "", look)
            _curve(ax, of_R[R], column, style, drawn.bounds, f"R = {R}")
        for name, look in zip(drawn.names, LOOKS, strict=False):
            if name:
                ax.plot([], [], color="0.35", marker="o", ms=3.5, label=name, **look)
        if looks:
            _limits(ax, [of_R[R] for R in looks], columns, drawn)
        finish(ax, "training step", drawn.unit, whole=True, negative=True)

    said = []
    for R, part in of_R.items():
        ends = [
            " ".join(t for t in (name, first_to_last(part[c])) if t)
            for c, name in zip(columns, drawn.names, strict=False)
        ]
        said.append(f"R = {R}: {', '.join(ends)}")
    title = panel_title(sweep, arm, drawn.title)
    return Panel(title, f"Line chart of {drawn.title} by training step{whose(arm)}. {'; '.join(said)}.", draw)


def _curve(
    ax: Axes, rows: pd.DataFrame, column: str, style: Style, bounds: tuple[float, float], label: str,
    other: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """other: one of `LOOKS`, for a curve that is not the first of its panel, below it and without a band."""
    rows = rows[rows[column].notna()]
    x, mean = rows["step"].to_numpy(float), rows[column].to_numpy(float)
    look = {"ls": style.line, "mec": "white", "mew": 0.5, "label": label, "zorder": 3}
    if other is not None:
        look = {"ms": 4.5, "zorder": 2, **other}
    every = max(1, int(np.ceil(len(x) / MARKS)))
    ax.plot(x, mean, color=style.color, marker=style.marker, markevery=every, **look)
    low, high = (rows[f"{column}_{end}"].to_numpy(float).clip(*bounds) for end in ("low", "high"))
    if other is None and np.isfinite(low).any():
        ax.fill_between(x, low, high, color=style.color, alpha=0.16, lw=0)


def _limits(ax: Axes, curves: Sequence[pd.DataFrame], columns: Sequence[str], drawn: Drawn) -> None:
    """The axis follows the means: a band reaches at most as far beyond them as they reach themselves."""
    if drawn.whole:
        ax.set_ylim(-0.03, 1.03)
        return
    means = np.concatenate([rows[c].dropna().to_numpy(float) for rows in curves for c in columns])
    ends = np.concatenate([rows[f"{c}_{end}"].dropna() for rows in curves for c in columns for end in ("low", "high")])
    scale, back = (np.log10, lambda y: 10.0**y) if drawn.log else (lambda y: y, lambda y: y)
    ends = ends[ends > 0] if drawn.log else ends.clip(*drawn.bounds)
    means, ends = scale(means), scale(ends)
    bottom, top = means.min(), means.max()
    if not drawn.log and bottom == top == 0 and not ends.any():
        ax.set_ylim(-0.03, 1.03)
        return
    reach = max(top - bottom, 0.1 if drawn.log else 0.05 * abs(top))
    low = max(min([bottom, *ends]), bottom - reach)
    high = min(max([top, *ends]), top + reach)
    room = 0.05 * max(high - low, reach)
    ax.set_ylim(back(low - room), back(high + room))
    if drawn.log:
        ax.yaxis.set_major_locator(LogLocator(numticks=6, subs=(1.0, 2.0, 5.0) if high - low < 2 else (1.0,)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())


def spectral_plot(sweep: Sweep, name: str, title: str, column: str, label: str) -> Plot:
    """fig1 or fig2: a quantity of the gradient matrix by training step, one panel per arm."""
    panels = []
    for arm, Rs in arm_cells(sweep).items():
        curves = {R: by_step(sweep, arm, R, column, STEP_WINDOWS) for R in Rs}
        bounds = {R: (1.0, float(R)) if column == "effective_rank" else (1.0 / R, 1.0) for R in Rs}

        def draw(ax: Axes, curves: dict[int, pd.DataFrame] = curves, bounds: dict = bounds) -> None:
            for R, curve in curves.items():
                _line(ax, curve, "step", R, styles(sweep)[R], bounds[R])
            if column == "effective_rank":
                ax.axhline(ABOUT_TWO, color="0.35", lw=0.9, ls=DOTTED, zorder=1, label="paper: about 2")
            finish(ax, "training step", label, whole=True)

        panels.append(Panel(panel_title(sweep, arm), curves_in_words(label, arm, curves), draw))
    caption = (
        f"Mean {label} of the gradient matrix over the measured mixed groups in windows of training steps (at most "
        f"{STEP_WINDOWS}). Bands: 95% intervals clustered by prompt and seed."
    )
    return Plot(name, title, caption, tuple(panels))


def heldout_plot(sweep: Sweep, curves: pd.DataFrame | None = None) -> list[Plot]:
    """fig3: held-out accuracy by step and by rollouts used, and the reward on these problems beside that in training,
    of each arm that was evaluated; none without such an arm.

    An arm whose task has no verdicts has the reward in both. curves: `logged.curve_table`, for the training reward.
    """
    panels: list[Panel] = []
    unjudged, rewards, accuracies = unjudged_arms(sweep), False, False
    for arm, Rs in arm_cells(sweep).items():
        own = {R: accuracy_by_step(sweep, arm, R, reward=True) for R in Rs}
        judged = {} if arm in unjudged else {R: accuracy_by_step(sweep, arm, R) for R in Rs}
        rewarded = any(map(len, own.values()))
        if any(map(len, judged.values())):
            accuracies = True
            panels += [_heldout(sweep, arm, judged, x, "held-out accuracy") for x in ("step", "rollouts")]
        if rewarded:
            rewards = True
            panels.append(_heldout(sweep, arm, own, "step", REWARD, _training_reward(curves, arm)))
        if rewarded and not judged:
            panels.append(_heldout(sweep, arm, own, "rollouts", REWARD))
    if not panels:
        return []
    said = f" {'' if unjudged else OWN_REWARD}{TRAINING_REWARD}" if rewards else ""
    caption = f"{evaluation_in_words(sweep)}{said} {HELDOUT}"
    shown = [name for name, there in (("accuracy", accuracies), ("reward", rewards)) if there]
    return [Plot("fig3", f"Held-out {' and '.join(shown)}", caption, tuple(panels))]


NOT_DRAWN = "Figure 3, accuracy or reward on held-out problems, is not drawn: no run was evaluated on any."
REWARD = "held-out reward"
OWN_REWARD = "Held-out reward: the run's own, on the same problems. "
TRAINING_REWARD = "Dotted: the mean reward of the training rollouts."
HELDOUT = (
    "Greedy where no samples were drawn. Bands: 95% intervals clustered by problem and seed. A larger R uses more "
    "rollouts per step, so that panels by step and by rollouts rank the R differently."
)
X_LABELS = {"step": "training step", "rollouts": "rollouts used"}


def _training_reward(curves: pd.DataFrame | None, arm: str) -> dict[int, pd.DataFrame]:
    """R -> step and reward in training."""
    if curves is None or not len(curves):
        return {}
    own = curves[(curves["arm"] == arm) & curves["reward"].notna()]
    return {int(str(R)): part for R, part in own.groupby("R")}


def _heldout(
    sweep: Sweep, arm: str, curves: dict[int, pd.DataFrame], x: str, what: str,
    training: Mapping[int, pd.DataFrame] | None = None,
) -> Panel:  # fmt: skip
    """One panel of fig3. training: R -> the reward in training, drawn dotted."""
    bounds = (-np.inf, np.inf) if what == REWARD else (0.0, 1.0)

    def draw(ax: Axes) -> None:
        for R, curve in curves.items():
            style = styles(sweep)[R]
            if training and R in training:
                ax.plot(training[R]["step"], training[R]["reward"], color=style.color, ls=DOTTED, lw=1.0, zorder=1)
            _line(ax, curve, x, R, style, bounds)
        if training:
            ax.plot([], [], color="0.35", ls=DOTTED, lw=1.0, label="in training")
        finish(ax, X_LABELS[x], what, whole=True, negative=what == REWARD)

    title = panel_title(sweep, arm, f"{what}, by {X_LABELS[x]}")
    return Panel(title, curves_in_words(f"{what} by {X_LABELS[x]}", arm, curves), draw)


def _line(ax: Axes, curve: pd.DataFrame, x: str, R: int, style: Style, bounds: tuple[float, float]) -> None:
    if not len(curve):
        without_value(ax, R, style)
        return
    ax.plot(
        curve[x], curve["mean"], color=style.color, ls=style.line, marker=style.marker, label=f"R = {R}",
        markeredgecolor="white", markeredgewidth=0.5,
    )  # fmt: skip
    low, high = curve["low"].astype(float).clip(*bounds), curve["high"].astype(float).clip(*bounds)
    ax.fill_between(curve[x].astype(float), low, high, color=style.color, alpha=0.16, lw=0)
