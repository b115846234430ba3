"""Measured groups -> the norm of their gradient and products of their scores: behind C5, C9 and the best group size.

The estimates behind the best group size are unbiased (`grpo_sweeps.maths.ustatistics`).

The score-mean null. Where the sampler is the policy that is differentiated, E psi = 0, so the mean product of two
independent rollouts of a prompt is zero. A record keeps Grams of mixed groups only, where that mean is not zero. What
is missing can be made good by weights, for any p: with S = ||grad J||^2, two right rollouts have the mean product
S/p^2, two wrong ones S/q^2, one of each -S/(pq), whatever k. The pairs of k of R rollouts then add, up to one factor,

    C(R-2, k-2) p^(k-2) q^(R-k) S  +  C(R-2, k) p^k q^(R-2-k) S  -  2 C(R-2, k-1) p^(k-1) q^(R-1-k) S,

and a power of p is cancelled between neighbouring k. Without k = 0 and k = R one half of the counterpart of the mixed
pairs of k = 1 and of k = R-1 is gone; at weight 1/2 for these, the sum over 0 < k < R is zero again. Not at R = 2,
whose mixed groups hold mixed pairs alone.
"""

from __future__ import annotations

import numpy as np

from grpo_sweeps.maths import ustatistics
from grpo_sweeps.report.measure.spectral import Groups
from grpo_sweeps.types import Array

PAIRS = (
    "gradient_norm", "energy", "pair_norm", "pair_all", "pair_square", "pair_right", "pair_wrong", "pair_between",
    "pair_null", "pair_error",
)  # fmt: skip
UNBIASED = ("u_signal", "u_spread", "u_oracle_variance")
LEAST_R = 4  # products of four distinct rollouts


def pair_columns(groups: Groups) -> dict[str, Array]:
    """{column of PAIRS: (N,) values}.

    gradient_norm   sqrt(w' K w), of the group's weighted gradient
    energy          tr diag(w) K diag(w), the sum of the squared norms of the rows of G
    pair_norm, pair_all, pair_square   means of K_ii, and over i != j of K_ij and K_ij^2
    pair_right, pair_wrong, pair_between   mean of K_ij over two right rollouts, two wrong ones, one of each; binary
    pair_null       the contrast of the module's docstring, over R (R - 1) ordered pairs; binary, R > 2
    pair_error      largest error of a mean of products that the Gram's own precision allows

    All but gradient_norm and energy are NaN where the Gram is of the rows of the loss.
    """
    gram_NRR, R = groups.gram_NRR, groups.R
    weights_NR = groups.weights_NR if groups.scores else np.ones_like(groups.weights_NR)
    square_N = np.einsum("ni,nij,nj->n", weights_NR, gram_NRR, weights_NR)
    energy_N = np.einsum("ni,nii->n", np.square(weights_NR), gram_NRR)
    columns = {"gradient_norm": np.sqrt(np.clip(square_N, 0.0, None)), "energy": energy_N}
    if not groups.scores:
        return columns | dict.fromkeys(PAIRS[2:], np.full(len(gram_NRR), np.nan))
    off_NRR = gram_NRR * (1.0 - np.eye(R))
    norm_N = np.trace(gram_NRR, axis1=1, axis2=2) / R
    columns |= {
        "pair_norm": norm_N,
        "pair_all": off_NRR.sum(axis=(1, 2)) / (R * (R - 1)),
        "pair_square": np.square(off_NRR).sum(axis=(1, 2)) / (R * (R - 1)),
        "pair_error": groups.floor_N * norm_N,
    }
    return columns | _by_class(off_NRR, groups)


def _by_class(off_NRR: Array, groups: Groups) -> dict[str, Array]:
    """Ordered pairs: k(k-1) of two right rollouts, (R-k)(R-k-1) of two wrong ones, 2k(R-k) of one of each."""
    R = groups.R
    right_NR = np.where(groups.binary_N[:, None], groups.rewards_NR, np.nan)
    k_N = right_NR.sum(axis=1)
    right_N = np.einsum("ni,nij,nj->n", right_NR, off_NRR, right_NR)
    wrong_N = np.einsum("ni,nij,nj->n", 1.0 - right_NR, off_NRR, 1.0 - right_NR)
    between_N = 2.0 * np.einsum("ni,nij,nj->n", right_NR, off_NRR, 1.0 - right_NR)
    half_N = np.where((k_N == 1) | (k_N == R - 1), 0.5, 1.0)
    mixed_N = (k_N > 0) & (k_N < R) & (R > 2)

    def mean(sum_N: Array, count_N: Array) -> Array:
        return np.divide(sum_N, count_N, out=np.full(len(sum_N), np.nan), where=count_N > 0)

    return {
        "pair_right": mean(right_N, k_N * (k_N - 1)),
        "pair_wrong": mean(wrong_N, (R - k_N) * (R - k_N - 1)),
        "pair_between": mean(between_N, 2 * k_N * (R - k_N)),
        "pair_null": np.where(mixed_N, (right_N + wrong_N + half_N * between_N) / (R * (R - 1)), np.nan),
    }


def unbiased_columns(groups: Groups) -> dict[str, Array]:
    """{column of UNBIASED: (N,) values}, of the scores and rewards alone, whatever the weights.

    u_signal            for ||grad J||^2 of the group's prompt at the step's policy
    u_spread            for sigma^2 tr F
    u_oracle_variance   for V1 = tr Var((r - v) psi)

    NaN for R < 4, and where the Gram is of the rows of the loss. A group of equal rewards, which has no Gram as a rule,
    is 0 in all three: who averages over prompts counts it as that.
    """
    if not groups.scores or groups.R < LEAST_R:
        return dict.fromkeys(UNBIASED, np.full(len(groups.gram_NRR), np.nan))
    estimates = (ustatistics.signal, ustatistics.spread, ustatistics.oracle_variance)
    return {
        name: estimate(groups.rewards_NR, groups.gram_NRR) for name, estimate in zip(UNBIASED, estimates, strict=True)
    }
