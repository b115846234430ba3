"""Estimators without a baseline."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from grpo_sweeps.types import Array


def reinforce(rewards_GR: ArrayLike) -> Array:
    """No baseline: A_i = r_i (Williams 1992). Unbiased; R = 1 is allowed, and an all-equal group has a gradient.

    Args:
        rewards_GR: (G, R) rewards, R >= 1.

    Returns:
        (G, R) advantages in the unit of the reward, float64.

    Raises:
        ValueError: if the rewards are not (G, R).
    """
    rewards = np.asarray(rewards_GR, dtype=np.float64)
    if rewards.ndim != 2:
        raise ValueError(f"rewards of shape {rewards.shape}: (G, R) is needed")
    return rewards.copy()
