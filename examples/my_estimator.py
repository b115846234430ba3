"""An advantage estimator of your own, used by its dotted path: ranks instead of rewards.

    cd examples
    python -m grpo_sweeps.run R=4 estimator=custom estimator._target_=my_estimator.pairwise_rank

An estimator is a pure function from the rewards of a step, shape (G, R), to advantages of the same shape. Annotated as
here it is given float64 numpy arrays; without, or annotated as tensors, float64 tensors on the CPU.
"""

from __future__ import annotations

import numpy as np


def pairwise_rank(rewards_GR: np.ndarray) -> np.ndarray:
    """A_i = (1/R) sum_j sign(r_i - r_j): how many rollouts of its group a rollout beats, less those that beat it.

    Sums to zero over a group, is zero for a group of equal rewards, does not change when the rewards are transformed by
    an increasing function, and for rewards of 0 and 1 equals the reward less the group's mean.
    """
    differences_GRR = rewards_GR[:, :, None] - rewards_GR[:, None, :]
    return np.sign(differences_GRR).mean(axis=-1)
