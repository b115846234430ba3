"""The last steps of a run, read from the end of its metrics.jsonl: enough for a pace, whatever the file's length."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from grpo_sweeps.tracking.lines import left_out, parse_lines

TAIL_BYTES = 65536  # more than fifty steps


def last_lines(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """The last whole lines of metrics.jsonl, and a sentence when some of them, or the file, cannot be read.

    What is being written at this moment is left out.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            start = max(0, size - TAIL_BYTES)
            file.seek(start)
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return [], None
    except OSError as error:
        return [], f"{path} cannot be read: {error.strerror}."
    found, faults = parse_lines(text.split("\n")[1 if start else 0 : -1])
    return found, left_out(path, faults) if faults else None


def step_seconds(lines: list[dict[str, Any]], last: int) -> float | None:
    """The median of `step_time` over the last steps that have one (evaluations are not in it)."""
    values = [line["step_time"] for line in lines if isinstance(line.get("step_time"), int | float)]
    return float(statistics.median(values[-last:])) if values else None
