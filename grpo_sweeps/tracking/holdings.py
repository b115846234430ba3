"""What a run's folder holds: lines, records per step, checkpoints, and which files are damaged.

Everything is read once. Of a segment whose bytes are those of the run's seal only the columns that name the records are
read; of any other one every page, against its checksum where it has one.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from grpo_sweeps.tracking import seal as seals
from grpo_sweeps.tracking.checkpoints import HeldCheckpoint, checkpoints
from grpo_sweeps.tracking.journal import JOURNAL, Journal
from grpo_sweeps.tracking.lines import METRICS, line_fault, number_from_json, parsed
from grpo_sweeps.tracking.local import journals
from grpo_sweeps.tracking.seal import Seal
from grpo_sweeps.tracking.status import RecordError

# folder -> a metric, the column of the records that it is made from, and how
SAME: dict[str, tuple[str, str, Callable[[list[float]], float]]] = {
    "grams": ("reward", "rewards", statistics.fmean),
    "evals": ("eval/accuracy_greedy", "greedy_strict", statistics.fmean),
    "updates": ("update/norm", "sq_norm", lambda squares: math.sqrt(sum(squares))),
}


@dataclass(frozen=True)
class Fault:
    """One file, by its name below the run's folder, and what is wrong with it. `torn`: its last line was cut short."""

    name: str
    reason: str
    torn: bool = False


@dataclass
class Held:
    """What is there, of the run `identity`.

    rows: by folder and step the keys of its records. bare: by step, groups that lack their Gram.
    logged: what the lines of metrics say of a step that its records say as well (`SAME`). values: by folder, step and
    key that number of each record whose file no seal vouches for.
    """

    identity: str
    trained: set[int] = field(default_factory=set)
    logged: dict[int, dict[str, float]] = field(default_factory=dict)
    values: dict[str, dict[int, dict[Any, float]]] = field(default_factory=dict)
    evaluated: set[int] = field(default_factory=set)
    rows: dict[str, dict[int, set[Any]]] = field(default_factory=dict)
    bare: dict[int, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    checkpoints: list[HeldCheckpoint] = field(default_factory=list)

    def count(self, folder: str, step: int) -> int:
        """Records of a step, each once."""
        return len(self.rows.get(folder, {}).get(step, ()))

    def differing(self, folder: str) -> list[int]:
        """Steps whose records are not those that the line of metrics was made from."""
        metric, of = SAME[folder][0], SAME[folder][2]
        found = []
        for step, values in self.values.get(folder, {}).items():
            logged = self.logged.get(step, {}).get(metric)
            if logged is not None and len(values) == self.count(folder, step):
                same = math.isclose(of(list(values.values())), logged, rel_tol=1e-6, abs_tol=1e-9)
                found += [] if same or math.isnan(logged) else [step]
        return sorted(found)

    def strangers(self) -> list[int]:
        """Steps with completions of a group that the step did not have."""
        groups = self.rows.get("grams", {})
        return sorted(
            step
            for step, keys in self.rows.get("completions", {}).items()
            if step in groups and any(key[:2] not in groups[step] for key in keys)
        )


def hold(run_dir: Path, seal: Seal | None, measured: Callable[[int], bool], states: bool = False) -> Held:
    """Read what the folder holds.

    Args:
        run_dir: the run's folder.
        seal: what it held before.
        measured: whether a step measures Grams.
        states: also read each checkpoint's state, against its digest.
    """
    held = Held(seal.identity if seal is not None and seal.identity else run_dir.name)
    _metrics(run_dir / METRICS, held)
    files = seal.files if seal is not None else {}
    for journal in journals(run_dir):
        _journal(journal, held, files, measured)
    for name, (size, sha) in files.items():
        path = run_dir / name
        if "/" not in name and path.is_file():  # segments are compared where they are read
            if name == METRICS and path.stat().st_size < size:
                held.faults.append(Fault(name, f"has {path.stat().st_size} bytes and had {size}: its end is cut off"))
            elif seals.digest(path, size if name == METRICS else None) != (size, sha):
                held.faults.append(Fault(name, "is not what was written: it was changed since"))
    held.checkpoints = checkpoints(run_dir, states)
    return held


def _metrics(path: Path, held: Held) -> None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        held.faults.append(Fault(METRICS, f"cannot be read: {error.strerror}"))
        return
    bad, last = [], data.count(b"\n")
    for number, line in enumerate(data.split(b"\n")):
        try:
            content = parsed(line) if line else {"step": 0, "time": 0}
            fault = line_fault(content)
        except ValueError as error:
            fault = " ".join(str(error).split())
        if fault and number == last:
            held.faults.append(Fault(METRICS, "ends in a line that was cut short", torn=True))
        elif fault:
            bad.append(f"line {number + 1}: {fault}")
        elif line:
            held.trained |= {content["step"]} if "reward" in content else set()
            held.evaluated |= {content["step"]} if any(name.startswith("eval/") for name in content) else set()
            known = {name: number_from_json(content[name]) for name, *_ in SAME.values() if name in content}
            held.logged.setdefault(content["step"], {}).update(known)
    if bad:
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        held.faults.append(Fault(METRICS, f"is damaged ({bad[0]}{more})"))


def _journal(journal: Journal, held: Held, files: dict[str, tuple[int, str]], measured: Callable[[int], bool]) -> None:
    """Add the records of one folder."""
    folder = journal.folder.name
    _lines_of(journal, held, measured)  # first, since what a compaction takes out of it is then found in a segment
    for path in journal.segments():
        _segment(journal, path, held, files, measured)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is damaged has been said
        whose = journal.of_runs()
    for path, runs in whose.items():
        if others := sorted(runs - {held.identity}):
            held.faults.append(Fault(f"{folder}/{path.name}", f"belongs to the run {', '.join(others)}"))


def _lines_of(journal: Journal, held: Held, measured: Callable[[int], bool]) -> None:
    """Add the records that are in no segment yet."""
    name = f"{journal.folder.name}/{JOURNAL}"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            table = journal.in_journal()
        _add(journal, table, held, measured if journal.folder.name == "grams" else None)
        held.faults += [Fault(name, f"is damaged ({_reason(warning.message)})") for warning in caught]
    except RecordError as error:
        held.faults.append(Fault(name, f"cannot be read ({_reason(error)})"))
    except OSError as error:
        held.faults.append(Fault(name, f"cannot be read ({error.strerror})"))
    if _torn(journal.folder / JOURNAL):
        held.faults.append(Fault(name, "ends in a line that was cut short", torn=True))


def _segment(
    journal: Journal, path: Path, held: Held, files: dict[str, tuple[int, str]], measured: Callable[[int], bool]
) -> None:
    """Add the records of a segment."""
    folder = journal.folder.name
    name, grams = f"{folder}/{path.name}", folder == "grams"
    whole = name not in files or seals.digest(path) != files[name]
    if whole and name in files:
        held.faults.append(Fault(name, "is not what was written: it was changed since"))
    names = [*journal.key, *(("weights", "gram", "rows") if grams and whole else ())]
    names += [SAME[folder][1]] if whole and folder in SAME else []
    try:
        for table in journal.scan(path, names, whole):
            _add(journal, table, held, measured if grams and whole else None)
    except RecordError as error:
        held.faults.append(Fault(name, f"cannot be read ({_reason(error)})"))


def _add(journal: Journal, table: pa.Table, held: Held, measured: Callable[[int], bool] | None) -> None:
    """Add records of one table. measured: look for Grams that are not there at steps of which it is true."""
    rows = held.rows.setdefault(journal.folder.name, {})
    columns = [table[name].to_pylist() for name in journal.key]
    for step, *key in zip(*columns, strict=True):
        rows.setdefault(step, set()).add(tuple(key))
    _, column, _ = SAME.get(journal.folder.name, ("", "", sum))
    if column in table.column_names:
        values = held.values.setdefault(journal.folder.name, {})
        for (step, *key), value in zip(zip(*columns, strict=True), table[column].to_pylist(), strict=True):
            number = sum(value) / max(1, len(value)) if isinstance(value, list) else float(value)
            values.setdefault(step, {})[tuple(key)] = number
    if measured is None or not table.num_rows:
        return
    have = table["gram"].is_valid().to_pylist()
    for step, weights, kind, there in zip(
        columns[0], table["weights"].to_pylist(), table["rows"].to_pylist(), have, strict=True
    ):
        if not there and kind == "scores" and any(weights or ()) and measured(step):
            held.bare[step] = held.bare.get(step, 0) + 1


def _torn(path: Path) -> bool:
    """Whether a file of lines ends in one that is not whole."""
    try:
        data = path.read_bytes()
        if data.endswith(b"\n") or not data:
            return False
        parsed(data[data.rfind(b"\n") + 1 :])
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
    return False


def _reason(error: object) -> str:
    """What an error says, without the path before it."""
    text = " ".join(str(error).split())
    return text.rpartition(" is damaged: ")[2][:160] or text[:160]
