"""A sweep's local record as DataFrames: what the report, and a notebook, start from.

from grpo_sweeps import load_sweep
sweep = load_sweep("paper_table1")
sweep.groups.groupby(["arm", "R"]).effective_rank.mean()
sweep.gram(sweep.groups[sweep.groups.measured].index[0])  # the R x R Gram of that group's scores
"""

from __future__ import annotations

import bisect
import operator
import os
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from html import escape
from pathlib import Path
from typing import Any, overload

import numpy as np
import pandas as pd
import pyarrow as pa
import yaml

from grpo_sweeps.config import groups_a_step
from grpo_sweeps.config.choices import chosen, common
from grpo_sweeps.report.measure.parts import Parts, run_parts
from grpo_sweeps.report.measure.rows import COLUMNS, KEYS
from grpo_sweeps.report.read.ahead import RunToRead, make_ahead
from grpo_sweeps.report.read.arms import Arms, find_arms
from grpo_sweeps.report.read.cache import GroupRows, RowCache
from grpo_sweeps.report.read.kept import CacheUse, Kept, code_of, signature, worth_keeping
from grpo_sweeps.spectra.floor import EPS
from grpo_sweeps.text import count, did_you_mean, natural
from grpo_sweeps.tracking import journal, lines, local
from grpo_sweeps.tracking.lines import METRICS
from grpo_sweeps.tracking.local import (
    RunStatus,
    read_completions,
    read_evals,
    read_groups,
    read_status,
    read_updates,
)
from grpo_sweeps.tracking.status import RecordError, copied
from grpo_sweeps.types import Completion, ConfigError, EvalRecord, GroupRecord, UpdateRecord


class Records(Sequence[GroupRecord]):
    """The whole records of a sweep's groups, read from disk when the first one of a run is asked for.

    Record i belongs to row i of `Sweep.groups`. A report needs few of them, and most sweeps are larger than memory
    once every Gram is an object.

    keep_parts: with the Grams by layer or parameter.
    """

    def __init__(self, keep_parts: bool = True) -> None:
        self._keep_parts = keep_parts
        self._folders: list[Path] = []
        self._keys: list[pd.DataFrame] = []
        self._starts: list[int] = []
        self._length = 0
        self._read: dict[int, list[GroupRecord]] = {}
        self._lock = threading.Lock()

    def add(self, run_dir: Path, keys: pd.DataFrame) -> None:
        """The records of one run follow: those that `keys` (the columns of `rows.KEYS`) names, in its order."""
        self._folders.append(run_dir)
        self._keys.append(keys)
        self._starts.append(self._length)
        self._length += len(keys)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> GroupRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[GroupRecord]: ...
    def __getitem__(self, index: int | slice) -> GroupRecord | list[GroupRecord]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        i = operator.index(index)
        i = i + self._length if i < 0 else i
        if not 0 <= i < self._length:
            raise IndexError(f"group {index}: there are {self._length} groups")
        run = bisect.bisect_right(self._starts, i) - 1
        with self._lock:
            if run not in self._read:
                self._read[run] = self._of_run(run)
        return self._read[run][i - self._starts[run]]

    def _of_run(self, run: int) -> list[GroupRecord]:
        """The run may have gone on since its rows were read: records are found by what names them."""
        found = {(r.step, r.prompt_id, r.group): r for r in read_groups(self._folders[run])}
        try:
            records = [found[key] for key in self._keys[run][KEYS].itertuples(index=False, name=None)]
        except KeyError as error:
            raise RecordError(
                f"{self._folders[run]}: its record of group {error} is gone; load the sweep again."
            ) from error
        return records if self._keep_parts else [replace(record, gram_by={}) for record in records]


RUN_COLUMNS = [
    "run", "name", "arm", "R", "seed", "state", "step", "total", "error", "commit", "dirty", "started", "ended",
    "command", "model", "model_path", "task", "reward", "estimator", "aggregation", "lr", "prompts", "sweep", "path",
    "verdict",
]  # fmt: skip
TAGS = ["run", "arm", "R", "seed"]
OF_GROUPS = ["model", "estimator", "lr"]  # further columns of `groups`, as in `runs`
NOTEBOOK = ["name", "arm", "R", "seed", "state", "step", "total", "model", "task", "lr", "started"]  # of a table there
IN_HEADING = ("arm", "model", "task", "lr")  # of these, where one value is all runs'
MOST_ARMS, MOST_ROWS = 6, 20  # that are listed of an object
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same loader in C where there is one, ten times as fast


class ReportError(ValueError):
    """The report cannot be made: one sentence that says why. Exit code 2."""


@dataclass(repr=False)
class Sweep:
    """One sweep's record, or that of several. Every frame has the columns `run` (identity), `arm`, `R` and `seed`.

    runs         one row per run: state, step, started (UTC), commit, model, task, estimator, lr, sweep, ...
    metrics      one row per run and step, as in metrics.jsonl
    groups       one row per group of rollouts: model, estimator, lr, k, mixed, measured, and the spectral values of
                 `measure.spectral`
    evals        one row per held-out problem and evaluation
    completions  one row per kept completion
    updates      one row per parameter and measured update
    configs, statuses   by run; notes   what could not be read, in sentences
    waiting      runs of which nothing is recorded yet -> their names; some have no configuration, and no row in `runs`
    parts        what `measure.parts` took from Grams by layer or parameter, where these were not kept; else None
    by_part      runs that kept such Grams
    paths        the folders of the sweeps; `path` is the first
    where        the condition that chose the runs; None: all of them
    """

    name: str
    path: Path
    arms: Arms
    runs: pd.DataFrame
    metrics: pd.DataFrame
    groups: pd.DataFrame
    evals: pd.DataFrame
    completions: pd.DataFrame
    updates: pd.DataFrame
    configs: dict[str, dict[str, Any]]
    statuses: dict[str, RunStatus]
    notes: list[str] = field(default_factory=list)
    waiting: dict[str, str] = field(default_factory=dict)
    by_part: set[str] = field(default_factory=set)
    records: Records = field(default_factory=Records, repr=False)
    parts: list[Parts] | None = field(default=None, repr=False)
    paths: tuple[Path, ...] = ()
    where: str | None = None

    @property
    def words(self) -> str:
        """What a command is given to name these runs."""
        names = ",".join(path.name for path in self.paths)
        return f"sweep={names}" + (f" where={self.where}" if self.where else "")

    @property
    def folder_name(self) -> str:
        """The name of the folder that a report on these runs goes to."""
        return self.name + (re.sub(r"[^\w.=,-]", "-", f"_where_{self.where}") if self.where else "")

    def __repr__(self) -> str:
        """A few lines: what is there, not the records themselves."""
        states = ", ".join(f"{n} {state}" for state, n in self.runs["state"].value_counts().items())
        Rs = ", ".join(str(R) for R in sorted(self.runs["R"].unique()))
        arms = sorted({str(arm) for arm in self.runs["arm"]}, key=natural)
        lines = [
            f"Sweep {self.name}: {count(len(self.runs))} ({states}); R = {Rs}; "
            f"{count(self.runs['seed'].nunique(), 'seed')}",
            f"  {common(self.configs.values())}",
            f"  {len(arms)} arms: {'; '.join(arms[:MOST_ARMS])}{' ...' if len(arms) > MOST_ARMS else ''}"
            if len(arms) > 1
            else "",
            "  " + ", ".join(f"{name} {len(getattr(self, name)):,}" for name in _COLUMNS) + " rows",
        ]
        return "\n".join(line for line in lines if line.strip())

    def _repr_html_(self) -> str:
        """The same for a notebook, with a table of the runs: what these have in common is said above it."""
        first, *rest = repr(self).splitlines()
        same = {name for name in IN_HEADING if self.runs[name].nunique(dropna=False) < 2}
        shown = self.runs[[name for name in NOTEBOOK if name in self.runs and name not in same]]
        formats: dict[Any, Any] = {"started": lambda time: "" if pd.isna(time) else f"{time:%Y-%m-%d %H:%M}"}
        table = shown.to_html(
            index=False, max_rows=MOST_ROWS, border=0, na_rep="", formatters=formats, float_format=lambda x: f"{x:g}"
        )
        return (
            f"<p><strong>{escape(first)}</strong></p><p>{'<br>'.join(map(escape, rest))}</p>"
            f'<div style="overflow-x: auto">{table}</div>'
        )

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

    def folder(self, run: str) -> Path:
        """The run's folder."""
        return Path(str(self.runs.loc[self.runs["run"] == run, "path"].iloc[0]))

    def kept_by(self, run: str) -> str:
        """The run's `analysis.by`: whole, layer or parameter; empty where its configuration does not say."""
        return str(_get(self.configs[run], "analysis.by") or "")

    def dtype(self, run: str) -> str | None:
        """The run's `model.dtype`; None where its configuration does not say one that is known."""
        found = _get(self.configs[run], "model.dtype")
        return found if found in EPS else None

    @property
    def cells(self) -> list[tuple[str, int]]:
        """(arm, R) of every run, sorted: the rows of Table 1."""
        pairs = {(str(a), int(r)) for a, r in zip(self.runs["arm"], self.runs["R"], strict=True)}
        return sorted(pairs, key=lambda pair: (natural(pair[0]), pair[1]))

    @property
    def arm_names(self) -> list[str]:
        """The arms that have runs, their numbers by size."""
        return list(dict.fromkeys(arm for arm, _ in self.cells))


def load_sweep(
    name: str | Sequence[str] | None = None,
    runs_dir: str | Path = "runs",
    keep_parts: bool = True,
    progress: Callable[[str], None] = lambda sentence: None,
    where: str | None = None,
) -> Sweep:
    """Read runs_dir/<name>/ (the newest sweep when `name` is None) through the local record's reader.

    name: several, as a list or with commas, are read as one, whose arms are found among all runs; a run that
        several sweeps have is taken once.
    where: KEY=VALUE,... chooses runs by their configuration, see `config.choices`.
    keep_parts: keep the Grams by layer or parameter in the records. They can take hundreds of times the memory of
    all else; False takes from them, run by run, what the report shows (`Sweep.parts`) and lets them go.
    progress: is given how far it is, in a few words, after each run.
    Raises ReportError, one sentence, when there is no such sweep or none of its runs can be read.
    """
    paths = find_sweeps(name, Path(runs_dir))
    label = "+".join(path.name for path in paths)
    notes: list[str] = []
    configs: dict[str, dict[str, Any]] = {}
    statuses: dict[str, RunStatus] = {}
    folders: dict[str, Path] = {}
    for run_dir in (folder for path in paths for folder in _run_dirs(path)):
        if run_dir.name in configs:
            first = folders[run_dir.name].parent.name
            notes.append(f"Run {run_dir.name} is in {first} and in {run_dir.parent.name}: that of {first} is taken.")
            continue
        folders[run_dir.name] = run_dir
        try:
            configs[run_dir.name] = _read_config(run_dir)
            statuses[run_dir.name] = _read_state(run_dir, configs[run_dir.name])
            if sentence := copied(run_dir, statuses[run_dir.name]):
                raise RecordError(sentence)
        except (OSError, ValueError, TypeError) as error:  # RecordError is a ValueError
            configs.pop(run_dir.name, None)
            statuses.pop(run_dir.name, None)
            notes.append(f"Run {run_dir.name} was left out: {error}")
    waiting = {run: name for path in paths for run, name in _without_config(path, notes).items()}
    if not configs and waiting:
        raise ReportError(f"sweep={label}: nothing is recorded of it yet ({', '.join(waiting.values())}).")
    if not configs:
        raise ReportError(f"sweep={label}: none of its runs can be read ({' '.join(notes)}).")
    if where is not None:
        configs, waiting = _where(configs, where), {}
        left = {folders[run].parent for run in configs}
        emptied = [f"No run of sweep {path.name} fits where={where}." for path in paths if path not in left]
        notes += emptied
        for sentence in emptied:
            warnings.warn(sentence, stacklevel=2)
    arms = find_arms(list(configs.values()))
    if where is not None or len(paths) > 1:  # what was chosen is no grid with holes
        arms = replace(arms, absent=())
    runs = _runs_frame(folders, configs, statuses, arms)
    unread: dict[str, Any] = dict.fromkeys(_COLUMNS, pd.DataFrame())
    sweep = Sweep(
        label, paths[0], arms, runs, **unread, configs=configs, statuses={run: statuses[run] for run in configs},
        notes=notes, paths=paths, where=where,
    )  # fmt: skip
    sweep.records = Records(keep_parts)
    _read_records(sweep, keep_parts, progress)
    sweep.waiting = _waiting(sweep) | waiting
    return sweep


def _waiting(sweep: Sweep) -> dict[str, str]:
    """Queued runs of which nothing is recorded."""
    recorded = {str(run) for frame in (sweep.metrics, sweep.groups) for run in frame["run"].unique()}
    queued = sweep.runs[(sweep.runs["state"] == "queued") & ~sweep.runs["run"].isin(recorded)]
    return dict(zip(queued["run"].astype(str), queued["name"].astype(str), strict=True))


def _without_config(path: Path, notes: list[str]) -> dict[str, str]:
    """Run folders that hold a status and no configuration yet -> the runs' names."""
    found = {}
    for folder in _folders(path, "status.json"):
        if not (folder / "config.yaml").exists():
            try:
                found[folder.name] = read_status(folder).name or folder.name
            except RecordError as error:
                notes.append(f"Run {folder.name} was left out: {error}")
    return found


def _where(configs: dict[str, dict[str, Any]], where: str) -> dict[str, dict[str, Any]]:
    try:
        return {run: configs[run] for run in chosen(configs, where)}
    except ConfigError as error:
        raise ReportError(str(error)) from error


def find_sweeps(name: str | Sequence[str] | None, runs_dir: Path) -> tuple[Path, ...]:
    """The folders of one sweep or several, with commas or as a list, each once."""
    names = name.split(",") if isinstance(name, str) else [None] if name is None else list(name)
    return tuple(dict.fromkeys(find_sweep(one, runs_dir) for one in names))


def find_sweep(name: str | None, runs_dir: Path) -> Path:
    """The folder of the named sweep, or of the one whose runs were last written to."""
    if name is not None and not re.fullmatch(r"[\w][\w.+=-]*", name):
        raise ReportError(f"sweep={name}: a sweep's name is one folder name of letters, digits and _ . + = -.")
    found = (
        sorted(p for p in runs_dir.iterdir() if _run_dirs(p) or _folders(p, "status.json")) if runs_dir.is_dir() else []
    )
    if not found:
        raise ReportError(f"runs_dir={runs_dir}: no sweep was found there; run one first, or name another folder.")
    if name is None:
        return max(found, key=_last_written)
    for path in found:
        if path.name == name:
            return path
    names = [path.name for path in found]
    sentence = f"sweep={name}: no such sweep in {runs_dir}; there are {', '.join(names)}."
    raise ReportError(did_you_mean(sentence, name, names))


def _run_dirs(path: Path) -> list[Path]:
    return _folders(path, "config.yaml")


def _folders(path: Path, holding: str) -> list[Path]:
    """The run folders of a sweep that hold a file of this name."""
    if not path.is_dir() or path.name.startswith("."):
        return []
    return sorted(p for p in path.iterdir() if (p / holding).is_file() and not p.name.startswith("."))


def _last_written(path: Path) -> float:
    runs = {*_run_dirs(path), *_folders(path, "status.json")}
    files = [f for run in runs for f in (run / "config.yaml", run / "status.json", run / "metrics.jsonl")]
    return max(f.stat().st_mtime for f in files if f.exists())


def _read_config(run_dir: Path) -> dict[str, Any]:
    try:
        config = yaml.load((run_dir / "config.yaml").read_text(encoding="utf-8"), Loader=_LOADER)
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
    folders: dict[str, Path], configs: dict[str, dict[str, Any]], statuses: dict[str, RunStatus], arms: Arms
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
                "started": _time(status.started), "ended": _time(status.ended), "command": status.command,
                "model": _get(config, "model.name"), "model_path": _get(config, "model.path"),
                "task": _get(config, "task.name"), "reward": _get(config, "reward._target_"),
                "estimator": _get(config, "estimator._target_"), "aggregation": config.get("aggregation"),
                "lr": _get(config, "trainer.lr"),
                "prompts": _groups(config), "sweep": folders[run].parent.name, "path": str(folders[run]),
                "verdict": _get(config, "task.verdict") or "numbers",
            }
        )  # fmt: skip
    order = {arm: at for at, arm in enumerate(sorted(set(arms.labels), key=natural))}
    rows.sort(key=lambda row: (order[row["arm"]], row["R"], row["seed"], row["run"]))
    return pd.DataFrame(rows, columns=RUN_COLUMNS)


def _time(seconds: float | None) -> Any:
    """A time of status.json in UTC; NaT where there is none, or one that is no time."""
    return pd.to_datetime(seconds, unit="s", utc=True, errors="coerce") if seconds is not None else pd.NaT


def _groups(config: dict[str, Any]) -> int | None:
    """Groups a step; None where the configuration does not say."""
    R, prompts, base = config["R"], _get(config, "trainer.prompts"), config.get("budget_R", 1)
    if not isinstance(prompts, int) or not isinstance(base, int) or R < 1:
        return None
    return groups_a_step(R, prompts, str(config.get("budget")), base)


@dataclass
class _Run:
    """What was read of one run, or in `fault` why it could not be."""

    frames: dict[str, pd.DataFrame] = field(default_factory=dict)
    parts: list[Parts] = field(default_factory=list)
    by_part: bool = False
    fault: str = ""


def _read_records(sweep: Sweep, keep_parts: bool, progress: Callable[[str], None]) -> None:
    """Fill the sweep's frames, records and, unless they are kept in the records, parts, run by run.

    numpy leaves the interpreter to others while it works, so that threads share the processors of this machine.
    """
    use = CacheUse()
    runs = [
        RunToRead(str(row["path"]), int(row["seed"]), int(row["R"]), sweep.dtype(str(row["run"])))
        for row in sweep.runs[["run", "path", "seed", "R"]].to_dict("records")
    ]
    make_ahead(runs, processors(), progress)
    with ThreadPoolExecutor(max_workers=processors()) as pool:
        found: list[_Run] = []
        for read in pool.map(lambda run: _read_run(sweep, run, keep_parts, use), sweep.runs["run"]):
            found.append(read)
            progress(f"{len(found)} of {count(len(sweep.runs))} are read")
    frames_of: dict[str, list[pd.DataFrame]] = {kind: [] for kind in _COLUMNS}
    for run, read in zip(sweep.runs.itertuples(), found, strict=True):
        if read.fault:
            sweep.notes.append(f"The record of run {run.run} ({run.name}) was left out: {read.fault}")
            continue
        sweep.records.add(Path(str(run.path)), read.frames["groups"][KEYS])
        sweep.by_part |= {str(run.run)} if read.by_part else set()
        for kind, frame in read.frames.items():
            names = [*TAGS, *(OF_GROUPS if kind == "groups" else ())]
            tags = pd.DataFrame({name: getattr(run, name) for name in names}, index=frame.index)
            frames_of[kind].append(pd.concat([tags, frame.drop(columns="R", errors="ignore")], axis=1))
        read.frames.clear()
    for kind, frames in frames_of.items():
        setattr(sweep, kind, _joined(frames, _COLUMNS[kind]))
    sweep.parts = None if keep_parts else [part for read in found for part in read.parts]
    if note := use.note():
        warnings.warn(note, stacklevel=4)


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_run(sweep: Sweep, run: str, keep_parts: bool, use: CacheUse) -> _Run:
    folder, seed, dtype = sweep.folder(run), int(sweep.configs[run]["seed"]), sweep.dtype(run)
    read = _Run()
    try:
        groups = GroupRows(folder, seed, dtype, RowCache(folder, seed, dtype, use)).rows()
        read.frames = {
            "metrics": _metrics(folder, use),
            "groups": groups.frame,
            "evals": _records_frame(read_evals(folder), EvalRecord),
            "completions": _records_frame(read_completions(folder), Completion),
            "updates": _records_frame(read_updates(folder), UpdateRecord),
        }
        read.by_part = groups.by_part
        if groups.by_part and not keep_parts:
            read.parts = run_parts(run, sweep.kept_by(run), read_groups(folder), dtype)
    except (OSError, ValueError, KeyError, TypeError) as error:  # RecordError is a ValueError
        read.fault = " ".join(str(error).split()) or type(error).__name__
    return read


def _metrics(folder: Path, use: CacheUse) -> pd.DataFrame:
    """`read_metrics`, from the cache where the file is large, has not changed and gave nothing to warn of."""
    path, kept = folder / METRICS, Kept(folder, use)
    files = signature([path])
    key = {"files": files, "code": code_of((local, journal, lines))}
    if found := kept.read(f"{path.stem}.parquet", key):
        return found[0].to_pandas()
    frame, faults = local.metrics_and_faults(folder)
    for fault in faults:
        warnings.warn(fault, stacklevel=2)
    if not faults and worth_keeping(files, signature([path])):
        kept.write(f"{path.stem}.parquet", key, pa.Table.from_pandas(frame, preserve_index=False))
    return frame


def _records_frame(records: list[Any], kind: type) -> pd.DataFrame:
    names = [f.name for f in fields(kind)]
    return pd.DataFrame([[getattr(r, n) for n in names] for r in records], columns=names)


_COLUMNS = {
    "metrics": ["step", "time"],
    "groups": [*OF_GROUPS, *(name for name in COLUMNS if name != "R")],
    "evals": [f.name for f in fields(EvalRecord)],
    "completions": [f.name for f in fields(Completion)],
    "updates": [f.name for f in fields(UpdateRecord)],
}  # of a sweep of whose runs no record can be read


def _joined(frames: list[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    """One frame; empty parts give their columns only (they would turn numbers into objects)."""
    filled = [f for f in frames if len(f)]
    if filled:
        return pd.concat(filled, ignore_index=True)
    return frames[0] if frames else pd.DataFrame(columns=[*TAGS, *columns])
