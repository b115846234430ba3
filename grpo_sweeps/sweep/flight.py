"""A flight check: two steps of a command's heaviest run on the real path, and what they say about the runs to come.

The run is executed as any other, in a temporary folder: it is stopped after its first step, which leaves a checkpoint,
and started again from that checkpoint in a fresh set-up. Only evaluation and the copy to MLflow are left out.
The page is plain text for a terminal, at most `WIDTH` columns wide.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_sweeps import paths
from grpo_sweeps.cli import aligned, count, say
from grpo_sweeps.config import RunConfig, TrackingConfig, to_mapping
from grpo_sweeps.sweep import preflight
from grpo_sweeps.sweep.execute import LOG_FILE, RunResult, Signals, execute
from grpo_sweeps.sweep.identity import identity
from grpo_sweeps.sweep.ledger import status_or_none
from grpo_sweeps.sweep.plan import Plan, PlannedRun, at_most, gpus_of
from grpo_sweeps.text import plain, show
from grpo_sweeps.tracking.lines import SAMPLER
from grpo_sweeps.tracking.status import seconds_since_start
from grpo_sweeps.tracking.symptoms import NAMED, equal_rewards, known, percent, symptoms
from grpo_sweeps.types import ConfigError, GroupRecord

COMPARED = 16  # groups of the first step whose spectra are taken in float32 as well
STEPS = 2
PREFIX = "grpo_sweeps_check_"
# Functions that a step calls, and the part of the run that each is: the innermost one names what failed.
PARTS = {
    "prepare": "loading model and data", "load_policy": "loading the model", "check_data": "loading the data",
    "resume": "resuming from the checkpoint", "save": "writing the checkpoint", "draw": "sampling",
    "rewards_of": "the reward", "_advantages": "the estimator", "verify": "verifying the Gram",
    "backward": "the backward pass", "backward_of_loss": "the backward pass", "prepare_terms": "scoring",
    "step_credit": "continuations", "apply_update": "the update", "log_groups": "writing the records",
}  # fmt: skip
WIDTH = 100
LABEL = 16  # columns of the names on the left
WORDS = {  # of a step's parts, in the order of the step
    "load": "load model and data", "sample": "sample", "continuations": "continuations", "score": "score",
    "verify": "verify the Gram", "float32": "compare with float32", "backward": "backward", "update": "update",
    "critic": "critic",
}  # fmt: skip
BEFORE_A_STEP = ("load",)  # logged with a step's metrics but not part of its time


@dataclass(frozen=True)
class Flight:
    """What the two steps left. `rows`: their metrics; `walls`: seconds of each of the two starts of the run, in total.

    start_s: seconds from the start of the process to the first of them, None where the system does not tell.
    failed_in: the part of the run that failed, with `failure` as its sentence; both empty where none did.
    """

    config: RunConfig
    name: str
    rows: list[dict[str, float]] = field(default_factory=list)
    groups: list[GroupRecord] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)
    start_s: float | None = None
    failure: str = ""
    failed_in: str = ""
    notes: tuple[str, ...] = ()

    @property
    def wrong(self) -> list[str]:
        """What looks wrong, one sentence each; the failure first."""
        failed = [f"the run failed in {self.failed_in}: {self.failure}"] if self.failure else []
        found = [symptom.sentence for symptom in symptoms(to_mapping(self.config), self.rows)]
        return [*failed, *found, *(note for note in self.notes if not note.startswith(NAMED))]


def fly(plan: Plan, start: Any, jobs_copy: bool = False, params: Mapping[str, Any] | None = None) -> list[RunResult]:
    """Check the heaviest run and print the page, in place of `sweep.launch.launch`. Returns one result per run of the
    plan; that of the run that was tried is a failure where something looks wrong.

    Raises KeyboardInterrupt after Ctrl-C, with the temporary folder removed.
    """
    if plan.dry_run:
        raise ConfigError("dry_run=true: grpo_sweeps.check tries a run; leave it out, or plan by grpo_sweeps.run")
    run = heaviest(plan.runs)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=_place(run.config)) as folder:
        say(f"flight check of {run.name}: {STEPS} steps in {folder}, which is removed afterwards")
        flight = take_off(run, Path(folder))
    for line in page(flight, plan, params or {}):
        show(line)
    results = [RunResult(one.identity, one.name, "queued", str(one.run_dir)) for one in plan.runs]
    state, error = ("failed", flight.wrong[0]) if flight.wrong else ("finished", None)
    return [replace(one, state=state, error=error) if one.identity == run.identity else one for one in results]


def heaviest(runs: Sequence[PlannedRun]) -> PlannedRun:
    """The run with the largest rollouts per step x longest completion x parameters of the model. A model of unknown
    size counts as the largest known one."""
    sizes = [parameters(run.config) for run in runs]
    largest = max((size for size in sizes if size), default=1)
    loads = [rollouts(run.config) * run.config.rollout.max_new_tokens * (size or largest)
             for run, size in zip(runs, sizes, strict=True)]  # fmt: skip
    return runs[loads.index(max(loads))]


def rollouts(config: RunConfig) -> int:
    """Rollouts per step."""
    return config.R * config.groups


def parameters(config: RunConfig) -> int | None:
    """Parameters of a run's model, or a number to compare instead: the bytes of a GGUF file; None if unknown."""
    path = Path(config.model.path)
    return path.stat().st_size if path.is_file() else preflight.parameters(preflight.model_folder(config.model))


def checked(config: RunConfig, runs_dir: Path) -> RunConfig:
    """The run as it is tried: only its length, its evaluations and its folder differ."""
    steps = max(STEPS, config.trainer.steps)
    trainer = replace(
        config.trainer, steps=steps, tokens=None, eval_every=0, checkpoint_every=0, checkpoint_minutes=None
    )
    analysis = replace(config.analysis, every=min(1, config.analysis.every))
    if analysis.every:
        analysis = replace(analysis, compare_float32=COMPARED)
    tracking = TrackingConfig("local")
    return replace(config, trainer=trainer, analysis=analysis, tracking=tracking, runs_dir=str(runs_dir), sweep="check")


def take_off(run: PlannedRun, folder: Path) -> Flight:
    """Take one step, a checkpoint, and the second step from it. What fails is in the flight."""
    from grpo_sweeps.sweep.launch import free_memory, interruptible

    config = checked(run.config, folder)
    run_dir = paths.run_dir(folder, config.sweep, identity(config))  # a record's folder has its run's name
    flight = Flight(config, run.name, start_s=seconds_since_start())
    for step in range(1, STEPS + 1):
        began = time.perf_counter()
        with interruptible() as interrupts:
            after_a_step = Signals(interrupted=_leave if step == STEPS else lambda: True)
            result = execute(to_mapping(config), run_dir, name=run.name, signals=after_a_step)
        if interrupts.heard:
            raise KeyboardInterrupt
        free_memory()
        flight = replace(flight, walls=[*flight.walls, time.perf_counter() - began])
        failed_in, failure = _failure(result, run_dir, step)
        flight = replace(_read(flight, run_dir), failed_in=failed_in, failure=failure)
        if flight.failure:
            break
    return flight


def _leave() -> bool:
    """End the run without a checkpoint, which nobody would read: gigabytes for a real model."""
    raise KeyboardInterrupt


def _failure(result: RunResult, run_dir: Path, step: int) -> tuple[str, str]:
    """The part that failed and why, where the run did not stop where it should have; else two empty texts."""
    if result.state not in ("interrupted", "finished"):
        log = run_dir / LOG_FILE
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        return failed_part(text) or f"step {step}", result.error or f"it is {result.state}"
    if result.step != step:
        return "resuming", f"it stands at step {result.step} after {count(step, 'step')}"
    return "", ""


def failed_part(log: str) -> str:
    """The part of a run in which the last traceback of its log ended; empty where no frame tells."""
    trace = log[log.rfind("Traceback (most recent call last)") :]
    named = [PARTS[name] for name in re.findall(r'File ".*", line \d+, in (\w+)', trace) if name in PARTS]
    return named[-1] if named else ""


def _read(flight: Flight, run_dir: Path) -> Flight:
    """The flight with the records of the steps so far."""
    from grpo_sweeps.tracking.local import read_groups, read_metrics

    status = status_or_none(run_dir)
    return replace(
        flight,
        rows=[known(row) for row in read_metrics(run_dir).to_dict("records")],
        groups=read_groups(run_dir),
        notes=tuple(status.notes) if status else (),
    )


def _place(config: RunConfig) -> Path | None:
    """Where the temporary folder goes: the system's place for such folders, or the folder of the runs if that place has
    no room for the checkpoints."""
    try:
        needed = 2 * preflight.checkpoint_bytes(config, preflight.model_folder(config.model))
    except ConfigError:
        return None
    if shutil.disk_usage(tempfile.gettempdir()).free > needed:
        return None
    runs_dir = Path(config.runs_dir).absolute()
    return next(place for place in (runs_dir, *runs_dir.parents) if place.is_dir())


def device(config: RunConfig) -> tuple[str, float | None, float | None]:
    """Name of the device that was used, the largest memory it held, and what it has in all, in GiB (None: unknown)."""
    import resource

    torch = sys.modules.get("torch")
    if torch is not None and config.trainer.device != "cpu" and torch.cuda.is_available():
        index = int(config.trainer.device.partition(":")[2] or 0)
        about = torch.cuda.get_device_properties(index)
        return about.name, torch.cuda.max_memory_allocated(index) / 2**30, about.total_memory / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    return f"CPU, {torch.get_num_threads() if torch is not None else os.cpu_count()} threads", peak, None


def evaluations(config: RunConfig) -> tuple[int, int]:
    """(how often a run evaluates, completions each time)."""
    trainer = config.trainer
    times = math.ceil(trainer.steps / trainer.eval_every) + 1 if trainer.eval_every else 0
    return times, trainer.eval_problems * (trainer.eval_samples + 1)


def page(flight: Flight, plan: Plan, params: Mapping[str, Any]) -> list[str]:
    """The lines of the page. params: the launcher's, which say how many GPUs a run is given."""
    lines = [*_head(flight, plan), ""]
    if flight.rows:
        lines += [*_times(flight), "", *_measured(flight), *_expected(flight, plan, params), *disk(plan), ""]
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
    size = f"{count(config.groups, 'prompt')} x R={config.R} a step, at most {config.rollout.max_new_tokens} new tokens"
    choices = (
        f"{config.model.name} ({config.model.dtype}), task {config.task.name}, reward {_short(config.reward.target)}, "
        f"estimator {_short(config.estimator.target)}"
    )
    return [
        *_wrapped(f"Flight check of {plain(flight.name)}{which}", "", "  "),
        *_item("run", plain(f"{size}; {choices}")), *_item("device", plain(device(config)[0])),
    ]  # fmt: skip


def _times(flight: Flight) -> list[str]:
    """Lines of seconds by part and tokens/s, one column per step."""
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
    mixed, right, wrong = (_mean(rows, f"groups/{name}") for name in ("mixed", "all_right", "all_wrong"))
    equal = equal_rewards(mixed, right, wrong)
    lines += _item("groups", f"{percent(mixed)} mixed, {equal} (of {len(rows) * config.groups})")
    lines += _item("effective rank", _ranks(flight))
    forms = {name: share for name, share in rows[0].items() if name.startswith("gram_forms/")}
    if forms:
        by = (f"{percent(share)} by {name.removeprefix('gram_forms/')}" for name, share in forms.items())
        lines += _item("Gram of weights", ", ".join(by))
    samplers = [name.removeprefix(SAMPLER) for name in rows[0] if name.startswith(SAMPLER)]
    lines += _item("sampled by", f"the {samplers[0]} engine") if samplers else []
    return lines + _item(f"{config.model.dtype}"[: LABEL - 1], _precision(flight))


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def _reward(flight: Flight) -> str:
    """The mean over the first step's rollouts, with an interval that goes by prompts."""
    from grpo_sweeps.maths.intervals import mean_interval, share_interval  # scipy: a refused command answers without it

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
    """How the model's dtype changes the spectra, compared with float32."""
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
    most, most_of_all = at_most(config), next(filter(None, (at_most(run.config) for run in plan.runs)), "")
    text = f"this run {most}{_duration(seconds[flight.name], gpus)}: {before_s:.0f} s before its first step, "
    text += f"{most}{count(config.trainer.steps, 'step')} of {step_s:.3g} s"
    text += f", {most}{count(times, 'evaluation')} of {count(completions, 'completion')}" if times else ""
    if len(plan.runs) > 1:
        of_all = _duration(sum(seconds.values()), gpus)
        text += f"; all {len(plan.runs)} runs {most_of_all}{of_all}, one after the other"
    basis = "from step 2 here, scaled by each run's rollouts and parameters; evaluation at its sampling pace"
    return _item("expected", f"{text} ({basis})")


def disk(plan: Plan) -> list[str]:
    """What is free in the folder of the runs, and what their checkpoints take by estimate."""
    runs_dir = plan.runs[0].config.runs_dir
    free = f"runs_dir={runs_dir}: {preflight.free_bytes(runs_dir) / preflight.GB:.1f} GB are free"
    needs = [preflight.kept_bytes(run.config, preflight.model_folder(run.config.model)) for run in plan.runs]
    if not all(needs):
        return _item("disk", plain(f"{free}; what the checkpoints take is not known"))
    text = f"{free}, checkpoints of one run take about {max(needs) / preflight.GB:.3g} GB"
    text += f", of all {len(needs)} runs {sum(needs) / preflight.GB:.3g}" if len(needs) > 1 else ""
    return _item("disk", plain(text))


def _duration(seconds: float, gpus: int) -> str:
    if seconds < 100:
        text = f"{seconds:.0f} s"
    else:
        text = f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
    return text + (f" ({seconds * gpus / 3600:.2g} GPU-hours)" if gpus else "")
