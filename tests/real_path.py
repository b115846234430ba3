"""Runs of the real command over a covering array of what a user combines, and what must hold after each.

`source` is what the model and the task are: folders of real weights and problems on a card, the embedded model with the
arithmetic task in the fast tests. The reward is drawn by chance: a model that solves nothing still has mixed groups.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_sweeps.config import RunConfig, to_mapping
from grpo_sweeps.config.checks import check
from grpo_sweeps.loop import train as train_module
from grpo_sweeps.loop.results import spectral_metrics
from grpo_sweeps.loop.setup import Setup
from grpo_sweeps.sweep.execute import execute
from grpo_sweeps.tracking.local import read_groups, read_metrics
from grpo_sweeps.tracking.status import read_status
from grpo_sweeps.types import GroupRecord
from tests.composing import run_config
from tests.covering import Case, covering_array

FACTORS = {
    "objective": ("reinforce", "ppo_clip", "gspo", "ppo", "vine", "oracle"),
    "R": (2, 3, 8, 16, 32),
    "micro_batch": ("null", "8", "32", "part"),
    "lora": (False, True),
    "checkpointing": (False, True),
    "dtype": ("bfloat16", "float16"),
    "kill": (False, True),
}
STEPS = {False: 2, True: 3}  # by kill: one is done before the kill, one at least after it
START_S = 600  # a killed run must have its first checkpoint by then


def excluded(case: Case) -> str:
    """Why a combination cannot be run, or ''."""
    if case["R"] == 3 and case["micro_batch"] in ("8", "32"):
        return "a micro-batch of 8 or 32 rows is no multiple of R=3 and larger (config.checks._check_group)"
    return ""


def cost(case: Case) -> float:
    """Two processes cost more than anything else, then rows."""
    return 1000.0 * case["kill"] + case["R"]


CASES = covering_array(FACTORS, lambda case: not excluded(case), cost)


def title(case: Case) -> str:
    flags = [name for name in ("lora", "checkpointing", "kill") if case[name]]
    return "-".join([case["objective"], f"R{case['R']}", f"mb_{case['micro_batch']}", case["dtype"], *flags])


def overrides(case: Case, source: Sequence[str], runs_dir: Path, tokens: int, device: str) -> list[str]:
    """The words of the command; the source's come last."""
    R, objective = case["R"], case["objective"]
    # R=8 in parts of 2, R=16 in parts of 5, 5, 5 and 1
    micro_batch = max(1, R // 3) if case["micro_batch"] == "part" else case["micro_batch"]
    words = [f"objective={objective}", f"R={R}", f"trainer.micro_batch={micro_batch}", "reward=random"]
    words += [f"model.dtype={case['dtype']}", f"model.gradient_checkpointing={str(case['checkpointing']).lower()}"]
    words += [f"model.lora.r={8 if case['lora'] else 0}", f"rollout.max_new_tokens={tokens}", "tracking=local"]
    words += [f"runs_dir={runs_dir}", "sweep=real_path", f"trainer.device={device}", "analysis.check_every=1"]
    # A killed run goes on from a checkpoint of each step. The others write their last one alone: gigabytes each.
    words += [f"trainer.checkpoint_every={int(case['kill'])}", "trainer.checkpoint_minutes=null"]
    words += [f"trainer.steps={STEPS[case['kill']]}", f"trainer.prompts={4 if R < 8 else 2}", "trainer.eval_every=0"]
    words += ["trainer.lr=1e-6", "seed=1"]
    if objective == "gspo":
        words.append("objective.minibatches=2")  # four would want as many groups
    if objective in ("vine", "oracle"):
        words.append("objective.continuations=2")  # 8 and 32 cost more than the rest of the step
    if objective == "vine":
        words.append(f"objective.value_every={max(1, tokens // 2)}")
    return [*words, *source]


def composed(words: Sequence[str]) -> RunConfig:
    """The checked configuration of a command."""
    config = run_config(*words)
    check(config)
    return config


def run_here(words: Sequence[str], folder: Path) -> Path:
    """The run in this process, as every launcher ends; its folder. Asserts that the model is as it was."""
    config = composed(words)
    seen: list[Setup] = []
    with pytest.MonkeyPatch.context() as patch:
        inner = train_module.prepare
        patch.setattr(train_module, "prepare", lambda *args: seen.append(inner(*args)) or seen[0])
        result = execute(to_mapping(config), folder)
    assert result.ok, result.error
    (setup,) = seen
    assert not [name for name, module in setup.policy.model.named_modules() if "forward" in module.__dict__]
    seen.clear()
    return folder


def run_killed(words: Sequence[str], runs_dir: Path) -> Path:
    """The real command, killed by its process id after its first checkpoint, and the same command again; the run's
    folder."""
    command = [sys.executable, "-m", "grpo_sweeps.run", *words]
    with (runs_dir / "first.log").open("w") as log:
        process = subprocess.Popen(command, cwd=runs_dir, stdout=log, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + START_S
            while not (found := list(runs_dir.glob("real_path/*/checkpoints/step_*"))):
                assert process.poll() is None, (runs_dir / "first.log").read_text()[-3000:]
                assert time.monotonic() < until, "no checkpoint in time"
                time.sleep(0.005)
        finally:
            process.kill()  # SIGKILL, to this process alone
            process.wait()
    folder = found[0].parents[1]
    before = read_status(folder)
    assert before.state == "running" and before.step < before.total, "it ended before it could be killed"
    again = subprocess.run(command, cwd=runs_dir, capture_output=True, text=True, timeout=START_S)
    assert again.returncode == 0, (again.stdout + again.stderr)[-3000:]
    return folder


def run_case(case: Case, source: Sequence[str], tmp_path: Path, tokens: int, device: str) -> Path:
    words = overrides(case, source, tmp_path, tokens, device)
    return run_killed(words, tmp_path) if case["kill"] else run_here(words, tmp_path / "run")


def assert_right(case: Case, folder: Path) -> int:
    """Finished, complete, finite, and the logged spectra are those of the recorded Grams; how many Grams there are.
    (That w'Kw is the gradient's squared norm the loop checks at every step, and stops the run otherwise.)"""
    steps, status = STEPS[case["kill"]], read_status(folder)
    assert (status.state, status.step, status.error) == ("finished", steps, None)
    metrics, groups = read_metrics(folder), list(read_groups(folder))
    assert metrics["step"].tolist() == list(range(steps)), "each step once, none missing"
    places = Counter((group.step, group.group) for group in groups)
    prompts = 4 if case["R"] < 8 else 2
    assert places == Counter({(step, g): 1 for step in range(steps) for g in range(prompts)})
    assert all(len(group.rewards) == group.R == case["R"] for group in groups)
    for row in metrics.to_dict("records"):
        of_step = [group for group in groups if group.step == row["step"]]
        logged = {name: value for name, value in row.items() if not missing(value)}
        assert all(math.isfinite(value) for value in logged.values()), logged
        assert {"reward", "grad_norm", "step_time", "spectral/groups"} <= set(logged)
        assert_spectra(of_step, logged)
    return sum(group.gram is not None for group in groups)


def missing(value: Any) -> bool:
    """A table has NaN where a step has no such number."""
    return value is None or math.isnan(value)


def assert_spectra(groups: Sequence[GroupRecord], logged: dict[str, float]) -> None:
    """The step's means are those of its records: by the package's own words for them, and by four lines of algebra
    where no two rows are parallel (equal texts are a case of their own)."""
    ours = {name: value for name, value in spectral_metrics(groups).items() if not math.isnan(value)}
    assert ours == pytest.approx({name: logged[name] for name in ours}, rel=1e-9, abs=1e-12)
    mixed = [(group, group.gram) for group in groups if group.gram is not None and group.mixed]
    if not mixed or any(parallel(gram) for _, gram in mixed):
        return
    ranks, fractions = zip(*(spectrum(group, gram) for group, gram in mixed), strict=True)
    assert logged["spectral/effective_rank"] == pytest.approx(np.mean(ranks), rel=1e-9)
    assert logged["spectral/top1_fraction"] == pytest.approx(np.mean(fractions), rel=1e-9)


def parallel(gram: np.ndarray) -> bool:
    norms = np.sqrt(np.clip(np.diagonal(gram), 1e-300, None))
    cosines = np.abs(gram / np.outer(norms, norms)) - 2 * np.eye(len(gram))
    return bool((cosines > 0.99).any() or (np.diagonal(gram) <= 0).any())


def spectrum(group: GroupRecord, gram: np.ndarray) -> tuple[float, float]:
    """Effective rank (sum s)^2 / sum s^2 and s_1^2 / sum s^2 of diag(w) K diag(w); rows of the loss hold w."""
    w = np.array(group.weights) if group.rows == "scores" else np.ones(group.R)
    squares = np.clip(np.linalg.eigvalsh(w[:, None] * (gram + gram.T) / 2 * w[None]), 0, None)
    return float(np.sqrt(squares).sum() ** 2 / squares.sum()), float(squares.max() / squares.sum())
