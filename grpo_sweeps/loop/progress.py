"""What a person sees while a run trains: bars on a terminal, plain lines elsewhere; of a sweep that trains here also
which run it is and how long all of them will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from grpo_sweeps.redaction import redact
from grpo_sweeps.text import plain, show

LONGEST_NAME = 36  # a run named by many overrides would push the numbers off the screen
LONGEST_OF_BAR, BAR = 20, 8  # characters, so that a row is about 80
LINE_EVERY_S = 10.0  # plain lines: not more often than this, the first and the last step excepted


@dataclass(frozen=True)
class Ahead:
    """Which run of a sweep this is, and what comes after it. rows: rollouts of one of its steps; rows_later: of all
    steps of the later runs together. A step is taken to last as long as it has rollouts, which is known of each run."""

    run: int
    runs: int
    rows: int
    rows_later: int

    def seconds(self, pace_s: float, steps_left: int) -> float:
        """Seconds that this run and all after it take, where one of its steps takes `pace_s`."""
        return pace_s * (steps_left + self.rows_later / max(1, self.rows))


_ahead: ContextVar[Ahead | None] = ContextVar("ahead", default=None)


@contextmanager
def ahead(what: Ahead) -> Iterator[None]:
    """A context in which the run that trains is one of several."""
    token = _ahead.set(what)
    try:
        yield
    finally:
        _ahead.reset(token)


class RunProgress:
    """Step, reward, effective rank, tokens per second and time left of one run, and of the sweep that it is of."""

    def __init__(self, name: str, total: int, done: int = 0, stream: TextIO | None = None) -> None:
        name = plain(redact(name))
        self.name, self.total = _cut(name, LONGEST_NAME), total
        self.stream = stream or sys.stderr
        self.first, self.last_line, self.seconds = done, 0.0, 0.0
        self.bar: Progress | None = None
        if self.stream.isatty():
            self.bar = Progress(
                TextColumn("{task.description}", style="bold", markup=False),
                BarColumn(bar_width=BAR),
                TextColumn("{task.fields[numbers]}", markup=False),
                console=Console(file=self.stream),
            )
            self.task = self.bar.add_task(_cut(name, LONGEST_OF_BAR), total=total, completed=done, numbers="")
            if (found := _several()) is not None:
                self.sweep = self.bar.add_task(
                    f"run {found.run} of {found.runs}", total=found.runs, completed=found.run - 1, numbers=""
                )

    def __enter__(self) -> Self:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar:
            self.bar.stop()

    def step(self, done: int, metrics: Mapping[str, float]) -> None:
        """`done` steps are finished, of `total` as far as that is known; `metrics` are those of the last one."""
        self.seconds += metrics.get("step_time", 0.0)  # evaluations, which come seldom, are left out of the pace
        pace, found = self.seconds / max(1, done - self.first), _several()
        left = f"{span(pace * (self.total - done))} left"
        of_all = f"{span(found.seconds(pace, self.total - done))} left" if found else ""
        if self.bar:
            numbers = f"{done}/{self.total}  {_numbers(metrics, 'rank')}  {left}"
            self.bar.update(self.task, completed=done, total=self.total, numbers=numbers)
            if found:
                self.bar.update(self.sweep, completed=found.run - 1 + done / self.total, numbers=of_all)
            return
        now = time.monotonic()
        if done in (self.first + 1, self.total) or now - self.last_line >= LINE_EVERY_S:
            self.last_line = now
            which = f"  (run {found.run} of {found.runs}, {of_all})" if found else ""
            self._line(f"step {done}/{self.total}  {_numbers(metrics)}  {left}{which}")

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation after `step` updates."""
        values = "  ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in sorted(metrics.items()))
        message = f"evaluation after {step} updates: {values}"
        if self.bar:
            self.bar.console.print(f"{self.name}  {message}", highlight=False, markup=False)
        else:
            self._line(message)

    def _line(self, text: str) -> None:
        show(f"{self.name}  {text}", self.stream)


def _several() -> Ahead | None:
    """The sweep that the run is of; None for a run that is the only one."""
    found = _ahead.get()
    return found if found is not None and found.runs > 1 else None


def _cut(name: str, longest: int) -> str:
    """A name of at most so many characters; names of runs differ most at their ends, so the middle is left out."""
    return name if len(name) <= longest else f"{name[: longest // 2]}…{name[longest // 2 + 1 - longest :]}"


def _numbers(metrics: Mapping[str, float], rank_word: str = "effective rank") -> str:
    rank, rate = metrics.get("spectral/effective_rank"), metrics.get("sampling/tokens_per_second")
    shown = f"{rank:.2f}" if rank is not None else "-"
    speed = f"  {rate:,.0f} tok/s" if rate is not None else ""
    return f"reward {metrics.get('reward', float('nan')):.3f}  {rank_word} {shown}{speed}"


def span(seconds: float) -> str:
    """A time in the unit that a person would take.

    >>> span(4), span(600), span(9000)
    ('4 s', '10 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
