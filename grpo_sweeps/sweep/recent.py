"""The last steps of a run, read from the end of its metrics.jsonl: enough for a pace, whatever the file's length."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, BinaryIO

from grpo_sweeps.tracking.lines import RECOMPUTED, left_out, parse_lines

TAIL_BYTES = 65536  # more than fifty steps


def last_lines(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """The last whole lines of metrics.jsonl, and a sentence when some of them, or the file, cannot be read.

    What is being written at this moment is left out. Lines of correction (see `tracking.recompute`), which may stand
    for steps of any age, come beside the last lines of steps and not in their place.
    """
    try:
        with open(path, "rb") as file:
            lines = _tail(file)
    except FileNotFoundError:
        return [], None
    except OSError as error:
        return [], f"{path} cannot be read: {error.strerror}."
    found, faults = parse_lines(lines)
    return found, left_out(path, faults) if faults else None


def _tail(file: BinaryIO) -> list[str]:
    """The whole lines of at least half of TAIL_BYTES that hold no correction, those of correction among them."""
    size, span = file.seek(0, 2), TAIL_BYTES
    while True:
        start = max(0, size - span)
        file.seek(start)
        lines = file.read(size - start).decode("utf-8", errors="replace").split("\n")[1 if start else 0 : -1]
        if start == 0 or sum(len(line) for line in lines if RECOMPUTED not in line) >= TAIL_BYTES // 2:
            return lines
        span *= 2


def step_seconds(lines: list[dict[str, Any]], last: int) -> float | None:
    """The median of `step_time` over the last steps that have one (evaluations are not in it)."""
    values = [line["step_time"] for line in lines if isinstance(line.get("step_time"), int | float)]
    return float(statistics.median(values[-last:])) if values else None
