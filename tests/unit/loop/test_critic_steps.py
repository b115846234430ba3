"""Steps with a learned value: what it sees, what it gives the policy, and that the two do not touch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from grpo_sweeps.config import ObjectiveConfig, RunConfig
from grpo_sweeps.engine.critic import credit
from grpo_sweeps.loop.inner import backward_of_loss, inner_step, prepare_terms
from grpo_sweeps.loop.results import RatioTally
from grpo_sweeps.loop.rollouts import rollouts_with_advantages
from grpo_sweeps.loop.scoring import features
from grpo_sweeps.loop.setup import Setup, prepare
from tests.unit.loop.slow_loss import added_gradient, rows_of_loss

MakeConfig = Callable[..., RunConfig]
REINFORCE = "grpo_sweeps.estimators.reinforce.reinforce"


def config_of(make_config: MakeConfig, **objective: Any) -> RunConfig:
    keys = {"ratio": "token", "inner_updates": 2, "critic": True, "critic_lr": 1e-2} | objective
    return make_config(estimator=REINFORCE, objective=ObjectiveConfig(**keys))


def weights_of(setup: Setup) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in setup.policy.model.parameters()])


def test_features_are_the_hidden_states_before_each_token(make_config: MakeConfig) -> None:
    setup = prepare(config_of(make_config))
    rollouts = rollouts_with_advantages(setup, 0).rollouts
    for rollout, h_TH in zip(rollouts, features(setup, rollouts), strict=True):
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        with torch.no_grad():
            hidden = setup.policy.model(ids, output_hidden_states=True).hidden_states[-1][0]
        start = len(rollout.prompt_ids)
        assert h_TH.shape == (rollout.length, hidden.shape[1]) and not h_TH.requires_grad
        assert torch.allclose(h_TH, hidden[start - 1 : -1].float(), atol=1e-5)


@pytest.mark.parametrize("ratio", ["none", "token"])
@pytest.mark.parametrize("measuring", [False, True])
def test_rows_carry_each_token_s_advantage(make_config: MakeConfig, ratio: str, measuring: bool) -> None:
    setup = prepare(config_of(make_config, ratio=ratio))
    inner_step(setup, 0)  # so that the values are not zero
    rated = rollouts_with_advantages(setup, 1)
    assert setup.critic is not None
    values = setup.critic.values(features(setup, rated.rollouts))
    assert max(float(v.abs().max()) for v in values) > 1e-3
    by_token = credit(rated.rewards_GR.flatten(), values, 1.0, 0.95)
    terms = prepare_terms(setup, rated)
    rows_BD = rows_of_loss(setup, rated, by_token)
    measured = backward_of_loss(setup, terms, terms.cuts[0], RatioTally(ratio), 1, measuring)
    found = added_gradient(setup)
    assert torch.allclose(found, rows_BD.sum(0), rtol=0, atol=1e-5 * float(rows_BD.norm()))
    assert list(measured) == [0, 1, 2, 3], "an all-equal group has a gradient too"
    for g, part in measured.items():
        gram = rows_BD[4 * g : 4 * g + 4] @ rows_BD[4 * g : 4 * g + 4].T
        if measuring:
            assert part.gram == pytest.approx(gram.numpy(), abs=1e-5 * float(gram.abs().max()))
    assert terms.rated.advantages_GR.flatten().tolist() == pytest.approx([float(A.mean()) for A in by_token])


def test_the_critic_s_fit_leaves_the_policy_alone(make_config: MakeConfig) -> None:
    """At the first step V = 0, so that policies with and without a fitted critic take the same step."""
    one, other = (prepare(config_of(make_config, critic_updates=n, gae_lambda=1.0)) for n in (1, 20))
    first, second = inner_step(one, 0), inner_step(other, 0)
    assert torch.equal(weights_of(one), weights_of(other))
    assert one.critic is not None and other.critic is not None
    assert not torch.equal(one.critic.head.weight, other.critic.head.weight)
    plain = prepare(config_of(make_config, critic=False))
    inner_step(plain, 0)
    assert torch.allclose(weights_of(plain), weights_of(one), rtol=0, atol=1e-5)
    assert first.metrics["critic/loss"] == second.metrics["critic/loss"] > 0
    assert {g.rows for g in first.groups} == {"loss"} and first.metrics["time/critic"] > 0
    assert not any(p.grad is not None for p in one.policy.model.parameters())


def test_the_critic_learns_what_can_be_known(make_config: MakeConfig) -> None:
    """A reward that is always 1: the value goes there, and the advantages to nothing."""
    config = make_config(
        reward="always", estimator=REINFORCE, trainer={"lr": 0.0},
        objective=ObjectiveConfig(ratio="token", critic=True, critic_lr=1e-2, critic_updates=50, gae_lambda=1.0),
    )  # fmt: skip
    setup = prepare(config)
    sizes = []
    for step in range(8):
        sizes.append(np.mean([np.abs(g.advantages) for g in inner_step(setup, step).groups]))
    assert sizes[0] == 1.0 and sizes[-1] < 0.15
