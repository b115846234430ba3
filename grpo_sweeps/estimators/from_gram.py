"""Estimators of stored groups: their advantages need the Gram of the group's scores, K_ij = <psi_i, psi_j>.

A training step has K only once the backward pass that the advantages belong to is over, so these are no choices of
`estimator`: the report says what they would have given on recorded groups. N groups of R rollouts, of any steps.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike

from grpo_sweeps.estimators.group import Ddof, Eps, grpo, grpo_std
from grpo_sweeps.types import Array, Within


def score_norm(rewards_NR: ArrayLike, gram_NRR: ArrayLike) -> Array:
    """Leave-one-out baseline weighted by score norms: A_i = r_i - sum_{j != i} K_jj r_j / sum_{j != i} K_jj.

    The constant baseline of least variance of a prompt is E[norm(psi)^2 r] / E[norm(psi)^2] (Weaver & Tao 2001;
    Greensmith et al. 2004). Here it is estimated from the other rollouts, so that it is independent of psi_i and
    E[sum_i A_i psi_i / R] = grad J; with the rollout's own norm and reward in it the direction would be another. Where
    the others' norms are all zero their plain mean is taken. At R = 2 this is `rloo`.

    Args:
        rewards_NR: (N, R) rewards, R >= 2.
        gram_NRR: (N, R, R) Grams of the scores.

    Returns:
        (N, R) advantages in the unit of the reward, float64; exactly zero for a group of equal rewards.

    Raises:
        ValueError: if the rewards are not (N, R) with R >= 2, or the Grams do not fit.
    """
    equal_N1 = ~grpo(rewards_NR).any(axis=1, keepdims=True)
    rewards, gram = _checked(rewards_NR, gram_NRR)
    centred = rewards - rewards[:, :1]  # a constant changes nothing, and rounding less
    squares_NR = np.clip(np.diagonal(gram, axis1=1, axis2=2), 0.0, None)
    others_RR = 1.0 - np.eye(rewards.shape[1])
    norms_NR = squares_NR @ others_RR
    weighted = np.divide((squares_NR * centred) @ others_RR, norms_NR, out=np.zeros_like(norms_NR), where=norms_NR > 0)
    plain = (centred @ others_RR) / (rewards.shape[1] - 1)
    return np.where(equal_N1, 0.0, centred - np.where(norms_NR > 0, weighted, plain))


def salt(
    rewards_NR: ArrayLike, gram_NRR: ArrayLike, rank: Annotated[int, Within(1)] = 1, alpha: Eps = 1.0, ddof: Ddof = 1,
    eps: Eps = 1e-4,
) -> Array:  # fmt: skip
    """Std scaling with the part outside the leading eigenvectors of K amplified: A = a + alpha (a - P a).

    a are the advantages of `grpo_std` and P projects, among the rollouts, onto the `rank` leading eigenvectors of K.
    This is our reading of SALT (arXiv 2606.05800), which splits the group's coefficients into a part in the dominant
    subspace of a Gram and a rest, and amplifies the rest. Its equations were not at hand: it sets the strength by how
    much the rows cancel, and its Gram may be another; here the strength is fixed and the Gram is that of all scores.

    Args:
        rewards_NR: (N, R) rewards, R >= 2.
        gram_NRR: (N, R, R) Grams of the scores.
        rank: eigenvectors, from 1 to R; with R of them A = a.
        alpha: strength, >= 0; 0 gives a.
        ddof, eps: of `grpo_std`.

    Returns:
        (N, R) advantages without unit, float64; exactly zero for a group of equal rewards.

    Raises:
        ValueError: for what `grpo_std` refuses, Grams that do not fit, a rank outside 1 to R or alpha below 0.
    """
    own_NR = grpo_std(rewards_NR, ddof, eps)
    _, gram = _checked(rewards_NR, gram_NRR)
    R = own_NR.shape[1]
    if not (1 <= rank <= R and alpha >= 0):
        raise ValueError(f"rank={rank}, alpha={alpha}: allowed are 1 <= rank <= {R} and alpha >= 0")
    leading_NRk = np.linalg.eigh((gram + np.swapaxes(gram, 1, 2)) / 2)[1][:, :, R - rank :]
    shared_NR = np.einsum("nrk,nsk,ns->nr", leading_NRk, leading_NRk, own_NR)
    return np.asarray(own_NR + alpha * (own_NR - shared_NR))


def _checked(rewards_NR: ArrayLike, gram_NRR: ArrayLike) -> tuple[Array, Array]:
    rewards, gram = np.asarray(rewards_NR, dtype=np.float64), np.asarray(gram_NRR, dtype=np.float64)
    if gram.shape != (*rewards.shape, rewards.shape[1]):
        raise ValueError(f"rewards {rewards.shape} and Grams {gram.shape} do not fit: (N, R) and (N, R, R) are needed")
    return rewards, gram
