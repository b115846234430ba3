"""The spectrum of all groups of a step together, against one backward per rollout; off by default."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_sweeps import spectra
from grpo_sweeps.config import ObjectiveConfig, RunConfig
from grpo_sweeps.config.checks import check
from grpo_sweeps.loop.inner import take_step
from grpo_sweeps.loop.rollouts import rollouts_with_advantages
from grpo_sweeps.loop.scoring import row_sums
from grpo_sweeps.loop.setup import prepare
from grpo_sweeps.loop.train import train
from grpo_sweeps.spectra.stacked import stacked_bounds, stacked_bounds_by, stacked_summary
from grpo_sweeps.sweep.identity import identity
from grpo_sweeps.tracking.local import read_groups, read_metrics
from grpo_sweeps.types import ConfigError

MakeConfig = Callable[..., RunConfig]
EVERY = {"stacked_every": 1, "check_every": 0}


def slow_rows(setup: Any) -> np.ndarray:
    """w_i psi_i of every rollout of step 0, by a backward each, (G R, D)."""
    rated = rollouts_with_advantages(setup, 0)
    rows = []
    for rollout, weight in zip(rated.rollouts, rated.weights_GR.flatten(), strict=True):
        setup.policy.model.zero_grad(set_to_none=True)
        row_sums(setup, [rollout]).sum().backward()
        parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in setup.policy.model.parameters()]
        rows.append(float(weight) * torch.cat([p.flatten() for p in parts]).double().numpy())
    setup.policy.model.zero_grad(set_to_none=True)
    return np.stack(rows)


@pytest.mark.parametrize(
    "objective", [ObjectiveConfig(), ObjectiveConfig(ratio="token", inner_updates=2)], ids=["scores", "loss"]
)
def test_the_stack_of_a_step_is_that_of_its_rows(make_config: MakeConfig, objective: ObjectiveConfig) -> None:
    setup = prepare(make_config(analysis=EVERY, objective=objective, trainer={"prompts": 8}))
    rows = slow_rows(setup)
    values = np.linalg.svd(rows, compute_uv=False)
    metrics = take_step(setup, 0).metrics
    assert metrics["stacked/effective_rank"] == pytest.approx(spectra.effective_rank(values), rel=1e-6)
    assert metrics["stacked/top1_fraction"] == pytest.approx(spectra.top1_fraction(values), rel=1e-6)
    own = [np.linalg.svd(part, compute_uv=False) for part in rows.reshape(8, 4, -1)]
    own = [one for one in own if one.any()]
    assert metrics["stacked/groups"] == len(own) > 1
    low, high = stacked_bounds([spectra.effective_rank(one) for one in own], [(one**2).sum() for one in own])
    assert low <= metrics["stacked/effective_rank"] <= high
    assert metrics["stacked/null_groups"] == pytest.approx(high, rel=1e-6)


def test_it_is_off_by_default_and_changes_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    off, on = make_config(), make_config(analysis={"stacked_every": 2})
    assert off.analysis.stacked_every == 0 and identity(off) == identity(on)
    for config, name in ((off, "off"), (on, "on")):
        train(config, tmp_path / name)
    metrics = {name: read_metrics(tmp_path / name) for name in ("off", "on")}
    assert not any(str(name).startswith("stacked/") for name in metrics["off"])
    known = metrics["on"][metrics["on"]["stacked/effective_rank"].notna()]
    assert set(known["step"]) <= {0, 2} and len(known)
    pairs = zip(read_groups(tmp_path / "off"), read_groups(tmp_path / "on"), strict=True)
    for a, b in pairs:
        assert a.rewards == b.rewards and (a.gram is None) == (b.gram is None)
        if a.gram is not None:
            assert a.gram == pytest.approx(np.asarray(b.gram), rel=1e-8, abs=1e-12)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trainer": {"micro_batch": 8}}, "4 groups of 4 must fit into one micro-batch: trainer.micro_batch=16"),
        ({"analysis": {"stacked_every": 1, "every": 0}}, "nothing is measured"),
        ({"objective": ObjectiveConfig(ratio="token", minibatches=2)}, "several policies"),
    ],
)
def test_where_it_cannot_be_measured_nothing_starts(make_config: MakeConfig, changes: Any, said: str) -> None:
    config = make_config(**({"analysis": EVERY} | changes))
    with pytest.raises(ConfigError, match=r"analysis\.stacked_every=1"):
        check(config)
    with pytest.raises(ConfigError, match=said):
        check(config)
    check(dataclasses.replace(config, analysis=dataclasses.replace(config.analysis, stacked_every=0)))


def test_equal_rows_are_one_and_groups_without_gradient_do_not_count() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((6, 9))
    rows[1] = rows[0]
    weights = np.array([0.5, 0.5, -1.0, 1.0, 0.0, 0.0])
    found = stacked_summary(rows @ rows.T, weights, [3, 1, 2], [0, 0, 2, 3, 4, 5])
    values = np.linalg.svd(weights[:, None] * rows, compute_uv=False)
    assert found["effective_rank"] == pytest.approx(spectra.effective_rank(values)) and found["groups"] == 2
    norms = np.linalg.norm(weights[:, None] * rows, axis=1)
    merged = [np.hypot(norms[0], norms[1]), norms[2], norms[3]]
    assert found["null_both"] == pytest.approx(spectra.effective_rank(merged))
    assert stacked_summary(np.eye(2), np.zeros(2), [1, 1], [0, 1]) == {}


def test_bounds_of_many_steps_at_once_are_those_of_each() -> None:
    rng = np.random.default_rng(3)
    labels = rng.permutation(np.repeat(np.arange(7), rng.integers(1, 6, 7)))
    ranks, energies = rng.uniform(1, 8, len(labels)), 10.0 ** rng.uniform(-9, 9, len(labels))
    energies[labels == 4] = 0.0  # a step whose rows are all zero
    low, high = stacked_bounds_by(labels, ranks, energies)
    for step in range(7):
        expected = stacked_bounds(ranks[labels == step], energies[labels == step])
        np.testing.assert_allclose((low[step], high[step]), expected, rtol=1e-12)
    assert np.isnan(low[4]) and np.isnan(high[4])
