"""Sequences that an estimator cannot tell apart, by reward or by reward and length, with the moments of their scores.

C  classes. Within a class a group's weights are the same whichever sequence was drawn, so that a class enters the
first two moments of sum_i w_i psi_i with the mean of its scores and their mean squared norm, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Classes:
    """rewards_C, lengths_C (the expected length within where classes go by reward alone), probabilities p_C, scores'
    mean_CD = E[psi | c] and second_C = E[|psi|^2 | c]."""

    rewards_C: Tensor
    lengths_C: Tensor
    p_C: Tensor
    mean_CD: Tensor
    second_C: Tensor

    @property
    def variance_C(self) -> Tensor:
        """tr Var(psi | c): V+ and V- of claim C5 for a binary reward. Shape (C,)."""
        return (self.second_C - self.mean_CD.square().sum(dim=1)).clamp(min=0.0)


def classes_of(rewards_N: Tensor, lengths_N: Tensor, p_N: Tensor, psi_ND: Tensor, by_length: bool) -> Classes:
    """Classes of equal reward, and of equal length too where `by_length`, in ascending order. Rewards are equal to the
    bit or they differ."""
    lengths_N = lengths_N.to(torch.float64)
    key_NK = torch.stack([rewards_N, lengths_N] if by_length else [rewards_N], dim=1)
    key_CK, class_N = key_NK.unique(dim=0, return_inverse=True)
    C = len(key_CK)
    p_C = p_N.new_zeros(C).index_add_(0, class_N, p_N)
    share_N = p_N / p_C[class_N]
    mean_CD = psi_ND.new_zeros(C, psi_ND.shape[1]).index_add_(0, class_N, share_N[:, None] * psi_ND)
    second_C = p_N.new_zeros(C).index_add_(0, class_N, share_N * psi_ND.square().sum(dim=1))
    expected_C = p_N.new_zeros(C).index_add_(0, class_N, share_N * lengths_N)
    lengths_C = key_CK[:, 1] if by_length else expected_C
    return Classes(key_CK[:, 0], lengths_C, p_C, mean_CD, second_C)
