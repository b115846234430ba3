"""What the loop tells whoever started the run, and where it can be stopped. Light: imported before torch is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from grpo_sweeps.text import show
from grpo_sweeps.types import TaskData


class Stopped(Exception):
    """The run was asked to stop and stands at the end of a step; what it needs to go on is in its folder."""


def _never() -> bool:
    return False


def _nothing() -> None:
    pass


def _ignore_begin(done: int) -> None:
    pass


def _ignore_step(done: int, total: int, metrics: Mapping[str, float]) -> None:
    pass


def _ignore_data(data: TaskData) -> None:
    pass


def _ignore_spent(done: int, sentence: str) -> None:
    pass


def _print(sentence: str) -> None:
    show(sentence)


@dataclass(frozen=True)
class Watch:
    """The loop's view of its surroundings.

    begin: called once, with the steps that a checkpoint holds already, when the first step is about to start.
    step: called after every step, once its records are flushed, with (steps done, steps in all, the step's metrics).
    stop: should the run end here? Asked after every step and between batches of an evaluation: a step or an
        evaluation that is cut is done again, so that the records of a stopped run are those of an undisturbed one.
    note: takes a sentence that belongs to the run's log and status (a damaged checkpoint, a disk that is full).
    guard: called before a step's records are written; raises where they are another process's by now.
    say: takes what the run is doing where that takes a while (loading, verifying); for the log and the terminal.
    loaded: called with the problems once they and the model are loaded, before anything is recorded; raises where they
        are not those that made the run so far.
    spent: called with the steps done and a sentence where a budget ends the run before `trainer.steps`, when its last
        step is recorded.
    """

    begin: Callable[[int], None] = _ignore_begin
    step: Callable[[int, int, Mapping[str, float]], None] = _ignore_step
    stop: Callable[[], bool] = _never
    note: Callable[[str], None] = _print
    guard: Callable[[], None] = _nothing
    say: Callable[[str], None] = _print
    loaded: Callable[[TaskData], None] = _ignore_data
    spent: Callable[[int, str], None] = _ignore_spent

    def __call__(self, done: int, total: int, metrics: Mapping[str, float]) -> None:
        """A step is done. Raises Stopped where the run is to end."""
        self.step(done, total, metrics)
        self.check()

    def check(self) -> None:
        """Raises Stopped where the run is to end."""
        if self.stop():
            raise Stopped
