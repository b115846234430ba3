"""Rollouts with the same tokens, from the sampler to the record and the logged means, on the embedded model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from grpo_sweeps.config import FunctionConfig, ModelConfig, RolloutConfig, RunConfig, TaskConfig
from grpo_sweeps.engine.rollouts import same_as
from grpo_sweeps.loop.rollouts import rollouts_with_advantages
from grpo_sweeps.loop.setup import prepare
from grpo_sweeps.loop.train import train
from grpo_sweeps.tracking.local import read_groups, read_metrics
from grpo_sweeps.types import GroupRecord

MakeConfig = Callable[..., RunConfig]


def test_no_completion_has_no_mark() -> None:
    assert same_as([]) == ()


@pytest.fixture
def config(make_config: MakeConfig) -> RunConfig:
    """Four prompts with 6 short rollouts each at a low temperature: many of them are equal."""
    made = make_config(trainer={"prompts": 4, "steps": 2, "eval_every": 0}, analysis={"groups": "all"}, R=6)
    arithmetic = FunctionConfig("grpo_sweeps.tasks.arithmetic.arithmetic", {"n_train": 64, "n_held_out": 8})
    return dataclasses.replace(
        made,
        model=ModelConfig("tiny", "embedded"),
        reward=FunctionConfig("grpo_sweeps.rewards.random_control.bernoulli"),  # equal texts, unequal rewards
        task=TaskConfig("arithmetic", arithmetic, prompt="Question: {question}\nAnswer:", stop=("\nQuestion:",)),
        rollout=RolloutConfig(max_new_tokens=6, temperature=0.35),
    )


def rows_of_classes(group: GroupRecord) -> np.ndarray:
    """(texts, texts) Gram of one row a text, by hand: K averaged over equal texts, the squared weights added."""
    assert group.gram is not None
    same = np.array(group.same_as)
    first = sorted(set(group.same_as))
    mean = np.array([[group.gram[np.ix_(same == i, same == j)].mean() for j in first] for i in first])
    w = np.array([np.sqrt(np.square(np.array(group.weights)[same == i]).sum()) for i in first])
    return np.asarray(w[:, None] * mean * w)


def test_a_run_records_equal_texts_and_logs_the_means_of_its_own_grams(config: RunConfig, tmp_path: Path) -> None:
    rated = rollouts_with_advantages(prepare(config), 0)
    train(config, tmp_path / "run")
    groups, metrics = read_groups(tmp_path / "run"), read_metrics(tmp_path / "run").set_index("step")
    for g, group in enumerate(groups[:4]):
        tokens = [rollout.completion_ids for rollout in rated.rollouts[rated.rows(g)]]
        assert group.same_as == tuple(tokens.index(t) for t in tokens)
    repeated = [g for g in groups if g.mixed and len(set(g.same_as)) < g.R]
    assert repeated and all(len(g.same_as) == g.R for g in groups)
    for step in (0, 1):
        own = [g for g in groups if g.step == step and g.mixed]
        s = [np.sqrt(np.linalg.eigvalsh(rows_of_classes(g)).clip(0)) for g in own]
        expected = {
            "effective_rank": np.mean([v.sum() ** 2 / (v**2).sum() for v in s]),
            "participation_ratio": np.mean([(v**2).sum() ** 2 / (v**4).sum() for v in s]),
            "top1_fraction": np.mean([v[-1] ** 2 / (v**2).sum() for v in s]),
            "entropy_rank": np.mean([np.exp(-(v / v.sum() * np.log(v / v.sum()))[v > 0].sum()) for v in s]),
        }
        for name, value in expected.items():
            assert metrics.at[step, f"spectral/{name}"] == pytest.approx(value, rel=1e-12)
        assert metrics.at[step, "spectral/groups"] == len(own)


def test_rows_of_equal_texts_are_equal_but_for_rounding(config: RunConfig, tmp_path: Path) -> None:
    """What merging takes for granted: the entries that it averages differ by rounding alone."""
    train(config, tmp_path / "run")
    pairs = 0
    for group in read_groups(tmp_path / "run"):
        if group.gram is None:
            continue
        scale = np.abs(group.gram).max()
        for i, j in enumerate(group.same_as):
            assert np.abs(group.gram[i] - group.gram[j]).max() < 1e-4 * scale
            pairs += i != j
    assert pairs > 3
