"""The draw that every engine shares: the same logits and the same uniform numbers give the same tokens.

On a CPU it is torch's operators, on a GPU two kernels that read the logits once. Both sum in float64; they agree but
where a uniform number lies within rounding of the edge between two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from grpo_sweeps.engine.samplers import kernels


def uniforms(seeds: Sequence[int], limit: int) -> np.ndarray:
    """(B, limit) float64: the uniform numbers of each row, a function of its seed alone."""
    return np.stack([np.random.Generator(np.random.Philox(seed)).random(limit) for seed in seeds])


def draw(logits_BV: Tensor, uniforms_B1: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
    """The next token of each row, (B,), and its log-probability, (B,) float32, at the sampling temperature.

    A token is the inverse of the cumulative distribution at the row's uniform number; without one, the most probable.
    """
    if uniforms_B1 is not None and logits_BV.is_cuda and not kernels.fault(logits_BV.device, logits_BV.dtype):
        from grpo_sweeps.engine.samplers.kernels.draw_tokens import draw_tokens

        return draw_tokens(logits_BV, uniforms_B1, temperature)
    return plain(logits_BV, uniforms_B1, temperature)


def plain(logits_BV: Tensor, uniforms_B1: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
    """`draw` by torch's own operators: on a CPU, for the most probable token, and what the kernels are held to."""
    logprobs_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
    if uniforms_B1 is None:
        next_B1 = logprobs_BV.argmax(dim=-1, keepdim=True)
    else:
        # float64: with 10^5 words a float32 cumulative sum is off by more than the rarest words' probabilities
        cdf_BV = logprobs_BV.double().exp().cumsum(dim=-1)
        target_B1 = uniforms_B1 * cdf_BV[:, -1:]
        next_B1 = torch.searchsorted(cdf_BV, target_B1, right=True).clamp(max=cdf_BV.shape[1] - 1)
    return next_B1.squeeze(1), logprobs_BV.gather(1, next_B1).squeeze(1)
