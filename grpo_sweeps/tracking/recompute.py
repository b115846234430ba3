"""Corrects the spectra that an older run logged by its recorded Grams; append only.

Runs that did not yet record which rollouts have the same tokens logged spectra whose eigenvalues within a precision
floor were set to zero. Their Grams are right. For each step whose logged `spectral/...` and `scores/...` values are
not those of its Grams, metrics.jsonl of an ended run gets one more line: the step, its time, the values as they are
computed today and the mark `spectral/recomputed`. The lines before stay as they are, and of a value written twice for
a step every reader takes the last. A line is written only where a value differs, so a second pass finds nothing to do
and the next pass completes one that was killed. A note in the run's status says what was done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_sweeps.spectra.floor import EPS
from grpo_sweeps.spectra.records import is_older, spectral_metrics
from grpo_sweeps.tracking.journal import LineFile
from grpo_sweeps.tracking.lines import METRICS, RECOMPUTED, number_to_json
from grpo_sweeps.tracking.local import lacks_same_as, read_config, read_metrics, read_undamaged_groups
from grpo_sweeps.tracking.status import ENDED, RecordError, RunStatus, read_status, write_status
from grpo_sweeps.types import GroupRecord

EQUAL = 1e-9  # relative: two values nearer than this are equal
EQUAL_AGAIN = 1e-6  # of a step recomputed before: roots of eigenvalues that are 0 but for rounding differ by machine
NOTE = "spectral values of "  # how the notes of this module begin
COUNTS = ("spectral/groups", "scores/groups")  # where these differ, groups of the step are missing
NAMED_STEPS = 10  # steps that a sentence names one by one

# Holds a run as its only writer: yields None when another process has it, else a function that says if it is ours.
Hold = Callable[[Path], AbstractContextManager[Callable[[], bool] | None]]


@dataclass
class Found:
    """What to do about one run: lines to append, steps whose groups cannot be read, and why."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def correct_sweep(sweep_dir: Path, hold: Hold, only: str | None = None) -> tuple[list[str], list[str]]:
    """Correct every ended run of the sweep, or the one named `only`; never one that another process holds.

    Returns a sentence for each run that was corrected, and one for each in which something could not be.
    """
    said, problems = [], []
    for run_dir in sorted(path.parent for path in sweep_dir.glob("*/status.json")):
        if only is not None and run_dir.name != only:
            continue
        try:
            done, left = correct(run_dir, hold)
        except (RecordError, OSError) as error:
            problems.append(f"{run_dir}: its spectra were not looked at: {' '.join(str(error).split())}")
        else:
            said += [f"{run_dir}: {sentence}." for sentence in done]
            problems += [f"{run_dir}: {sentence}." for sentence in left]
    return said, problems


def correct(run_dir: Path, hold: Hold) -> tuple[list[str], list[str]]:
    """Correct one run that has ended and is of an older version. Returns what was done now and what could not be."""
    before = _state(run_dir)
    status = before[0]
    if not (status.state in ENDED or status.stale()) or not lacks_same_as(run_dir):
        return [], []
    found = corrections(run_dir)
    left = [*_left(found.left), *found.faults]
    if not found.lines and status.notes == _with_notes(status.notes, run_dir, found.left):
        return [], left
    with hold(run_dir) as mine:  # after the reading: a run that goes on in the meantime finds its place free
        if mine is None or not mine() or _state(run_dir) != before:
            return [], ["its logged spectra are not corrected: another process is writing its record"]
        _append(run_dir, found.lines)
        if mine():
            write_status(run_dir, replace(status, notes=_with_notes(status.notes, run_dir, found.left)))
    return [_corrected(len(found.lines))] if found.lines else [], left


def corrections(run_dir: Path) -> Found:
    """The lines to add to the run's metrics.jsonl, in the order of their steps."""
    groups, faults = read_undamaged_groups(run_dir)
    by_step: dict[int, list[GroupRecord]] = {}
    for group in groups:
        by_step.setdefault(group.step, []).append(group)
    dtype = _dtype(run_dir)
    found = Found(faults=faults)
    for row in read_metrics(run_dir).to_dict("records"):
        logged = {str(name): value for name, value in row.items() if not math.isnan(value)}
        of_step = by_step.get(int(row["step"]), [])
        if "spectral/groups" not in logged or (of_step and not any(map(is_older, of_step))):
            continue  # an evaluation, or a step of today's version
        values = spectral_metrics(of_step, "scores/groups" in logged, dtype)
        near = EQUAL_AGAIN if RECOMPUTED in logged else EQUAL
        if any(values.get(name) != logged[name] for name in COUNTS if name in logged):
            found.left.append(int(row["step"]))
        elif not all(math.isclose(values[name], logged[name], rel_tol=near) for name in values.keys() & logged.keys()):
            numbers = {name: number_to_json(value) for name, value in values.items()}
            found.lines.append({"step": int(row["step"]), "time": row["time"], **numbers, RECOMPUTED: 1})
    return found


def recomputed_note(notes: Iterable[str]) -> str:
    """What a run's notes say about recomputed values; empty where they say nothing."""
    return "; ".join(note for note in notes if note.startswith(NOTE))


def _dtype(run_dir: Path) -> str | None:
    model = read_config(run_dir).get("model")
    found = model.get("dtype") if isinstance(model, dict) else None
    return found if found in EPS else None


def _state(run_dir: Path) -> tuple[RunStatus, int]:
    """A value that changes when another process writes the record."""
    path = run_dir / METRICS
    return read_status(run_dir), path.stat().st_size if path.exists() else 0


def _append(run_dir: Path, lines: Sequence[dict[str, Any]]) -> None:
    if not lines:
        return
    file = LineFile(run_dir / METRICS)
    try:
        file.append(lines)
        file.sync()
    finally:
        file.close()


def _with_notes(notes: Sequence[str], run_dir: Path, left: Sequence[int]) -> list[str]:
    """The run's notes with this module's brought up to date, from what its metrics.jsonl holds now."""
    metrics = read_metrics(run_dir)
    marked = int((metrics[RECOMPUTED] == 1).sum()) if RECOMPUTED in metrics else 0
    mine = [*([_corrected(marked)] if marked else []), *_left(left)]
    return [*(note for note in notes if not note.startswith(NOTE)), *mine]


def _corrected(steps: int) -> str:
    counted = "1 step" if steps == 1 else f"{steps} steps"
    return f"{NOTE}{counted} were recomputed from the recorded Grams: the logged ones had been cut at a precision floor"


def _left(steps: Sequence[int]) -> list[str]:
    if not steps:
        return []
    named = ", ".join(map(str, steps[:NAMED_STEPS]))
    more = f" and {len(steps) - NAMED_STEPS} more" if len(steps) > NAMED_STEPS else ""
    word = "step" if len(steps) == 1 else "steps"
    return [
        f"{NOTE}{word} {named}{more} stay as they were logged, perhaps cut at a precision floor: "
        "not all of their groups can be read"
    ]
