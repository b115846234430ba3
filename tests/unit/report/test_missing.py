"""What a sweep lacks, by name."""

from __future__ import annotations

import pytest

from grpo_sweeps.report.read.arms import find_arms
from grpo_sweeps.report.read.query import ReportError, load_sweep
from grpo_sweeps.report.remarks import missing
from tests.unit.report.conftest import wait


def test_runs_that_wait_are_named_with_and_without_a_configuration(write, tmp_path):
    write(tmp_path, "s", 4, 0)
    run = wait(tmp_path, "s", "R=8 seed=0")
    queued = write(tmp_path, "s", 4, 1, status={"state": "queued", "step": 0})
    for path in (queued / "metrics.jsonl", *(queued / "grams").iterdir(), *(queued / "evals").iterdir()):
        path.unlink()
    lines = missing(load_sweep("s", tmp_path))
    said = [line for line in lines if line.startswith("Nothing is recorded yet of 2 of the runs:")]
    assert len(said) == 1 and f"R=8 seed=0 ({run})" in said[0] and f"R=4 seed=1 ({queued.name})" in said[0]
    assert sum("R=4 seed=1" in line for line in lines) == 1  # once is enough


def test_a_sweep_that_only_waits_has_no_report(tmp_path):
    wait(tmp_path, "s", "R=8 seed=0")
    with pytest.raises(ReportError, match=r"^sweep=s: nothing is recorded of it yet \(R=8 seed=0\)\.$"):
        load_sweep("s", tmp_path)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("python -m grpo_sweeps.run -m R=4,8,16 seed=0,1", ["R = 8, 16", "seed = 1"]),
        ("python -m grpo_sweeps.run -m R=4 'seed=range(0,3)'", ["seed = 1, 2"]),
        ("python -m grpo_sweeps.run -m R=4 seed=0 trainer.lr=1,2", []),
        ("python -m grpo_sweeps.run 'unended R=8", []),
    ],
)
def test_what_the_command_asked_for_and_no_run_has(write, tmp_path, command, said):
    write(tmp_path, "s", 4, 0, status={"command": command})
    found = [line for line in missing(load_sweep("s", tmp_path)) if "asked for" in line]
    assert found == [f"No run for {what}, though the command asked for it." for what in said]


def test_a_hole_in_a_grid_of_arms_is_named(write, tmp_path):
    def configs(pairs):
        return [{"R": 2, "seed": 0, "task": {"name": t}, "trainer": {"lr": lr}} for t, lr in pairs]

    grid = [(t, lr) for t in ("a", "b") for lr in (1, 2)]
    assert find_arms(configs(grid)).absent == ()
    assert find_arms(configs(grid[:3])).absent == ("task=b, lr=2",)
    assert find_arms(configs([grid[0], grid[3]])).absent == ()  # chosen one by one: no grid
    for task, lr in grid[:3]:
        write(tmp_path, "s", 2, 0, config={"task.name": task, "trainer.lr": lr})
    assert "No run for task=b, lr=2." in missing(load_sweep("s", tmp_path))
