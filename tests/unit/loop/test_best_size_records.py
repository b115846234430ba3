"""What the report takes from a run's records for the best group size, against gradients computed one by one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from grpo_sweeps.config import RunConfig, to_mapping
from grpo_sweeps.loop.rollouts import rollouts_with_advantages
from grpo_sweeps.loop.setup import prepare
from grpo_sweeps.loop.train import train
from grpo_sweeps.report.design.best_size import best_size, step_sums
from grpo_sweeps.report.read.query import load_sweep
from tests.unit.loop.test_step import slow_gradient

MakeConfig = Callable[..., RunConfig]
STEPS, R = 2, 4


@pytest.mark.parametrize(("estimator", "kind"), [("grpo", "group mean"), ("rloo", "leave-one-out")])
def test_products_between_groups_are_those_of_the_gradients(
    make_config: MakeConfig, tmp_path: Path, estimator: str, kind: str
) -> None:
    config = make_config(
        estimator=f"grpo_sweeps.estimators.group.{estimator}",
        trainer={"steps": STEPS, "lr": 0.0, "max_grad_norm": 1e-3, "eval_every": 0},
    )
    run_dir = tmp_path / "test" / "run"
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(to_mapping(config)))
    train(config, run_dir)
    sweep = load_sweep("test", tmp_path)
    sums, left_out = step_sums(sweep, "all", R, kind)
    assert len(sums) == STEPS and not left_out and float(sweep.metrics["grad_norm"].min()) > 1e-3  # clipping bites

    setup, products, squares = prepare(config), [], []
    for step in range(STEPS):
        rated = rollouts_with_advantages(setup, step)
        gradients = []  # leave-one-out, ascended, of each group alone
        for g in range(config.trainer.prompts):
            weights = torch.zeros_like(rated.weights_GR)
            rewards = rated.rewards_GR[g]
            weights[g] = (rewards - rewards.mean()) / (R - 1)
            gradients.append(-slow_gradient(setup, dataclasses.replace(rated, weights_GR=weights)))
        pairs = [float(a @ b) for a, b in itertools.permutations(gradients, 2)]
        products.append(sum(pairs) / len(pairs))
        squares.append(sum(float(a @ a) for a in gradients))
    assert max(abs(p) for p in products) > 0
    G, scale = config.trainer.prompts, max(squares)
    assert sums["signal_of_mean"].tolist() == pytest.approx([G * p for p in products], abs=1e-5 * scale)
    assert sums["squares"].tolist() == pytest.approx(squares, rel=1e-5)
    found = best_size(sweep, "all", R)
    expected = R * (sum(squares) / (STEPS * G) - sum(products) / STEPS)
    assert found.values["error_here"] == pytest.approx(expected, rel=1e-4) and "no interval" in found.reason
