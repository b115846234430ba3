"""What has run, what runs, what is missing: one line per run, read from the run folders and SLURM's queue (no torch, no
MLflow, no pandas; squeue and sacct need not be there). A run that says "running" but whose process is gone is shown as
interrupted; one that waits for a launcher or a job that is gone, as not started. "Not whole": at a quick look, files
are missing or cut; `verify` looks at all of them. Exit code 0; 2 for a bad command.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_sweeps import cli
from grpo_sweeps.cli import aligned, say
from grpo_sweeps.sweep.overview import Row, collect, heading
from grpo_sweeps.text import count, plain, show
from grpo_sweeps.tracking.symptoms import DIVERGENCE
from grpo_sweeps.types import ConfigError

HEADER = ("run", "state", "step", "s/step", "tok/s", "left", "reward", "eff. rank", "node", "job", "log")
DIVERGED = f"({DIVERGENCE}): "  # in a run's note
WATCH_S = 2.0  # between looks
COLOURS = {
    "finished": "green", "running": "cyan", "failed": "red", "interrupted": "yellow", "unreadable": "red",
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """The command's keys."""

    sweep: str | None = cli.key(None, "the sweep to show", "NAME", unset="all of them")
    where: str | None = cli.key(
        None, "only the runs with these values in their configuration", "KEY=VALUE[,...]", unset="all of them"
    )
    runs_dir: str = cli.key("runs", "where the runs are", "FOLDER", local="runs_dir")
    json: bool = cli.key(False, "all fields of every run, as JSON", "true")
    watch: bool = cli.key(
        False, "keep the table up to date while something runs or waits; Ctrl-C ends it and nothing else", "true"
    )


COMMAND = cli.Command(
    "python -m grpo_sweeps.status", Options, __doc__ or "", "{word}: not understood; allowed are {allowed}"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table (or JSON) and return the exit code."""
    return cli.run(COMMAND, argv, _show)


def _show(options: Options) -> int:
    if options.json and options.watch:
        raise ConfigError("json=true watch=true: a table that lives is no JSON; give one of the two")
    if options.watch and sys.stdout.isatty():
        return _watch(Path(options.runs_dir), options.sweep, options.where)
    rows = collect(Path(options.runs_dir), options.sweep, options.where)
    if options.json:
        print(json.dumps([row.as_json() for row in rows], indent=1))
    elif sys.stdout.isatty():
        _print_rich(rows)
    else:
        _print_plain(rows)
    for row in rows:
        if row.damage:
            say(row.damage)
    return 0


def _watch(runs_dir: Path, sweep: str | None, where: str | None) -> int:
    """Show the table, kept up to date, until nothing runs or waits any more or until Ctrl-C."""
    from rich.console import Group
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        try:
            while True:
                rows = collect(runs_dir, sweep, where)
                live.update(Group(*_tables(rows)), refresh=True)
                if not any(row.open for row in rows):
                    return 0
                time.sleep(WATCH_S)
        except KeyboardInterrupt:
            return 0


def _cells(row: Row) -> tuple[str, ...]:
    left = "" if row.left_s is None else _clock(int(row.left_s))
    pace = "" if row.pace_s is None else f"{row.pace_s:.3g}" if row.pace_s < 100 else f"{row.pace_s:.0f}"
    rate = "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
    numbers = ["" if value is None else f"{value:.3f}" for value in (row.reward, row.effective_rank)]
    state = f"{row.state}: {row.queue}" if row.queue else row.state
    state += ", not whole" if row.lacks else ""
    job = row.job_id or ""
    return tuple(
        plain(cell)
        for cell in (row.name, state, f"{row.step}/{row.total}", pace, rate, left, *numbers, row.node, job, row.log)
    )


def _clock(seconds: int) -> str:
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _summary(rows: Sequence[Row]) -> str:
    states = sorted({row.state for row in rows})
    counts = ", ".join(f"{sum(row.state == state for row in rows)} {state}" for state in states)
    same = heading(rows)
    return f"{count(len(rows))}: {counts}{f'; all {same}' if same else ''}" if rows else "no runs"


def _reasons(rows: Sequence[Row]) -> list[str]:
    """A line per run that did not end well and says why, has diverged, is silent, whose job does not start by itself or
    whose record is not whole."""
    found = [plain(f"{row.name} {row.state}: {row.error}") for row in rows if row.error and not row.damage]
    notes = [(row.name, note) for row in rows if row.status for note in row.status.notes]
    found += [plain(f"{name} {note}") for name, note in notes if DIVERGED in note]
    found += [plain(f"{row.name} running: {row.silent}") for row in rows if row.silent]
    found += [plain(f"{row.name}: job {row.job_id} {row.stuck}") for row in rows if row.stuck]
    found += [
        plain(f"{one.sentence} (python -m grpo_sweeps.verify says more)") for row in rows for one in row.lacks[:1]
    ]
    return found


def _print_plain(rows: Sequence[Row]) -> None:
    for sweep in sorted({row.sweep for row in rows}):
        own = [row for row in rows if row.sweep == sweep]
        show(f"sweep {sweep}: {_summary(own)}")
        for line in [*aligned([HEADER, *(_cells(row) for row in own)]), *_reasons(own)]:
            show(f"  {line}")
    if not rows:
        show(_summary(rows))


def _print_rich(rows: Sequence[Row]) -> None:
    from rich.console import Console

    Console().print(*_tables(rows), sep="\n")


def _tables(rows: Sequence[Row]) -> list[Any]:
    """A table and the reasons for each sweep, for a terminal."""
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = []
    for sweep in sorted({row.sweep for row in rows}):
        own = [row for row in rows if row.sweep == sweep]
        table = Table(title=Text(plain(f"sweep {sweep}: {_summary(own)}")), title_justify="left")
        for name in HEADER:
            table.add_column(name, overflow="fold")
        for row in own:
            table.add_row(*(Text(cell, style=COLOURS.get(row.state, "")) for cell in _cells(row)))
        parts += [table, *(Text(line, style="yellow") for line in _reasons(own))]
    return parts or [Text(_summary(rows))]


if __name__ == "__main__":
    sys.exit(main())
