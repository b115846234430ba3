"""What the credit command shows: the tables (CSV), the figure, and index.html with both and the coloured completions.

The figure is the share of Var r that lies in each part of a rollout, with and without the noise of the values. The page
needs no script; its colours are a diverging scale between blue and orange, which colour-blind readers tell apart, in
steps whose limits stand in the legend; a sign before each number says the same. Text of the model is escaped and shown
as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from grpo_sweeps.credit.sampling import Sampled
from grpo_sweeps.credit.shares import Profile, Shares
from grpo_sweeps.maths.intervals import Interval
from grpo_sweeps.publish.drawing import DOTTED, Panel, Plot
from grpo_sweeps.publish.formats import number, with_interval_of
from grpo_sweeps.publish.page import from_template, inlined, visible_text

OPEN = "�"  # what a decoder shows for the bytes of a character that a later token completes


@dataclass(frozen=True)
class Segment:
    """One segment of a rollout: its first token's number, its text, V before it, A and the standard errors of both."""

    t: int
    tokens: int
    text: str
    value: float
    value_error: float
    advantage: float
    advantage_error: float


def segments(sampled: Sampled, tokenizer: Any) -> list[list[Segment]]:
    """The segments of every rollout."""
    values, found = sampled.values, []
    for i, rollout in enumerate(sampled.rollouts):
        edges = sampled.edges(i)
        rows = zip(edges[:-1], edges[1:], pieces(tokenizer, rollout.completion_ids, edges), strict=True)
        found.append(
            [
                Segment(
                    t=t, tokens=end - t, text=text, value=float(values.values_NE[i, k]),
                    value_error=float(np.sqrt(values.noise_NE[i, k])), advantage=float(values.advantages_NK[i, k]),
                    advantage_error=float(np.sqrt(values.noise_NK[i, k])),
                )
                for k, (t, end, text) in enumerate(rows)
            ]
        )  # fmt: skip
    return found


def pieces(tokenizer: Any, ids: Sequence[int], edges: Sequence[int]) -> list[str]:
    """What each segment adds to the text, with special tokens shown. A character whose bytes are spread over segments
    belongs to the segment that completes it."""
    texts = [str(tokenizer.decode(list(ids[:edge]), skip_special_tokens=False)) for edge in edges]
    texts = [text.rstrip(OPEN) for text in texts[:-1]] + texts[-1:]
    found = []
    for before, after, start, end in zip(texts[:-1], texts[1:], edges[:-1], edges[1:], strict=True):
        grown = after.startswith(before)
        found.append(after[len(before) :] if grown else str(tokenizer.decode(list(ids[start:end]))))
    return found


def credit_frame(sampled: Sampled, rows: Sequence[Sequence[Segment]]) -> pd.DataFrame:
    """credit.csv: one row per segment; `value` is V before it, and the reward is V after the last."""
    owners, N = sampled.values.prompt_N, len(sampled.rollouts) // len(sampled.problems)
    return pd.DataFrame(
        [
            {
                "prompt": sampled.problems[owners[i]].id, "rollout": i % N, "t": one.t, "tokens": one.tokens,
                "text": one.text, "value": one.value, "standard_error": one.value_error, "advantage": one.advantage,
                "advantage_standard_error": one.advantage_error, "reward": float(sampled.values.values_NE[i, -1]),
            }
            for i, part in enumerate(rows)
            for one in part
        ]
    )  # fmt: skip


def profile_frame(found: Shares, every: int) -> pd.DataFrame:
    """profile.csv: E A^2 / Var r by tenth and by the first token of a segment."""
    tenths = _profile_rows("tenth", range(1, len(found.by_tenth.shares) + 1), found.by_tenth)
    return pd.DataFrame(
        tenths + _profile_rows("token", range(0, len(found.by_segment.shares) * every, every), found.by_segment)
    )


def _profile_rows(kind: str, names: Sequence[int], profile: Profile) -> list[dict[str, Any]]:
    return [
        {"by": kind, "position": name, "share": one.mean, "low": one.low, "high": one.high, "with_noise": noisy}
        for name, one, noisy in zip(names, profile.shares, profile.noisy, strict=True)
    ]


def unit_of(every: int) -> str:
    """What a credit belongs to, in words."""
    return "token" if every == 1 else "segment"


def quantities(found: Shares, every: int) -> list[tuple[str, str, Interval]]:
    """(key, meaning in words, value): the rows of shares.csv and of the page's first table."""
    return [
        ("value", "Mean reward, v(s_0)", found.value),
        ("variance", "Var r within a prompt", found.variance),
        ("segments", f"{unit_of(every).capitalize()}s of a completion, K", found.segments),
        ("total", "Sum of E A² over Var r; 1 but for chance", found.total),
        ("uniform", "Share of the credit that uniform credit carries", found.uniform),
        ("correlation", "Correlation of uniform and true credit", found.correlation),
    ]


def shares_frame(found: Shares, every: int) -> pd.DataFrame:
    """shares.csv: one row per quantity with its interval, and the sum without the correction."""
    rows: list[dict[str, Any]] = [
        {"quantity": key, "mean": one.mean, "low": one.low, "high": one.high}
        for key, _, one in quantities(found, every)
    ]
    return pd.DataFrame([*rows, {"quantity": "total_with_noise", "mean": found.total_noisy}])


BLUE, ORANGE = sns.color_palette("colorblind", 2)


def profile_plot(found: Shares, every: int, setting: str) -> Plot:
    """The figure: left by tenth of a rollout, right by segment."""
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
    ends = [(one.mean - one.low, one.high - one.mean) if one.known else (0.0, 0.0) for one in profile.shares]
    filled = ax.errorbar(
        at, means, yerr=np.transpose(ends), color=BLUE, marker="o", linestyle="-", linewidth=1.0, elinewidth=1.0,
        capsize=2, markersize=3.5,
    )  # fmt: skip
    (opened,) = ax.plot(
        at, profile.noisy, color=ORANGE, marker="o", markerfacecolor="none", linestyle=DOTTED, linewidth=1.0,
        markersize=3.5,
    )  # fmt: skip
    ax.legend(
        [filled, opened], ["less the noise", "with it"], loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2,
        frameon=False, borderaxespad=0.2,
    )  # fmt: skip


STEPS = 4  # colours to either side of 0
CLEAR = 2.0  # standard errors from which a credit is underlined
# From orange (credit lost) over white to blue (credit gained); dark text is readable on each.
COLOURS = ("#e08214", "#f0a04b", "#fbc38a", "#fde3c8", "#ffffff", "#d8e8f5", "#b0d0ea", "#84b4dd", "#5a9bd0")
LONGEST = 2000  # characters of a prompt
SHOWN = 32  # completions on the page; all of them are in credit.csv


def render_page(
    head: Mapping[str, str],
    found: Shares,
    sampled: Sampled,
    rows: Sequence[Sequence[Segment]],
    numbers: Sequence[tuple[str, str, Interval]],
    prompts: Sequence[str],
    plot: Plot,
    images: Mapping[str, bytes],
) -> str:
    """The HTML of the page.

    Args:
        head: title, subtitle, setting, command and what else the template names.
        numbers: key, words, value.
        prompts: the text of each problem.
    """
    limit = scale_limit(rows)
    return from_template(
        "grpo_sweeps.credit",
        "credit.html.j2",
        **head,
        numbers=[(words, with_interval_of(one, 3)) for _, words, one in numbers],
        noisy=number(found.total_noisy, 3),
        tenths=_tenths(found),
        figure=inlined(plot, images),
        colours=list(enumerate(COLOURS)),
        legend=legend(limit),
        clear=f"{CLEAR:g}",
        completions=[_completion(i, sampled, rows[i], prompts, limit) for i in range(min(SHOWN, len(rows)))],
        more=f"The first {SHOWN} of {len(rows)}; the others are in credit.csv." if len(rows) > SHOWN else "",
    )


def scale_limit(rows: Sequence[Sequence[Segment]]) -> float:
    """The largest credit by absolute value, where the darkest colours end; 1 where there is none."""
    return max((abs(one.advantage) for part in rows for one in part), default=0.0) or 1.0


def step_of(advantage: float, limit: float) -> int:
    """Number of the colour of a credit: 0 for -limit, STEPS around 0, 2 STEPS for +limit.

    >>> [step_of(x, 1.0) for x in (-1.0, -0.2, 0.0, 0.1, 0.13, 1.0)]
    [0, 3, 4, 4, 5, 8]
    """
    return STEPS + round(float(np.clip(advantage / limit, -1, 1)) * STEPS)


def legend(limit: float) -> list[tuple[int, str]]:
    """Each colour with its range of credits, from the most negative."""
    bounds = [(step - STEPS) / STEPS * limit for step in range(2 * STEPS + 1)]
    half = limit / STEPS / 2
    said = [f"{max(x - half, -limit):+.2f} to {min(x + half, limit):+.2f}" for x in bounds]
    return list(enumerate(said))


def _tenths(found: Shares) -> list[tuple[str, str, str]]:
    pairs = zip(found.by_tenth.shares, found.by_tenth.noisy, strict=True)
    return [
        (f"{i * 10}–{i * 10 + 10}%", with_interval_of(one, 3), number(noisy, 3)) for i, (one, noisy) in enumerate(pairs)
    ]


def _completion(
    i: int, sampled: Sampled, part: Sequence[Segment], prompts: Sequence[str], limit: float
) -> dict[str, Any]:
    values, owner = sampled.values, int(sampled.values.prompt_N[i])
    return {
        "prompt": visible_text(prompts[owner], LONGEST),
        "id": visible_text(sampled.problems[owner].id, LONGEST),
        "answer": visible_text(sampled.problems[owner].answer, LONGEST),
        "first": i == 0 or int(values.prompt_N[i - 1]) != owner,
        "number": i % (len(sampled.rollouts) // len(sampled.problems)) + 1,
        "reward": f"{values.values_NE[i, -1]:g}",
        "value": f"{values.values_NE[i, 0]:.2f}",
        "tokens": int(values.lengths_N[i]),
        "cut": sampled.rollouts[i].truncated,
        "segments": [_segment(one, after, limit) for one, after in zip(part, _after(part, values, i), strict=True)],
    }


def _after(part: Sequence[Segment], values: Any, i: int) -> list[float]:
    return [*(one.value for one in part[1:]), float(values.values_NE[i, -1])]


def _segment(one: Segment, after: float, limit: float) -> dict[str, Any]:
    text = visible_text(one.text, len(one.text))
    return {
        "t": one.t,
        "text": text.replace("\n", "⏎\n"),
        "plain": text.replace("\n", "⏎") if text.strip(" ") else "␣" * len(text),
        "step": step_of(one.advantage, limit),
        "far": abs(one.advantage) > CLEAR * one.advantage_error and one.advantage != 0,
        "value": f"{one.value:.2f}",
        "value_error": f"{one.value_error:.2f}",
        "after": f"{after:.2f}",
        "advantage": f"{one.advantage:+.2f}",
        "advantage_error": f"{one.advantage_error:.2f}",
    }
