"""Runs that are interrupted after so many steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_sweeps.config import RunConfig
from grpo_sweeps.loop.train import train
from grpo_sweeps.loop.watch import Watch


class Interrupted(Exception):
    pass


def train_until(config: RunConfig, folder: Path, stop_after: int) -> None:
    """Train, and stop by an exception once `stop_after` steps are done."""

    def interrupt(done: int, *_: object) -> None:
        if done == stop_after:
            raise Interrupted

    with pytest.raises(Interrupted):
        train(config, folder, Watch(step=interrupt))
