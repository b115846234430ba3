"""The lines of metrics.jsonl: what each may hold, the last of them, and all of them in a file that grows.

No imports beyond the standard library: the status table reads such lines.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

METRICS = "metrics.jsonl"
RECOMPUTED = "spectral/recomputed"  # marks a line of correction, see `recompute`
SAMPLER = "sampler/"  # begins the metric, 1 at every step, that names the engine which drew its rollouts
TOKENS = "sampled_tokens"  # the metric of runs with a budget of tokens that says how many were sampled so far
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
LARGEST = int(sys.float_info.max)
LATEST = 1e11  # seconds since the epoch: a larger number is not a time
TAIL_BYTES = 65536  # read from the end of a file: more than the last fifty steps
TAIL = 4096  # bytes of a growing file that are compared before the place
_CHECKSUM = b',"crc32":'  # ends a line, with a number: the CRC-32 of the line without it
_LONGEST = len(_CHECKSUM) + len(b"4294967295}")


def with_checksum(line: bytes) -> bytes:
    """A JSON object on one line with its checksum as the last key."""
    return line if line == b"{}" else b"%b%b%d}" % (line[:-1], _CHECKSUM, zlib.crc32(line))


def parsed(line: str | bytes) -> Any:
    """The content of a line, without the checksum that `with_checksum` gave it; older lines have none.

    Raises ValueError where the line is no JSON or is not what its checksum belongs to.
    """
    data = line.encode("utf-8", "surrogatepass") if isinstance(line, str) else line
    start = data.rfind(_CHECKSUM, max(0, len(data) - _LONGEST))
    if start < 0:
        return json.loads(data)
    content = json.loads(data[:start] + b"}")
    if data[start + len(_CHECKSUM) :] != b"%d}" % zlib.crc32(data[:start] + b"}"):
        raise ValueError("it is not what its checksum belongs to")
    return content


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


def is_timing(name: str) -> bool:
    """Whether a metric says how long something took: the same step done twice gives another value."""
    return name == "step_time" or name.startswith("time/") or name.endswith("_per_second")


def parse_lines(lines: Iterable[str | bytes]) -> tuple[list[dict[str, Any]], list[str]]:
    """The content of the usable lines of a metrics.jsonl, and why each of the others cannot be used."""
    found, faults = [], []
    for line in lines:
        try:
            content = parsed(line)
            fault = line_fault(content)
        except ValueError as error:
            fault = "it is no JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else str(error)
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
    """True for a whole number that fits into 64 bits, but not for True and False."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def left_out(path: object, faults: list[str]) -> str:
    """One sentence about the lines of a file that cannot be used."""
    lines = "a line is" if len(faults) == 1 else f"{len(faults)} lines are"
    return f"{path}: {lines} damaged and left out ({faults[0]})."


def last_lines(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """The last whole lines of metrics.jsonl, enough for a pace whatever the file's length, and a sentence when some of
    them, or the file, cannot be read.

    A line that is being written is left out. Lines of correction (see `tracking.recompute`), which may concern steps
    of any age, come in addition to the last lines of steps.
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
    """The last whole lines: at least half of TAIL_BYTES of lines of steps, and the lines of correction among them."""
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
    with_time = [line for line in lines if isinstance(line.get("step_time"), int | float)]
    return median_of(with_time[-last:], "step_time")


def median_of(lines: list[dict[str, Any]], name: str) -> float | None:
    """The median of a metric over the lines that have it as a finite number; None where none has."""
    values = [line[name] for line in lines if isinstance(line.get(name), int | float)]
    return float(statistics.median(values)) if values else None


class GrowingFile:
    """What is known of one file: `size` bytes of whole lines, their SHA-256, and the last of them.

    Lines are read and hashed once, so a pass over a long record costs only what is new in it. A rewritten file (the run
    went back to a checkpoint) is recognised by the bytes before the place up to which it has been read; where they are
    the same, so is everything before them, because lines hold the time at which they were written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.size, self._hash, self._tail = 0, hashlib.sha256(), b""
        self._marks: dict[int, str] = {}

    def read(self) -> None:
        """Read what has been added, up to the last newline; the whole file where it was rewritten."""
        try:
            with open(self.path, "rb") as file:
                start = self.size - len(self._tail)
                file.seek(start)
                if file.read(len(self._tail)) != self._tail:
                    self._forget()
                    file.seek(0)
                data = file.read()
        except FileNotFoundError:
            self._forget()
            return
        data = data[: data.rfind(b"\n") + 1]
        self._hash.update(data)
        self.size += len(data)
        self._tail = (self._tail + data)[-TAIL:]

    def digest(self) -> str:
        """SHA-256 of the `size` bytes, in hexadecimal."""
        return self._hash.hexdigest()

    def starts_with(self, size: int, digest: str) -> bool:
        """True when the first `size` bytes have this digest; known at once for the place where the last pass ended."""
        if size > self.size:
            return False
        if size == self.size:
            return digest == self.digest()
        if self._marks.get(size) == digest:
            return True
        return hashlib.sha256(self.bytes(0, size)).hexdigest() == digest

    def mark(self) -> None:
        """Remember this place, which the next pass asks about."""
        self._marks = {self.size: self.digest()}

    def bytes(self, start: int, end: int | None = None) -> bytes:
        """The bytes from `start` to `end` (`size` when not given)."""
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read((self.size if end is None else end) - start)


_FILES: dict[Path, GrowingFile] = {}


def growing(path: Path) -> GrowingFile:
    """This process's view of a file, brought up to date."""
    file = _FILES.setdefault(path.absolute(), GrowingFile(path.absolute()))
    file.read()
    return file
