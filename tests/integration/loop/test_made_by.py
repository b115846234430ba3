"""The real loop: what it has loaded is compared before anything is recorded, and a checkpoint is not gone on from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_sweeps.config import RunConfig, to_mapping
from grpo_sweeps.config.checks import check_data
from grpo_sweeps.sweep.execute import Signals, execute
from grpo_sweeps.tracking import provenance
from grpo_sweeps.tracking.local import read_metrics
from grpo_sweeps.tracking.status import read_status
from grpo_sweeps.types import ConfigError, Problem, TaskData
from tests.unit.loop.conftest import letters

pytestmark = pytest.mark.integration

MakeConfig = Callable[..., RunConfig]


def others() -> TaskData:
    """The same ids, other problems: what replaced files of GSM8K give."""
    data = letters()
    return TaskData([Problem(one.id, f"other {one.question}", one.answer) for one in data.train], data.held_out)


def test_a_run_does_not_go_on_with_other_problems(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, run_dir = to_mapping(make_config(trainer={"checkpoint_every": 1})), tmp_path / "run"
    step = iter([False, True])
    assert execute(frozen, run_dir, signals=Signals(interrupted=lambda: next(step, True))).state == "interrupted"
    made_by = provenance.read_made_by(run_dir)
    assert made_by.data["train"].startswith("30 problems, ") and "model.safetensors" in made_by.weights
    done = read_status(run_dir).step
    logged = read_metrics(run_dir)
    monkeypatch.setattr(sys.modules["loop_functions"], "letters", others)
    result = execute(frozen, run_dir)
    assert (result.state, result.config_error, result.step) == ("stale", True, done)
    assert "task: its training problems have changed (30 problems, now 30 problems); redo=stale" in str(result.error)
    assert read_metrics(run_dir).equals(logged) and provenance.read_made_by(run_dir) == made_by
    monkeypatch.setattr(sys.modules["loop_functions"], "letters", letters)
    assert execute(frozen, run_dir).state == "finished"


@pytest.mark.parametrize(
    ("train", "held_out", "said"),
    [
        ([Problem("a", "1?", "1"), Problem("a", "2?", "2")], [], "the id 'a' names more than one problem"),
        ([Problem("a", "1?", "1")], [Problem("a", "2?", "2")], "the id 'a' names more than one problem"),
        ([Problem(f"a{i % 3}", f"{i}?", "1") for i in range(9)], [], "the id 'a0' names more than one problem (and 2"),
        ([Problem("a", "1?", "1")], [Problem("b", "1?", "1")], "the question '1?' stands among the training and "),
    ],
)  # fmt: skip
def test_problems_that_are_not_told_apart_are_refused_by_name(
    make_config: MakeConfig, train: list[Problem], held_out: list[Problem], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_data(TaskData(train, held_out), make_config())
    assert str(caught.value).startswith(f"task=loop_functions.letters: {said}")
