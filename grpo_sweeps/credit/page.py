"""index.html: the numbers, the figure and the completions coloured by credit, on one page without a script.

The colours are a diverging scale between blue and orange, which colour-blind readers tell apart, in steps whose limits
stand in the legend; a sign before each number says the same. Text of the model is escaped and shown as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from grpo_sweeps.credit.sampling import Sampled
from grpo_sweeps.credit.shares import Shares
from grpo_sweeps.credit.tables import Segment
from grpo_sweeps.intervals import Interval
from grpo_sweeps.report.drawing import Plot
from grpo_sweeps.report.formats import number, with_interval
from grpo_sweeps.report.page import inlined, visible_text

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
    """The page. head: title, subtitle, setting, command and what else the template names; numbers: key, words, value;
    prompts: the text of each problem."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("grpo_sweeps.credit", ""), PackageLoader("grpo_sweeps.report", "")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    limit = scale_limit(rows)
    return environment.get_template("credit.html.j2").render(
        **head,
        numbers=[(words, with_interval(one.mean, one.low, one.high, 3)) for _, words, one in numbers],
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
    """The largest credit of all, either sign: where the darkest colours end. 1 where there is none."""
    return max((abs(one.advantage) for part in rows for one in part), default=0.0) or 1.0


def step_of(advantage: float, limit: float) -> int:
    """Which colour: 0 for -limit, STEPS around 0, 2 STEPS for +limit.

    >>> [step_of(x, 1.0) for x in (-1.0, -0.2, 0.0, 0.1, 0.13, 1.0)]
    [0, 3, 4, 4, 5, 8]
    """
    return STEPS + round(float(np.clip(advantage / limit, -1, 1)) * STEPS)


def legend(limit: float) -> list[tuple[int, str]]:
    """Colour and the credits that it stands for, from the most negative."""
    bounds = [(step - STEPS) / STEPS * limit for step in range(2 * STEPS + 1)]
    half = limit / STEPS / 2
    said = [f"{max(x - half, -limit):+.2f} to {min(x + half, limit):+.2f}" for x in bounds]
    return list(enumerate(said))


def _tenths(found: Shares) -> list[tuple[str, str, str]]:
    pairs = zip(found.by_tenth.shares, found.by_tenth.noisy, strict=True)
    return [
        (f"{i * 10}–{i * 10 + 10}%", with_interval(one.mean, one.low, one.high, 3), number(noisy, 3))
        for i, (one, noisy) in enumerate(pairs)
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
