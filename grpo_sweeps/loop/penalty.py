"""KL in the reward: what the estimator is given where objective.kl_place=reward."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_sweeps.engine.rollouts import Rollout
from grpo_sweeps.loop.scoring import scored
from grpo_sweeps.loop.setup import Setup
from grpo_sweeps.maths.objective import kl, kl_in_reward


def less_kl(setup: Setup, rollouts: list[Rollout], rewards_GR: Tensor) -> tuple[Tensor, dict[str, float]]:
    """(G, R) rewards less beta times each sequence's KL estimate, and the metrics that say how much that was.

    Without KL in the reward the rewards as they are.
    """
    objective = setup.config.objective
    if not objective.kl_in_reward:
        return rewards_GR, {}
    assert setup.reference is not None
    own = scored(setup, rollouts)
    with setup.reference.opened() as model:
        reference = scored(setup, rollouts, model)
    rewards, k = list[Tensor](), list[Tensor]()
    for reward, own_T, reference_T in zip(rewards_GR.flatten(), own, reference, strict=True):
        row = own_T.cpu()[None], reference_T.cpu()[None], torch.ones(1, len(own_T), dtype=torch.bool)
        rewards.append(kl_in_reward(reward[None], *row, objective.kl_estimator, objective.kl_beta))
        k.append(kl(*row, objective.kl_estimator).flatten())
    metrics = {"kl": float(torch.cat(k).mean()), "reward/task": float(rewards_GR.mean())}
    return torch.cat(rewards).view_as(rewards_GR), metrics
