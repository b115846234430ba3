"""Entry point: python -m grpo_sweeps.status [sweep=NAME] [runs_dir=runs] [json=true]

What has run, what runs, what is missing: one line a run, read from the run folders alone (no torch, no MLflow, no
pandas). A run that says "running" and whose process is gone is shown as interrupted; one that waits for a launcher
that is gone as not started. Exit code 0; 2 for a bad command.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_sweeps.types import ConfigError

TAIL_BYTES = 65536  # of metrics.jsonl: more than fifty steps
HEADER = ("run", "state", "step", "reward", "eff. rank", "left", "log")


@dataclass(frozen=True)
class Row:
    """One run as it is shown. `left_s`: seconds left at the pace of its last steps, for a running one."""

    sweep: str
    identity: str
    name: str
    state: str
    step: int
    total: int
    reward: float | None
    effective_rank: float | None
    left_s: float | None
    error: str | None
    log: str
    damage: str | None = None  # a sentence about a file of the run that cannot be read, or not wholly


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table (or JSON) and return the exit code."""
    from grpo_sweeps.sweep.launch import say

    try:
        options = _options(sys.argv[1:] if argv is None else argv)
        rows = collect(Path(options["runs_dir"]), options["sweep"])
    except ConfigError as error:
        say(f"error: {error}")
        return 2
    except SystemExit:  # --help
        return 0
    if options["json"] == "true":
        print(json.dumps([asdict(row) for row in rows], indent=1))
    elif sys.stdout.isatty():
        _print_rich(rows)
    else:
        _print_plain(rows)
    for row in rows:
        if row.damage:
            say(row.damage)
    return 0


def collect(runs_dir: Path, sweep: str | None = None) -> list[Row]:
    """The rows of one sweep, or of all, in the order of their names. Raises ConfigError where there is nothing to
    read."""
    if not runs_dir.is_dir():
        raise ConfigError(f"runs_dir={runs_dir}: no such folder; run something first, or name the folder of your runs")
    names = sorted(path.name for path in runs_dir.iterdir() if path.is_dir() and not path.name.startswith("."))
    if sweep is not None and sweep not in names:
        raise ConfigError(f"sweep={sweep}: not in {runs_dir}; choose one of {', '.join(names) or '(none)'}")
    chosen = names if sweep is None else [sweep]
    folders = [path for name in chosen for path in (runs_dir / name).iterdir() if (path / "status.json").is_file()]
    return sorted((_row(path) for path in folders), key=lambda row: (row.sweep, _natural(row.name), row.identity))


def _row(run_dir: Path) -> Row:
    from grpo_sweeps.sweep.ledger import is_alive
    from grpo_sweeps.tracking.status import RecordError, read_status

    log = str(run_dir / "log.txt")
    try:
        status = read_status(run_dir)
    except RecordError as error:
        return Row(
            run_dir.parent.name, run_dir.name, run_dir.name, "unreadable", 0, 0, None, None, None,
            str(error), log, str(error),
        )  # fmt: skip
    state, error_text = str(status.state), status.error
    if state == "running" and status.stale():
        state, error_text = (
            "interrupted",
            error_text or f"process {status.pid} on {status.host} has ended without a word",
        )
    if state == "queued" and not is_alive(status):
        state = "not started" if status.step == 0 else "interrupted"
    lines, damage = _tail(run_dir / "metrics.jsonl")
    steps = {line["step"]: line for line in lines if "reward" in line}
    left = _time_left(steps, status.step, status.total) if state == "running" else None
    return Row(
        run_dir.parent.name, status.identity or run_dir.name, status.name,
        state, status.step, status.total,
        _last(steps, "reward"), _last(steps, "spectral/effective_rank"), left, error_text, log, damage,
    )  # fmt: skip


def _tail(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """The last whole lines of metrics.jsonl, and a sentence when some of them, or the file, cannot be read.

    What is being written at this moment is left out.
    """
    from grpo_sweeps.tracking.lines import left_out, line_fault

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
    found, faults = [], []
    for line in text.split("\n")[1 if start else 0 : -1]:
        try:
            value = json.loads(line)
            fault = line_fault(value)
        except ValueError:
            fault = "it is no JSON"
        if fault:
            faults.append(fault)
        else:
            found.append(value)
    return found, left_out(path, faults) if faults else None


def _time_left(steps: dict[int, dict[str, Any]], done: int, total: int) -> float | None:
    """Seconds, from the times at which the last steps were written (evaluations between them are in it)."""
    recent = sorted(steps)[-10:]
    if len(recent) < 2:
        return None
    pace = (steps[recent[-1]]["time"] - steps[recent[0]]["time"]) / (recent[-1] - recent[0])
    return max(0.0, pace * (total - done))


def _last(steps: dict[int, dict[str, Any]], key: str) -> float | None:
    values = [steps[step][key] for step in sorted(steps) if isinstance(steps[step].get(key), int | float)]
    return float(values[-1]) if values else None


def _cells(row: Row) -> tuple[str, ...]:
    seconds = int(row.left_s or 0)
    left = "" if row.left_s is None else f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    numbers = ["" if value is None else f"{value:.3f}" for value in (row.reward, row.effective_rank)]
    cells = (row.name, row.state, f"{row.step}/{row.total}", *numbers, left, row.log)
    return tuple("".join(char if char.isprintable() else " " for char in cell) for cell in cells)


def _summary(rows: Sequence[Row]) -> str:
    states = sorted({row.state for row in rows})
    counts = ", ".join(f"{sum(row.state == state for row in rows)} {state}" for state in states)
    return f"{len(rows)} runs: {counts}" if rows else "no runs"


def _print_plain(rows: Sequence[Row]) -> None:
    for sweep in sorted({row.sweep for row in rows}):
        own = [row for row in rows if row.sweep == sweep]
        table = [HEADER, *(_cells(row) for row in own)]
        widths = [max(len(line[column]) for line in table) for column in range(len(HEADER))]
        print(f"sweep {sweep}: {_summary(own)}")
        for line in table:
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    if not rows:
        print(_summary(rows))


def _print_rich(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"finished": "green", "running": "cyan", "failed": "red", "interrupted": "yellow", "unreadable": "red"}
    for sweep in sorted({row.sweep for row in rows}):
        own = [row for row in rows if row.sweep == sweep]
        table = Table(title=f"sweep {sweep}: {_summary(own)}", title_justify="left")
        for name in HEADER:
            table.add_column(name, overflow="fold")
        for row in own:
            table.add_row(*(Text(cell, style=colours.get(row.state, "")) for cell in _cells(row)))
        Console().print(table)
    if not rows:
        print(_summary(rows))


def _natural(text: str) -> list[Any]:
    """R=8 before R=16."""
    import re

    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", text)]


def _options(argv: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {"sweep": None, "runs_dir": "runs", "json": "false"}
    for word in argv:
        if word in ("-h", "--help"):
            print(__doc__)
            raise SystemExit(0)
        key, equals, value = word.partition("=")
        if not equals or key not in options:
            raise ConfigError(f"{word}: not understood; allowed are sweep=NAME, runs_dir=FOLDER and json=true")
        options[key] = value
    if options["json"] not in ("true", "false"):
        raise ConfigError(f"json={options['json']}: true or false is expected")
    return options


if __name__ == "__main__":
    sys.exit(main())
