"""A command's runs, composed and compared with what is there: the one description that printing, preflight and every
launcher share; and the grid of them that `dry_run=true` prints.

The grid shows for each run its identity, what would be done, the resources and the cost. The cost is measured, not
modelled: the median step of the runs of the same sweep that have the same R, model, prompts and rollout. Without such a
run the cost is not known, and nothing is made up.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_sweeps.cli import aligned, count
from grpo_sweeps.config import RunConfig, to_mapping
from grpo_sweeps.sweep.execute import CONFIG_FILE
from grpo_sweeps.sweep.ledger import Decision, ask_queue, decide, status_or_none
from grpo_sweeps.sweep.origin import Stale
from grpo_sweeps.tracking import provenance
from grpo_sweeps.tracking.lines import METRICS, last_lines, step_seconds
from grpo_sweeps.tracking.made_by import UNKNOWN, MadeBy

LAST_STEPS = 50
HEADER = ("run", "identity", "action", "steps to do", "takes", "s/step", "hours", "GPU-hours", "why")


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """One run of a plan: its frozen configuration, its folder, and what is to be done with it."""

    config: RunConfig
    identity: str
    name: str
    run_dir: Path
    decision: Decision
    made_by: MadeBy = UNKNOWN  # what would make it now
    choices: Mapping[str, str] = field(default_factory=dict)  # the chosen file of each group of conf/

    @property
    def frozen(self) -> dict[str, Any]:
        """The resolved configuration in its written form: what a job gets as its argument."""
        return to_mapping(self.config)


@dataclass(frozen=True)
class Plan:
    """All runs of one command, in the order of the command."""

    runs: tuple[PlannedRun, ...]
    identities: tuple[str, ...]  # one per job of the command, so a run that was given twice is here twice
    dry_run: bool = False
    command: str = ""
    notes: tuple[str, ...] = ()
    redo: str | None = None
    wait: bool = True

    @property
    def due(self) -> tuple[PlannedRun, ...]:
        return tuple(run for run in self.runs if run.decision.action != "skip")

    @property
    def folder(self) -> Path:
        """The folder of the sweep; a command has only one."""
        return self.runs[0].run_dir.parent

    def decided(self) -> Plan:
        """The same plan, decided by what is there at this moment."""
        commit = provenance.commit()
        ask_queue(run.run_dir for run in self.runs)
        runs = [
            replace(run, decision=decide(run.run_dir, run.config.trainer.steps, self.redo, commit, made_by=run.made_by))
            for run in self.runs
        ]
        return replace(self, runs=tuple(runs))

    def refuse_changed(self) -> None:
        """Raise Stale where something else than made its records would make a run, which nobody may mix unasked: then
        nothing of the command is started."""
        changed = [run for run in self.runs if run.decision.why == "changed"]
        if not changed:
            return
        first, more = changed[0], len(changed) - 1
        others = f" (and {count(more)} more)" if more else ""
        raise Stale(f"{first.name}{others}, {first.run_dir}: {first.decision.reason}")


def grid(plan: Plan, params: Mapping[str, Any]) -> list[str]:
    """The lines of the table and its sum. params: the launcher's; empty for runs in this process."""
    pace = measured(plan)
    gpus = gpus_of(params)
    rows, hours, unknown, budget = [HEADER], 0.0, 0, ""
    for run in plan.runs:
        left = steps_left(run)
        most = at_most(run.config) if left else ""
        seconds = pace.get(kind_of(run.frozen))
        cost = ("", "", "")
        if left and seconds is not None:
            own = left * seconds / 3600
            cost = (_short(seconds), f"{most}{_short(own)}", f"{most}{_short(own * gpus)}" if gpus else "")
            hours, budget = hours + own, budget or most
        elif left:
            unknown += 1
            cost = ("not measured", "?", "?")
        takes = resources(params) if left else ""
        rows.append((run.name, run.identity, run.decision.action, f"{most}{left}", takes, *cost, run.decision.reason))
    return [*aligned(rows), _sum(len(plan.due), hours, gpus, unknown, budget)]


def at_most(config: RunConfig) -> str:
    """ "up to " before what is counted as though a run took all its steps, where a budget of tokens may end it before;
    "" for a run without one."""
    return "up to " if config.trainer.tokens else ""


def _sum(due: int, hours: float, gpus: int, unknown: int, budget: str) -> str:
    if not due:
        return "nothing to do"
    if unknown == due:
        return f"{count(due)} to do; their cost is known once a run of their kind has made a step"
    line = f"{count(due)} to do: {budget}about {_short(hours)} hours of steps"
    line += f", {_short(hours * gpus)} GPU-hours" if gpus else ""
    return line + (f", without {count(unknown)} of a kind that is not measured" if unknown else "")


def steps_left(run: PlannedRun) -> int:
    """The number of steps that a run would make now; with a budget of tokens at most."""
    if run.decision.action == "skip":
        return 0
    status = status_or_none(run.run_dir) if run.decision.action == "continue" else None
    return max(0, run.config.trainer.steps - (status.step if status else 0))


def measured(plan: Plan) -> dict[str, float]:
    """Seconds per step by kind of run, from the records of all runs of the sweep, in the plan or not."""
    found: dict[str, list[float]] = {}
    for path in sorted(plan.folder.glob(f"*/{METRICS}")):
        seconds = step_seconds(last_lines(path)[0], LAST_STEPS)
        config = config_of(path.parent)
        if seconds is not None and config is not None:
            found.setdefault(kind_of(config), []).append(seconds)
    return {kind: statistics.median(values) for kind, values in found.items()}


def kind_of(config: Mapping[str, Any]) -> str:
    """The kind of a run: what a step's time depends on most, as one text."""
    prompts = (config.get("trainer") or {}).get("prompts")
    return json.dumps([config.get("R"), config.get("model"), prompts, config.get("rollout")], sort_keys=True)


def config_of(run_dir: Path) -> Mapping[str, Any] | None:
    """The configuration of a run's folder; None where it cannot be read: it says nothing about others."""
    path = run_dir / CONFIG_FILE
    try:
        return _config_at(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@functools.lru_cache(maxsize=4096)
def _config_at(path: Path, changed_ns: int) -> Mapping[str, Any] | None:
    """The file's content, read once while it does not change: `status watch=true` looks every two seconds."""
    import yaml

    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same loader in C, ten times as fast
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    except (ValueError, yaml.YAMLError):
        return None
    return content if isinstance(content, Mapping) else None


def gpus_of(params: Mapping[str, Any]) -> int:
    """The number of GPUs per run."""
    return int(params.get("gpus_per_node") or params.get("gpus_per_task") or 0)


def resources(params: Mapping[str, Any]) -> str:
    """The resources that each run asks the launcher for, in words."""
    if not params:
        return "this process"
    parts = [count(gpus_of(params), "GPU")] if gpus_of(params) else []
    if params.get("gres"):
        parts.append(f"gres {params['gres']}")
    parts += [count(int(params["cpus_per_task"]), "CPU")] if params.get("cpus_per_task") else []
    for key in ("mem_gb", "mem_per_gpu", "mem_per_cpu"):
        if params.get(key):
            parts.append(f"{params[key]:g} GB" if key == "mem_gb" else f"{params[key]} {key[4:].replace('_', ' ')}")
            break
    if minutes := int(params.get("timeout_min") or 0):
        parts.append(f"{minutes // 60}:{minutes % 60:02} h")
    parts += [f"partition {params['partition']}"] if params.get("partition") else []
    return ", ".join(parts)


def _short(number: float) -> str:
    return f"{number:.1f}" if number >= 10 else f"{number:.2g}"
