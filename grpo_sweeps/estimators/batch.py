"""Estimators that look beyond the group: their baseline or their scale comes from all N = G R rollouts of the step.

An advantage then depends on which other prompts are in the step. Where all rewards of the step are equal, every
advantage is exactly zero, judged by max - min as for a group.
"""

from __future__ import annotations

import math

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


LARGEST_SCALE = 1e6
"""The most that `bnpo` multiplies a group by, as in its authors' code."""


def bnpo(rewards_GR: ArrayLike) -> Array:
    """Group mean over a Beta density: A_i = (r_i - p_g) / f(p_g; alpha, beta) (BNPO, arXiv 2506.02864).

    p_g is the group's mean reward and f the density of Beta(alpha, beta), alpha = max(1, 1 + a/3), beta = max(1, 1 +
    b/3). (a, b) are the Beta distribution that has the mean m and the variance v (ddof 1) of the step's p_g: a = m c, b
    = (1 - m) c, c = m (1 - m)/v - 1. Groups with an unusual mean for the step weigh more. With one group, or where all
    p_g are equal and no v is left, alpha = beta = 1 and the advantages are those of `grpo`.

    These are the equations of its authors' code, without its affine map of other rewards to 0 .. 1. TRL's loss type of
    the same name is another thing: a mean over the tokens of the batch.

    Args:
        rewards_GR: (G, R) rewards from 0 to 1, R >= 2.

    Returns:
        (G, R) advantages without unit, float64.

    Raises:
        ValueError: if the rewards are not (G, R) with R >= 2, or one is outside 0 to 1.
    """
    centred_GR, rewards = grpo(rewards_GR), np.asarray(rewards_GR, dtype=np.float64)
    if not (rewards.min() >= 0 and rewards.max() <= 1):
        raise ValueError(f"rewards from {rewards.min():g} to {rewards.max():g}: bnpo needs rewards from 0 to 1")
    # Exact sums: means that are equal must not differ by the order of the rewards, or 1/v is anything.
    p_G = np.array([math.fsum(group) for group in rewards.tolist()]) / rewards.shape[1]
    mean, variance = float(p_G.mean()), float(p_G.var(ddof=1)) if len(p_G) > 1 else 0.0
    if not variance > 0 or p_G.max() == p_G.min():
        return centred_GR
    count = mean * (1 - mean) / variance - 1
    alpha, beta = max(1.0, 1 + mean * count / 3), max(1.0, 1 + (1 - mean) * count / 3)
    inside_G = centred_GR.any(axis=1)  # then 0 < p_g < 1
    p_G = np.where(inside_G, p_G, 0.5)
    constant = math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
    log_scale_G = constant - (alpha - 1) * np.log(p_G) - (beta - 1) * np.log1p(-p_G)
    scale_G = np.exp(np.minimum(log_scale_G, math.log(LARGEST_SCALE)))
    return centred_GR * scale_G[:, None]


def _over_step_std(centred_GR: Array, ddof: int, eps: float) -> Array:
    """Divide what has mean zero over the step by its standard deviation; nothing but zeros stays as it is."""
    if not centred_GR.any():
        return centred_GR
    variance = np.square(centred_GR).sum() / (centred_GR.size - ddof)
    return centred_GR / (np.sqrt(variance) + eps)
