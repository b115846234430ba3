"""Runs that are interrupted after so many steps, and what they must have in common with undisturbed ones."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from grpo_sweeps.config import RunConfig
from grpo_sweeps.loop.train import train
from grpo_sweeps.loop.watch import Watch
from grpo_sweeps.tracking.lines import is_timing


class Interrupted(Exception):
    pass


def train_until(config: RunConfig, folder: Path, stop_after: int) -> None:
    """Train, and stop by an exception once `stop_after` steps are done."""

    def interrupt(done: int, *_: object) -> None:
        if done == stop_after:
            raise Interrupted

    with pytest.raises(Interrupted):
        train(config, folder, Watch(step=interrupt))


def without_clock(metrics: pd.DataFrame) -> pd.DataFrame:
    """Metrics less what a clock says and what is said once after a start."""
    once = [name for name in metrics if name == "time" or is_timing(name) or name.startswith("gram_forms/")]
    return metrics.drop(columns=once)
