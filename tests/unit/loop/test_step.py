"""One step against an objective written out by hand, and the settings that must not change it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from grpo_sweeps.config import RolloutConfig, RunConfig
from grpo_sweeps.engine.rollouts import Rollout
from grpo_sweeps.estimators import DECLARATIONS, opo
from grpo_sweeps.loop.results import group_shares
from grpo_sweeps.loop.rollouts import Rated, rollouts_with_advantages
from grpo_sweeps.loop.setup import Setup, micro_batch_groups, prepare
from grpo_sweeps.loop.step import backward, training_step

MakeConfig = Callable[..., RunConfig]
ROUNDING = 1e-6  # transformers' RMSNorm computes in float32 whatever the model's dtype


def gradients(setup: Setup) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in setup.policy.model.parameters() if p.grad is not None])


def slow_gradient(setup: Setup, rated: Rated) -> torch.Tensor:
    """-sum_i w_i grad log pi(o_i), one rollout and one unpadded forward at a time, by the model's own logits."""
    setup.optimizer.zero_grad()
    for rollout, weight in zip(rated.rollouts, rated.weights_GR.flatten(), strict=True):
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        logprobs = torch.log_softmax(setup.policy.model(ids).logits[0] / setup.config.rollout.temperature, dim=-1)
        start = len(rollout.prompt_ids)
        total = sum(logprobs[t - 1, ids[0, t]] for t in range(start, ids.shape[1]))
        (-weight * total).backward()
    found = gradients(setup)
    setup.optimizer.zero_grad()
    return found


@pytest.mark.parametrize("aggregation", ["sum", "length", "token_mean", "constant"])
@pytest.mark.parametrize("every", [0, 1])
def test_gradient_is_the_objective_s(make_config: MakeConfig, aggregation: str, every: int) -> None:
    setup = prepare(make_config(aggregation=aggregation, analysis={"every": every}))
    rated = rollouts_with_advantages(setup, 0)
    expected = slow_gradient(setup, rated)
    backward(setup, rated, 0)
    assert float(expected.norm()) > 0
    assert torch.allclose(gradients(setup), expected, rtol=0, atol=ROUNDING * float(expected.norm()))


def test_temperature_divides_the_logits(make_config: MakeConfig) -> None:
    config = make_config()
    setup = prepare(dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, temperature=0.5)))
    rated = rollouts_with_advantages(setup, 0)
    expected = slow_gradient(setup, rated)
    backward(setup, rated, 0)
    assert torch.allclose(gradients(setup), expected, rtol=0, atol=ROUNDING * float(expected.norm()))


@pytest.mark.parametrize("micro_batch", [4, 8, 16])
def test_micro_batches_do_not_matter(make_config: MakeConfig, micro_batch: int) -> None:
    one, other = prepare(make_config()), prepare(make_config(trainer={"micro_batch": micro_batch}))
    assert micro_batch_groups(other) == micro_batch // 4
    first, second = training_step(one, 0), training_step(other, 0)
    assert [g.rewards for g in first.groups] == [g.rewards for g in second.groups]
    for a, b in zip(first.groups, second.groups, strict=True):
        assert (a.gram is None) == (b.gram is None)
        if a.gram is not None and b.gram is not None:
            assert np.allclose(a.gram, b.gram, rtol=1e-9)
    for p, q in zip(one.policy.model.parameters(), other.policy.model.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-6)  # AdamW divides by the gradient's size


def test_gram_is_of_the_unit_weight_scores(make_config: MakeConfig) -> None:
    setup = prepare(make_config())
    rated = rollouts_with_advantages(setup, 0)
    measured = backward(setup, rated, 0)
    setup.optimizer.zero_grad()
    g = next(iter(measured))
    rows = []
    for i in range(4):
        weights = torch.zeros_like(rated.weights_GR)
        weights[g, i] = -1.0
        rows.append(slow_gradient(setup, dataclasses.replace(rated, weights_GR=weights)))
    scores = torch.stack(rows)
    assert measured[g].gram == pytest.approx((scores @ scores.T).numpy(), rel=1e-6)


def test_all_equal_groups_are_left_out_and_counted(make_config: MakeConfig) -> None:
    result = training_step(prepare(make_config(reward="always")), 0)
    assert result.metrics["frac_reward_zero_std"] == 1.0
    assert result.metrics["spectral/groups"] == 0.0
    assert result.metrics["grad_norm"] == 0.0
    assert "spectral/effective_rank" not in result.metrics
    assert all(g.gram is None for g in result.groups)


def test_all_equal_groups_are_measured_when_asked(make_config: MakeConfig) -> None:
    result = training_step(prepare(make_config(reward="always", analysis={"groups": "all"})), 0)
    assert all(g.gram is not None for g in result.groups)
    assert result.metrics["scores/groups"] == 4.0 and result.metrics["spectral/groups"] == 0.0
    assert result.metrics["grad_norm"] == 0.0


def test_reinforce_takes_all_equal_groups(make_config: MakeConfig) -> None:
    reinforce = "grpo_sweeps.estimators.reinforce.reinforce"
    result = training_step(prepare(make_config(reward="always", estimator=reinforce)), 0)
    assert result.metrics["grad_norm"] > 0


def test_an_estimator_that_asks_for_lengths_is_given_them(make_config: MakeConfig) -> None:
    longer = RolloutConfig(max_new_tokens=64)  # long enough for some to end by themselves
    result = training_step(prepare(make_config(estimator="grpo_sweeps.estimators.group.opo", rollout=longer)), 0)
    assert any(len(set(group.lengths)) > 1 for group in result.groups if group.mixed)
    for group in result.groups:
        assert group.advantages == pytest.approx(opo([group.rewards], [group.lengths])[0].tolist(), abs=1e-12)


@pytest.mark.parametrize("name", ["batch_mean", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_an_estimator_sees_the_whole_step(make_config: MakeConfig, name: str) -> None:
    setup = prepare(make_config(estimator=f"grpo_sweeps.estimators.batch.{name}"))
    result = training_step(setup, 0)
    rewards = [group.rewards for group in result.groups]
    advantages = np.array([group.advantages for group in result.groups])
    assert np.array_equal(DECLARATIONS[name].function(rewards), advantages)
    assert advantages.any() and float(advantages.sum()) == pytest.approx(0, abs=1e-9)


def test_a_step_is_a_function_of_seed_and_step(make_config: MakeConfig) -> None:
    one, two = prepare(make_config()), prepare(make_config())
    for step in (0, 1):
        a, b = training_step(one, step), training_step(two, step)
        assert [g.logprob_sums for g in a.groups] == [g.logprob_sums for g in b.groups]
    other = training_step(prepare(make_config(seed=1)), 0)
    assert [g.prompt_id for g in other.groups] != [g.prompt_id for g in training_step(prepare(make_config()), 0).groups]


def test_problems_are_each_seen_once_an_epoch(make_config: MakeConfig) -> None:
    setup = prepare(make_config(trainer={"prompts": 10}))
    epoch = [p.id for step in range(3) for p in setup.problems(step)]
    assert sorted(epoch) == sorted(p.id for p in setup.data.train)
    assert [p.id for step in range(3, 6) for p in setup.problems(step)] != epoch


@pytest.mark.parametrize("by", ["layer", "parameter"])
def test_parts_add_up(make_config: MakeConfig, by: str) -> None:
    result = training_step(prepare(make_config(analysis={"by": by})), 0)
    for group in result.groups:
        if group.gram is not None:
            assert sum(group.gram_by.values()) == pytest.approx(group.gram, rel=1e-9)


def test_advantages_that_are_not_finite_stop_the_run(make_config: MakeConfig) -> None:
    setup = prepare(make_config(estimator="loop_functions.explode"))
    with pytest.raises(ValueError, match=r"estimator loop_functions\.explode gave .*finite"):
        training_step(setup, 0)


def test_step_metrics_have_the_documented_names(make_config: MakeConfig) -> None:
    metrics: dict[str, Any] = training_step(prepare(make_config()), 0).metrics
    names = """
        reward reward_std frac_reward_zero_std grad_norm entropy num_tokens step_time completions/mean_length
        completions/clipped_ratio spectral/effective_rank spectral/top1_fraction spectral/participation_ratio
        spectral/stable_rank spectral/entropy_rank spectral/numerical_rank spectral/null_effective_rank spectral/groups
        scores/effective_rank
    """
    for name in names.split():
        assert name in metrics, name
    assert metrics["sampling/logprob_difference"] < 1e-4


@pytest.mark.parametrize("reward", ["nothing", "text", "not_a_number"])
def test_a_reward_that_is_no_number_is_named(make_config: MakeConfig, reward: str) -> None:
    setup = prepare(make_config(reward=reward))
    with pytest.raises(ValueError, match=rf"reward loop_functions\.{reward} gave .*: a finite number is needed"):
        training_step(setup, 0)


def test_advantages_of_another_shape_are_named(make_config: MakeConfig) -> None:
    setup = prepare(make_config(estimator="loop_functions.mean_only"))
    with pytest.raises(ValueError, match=r"mean_only gave \(4,\): an array or tensor of shape \(4, 4\)"):
        training_step(setup, 0)


def test_shares_of_groups() -> None:
    rewards_GR = np.array([[1.0, 1.0], [0, 0], [0, 1], [0.5, 0.5], [1, 2], [-1, -1], [2, 2], [0, 0]])
    texts = [(1,), (1,), (1,), (2,), (1,), (2,), (1,), (1,), (1,), (2,), (3,), (3,), (1,), (2,), (1,), (2, 1)]
    rollouts = [Rollout((0,), ids, "", np.zeros(len(ids)), False) for ids in texts]
    assert group_shares(rewards_GR, rollouts) == {
        "groups/mixed": 2 / 8, "groups/all_right": 2 / 8, "groups/all_wrong": 3 / 8, "groups/same_text": 3 / 8,
    }  # fmt: skip
