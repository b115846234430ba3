"""One run from its configuration: evaluate, step, record, checkpoint; resumes where its folder's last checkpoint
stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from grpo_sweeps.config import RunConfig
from grpo_sweeps.engine import checkpoint
from grpo_sweeps.loop.evaluate import evaluate
from grpo_sweeps.loop.progress import RunProgress
from grpo_sweeps.loop.setup import Setup, prepare
from grpo_sweeps.loop.step import training_step
from grpo_sweeps.tracking.local import LocalRecord

Heartbeat = Callable[[int, int, Mapping[str, float]], None]


def train(config: RunConfig, run_dir: Path, heartbeat: Heartbeat | None = None, name: str = "") -> None:
    """Train to `config.trainer.steps` updates and leave the local record in `run_dir`.

    Args:
        config: the run.
        run_dir: its folder; a checkpoint there is gone on from.
        heartbeat: called after every step with (steps done, steps in all, the step's metrics).
        name: what to call the run in its progress.

    Raises:
        ConfigError: before the first step, for a model, data or function that cannot be used.
        FloatingPointError: when the run has diverged.
        GramCheckError: when a measured Gram is inconsistent with the gradient.
    """
    setup = prepare(config)
    total = config.trainer.steps
    done = _resume(setup, run_dir)
    if done > total:
        return  # the folder holds a longer run than was asked for
    label = name or f"R={config.R} seed={config.seed}"
    with LocalRecord(run_dir) as record, RunProgress(label, total, done) as progress:
        record.truncate_after(done - 1)  # what an interrupted run wrote past its checkpoint is done again
        for step in range(done, total):
            if _evaluation_due(config, step):
                _evaluate(setup, record, progress, step)
            result = training_step(setup, step)
            record.log_groups(result.groups)
            record.log_completions(result.completions)
            record.log_metrics(step, {**result.metrics, "rollouts": _rollouts_before(config, step)})
            progress.step(step + 1, result.metrics)
            if heartbeat:
                heartbeat(step + 1, total, result.metrics)
            if _checkpoint_due(config, step + 1):
                _save(setup, record, run_dir, step + 1)
        if config.trainer.eval_every:
            _evaluate(setup, record, progress, total)
        record.compact()


def _rollouts_before(config: RunConfig, step: int) -> float:
    """Rollouts used in training before `step`: what an evaluation before that step has behind it."""
    return float(step * config.trainer.prompts * config.R)


def _evaluation_due(config: RunConfig, step: int) -> bool:
    every = config.trainer.eval_every
    return bool(every) and step % every == 0


def _checkpoint_due(config: RunConfig, done: int) -> bool:
    every = config.trainer.checkpoint_every
    return bool(every) and (done % every == 0 or done == config.trainer.steps)


def _evaluate(setup: Setup, record: LocalRecord, progress: RunProgress, step: int) -> None:
    metrics, records = evaluate(setup, step)
    record.log_evals(records)
    record.log_metrics(step, metrics)
    progress.evaluated(step, metrics)


def _save(setup: Setup, record: LocalRecord, run_dir: Path, done: int) -> None:
    record.compact()
    state = {"model": _trainable(setup), "optimizer": setup.optimizer.state_dict(), "floor": setup.precision.floor}
    checkpoint.save(run_dir / "checkpoints", done, state, keep=setup.config.trainer.keep_checkpoints)


def _trainable(setup: Setup) -> dict[str, torch.Tensor]:
    """Frozen weights are where they were loaded from: a LoRA checkpoint holds the adapters alone."""
    return {name: p.detach() for name, p in setup.policy.model.named_parameters() if p.requires_grad}


@torch.no_grad()
def _resume(setup: Setup, run_dir: Path) -> int:
    """Load the newest whole checkpoint; the number of steps it holds (0 without one)."""
    found = checkpoint.latest(run_dir / "checkpoints")
    if found is None:
        return 0
    parameters = dict(setup.policy.model.named_parameters())
    for name, saved in found.state["model"].items():
        parameters[name].copy_(saved)
    setup.optimizer.load_state_dict(found.state["optimizer"])
    setup.precision.floor = found.state["floor"]
    return found.step
