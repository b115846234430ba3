"""Unbiased estimates, from one group's rewards and Gram alone, of what decides the best group size.

For one prompt, rollouts independent, psi the score, v = E r, sigma^2 = Var r, F = E psi psi' (arXiv 2603.01162):

    signal    ||grad J||^2               products of four distinct rollouts
    spread    sigma^2 tr F               of three
    V1        tr Var((r - v) psi)        of three, less the signal

Every estimate is the mean of a kernel over all choices of distinct rollouts of the group, so its expectation is the
quantity itself: no value estimated from the same rollouts is plugged in. V2 = spread + signal. A group of equal rewards
counts like all others: all three kernels are 0 there, whatever its Gram.

The mean over all choices is taken in closed form, R^2 operations for any R: with i, k fixed, the mean of r_j over the
others is (S - r_i - r_k)/(R - 2), that of r_j r_l is ((S - r_i - r_k)^2 - (Q - r_i^2 - r_k^2))/((R - 2)(R - 3)), with
S = sum r, Q = sum r^2. Only differences of rewards enter, so a constant is subtracted first, against rounding.

Shapes: rewards_R (..., R), gram_RR (..., R, R) with K_ij = <psi_i, psi_j>, leading axes a batch.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from grpo_sweeps.types import Array


def signal(rewards_R: ArrayLike, gram_RR: ArrayLike) -> Array:
    """Unbiased estimate of ||grad J||^2; R >= 4.

    Kernel: (r_i - r_j)(r_k - r_l) <psi_i - psi_j, psi_k - psi_l> / 4 over the three ways to pair four rollouts; its
    mean is that of (r_i - r_j)(r_k - r_l) K_ik over all distinct i, j, k, l.
    """
    r, K = _checked(rewards_R, gram_RR, 4)
    R = r.shape[-1]
    i, k = r[..., :, None], r[..., None, :]
    others = r.sum(axis=-1)[..., None, None] - i - k
    squares = np.square(r).sum(axis=-1)[..., None, None] - i**2 - k**2
    both = (others**2 - squares) / ((R - 2) * (R - 3))
    factor = (i * k - (i + k) * others / (R - 2) + both) * (1.0 - np.eye(R))
    return np.asarray((factor * K).sum(axis=(-2, -1)) / (R * (R - 1)))


def spread(rewards_R: ArrayLike, gram_RR: ArrayLike) -> Array:
    """Unbiased estimate of sigma^2 tr F; R >= 3. Kernel: (r_i - r_j)^2 / 2 times ||psi_k||^2 of a third rollout."""
    r, K = _checked(rewards_R, gram_RR, 3)
    R = r.shape[-1]
    others = r.sum(axis=-1, keepdims=True) - r
    squares = np.square(r).sum(axis=-1, keepdims=True) - r**2
    variance = (squares - others**2 / (R - 1)) / (R - 2)
    return np.asarray((variance * np.diagonal(K, axis1=-2, axis2=-1)).mean(axis=-1))


def oracle_variance(rewards_R: ArrayLike, gram_RR: ArrayLike) -> Array:
    """Unbiased estimate of V1; R >= 4. Kernel: (r_k - r_i)(r_k - r_j) ||psi_k||^2, less `signal`."""
    r, K = _checked(rewards_R, gram_RR, 4)
    R = r.shape[-1]
    others = r.sum(axis=-1, keepdims=True) - r
    squares = np.square(r).sum(axis=-1, keepdims=True) - r**2
    square = r**2 - 2 * r * others / (R - 1) + (others**2 - squares) / ((R - 1) * (R - 2))
    second = (square * np.diagonal(K, axis1=-2, axis2=-1)).mean(axis=-1)
    return np.asarray(second - signal(r, K))


def square_by_size(rewards_R: ArrayLike, gram_RR: ArrayLike, sizes_S: ArrayLike) -> Array:
    """Mean of ||g||^2 over all sub-groups of R' <= R rollouts, g the leave-one-out gradient, for each R' of `sizes_S`.

    g is the mean of h_ij = (r_i - r_j)(psi_i - psi_j)/2 over the pairs of its sub-group. Two of n (n - 1)/2 pairs share
    no rollout, one, or both; with s_0 (`signal`), s_1 and s_2 the means of <h_ij, h_kl> over these choices

        ||g||^2 = ((n - 2)(n - 3) s_0 + 4 (n - 2) s_1 + 2 s_2) / (n (n - 1)),    n = R',

    and s_1 follows from the group itself, n = R. Nothing is assumed of the scores. Shape (..., S); R >= 4, R' >= 2.
    """
    r, K = _checked(rewards_R, gram_RR, 4)
    R, n = r.shape[-1], np.asarray(sizes_S)
    if n.min() < 2 or n.max() > R:
        raise ValueError(f"sizes {n.tolist()}: sub-groups of a group of {R} have 2 to {R} rollouts")
    norms = np.diagonal(K, axis1=-2, axis2=-1)
    distance = norms[..., :, None] + norms[..., None, :] - 2 * K
    s2 = ((r[..., :, None] - r[..., None, :]) ** 2 * distance).sum(axis=(-2, -1)) / (4 * R * (R - 1))
    s0, whole = signal(r, K), np.einsum("...i,...ij,...j->...", r, K, r) / (R - 1) ** 2
    s1 = (R * (R - 1) * whole - (R - 2) * (R - 3) * s0 - 2 * s2) / (4 * (R - 2))
    total = (n - 2) * (n - 3) * s0[..., None] + 4 * (n - 2) * s1[..., None] + 2 * s2[..., None]
    return np.asarray(total / (n * (n - 1)))


def signal_of_mean(step_sq_norm: float, group_sq_norms_G: ArrayLike, groups: int, R: int) -> float:
    """Unbiased estimate of ||E_x grad J(x)||^2 from one step of `groups` independent prompts with the group mean.

    step_sq_norm: ||g||^2 of the step's gradient g, the mean over its groups of g_x = sum_i A_i psi_i / R.
    group_sq_norms_G: ||g_x||^2 of the groups that have one (those of equal rewards have 0). The products of different
    groups alone are free of noise: ||sum g_x||^2 - sum ||g_x||^2 over `groups` (`groups` - 1), less ((R - 1)/R)^2.
    """
    if groups < 2 or R < 2:
        raise ValueError(f"groups={groups}, R={R}: two groups of two rollouts or more are needed")
    between = groups**2 * step_sq_norm - float(np.sum(group_sq_norms_G))
    return between / (groups * (groups - 1)) * (R / (R - 1)) ** 2


def best_group_size(V2: float, between: float) -> float:
    """R* = 1 + sqrt(E V2 / V_between), the group size of least error of leave-one-out at a fixed number of rollouts;
    infinite where the prompts' gradients do not differ (an estimate of V_between may fall below 0)."""
    return 1 + float(np.sqrt(max(V2, 0.0) / between)) if between > 0 else float("inf")


def error_by_rollouts(R: ArrayLike, V1: ArrayLike, V2: ArrayLike, between: ArrayLike) -> Array:
    """N MSE of leave-one-out, N rollouts in groups of R, against the gradient of the average objective:
    R V_between + E V1 + E V2 / (R - 1)."""
    R, V1, V2, between = (np.asarray(x, dtype=np.float64) for x in (R, V1, V2, between))
    return np.asarray(R * between + V1 + V2 / (R - 1))


def near_best(V1: float, V2: float, between: float, within: float = 1.05) -> tuple[float, float]:
    """Least and largest whole R >= 2 whose error is at most `within` times the least of any whole R.

    Infinite above where V_between <= 0, the error then falling towards E V1; NaN where no error is above 0.

    >>> near_best(10.0, 2.0, 1.0)
    (2.0, 4.0)
    """
    if not between > 0:
        return (max(2.0, 1.0 + math.ceil(V2 / ((within - 1) * V1))) if V1 > 0 else math.nan), math.inf
    x = max(1, math.floor(best_group_size(V2, between)) - 1)  # x = R - 1
    least = float(np.min(error_by_rollouts(np.array([x + 1, x + 2]), V1, V2, between)))
    if not least > 0:
        return math.nan, math.nan
    half = (within * least - V1 - between) / (2 * between)  # of the roots of between x^2 - 2 half between x + V2 = 0
    root = math.sqrt(max(0.0, half**2 - V2 / between))
    rounding = 1e-9 * (1 + half)
    return max(2.0, 1.0 + math.ceil(half - root - rounding)), 1.0 + math.floor(half + root + rounding)


def _checked(rewards_R: ArrayLike, gram_RR: ArrayLike, least: int) -> tuple[Array, Array]:
    r, K = np.asarray(rewards_R, dtype=np.float64), np.asarray(gram_RR, dtype=np.float64)
    R = r.shape[-1]
    if K.shape[-2:] != (R, R):
        raise ValueError(f"{R} rewards and a Gram of shape {K.shape[-2:]} do not fit")
    if least > R:
        raise ValueError(f"R={R}: {least} distinct rollouts are needed")
    r = r - r[..., :1]  # exactly 0 where all are equal
    return r - r.mean(axis=-1, keepdims=True), K
