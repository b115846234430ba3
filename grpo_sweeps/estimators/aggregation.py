"""From advantages to row weights: how the tokens of a rollout and the rollouts of a step are averaged.

The objective of a step is sum_i w_i log pi(rollout i), so that w_i is the factor in front of the score psi_i. The
normaliser is global over the step (all N = G R rollouts, those of all-equal groups included), so that one micro-batch
of 8 rows and eight of one row give the same gradient.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from grpo_sweeps.types import Array

AGGREGATIONS = ("sum", "length", "token_mean", "constant")


def row_weights(advantages_GR: ArrayLike, lengths_GR: ArrayLike, aggregation: str, max_length: int) -> Array:
    """Row weights w of the step's objective.

    sum         w = A / N                    the paper (a rollout's log-probability is the sum over its tokens)
    length      w = A / (N |o|)              DeepSeekMath, arXiv 2402.03300
    token_mean  w = A / (all tokens)         DAPO, arXiv 2503.14476
    constant    w = A / (N max_length)       Dr. GRPO, arXiv 2503.20783

    Args:
        advantages_GR: (G, R) advantages.
        lengths_GR: (G, R) completion lengths |o| in tokens, the end-of-sequence token included, >= 1.
        aggregation: one of `AGGREGATIONS`.
        max_length: the longest completion allowed, in tokens (used by `constant` alone).

    Returns:
        (G, R) float64.

    Raises:
        ValueError: for another aggregation, shapes that differ, or an empty completion.
    """
    advantages = np.asarray(advantages_GR, dtype=np.float64)
    lengths = np.asarray(lengths_GR, dtype=np.float64)
    if advantages.shape != lengths.shape:
        raise ValueError(f"advantages {advantages.shape} and lengths {lengths.shape} differ in shape")
    if lengths.min() < 1:
        raise ValueError("a completion of 0 tokens: the end-of-sequence token counts, so the least length is 1")
    N = advantages.size
    if aggregation == "sum":
        return advantages / N
    if aggregation == "length":
        return advantages / (N * lengths)
    if aggregation == "token_mean":
        return advantages / lengths.sum()
    if aggregation == "constant":
        return advantages / (N * max_length)
    raise ValueError(f"aggregation={aggregation}: allowed are {', '.join(AGGREGATIONS)}")
