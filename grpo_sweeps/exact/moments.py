"""First and second moments of gradient estimators on an enumerated policy.

A group estimator is g = sum_i w_i psi_i over the R rollouts of one prompt, with weights that are a function of the
group's rewards and lengths: w = weights(rewards_MR, lengths_MR), (M, R) -> (M, R), row by row: M groups, each alone in
its step, 1/R or whatever the aggregation divides by included. When rollouts change
places their weights must move with them, as those of every group baseline do.

M  groups (steps of one group) evaluated at once    C  classes of sequences (`classes`)    D  parameters
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations_with_replacement, islice
from math import comb
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_sweeps.estimators import DECLARATIONS, row_weights
from grpo_sweeps.estimators.foreign import LENGTHS, on_arrays, takes_lengths
from grpo_sweeps.exact.enumeration import Classes, Enumeration

Weights = Callable[[Tensor, Tensor], Tensor]

MAX_ROLLOUTS = 2**26
"""Most rollouts in all multisets of classes before exact moments are refused: some ten seconds of one core."""
CHUNK = 2**19  # rollouts evaluated at once


@dataclass(frozen=True, eq=False)
class Moments:
    """First and second moment of an estimator g: mean_D = E g, second = E |g|^2."""

    mean_D: Tensor
    second: float

    @property
    def variance(self) -> float:
        """tr Var g."""
        return self.second - float(self.mean_D.square().sum())

    def mse(self, target_D: Tensor) -> float:
        """E |g - target|^2."""
        return self.variance + float((self.mean_D - target_D).square().sum())


def one_group_weights(estimator: Callable[..., Any], aggregation: str, max_length: int) -> Weights:
    """Row weights of each of M groups as if it were alone in its step.

    Args:
        estimator: rewards (G, R) -> advantages (G, R); given lengths too if it names a parameter `lengths_GR`. Called
            once for all groups where its declaration says that they do not matter to each other, else group by group.
        aggregation: one of `estimators.AGGREGATIONS`.
        max_length: longest sequence, in tokens.
    """
    function = getattr(estimator, "func", estimator)  # what a partial binds
    declared = [one for one in DECLARATIONS.values() if one.function is function]
    at_once = bool(declared) and not declared[0].batch_dependent
    with_lengths, called = takes_lengths(estimator), on_arrays(estimator)

    def advantages(rewards_MR: Tensor, lengths_MR: Tensor) -> Tensor:
        lengths = {LENGTHS: lengths_MR.numpy()} if with_lengths else {}
        return torch.from_numpy(called(rewards_MR.numpy(), **lengths))

    def weights(rewards_MR: Tensor, lengths_MR: Tensor) -> Tensor:
        if at_once:
            advantages_MR = advantages(rewards_MR, lengths_MR)
        else:
            pairs = zip(rewards_MR.split(1), lengths_MR.split(1), strict=True)
            advantages_MR = torch.cat([advantages(*pair) for pair in pairs])
        # `row_weights` divides by a step's rollouts or tokens. Among groups with equally many tokens both are as many
        # times a group's own as there are groups.
        _, total_M = lengths_MR.sum(dim=1).unique(return_inverse=True)
        weights_MR = torch.empty_like(advantages_MR)
        for total in range(int(total_M.max()) + 1):
            same = total_M == total
            of_step = row_weights(advantages_MR[same].numpy(), lengths_MR[same].numpy(), aggregation, max_length)
            weights_MR[same] = torch.from_numpy(of_step * len(of_step))
        return weights_MR

    return weights


def group_moments(enumeration: Enumeration, weights: Weights, R: int, by_length: bool = True) -> Moments:
    """Exact moments of sum_i w_i psi_i for a group of R rollouts.

    Given the classes c_1 .. c_R the scores are independent with means mu_c, so with a_c the sum of w_i over the
    rollouts of class c and b_c that of w_i^2:  E g = sum_c a_c mu_c,  E|g|^2 = |sum_c a_c mu_c|^2 + sum_c b_c
    tr Var(psi | c). These are summed over the multisets of classes with their multinomial probabilities.

    Args:
        enumeration: of the prompt.
        weights: a function of rewards and lengths.
        R: rollouts, >= 1.
        by_length: False for weights that ignore lengths: classes by reward alone, so far fewer multisets.

    Raises:
        ValueError: for more than `MAX_ROLLOUTS` rollouts in all multisets, weights that depend on the order of the
            rollouts, or on their lengths although `by_length` is False.
    """
    classes = enumeration.classes(by_length)
    C = len(classes.p_C)
    count = comb(C + R - 1, R)
    if count * R > MAX_ROLLOUTS:
        raise ValueError(
            f"R={R} and {C} classes give {count} multisets, more than {MAX_ROLLOUTS} rollouts in all: take a smaller R"
        )
    # Lengths that differ within a group and between groups, to see whether they matter.
    other_lengths_R = None if by_length else 1 + torch.arange(R) % int(enumeration.lengths_N.max())
    mean_C = torch.zeros(C, dtype=torch.float64)
    second = 0.0
    gram_CC, variance_C = classes.mean_CD @ classes.mean_CD.T, classes.variance_C
    for class_MR in _multisets(C, R):
        weights_MR = _checked_weights(weights, classes, class_MR, other_lengths_R)
        p_M = multinomial(class_MR, classes.p_C)
        a_MC = torch.zeros(len(class_MR), C, dtype=torch.float64).scatter_add_(1, class_MR, weights_MR)
        b_M = (weights_MR.square() * variance_C[class_MR]).sum(dim=1)
        mean_C += p_M @ a_MC
        second += float(p_M @ (((a_MC @ gram_CC) * a_MC).sum(dim=1) + b_M))
    return Moments(mean_C @ classes.mean_CD, second)


def multinomial(class_MR: Tensor, p_C: Tensor) -> Tensor:
    """Probability of each multiset of classes, R! / prod_c n_c! prod_c p_c^{n_c}. Shapes (M, R), (C,) -> (M,)."""
    M, R = class_MR.shape
    ones_MR = torch.ones(M, R, dtype=torch.float64)
    count_MC = torch.zeros(M, len(p_C), dtype=torch.float64).scatter_add_(1, class_MR, ones_MR)
    ways_M = torch.lgamma(torch.tensor(R + 1.0, dtype=torch.float64)) - torch.lgamma(count_MC + 1).sum(dim=1)
    return (ways_M + torch.xlogy(count_MC, p_C).sum(dim=1)).exp()


def sequence_moments(contribution_ND: Tensor, p_N: Tensor, R: int) -> Moments:
    """Moments of the mean of R independent contributions, one per sequence: estimators without a group baseline (known
    value, reward-to-go, credit per token; `Enumeration.contribution` makes them). Shapes (N, D), (N,)."""
    mean_D = p_N @ contribution_ND
    variance = float(p_N @ (contribution_ND - mean_D).square().sum(dim=1)) / R
    return Moments(mean_D, variance + float(mean_D.square().sum()))


def step_moments(groups: Sequence[Moments], B: float) -> Moments:
    """Moments of the mean of B groups whose prompts are drawn independently and uniformly from those of `groups`."""
    mean_D = torch.stack([group.mean_D for group in groups]).mean(dim=0)
    norm = float(mean_D.square().sum())
    variance = sum(group.second for group in groups) / len(groups) - norm
    return Moments(mean_D, variance / B + norm)


def between_prompts(enumerations: Sequence[Enumeration]) -> float:
    """V_between = E |grad J(x)|^2 - |E grad J(x)|^2 over uniform prompts x (arXiv 2603.01162)."""
    grad_XD = torch.stack([enumeration.grad_J_D for enumeration in enumerations])
    return float((grad_XD - grad_XD.mean(dim=0)).square().sum(dim=1).mean())


def _multisets(C: int, R: int) -> Iterator[Tensor]:
    """All multisets of R of the C classes as sorted rows, a batch (M, R) at a time."""
    rows = combinations_with_replacement(range(C), R)
    while part := list(islice(rows, max(1, CHUNK // R))):
        flat = np.fromiter(chain.from_iterable(part), dtype=np.int64, count=len(part) * R)
        yield torch.from_numpy(flat.reshape(-1, R))


def _checked_weights(weights: Weights, classes: Classes, class_MR: Tensor, other_lengths_R: Tensor | None) -> Tensor:
    """The weights of each multiset; raises ValueError where they depend on what the sum cannot see."""
    rewards_MR = classes.rewards_C[class_MR]
    lengths_MR = classes.lengths_C[class_MR] if other_lengths_R is None else torch.ones_like(rewards_MR)
    weights_MR = weights(rewards_MR, lengths_MR)
    if not torch.allclose(weights(rewards_MR.flip(1), lengths_MR.flip(1)).flip(1), weights_MR, rtol=1e-9, atol=1e-12):
        raise ValueError("the weights depend on the order of the rollouts: a sum over multisets does not hold")
    if other_lengths_R is not None:
        other_MR = weights(rewards_MR, other_lengths_R.expand_as(rewards_MR))
        if not torch.allclose(other_MR, weights_MR, rtol=1e-9, atol=1e-12):
            raise ValueError("the weights depend on the lengths: by_length=True is needed")
    return weights_MR
