"""`gradient/snr` and `gradient/noise_scale` of real steps against gradients computed group by group, and resumed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_sweeps.config import ObjectiveConfig, RunConfig
from grpo_sweeps.loop.inner import take_step
from grpo_sweeps.loop.rollouts import rollouts_with_advantages
from grpo_sweeps.loop.setup import Setup, prepare
from grpo_sweeps.loop.train import train
from grpo_sweeps.tracking.local import read_metrics
from tests.unit.loop.cut_runs import train_until
from tests.unit.loop.test_step import slow_gradient

pytestmark = pytest.mark.integration

MakeConfig = Callable[..., RunConfig]
NAMES = ["gradient/snr", "gradient/noise_scale"]
G, STEPS = 6, 5


def slow_values(setup: Setup, steps: int) -> list[tuple[float, float]]:
    """m and v of each step from gradients one group at a time. The weights must stand still."""
    found = []
    for step in range(steps):
        rated = rollouts_with_advantages(setup, step)
        gradients = []
        for g in range(G):
            weights = torch.zeros_like(rated.weights_GR)
            weights[g] = rated.weights_GR[g]
            gradients.append(slow_gradient(setup, dataclasses.replace(rated, weights_GR=weights)))
        m = sum(float(a @ b) for a, b in itertools.permutations(gradients, 2)) / (G * (G - 1))
        found.append((m, float(torch.stack(gradients).var(dim=0, correction=1).sum())))
    return found


def still(make_config: MakeConfig, **changes: Any) -> RunConfig:
    trainer = {"lr": 0.0, "max_grad_norm": 1e-3, "eval_every": 0, "prompts": G} | changes.pop("trainer", {})
    return make_config(trainer=trainer, **changes)


@pytest.mark.parametrize("aggregation", ["sum", "length", "token_mean", "constant"])
@pytest.mark.parametrize("micro_batch", [2, 8])
def test_against_the_gradients_of_each_group(make_config: MakeConfig, aggregation: str, micro_batch: int) -> None:
    """Clipping bites, groups of equal rewards count, and a group may be measured in parts."""
    setup = prepare(still(make_config, aggregation=aggregation, trainer={"micro_batch": micro_batch}))
    results = [take_step(setup, step) for step in range(STEPS)]
    assert any(not g.mixed for r in results for g in r.groups) and min(r.metrics["grad_norm"] for r in results) > 1e-3
    slow, positive = slow_values(setup, STEPS), 0
    assert [e[0] for e in setup.noise.entries] == list(range(STEPS))
    for step, (_, *found) in enumerate(setup.noise.entries):
        assert found == pytest.approx(slow[step], rel=1e-5, abs=1e-5 * slow[step][1])
        m, v = (sum(values[i] for values in slow[: step + 1]) for i in (0, 1))
        logged = [value for name, value in results[step].metrics.items() if name in NAMES]
        assert logged == (pytest.approx([G * m / v, v / m], rel=1e-3) if m > 0 else [])
        positive += m > 0
    assert 0 < positive < STEPS, "with one sign alone the case says little"


@pytest.mark.parametrize("estimator", ["group.rloo", "batch.reinforce_plus_plus"])
def test_rows_of_the_loss_give_what_scores_do(make_config: MakeConfig, estimator: str) -> None:
    """At ratio 1 the loss's gradient is the plain one, its rows the weighted scores."""
    estimator = f"grpo_sweeps.estimators.{estimator}"
    plain = prepare(still(make_config, estimator=estimator))
    other = prepare(still(make_config, estimator=estimator, objective=ObjectiveConfig(ratio="token")))
    for step in range(2):
        kinds = {take_step(setup, step).groups[0].rows for setup in (plain, other)}
        assert kinds == {"scores", "loss"}
    for one, two in zip(plain.noise.entries, other.noise.entries, strict=True):
        assert two == pytest.approx(one, rel=1e-6, abs=1e-6 * one[2])


@pytest.mark.parametrize(
    "changes",
    [
        {"analysis": {"every": 0}},
        {"objective": ObjectiveConfig(ratio="token", inner_updates=2)},
        {"objective": ObjectiveConfig(ratio="token", minibatches=2)},
        {"trainer": {"prompts": 1}},
    ],
)
def test_steps_that_do_not_give_them_leave_them_out(make_config: MakeConfig, changes: dict[str, Any]) -> None:
    setup = prepare(still(make_config, **changes))
    assert not set(NAMES) & set(take_step(setup, 0).metrics) and setup.noise.entries == []


def test_steps_between_measured_ones_are_not_in_the_window(make_config: MakeConfig) -> None:
    setup = prepare(still(make_config, analysis={"every": 2}))
    results = [take_step(setup, step) for step in range(4)]
    assert [e[0] for e in setup.noise.entries] == [0, 2]
    assert not set(NAMES) & (set(results[1].metrics) | set(results[3].metrics))


def test_a_step_without_any_gradient_counts_as_zeros(make_config: MakeConfig) -> None:
    setup = prepare(still(make_config, reward="always"))
    assert not set(NAMES) & set(take_step(setup, 0).metrics) and setup.noise.entries == [(0, 0.0, 0.0)]


@pytest.mark.parametrize("stop_after", [3, 4, 5])
def test_a_resumed_run_has_the_window_of_the_undisturbed_one(
    make_config: MakeConfig, tmp_path: Path, stop_after: int
) -> None:
    config = make_config(trainer={"steps": 7, "eval_every": 0, "checkpoint_every": 2, "lr": 1e-3, "prompts": 8})
    train(config, tmp_path / "whole")
    train_until(config, tmp_path / "cut", stop_after)
    train(config, tmp_path / "cut")
    whole, cut = (read_metrics(tmp_path / name).reindex(columns=NAMES) for name in ("whole", "cut"))
    assert whole.iloc[stop_after:].notna().any(axis=None), "no value after the cut: the case says nothing"
    assert whole.to_csv() == cut.to_csv()
