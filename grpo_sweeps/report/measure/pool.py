"""Smaller groups out of larger ones: what every R' <= R would have given at one fixed policy, from its Grams alone.

A run of a fixed policy (`trainer=fixed_policy R=16`) keeps rewards and Gram of R rollouts of a prompt: a pool. Any R'
of them are a group of that size, whose advantages follow from its rewards. For each size R':

    mixed                          share of sub-groups whose rewards differ: counted exactly
    effective_rank, ...            of diag(w) K diag(w), mean over mixed sub-groups; the same for the three estimators,
                                   which differ by one factor a group
    error_prompt                   E ||g - grad J(x)||^2 of one group, against its own prompt's gradient
    cosine                         E<g, grad J> / sqrt(E||g||^2 E||grad J||^2): no scale
    error                          N MSE at N rollouts in groups of R' against the gradient of the average objective

with g = sum_i A_i psi_i / R'. Nothing is assumed of how the error depends on R', so the size of least error is found,
not computed. Leave-one-out and the group mean are averaged over all sub-groups in closed form
(`ustatistics.square_by_size`); spectra and std scaling over all sub-groups where there are few, else over `SUBSETS`
drawn ones. The gradient that std scaling is compared with comes from the pool's other rollouts, so that its noise and
the sub-group's are independent; for that at least two must be left.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_sweeps import spectra
from grpo_sweeps.estimators import grpo_std, rloo
from grpo_sweeps.estimators.declared import DECLARATIONS, kinds
from grpo_sweeps.maths.ustatistics import signal, square_by_size
from grpo_sweeps.spectra.equal import Labels, first_equal, merged
from grpo_sweeps.types import Array

ESTIMATORS = kinds(lambda one: one.zero_sum_group and one.by_group)
QUANTITIES = {
    "effective_rank": spectra.effective_rank,
    "top1_fraction": spectra.top1_fraction,
    "participation_ratio": spectra.participation_ratio,
}
SUBSETS = 64  # sub-groups of a pool and size: all of them where there are no more
LEAST_POOL = 6  # rollouts: sub-groups of 4 with two left
STD_EPS = DECLARATIONS["grpo_std"].eps
AT_ONCE = 2**21  # numbers of the Grams of sub-groups held at once


@dataclass(frozen=True)
class Pools:
    """P pools of R rollouts; gram is zero where the rewards are all equal and nothing was measured.

    same: for each rollout the first of its pool with the same text.
    """

    rewards_PR: Array
    gram_PRR: Array
    same_PR: Labels
    seeds_P: tuple[tuple[int, ...], ...]  # of the draws of sub-groups

    @property
    def R(self) -> int:
        return self.rewards_PR.shape[1]


def sizes_of(R: int) -> list[int]:
    """Every R' to 8, every second to 16, every fourth to 32, and so on; R itself last.

    >>> sizes_of(16)
    [2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
    """
    sizes = [n for n in range(2, R) if n <= 8 or n % 2 ** (math.ceil(math.log2(n)) - 3) == 0]
    return [*sizes, R]


def orders(R: int, size: int, seed: tuple[int, ...]) -> NDArray[np.intp]:
    """(S, R): each row the rollouts of a pool, those of one sub-group of `size` first, the others behind."""
    if math.comb(R, size) <= SUBSETS:
        chosen = itertools.combinations(range(R), size)
        return np.array([[*c, *(i for i in range(R) if i not in c)] for c in chosen], dtype=np.intp)
    rng = np.random.default_rng([*seed, size])
    return rng.permuted(np.tile(np.arange(R), (SUBSETS, 1)), axis=1)


def pool_values(pools: Pools, size: int) -> dict[str, Array]:
    """{name: (P,)} at one size, means over each pool's sub-groups.

    mixed               exact share of mixed sub-groups
    square, signal      of ||g||^2, leave-one-out, and the estimate of ||grad J||^2
    listed, QUANTITIES  over the sub-groups that were taken: share of the mixed ones, and the sum over these over the
                        number taken; a sum over pools of a quantity over one of `listed` is the mean over mixed ones
    std_square, std_product   of ||g||^2 with std scaling, and of its product with grad J; that NaN where R' > R - 2
    """
    r_PR, K_PRR = pools.rewards_PR, pools.gram_PRR
    found = {"mixed": np.array([mixed_share(r, size) for r in r_PR]), "signal": signal(r_PR, K_PRR)}
    found["square"] = square_by_size(r_PR, K_PRR, [size])[:, 0]
    count = min(SUBSETS, math.comb(pools.R, size))
    step = max(1, AT_ONCE // (count * size * pools.R))
    parts = [_listed(pools, np.arange(a, min(a + step, len(r_PR))), size) for a in range(0, len(r_PR), step)]
    return found | {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def mixed_share(rewards_R: Array, size: int) -> float:
    """The share of the sub-groups of `size` rollouts whose rewards are not all equal.

    >>> round(mixed_share(np.array([1.0, 0.0, 0.0]), 2), 3)
    0.667
    """
    counts = np.unique(rewards_R, return_counts=True)[1]
    return 1.0 - sum(math.comb(int(c), size) for c in counts) / math.comb(len(rewards_R), size)


def _listed(pools: Pools, index_P: NDArray[np.intp], size: int) -> dict[str, Array]:
    """What is averaged over the sub-groups one by one, for some of the pools."""
    R, P = pools.R, len(index_P)
    order_PSR = np.stack([orders(R, size, pools.seeds_P[p]) for p in index_P])
    r_PSR = np.take_along_axis(pools.rewards_PR[index_P][:, None, :], order_PSR, axis=2)
    at = index_P[:, None, None, None]
    K_PSnR = pools.gram_PRR[at, order_PSR[:, :, :size, None], order_PSR[:, :, None, :]]
    r_PSn, K_PSnn = r_PSR[..., :size], K_PSnR[..., :size]
    mixed_PS = r_PSn.max(axis=2) > r_PSn.min(axis=2)
    centred_PSn = r_PSn - r_PSn.mean(axis=2, keepdims=True)
    found = dict.fromkeys(("listed", *QUANTITIES), np.zeros(P))
    if mixed_PS.any():
        same_PSn = np.take_along_axis(pools.same_PR[index_P][:, None, :], order_PSR[:, :, :size], axis=2)
        same = first_equal(same_PSn[mixed_PS])
        values = spectra.singular_values(*merged(K_PSnn[mixed_PS], centred_PSn[mixed_PS], same))
        values[values[:, 0] == 0] = np.nan  # scores that are zero have no spectrum
        for name, quantity in QUANTITIES.items():
            each_PS = np.zeros(mixed_PS.shape)
            each_PS[mixed_PS] = np.nan_to_num(quantity(values))
            found[name] = each_PS.mean(axis=1)
        mixed_PS[mixed_PS] = np.isfinite(values[:, 0])
        found["listed"] = mixed_PS.mean(axis=1)
    a_PSn = grpo_std(r_PSn.reshape(-1, size)).reshape(r_PSn.shape) / size
    found["std_square"] = np.einsum("psi,psij,psj->p", a_PSn, K_PSnn, a_PSn) / order_PSR.shape[1]
    if size > R - 2:
        return found | {"std_product": np.full(P, np.nan)}
    rest_PSm = r_PSR[..., size:]
    b_PSm = rloo(rest_PSm.reshape(-1, R - size)).reshape(rest_PSm.shape) / (R - size)
    product = np.einsum("psi,psij,psj->p", a_PSn, K_PSnR[..., size:], b_PSm)
    return found | {"std_product": product / order_PSR.shape[1]}


def moments(values: dict[str, Array], size: int, estimator: str) -> tuple[Array, Array]:
    """||g||^2 and <g, grad J> of one group's g by pool, each without bias."""
    if estimator == "std":
        return values["std_square"], values["std_product"]
    factor = 1.0 if estimator == "leave-one-out" else (size - 1) / size
    return factor**2 * values["square"], factor * values["signal"]
