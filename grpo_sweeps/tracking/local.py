"""The local record of a run: the truth, of which MLflow is a copy. Needs neither torch nor MLflow.

    metrics.jsonl    {"step": s, "time": unix seconds, name: number, ...}, append only, a line flushed at each step
    grams/           GroupRecord        completions/   Completion
    evals/           EvalRecord         updates/       UpdateRecord
                     each a journal, flushed at each step and compacted into Parquet at checkpoints
    seal.json        what all of them held at the last checkpoint, see `seal`

One process writes a run's record; any number may read it meanwhile. A run that goes on from a checkpoint calls
`truncate_after` with the checkpoint's last step first: steps that it will run again would otherwise be there twice.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from grpo_sweeps.tracking.journal import Journal, LineFile, parsed_lines, read_lines
from grpo_sweeps.tracking.lines import METRICS, left_out, line_fault, number_from_json, number_to_json
from grpo_sweeps.tracking.seal import Keeps, Sealer
from grpo_sweeps.tracking.status import RecordError, RunStatus, read_status, write_status
from grpo_sweeps.types import Completion, EvalRecord, GroupRecord, UpdateRecord

__all__ = [
    "CONFIG",
    "METRICS",
    "LocalRecord",
    "RecordError",
    "RunStatus",
    "completions_frame",
    "evals_frame",
    "groups_frame",
    "lacks_same_as",
    "metrics_and_faults",
    "read_completions",
    "read_config",
    "read_evals",
    "read_groups",
    "read_metrics",
    "read_status",
    "read_undamaged_groups",
    "read_updates",
    "record_tables",
    "updates_frame",
    "write_status",
]

CONFIG = "config.yaml"
BEFORE = ".before"  # in a run's folder: records past the checkpoint that it went on from, until it has ended


def _groups(run_dir: Path | str) -> Journal:
    key = ("step", "prompt_id", "group")
    return Journal(Path(run_dir) / "grams", GroupRecord, key, order=("step", "group"))


def _completions(run_dir: Path | str) -> Journal:
    key = ("step", "prompt_id", "group", "rollout")
    return Journal(Path(run_dir) / "completions", Completion, key, order=("step", "group"))


def _evals(run_dir: Path | str) -> Journal:
    return Journal(Path(run_dir) / "evals", EvalRecord, ("step", "problem_id"), order=("step",))


def _updates(run_dir: Path | str) -> Journal:
    return Journal(Path(run_dir) / "updates", UpdateRecord, ("step", "name"), order=("step",))


def journals(run_dir: Path | str) -> tuple[Journal, Journal, Journal, Journal]:
    """The folders of records: grams, completions, evals, updates."""
    return _groups(run_dir), _completions(run_dir), _evals(run_dir), _updates(run_dir)


def forget_kept_aside(run_dir: Path) -> None:
    """Remove what `LocalRecord.begin` kept aside: the run has ended, and done those steps again."""
    shutil.rmtree(run_dir / BEFORE, ignore_errors=True)


class LocalRecord:
    """Writes one run's record. A context manager; leaving it compacts everything into one segment per folder, or, after
    an exception, only what is still in the journals (a run that is asked to stop has little time).

    Opening a record that a crash left half-written mends it.
    """

    def __init__(self, run_dir: Path | str) -> None:
        self.run_dir = Path(run_dir)
        self._metrics = LineFile(self.run_dir / METRICS)
        self._journals = journals(run_dir)
        self._sealer = Sealer(self.run_dir)
        self._closed = False

    def begin(self, identity: str, keeps: Keeps) -> None:
        """Go on from a checkpoint of `keeps.first` steps: drop what is of later ones, note what is kept from there.

        What is dropped stays in `.before/` until the run has ended.
        """
        for journal in self._journals:
            journal.run = identity
        self._keep_aside(keeps.first)
        self._sealer.drop(keeps.first)
        self._truncate_after(keeps.first - 1)
        self._sealer.begin(identity, keeps, keeps.first)

    def _keep_aside(self, first: int) -> None:
        """Link what holds records of step `first` or later into `.before/<n>/`; the files are replaced, not changed."""
        files = [p for journal in self._journals for p in journal.holding(first)]
        if any(line_fault(line) is None and line["step"] >= first for line in read_lines(self.run_dir / METRICS)):
            files.append(self.run_dir / METRICS)
        if not files:
            return
        number = len(list((self.run_dir / BEFORE).glob("*")))
        for path in files:
            target = self.run_dir / BEFORE / f"{number:05d}" / path.relative_to(self.run_dir)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, target)
            except OSError:  # a file system without links
                shutil.copyfile(path, target)

    def seal(self, checkpoint: int | None = None) -> None:
        """Note what the record holds, so that a loss is noticed; `checkpoint`: steps in one that was just written."""
        self._sealer.write(checkpoint)

    def log_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one line. Values are numbers (or one-element arrays and tensors); NaN and infinities are kept by name.

        Raises TypeError for a value that is no number and ValueError for the reserved names `step` and `time`.
        """
        line: dict[str, Any] = {"step": int(step), "time": round(time.time(), 3)}
        for name, value in metrics.items():
            if name in ("step", "time"):
                raise ValueError(f"metric {name!r}: the name is taken by the line itself.")
            line[name] = _plain_number(name, value)
        self._metrics.append([line])

    def log_groups(self, groups: Sequence[GroupRecord]) -> None:
        """Write and flush group records. Raises ValueError for a Gram that is not R x R or a list not of length R."""
        for record in groups:
            _check_group(record)
        self._journals[0].append(groups)

    def log_completions(self, completions: Sequence[Completion]) -> None:
        """Write and flush completions."""
        self._journals[1].append(completions)

    def log_evals(self, evals: Sequence[EvalRecord]) -> None:
        """Write and flush evaluation records."""
        self._journals[2].append(evals)

    def log_updates(self, updates: Sequence[UpdateRecord]) -> None:
        """Write and flush update records."""
        self._journals[3].append(updates)

    def compact(self, merge: bool = False) -> None:
        """Turn the journals into Parquet segments (at a checkpoint); `merge`: into one per folder (at the end)."""
        self._metrics.sync()
        for journal in self._journals:
            journal.compact(merge)

    def truncate_after(self, step: int) -> None:
        """Drop every record of a step later than `step` (going on from a checkpoint). -1 drops all."""
        self._sealer.drop()
        self._truncate_after(step)

    def _truncate_after(self, step: int) -> None:
        self._metrics.keep(lambda line: line_fault(line) is None and line["step"] <= step)
        for journal in self._journals:
            journal.truncate_after(step)

    def close(self, merge: bool = True) -> None:
        """Compact (`merge`: into one segment per folder) and close the files. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self.compact(merge)
            self.seal()
        finally:
            self._metrics.close()
            for journal in self._journals:
                journal.close()

    def __enter__(self) -> LocalRecord:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.close(merge=kind is None)


def _plain_number(name: str, value: Any) -> float | int | str:
    if isinstance(value, bool | np.bool_):
        return int(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"metric {name!r}: a number is logged here, not {value!r}.")
    return number_to_json(float(value))


def _check_group(record: GroupRecord) -> None:
    for name in ("rewards", "advantages", "weights", "lengths", "logprob_sums", "strict", "flexible"):
        if len(getattr(record, name)) != record.R:
            raise ValueError(
                f"group of prompt {record.prompt_id!r}: "
                f"{name} has {len(getattr(record, name))} values for R={record.R}."
            )
    same = record.same_as
    if same and (len(same) != record.R or any(not 0 <= j <= i or same[j] != j for i, j in enumerate(same))):
        raise ValueError(
            f"group of prompt {record.prompt_id!r}: same_as is {same}: allowed are R={record.R} positions, each of the "
            "first rollout with the same tokens, or none."
        )
    grams = {"gram": record.gram, **{f"gram_by[{k}]": v for k, v in record.gram_by.items()}}
    for name, gram in grams.items():
        if gram is not None and tuple(gram.shape) != (record.R, record.R):
            raise ValueError(
                f"group of prompt {record.prompt_id!r}: {name} has shape {tuple(gram.shape)} for R={record.R}."
            )


def read_config(run_dir: Path | str) -> dict[str, Any]:
    """The run's resolved configuration, empty when the folder has none. Raises RecordError when it is damaged."""
    path = Path(run_dir) / CONFIG
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RecordError(f"{path} cannot be read: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise RecordError(f"{path} is no configuration: it holds {type(content).__name__}, not keys and values.")
    return content


def read_metrics(run_dir: Path | str) -> pd.DataFrame:
    """One row per step, sorted: `step`, `time` and each metric as float64; NaN where a step has no value.

    Of a value written twice for a step the last is kept; lines of one step with different names (training and
    evaluation) become one row. Without a record: an empty frame with the columns `step` and `time`. Lines without a
    step or a time, or with a value that is no number, are left out with one warning.
    """
    frame, faults = metrics_and_faults(run_dir)
    for fault in faults:
        warnings.warn(fault, stacklevel=2)
    return frame


def metrics_and_faults(run_dir: Path | str) -> tuple[pd.DataFrame, list[str]]:
    """What `read_metrics` gives, and in sentences what it warns of."""
    path = Path(run_dir) / METRICS
    by_step: dict[int, dict[str, Any]] = {}
    odd = []
    lines, faults = parsed_lines(path)
    for _, line in lines:
        if fault := line_fault(line):
            odd.append(fault)
        else:
            by_step.setdefault(line["step"], {}).update(line)
    if odd:
        faults.append(left_out(path, odd))
    names = list(dict.fromkeys(name for row in by_step.values() for name in row)) or ["step", "time"]
    steps = sorted(by_step)
    data: dict[str, Any] = {
        name: np.array([number_from_json(by_step[s].get(name)) for s in steps], dtype=np.float64)
        for name in names
        if name != "step"
    }
    return pd.DataFrame({"step": np.array(steps, dtype=np.int64), **data}), faults


def read_groups(run_dir: Path | str) -> list[GroupRecord]:
    """The group records by step and position, each once; Grams bit for bit as they were logged."""
    return _groups(run_dir).read()


def read_undamaged_groups(run_dir: Path | str) -> tuple[list[GroupRecord], list[str]]:
    """As `read_groups` without the damaged files, and a sentence for each of these. Nobody may write meanwhile."""
    return _groups(run_dir).read_undamaged()


def lacks_same_as(run_dir: Path | str) -> bool:
    """True when group records do not say which rollouts have the same tokens. Damaged files are passed over."""
    return _groups(run_dir).lacks("same_as")


def read_completions(run_dir: Path | str) -> list[Completion]:
    """The kept completions by step, each once."""
    return _completions(run_dir).read()


def read_evals(run_dir: Path | str) -> list[EvalRecord]:
    """The evaluation records by step, each once."""
    return _evals(run_dir).read()


def read_updates(run_dir: Path | str) -> list[UpdateRecord]:
    """The records of what measured updates did to each parameter, by step, each once."""
    return _updates(run_dir).read()


def groups_frame(run_dir: Path | str) -> pd.DataFrame:
    """As `read_groups`, one row per group and one column per field (tuples, and R x R arrays or None)."""
    return _frame(_groups(run_dir))


def completions_frame(run_dir: Path | str) -> pd.DataFrame:
    """As `read_completions`, one row per completion."""
    return _frame(_completions(run_dir))


def evals_frame(run_dir: Path | str) -> pd.DataFrame:
    """As `read_evals`, one row per problem and evaluation."""
    return _frame(_evals(run_dir))


def updates_frame(run_dir: Path | str) -> pd.DataFrame:
    """As `read_updates`, one row per step and parameter."""
    return _frame(_updates(run_dir))


def record_tables(run_dir: Path | str) -> dict[str, Callable[[], Any]]:
    """Folder name -> function that reads its records, each once, as an Arrow table (for copies of the record)."""
    made = {"grams": _groups, "completions": _completions, "evals": _evals, "updates": _updates}
    return {name: make(run_dir).table for name, make in made.items()}


def _frame(journal: Journal) -> pd.DataFrame:
    table = journal.table()
    plain = [f.name for f in journal.columns.schema if f.type.num_fields == 0]
    frame = table.select(plain).to_pandas()
    decoded = journal.columns.decode(table.select([n for n in table.column_names if n not in plain]))
    for name, values in decoded.items():
        column = np.empty(len(values), dtype=object)
        for row, value in enumerate(values):  # one by one: numpy would stack equal matrices into one array
            column[row] = value
        frame[name] = column
    return frame[table.column_names]
