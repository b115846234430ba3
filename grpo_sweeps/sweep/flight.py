"""A flight check: two steps of a command's heaviest run down the real path, and what they say of the runs to come.

The run is executed as any other, in a temporary folder: it is stopped after its first step, which leaves a checkpoint,
and started again, which goes on from it in a fresh set-up. Only evaluation and the copy to MLflow are left out.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_sweeps.config import RunConfig, TrackingConfig, to_mapping
from grpo_sweeps.sweep import paths, preflight
from grpo_sweeps.sweep.execute import LOG_FILE, RunResult, Signals, execute
from grpo_sweeps.sweep.ledger import status_or_none
from grpo_sweeps.sweep.planned import Plan, PlannedRun
from grpo_sweeps.sweep.say import count, say
from grpo_sweeps.symptoms import NAMED, known, symptoms
from grpo_sweeps.tracking.status import seconds_since_start
from grpo_sweeps.types import ConfigError, GroupRecord

COMPARED = 16  # groups of the first step whose spectra are taken in float32 as well
STEPS = 2
PREFIX = "grpo_sweeps_check_"
# Functions on the way through a step, and the part of the run that they are: the innermost names what failed.
PARTS = {
    "prepare": "loading model and data", "load_policy": "loading the model", "check_data": "loading the data",
    "resume": "resuming from the checkpoint", "save": "writing the checkpoint", "draw": "sampling",
    "reward_of": "the reward", "_advantages": "the estimator", "verify": "verifying the Gram",
    "backward": "the backward pass", "backward_of_loss": "the backward pass", "prepare_terms": "scoring",
    "step_credit": "continuations", "apply_update": "the update", "log_groups": "writing the records",
}  # fmt: skip


@dataclass(frozen=True)
class Flight:
    """What the two steps left. `rows`: their metrics; `walls`: seconds of the two starts of the run, all together.

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
        """What looks wrong, a sentence each; the failure first."""
        failed = [f"the run failed in {self.failed_in}: {self.failure}"] if self.failure else []
        found = [symptom.sentence for symptom in symptoms(to_mapping(self.config), self.rows)]
        return [*failed, *found, *(note for note in self.notes if not note.startswith(NAMED))]


def fly(plan: Plan, start: Any, jobs_copy: bool = False, params: Mapping[str, Any] | None = None) -> list[RunResult]:
    """In place of `sweep.launch.launch`: check the heaviest run and print the page. One result per run of the plan;
    that of the run that was tried is a failure where something looks wrong.

    Raises KeyboardInterrupt after Ctrl-C, with the temporary folder removed.
    """
    from grpo_sweeps.sweep.flight_page import page

    if plan.dry_run:
        raise ConfigError("dry_run=true: grpo_sweeps.check tries a run; leave it out, or plan by grpo_sweeps.run")
    run = heaviest(plan.runs)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=_place(run.config)) as folder:
        say(f"flight check of {run.name}: {STEPS} steps in {folder}, which is removed afterwards")
        flight = take_off(run, Path(folder))
    for line in page(flight, plan, params or {}):
        print(line)
    results = [RunResult(one.identity, one.name, "queued", str(one.run_dir)) for one in plan.runs]
    state, error = ("failed", flight.wrong[0]) if flight.wrong else ("finished", None)
    return [replace(one, state=state, error=error) if one.identity == run.identity else one for one in results]


def heaviest(runs: Sequence[PlannedRun]) -> PlannedRun:
    """The run with the largest rollouts a step x longest completion x parameters of the model. A model whose size is
    not known counts as the largest that is."""
    sizes = [parameters(run.config) for run in runs]
    largest = max((size for size in sizes if size), default=1)
    loads = [rollouts(run.config) * run.config.rollout.max_new_tokens * (size or largest)
             for run, size in zip(runs, sizes, strict=True)]  # fmt: skip
    return runs[loads.index(max(loads))]


def rollouts(config: RunConfig) -> int:
    """Rollouts of a step."""
    return config.R * config.groups


def parameters(config: RunConfig) -> int | None:
    """Parameters of a run's model, or what stands for them in comparisons: a GGUF file's bytes; None if unknown."""
    path = Path(config.model.path)
    return path.stat().st_size if path.is_file() else preflight.parameters(preflight.model_folder(config.model))


def checked(config: RunConfig, runs_dir: Path) -> RunConfig:
    """The run as it is tried: the same but for its length, its evaluations and where it writes."""
    steps = max(STEPS, config.trainer.steps)
    trainer = replace(config.trainer, steps=steps, eval_every=0, checkpoint_every=0, checkpoint_minutes=None)
    analysis = replace(config.analysis, every=min(1, config.analysis.every))
    if analysis.every:
        analysis = replace(analysis, compare_float32=COMPARED)
    tracking = TrackingConfig("local")
    return replace(config, trainer=trainer, analysis=analysis, tracking=tracking, runs_dir=str(runs_dir), sweep="check")


def take_off(run: PlannedRun, folder: Path) -> Flight:
    """One step, a checkpoint, and from it the second step. What fails is in the flight."""
    from grpo_sweeps.sweep.launch import free_memory, interruptible

    config = checked(run.config, folder)
    run_dir = paths.run_dir(folder, config.sweep, run.identity)
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
    """The part that failed and why, where the run does not stand where it was to stop; else empty."""
    if result.state not in ("interrupted", "finished"):
        log = run_dir / LOG_FILE
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        return failed_part(text) or f"step {step}", result.error or f"it is {result.state}"
    if result.step != step:
        return "resuming", f"it stands at step {result.step} after {count(step, 'step')}"
    return "", ""


def failed_part(log: str) -> str:
    """The part of a run that the last traceback in its log ended in; empty where no frame tells."""
    trace = log[log.rfind("Traceback (most recent call last)") :]
    named = [PARTS[name] for name in re.findall(r'File ".*", line \d+, in (\w+)', trace) if name in PARTS]
    return named[-1] if named else ""


def _read(flight: Flight, run_dir: Path) -> Flight:
    """The records of the steps so far."""
    from grpo_sweeps.tracking.local import read_groups, read_metrics

    status = status_or_none(run_dir)
    return replace(
        flight,
        rows=[known(row) for row in read_metrics(run_dir).to_dict("records")],
        groups=read_groups(run_dir),
        notes=tuple(status.notes) if status else (),
    )


def _place(config: RunConfig) -> Path | None:
    """Where the temporary folder goes: the system's place for such, or where the runs go if that has no room for the
    checkpoints."""
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
