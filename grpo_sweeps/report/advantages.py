"""Groups -> plain numbers of their advantages and row weights, which need no Gram: behind C2 to C5."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from grpo_sweeps.spectra import Array

TAILS = (0.1, 0.2, 0.3)  # the eps of C4's bound, as in the paper's appendix
ADVANTAGES = (
    "advantage_sum", "weight_sum", "advantage_max", "advantage_square", "advantage_product", "reward_variance",
    "lone_right", *(f"advantage_above_{eps}" for eps in TAILS),
)  # fmt: skip


def advantage_columns(rewards_NR: Array, advantages_NR: Array, weights_NR: Array, k_N: Array) -> dict[str, NDArray]:
    """{column of ADVANTAGES: (N,) values}, all groups of one R, the all-equal ones too.

    advantage_sum, weight_sum   |sum| over the group's largest absolute value; NaN where all are zero
    advantage_max               largest |A|
    advantage_square, advantage_product   mean of A_i^2, and of A_i A_j over i != j
    reward_variance             of the rewards, ddof 1: without bias for sigma^2 of the prompt
    lone_right                  advantage of the one right rollout where k_N is 1; else NaN
    advantage_above_EPS         share of the rollouts with |A| > EPS
    """
    R = rewards_NR.shape[1]
    square_N = np.square(advantages_NR).sum(axis=1)
    best_N = np.take_along_axis(advantages_NR, rewards_NR.argmax(axis=1)[:, None], axis=1)[:, 0]
    size_NR = np.abs(advantages_NR)
    columns = {
        "advantage_sum": _relative_sum(advantages_NR),
        "weight_sum": _relative_sum(weights_NR),
        "advantage_max": size_NR.max(axis=1),
        "advantage_square": square_N / R,
        "advantage_product": (np.square(advantages_NR.sum(axis=1)) - square_N) / (R * (R - 1)),
        "reward_variance": rewards_NR.var(axis=1, ddof=1),
        "lone_right": np.where(k_N == 1, best_N, np.nan),
    }
    return columns | {f"advantage_above_{eps}": (size_NR > eps).mean(axis=1) for eps in TAILS}


def _relative_sum(values_NR: Array) -> Array:
    largest_N = np.abs(values_NR).max(axis=1)
    return np.divide(np.abs(values_NR.sum(axis=1)), largest_N, out=np.full(len(largest_N), np.nan), where=largest_N > 0)
