"""Estimators whose baseline is made from the rewards of the same group (all rollouts of one prompt).

Each needs R >= 2. For all of them but `opo` the advantages of a group sum to zero, and for all of them a group whose
rewards are all equal has advantages of exactly zero: equality is judged by max - min, never by a floating-point
standard deviation.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike

from grpo_sweeps.types import Array, Within

Ddof = Annotated[int, Within(0, 1)]
Eps = Annotated[float, Within(0)]


def check_scale(ddof: int, eps: float, count: str) -> None:
    """Raise ValueError for a standard deviation that is not meant; `count` is the letter of what is counted, R or N."""
    if ddof not in (0, 1):
        raise ValueError(f"ddof={ddof}: allowed are 0 (divide by {count}) and 1 (divide by {count} - 1)")
    if not eps >= 0:
        raise ValueError(f"eps={eps}: allowed is a number >= 0")


def grpo(rewards_GR: ArrayLike) -> Array:
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
    rewards = _checked(rewards_GR)
    return _zero_where_equal(rewards, rewards - rewards.mean(axis=1, keepdims=True))


def grpo_std(rewards_GR: ArrayLike, ddof: Ddof = 1, eps: Eps = 1e-4) -> Array:
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
    check_scale(ddof, eps, "R")
    rewards = _checked(rewards_GR)
    centred_GR = rewards - rewards.mean(axis=1, keepdims=True)
    scale_G1 = rewards.std(axis=1, keepdims=True, ddof=ddof) + eps
    with np.errstate(invalid="ignore"):  # 0 / 0, with eps = 0
        return _zero_where_equal(rewards, centred_GR / scale_G1)


def rloo(rewards_GR: ArrayLike) -> Array:
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
    advantages_GR = grpo(rewards_GR)
    R = advantages_GR.shape[1]
    return advantages_GR * (R / (R - 1))


def dr_grpo(rewards_GR: ArrayLike) -> Array:
    """Dr. GRPO: A_i = r_i - mean_j r_j (arXiv 2503.20783).

    The advantage is that of `grpo`; what sets the method apart is the loss, divided by a constant instead of each
    completion's length: `aggregation=constant`, which its YAML chooses as well. Also
    E[sum_i A_i psi_i / R] = (R - 1)/R grad J.

    Args:
        rewards_GR: (G, R) rewards, R >= 2.

    Returns:
        (G, R) advantages in the unit of the reward, float64.

    Raises:
        ValueError: if the rewards are not (G, R) with R >= 2.
    """
    return grpo(rewards_GR)


def dapo(rewards_GR: ArrayLike, ddof: Ddof = 1, eps: Eps = 1e-6) -> Array:
    """DAPO: A_i = (r_i - mean) / (std + eps) (arXiv 2503.14476).

    The advantage is that of `grpo_std`; the loss is averaged over the step's tokens: `aggregation=token_mean`, which
    its YAML chooses as well. The paper gives neither ddof nor eps; the defaults are those of verl, which its authors
    used. Dynamic sampling (prompts drawn again until 0 < k < R) and the wider upper clip are the objective's, in the
    configuration; the penalty on overlong completions is not here.

    Args:
        rewards_GR: (G, R) rewards, R >= 2.
        ddof: 0 or 1.
        eps: added to the standard deviation; unit of the reward, >= 0.

    Returns:
        (G, R) advantages without unit, float64.

    Raises:
        ValueError: on a wrong shape, `ddof` or `eps`.
    """
    return grpo_std(rewards_GR, ddof, eps)


def opo(rewards_GR: ArrayLike, lengths_GR: ArrayLike) -> Array:
    """Length-weighted baseline: A_i = r_i - sum_j l_j r_j / sum_j l_j over the group (OPO, arXiv 2505.23585).

    The constant baseline of least variance is E[norm(psi)^2 r] / E[norm(psi)^2]; OPO takes norm(psi)^2 as proportional
    to the length. Hence sum_i l_i A_i = 0, while sum_i A_i is in general not 0. The rollout's own reward and length are
    in the baseline, and so E[sum_i A_i psi_i / R] need not point along grad J; where all lengths are equal, the
    advantages are those of `grpo`.

    Args:
        rewards_GR: (G, R) rewards, R >= 2.
        lengths_GR: (G, R) completion lengths in tokens, >= 1.

    Returns:
        (G, R) advantages in the unit of the reward, float64.

    Raises:
        ValueError: if the rewards are not (G, R) with R >= 2, the lengths' shape differs, or a length is below 1.
    """
    rewards, lengths = _checked(rewards_GR), np.asarray(lengths_GR, dtype=np.float64)
    if lengths.shape != rewards.shape:
        raise ValueError(f"rewards {rewards.shape} and lengths {lengths.shape} differ in shape")
    if not (lengths >= 1).all():
        raise ValueError(f"a length of {lengths.min():g}: a completion has at least 1 token")
    baseline_G1 = (lengths * rewards).sum(axis=1, keepdims=True) / lengths.sum(axis=1, keepdims=True)
    return _zero_where_equal(rewards, rewards - baseline_G1)


def _checked(rewards_GR: ArrayLike) -> Array:
    rewards = np.asarray(rewards_GR, dtype=np.float64)
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards of shape {rewards.shape}: a group baseline needs (G, R) with R >= 2")
    return rewards


def _zero_where_equal(rewards_GR: Array, advantages_GR: Array) -> Array:
    """Rounding of the mean must not give an all-equal group (0.1, 0.1, 0.1) a tiny gradient."""
    equal_G1 = rewards_GR.max(axis=1, keepdims=True) == rewards_GR.min(axis=1, keepdims=True)
    return np.where(equal_G1, 0.0, advantages_GR)
