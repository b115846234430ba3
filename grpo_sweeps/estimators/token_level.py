"""Credit for each token: pure functions (G, R, T) -> (G, R, T), for policies with values or rewards along the way.

The gradient they belong to is sum_t A_t grad log pi(a_t | s_t), so that they give rows of the loss, not row weights on
scores: the exact policy takes them (`exact.Enumeration.contribution`), the training loop `gae` (objective.critic) and
`vine`, by segments (objective.continuations).

Shapes: G groups, R rollouts, T tokens (or turns); `mask_GRT` is True on a rollout's tokens, which come first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from grpo_sweeps.types import Array


def gae(
    rewards_GRT: ArrayLike, values_GRT: ArrayLike, mask_GRT: ArrayLike, gamma: float = 1.0, lam: float = 1.0
) -> Array:  # fmt: skip
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
    mask, rewards, values = _checked(mask_GRT, rewards_GRT, values_GRT)
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value}: a number from 0 to 1 is needed")
    after = np.concatenate([values[..., 1:], np.zeros_like(values[..., :1])], axis=-1)
    delta = (rewards + gamma * after - values) * mask
    A = np.zeros_like(delta)
    running = np.zeros_like(delta[..., 0])
    for t in range(delta.shape[-1] - 1, -1, -1):
        running = delta[..., t] + gamma * lam * running
        A[..., t] = running
    return A * mask


def vine(rewards_GRT: ArrayLike, values_GRT: ArrayLike, mask_GRT: ArrayLike) -> Array:
    """VinePPO (arXiv 2410.01679): A_t = r_t + V(s_{t+1}) - V(s_t), V from fresh rollouts at each prefix.

    Unbiased where V is, of whatever variance: the two values come from other rollouts than the one that is credited.
    With the exact values it is the true credit q(s_t, a_t) - v(s_t) of a deterministic environment.
    """
    return gae(rewards_GRT, values_GRT, mask_GRT, lam=0.0)


def process_rewards(rewards_GRT: ArrayLike, mask_GRT: ArrayLike, ddof: int = 1, eps: float = 1e-4) -> Array:
    """Group-relative process rewards (DeepSeekMath, arXiv 2402.03300): each step's reward less the mean of all step
    rewards of the group, over their standard deviation; A_t is the sum of those from t on.

    Every token counts as a step here. Longer rollouts have more steps in the mean. No baseline in the strict sense: the
    sum of several centred rewards depends on how many steps follow, so the direction is biased where lengths differ.

    Raises:
        ValueError: on shapes that differ, or a group without two steps.
    """
    mask, rewards = _checked(mask_GRT, rewards_GRT)
    count = mask.sum(axis=(1, 2), keepdims=True)
    if (count < 2).any():
        raise ValueError("a group with fewer than two steps has no standard deviation of its rewards")
    mean = rewards.sum(axis=(1, 2), keepdims=True) / count
    centred = (rewards - mean) * mask
    std = np.sqrt(np.square(centred).sum(axis=(1, 2), keepdims=True) / (count - ddof))
    normal = centred / (std + eps)
    return _to_go(normal) * mask


def turn_level(rewards_GRT: ArrayLike, mask_GRT: ArrayLike) -> Array:
    """Turn-level groups: the return from turn t on, less its mean over the other rollouts of the group that have a turn
    t. A rollout that is alone in a turn gets 0 there.

    Leave-one-out turn by turn. Unbiased where all rollouts have the same turns; else whether others have a turn t says
    something about them, not about this rollout, and the baseline stays independent of it.
    """
    mask, rewards = _checked(mask_GRT, rewards_GRT)
    returns = _to_go(rewards) * mask
    others = mask.sum(axis=1, keepdims=True) - mask
    baseline = (returns.sum(axis=1, keepdims=True) - returns) / np.maximum(others, 1.0)
    return np.where(others > 0, returns - baseline, 0.0) * mask


def _to_go(values_GRT: Array) -> Array:
    """Sums from each token to the end."""
    return np.flip(np.cumsum(np.flip(values_GRT, -1), axis=-1), -1)


def _checked(mask_GRT: ArrayLike, *others: ArrayLike) -> tuple[Array, ...]:
    """The mask and the other arrays as float64, the others 0 where the mask is False."""
    mask, *arrays = (np.asarray(each, dtype=np.float64) for each in (mask_GRT, *others))
    if mask.ndim != 3 or any(each.shape != mask.shape for each in arrays):
        shapes = [each.shape for each in (*arrays, mask)]
        raise ValueError(f"shapes {shapes}: one shape (G, R, T) for all is needed")
    return (mask, *(each * mask for each in arrays))
