"""Shuffled rewards: the exact distribution of w' K w over every assignment of a group's rewards that chance could have
made as well as the recorded one.

Which assignments these are depends on whether a reward is one of the text or of the rollout.

    no text twice                        each of the C(R, k) ways to say which k rollouts were right
    equal texts have equal rewards       those that give equal texts equal rewards and leave, among the texts that occur
                                         m times, as many right as were, for every m: texts that occur equally often
                                         change places, no others. A text that comes four times is likelier than one
                                         that comes once, which is no sign that rewards and scores are related.
    equal texts have different rewards   those that give some equal texts different rewards: the reward is one of the
                                         rollout, and a group where no text shows it is of the second kind

Each is exact both for a reward that is a function of the text and for a coin for each rollout. A group that admits one
assignment alone is left out: it has `shuffle_assignments` 1 and nothing else.

A group's mid-p, P(larger) + P(equal)/2 with the recorded one counted among the equal, then has mean 1/2 and variance
(1 - sum of (share of each tied class)^3) / 12, exactly. A small p means a gradient longer than chance makes it.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from grpo_sweeps.report.measure.spectral import Groups
from grpo_sweeps.spectra.equal import Labels
from grpo_sweeps.types import Array

PERMUTED = ("shuffle_p", "shuffle_mid_p", "shuffle_variance", "shuffle_assignments")
MOST_ASSIGNMENTS = 20_000  # C(16, 8) = 12870 is within; beyond it a group is not tested
AT_ONCE = 2**20  # numbers held at once
TIED = 1e-9  # of the largest value: closer ones are equal but for rounding


@lru_cache(maxsize=32)
def assignments(R: int, k: int) -> Array:
    """(C(R, k), R) of 0 and 1: every way to choose k of R rollouts."""
    chosen = np.array(list(itertools.combinations(range(R), k)), dtype=np.intp).reshape(-1, k)
    found = np.zeros((len(chosen), R))
    np.put_along_axis(found, chosen, 1.0, axis=1)
    return found


def least_p(R: int) -> float:
    """The smallest p-value that one group of R rollouts can reach at any k: 1/C(R, k), or 2/C(R, k) at k = R/2, where
    swapping right and wrong turns the gradient round and leaves its norm (group-mean advantages).

    >>> [round(least_p(R), 3) for R in (2, 4, 6, 8)]
    [1.0, 0.25, 0.067, 0.018]
    """
    return min((2 if 2 * k == R else 1) / math.comb(R, k) for k in range(1, R))


def permutation_columns(groups: Groups) -> dict[str, Array]:
    """{column of PERMUTED: (N,) values}; NaN where there is nothing to permute exactly.

    That is: a Gram of the rows of the loss, rewards that are not 0 and 1, an all-equal group, advantages that are not
    one value for right and one for wrong rollouts, weights that are not a factor of the rollout times its advantage,
    more than MOST_ASSIGNMENTS, or (all but `shuffle_assignments`) a single assignment. A rollout keeps its own factor
    (1/length, say) and its score.
    """
    N, R = groups.rewards_NR.shape
    found = {name: np.full(N, np.nan) for name in PERMUTED}
    factor_NR, right_N, wrong_N, usable_N = _two_valued(groups)
    k_N = np.where(groups.binary_N, groups.rewards_NR.sum(axis=1), 0).astype(int)
    for k in range(1, R):
        if math.comb(R, k) > MOST_ASSIGNMENTS:
            continue
        index = np.flatnonzero(usable_N & (k_N == k))
        step = max(1, AT_ONCE // math.comb(R, k))
        for rows in np.array_split(index, range(step, len(index), step)) if len(index) else ():
            gram_NRR = groups.averaged_NRR[rows] * factor_NR[rows, :, None] * factor_NR[rows, None, :]
            own_NR = groups.rewards_NR[rows]
            allowed_NM = possible(own_NR, groups.same_NR[rows], k)
            for name, values in _p_values(gram_NRR, own_NR, right_N[rows], wrong_N[rows], k, allowed_NM).items():
                found[name][rows] = values
    return found


def possible(rewards_NR: Array, same_NR: Labels, k: int) -> NDArray[np.bool_]:
    """(N, C(R, k)): which of `assignments` chance could have made of each group; see the module's docstring.

    rewards: of 0 and 1, k of them 1. same: for each rollout the first of its group with the same text.

    >>> int(possible(np.array([[1.0, 1.0, 0.0, 0.0]]), np.array([[0, 0, 2, 2]]), 2).sum())
    2
    """
    chosen_MR = assignments(rewards_NR.shape[1], k)
    texts_NRR = same_NR[:, :, None] == same_NR[:, None, :]
    times_NR = texts_NRR.sum(axis=2)
    found = np.ones((len(rewards_NR), len(chosen_MR)), dtype=bool)
    for n in np.flatnonzero((times_NR > 1).any(axis=1)):
        alike_M = (chosen_MR == chosen_MR[:, same_NR[n]]).all(axis=1)
        if (rewards_NR[n] != rewards_NR[n, same_NR[n]]).any():
            found[n] = ~alike_M
            continue
        right_MT = chosen_MR @ (times_NR[n][:, None] == np.unique(times_NR[n]))
        recorded_T = rewards_NR[n] @ (times_NR[n][:, None] == np.unique(times_NR[n]))
        found[n] = alike_M & (right_MT == recorded_T).all(axis=1)
    return found


def _two_valued(groups: Groups) -> tuple[Array, Array, Array, NDArray[np.bool_]]:
    """w_i / A_i (N, R), the advantages of right and of wrong rollouts (N,), and where all of it is well defined."""
    advantages_NR, weights_NR = groups.advantages_NR, groups.weights_NR
    right_NR = groups.rewards_NR == groups.rewards_NR.max(axis=1, keepdims=True)
    right_N, wrong_N = (
        np.where(chosen, advantages_NR, -np.inf).max(axis=1) for chosen in (right_NR, ~right_NR | _equal(groups))
    )
    expected_NR = np.where(right_NR, right_N[:, None], wrong_N[:, None])
    size_N = np.abs(advantages_NR).max(axis=1)
    usable_N = groups.binary_N & ~_equal(groups)[:, 0] & np.full(len(size_N), groups.scores)
    usable_N &= (np.abs(advantages_NR - expected_NR) <= TIED * size_N[:, None]).all(axis=1) & (size_N > 0)
    factor_NR = np.divide(weights_NR, advantages_NR, out=np.full(weights_NR.shape, np.nan), where=advantages_NR != 0)
    # a rollout whose advantage is zero does not show its factor, unless all the others have the same one
    low_N, high_N = (
        f(np.where(np.isnan(factor_NR), bad, factor_NR), axis=1) for f, bad in ((np.min, np.inf), (np.max, -np.inf))
    )
    alike_N = np.abs(high_N - low_N) <= TIED * np.abs(high_N)
    filled_NR = np.where(np.isnan(factor_NR) & alike_N[:, None], high_N[:, None], factor_NR)
    return filled_NR, right_N, wrong_N, usable_N & np.isfinite(filled_NR).all(axis=1)


def _equal(groups: Groups) -> NDArray[np.bool_]:
    rewards_NR = groups.rewards_NR
    return np.asarray(rewards_NR.max(axis=1, keepdims=True) == rewards_NR.min(axis=1, keepdims=True))


@lru_cache(maxsize=32)
def _pairs(R: int, k: int) -> Array:
    """(C(R, k), R (R + 1) / 2): c_i c_j over i <= j for each assignment c."""
    rows, columns = np.triu_indices(R)
    chosen = assignments(R, k)
    return chosen[:, rows] * chosen[:, columns]


def _p_values(
    gram_NRR: Array, own_NR: Array, right_N: Array, wrong_N: Array, k: int, allowed_NM: NDArray[np.bool_]
) -> dict[str, Array]:
    """Columns of PERMUTED for groups of one k; K = `gram_NRR` has each rollout's factor in its rows.

    With advantages b + d c, c of 0 and 1 (so c_i^2 = c_i), the square is b^2 sum K + sum over i <= j of q_ij c_i c_j,
    q_ii = d^2 K_ii + 2 b d (K 1)_i and q_ij = 2 d^2 K_ij: one product for all assignments.
    """
    R = gram_NRR.shape[-1]
    rows, columns = np.triu_indices(R)
    b_N1, d_N1 = wrong_N[:, None], (right_N - wrong_N)[:, None]
    twice = np.where(rows == columns, 1.0, 2.0)
    q_NP = d_N1**2 * twice * gram_NRR[:, rows, columns]
    q_NP[:, rows == columns] += 2.0 * b_N1 * d_N1 * gram_NRR.sum(axis=2)
    none_N1 = b_N1**2 * gram_NRR.sum(axis=(1, 2))[:, None]
    squares_NM = none_N1 + q_NP @ _pairs(R, k).T
    all_NM = np.sort(np.where(allowed_NM, squares_NM, np.nan), axis=1)  # NaN stands last, and compares as false
    M_N = allowed_NM.sum(axis=1)
    own_N1 = none_N1 + (q_NP * own_NR[:, rows] * own_NR[:, columns]).sum(axis=1, keepdims=True)
    slack_N1 = TIED * np.abs(squares_NM).max(axis=1, keepdims=True)
    at_least_N = (all_NM >= own_N1 - slack_N1).sum(axis=1) / M_N
    above_N = (all_NM > own_N1 + slack_N1).sum(axis=1) / M_N
    starts_NM = np.diff(all_NM, axis=1, prepend=-np.inf) > slack_N1
    cubes_N = np.array(
        [(np.diff(np.flatnonzero(starts_M), append=M) ** 3.0).sum() for starts_M, M in zip(starts_NM, M_N, strict=True)]
    )
    values = {
        "shuffle_p": at_least_N,
        "shuffle_mid_p": 0.5 * (at_least_N + above_N),
        "shuffle_variance": (1.0 - cubes_N / M_N**3.0) / 12.0,
    }
    several = {name: np.where(M_N > 1, value, np.nan) for name, value in values.items()}
    return several | {"shuffle_assignments": M_N.astype(float)}
