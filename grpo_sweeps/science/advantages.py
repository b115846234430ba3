"""Claims about the advantages of a group: C2 (zero sum), C3 (variance and covariance)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from grpo_sweeps.estimators import grpo, grpo_std, rloo, row_weights
from grpo_sweeps.science.claim import EXACT, Claim, Estimate, agreement, relative, worst
from grpo_sweeps.science.prompts import Prompt

ZERO_SUM = {"group mean": grpo, "leave-one-out": rloo, "std": grpo_std}


def reward_tuples(o: Prompt, R: int) -> tuple[np.ndarray, np.ndarray]:
    """(M, R) all tuples of R rewards, and their probabilities (M,)."""
    values, where = np.unique(o.r_N, return_inverse=True)
    shares = np.bincount(where, weights=o.p_N)
    index = np.array(list(itertools.product(range(len(values)), repeat=R)))
    return values[index], shares[index].prod(axis=1)


def zero_sum(prompts: Sequence[Prompt], Rs: Sequence[int]) -> Claim:
    """C2: sums of advantages over every possible group, and of the row weights under 1/length."""
    sums, weights = [], 0.0
    for o, R in itertools.product(prompts, Rs):
        rewards = torch.from_numpy(reward_tuples(o, R)[0])
        for estimator in ZERO_SUM.values():
            advantages = estimator(rewards)
            sums.append(float(advantages.sum(1).abs().max()) / max(1.0, float(advantages.abs().max())))
        lengths = torch.arange(1, R + 1).repeat(len(rewards), 1)
        weights = max(
            weights, float(row_weights(grpo(rewards), lengths, "length", R).sum(1).abs().max()) * len(rewards)
        )
    return Claim(
        "C2",
        "4.1(i)",
        "The advantages of a group sum to zero.",
        "True, and as true of leave-one-out and of division by the standard deviation. The factors in front of the "
        "rows are another matter: under 1/length they do not sum to zero.",
        f"every reward tuple for R = {', '.join(map(str, Rs))}: largest sum {max(sums):.1e}; row weights under "
        f"1/length: up to {weights:.2f}",
        "",
        "holds" if max(sums) < EXACT else "does not hold",
        max(sums),
    )


Advantages = Callable[[torch.Tensor], torch.Tensor]


def moments(o: Prompt, R: int, estimator: Advantages) -> tuple[float, float]:
    """Exact Var A_1 and Cov(A_1, A_2), over every tuple of rewards."""
    rewards, chances = reward_tuples(o, R)
    A = estimator(torch.from_numpy(rewards)).numpy()
    mean = chances @ A[:, 0]
    return float(chances @ A[:, 0] ** 2 - mean**2), float(chances @ (A[:, 0] * A[:, 1]) - mean * (chances @ A[:, 1]))


def variances(prompts: Sequence[Prompt], Rs: Sequence[int], rng: np.random.Generator, draws: int) -> Claim:
    """C3: per prompt, pooled over prompts, and for leave-one-out."""
    errors, checks = [], []
    for o, R in itertools.product(prompts, Rs):
        s = o.e.sigma2
        expected = {grpo: ((R - 1) / R * s, -s / R), rloo: (R / (R - 1) * s, -R / (R - 1) ** 2 * s)}
        errors += [relative(np.array(moments(o, R, e)), np.array(pair)) for e, pair in expected.items()]
        rewards = o.r_N[o.draw(draws, R, rng)]
        A = grpo(torch.from_numpy(rewards)).numpy()
        checks.append((Estimate.of(A[:, 0] ** 2), expected[grpo][0]))
        checks.append((Estimate.of(A[:, 0] * A[:, 1]), expected[grpo][1]))
    mean = float(np.mean([o.e.sigma2 for o in prompts]))
    for R in Rs:  # a prompt drawn at random, then the group: advantages have mean zero in each, so moments average
        pooled = np.mean([moments(o, R, grpo) for o in prompts], axis=0)
        errors.append(relative(pooled, np.array([(R - 1) / R * mean, -mean / R])))
    return Claim(
        "C3",
        "4.1(ii), (iii)",
        "Var A = (R-1)/R sigma^2, and two advantages of a group have the covariance -sigma^2/R.",
        "True for one prompt and independent rollouts; over several prompts with the mean of sigma^2(x). "
        "Leave-one-out: R sigma^2/(R-1) and -R sigma^2/(R-1)^2.",
        f"{len(errors)} exact pairs, largest relative error {worst(errors):.1e}",
        agreement(checks),
        "holds" if worst(errors) < EXACT else "does not hold",
        worst(errors),
    )
