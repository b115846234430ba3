"""What a line of metrics.jsonl may hold. No imports beyond the standard library: the status table reads such lines."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from typing import Any

METRICS = "metrics.jsonl"
RECOMPUTED = "spectral/recomputed"  # marks a line of correction, see `recompute`
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
LARGEST = int(sys.float_info.max)
LATEST = 1e11  # seconds since the epoch: a later time is no time


def number_to_json(value: float) -> float | str:
    """A finite number as it is; NaN, Infinity and -Infinity by name."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def number_from_json(value: Any) -> Any:
    """The inverse of `number_to_json`; None (a metric written as null) is NaN."""
    if value is None:
        return math.nan
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def parse_lines(lines: Iterable[str | bytes]) -> tuple[list[dict[str, Any]], list[str]]:
    """What the whole lines of a metrics.jsonl hold, and why each of the others cannot be used."""
    found, faults = [], []
    for line in lines:
        try:
            content = json.loads(line)
            fault = line_fault(content)
        except ValueError:
            fault = "it is no JSON"
        if fault:
            faults.append(fault)
        else:
            found.append(content)
    return found, faults


def line_fault(content: Any) -> str | None:
    """Why a parsed line of metrics.jsonl cannot be used, in words; None for one that can."""
    if not isinstance(content, dict):
        return "it is no JSON object"
    if not is_whole(content.get("step")):
        return "it has no whole number as its step"
    moment = content.get("time")
    if not isinstance(moment, int | float) or isinstance(moment, bool) or not 0 <= moment < LATEST:
        return "it has no number of seconds as its time"
    for name, value in content.items():
        number = number_from_json(value)
        if not isinstance(number, int | float) or (isinstance(number, int) and not -LARGEST <= number <= LARGEST):
            return f"its {name!r:.60} is no number"
    return None


def is_whole(value: Any) -> bool:
    """A whole number that fits into 64 bits, True and False aside."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def left_out(path: object, faults: list[str]) -> str:
    """One sentence about the lines of a file that cannot be used."""
    lines = "a line is" if len(faults) == 1 else f"{len(faults)} lines are"
    return f"{path}: {lines} damaged and left out ({faults[0]})."
