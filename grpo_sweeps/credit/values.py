"""Credit from values that carry Monte Carlo noise, and its squares without that noise.

N  rollouts    P  prompts    M  fresh continuations of a prefix    K  segments of the longest rollout, E = K + 1 edges

A rollout is cut into segments (single tokens with every=1). V_k is the mean reward of M fresh continuations of the
prefix before segment k, and the reward itself after the last segment. The credit of segment k is that of VinePPO
(arXiv 2410.01679; `estimators.token_level.vine`), A_k = V_{k+1} - V_k. With the exact values v instead, credits are
martingale differences, E[A_k | s_k] = 0, so that r - v(s_0) = sum_k A_k gives Var r = sum_k E A_k^2.

With V_k = v_k + e_k, the errors e independent of each other and of the rollout and of mean zero,

    E[(V_{k+1} - V_k)^2 | rollout] = A_k^2 + Var e_{k+1} + Var e_k,

and s_k^2 / M, s_k^2 the sample variance (ddof 1) of the M rewards, is an unbiased estimate of Var e_k, whatever the
rewards are. What is left after it is subtracted is unbiased for A_k^2, and may be negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from grpo_sweeps.spectra import Array

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
        """What the noise of the two values adds to A_k^2 in the mean."""
        return self.noise_NE[:, 1:] + self.noise_NE[:, :-1]

    @property
    def squares_NK(self) -> Array:
        """Unbiased for the square of the true credit."""
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
    """Unbiased for (r - v(s_0))^2 of each of M completions of a prompt, (P, M): with the mean and the sample variance
    of the other M - 1, (r - mean)^2 - s^2 / (M - 1). Its mean over the completions is the sample variance of all M.

    Raises:
        ValueError: for fewer than `LEAST_CONTINUATIONS` completions.
    """
    M = rewards_PM.shape[1]
    if M < LEAST_CONTINUATIONS:
        raise ValueError(f"{M} completions of a prompt: {LEAST_CONTINUATIONS} or more are needed")
    centred = rewards_PM - rewards_PM.mean(axis=1, keepdims=True)
    off_PM = centred * M / (M - 1)  # r less the mean of the others
    others = (centred**2).sum(axis=1, keepdims=True) - centred**2 * M / (M - 1)  # their squares around their own mean
    return off_PM**2 - others / (M - 2) / (M - 1)
