"""The slow way to `grpo_sweeps.maths.ustatistics`: the kernels, over every choice of distinct rollouts."""

from __future__ import annotations

import itertools

import numpy as np


def by_kernels(r, K) -> tuple[float, float, float]:
    """signal, spread and V1 of one group, rewards (R,) and Gram (R, R)."""
    R = range(len(r))
    fours = [
        (r[i] - r[j]) * (r[k] - r[m]) * (K[i, k] - K[i, m] - K[j, k] + K[j, m]) / 4
        for i, j, k, m in itertools.permutations(R, 4)
    ]
    threes = [
        ((r[i] - r[j]) ** 2 / 2 * K[k, k], (r[k] - r[i]) * (r[k] - r[j]) * K[k, k])
        for i, j, k in itertools.permutations(R, 3)
    ]
    spread, second = np.mean(threes, axis=0)
    return float(np.mean(fours)), float(spread), float(second - np.mean(fours))
