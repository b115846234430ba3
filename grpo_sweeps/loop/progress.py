"""What a person sees while a run trains: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from grpo_sweeps.redaction import redact
from grpo_sweeps.text import plain, show

LONGEST_NAME = 24  # a run named by many overrides would push the numbers off the screen
LINE_EVERY_S = 10.0  # plain lines: not more often than this, the first and the last step excepted


class RunProgress:
    """Step, reward, effective rank and time left of one run."""

    def __init__(self, name: str, total: int, done: int = 0, stream: TextIO | None = None) -> None:
        name = plain(redact(name))
        short = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
        self.name, self.total = short, total
        self.stream = stream or sys.stderr
        self.first, self.last_line, self.seconds = done, 0.0, 0.0
        self.bar: Progress | None = None
        if self.stream.isatty():
            self.bar = Progress(
                TextColumn("{task.description}", style="bold", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=Console(file=self.stream),
            )
            self.task = self.bar.add_task(short, total=total, completed=done, numbers="")

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
        """`done` steps are finished; `metrics` are those of the last one."""
        numbers = _numbers(metrics)
        self.seconds += metrics.get("step_time", 0.0)  # evaluations, which come seldom, are left out of the pace
        if self.bar:
            self.bar.update(self.task, completed=done, numbers=numbers)
            return
        now = time.monotonic()
        if done in (self.first + 1, self.total) or now - self.last_line >= LINE_EVERY_S:
            self.last_line = now
            left = self.seconds / max(1, done - self.first) * (self.total - done)
            self._line(f"step {done}/{self.total}  {numbers}  {left:.0f} s left")

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


def _numbers(metrics: Mapping[str, float]) -> str:
    rank = metrics.get("spectral/effective_rank")
    shown = f"{rank:.2f}" if rank is not None else "-"
    return f"reward {metrics.get('reward', float('nan')):.3f}  effective rank {shown}"
