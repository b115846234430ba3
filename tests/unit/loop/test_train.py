"""Whole runs: the record they leave, and that a resumed run is the uninterrupted one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.config import RunConfig
from grpo_sweeps.loop.train import train
from grpo_sweeps.tracking.local import read_completions, read_evals, read_groups, read_metrics

MakeConfig = Callable[..., RunConfig]
CLOCK = ["time", "step_time", "time/sample", "time/backward", "time/update"]


class Interrupted(Exception):
    pass


def record(folder: Path) -> dict[str, Any]:
    """What a run leaves, without the clock."""
    groups = [
        (dataclasses.replace(g, gram=None), None if g.gram is None else g.gram.tobytes()) for g in read_groups(folder)
    ]
    metrics = read_metrics(folder)
    return {
        "metrics": metrics.drop(columns=[c for c in CLOCK if c in metrics]).to_csv(index=False),
        "groups": groups,
        "evals": read_evals(folder),
        "completions": read_completions(folder),
    }


def test_the_record_of_a_run(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config(), tmp_path / "run")
    metrics = read_metrics(tmp_path / "run")
    assert metrics["step"].tolist() == [0, 1, 2, 3, 4]
    assert metrics.loc[metrics["eval/accuracy"].notna(), "step"].tolist() == [0, 2, 4]
    assert metrics["rollouts"].tolist()[:4] == [0, 16, 32, 48]
    groups = read_groups(tmp_path / "run")
    assert len(groups) == 16
    assert any(g.gram is not None for g in groups)
    assert {r.step for r in read_evals(tmp_path / "run")} == {0, 2, 4}


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4])
def test_a_resumed_run_equals_the_uninterrupted_one(make_config: MakeConfig, tmp_path: Path, stop_after: int) -> None:
    config = make_config()
    train(config, tmp_path / "whole")

    def interrupt(done: int, total: int, metrics: object) -> None:
        if done == stop_after:
            raise Interrupted

    with pytest.raises(Interrupted):
        train(config, tmp_path / "cut", heartbeat=interrupt)
    train(config, tmp_path / "cut")
    assert record(tmp_path / "cut") == record(tmp_path / "whole")


def test_a_finished_run_is_taken_further(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config(), tmp_path / "further")
    longer = make_config(trainer={"steps": 6})
    train(longer, tmp_path / "further")
    train(longer, tmp_path / "at_once")
    assert record(tmp_path / "further") == record(tmp_path / "at_once")


def test_asking_for_fewer_steps_leaves_the_run_alone(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config(), tmp_path / "run")
    before = record(tmp_path / "run")
    train(make_config(trainer={"steps": 2}), tmp_path / "run")
    assert record(tmp_path / "run") == before
