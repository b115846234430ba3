"""Synthetic sweeps, written through the real writer of the local record, whose spectra are chosen."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from grpo_sweeps.config import groups_a_step
from grpo_sweeps.models.shapes import SHAPES
from grpo_sweeps.tracking.local import LocalRecord
from grpo_sweeps.tracking.model import write_model
from grpo_sweeps.tracking.status import RunStatus, write_status
from grpo_sweeps.types import Completion, EvalRecord, GroupRecord

ABOUT_TWO = {
    2: [0.65, 0.35],
    4: [0.75, 0.246, 0.002, 0.002],
    8: [0.55, 0.4494, *[0.0001] * 6],
}  # energies that give Table 1's pairs


def energies(kind: str, R: int) -> np.ndarray:
    """Squared singular values of G, by kind: full (all equal), paper (Table 1's pairs), bounded (rank R - 1)."""
    if kind == "full":
        return np.full(R, 1.0 / R)
    if kind == "paper":
        return np.array(ABOUT_TWO[R])
    return np.array([1.0 / (R - 1)] * (R - 1) + [0.0])


def gram_with(kind: str, weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """K of scores such that diag(w) K diag(w) has the chosen eigenvalues (slightly scattered) in a random basis."""
    R = len(weights)
    q = energies(kind, R) * np.exp(rng.normal(0, 0.02, R))
    basis, _ = np.linalg.qr(rng.standard_normal((R, R)))
    inner = (basis * q) @ basis.T
    return 30.0 * inner / np.outer(weights, weights)


def group(step: int, position: int, R: int, kind: str, rng: np.random.Generator, **changes: Any) -> GroupRecord:
    """One group with k of R rollouts right; four in five groups are mixed."""
    k = int(rng.integers(1, R)) if rng.random() < 0.8 else R * int(rng.integers(2))
    rewards = rng.permutation(np.arange(R) < k).astype(float)
    advantages = rewards - rewards.mean()
    weights = advantages / (4 * R)
    mixed = 0 < k < R
    right = tuple(bool(r) for r in rewards)
    values: dict[str, Any] = {
        "step": step, "prompt_id": f"train-{rng.integers(0, 5000)}", "R": R, "rewards": tuple(rewards),
        "advantages": tuple(advantages), "weights": tuple(weights), "lengths": (7,) * R, "logprob_sums": (-3.0,) * R,
        "strict": right, "flexible": right, "gram": gram_with(kind, weights, rng) if mixed else None, "group": position,
        "same_as": tuple(range(R)),
    }  # fmt: skip
    return GroupRecord(**(values | changes))


def config_of(R: int, seed: int, sweep: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A resolved configuration with the keys that the report reads; `changes` by dotted key."""
    config: dict[str, Any] = {
        "R": R, "seed": seed, "sweep": sweep, "aggregation": "sum", "runs_dir": "runs",
        "model": {"name": "tiny", "path": "embedded", "dtype": "float32"}, "task": {"name": "arithmetic"},
        "reward": {"_target_": "grpo_sweeps.rewards.exact_match.strict"},
        "estimator": {"_target_": "grpo_sweeps.estimators.group.grpo"},
        "rollout": {"temperature": 1.0}, "trainer": {"steps": 20, "prompts": 4, "lr": 1e-3, "micro_batch": 4 * R},
        "tracking": {"kind": "local"},
    }  # fmt: skip
    for key, value in changes.items():
        *path, last = key.split(".")
        node = config
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return config


PAPERS = {
    "model.path": "anywhere", "task.name": "gsm8k", "task._target_": "grpo_sweeps.tasks.gsm8k.gsm8k",
}  # fmt: skip
"""What a configuration says of the paper's runs; the architecture is in `model.json`."""


def shape_of(name: str) -> dict[str, Any]:
    """The model's own configuration, as transformers has it."""
    return {"architectures": ["any"], **SHAPES[name]}


def write_run(
    root: Path, sweep: str, R: int, seed: int, kind: str = "full", steps: int = 20,
    config: dict[str, Any] | None = None, status: dict[str, Any] | None = None,
    text: str = "2 + 2 = 4\n#### 4", gain: float = 0.3, evaluate: bool = True,
    change: Callable[[GroupRecord], GroupRecord] | None = None, prompt_id: str = "train-1", model: str = "",
    random: bool = False, worth: float | None = None,
) -> Path:  # fmt: skip
    """One run's folder. `change` is applied to every group; `gain` is how much the accuracy rises by the last step;
    `model`: of `SHAPES`, with `random` weights, as the run would have loaded it; `worth`: the reward of a
    right answer on a held-out problem, which older records do not have (None)."""
    extra = config or {}
    prompts = groups_a_step(
        R, extra.get("trainer.prompts", 4), extra.get("budget", "prompts"), extra.get("budget_R", 4)
    )
    run = root / sweep / ("run" + "".join(c if c.isalnum() else "-" for c in f"{R}-{seed}-{sorted(extra.items())}"))
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(config_of(R, seed, sweep, extra)))
    values: dict[str, Any] = {
        "state": "finished", "identity": run.name, "name": f"R={R} seed={seed}", "sweep": sweep, "step": steps,
        "total": steps, "commit": "0123456789abcdef", "dirty": False, "command": f"python -m grpo_sweeps.run -m R={R}",
    }  # fmt: skip
    write_status(run, RunStatus(**(values | (status or {}))))
    if model:
        write_model(run, shape_of(model), random)
    rng = np.random.default_rng([R, seed, len(kind)])
    with LocalRecord(run) as record:
        for step in range(steps):
            groups = [group(step, i, R, kind, rng) for i in range(4)]
            record.log_groups([change(g) for g in groups] if change else groups)
            record.log_metrics(step, {"reward": 0.5, "grad_norm": 1.0, "loss": 0.1})
        for step in (0, steps // 2, steps) if evaluate else ():
            share = 0.3 + gain * step / steps
            record.log_metrics(step, {"eval/accuracy": share, "rollouts": step * prompts * R})
            right = rng.binomial(4, np.clip(share + np.linspace(-0.1, 0.1, 60), 0, 1))
            rewards = [
                {} if worth is None else {"reward": worth * n / 4, "greedy_reward": worth * (n > 2)} for n in right
            ]
            evals = [
                EvalRecord(step, f"test-{i}", 4, int(n), int(n), n > 2, n > 2, **(rewards[i] if rewards else {}))
                for i, n in enumerate(right)
            ]
            record.log_evals(evals)
        record.log_completions(
            [Completion(steps, prompt_id, i, "What is 2 + 2?", text, float(i), i - 0.5, bool(i), bool(i), 9, False)
             for i in range(2)]
        )  # fmt: skip
    return run


def wait(root: Path, sweep: str, name: str) -> str:
    """A run that was submitted: its folder, whose name is returned, holds a status alone."""
    folder = root / sweep / ("waiting" + "".join(c for c in name if c.isalnum()))
    folder.mkdir(parents=True)
    write_status(folder, RunStatus("queued", folder.name, name, sweep))
    return folder.name


@pytest.fixture(scope="session")
def write() -> Callable[..., Path]:
    """`write_run`, for tests that build a sweep run by run."""
    return write_run


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of a report are empty files: drawing takes seconds, and the test reads the texts."""
    blank_figures(monkeypatch)


def blank_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `undrawn`, for as long as the patch holds."""

    def blank(plot: Any) -> dict[str, bytes]:
        panels = (f"_{i}.svg" for i in range(1, len(plot.panels) + 1))
        return {f"{plot.name}{end}": b"" for end in (".png", ".pdf", *panels)}

    monkeypatch.setattr("grpo_sweeps.publish.drawing.render", blank)


@pytest.fixture(scope="session")
def paper_sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/ with a sweep whose every group has Table 1's pair; one seed. To be read only."""
    tmp_path = tmp_path_factory.mktemp("paper")
    for R in (2, 4, 8):
        write_run(tmp_path / "runs", "paper", R, 0, "paper")
    return tmp_path / "runs"


@pytest.fixture
def paper_copy(paper_sweep: Path, tmp_path: Path) -> Path:
    """A copy of `paper_sweep` that a test may damage."""
    return Path(shutil.copytree(paper_sweep, tmp_path / "runs"))


@pytest.fixture(scope="session")
def full_sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/ with full-rank groups, all singular values equal up to a little scatter; three seeds. To be read only."""
    tmp_path = tmp_path_factory.mktemp("full")
    for R in (2, 4, 8):
        for seed in range(3):
            write_run(tmp_path / "runs", "full", R, seed, "full", steps=10)
    return tmp_path / "runs"
