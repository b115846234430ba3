"""The figures of the theory report: every curve is exact, except those of whole-step estimators, which are drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from grpo_sweeps.estimators.declared import DISTINCT, weight_on
from grpo_sweeps.exact import Enumeration
from grpo_sweeps.publish.drawing import DOTTED, LINES, MARKERS, Panel, Plot
from grpo_sweeps.science.budget import Budget, Quality
from grpo_sweeps.science.claim import Prompt
from grpo_sweeps.science.credit import CREDITS, stage_bias, stage_errors
from grpo_sweeps.science.gradient import norm_by_k, slope, spread

COLOURS = sns.color_palette("colorblind", 10)
Curves = dict[str, dict[int, Quality]]  # by estimator and R


def look(index: int) -> dict[str, Any]:
    """Colour, line and marker of a curve: any one of them tells it from the others."""
    return {"color": COLOURS[index % 10], "linestyle": LINES[index % 6], "marker": MARKERS[index % 6]}


def close(ax: Axes, x: str, y: str) -> None:
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if ax.get_yscale() == "log":
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_locator(NullLocator())
    if ax.get_legend_handles_labels()[1]:
        ax.legend(
            loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize=7, handlelength=2.6,
            columnspacing=1.0, borderaxespad=0.2,
        )  # fmt: skip


def logarithmic_R(ax: Axes, Rs: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(Rs, [str(R) for R in Rs])
    ax.minorticks_off()


def by_group_size(exact: Curves, drawn: Curves, gains: dict[str, dict[int, float]], budget: Budget, N: int) -> Plot:
    """The figure of MSE, cosine and gain against R at N rollouts per step."""
    signal = float(budget.target_D @ budget.target_D)

    def draw(curves: Mapping[str, Mapping[int, Any]], value: Callable[[Any], float], label: str, log: bool) -> Any:
        def panel(ax: Axes) -> None:
            for index, (name, one) in enumerate(curves.items()):
                ax.plot(list(one), [value(q) for q in one.values()], label=name, **look(index))
            if log:
                ax.set_yscale("log")
            if curves is exact and log:
                ax.axvline(budget.best_R, color="0.4", linestyle=DOTTED, linewidth=1, label="R* of leave-one-out")
            logarithmic_R(ax, sorted({R for one in curves.values() for R in one}))
            close(ax, "rollouts of a group, R", label)

        return panel

    error, cosine = "MSE / ||grad J||²", "cosine with grad J"
    some = {name: gains[name] for name in exact}
    others = {name: gains[name] for name in drawn}
    panels = (
        Panel("error, exact", "error against R", draw(exact, lambda q: q.mse / signal, error, True)),
        Panel("error, drawn", "error against R", draw(drawn, lambda q: q.mse / signal, error, True)),
        Panel("cosine, exact", "cosine against R", draw(exact, lambda q: q.cosine, cosine, False)),
        Panel("cosine, drawn", "cosine against R", draw(drawn, lambda q: q.cosine, cosine, False)),
        Panel("one step", "gain against R", draw(some, float, "gain / that along grad J", False)),
        Panel("one step", "gain against R", draw(others, float, "gain / that along grad J", False)),
    )
    caption = (
        f"{N} rollouts a step over {len(budget.prompts)} prompts. Error against the gradient of the average "
        "objective; cosine of the mean step over the root mean square norm; gain in mean reward of a step of fixed "
        "length, over that along grad J, of drawn steps. Left: estimators that a group decides; right: those that "
        "need the whole step or lengths, drawn. The group mean and leave-one-out differ by a factor: the same "
        "cosine."
    )
    return Plot("budget", "The estimators at a fixed number of rollouts.", caption, panels)


def to_oracle(budget: Budget, Rs: Sequence[int], estimators: dict[str, Any]) -> Plot:
    """The figure of each prompt's MSE over V1 / R, the MSE of the estimator that knows the value."""

    def panel(ax: Axes) -> None:
        for index, (name, estimator) in enumerate(estimators.items()):
            ratios = [
                np.mean([Budget((o,)).of(estimator, R, R).mse / (o.e.V1 / R) for o in budget.prompts]) for R in Rs
            ]
            ax.plot(Rs, ratios, label=name, **look(index))
        ax.axhline(1, color="0.4", linestyle=DOTTED, linewidth=1)
        ax.set_yscale("log")
        logarithmic_R(ax, Rs)
        close(ax, "rollouts of a group, R", "MSE / MSE of the oracle")

    caption = "Mean over prompts. Where the reward is subtracted by what the group knows, the ratio tends to 1."
    return Plot(
        "oracle", "Error beside that of a baseline that knows the value.", caption, (Panel("", "ratio", panel),)
    )


def norm_and_k(prompts: Sequence[Prompt], R: int) -> Plot:
    def draw(scaled: bool) -> Callable[[Axes], None]:
        def panel(ax: Axes) -> None:
            x = np.sqrt(spread(np.arange(1, R), R))
            for index, o in enumerate(prompts):
                norms = norm_by_k(o, R, scaled)
                order = np.argsort(x, kind="stable")
                label = f"p = {o.e.J:.2f}, slope {slope(norms, R):.2f}"
                ax.plot(x[order], np.sqrt(norms)[order], label=label, **(look(index) | {"linestyle": ""}))
            ax.set_xscale("log")
            ax.set_yscale("log")
            ax.set_xticks(x[: R // 2], [str(k) for k in range(1, R // 2 + 1)])
            ax.minorticks_off()
            close(ax, f"min(k, {R} - k), by the rewards' standard deviation", "root mean square norm")

        return panel

    panels = (
        Panel("group mean", "norm by k", draw(False)),
        Panel("divided by the standard deviation", "norm by k", draw(True)),
    )
    caption = (
        f"Exact, R = {R}, one point a number k of right rollouts (two where k and R - k give the same spread). A "
        "slope of 1 (0) is noise, of 2 (1) signal."
    )
    return Plot("norm_by_k", "The norm of a group's gradient by its rewards' spread.", caption, panels)


def problem_weights(Rs: Sequence[int] = (2, 4, 8, 16)) -> Plot:
    shown = [one for one in DISTINCT if one.by_group]
    p = np.linspace(0.01, 0.99, 99)

    def draw(R: int) -> Callable[[Axes], None]:
        def panel(ax: Axes) -> None:
            for index, one in enumerate(shown):
                weights = [weight_on(one.function, float(x), R) for x in p]
                ax.plot(p, weights, label=one.name, **(look(index) | {"marker": ""}))
            ax.set_ylim(bottom=0)
            close(ax, "success rate p of the problem", "weight on grad p")

        return panel

    caption = (
        "E[sum A psi] / R = c(p) grad p, exact for binary rewards. Division by the standard deviation weighs hard "
        "and easy problems up; the others treat all alike."
    )
    panels = tuple(Panel(f"R = {R}", f"weights at R = {R}", draw(R)) for R in Rs)
    return Plot("weights", "The weight that an estimator puts on a problem.", caption, panels)


def stages(enumerations: Sequence[Enumeration]) -> Plot:
    longest = max(e.tokens_NT.shape[1] for e in enumerations)
    shown = [e for e in enumerations if e.tokens_NT.shape[1] == longest]
    found = [stage_bias(e) for e in shown]
    variances = [stage_errors(e) for e in enumerations]

    def bias(ax: Axes) -> None:
        h = np.arange(longest)
        spreads = np.array([spread_T for _, spread_T in found])
        for index, spread_T in enumerate(spreads):
            ax.plot(h, spread_T, color="0.75", linewidth=0.7, label="one problem" if index == 0 else None)
        ax.plot(h, spreads.mean(axis=0), label="mean spread", **look(0))
        ax.plot(h, np.mean([mean_T for mean_T, _ in found], axis=0), label="mean bias", **look(1))
        ax.set_xticks(h)
        close(ax, "stage h", "bias at the stage")

    def variance(ax: Axes) -> None:
        base = np.array([v["less v(s_h)"] for v in variances])
        for index, name in enumerate(CREDITS[:2]):
            ratio = np.sort(np.array([v[name] for v in variances]) / base)
            ax.plot(np.arange(1, len(ratio) + 1) / len(ratio), ratio, label=name, **(look(index) | {"marker": ""}))
        ax.axhline(1, color="0.4", linestyle=DOTTED, linewidth=1)
        ax.set_yscale("log")
        close(ax, "share of problems", "variance / that with v(s_h)")

    caption = (
        f"Left: {len(shown)} problems of {longest} turns; the bias of a stage has mean zero and a spread that never "
        f"falls. Right: variance of one rollout's gradient over {len(variances)} problems, beside that of G_h - "
        "v(s_h)."
    )
    panels = (Panel("bias by stage", "bias by stage", bias), Panel("variance", "variance by credit", variance))
    return Plot("stages", "Many turns.", caption, panels)
