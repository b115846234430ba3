"""The figure: the share of Var r that lies in each part of a rollout, with and without the noise of the values."""

from __future__ import annotations

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from grpo_sweeps.credit.shares import Profile, Shares
from grpo_sweeps.report.drawing import DOTTED, Panel, Plot

BLUE, ORANGE = sns.color_palette("colorblind", 2)


def profile_plot(found: Shares, every: int, setting: str) -> Plot:
    """Left by tenth of a rollout, right by segment."""
    middles = (np.arange(len(found.by_tenth.shares)) + 0.5) / len(found.by_tenth.shares)
    first = np.arange(len(found.by_segment.shares)) * every
    segment = "token" if every == 1 else f"first token of a segment of {every}"
    panels = (
        _panel("by tenth of a rollout", found.by_tenth, middles, "part of the rollout", False),
        _panel("by position", found.by_segment, first, segment, True),
    )
    caption = (
        f"Mean square of the credit V(s after) - V(s before), over Var r within a prompt. {setting} Filled points: "
        "less the Monte Carlo noise of the values, with 95% intervals over prompts; they add up to 1 but for chance. "
        "Open points: with that noise. By position, rollouts that have ended count as 0."
    )
    return Plot("credit", "Where the credit lies.", caption, panels)


def _said(profile: Profile) -> str:
    """The panel in words."""
    means = [one.mean for one in profile.shares]
    if not np.isfinite(means).all():
        return "Nothing to show: the rewards of every prompt are equal."
    return "Share of Var r from first to last: " + ", ".join(f"{x:.2f}" for x in means) + "."


def _panel(title: str, profile: Profile, at: np.ndarray, x: str, whole: bool) -> Panel:
    def draw(ax: Axes) -> None:
        means = np.array([one.mean for one in profile.shares])
        if np.isfinite(means).all():
            _points(ax, profile, at, means)
        else:
            ax.text(0.5, 0.5, "nothing to share", transform=ax.transAxes, ha="center", va="center", color="0.35")
        ax.set_xlabel(x)
        ax.set_ylabel("E A² / Var r")
        ax.axhline(0, color="0.4", linewidth=1)
        if whole:
            ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))

    return Panel(title, _said(profile), draw)


def _points(ax: Axes, profile: Profile, at: np.ndarray, means: np.ndarray) -> None:
    half = np.array([one.high - one.mean if one.known else 0.0 for one in profile.shares])
    filled = ax.errorbar(
        at, means, yerr=half, color=BLUE, marker="o", linestyle="-", linewidth=1.0, elinewidth=1.0, capsize=2,
        markersize=3.5,
    )  # fmt: skip
    (opened,) = ax.plot(
        at, profile.noisy, color=ORANGE, marker="o", markerfacecolor="none", linestyle=DOTTED, linewidth=1.0,
        markersize=3.5,
    )  # fmt: skip
    ax.legend(
        [filled, opened], ["less the noise", "with it"], loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2,
        frameon=False, borderaxespad=0.2,
    )  # fmt: skip
