"""Credit from values that carry Monte Carlo noise; where along a rollout it lies, and how much uniform credit carries.

N  rollouts    P  prompts    M  fresh continuations of a prefix    K  segments of the longest rollout, E = K + 1 edges

A rollout is cut into segments (single tokens with every=1). V_k is the mean reward of M fresh continuations of the
prefix before segment k, and the reward itself after the last segment. The credit of segment k is that of VinePPO
(arXiv 2410.01679; `estimators.token_level.vine`), A_k = V_{k+1} - V_k. With the exact values v instead, credits are
martingale differences, E[A_k | s_k] = 0, so that r - v(s_0) = sum_k A_k gives Var r = sum_k E A_k^2.

With V_k = v_k + e_k, the errors e independent of each other and of the rollout and of mean zero,

    E[(V_{k+1} - V_k)^2 | rollout] = A_k^2 + Var e_{k+1} + Var e_k,

and s_k^2 / M, s_k^2 the sample variance (ddof 1) of the M rewards, is an unbiased estimate of Var e_k, whatever the
rewards are. What is left after it is subtracted is unbiased for A_k^2, and may be negative.

The shares are defined as in `science.credit` on policies whose sequences can be listed, with E over prompts, each
counted alike, and over their rollouts; intervals are over prompts:

    along the rollout   E A_k^2 / Var r, segments past the end counted as 0; they add up to 1
    share of uniform    E[(r - v(s_0))^2 / K] / E sum_k A_k^2: the squared length of the projection of the K credits of
                        a rollout on the constant vector, over that of the credits
    correlation         E sum_k A_k U_k / sqrt(E sum_k A_k^2 E sum_k U_k^2), U_k = r - v(s_0) on every segment

Var r is the variance given the prompt. sum_k A_k = r - v(s_0) and E sum_k A_k^2 = Var r, so that the last two
need rewards and lengths of whole completions alone: share = E[(r - v)^2 / K] / Var r, correlation =
sqrt(Var r / E[K (r - v)^2]). At one common K they are 1 / K and 1 / sqrt(K), whatever the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from grpo_sweeps.maths.intervals import Interval, mean_interval, skewed_interval
from grpo_sweeps.types import Array

LEAST_CONTINUATIONS = 3  # `squared_surprise` needs two others beside each


@dataclass(frozen=True, eq=False)
class Values:
    """Values along N rollouts. Past the end of a rollout its last edge and value are repeated, with no noise.

    prompt_N    number of the prompt, 0 .. P - 1; every prompt has equally many rollouts
    edges_NE    tokens before each edge: 0 first, the rollout's length last
    values_NE   V at each edge; at the end the reward
    noise_NE    unbiased estimate of the variance of each value; 0 at the end, where nothing is drawn
    """

    prompt_N: np.ndarray
    edges_NE: np.ndarray
    values_NE: Array
    noise_NE: Array

    @property
    def lengths_N(self) -> np.ndarray:
        """Tokens of each rollout."""
        return self.edges_NE[:, -1]

    @property
    def advantages_NK(self) -> Array:
        """A_k = V_{k+1} - V_k; 0 past the end."""
        return np.diff(self.values_NE, axis=1)

    @property
    def noise_NK(self) -> Array:
        """What the noise of the two values adds to A_k^2 on average."""
        return self.noise_NE[:, 1:] + self.noise_NE[:, :-1]

    @property
    def squares_NK(self) -> Array:
        """Unbiased estimates of the square of the true credit."""
        return self.advantages_NK**2 - self.noise_NK


@dataclass(frozen=True, eq=False)
class Starts:
    """M whole completions of each prompt, those that gave V(s_0): their rewards and their numbers of segments."""

    rewards_PM: Array
    segments_PM: np.ndarray


def mean_and_noise(rewards_XM: Array) -> tuple[Array, Array]:
    """Mean of the M rewards behind each of X values, and the unbiased estimate of that mean's variance, s^2 / M.

    >>> mean_and_noise(np.array([[0.0, 1.0, 1.0, 0.0]]))
    (array([0.5]), array([0.08333333]))
    """
    return rewards_XM.mean(axis=1), rewards_XM.var(axis=1, ddof=1) / rewards_XM.shape[1]


def squared_surprise(rewards_PM: Array) -> Array:
    """Unbiased estimates of (r - v(s_0))^2 for each of M completions of a prompt, (P, M): with the mean and the sample
    variance of the other M - 1, (r - mean)^2 - s^2 / (M - 1). Their mean is the sample variance of all M.

    Raises:
        ValueError: for fewer than `LEAST_CONTINUATIONS` completions.
    """
    M = rewards_PM.shape[1]
    if M < LEAST_CONTINUATIONS:
        raise ValueError(f"{M} completions of a prompt: {LEAST_CONTINUATIONS} or more are needed")
    centred = rewards_PM - rewards_PM.mean(axis=1, keepdims=True)
    off_PM = centred * M / (M - 1)  # r minus the mean of the others
    others = (centred**2).sum(axis=1, keepdims=True) - centred**2 * M / (M - 1)  # their squares around their own mean
    return off_PM**2 - others / (M - 2) / (M - 1)


PARTS = 10  # tenths of a rollout
UNKNOWN = float("nan")
Statistic = Callable[[Array], Array]
"""Means of columns (..., X) -> statistics (..., S), each row by itself."""


@dataclass(frozen=True)
class Profile:
    """E A^2 over Var r by position, with its interval over prompts; `noisy` is the same without the correction."""

    shares: list[Interval]
    noisy: list[float]


@dataclass(frozen=True)
class Shares:
    """The credit of one run in numbers.

    variance: Var r. total: the sum of E A^2 / Var r along the rollout, 1 but for chance; total_noisy: the same without
    the correction. uniform, correlation: see the module. segments: mean K of a completion.
    """

    value: Interval
    variance: Interval
    total: Interval
    total_noisy: float
    uniform: Interval
    correlation: Interval
    segments: Interval
    by_tenth: Profile
    by_segment: Profile


def shares(values: Values, starts: Starts) -> Shares:
    """All shares of one run; NaN where the rewards of every prompt are equal and there is nothing to share."""
    surprise_PM, K_PM = squared_surprise(starts.rewards_PM), starts.segments_PM
    variance_P, over_P, times_P = ((surprise_PM * w).mean(axis=1) for w in (1.0, 1 / K_PM, K_PM))
    squares_PK, noise_PK = (by_prompt(x, values.prompt_N) for x in (values.squares_NK, values.noise_NK))
    overlap_NKB = overlaps(values.edges_NE)
    squares_PB, noise_PB = (
        by_prompt(np.einsum("nk,nkb->nb", x, overlap_NKB), values.prompt_N)
        for x in (values.squares_NK, values.noise_NK)
    )
    total_P, total_noise_P = squares_PK.sum(axis=1), noise_PK.sum(axis=1)
    return Shares(
        value=mean_interval(starts.rewards_PM.mean(axis=1)),
        variance=skewed_interval(variance_P),
        total=over_prompts(ratios, np.column_stack([total_P, variance_P]))[0],
        total_noisy=float(ratios(np.array([(total_P + total_noise_P).mean(), variance_P.mean()]))[0]),
        uniform=over_prompts(ratios, np.column_stack([over_P, variance_P]))[0],
        correlation=over_prompts(root_ratio, np.column_stack([variance_P, times_P]))[0],
        segments=mean_interval(K_PM.mean(axis=1)),
        by_tenth=_profile(squares_PB, noise_PB, variance_P),
        by_segment=_profile(squares_PK, noise_PK, variance_P),
    )


def _profile(squares_PX: Array, noise_PX: Array, variance_P: Array) -> Profile:
    noisy = ratios(np.append((squares_PX + noise_PX).mean(axis=0), variance_P.mean()))
    return Profile(over_prompts(ratios, np.column_stack([squares_PX, variance_P])), noisy.tolist())


def by_prompt(values_NX: Array, prompt_N: np.ndarray) -> Array:
    """Mean over the rollouts of each prompt, (P, X)."""
    sums = np.zeros((int(prompt_N.max()) + 1, values_NX.shape[1]))
    np.add.at(sums, prompt_N, values_NX)
    mean: Array = sums / np.bincount(prompt_N)[:, None]
    return mean


def overlaps(edges_NE: np.ndarray, parts: int = PARTS) -> Array:
    """Share of each segment that lies in each of `parts` equal parts of its rollout, (N, K, parts); rows of 0 past the
    end. A segment's square is divided among the parts that it touches, so that nothing is lost or counted twice.

    >>> overlaps(np.array([[0, 3, 4]]), 2)
    array([[[0.66666667, 0.33333333],
            [0.        , 1.        ]]])
    """
    bounds_NB = edges_NE[:, -1:] * np.arange(parts + 1) / parts
    low = np.maximum(edges_NE[:, :-1, None], bounds_NB[:, None, :-1])
    high = np.minimum(edges_NE[:, 1:, None], bounds_NB[:, None, 1:])
    length_NK1 = np.diff(edges_NE, axis=1)[:, :, None]
    shares_NKB: Array = np.maximum(high - low, 0.0) / np.maximum(length_NK1, 1)
    return shares_NKB


def ratios(means: Array) -> Array:
    """Every column divided by the last one; NaN where that is not positive."""
    below = means[..., -1:]
    return np.where(below > 0, means[..., :-1] / np.where(below > 0, below, 1.0), UNKNOWN)


def root_ratio(means: Array) -> Array:
    """Square root of the first column over the second; NaN where there is none."""
    ratio = ratios(means)
    return np.sqrt(np.where(ratio >= 0, ratio, UNKNOWN))


def over_prompts(statistic: Statistic, columns_PX: Array, alpha: float = 0.05) -> list[Interval]:
    """A statistic of means over prompts with its 1 - alpha interval, by the jackknife that leaves one prompt out.

    The ends are as far off as those of `intervals.skewed_interval` of the P pseudo-values P S - (P - 1) S_without:
    Student's t with P - 1 degrees of freedom, corrected for their skewness, since squares and ratios are skewed. No
    random numbers; the tests compare it with a bootstrap over prompts. NaN ends for one prompt, or where the statistic
    fails without one of them.
    """
    P = len(columns_PX)
    whole_S = statistic(columns_PX.mean(axis=0))
    if P < 2:
        return [Interval(float(x), UNKNOWN, UNKNOWN, P, (P,)) for x in whole_S]
    without_PS = statistic((columns_PX.sum(axis=0) - columns_PX) / (P - 1))
    pseudo_PS = P * whole_S - (P - 1) * without_PS
    found = []
    for whole, pseudo_P in zip(whole_S.tolist(), pseudo_PS.T, strict=True):
        ends = UNKNOWN, UNKNOWN
        if np.isfinite(pseudo_P).all():
            about = skewed_interval(pseudo_P, alpha)
            ends = whole - (about.mean - about.low), whole + (about.high - about.mean)
        found.append(Interval(whole, *ends, P, (P,)))
    return found
