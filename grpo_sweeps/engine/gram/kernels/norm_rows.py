"""Triton kernel for the rows' gradients of a norm's weight, sum over t of gy * normalised(x), and of its bias, sum over
t of gy, in one read of x and gy."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_sweeps.engine.gram.kernels.launch import Launcher, aligned, multiprocessors

PROGRAMS_PER_SM = 2
TOKENS = 2  # read together: more loads in flight (8 x 1024 x 3072, an H200: 0.044 ms, one by one 0.059)
MAX_WIDTH = 16_384  # a token's values live in one program's registers


@triton.jit(do_not_specialize=["T", "chunk", "eps"])
def norm_rows(
    x, gy, out, T, H, chunk, x_stride_b, x_stride_t, gy_stride_b, gy_stride_t, eps,
    CENTRED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """out (B, chunks, 2, H), without the 2 where there is no BIAS: float32 sums over one chunk of one row's tokens.
    CENTRED: layer norm, else RMS norm."""
    b = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    step = tl.arange(0, TOKENS)[:, None]
    total = tl.zeros((BLOCK,), tl.float32)
    bias = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(1) * chunk
    last = min(first + chunk, T)
    for start in range(first, last, TOKENS):
        t = start + step
        inside = (column < H) & (t < last)
        value = tl.load(x + b * x_stride_b + t * x_stride_t + column, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(gy + b * gy_stride_b + t * gy_stride_t + column, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            value = tl.where(inside, value - tl.sum(value, 1, keep_dims=True) / H, 0.0)
        # A token beyond the last has no size: with an eps of 0 its scale would be infinite.
        scale = tl.where(t < last, 1 / tl.sqrt(tl.sum(value * value, 1, keep_dims=True) / H + eps), 0.0)
        total += tl.sum(grad * value * scale, 0)
        if BIAS:
            bias += tl.sum(grad, 0)
    column = tl.arange(0, BLOCK)
    inside = column < H
    chunks = tl.num_programs(1)
    own = out + (b * chunks + tl.program_id(1)) * (2 * H if BIAS else H) + column
    tl.store(own, total, mask=inside)
    if BIAS:
        tl.store(own + H, bias, mask=inside)


launch = Launcher(norm_rows)


def warps(block: int) -> int:
    return min(16, max(1, block // 512))


def add_rows(x_BTH: Tensor, gy_BTH: Tensor, eps: float, centred: bool, bias: bool = False) -> Tensor:
    """The rows' gradients of the weight, (B, H) float32, or (B, 2, H) with those of the bias."""
    x, gy = (t if t.stride(-1) == 1 else t.contiguous() for t in (x_BTH, gy_BTH))
    B, T, H = x.shape
    if T == 0:
        return torch.zeros(B, *((2, H) if bias else (H,)), device=x.device)
    chunk = triton.cdiv(T, max(1, PROGRAMS_PER_SM * multiprocessors(x.device) // B))
    chunks = triton.cdiv(T, chunk)
    out = torch.empty(B, chunks, *((2, H) if bias else (H,)), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(H)
    strides = (x.stride(0), x.stride(1), gy.stride(0), gy.stride(1))
    arguments = (x, gy, out, T, H, chunk, *strides, eps)
    constants = dict(CENTRED=centred, BIAS=bias, BLOCK=block, TOKENS=TOKENS)
    if aligned((*strides, H, x, gy)):
        launch((B, chunks, 1), arguments, constants, warps(block), x.device, x.dtype)
    else:  # Triton finds the variant of each alignment
        norm_rows[(B, chunks)](*arguments, **constants, num_warps=warps(block))
    return out.sum(1)


def trial() -> None:
    """Raises where the kernel cannot be compiled or is wrong on this card."""
    x, gy = torch.randn(2, 5, 48, device="cuda"), torch.randn(2, 5, 48, device="cuda")
    expected = (torch.nn.functional.layer_norm(x, (48,)) * gy).sum(1)
    if not torch.allclose(add_rows(x, gy, 1e-5, centred=True), expected, rtol=1e-4, atol=1e-4):
        raise ArithmeticError("wrong sums in the trial of norm_rows")
