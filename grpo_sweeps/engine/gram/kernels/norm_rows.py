"""Triton kernel: the rows' gradients of a norm's weight, sum over t of gy * normalised(x), in one read of x and gy."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_sweeps.engine.gram.kernels.launch import Launcher, multiprocessors

PROGRAMS_PER_SM = 4
MAX_WIDTH = 16_384  # a token's values live in one program's registers


@triton.jit(do_not_specialize=["T", "chunk", "eps"])
def norm_rows(
    x, gy, out, T, H, chunk, x_stride_b, x_stride_t, gy_stride_b, gy_stride_t, eps,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out (B, chunks, H): float32 sums over one chunk of one row's tokens. CENTRED: layer norm, else RMS norm."""
    b = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    total = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(1) * chunk
    for t in range(first, min(first + chunk, T)):
        value = tl.load(x + b * x_stride_b + t * x_stride_t + column, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(gy + b * gy_stride_b + t * gy_stride_t + column, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            value = tl.where(inside, value - tl.sum(value, 0) / H, 0.0)
        scale = 1 / tl.sqrt(tl.sum(value * value, 0) / H + eps)
        total += grad * value * scale
    chunks = tl.num_programs(1)
    tl.store(out + (b * chunks + tl.program_id(1)) * H + column, total, mask=inside)


launch = Launcher(norm_rows)


def warps(block: int) -> int:
    return min(16, max(1, block // 512))


def add_rows(x_BTH: Tensor, gy_BTH: Tensor, eps: float, centred: bool) -> Tensor:
    """(B, H) float32."""
    x, gy = (t if t.stride(-1) == 1 else t.contiguous() for t in (x_BTH, gy_BTH))
    B, T, H = x.shape
    if T == 0:
        return torch.zeros(B, H, device=x.device)
    chunk = triton.cdiv(T, max(1, PROGRAMS_PER_SM * multiprocessors(x.device) // B))
    chunks = triton.cdiv(T, chunk)
    out = torch.empty(B, chunks, H, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(H)
    strides = (x.stride(0), x.stride(1), gy.stride(0), gy.stride(1))
    arguments = (x, gy, out, T, H, chunk, *strides, eps)
    constants = dict(CENTRED=centred, BLOCK=block)
    if all(number % 16 == 0 for number in (*strides, H, x.data_ptr(), gy.data_ptr())):
        launch((B, chunks, 1), arguments, constants, warps(block), x.device, x.dtype)
    else:  # a variant of its own for each alignment, found by Triton
        norm_rows[(B, chunks)](*arguments, **constants, num_warps=warps(block))
    return out.sum(1)
