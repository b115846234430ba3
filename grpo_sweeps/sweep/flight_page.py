"""The page of a flight check: plain text for a terminal, at most `WIDTH` columns wide."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_sweeps.intervals import mean_interval, share_interval
from grpo_sweeps.sweep.flight import COMPARED, Flight, device, evaluations, parameters, rollouts
from grpo_sweeps.sweep.plan_table import gpus_of
from grpo_sweeps.sweep.planned import Plan
from grpo_sweeps.sweep.say import aligned, count, plain
from grpo_sweeps.symptoms import percent

WIDTH = 100
LABEL = 16  # columns of the names on the left
WORDS = {  # of a step's parts, in the order of the step
    "load": "load model and data", "sample": "sample", "continuations": "continuations", "score": "score",
    "verify": "verify the Gram", "float32": "compare with float32", "backward": "backward", "update": "update",
    "critic": "critic",
}  # fmt: skip
BEFORE_A_STEP = ("load",)  # logged with a step's metrics and no part of its time


def page(flight: Flight, plan: Plan, params: Mapping[str, Any]) -> list[str]:
    """The lines of the page. params: the launcher's, which say how many GPUs a run is given."""
    lines = [*_head(flight, plan), ""]
    if flight.rows:
        lines += [*_times(flight), "", *_measured(flight), *_expected(flight, plan, params), ""]
    lines.append("What looks wrong")
    wrong = flight.wrong
    lines += [line for sentence in wrong for line in _wrapped(f"- {plain(sentence)}", "  ", "    ")]
    return lines if wrong else [*lines, "  Nothing looks wrong."]


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def _item(label: str, text: str) -> list[str]:
    return _wrapped(text, f"{label:<{LABEL}}", " " * LABEL)


def _short(target: str) -> str:
    return ".".join(target.split(".")[-2:])


def _head(flight: Flight, plan: Plan) -> list[str]:
    config = flight.config
    which = f", the heaviest of {len(plan.runs)} runs" if len(plan.runs) > 1 else ""
    size = f"{config.groups} prompts x R={config.R} a step, at most {config.rollout.max_new_tokens} new tokens"
    choices = (
        f"{config.model.name} ({config.model.dtype}), task {config.task.name}, reward {_short(config.reward.target)}, "
        f"estimator {_short(config.estimator.target)}"
    )
    return [
        *_wrapped(f"Flight check of {plain(flight.name)}{which}", "", "  "),
        *_item("run", plain(f"{size}; {choices}")), *_item("device", plain(device(config)[0])),
    ]  # fmt: skip


def _times(flight: Flight) -> list[str]:
    """Seconds by part and tokens/s, a column a step."""
    rows = flight.rows
    names = list(dict.fromkeys(name.removeprefix("time/") for row in rows for name in row if name.startswith("time/")))
    names = [name for name in names if name != "start"]  # a line of its own below
    ordered = [name for name in WORDS if name in names] + [name for name in names if name not in WORDS]
    table: list[Sequence[str]] = [("seconds", *(f"step {i + 1}" for i in range(len(rows))))]
    if flight.start_s is not None:
        table.append(("  start of the process", f"{flight.start_s:.2f}"))
    for name in ordered:
        table.append((f"  {WORDS.get(name, name)}", *(_seconds(row.get(f"time/{name}")) for row in rows)))
    table.append(("  the step, whole", *(_seconds(row["step_time"]) for row in rows)))
    rest = [
        wall - row["step_time"] - sum(row.get(f"time/{name}", 0.0) for name in BEFORE_A_STEP)
        for wall, row in zip(flight.walls, rows, strict=False)
    ]
    loads = "checkpoint and the rest" if "load" in names else "load, checkpoint and the rest"
    table.append((f"  {loads}", *(_seconds(value) for value in rest)))
    new = [row["completions/mean_length"] * rollouts(flight.config) for row in rows]
    table.append(("new tokens/s", ""))
    table.append(("  sampling", *(_rate(n, row.get("time/sample")) for n, row in zip(new, rows, strict=True))))
    table.append(("  the step, whole", *(_rate(n, row["step_time"]) for n, row in zip(new, rows, strict=True))))
    width = max(len(line) for line in table)
    lines = aligned([[line[0], *(cell.rjust(8) for cell in line[1:])] + [""] * (width - len(line)) for line in table])
    return [*lines, "  (step 2: a fresh start from the checkpoint of step 1)"] if len(rows) > 1 else lines


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _rate(tokens: float, seconds: float | None) -> str:
    if not seconds:
        return ""
    rate = tokens / seconds
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def _measured(flight: Flight) -> list[str]:
    config, rows = flight.config, flight.rows
    _, peak, whole = device(config)
    lines = [] if peak is None else _item(
        "memory", f"peak {peak:.2f} GiB" + (f" of the GPU's {whole:.1f}" if whole else " of this process")
    )  # fmt: skip
    lines += _item("reward", _reward(flight))
    cut = _mean(rows, "completions/clipped_ratio")
    length = _mean(rows, "completions/mean_length")
    limit = f"rollout.max_new_tokens={config.rollout.max_new_tokens}"
    lines += _item("completions", f"mean length {length:.0f} tokens, {percent(cut)} cut at {limit}")
    shares = [percent(_mean(rows, f"groups/{name}")) for name in ("mixed", "all_right", "all_wrong")]
    groups = "{} mixed, {} all right, {} all wrong".format(*shares)
    lines += _item("groups", f"{groups} (of {len(rows) * config.groups})")
    lines += _item("effective rank", _ranks(flight))
    forms = {name: share for name, share in rows[0].items() if name.startswith("gram_forms/")}
    if forms:
        by = (f"{percent(share)} by {name.removeprefix('gram_forms/')}" for name, share in forms.items())
        lines += _item("Gram of weights", ", ".join(by))
    return lines + _item(f"{config.model.dtype}"[: LABEL - 1], _precision(flight))


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def _reward(flight: Flight) -> str:
    """The mean over the first step's rollouts, with an interval that goes by prompts."""
    first = [group for group in flight.groups if group.step == 0]
    rewards = [reward for group in first for reward in group.rewards]
    prompts = [group.prompt_id for group in first for _ in group.rewards]
    found = (share_interval if set(rewards) <= {0.0, 1.0} else mean_interval)(rewards, prompts)
    interval = f" [{found.low:.3f}, {found.high:.3f}]" if found.known else ""
    text = f"{sum(rewards) / len(rewards):.3f}{interval} before the first update ({len(rewards)} rollouts of "
    row = flight.rows[0]
    return (
        text + f"{count(len(set(prompts)), 'prompt')}); right by strict parsing {percent(row['reward/strict'])}, by "
        f"flexible {percent(row['reward/flexible'])}"
    )


def _ranks(flight: Flight) -> str:
    if not flight.config.analysis.every:
        return "not measured (analysis.every=0)"
    parts = []
    for i, row in enumerate(flight.rows):
        value, null = (row.get(f"spectral/{name}") for name in ("effective_rank", "null_effective_rank"))
        number = int(row.get("spectral/groups", 0))
        known = value is not None and null is not None
        parts.append(f"step {i + 1}: {value:.2f}, null {null:.2f} ({count(number, 'mixed group')})" if known
                     else f"step {i + 1}: no mixed group was measured")  # fmt: skip
    return "; ".join(parts)


def _precision(flight: Flight) -> str:
    """What the model's dtype makes of the spectra, beside float32."""
    row, dtype = flight.rows[0], flight.config.model.dtype
    if "float32/groups" not in row:
        return "spectra are not compared with float32" + (": the model is in float32" if dtype == "float32" else "")
    parts = []
    for name in ("effective_rank", "participation_ratio", "top1_fraction"):
        key = f"float32/{name}"
        if key in row:
            ends = [row.get(f"{key}_{end}", math.nan) for end in ("low", "high")]
            interval = f" [{ends[0]:+.2%}, {ends[1]:+.2%}]" if all(map(math.isfinite, ends)) else ""
            parts.append(f"{name.replace('_', ' ').replace('top1', 'top-1')} {row[key]:+.2%}{interval}")
    asked = f" of the {COMPARED} asked for" if row["float32/groups"] < COMPARED else ""
    return f"less float32, of {count(int(row['float32/groups']), 'group')}{asked}: {', '.join(parts) or 'nothing'}"


def _expected(flight: Flight, plan: Plan, params: Mapping[str, Any]) -> list[str]:
    """Hours of the run and of all runs, from the second step."""
    if len(flight.rows) < 2:
        return []
    own = flight.config
    step_s = flight.rows[1]["step_time"]
    per_rollout = flight.rows[1].get("time/sample", 0.0) / rollouts(own)
    before_s = (flight.start_s or 0.0) + sum(flight.rows[0].get(f"time/{name}", 0.0) for name in ("load", "verify"))
    size = parameters(own)
    seconds = {}
    for run in plan.runs:
        other = parameters(run.config)
        model = other / size if size and other else 1.0
        times, completions = evaluations(run.config)
        steps = run.config.trainer.steps * step_s * rollouts(run.config) / rollouts(own)
        seconds[run.name] = model * (steps + times * completions * per_rollout) + before_s
    gpus = gpus_of(params) or int(not device(own)[0].startswith("CPU"))
    config = next(run.config for run in plan.runs if run.name == flight.name)
    times, completions = evaluations(config)
    text = f"this run {_duration(seconds[flight.name], gpus)}: {before_s:.0f} s before its first step, "
    text += f"{count(config.trainer.steps, 'step')} of {step_s:.3g} s"
    text += f", {count(times, 'evaluation')} of {count(completions, 'completion')}" if times else ""
    if len(plan.runs) > 1:
        text += f"; all {len(plan.runs)} runs {_duration(sum(seconds.values()), gpus)}, one after the other"
    basis = "from step 2 here, scaled by each run's rollouts and parameters; evaluation at its sampling pace"
    return _item("expected", f"{text} ({basis})")


def _duration(seconds: float, gpus: int) -> str:
    if seconds < 100:
        text = f"{seconds:.0f} s"
    else:
        text = f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
    return text + (f" ({seconds * gpus / 3600:.2g} GPU-hours)" if gpus else "")
