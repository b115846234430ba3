"""Slow, obvious or sampled ways to the moments that `grpo_sweeps.exact` sums over classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor

from grpo_sweeps.exact import Enumeration, Moments, Weights, group_moments, step_moments

CHUNK = 2**19  # rollouts evaluated at once


@dataclass(frozen=True, eq=False)
class Sampled:
    """Moments from `draws` sampled groups, with standard errors; mse is E |g - grad J|^2."""

    moments: Moments
    mean_error_D: Tensor
    mse: float
    mse_error: float
    draws: int


def brute_force(enumeration: Enumeration, weights: Weights, R: int) -> Moments:
    """The same moments as the plain sum over all N^R tuples of sequences, one after the other: the slow oracle."""
    mean_D = torch.zeros_like(enumeration.grad_J_D)
    second = 0.0
    for rows in product(range(len(enumeration.p_N)), repeat=R):
        group = list(rows)
        probability = prod(enumeration.p_N[group].tolist())
        weights_R = weights(enumeration.rewards_N[group][None], enumeration.lengths_N[group][None])[0]
        gradient_D = weights_R @ enumeration.psi_ND[group]
        mean_D += probability * gradient_D
        second += probability * float(gradient_D @ gradient_D)
    return Moments(mean_D, second)


def monte_carlo(enumeration: Enumeration, weights: Weights, R: int, draws: int, seed: int = 0) -> Sampled:
    """Moments from `draws` >= 2 independent groups of R rollouts, for an R beyond `group_moments`. Two runs with the
    same seed, R and draws see the same groups: compare two estimators on them."""
    if draws < 2:
        raise ValueError(f"draws={draws}: a standard error needs 2 or more")
    generator = torch.Generator().manual_seed(seed)
    target_D, N = enumeration.grad_J_D, len(enumeration.p_N)
    # Deviations from the target, whose squares do not cancel.
    sum_D, squares_D = torch.zeros_like(target_D), torch.zeros_like(target_D)
    errors: list[Tensor] = []
    chunk = max(1, CHUNK // R)
    for start in range(0, draws, chunk):
        size = min(chunk, draws - start)
        row_MR = torch.multinomial(enumeration.p_N, size * R, replacement=True, generator=generator).reshape(size, R)
        weights_MR = weights(enumeration.rewards_N[row_MR], enumeration.lengths_N[row_MR])
        total_MN = torch.zeros(size, N, dtype=torch.float64).scatter_add_(1, row_MR, weights_MR)
        deviation_MD = total_MN @ enumeration.psi_ND - target_D
        sum_D += deviation_MD.sum(dim=0)
        squares_D += deviation_MD.square().sum(dim=0)
        errors.append(deviation_MD.square().sum(dim=1))
    error_M = torch.cat(errors)
    off_D = sum_D / draws
    variance_D = (squares_D / draws - off_D.square()).clamp(min=0.0) * draws / (draws - 1)
    mean_D, mse = target_D + off_D, float(error_M.mean())
    second = mse + 2 * float(mean_D @ target_D) - float(target_D.square().sum())
    mse_error = float(error_M.std() / draws**0.5)
    return Sampled(Moments(mean_D, second), (variance_D / draws).sqrt(), mse, mse_error, draws)


def mse_over_prompts(
    enumerations: Sequence[Enumeration], weights: Weights, R: int, N: int, by_length: bool = True
) -> float:
    """Exact E |g - grad of the average J|^2 of a step of N rollouts: B = N / R independent uniform prompts, R rollouts
    each, g the mean of the groups' gradients (here N counts rollouts, not sequences).

    Raises:
        ValueError: where R does not divide N, and as `group_moments`.
    """
    if N % R:
        raise ValueError(f"N={N} rollouts are no whole number of groups of R={R}")
    groups = [group_moments(enumeration, weights, R, by_length) for enumeration in enumerations]
    target_D = torch.stack([enumeration.grad_J_D for enumeration in enumerations]).mean(dim=0)
    return step_moments(groups, N // R).mse(target_D)
