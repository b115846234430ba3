"""A sweep's local record as DataFrames: what the report, and a notebook, start from.

from grpo_sweeps import load_sweep
sweep = load_sweep("paper_table1")
sweep.groups.groupby(["arm", "R"]).effective_rank.mean()
sweep.gram(sweep.groups[sweep.groups.measured].index[0])  # the R x R Gram of that group's scores
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from grpo_sweeps.report.arms import Arms, find_arms
from grpo_sweeps.report.measure import group_rows
from grpo_sweeps.report.parts import Parts, run_parts
from grpo_sweeps.tracking.local import (
    RecordError,
    RunStatus,
    read_completions,
    read_evals,
    read_groups,
    read_metrics,
    read_status,
)
from grpo_sweeps.types import Completion, EvalRecord, GroupRecord

RUN_COLUMNS = [
    "run", "name", "arm", "R", "seed", "state", "step", "total", "error", "commit", "dirty", "started", "ended",
    "command", "model", "model_path", "task", "reward", "estimator", "aggregation", "prompts", "path",
]  # fmt: skip


class ReportError(ValueError):
    """The report cannot be made: one sentence that says why. Exit code 2."""


@dataclass
class Sweep:
    """One sweep's record. Every frame has the columns `run` (identity), `arm`, `R` and `seed`.

    runs         one row a run: state, step, commit, model, task, ...
    metrics      one row a run and step, as in metrics.jsonl
    groups       one row a group of rollouts: k, mixed, measured, and the spectral values of `report.measure`
    evals        one row a held-out problem and evaluation
    completions  one row a kept completion
    configs, statuses   by run; notes   what could not be read, in sentences
    parts        what `report.parts` took from Grams by layer or parameter, where these were not kept; else None
    """

    name: str
    path: Path
    arms: Arms
    runs: pd.DataFrame
    metrics: pd.DataFrame
    groups: pd.DataFrame
    evals: pd.DataFrame
    completions: pd.DataFrame
    configs: dict[str, dict[str, Any]]
    statuses: dict[str, RunStatus]
    notes: list[str] = field(default_factory=list)
    records: list[GroupRecord] = field(default_factory=list, repr=False)
    parts: list[Parts] | None = field(default=None, repr=False)

    def record(self, group: int) -> GroupRecord:
        """The whole record of a row of `groups`, by its index label."""
        return self.records[group]

    def gram(self, group: int, by: str | None = None) -> np.ndarray:
        """(R, R) float64 Gram of a row of `groups`, by its index label; `by`: a layer or parameter, where kept.

        Raises KeyError when the group was not measured, or not by that name.
        """
        record = self.records[group]
        if record.gram is None:
            raise KeyError(
                f"group {group} was not measured (all rewards equal, or measurement off); "
                "choose a row of groups with measured=True"
            )
        gram = record.gram if by is None else record.gram_by.get(by)
        if gram is None:
            raise KeyError(f"group {group} has no Gram for {by!r}")
        return gram

    def kept_by(self, run: str) -> str:
        """The run's `analysis.by`: whole, layer or parameter; empty where its configuration does not say."""
        return str(_get(self.configs[run], "analysis.by") or "")

    @property
    def cells(self) -> list[tuple[str, int]]:
        """(arm, R) of every run, sorted: the rows of Table 1."""
        pairs = {(str(a), int(r)) for a, r in zip(self.runs["arm"], self.runs["R"], strict=True)}
        return sorted(pairs)


def load_sweep(name: str | None = None, runs_dir: str | Path = "runs", keep_parts: bool = True) -> Sweep:
    """Read runs_dir/<name>/ (the newest sweep when `name` is None) through the local record's reader.

    keep_parts: keep the Grams by layer or parameter in the records. They can take hundreds of times the memory of
    all else; False takes from them, run by run, what the report shows (`Sweep.parts`) and lets them go.
    Raises ReportError, one sentence, when there is no such sweep or none of its runs can be read.
    """
    path = find_sweep(name, Path(runs_dir))
    notes: list[str] = []
    configs: dict[str, dict[str, Any]] = {}
    statuses: dict[str, RunStatus] = {}
    for run_dir in _run_dirs(path):
        try:
            configs[run_dir.name] = _read_config(run_dir)
            statuses[run_dir.name] = _read_state(run_dir, configs[run_dir.name])
        except (OSError, ValueError, TypeError) as error:  # RecordError is a ValueError
            configs.pop(run_dir.name, None)
            notes.append(f"Run {run_dir.name} was left out: {error}")
    if not configs:
        raise ReportError(f"sweep={path.name}: none of its runs can be read ({' '.join(notes)}).")
    arms = find_arms(list(configs.values()))
    runs = _runs_frame(path, configs, statuses, arms)
    unread: dict[str, Any] = dict.fromkeys(_COLUMNS, pd.DataFrame())
    sweep = Sweep(path.name, path, arms, runs, **unread, configs=configs, statuses=statuses, notes=notes)
    _read_records(sweep, keep_parts)
    return sweep


def find_sweep(name: str | None, runs_dir: Path) -> Path:
    """The folder of the named sweep, or of the one whose runs were last written to."""
    if name is not None and not re.fullmatch(r"[\w][\w.+=-]*", name):
        raise ReportError(f"sweep={name}: a sweep's name is one folder name of letters, digits and _ . + = -.")
    found = sorted(p for p in runs_dir.iterdir() if _run_dirs(p)) if runs_dir.is_dir() else []
    if not found:
        raise ReportError(f"runs_dir={runs_dir}: no sweep was found there; run one first, or name another folder.")
    if name is None:
        return max(found, key=_last_written)
    for path in found:
        if path.name == name:
            return path
    raise ReportError(f"sweep={name}: no such sweep in {runs_dir}; there are {', '.join(p.name for p in found)}.")


def _run_dirs(path: Path) -> list[Path]:
    if not path.is_dir() or path.name.startswith("."):
        return []
    return sorted(p for p in path.iterdir() if (p / "config.yaml").is_file() and not p.name.startswith("."))


def _last_written(path: Path) -> float:
    files = [f for run in _run_dirs(path) for f in (run / "config.yaml", run / "status.json", run / "metrics.jsonl")]
    return max(f.stat().st_mtime for f in files if f.exists())


def _read_config(run_dir: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RecordError(f"its config.yaml cannot be read ({' '.join(str(error).split())}).") from error
    if not isinstance(config, dict) or not all(isinstance(config.get(key), int) for key in ("R", "seed")):
        raise RecordError("its config.yaml holds no R and seed.")
    return config


def _read_state(run_dir: Path, config: dict[str, Any]) -> RunStatus:
    if not (run_dir / "status.json").exists():
        return RunStatus(state="queued", identity=run_dir.name, total=int(_get(config, "trainer.steps") or 0))
    return read_status(run_dir)


def _get(config: dict[str, Any], dotted: str) -> Any:
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _runs_frame(
    path: Path, configs: dict[str, dict[str, Any]], statuses: dict[str, RunStatus], arms: Arms
) -> pd.DataFrame:
    rows = []
    for (run, config), arm in zip(configs.items(), arms.labels, strict=True):
        status = statuses[run]
        rows.append(
            {
                "run": run, "name": status.name or f"R={config['R']} seed={config['seed']}", "arm": arm,
                "R": config["R"], "seed": config["seed"], "step": status.step,
                "state": "interrupted" if status.stale() else status.state,
                "total": status.total, "error": status.error, "commit": status.commit, "dirty": status.dirty,
                "started": status.started, "ended": status.ended, "command": status.command,
                "model": _get(config, "model.name"), "model_path": _get(config, "model.path"),
                "task": _get(config, "task.name"), "reward": _get(config, "reward._target_"),
                "estimator": _get(config, "estimator._target_"), "aggregation": config.get("aggregation"),
                "prompts": _get(config, "trainer.prompts"), "path": str(path / run),
            }
        )  # fmt: skip
    frame = pd.DataFrame(rows, columns=RUN_COLUMNS)
    return frame.sort_values(["arm", "R", "seed", "run"], ignore_index=True)


def _read_records(sweep: Sweep, keep_parts: bool) -> None:
    """Fill the sweep's frames, records and, unless they are kept in the records, parts, run by run."""
    frames_of: dict[str, list[pd.DataFrame]] = {kind: [] for kind in _COLUMNS}
    parts: list[Parts] = []
    for run in sweep.runs.itertuples():
        folder, name = str(run.path), str(run.run)
        try:
            groups = read_groups(folder)
            frames = {
                "metrics": read_metrics(folder),
                "groups": group_rows(groups),
                "evals": _records_frame(read_evals(folder), EvalRecord),
                "completions": _records_frame(read_completions(folder), Completion),
            }
            if not keep_parts:
                parts += run_parts(name, sweep.kept_by(name), groups)
                groups = [replace(record, gram_by={}) for record in groups]
        except (OSError, ValueError, KeyError, TypeError) as error:  # RecordError is a ValueError
            sweep.notes.append(f"The record of run {name} ({run.name}) was left out: {' '.join(str(error).split())}")
            continue
        sweep.records += groups
        for kind, frame in frames.items():
            tags = pd.DataFrame({"run": run.run, "arm": run.arm, "R": run.R, "seed": run.seed}, index=frame.index)
            frames_of[kind].append(pd.concat([tags, frame.drop(columns="R", errors="ignore")], axis=1))
    for kind, found in frames_of.items():
        setattr(sweep, kind, _together(found, _COLUMNS[kind]))
    sweep.parts = None if keep_parts else parts


def _records_frame(records: list[Any], kind: type) -> pd.DataFrame:
    names = [f.name for f in fields(kind)]
    return pd.DataFrame([[getattr(r, n) for n in names] for r in records], columns=names)


_COLUMNS = {
    "metrics": ["step", "time"],
    "groups": [name for name in group_rows([]).columns if name != "R"],
    "evals": [f.name for f in fields(EvalRecord)],
    "completions": [f.name for f in fields(Completion)],
}  # of a sweep of whose runs no record can be read


def _together(frames: list[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    """One frame; empty parts give their columns only (they would turn numbers into objects)."""
    filled = [f for f in frames if len(f)]
    if filled:
        return pd.concat(filled, ignore_index=True)
    return frames[0] if frames else pd.DataFrame(columns=["run", "arm", "R", "seed", *columns])
