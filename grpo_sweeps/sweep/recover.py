"""Makes a run's lost status.json again from its records: its seal, its configuration and the lines of its metrics.

Only for a run whose seal says that the folder is its own: of older records nobody knows who made them.
"""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from grpo_sweeps.tracking import provenance
from grpo_sweeps.tracking import seal as seals
from grpo_sweeps.tracking.lines import METRICS, TOKENS, last_lines
from grpo_sweeps.tracking.locks import only_writer
from grpo_sweeps.tracking.status import FILE_NAME, RecordError, RunStatus, read_status, write_status

NOTE = "status.json was lost and is made again from the records"
DAMAGED = "status.json.damaged"


def recovered(run_dir: Path) -> RunStatus | None:
    """The status that a run's records give; None where they do not say enough. Writes nothing."""
    try:
        seal = seals.read(run_dir)
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        total = int(config["trainer"]["steps"])
        name = f"R={config['R']} seed={config['seed']}"
    except (RecordError, OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None
    if seal is None or not seal.keeps or seal.identity != run_dir.name:
        return None
    lines, _ = last_lines(run_dir / METRICS)
    step = max((line["step"] + 1 for line in lines if "reward" in line), default=0)
    sampled = max((line.get(TOKENS, 0) for line in lines), default=0)
    evaluated = any(line["step"] == step and any(key.startswith("eval/") for key in line) for line in lines)
    spent = sampled >= tokens if isinstance(tokens := config["trainer"].get("tokens"), int) else False
    total = step if spent else total
    finished = step >= total and (evaluated or not seal.keeps[-1].evals)
    source = provenance.read(run_dir)
    times = [float(line["time"]) for line in lines]
    return RunStatus(
        "finished" if finished else "interrupted", run_dir.name, name, run_dir.parent.name, step, total,
        heartbeat=max(times, default=0.0), ended=max(times, default=None),
        commit=source.commit if source else None, dirty=source.dirty if source else None,
        versions=source.versions if source else {}, command=source.command if source else "", notes=[NOTE],
        ended_by="trainer.tokens" if spent else None,
    )  # fmt: skip


def recover(run_dir: Path) -> bool:
    """Write the status of a run that has lost its own, unless a process holds the run; True where that was done.

    A damaged one stays beside it as status.json.damaged.
    """
    if not run_dir.is_dir() or _readable(run_dir) or recovered(run_dir) is None:
        return False
    with only_writer(run_dir) as mine:
        status = recovered(run_dir)
        if mine is None or not mine() or status is None or _readable(run_dir):
            return False
        if (run_dir / FILE_NAME).exists():
            os.replace(run_dir / FILE_NAME, run_dir / DAMAGED)
        write_status(run_dir, status)
    return True


def _readable(run_dir: Path) -> bool:
    try:
        read_status(run_dir)
    except RecordError:
        return False
    return True
