"""Rewards that are functions of the tokens alone: outcomes, paid with the last token, and rewards per token.

A token reward maps tokens_NT (padded with 0) and mask_NT to (N, T) rewards, 0 at padding; the reward of token t may
depend on the tokens up to t only. The rules use the code sum_t (t + 1) x_t, so that the order of the tokens counts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TokenReward = Callable[[Tensor, Tensor], Tensor]


def outcome(reward_N: Tensor, mask_NT: Tensor) -> Tensor:
    """A whole sequence's reward, placed on its last token. Shapes (N,), (N, T) -> (N, T)."""
    last_NT = mask_NT & (mask_NT.cumsum(dim=1) == mask_NT.sum(dim=1, keepdim=True))
    return last_NT * reward_N[:, None].to(torch.float64)


def binary(modulus: int = 3, residue: int = 0) -> TokenReward:
    """Outcome reward 1 where the code is `residue` modulo `modulus`, else 0."""

    def reward(tokens_NT: Tensor, mask_NT: Tensor) -> Tensor:
        return outcome(_codes(tokens_NT, mask_NT)[:, -1] % modulus == residue, mask_NT)

    return reward


def graded(levels: int = 4) -> TokenReward:
    """Outcome reward (code modulo `levels`) / (levels - 1): `levels` >= 2 equally spaced values from 0 to 1."""

    def reward(tokens_NT: Tensor, mask_NT: Tensor) -> Tensor:
        return outcome((_codes(tokens_NT, mask_NT)[:, -1] % levels).to(torch.float64) / (levels - 1), mask_NT)

    return reward


def by_token(modulus: int = 3, residue: int = 0) -> TokenReward:
    """Reward 1 for every token at which the code so far is `residue` modulo `modulus`: each token is a turn.

    Whole numbers, so that sequences of equal reward are equal to the bit and fall into one class.
    """

    def reward(tokens_NT: Tensor, mask_NT: Tensor) -> Tensor:
        return ((_codes(tokens_NT, mask_NT) % modulus == residue) & mask_NT).to(torch.float64)

    return reward


def drawn_by_token(seed: int, modulus: int = 7) -> TokenReward:
    """A reward for every token, drawn once from N(0, 1) for each position and code so far modulo `modulus`."""

    def reward(tokens_NT: Tensor, mask_NT: Tensor) -> Tensor:
        T = tokens_NT.shape[1]
        table_TM = torch.randn(T, modulus, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        codes_NT = _codes(tokens_NT, mask_NT) % modulus
        return table_TM[torch.arange(T).expand_as(codes_NT), codes_NT] * mask_NT

    return reward


def _codes(tokens_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """sum_{s <= t} (s + 1) x_s, padding left out. Shape (N, T)."""
    place_T = torch.arange(1, tokens_NT.shape[1] + 1, device=tokens_NT.device)
    return (tokens_NT * mask_NT * place_T).cumsum(dim=1)
