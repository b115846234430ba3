"""What has run, what runs, what is missing: one row per run, from the run folders and one look at SLURM's queue.

Light on purpose: no torch, no MLflow, no pandas. A run that says `running` but is dead is shown as interrupted, unless
its job waits again; one that waits for a launcher or a job that is gone, as not started.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpo_sweeps.config.choices import chosen, common
from grpo_sweeps.paths import sweep_folder, sweep_names
from grpo_sweeps.sweep.execute import LOG_FILE
from grpo_sweeps.sweep.jobs import Jobs, noted_jobs
from grpo_sweeps.sweep.ledger import ask_queue, job_of, not_its_own, where_alive
from grpo_sweeps.sweep.plan import config_of
from grpo_sweeps.text import natural
from grpo_sweeps.tracking.glance import Finding, glance
from grpo_sweeps.tracking.lines import METRICS, RECOMPUTED, last_lines, median_of, step_seconds
from grpo_sweeps.tracking.status import FILE_NAME as STATUS
from grpo_sweeps.tracking.status import RecordError, RunStatus, copied, read_status

PACE_STEPS = 10
SILENT_S, SILENT_STEPS = 600.0, 10  # a running run is silent after so many seconds, and so many of its own steps


@dataclass(frozen=True)
class Row:
    """One run as it is shown. Paces are medians over its last steps.

    left_s: seconds that a running one still needs at that pace. parts_s: seconds of a step's parts, by name.
    memory_gib: the largest memory that it has allocated on a GPU.
    """

    sweep: str
    identity: str
    name: str
    state: str
    step: int = 0
    total: int = 0
    pace_s: float | None = None
    parts_s: dict[str, float] = field(default_factory=dict)
    tokens_per_second: float | None = None  # of sampling
    memory_gib: float | None = None
    left_s: float | None = None
    reward: float | None = None
    effective_rank: float | None = None
    node: str = ""
    job_id: str | None = None
    queue: str = ""  # what SLURM's queue says of a job that waits, or why it says nothing
    stuck: str = ""  # why that job does not start before somebody does something
    silent: str = ""  # of a running one that has written nothing for long, in words
    error: str | None = None
    log: str = ""
    damage: str | None = None  # a sentence about a file of the run that cannot be read, or not all of it
    lacks: tuple[Finding, ...] = ()  # what its record should hold and does not, at a quick look
    status: RunStatus | None = None

    @property
    def open(self) -> bool:
        """True while the run may still change."""
        return self.state in ("running", "queued")

    def as_json(self) -> dict[str, Any]:
        """All that is shown, and all that the run's status holds."""
        shown = asdict(self)
        shown["lacks"] = [one.sentence for one in self.lacks]
        status = shown.pop("status") or {}
        return {**status, **shown}


def collect(runs_dir: Path, sweep: str | None = None, where: str | None = None) -> list[Row]:
    """The rows of one sweep or of all, sorted by name. Raises ConfigError where there is nothing to read.

    where: KEY=VALUE,...: only the runs with these values in their configuration.
    """
    names = sweep_names(runs_dir) if sweep is None else [sweep_folder(runs_dir, sweep).name]
    folders = [path for name in names for path in (runs_dir / name).iterdir() if _holds_a_run(path)]
    if where is not None:
        configs = {str(path): config for path in folders if (config := config_of(path))}
        folders = [Path(path) for path in chosen(configs, where)]
    ask_queue(folders)
    jobs = {name: noted_jobs(runs_dir / name) for name in names}
    rows = (_row(path, jobs[path.parent.name]) for path in folders)
    return sorted(rows, key=lambda row: (row.sweep, natural(row.name), row.identity))


def heading(rows: Sequence[Row]) -> str:
    """What all these runs have in common, in words; "" where a configuration cannot be read."""
    configs = [config_of(Path(row.log).parent) for row in rows]
    return common([config for config in configs if config]) if all(configs) else ""


def _holds_a_run(path: Path) -> bool:
    """True for a run's folder; records without a status count too, so that what is wrong with them is shown."""
    return not path.name.startswith(".") and any((path / name).exists() for name in (STATUS, METRICS))


def _row(run_dir: Path, jobs: Jobs) -> Row:
    log = str(run_dir / LOG_FILE)
    try:
        status = read_status(run_dir)
    except RecordError as error:
        return Row(
            run_dir.parent.name, run_dir.name, run_dir.name, "unreadable", error=str(error), log=log, damage=str(error)
        )
    if sentence := copied(run_dir, status):
        return Row(run_dir.parent.name, run_dir.name, run_dir.name, "copy", error=sentence, log=log, damage=sentence)
    state, error_text = _state(status, jobs)
    lines, damage = last_lines(run_dir / METRICS)
    steps = _by_step(lines)
    in_order = [steps[step] for step in sorted(steps)]
    recent = in_order[-PACE_STEPS:]
    parts = [name for name in (recent[-1] if recent else {}) if name.startswith("time/")]
    pace = step_seconds(in_order, PACE_STEPS)
    answer = job_of(status, jobs) if status.state not in ("finished", "failed") else None
    waits = answer is not None and answer.alive and state == "queued"
    return Row(
        run_dir.parent.name, status.identity or run_dir.name, status.name, state, status.step, status.total,
        pace_s=pace,
        tokens_per_second=median_of(recent, "sampling/tokens_per_second"),
        parts_s={name.removeprefix("time/"): median_of(recent, name) or 0.0 for name in parts},
        memory_gib=_last(steps, "memory/peak_gib"),
        left_s=_time_left(steps, status.step, status.total) if state == "running" else None,
        reward=_last(steps, "reward"), effective_rank=_last(steps, "spectral/effective_rank"),
        node=answer.node if answer and waits else "" if state in ("queued", "not started") else status.host,
        job_id=status.job_id, queue=answer.text() if answer and waits else "",
        stuck=answer.stuck if answer and waits else "",
        silent=_silence(status, lines, pace) if state == "running" else "",
        error=error_text, log=log, damage=damage, status=status,
        lacks=() if state in ("running", "queued") else tuple(glance(run_dir, status, lines)),
    )  # fmt: skip


def _silence(status: RunStatus, lines: list[dict[str, Any]], pace_s: float | None) -> str:
    """For how long a running run has neither stepped nor evaluated, in words; "" where that is not long for it."""
    times = [line["time"] for line in lines[-1:] if isinstance(line.get("time"), int | float)]
    quiet = time.time() - max([status.started or 0.0, *times])
    if quiet <= max(SILENT_S, SILENT_STEPS * (pace_s or 0.0)):
        return ""
    usual = "" if pace_s is None else f", which takes {pace_s:.3g} s as a rule"
    return f"no step for {quiet / 60:.0f} minutes{usual}; a reward that hangs is ended by reward_timeout=SECONDS"


def _by_step(lines: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The training steps among the lines, with the values of later lines of correction."""
    steps: dict[int, dict[str, Any]] = {}
    for line in lines:
        if "reward" in line:
            steps[line["step"]] = line
        elif RECOMPUTED in line and line["step"] in steps:
            steps[line["step"]] = steps[line["step"]] | line
    return steps


def _state(status: RunStatus, jobs: Jobs) -> tuple[str, str | None]:
    """The present state, and the reason for it."""
    if status.state in ("finished", "failed") or (status.state == "running" and not status.stale()):
        return status.state, status.error
    if where_alive(status, jobs):
        return "queued", None
    state, error = "interrupted", status.error
    if status.state == "running":
        error = error or f"process {status.pid} on {status.host} has ended without a word"
    elif status.state == "queued" and status.step == 0:
        state = "not started"
    return state, "; ".join(part for part in (error, not_its_own(status, jobs)) if part) or None


def _time_left(steps: dict[int, dict[str, Any]], done: int, total: int) -> float | None:
    """Seconds left, by the times at which the last steps were written (including evaluations between them)."""
    recent = sorted(steps)[-PACE_STEPS:]
    if len(recent) < 2:
        return None
    pace = (steps[recent[-1]]["time"] - steps[recent[0]]["time"]) / (recent[-1] - recent[0])
    return max(0.0, pace * (total - done))


def _last(steps: dict[int, dict[str, Any]], key: str) -> float | None:
    values = [steps[step][key] for step in sorted(steps) if isinstance(steps[step].get(key), int | float)]
    return float(values[-1]) if values else None
