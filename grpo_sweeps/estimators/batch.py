"""Estimators that look beyond the group: their baseline or their scale comes from all N = G R rollouts of the step.

An advantage then depends on which other prompts are in the step. Where all rewards of the step are equal, every
advantage is exactly zero, judged by max - min as for a group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from grpo_sweeps.estimators.group import Ddof, Eps, check_scale, grpo
from grpo_sweeps.types import Array


def batch_mean(rewards_GR: ArrayLike) -> Array:
    """The step's mean as the baseline: A_i = r_i - (1/N) sum_j r_j over all N = G R rollouts (Williams 1992, with the
    sample's mean for the constant).

    E[sum_i A_i psi_i / N] = (N - 1)/N times the mean of the prompts' grad J: only the rollout's own reward in the mean
    costs anything, because a score is independent of every other reward. A group of equal rewards has a gradient
    wherever they differ from the step's mean.

    Args:
        rewards_GR: (G, R) rewards, G R >= 2.

    Returns:
        (G, R) advantages in the unit of the reward, float64.

    Raises:
        ValueError: if the rewards are not (G, R) with at least 2 rollouts.
    """
    rewards = np.asarray(rewards_GR, dtype=np.float64)
    if rewards.ndim != 2 or rewards.size < 2:
        raise ValueError(f"rewards of shape {rewards.shape}: a step's baseline needs (G, R) with G R >= 2")
    if rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    return rewards - rewards.mean()


def reinforce_plus_plus(rewards_GR: ArrayLike, ddof: Ddof = 0, eps: Eps = 1e-8) -> Array:
    """Mean and standard deviation of the step: A_i = (r_i - mean) / (std + eps) over N sequences (REINFORCE++, arXiv
    2501.03262).

    Here each sequence counts once. OpenRLHF, where the estimator was written, counts each token once, so that long
    completions weigh more in mean and std, takes the variance with ddof 0 and floors it at 1e-8 instead of adding eps.
    The paper's KL penalty within the reward is left out.

    Args:
        rewards_GR: (G, R) rewards, G R >= 2.
        ddof: 0 (divide the squared deviations by N) or 1 (by N - 1).
        eps: added to the standard deviation; unit of the reward, >= 0.

    Returns:
        (G, R) advantages without unit, float64.

    Raises:
        ValueError: on a wrong shape, `ddof` or `eps`.
    """
    check_scale(ddof, eps, "N")
    return _over_step_std(batch_mean(rewards_GR), ddof, eps)


def reinforce_plus_plus_baseline(rewards_GR: ArrayLike, ddof: Ddof = 0, eps: Eps = 1e-8) -> Array:
    """Group mean, then the step's standard deviation: A_i = c_i / (std_N(c) + eps), c_i = r_i - mean of its group
    (REINFORCE++-baseline, arXiv 2501.03262).

    The mean of c over the step is zero already, so the step's mean is not subtracted again. Every prompt is divided by
    one number, unlike in `grpo_std`: the advantages are those of `grpo` up to a factor common to the step, which still
    depends on the rewards. Sequences count once each, as in `reinforce_plus_plus`.

    Args:
        rewards_GR: (G, R) rewards, R >= 2.
        ddof: 0 (divide the squared deviations by N) or 1 (by N - 1).
        eps: added to the standard deviation; unit of the reward, >= 0.

    Returns:
        (G, R) advantages without unit, float64.

    Raises:
        ValueError: on a wrong shape, `ddof` or `eps`.
    """
    check_scale(ddof, eps, "N")
    return _over_step_std(grpo(rewards_GR), ddof, eps)


def _over_step_std(centred_GR: Array, ddof: int, eps: float) -> Array:
    """Divide what has mean zero over the step by its standard deviation; nothing but zeros stays as it is."""
    if not centred_GR.any():
        return centred_GR
    variance = np.square(centred_GR).sum() / (centred_GR.size - ddof)
    return centred_GR / (np.sqrt(variance) + eps)
