"""Claims about the rewards and advantages of a group: C2 (zero sum), C3 (variance and covariance), C4 (tails), C12
(Hoeffding's table), C23 (every rollout within eps).

C4, C12 and C23 are decided by counting: of R independent rollouts with binary rewards, k ~ Binomial(R, p) are right.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from grpo_sweeps.estimators import grpo, grpo_std, rloo, row_weights
from grpo_sweeps.paper import CALLED_VACUOUS, HOEFFDING_EPS, HOEFFDING_R
from grpo_sweeps.science.claim import (
    EXACT,
    Estimate,
    ExactClaim,
    Judgement,
    Prompt,
    agreement,
    judged,
    relative,
    worst,
)
from grpo_sweeps.types import Array

ZERO_SUM = {"group mean": grpo, "leave-one-out": rloo, "std": grpo_std}


def reward_tuples(o: Prompt, R: int) -> tuple[np.ndarray, np.ndarray]:
    """All tuples of R rewards, (M, R), and their probabilities, (M,)."""
    values, where = np.unique(o.r_N, return_inverse=True)
    shares = np.bincount(where, weights=o.p_N)
    index = np.array(list(itertools.product(range(len(values)), repeat=R)))
    return values[index], shares[index].prod(axis=1)


def zero_sum(prompts: Sequence[Prompt], Rs: Sequence[int]) -> ExactClaim:
    """C2: the largest sum of advantages over every possible group, and of the row weights under 1/length."""
    sums, weights = [], 0.0
    for o, R in itertools.product(prompts, Rs):
        rewards = reward_tuples(o, R)[0]
        for estimator in ZERO_SUM.values():
            advantages = estimator(rewards)
            sums.append(np.abs(advantages.sum(axis=1)).max() / max(1.0, np.abs(advantages).max()))
        lengths = np.tile(np.arange(1, R + 1), (len(rewards), 1))
        of_rows = row_weights(grpo(rewards), lengths, "length", R).sum(axis=1)
        weights = max(weights, float(np.abs(of_rows).max()) * len(rewards))
    return judged(
        "C2",
        "True, and as true of leave-one-out and of division by the standard deviation. The factors in front of the "
        "rows are another matter: under 1/length they do not sum to zero.",
        f"every reward tuple for R = {', '.join(map(str, Rs))}: largest sum {max(sums):.1e}; row weights under "
        f"1/length: up to {weights:.2f}",
        "",
        "holds" if max(sums) < EXACT else "does not hold",
        max(sums),
    )


Advantages = Callable[[Array], Array]


def moments(o: Prompt, R: int, estimator: Advantages) -> tuple[float, float]:
    """Exact Var A_1 and Cov(A_1, A_2), summed over every tuple of rewards."""
    rewards, chances = reward_tuples(o, R)
    A = estimator(rewards)
    mean = chances @ A[:, 0]
    return float(chances @ A[:, 0] ** 2 - mean**2), float(chances @ (A[:, 0] * A[:, 1]) - mean * (chances @ A[:, 1]))


def variances(prompts: Sequence[Prompt], Rs: Sequence[int], rng: np.random.Generator, draws: int) -> ExactClaim:
    """C3: variance and covariance per prompt, pooled over prompts, and for leave-one-out."""
    errors, checks = [], []
    for o, R in itertools.product(prompts, Rs):
        s = o.e.sigma2
        expected = {grpo: ((R - 1) / R * s, -s / R), rloo: (R / (R - 1) * s, -R / (R - 1) ** 2 * s)}
        errors += [relative(np.array(moments(o, R, e)), np.array(pair)) for e, pair in expected.items()]
        rewards = o.r_N[o.draw(draws, R, rng)]
        A = grpo(rewards)
        checks.append((Estimate.of(A[:, 0] ** 2), expected[grpo][0]))
        checks.append((Estimate.of(A[:, 0] * A[:, 1]), expected[grpo][1]))
    mean = float(np.mean([o.e.sigma2 for o in prompts]))
    for R in Rs:  # a prompt drawn at random, then the group: advantages have mean zero in each, so moments average
        pooled = np.mean([moments(o, R, grpo) for o in prompts], axis=0)
        errors.append(relative(pooled, np.array([(R - 1) / R * mean, -mean / R])))
    return judged(
        "C3",
        "True for one prompt and independent rollouts; over several prompts with the mean of sigma^2(x). "
        "Leave-one-out: R sigma^2/(R-1) and -R sigma^2/(R-1)^2.",
        f"{len(errors)} exact pairs, largest relative error {worst(errors):.1e}",
        agreement(checks),
        "holds" if worst(errors) < EXACT else "does not hold",
        worst(errors),
    )


def binomial(R: int, p: float) -> np.ndarray:
    """P(k of R) for k = 0 .. R, (R + 1,), each from an exact binomial coefficient."""
    return np.array([math.comb(R, k) * p**k * (1 - p) ** (R - k) for k in range(R + 1)])


def chance_of_advantage_above(R: int, p: float, eps: float) -> float:
    """P(|r_1 - mean| > eps) for binary rewards: in a group with k right rollouts these have |A| = 1 - k/R, the others
    k/R."""
    k = np.arange(R + 1)
    share = np.where(1 - k / R > eps, k / R, 0.0) + np.where(k / R > eps, 1 - k / R, 0.0)
    return float(binomial(R, p) @ share)


def tail_bound(R: int, p: float, eps: float) -> float:
    """Chebyshev's bound, as 4.1(iv) states it."""
    return (R - 1) * p * (1 - p) / (R * eps**2)


def concentration(ps: Sequence[float], Rs: Sequence[int], epsilons: Sequence[float]) -> ExactClaim:
    """C4: the exact tail of an advantage against the bound."""
    cases = [(R, p, eps) for R in Rs for p in ps for eps in epsilons]
    exact = np.array([chance_of_advantage_above(*case) for case in cases])
    bounds = np.array([tail_bound(*case) for case in cases])
    vacuous = int((bounds >= 1).sum())
    mixed = [case for case in cases if case[2] < 1 / case[0]]
    closed = [1 - p**R - (1 - p) ** R for R, p, _ in mixed]
    errors = [abs(chance_of_advantage_above(*case) - value) / value for case, value in zip(mixed, closed, strict=True)]
    rising = [1 - 0.5**R - 0.5**R for R in (2, 4, 8)]
    return judged(
        "C4",
        "True, and often says nothing. For binary rewards and eps < 1/R the chance is exactly 1 - p^R - (1-p)^R, "
        "the share of mixed groups, which rises with R while R < 1/eps: larger groups have fewer zero gradients, "
        "not more.",
        f"{len(cases)} cases of R, p, eps: none above its bound; {vacuous} bounds are 1 or more; p = 0.5: "
        + ", ".join(f"R={R} {value:.3f}" for R, value in zip((2, 4, 8), rising, strict=True)),
        "",
        "holds" if bool((exact <= bounds + EXACT).all()) else "does not hold",
        max(errors),
    )


def hoeffding(R: int, eps: float) -> float:
    """2 exp(-2 R eps^2), the bound on P(|mean of R rewards in [0, 1] - p| > eps)."""
    return 2 * math.exp(-2 * R * eps**2)


def chance_of_mean_off(R: int, p: float, eps: float) -> float:
    """P(|k/R - p| > eps), exact."""
    k = np.arange(R + 1)
    return float(binomial(R, p)[np.abs(k / R - p) > eps].sum())


def hoeffding_rows(ps: Sequence[float] = (0.5, 0.25)) -> list[dict[str, float]]:
    """One row per R and eps: the bound, and the exact chance at each p."""
    return [
        {"R": R, "eps": eps, "bound": hoeffding(R, eps)}
        | {f"exact at p={p:g}": chance_of_mean_off(R, p, eps) for p in ps}
        for R in HOEFFDING_R
        for eps in HOEFFDING_EPS
    ]


def hoeffding_table() -> ExactClaim:
    """C12: the table of A.2, computed from its own formula."""
    rows = hoeffding_rows()
    useful = [row for row in rows if row["bound"] < 1]
    within = all(row[key] <= row["bound"] + EXACT for row in rows for key in row if key.startswith("exact"))
    cells = "; ".join(f"R={R}: " + ", ".join(f"{hoeffding(R, eps):.2f}" for eps in HOEFFDING_EPS) for R in HOEFFDING_R)
    return judged(
        "C12",
        "The formula 2 exp(-2 R eps^2) gives other numbers in eight of the twelve places, and R = 4, eps = 0.3 is "
        f"below 1: {len(useful)} of the {len(rows)} bounds say something. The exact chance is far below each of them.",
        cells + " (eps = 0.3, 0.2, 0.1)",
        "",
        "does not hold" if within and hoeffding(*CALLED_VACUOUS) < 1 else "holds",
    )


def chance_of_some_beyond(R: int, p: float, eps: float) -> float:
    """P(some rollout of a group has |A| > eps) for binary rewards, A of the group mean: right rollouts, where there are
    any, have |A| = 1 - k/R, wrong ones k/R."""
    k = np.arange(R + 1)
    beyond = ((k > 0) & (1 - k / R > eps)) | ((k < R) & (k / R > eps))
    return float(binomial(R, p)[beyond].sum())


def every_rollout(ps: Sequence[float]) -> ExactClaim:
    """C23: the chance that some rollout lies beyond eps against Hoeffding's bound for the mean, and against R times the
    chance of one rollout."""
    cases = [(R, p, eps) for R in HOEFFDING_R for p in ps for eps in HOEFFDING_EPS]
    some = np.array([chance_of_some_beyond(*case) for case in cases])
    union = np.array([R * chance_of_advantage_above(R, p, eps) for R, p, eps in cases])
    bounds = np.array([hoeffding(R, eps) for R, _, eps in cases])
    telling = bounds < 1
    broken = int((some > bounds + EXACT)[telling].sum())
    below = [case for case in cases if case[2] < 0.5]
    errors = [relative(chance_of_some_beyond(*case), 1 - case[1] ** case[0] - (1 - case[1]) ** case[0])
              for case in below]  # fmt: skip
    as_one = np.array([chance_of_mean_off(*case) for case in cases])
    right = bool((some <= union + EXACT).all() and (as_one <= bounds + EXACT).all()) and worst(errors) < EXACT
    R, p, eps = cases[int(np.argmax(np.where(telling, some - bounds, -np.inf)))]
    judgement: Judgement = "undecided"
    if right:
        judgement = "does not hold" if broken else "holds"
    return judged(
        "C23",
        "Hoeffding's bound is on the mean of a group. It says that every A_i is within eps of r_i - v, all of them at "
        "once, since they are off by one number, v less the mean. It does not say that A_i is within eps of 0: for "
        "binary rewards and eps < 1/2 some rollout is beyond eps in every mixed group, with chance 1 - p^R - (1-p)^R, "
        "which rises to 1 with R. A union over rollouts, R times the chance of one, bounds that chance and is often "
        "above 1.",
        f"{len(cases)} cases of R, p, eps: in {broken} of the {int(telling.sum())} whose bound is below 1 the chance "
        f"of some rollout beyond eps exceeds it (R = {R}, p = {p:g}, eps = {eps:g}: "
        f"{chance_of_some_beyond(R, p, eps):.2f} against {hoeffding(R, eps):.2f}); the union bound holds in all of "
        f"them and is 1 or more in {int((union >= 1).sum())}",
        "",
        judgement,
        worst(errors),
    )
