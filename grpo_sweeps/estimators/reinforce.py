"""Estimators without a baseline."""

from __future__ import annotations

import torch
from torch import Tensor


def reinforce(rewards_GR: Tensor) -> Tensor:
    """No baseline: A_i = r_i (Williams 1992). Unbiased; R = 1 is allowed, and an all-equal group has a gradient.

    Args:
        rewards_GR: (G, R) rewards, R >= 1.

    Returns:
        (G, R) advantages in the unit of the reward, float64.

    Raises:
        ValueError: if the rewards are not (G, R).
    """
    if rewards_GR.ndim != 2:
        raise ValueError(f"rewards of shape {tuple(rewards_GR.shape)}: (G, R) is needed")
    return rewards_GR.to(torch.float64).clone()
