"""Triton kernels of the draw: one read of the logits.

The first gives, for each block of words, the largest logit and the sum of exp(logit - largest) in float64. The second
finds the block in which the cumulative distribution passes the row's uniform number, and the word in that block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 4096  # in a block


@triton.jit
def _blocks(logits, largest, sums, row_stride, temperature, V, N, WORDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    v = block * WORDS + tl.arange(0, WORDS)
    x = tl.load(logits + row * row_stride + v, mask=v < V, other=float("-inf")).to(tl.float32) / temperature
    top = tl.max(x, axis=0)
    # a block without any probability: its largest is -inf, which must not be subtracted from itself
    shift = tl.where(top == float("-inf"), 0.0, top)
    tl.store(largest + row * N + block, top)
    tl.store(sums + row * N + block, tl.sum(tl.exp(x.to(tl.float64) - shift.to(tl.float64)), axis=0))


@triton.jit
def _choose(
    logits, largest, sums, uniforms, tokens, logprobs, row_stride, uniform_stride, temperature, V, N,
    WORDS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCKS)
    tops = tl.load(largest + row * N + n, mask=n < N, other=float("-inf"))
    top = tl.max(tops, axis=0).to(tl.float64)
    sums_n = tl.load(sums + row * N + n, mask=n < N, other=0.0) * tl.exp(tops.to(tl.float64) - top)
    below = tl.cumsum(sums_n, axis=0)
    total = tl.max(below, axis=0)
    target = tl.load(uniforms + row * uniform_stride) * total
    block = tl.minimum(tl.sum((below <= target).to(tl.int32), axis=0), N - 1)
    before = tl.max(tl.where(n < block, below, 0.0), axis=0)
    v = block * WORDS + tl.arange(0, WORDS)
    x = tl.load(logits + row * row_stride + v, mask=v < V, other=float("-inf")).to(tl.float32) / temperature
    cumulative = before + tl.cumsum(tl.exp(x.to(tl.float64) - top), axis=0)
    token = tl.minimum(block * WORDS + tl.sum((cumulative <= target).to(tl.int32), axis=0), V - 1)
    token = tl.minimum(token, block * WORDS + WORDS - 1)
    chosen = tl.max(tl.where(v == token, x, float("-inf")), axis=0).to(tl.float64)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, (chosen - top - tl.log(total)).to(tl.float32))


def draw_tokens(logits_BV: Tensor, uniforms_B1: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """See `draw.draw`. The last dimension of the logits must be contiguous."""
    (B, V), device = logits_BV.shape, logits_BV.device
    N = triton.cdiv(V, WORDS)
    largest_BN = torch.empty(B, N, dtype=torch.float32, device=device)
    sums_BN = torch.empty(B, N, dtype=torch.float64, device=device)
    tokens_B = torch.empty(B, dtype=torch.long, device=device)
    logprobs_B = torch.empty(B, dtype=torch.float32, device=device)
    rows, heat = logits_BV.stride(0), float(temperature)
    with torch.cuda.device_of(logits_BV):  # Triton launches on the current device, whatever its arguments are on
        _blocks[(B, N)](logits_BV, largest_BN, sums_BN, rows, heat, V, N, WORDS=WORDS, num_warps=8)
        _choose[(B,)](
            logits_BV, largest_BN, sums_BN, uniforms_B1, tokens_B, logprobs_B, rows, uniforms_B1.stride(0), heat, V, N,
            WORDS=WORDS, BLOCKS=triton.next_power_of_2(N), num_warps=8,
        )  # fmt: skip
    return tokens_B, logprobs_B


def trial(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether two rows of four words are drawn as they should be."""
    logits_BV = torch.tensor([[0.0, 1.0, -1.0, 2.0], [3.0, 0.0, 0.0, -2.0]], dtype=dtype, device=device)
    uniforms_B1 = torch.tensor([[0.5], [0.9]], dtype=torch.float64, device=device)
    tokens_B, logprobs_B = draw_tokens(logits_BV, uniforms_B1, 1.0)
    expected_B = torch.log_softmax(logits_BV.double(), dim=1)[[0, 1], [3, 0]]
    return tokens_B.tolist() == [3, 0] and torch.allclose(logprobs_B.double(), expected_B, atol=1e-5)
