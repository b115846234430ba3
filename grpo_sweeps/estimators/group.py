"""Estimators whose baseline is made from the rewards of the same group (all rollouts of one prompt).

Each needs R >= 2. For all of them the advantages of a group sum to zero, and a group whose rewards are all equal has
advantages of exactly zero: equality is judged by max - min, never by a floating-point standard deviation.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grpo(rewards_GR: Tensor) -> Tensor:
    """Group-mean baseline: A_i = r_i - mean_j r_j (arXiv 2606.29238, Eq 15; the estimator of Dr. GRPO, arXiv
    2503.20783).

    E[sum_i A_i psi_i / R] = (R - 1)/R grad J: a factor, no change of direction.

    Args:
        rewards_GR: (G, R) rewards, R >= 2.

    Returns:
        (G, R) advantages in the unit of the reward, float64.

    Raises:
        ValueError: if the rewards are not (G, R) with R >= 2.
    """
    rewards_GR = _checked(rewards_GR)
    return _zero_where_equal(rewards_GR, rewards_GR - rewards_GR.mean(dim=1, keepdim=True))


def grpo_std(rewards_GR: Tensor, ddof: int = 1, eps: float = 1e-4) -> Tensor:
    """Group mean and standard deviation: A_i = (r_i - mean) / (std + eps) (DeepSeekMath, arXiv 2402.03300).

    Only the standard deviation differs from `grpo`; there is no clipping here. `ddof` = 1 divides the squared
    deviations by R - 1, `ddof` = 0 by R: for the rewards 0, 1 the advantages are +-0.707 and +-1 respectively (eps =
    0).

    Args:
        rewards_GR: (G, R) rewards, R >= 2.
        ddof: 0 or 1.
        eps: added to the standard deviation; unit of the reward, >= 0.

    Returns:
        (G, R) advantages without unit, float64.

    Raises:
        ValueError: on a wrong shape, `ddof` or `eps`.
    """
    if ddof not in (0, 1):
        raise ValueError(f"ddof={ddof}: allowed are 0 (divide by R) and 1 (divide by R - 1)")
    if eps < 0:
        raise ValueError(f"eps={eps}: allowed is a number >= 0")
    rewards_GR = _checked(rewards_GR)
    centred_GR = rewards_GR - rewards_GR.mean(dim=1, keepdim=True)
    scale_G1 = rewards_GR.std(dim=1, keepdim=True, correction=ddof) + eps
    return _zero_where_equal(rewards_GR, centred_GR / scale_G1)


def rloo(rewards_GR: Tensor) -> Tensor:
    """Leave-one-out baseline: A_i = r_i - mean_{j != i} r_j = R/(R - 1) (r_i - mean) (Kool et al. 2019; arXiv
    2402.14740).

    Unbiased: E[sum_i A_i psi_i / R] = grad J.

    Args:
        rewards_GR: (G, R) rewards, R >= 2.

    Returns:
        (G, R) advantages in the unit of the reward, float64.

    Raises:
        ValueError: if the rewards are not (G, R) with R >= 2.
    """
    R = rewards_GR.shape[-1]
    return grpo(rewards_GR) * (R / (R - 1))


def _checked(rewards_GR: Tensor) -> Tensor:
    if rewards_GR.ndim != 2 or rewards_GR.shape[1] < 2:
        raise ValueError(f"rewards of shape {tuple(rewards_GR.shape)}: a group baseline needs (G, R) with R >= 2")
    return rewards_GR.to(torch.float64)


def _zero_where_equal(rewards_GR: Tensor, advantages_GR: Tensor) -> Tensor:
    """Rounding of the mean must not give an all-equal group (0.1, 0.1, 0.1) a tiny gradient."""
    equal_G1 = rewards_GR.amax(dim=1, keepdim=True) == rewards_GR.amin(dim=1, keepdim=True)
    return advantages_GR.masked_fill(equal_G1, 0.0)
