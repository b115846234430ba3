"""The sweeps on real models: planned by one command here and on SLURM, and the same runs wherever they are started."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from grpo_sweeps.config import RunConfig, to_mapping
from grpo_sweeps.paths import sweep_files
from grpo_sweeps.run import main
from grpo_sweeps.sweep.identity import identity
from tests.composing import composed
from tests.real_models import furnish

pytestmark = pytest.mark.integration
RUNS = {  # of each sweep
    "qwen_gsm8k": 9, "qwen_gsm8k_pilot": 3, "qwen_gsm8k_pool": 1, "qwen_gsm8k_parts": 1, "qwen_gsm8k_credit": 4,
    "smollm2_gsm8k": 3, "smollm2_gsm8k_pilot": 3, "smollm2_gsm8k_pool": 1, "smollm2_gsm8k_parts": 1,
}  # fmt: skip


def words_of(sweep: str) -> list[str]:
    """The words of a sweep's first run."""
    params = yaml.safe_load(sweep_files()[sweep].read_text())["hydra"]["sweeper"]["params"]
    return [f"+sweeps={sweep}", *(f"{key}={str(value).partition(',')[0]}" for key, value in params.items())]


def test_the_sweeps_are_all_named_here() -> None:
    assert set(RUNS) == {name for name in sweep_files() if "_gsm8k" in name}


@pytest.mark.parametrize("launcher", [(), ("hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu")])
@pytest.mark.parametrize("sweep", sorted(RUNS))
def test_a_dry_run(
    sweep: str, launcher: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(furnish(tmp_path / "here"))
    for command in ("sbatch", "srun"):  # a login node has them; a dry run does not call them
        (tmp_path / command).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert main([f"+sweeps={sweep}", *launcher, "tracking=local", "dry_run=true"]) == 0
    found = capfd.readouterr()
    n = RUNS[sweep]
    assert f"{n} run{'s' if n > 1 else ''}, {n} to do (dry run: nothing is started)" in found.err
    rows = re.findall(r"^ *R=\d+ seed=\d.*? ([0-9a-f]{12}) ", found.out, re.MULTILINE)
    assert len(set(rows)) == n and not (tmp_path / "here" / "runs").exists()
    assert ("partition gpu" in found.out) == bool(launcher)


@pytest.mark.parametrize("sweep", sorted(RUNS))
def test_its_runs_are_the_same_everywhere(sweep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for place in ("one", "another/deeper"):
        monkeypatch.chdir(furnish(tmp_path / place))
        config = RunConfig.from_composed(composed(*words_of(sweep)))
        written = to_mapping(config)
        assert written["model"]["path"].startswith("models/") and written["task"]["path"] == "data/gsm8k"
        found.add(identity(config))
    assert len(found) == 1


def test_what_the_sweeps_measure() -> None:
    def config(sweep: str) -> RunConfig:
        return RunConfig.from_composed(composed(*words_of(sweep)))

    for name in RUNS:
        one = config(name)
        assert one.model.chat_template and one.reward.target.endswith("exact_match.flexible"), name
        assert (one.rollout.max_new_tokens, one.model.dtype, one.rollout.temperature) == (384, "bfloat16", 1.0)
    for name, lr in (("qwen_gsm8k", 3e-6), ("smollm2_gsm8k", 1e-6)):
        trainer = config(name).trainer
        assert (trainer.steps, trainer.prompts, trainer.lr, trainer.schedule) == (100, 16, lr, "constant")
        assert (trainer.eval_every, trainer.eval_problems, trainer.eval_samples) == (50, 256, 4)
        pilot = config(f"{name}_pilot")
        assert (pilot.R, pilot.trainer.steps, pilot.trainer.lr) == (8, 30, 3e-7)
        pool, parts = config(f"{name}_pool"), config(f"{name}_parts")
        assert pool.trainer.lr == parts.trainer.lr == 0 and pool.R == parts.R == 16
        assert pool.trainer.steps * pool.trainer.prompts >= 100 and pool.analysis.compare_float32 == 16
        assert (pool.analysis.by, parts.analysis.by) == ("layer", "parameter")


def test_the_arms_of_credit_draw_the_same_first_step() -> None:
    words = words_of("qwen_gsm8k_credit")
    arms = [
        RunConfig.from_composed(composed(*(f"objective={arm}" if w.startswith("objective=") else w for w in words)))
        for arm in ("no_baseline", "leave_one_out", "ppo", "vine_long")
    ]
    assert [arm.estimator.target.rpartition(".")[2] for arm in arms] == ["reinforce", "rloo", "reinforce", "reinforce"]
    assert [arm.objective.choice for arm in arms] == ["reinforce", "reinforce", "ppo", "vine"]
    assert (arms[3].objective.continuations, arms[3].objective.value_every) == (4, 64)
    assert len({(arm.seed, arm.R, arm.trainer.prompts, arm.trainer.steps, str(arm.rollout)) for arm in arms}) == 1


def test_a_job_keeps_the_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job gets its run as it was composed, and starts in the directory that the command was given in."""
    from grpo_sweeps.config import LaunchConfig
    from grpo_sweeps.sweep.launch import plan as planned

    monkeypatch.chdir(furnish(tmp_path / "here"))
    config = RunConfig.from_composed(composed(*words_of("qwen_gsm8k")))
    (run,) = planned([config], LaunchConfig(dry_run=True), [[]], "", here=False).runs
    assert run.frozen["model"]["path"] == "models/qwen2_5_coder_0_5b" and run.frozen["task"]["path"] == "data/gsm8k"
    assert run.made_by.weights and "model.safetensors" in run.made_by.weights
