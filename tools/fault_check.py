"""What a disturbed sweep lost, doubled or changed against an undisturbed one, from the files themselves.

The readers of the package drop what is there twice; here the raw rows are counted, so that "0 doubled" is no merit of
the reader.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from grpo_sweeps.tracking.lines import is_timing
from grpo_sweeps.tracking.local import read_completions, read_evals, read_groups, read_metrics
from grpo_sweeps.tracking.status import read_status

ONCE = ("time/", "gram_forms/")  # said with the first step after a start
KEYS = {
    "grams": ("step", "prompt_id", "group"),
    "completions": ("step", "prompt_id", "group", "rollout"),
    "evals": ("step", "problem_id"),
}


@dataclass
class Difference:
    """Between a run or sweep and its undisturbed twin. `records` counts lines of metrics and rows of the journals."""

    records: int = 0
    lost: int = 0
    doubled: int = 0
    repeated: int = 0  # steps that were run more than once, whose records were replaced
    largest: float = 0.0  # of the absolute differences between metrics, Grams and other numbers of the records
    unequal: int = 0  # records that are not equal in something that is no number

    def add(self, other: Difference) -> None:
        for name in ("records", "lost", "doubled", "repeated", "unequal"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = max(self.largest, other.largest)


def finished(sweep_dir: Path, runs: int) -> int:
    """How many of the sweep's runs say that they have finished."""
    found = [path.parent for path in sweep_dir.glob("*/status.json")]
    return sum(read_status(folder).state == "finished" for folder in found) if len(found) == runs else 0


def compare_sweeps(sweep_dir: Path, reference: Path) -> Difference:
    """All runs of two sweeps, by their identity."""
    total = Difference()
    for twin in sorted(path.parent for path in reference.glob("*/status.json")):
        total.add(compare(sweep_dir / twin.name, twin))
    return total


def compare(run: Path, reference: Path) -> Difference:
    """One run's record with that of its undisturbed twin."""
    out = Difference()
    for rows in (_metric_rows, *(_journal_rows(folder) for folder in KEYS)):
        here, there = Counter(rows(run)), Counter(rows(reference))
        out.records += sum(there.values())
        out.lost += sum((there - here).values())
        out.doubled += sum((here - there).values())
    out.repeated = _repeated(run)
    out.largest = _metric_difference(run, reference)
    for read in (read_groups, read_completions, read_evals):
        for one, other in zip(read(run), read(reference), strict=False):  # another number of them is counted above
            largest, unequal = _record_difference(one, other)
            out.largest, out.unequal = max(out.largest, largest), out.unequal + unequal
    return out


def _metric_rows(run: Path) -> list[tuple[Any, ...]]:
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(line["step"], "eval" if "eval/accuracy_greedy" in line else "train", _lasting(line)) for line in lines]


def _lasting(line: dict[str, Any]) -> int:
    """How many numbers a line has beside those that are said once after a start."""
    return sum(not name.startswith(ONCE) for name in line)


def _journal_rows(folder: str) -> Any:
    """Every row of the segments and the journal, by its key; one that is there twice is counted twice."""
    keys = list(KEYS[folder])

    def rows(run: Path) -> list[tuple[Any, ...]]:
        out: list[tuple[Any, ...]] = []
        for path in sorted((run / folder).glob("segment-*.parquet")):
            table = pq.read_table(path, columns=keys).to_pydict()
            out += zip(*(table[key] for key in keys), strict=True)
        journal = run / folder / "journal.jsonl"
        if journal.exists():
            lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
            out += [tuple(line[key] for key in keys) for line in lines]
        return out

    return rows


def _repeated(run: Path) -> int:
    """Steps that log.txt tells of more than once: what a fault cost."""
    log = run / "log.txt"
    if not log.exists():
        return 0
    words = [line.split() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    steps = Counter(line[3] for line in words if len(line) > 3 and line[2] == "step")
    return sum(steps.values()) - len(steps)


def _metric_difference(run: Path, reference: Path) -> float:
    one, other = read_metrics(run).set_index("step"), read_metrics(reference).set_index("step")
    names = [n for n in other if not (n == "time" or is_timing(str(n)) or str(n).startswith(ONCE))]  # no clock's
    both = one.reindex(index=other.index, columns=names)
    return _largest(both.to_numpy(), other[names].to_numpy())


def _largest(one: Any, other: Any) -> float:
    """The largest absolute difference; a value on one side alone is an infinite one."""
    one, other = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if one.shape != other.shape:
        return float("inf")
    if bool((np.isnan(one) != np.isnan(other)).any()):
        return float("inf")
    return float(np.nanmax(np.abs(one - other), initial=0.0)) if one.size and not np.isnan(one).all() else 0.0


def _record_difference(one: Any, other: Any) -> tuple[float, int]:
    largest, unequal = 0.0, 0
    for name in (item.name for item in fields(other)):
        here, there = getattr(one, name), getattr(other, name)
        pairs = [(here.get(key), value) for key, value in there.items()] if name == "gram_by" else [(here, there)]
        for a, b in pairs:
            if isinstance(b, np.ndarray | float):
                largest = max(largest, float("inf") if a is None else _largest(a, b))
            else:
                unequal += isinstance(a, np.ndarray) or a != b
    return largest, unequal


def compare_tables(report: Path, reference: Path) -> float:
    """The largest difference of two reports' tables; infinite where they differ in more than numbers."""
    largest = 0.0
    for name in ("table1.csv", "ranks.csv", "by_k.csv"):
        one, other = report / name, reference / name
        if one.exists() != other.exists():
            return float("inf")
        if other.exists():
            largest = max(largest, _csv_difference(one, other))
    return largest


def _csv_difference(one: Path, other: Path) -> float:
    rows = [list(csv.reader(path.read_text(encoding="utf-8").splitlines())) for path in (one, other)]
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return float("inf")
    largest = 0.0
    for a, b in zip([cell for row in rows[0] for cell in row], [cell for row in rows[1] for cell in row], strict=True):
        if a != b:
            try:
                largest = max(largest, abs(float(a) - float(b)))
            except ValueError:
                return float("inf")
    return largest
