"""The grid of a dry run: decisions, resources, and a cost that comes from measured steps alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.sweep.plan import gpus_of, resources
from grpo_sweeps.tracking.lines import last_lines, step_seconds

Run = Callable[..., int]
SLURM = {"gpus_per_node": 1, "cpus_per_task": 4, "mem_gb": 32.0, "timeout_min": 250, "partition": "gpu"}


def measure(run_dir: Path, *times: float) -> None:
    lines = [{"step": step, "time": float(step), "reward": 0.5, "step_time": value} for step, value in enumerate(times)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_cost_comes_from_the_last_steps_of_runs_of_the_same_kind(
    run: Run, workplace: Path, statuses: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("-m", "R=4", "seed=0") == 0
    (status,) = statuses().values()
    measure(workplace / "runs" / "adhoc" / status.identity, *[900.0] * 20, *[3600.0, 7200.0, 7200.0] * 16, 7200.0, 90.0)
    capsys.readouterr()
    assert run("-m", "R=4,8", "seed=0,5", "dry_run=true") == 0
    out = lines_of(capsys)
    assert out[0] == "run identity action steps to do takes s/step hours GPU-hours why"
    assert out[1].startswith("R=4 seed=0 ") and "skip" in out[1] and "finished already (3 steps)" in out[1]
    assert out[2].startswith("R=4 seed=5 ") and out[2].endswith("start 3 this process 7200.0 6 new")
    assert "not measured" in out[3] and out[3].startswith("R=8 seed=0")
    assert out[5] == "3 runs to do: about 6 hours of steps, without 2 runs of a kind that is not measured"
    assert status.identity in out[1]


def test_a_continued_run_costs_what_is_left(
    run: Run, workplace: Path, statuses: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("R=4") == 0
    (status,) = statuses().values()
    measure(workplace / "runs" / "adhoc" / status.identity, 36.0)
    capsys.readouterr()
    assert run("R=4", "trainer.steps=103", "dry_run=true") == 0
    out = lines_of(capsys)
    assert "continue 100 this process 36.0 1 was finished at step 3 of 3" in out[1]
    assert out[2] == "1 run to do: about 1 hours of steps"


def test_what_a_budget_of_tokens_may_end_costs_at_most_so_much(
    run: Run, workplace: Path, statuses: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("-m", "R=4", "seed=0") == 0
    (status,) = statuses().values()
    measure(workplace / "runs" / "adhoc" / status.identity, 7200.0)
    capsys.readouterr()
    assert run("-m", "R=4", "seed=5", "trainer.tokens=null,100", "dry_run=true") == 0
    out = lines_of(capsys)
    assert out[1].endswith("start 3 this process 7200.0 6 new")
    assert out[2].endswith("start up to 3 this process 7200.0 up to 6 new")
    assert out[3] == "2 runs to do: up to about 12.0 hours of steps"


def test_nothing_measured_is_nothing_known(run: Run, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-m", "R=2,4", "dry_run=true") == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == (
        "2 runs to do; their cost is known once a run of their kind has made a step"
    )
    assert "2 runs, 2 to do (dry run: nothing is started)" in captured.err
    assert not (workplace / "runs").exists()


def test_resources_in_words() -> None:
    assert resources(SLURM) == "1 GPU, 4 CPUs, 32 GB, 4:10 h, partition gpu"
    assert resources({"gpus_per_node": 0, "gres": "gpu:a100:2", "mem_per_gpu": "40G"}) == (
        "gres gpu:a100:2, 40G per gpu"
    )
    assert resources({}) == "this process"
    assert gpus_of({"gpus_per_task": 2}) == 2


def test_the_end_of_a_long_file_is_enough(tmp_path: Path) -> None:
    measure(tmp_path, *[1.0] * 5000, *[3.0] * 60)
    lines, damage = last_lines(tmp_path / "metrics.jsonl")
    assert damage is None and len(lines) < 2000
    assert step_seconds(lines, 50) == 3.0 and step_seconds(lines, 1000) == 1.0
    assert step_seconds([{"step": 1, "time": 1.0}], 50) is None
