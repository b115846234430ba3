"""Credit for each token: pure functions (G, R, T) -> (G, R, T), for policies with values or rewards along the way.

The gradient they belong to is sum_t A_t grad log pi(a_t | s_t), so that they give rows of the loss, not row weights on
scores: the exact policy takes them (`exact.Enumeration.contribution`), the training loop `gae` (objective.critic) and
`vine`, by segments (objective.continuations).

Shapes: G groups, R rollouts, T tokens (or turns); `mask_GRT` is True on a rollout's tokens, which come first.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    rewards_GRT: Tensor, values_GRT: Tensor, mask_GRT: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> Tensor:  # fmt: skip
    """Generalised advantage estimation (arXiv 1506.02438): A_t = sum_l (gamma lam)^l delta_{t+l},
    delta_t = r_t + gamma V(s_{t+1}) - V(s_t), V = 0 after the end.

    lam = 1: rewards to go less V(s_t), unbiased for gamma = 1 whatever V, since V(s_t) is a baseline. lam < 1: biased
    unless V is the value of the policy.

    Args:
        rewards_GRT: reward paid with each token, the outcome with the last one.
        values_GRT: V(s_t) before each token, unit of the reward.
        gamma, lam: in [0, 1].

    Returns:
        (G, R, T) float64, 0 where the mask is False.

    Raises:
        ValueError: on shapes that differ, or `gamma` or `lam` outside [0, 1].
    """
    _check(rewards_GRT, mask_GRT, values_GRT)
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value}: a number from 0 to 1 is needed")
    rewards, values = (t.to(torch.float64) * mask_GRT for t in (rewards_GRT, values_GRT))
    after = torch.cat([values[..., 1:], torch.zeros_like(values[..., :1])], dim=-1)
    delta = (rewards + gamma * after - values) * mask_GRT
    A = torch.zeros_like(delta)
    running = torch.zeros_like(delta[..., 0])
    for t in range(delta.shape[-1] - 1, -1, -1):
        running = delta[..., t] + gamma * lam * running
        A[..., t] = running
    return A * mask_GRT


def vine(rewards_GRT: Tensor, values_GRT: Tensor, mask_GRT: Tensor) -> Tensor:
    """VinePPO (arXiv 2410.01679): A_t = r_t + V(s_{t+1}) - V(s_t), V from fresh rollouts at each prefix.

    Unbiased where V is, of whatever variance: the two values come from other rollouts than the one that is credited.
    With the exact values it is the true credit q(s_t, a_t) - v(s_t) of a deterministic environment.
    """
    return gae(rewards_GRT, values_GRT, mask_GRT, lam=0.0)


def process_rewards(rewards_GRT: Tensor, mask_GRT: Tensor, ddof: int = 1, eps: float = 1e-4) -> Tensor:
    """Group-relative process rewards (DeepSeekMath, arXiv 2402.03300): each step's reward less the mean of all step
    rewards of the group, over their standard deviation; A_t is the sum of those from t on.

    Every token counts as a step here. Longer rollouts have more steps in the mean. No baseline in the strict sense: the
    sum of several centred rewards depends on how many steps follow, so the direction is biased where lengths differ.

    Raises:
        ValueError: on shapes that differ, or a group without two steps.
    """
    _check(rewards_GRT, mask_GRT)
    rewards, mask = rewards_GRT.to(torch.float64) * mask_GRT, mask_GRT.to(torch.float64)
    count = mask.sum(dim=(1, 2), keepdim=True)
    if bool((count < 2).any()):
        raise ValueError("a group with fewer than two steps has no standard deviation of its rewards")
    mean = rewards.sum(dim=(1, 2), keepdim=True) / count
    centred = (rewards - mean) * mask
    std = (centred.square().sum(dim=(1, 2), keepdim=True) / (count - ddof)).sqrt()
    normal = centred / (std + eps)
    return normal.flip(-1).cumsum(-1).flip(-1) * mask


def turn_level(rewards_GRT: Tensor, mask_GRT: Tensor) -> Tensor:
    """Turn-level groups: the return from turn t on, less its mean over the other rollouts of the group that have a turn
    t. A rollout that is alone in a turn gets 0 there.

    Leave-one-out turn by turn. Unbiased where all rollouts have the same turns; else whether others have a turn t says
    something about them, not about this rollout, and the baseline stays independent of it.
    """
    _check(rewards_GRT, mask_GRT)
    mask = mask_GRT.to(torch.float64)
    returns = (rewards_GRT.to(torch.float64) * mask).flip(-1).cumsum(-1).flip(-1) * mask
    others = mask.sum(dim=1, keepdim=True) - mask
    baseline = (returns.sum(dim=1, keepdim=True) - returns) / others.clamp(min=1.0)
    return torch.where(others > 0, returns - baseline, 0.0) * mask


def _check(rewards_GRT: Tensor, mask_GRT: Tensor, *more: Tensor) -> None:
    if rewards_GRT.ndim != 3 or any(t.shape != rewards_GRT.shape for t in (mask_GRT, *more)):
        shapes = [tuple(t.shape) for t in (rewards_GRT, mask_GRT, *more)]
        raise ValueError(f"shapes {shapes}: one shape (G, R, T) for all is needed")
