"""The loss of a step beyond one on-policy update: ratios to the sampling policy, their clipping, KL to a reference.

Pure functions of per-token log-probabilities (natural logarithm): `logp_BT` of the policy that is differentiated,
`old_BT` of the policy that sampled, `reference_BT` of a fixed one. Each loss comes as coefficients c as well, such that

    gradient of the loss = -sum_bt c_bt grad log pi_bt

with c detached: what a backward needs, and what the row of a rollout in the matrix of loss gradients is made of.

Shapes: B rows (rollouts), T tokens; `mask_BT` is True on completion tokens, all else is 0 in what comes back.
Advantages A and weights a (the aggregation's factor: 1/N, 1/(N |o|), ...) are (B,) or (B, T). Arithmetic in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RATIOS = ("none", "token", "sequence")
KL_ESTIMATORS = ("k1", "k2", "k3")


@dataclass(frozen=True, eq=False)
class Surrogate:
    """One evaluation of `surrogate`, (B, T) each.

    loss_BT: per-token loss; its sum is the batch's, and can be differentiated. coefficients_BT: c. ratio_BT: the
    ratio to the sampling policy, in a row all the same for a sequence's. low_BT, high_BT: where the ratio was clipped
    from below (A < 0) and from above (A > 0).
    """

    loss_BT: Tensor
    coefficients_BT: Tensor
    ratio_BT: Tensor
    low_BT: Tensor
    high_BT: Tensor


def surrogate(
    logp_BT: Tensor,
    old_BT: Tensor,
    advantages: Tensor,
    weights: Tensor,
    mask_BT: Tensor,
    ratio: str = "none",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Surrogate:
    """The policy's part of the loss.

    none       loss_bt = -a A log pi_bt                                                      c = a A
    token      loss_bt = -a min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)             c = a A rho, or 0
               rho = pi_bt / pi_old_bt: PPO (arXiv 1707.06347); two bounds as in DAPO (arXiv 2503.14476)
    sequence   the same with s_b = exp(mean_t log(pi_bt / pi_old_bt)) for rho: GSPO (arXiv 2507.18071)

    c is 0 where the minimum is the clipped term, rho > 1 + clip_high with A > 0 or rho < 1 - clip_low with A < 0, and
    nowhere else. For `sequence` the loss is written as the paper's GSPO-token, sg[s_b] pi_bt / sg[pi_bt]: where A and a
    are (B,) its gradient is that of s_b itself, sum_t c_bt grad log pi_bt with one c for the row, and A may be (B, T).
    At ratio 1 all three have c = a A.

    Raises:
        ValueError: for another ratio, shapes that differ, clip_low outside (0, 1] or clip_high not above 0.
    """
    _check(logp_BT, old_BT, mask_BT)
    if ratio not in RATIOS:
        raise ValueError(f"ratio={ratio}: allowed are {', '.join(RATIOS)}")
    if not (0 < clip_low <= 1 and clip_high > 0):
        raise ValueError(f"clip_low={clip_low}, clip_high={clip_high}: allowed are 0 < clip_low <= 1 and clip_high > 0")
    logp_BT = _masked(logp_BT, mask_BT)
    aA_BT = _over_tokens(weights, mask_BT) * _over_tokens(advantages, mask_BT)
    log_ratio_BT = logp_BT.detach() - _masked(old_BT, mask_BT).detach()
    if ratio == "sequence":
        log_ratio_BT = (log_ratio_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1))[:, None] * mask_BT
    ratio_BT = log_ratio_BT.exp() * mask_BT
    if ratio == "none":
        nowhere_BT = torch.zeros_like(mask_BT)
        return Surrogate(-aA_BT * logp_BT, aA_BT, ratio_BT, nowhere_BT, nowhere_BT)
    high_BT = mask_BT & (aA_BT > 0) & (ratio_BT > 1 + clip_high)
    low_BT = mask_BT & (aA_BT < 0) & (ratio_BT < 1 - clip_low)
    clipped_BT = low_BT | high_BT
    moving_BT = ratio_BT * (logp_BT - logp_BT.detach()).exp()  # the ratio, with its gradient
    value_BT = torch.where(clipped_BT, ratio_BT.clamp(1 - clip_low, 1 + clip_high), moving_BT)
    coefficients_BT = torch.where(clipped_BT, 0.0, aA_BT * ratio_BT)
    return Surrogate(-aA_BT * value_BT, coefficients_BT, ratio_BT, low_BT, high_BT)


def kl(logp_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor, estimator: str) -> Tensor:
    """Per-token estimates of KL(pi, reference) in nats, (B, T), from tokens that pi sampled (Schulman,
    "Approximating KL divergence", 2020). With d = log pi - log reference:

    k1 = d                   unbiased, of any sign
    k2 = d^2 / 2             biased, never negative
    k3 = exp(-d) - 1 + d     unbiased, never negative

    Sums of a row's log-probabilities, as (B, 1), give the estimates for whole sequences.

    Raises:
        ValueError: for another estimator or shapes that differ.
    """
    d_BT = _difference(logp_BT, reference_BT, mask_BT, estimator)
    if estimator == "k1":
        return d_BT
    return d_BT.square() / 2 if estimator == "k2" else torch.expm1(-d_BT) + d_BT


def kl_slope(logp_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor, estimator: str) -> Tensor:
    """Derivative of `kl` by log pi, (B, T), detached: k1 1, k2 d, k3 1 - exp(-d).

    beta a k in the loss adds -beta a k' to the coefficients c. Under sampling from pi the mean of k' grad log pi is 0
    for k1, the gradient of KL(pi, reference) for k2, that of KL(reference, pi) for k3: of the sequences' where k is
    taken of their sums; of each token's distribution, the prefixes' probabilities held fixed, where it is taken by
    token.
    """
    d_BT = _difference(logp_BT, reference_BT, mask_BT, estimator).detach()
    if estimator == "k1":
        return mask_BT.to(d_BT.dtype)
    return d_BT if estimator == "k2" else -torch.expm1(-d_BT)


def kl_in_reward(rewards_B: Tensor, old_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor, estimator: str, beta: float
                 ) -> Tensor:  # fmt: skip
    """r_b - beta sum_t k_bt, (B,) float64: the reward less the KL estimate of its sequence, before the advantages.

    With k1 the expected gradient is that of J - beta KL(pi, reference), of whole sequences.
    """
    return rewards_B.to(torch.float64) - beta * kl(old_BT, reference_BT, mask_BT, estimator).sum(dim=1)


def _difference(logp_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor, estimator: str) -> Tensor:
    _check(logp_BT, reference_BT, mask_BT)
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"estimator={estimator}: allowed are {', '.join(KL_ESTIMATORS)}")
    return _masked(logp_BT, mask_BT) - _masked(reference_BT, mask_BT).detach()


def _masked(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return torch.where(mask_BT, values_BT.to(torch.float64), 0.0)


def _over_tokens(values: Tensor, mask_BT: Tensor) -> Tensor:
    """(B,) or (B, T) -> (B, T), float64, 0 outside the mask."""
    if values.shape not in (mask_BT.shape, mask_BT.shape[:1]):
        raise ValueError(f"advantages and weights of shape {tuple(values.shape)}: (B,) or (B, T) is needed")
    return _masked((values if values.ndim == 2 else values[:, None]).expand(mask_BT.shape), mask_BT)


def _check(first_BT: Tensor, second_BT: Tensor, mask_BT: Tensor) -> None:
    if not first_BT.shape == second_BT.shape == mask_BT.shape or mask_BT.ndim != 2 or mask_BT.dtype != torch.bool:
        shapes = [tuple(t.shape) for t in (first_BT, second_BT, mask_BT)]
        raise ValueError(f"shapes {shapes}, mask of {mask_BT.dtype}: one shape (B, T) and a boolean mask are needed")
