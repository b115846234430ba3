"""Triton kernels: one pass over a block of per-row gradients takes its Gram and writes its weighted sum.

The block, (rows, n, m) as a batched product left it, is read once. A thread holds E neighbouring columns of every row
and adds their products to its float32 sums, which are reduced once per launch. Sums over programs and launches are
float64 (`recorder.Slots`), each program in its slot, so that results do not depend on the order of execution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_sweeps.engine.gram.kernels.launch import Launcher, aligned, check_trial, multiprocessors
from grpo_sweeps.engine.gram.layout import TILE_ROWS, Launch, SlotPlan

WARPS = 4
THREADS = 32 * WARPS
PROGRAMS_PER_SM = 4  # 2 and 8 were slower on an H100


@triton.jit
def _load(pointer, row_stride, offsets, inside, R: tl.constexpr):
    rows = ()
    for r in tl.static_range(R):
        rows = rows + (tl.load(pointer + r * row_stride + offsets, mask=inside, other=0.0).to(tl.float32),)
    return rows


@triton.jit
def _zeros(COUNT: tl.constexpr, THREADS: tl.constexpr):
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros((THREADS,), tl.float32),)
    return sums


@triton.jit
def _stack(sums, LOW: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr, THREADS: tl.constexpr):
    """Entries LOW .. LOW + WIDTH of a tuple, zeros beyond COUNT, as (THREADS, WIDTH): one reduction takes them all."""
    if WIDTH == 1:
        if LOW < COUNT:
            return tl.expand_dims(sums[LOW], 1)
        else:
            return tl.zeros((THREADS, 1), tl.float32)
    else:
        left = _stack(sums, LOW, WIDTH // 2, COUNT, THREADS)
        right = _stack(sums, LOW + WIDTH // 2, WIDTH // 2, COUNT, THREADS)
        return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (THREADS, WIDTH))


@triton.jit
def _put(
    sums, slots, slot_stride, WIDTH: tl.constexpr, COUNT: tl.constexpr, THREADS: tl.constexpr, FIRST: tl.constexpr
):
    values = tl.sum(_stack(sums, 0, WIDTH, COUNT, THREADS), 0).to(tl.float64)
    own = slots + tl.program_id(0) * slot_stride + tl.arange(0, WIDTH)
    if not FIRST:
        values += tl.load(own)
    tl.store(own, values)


@triton.jit
def gram_pass(
    rows, weights, grad, total, slots, columns, size, row_stride, grad_stride, slot_stride,
    R: tl.constexpr, E: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
    FIRST: tl.constexpr, READ_TOTAL: tl.constexpr, WRITE_TOTAL: tl.constexpr,
):  # fmt: skip
    """Upper triangle of the R rows' products, and their weighted sum: to `grad`, or, while launches for other rows
    follow, to `total` in float32. Only the last launch adds the squared norm of the sum."""
    COUNT: tl.constexpr = R * (R + 1) // 2 + 1
    sums = _zeros(COUNT, THREADS)
    w = ()
    for r in tl.static_range(R):
        w = w + (tl.load(weights + r),)
    lane = tl.arange(0, THREADS)[:, None] * E + tl.arange(0, E)[None, :]
    for start in range(tl.program_id(0) * THREADS * E, size, tl.num_programs(0) * THREADS * E):
        offsets = start + lane
        inside = offsets < size
        x = _load(rows, row_stride, offsets, inside, R)
        weighted = tl.zeros((THREADS, E), tl.float32)
        if READ_TOTAL:
            weighted += tl.load(total + offsets, mask=inside, other=0.0)
        for r in tl.static_range(R):
            weighted += x[r] * w[r]
        if WRITE_TOTAL:
            tl.store(total + offsets, weighted, mask=inside)
        else:
            row = offsets // columns
            target = grad + row.to(tl.int64) * grad_stride + (offsets - row * columns)
            tl.store(target, weighted.to(grad.dtype.element_ty), mask=inside)
        new = ()
        for i in tl.static_range(R):
            for j in tl.static_range(i, R):
                new = new + (sums[i * R - i * (i - 1) // 2 + j - i] + tl.sum(x[i] * x[j], 1),)
        if WRITE_TOTAL:
            sums = new + (sums[COUNT - 1],)
        else:
            sums = new + (sums[COUNT - 1] + tl.sum(weighted * weighted, 1),)
    _put(sums, slots, slot_stride, WIDTH, COUNT, THREADS, FIRST)


@triton.jit
def cross_pass(
    left, right, slots, size, row_stride, slot_stride,
    RA: tl.constexpr, RB: tl.constexpr, E: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """Products of RA rows with RB others."""
    sums = _zeros(RA * RB, THREADS)
    lane = tl.arange(0, THREADS)[:, None] * E + tl.arange(0, E)[None, :]
    for start in range(tl.program_id(0) * THREADS * E, size, tl.num_programs(0) * THREADS * E):
        offsets = start + lane
        inside = offsets < size
        x = _load(left, row_stride, offsets, inside, RA)
        y = _load(right, row_stride, offsets, inside, RB)
        new = ()
        for i in tl.static_range(RA):
            for j in tl.static_range(RB):
                new = new + (sums[i * RB + j] + tl.sum(x[i] * y[j], 1),)
        sums = new
    _put(sums, slots, slot_stride, WIDTH, RA * RB, THREADS, FIRST)


launch_gram, launch_cross = Launcher(gram_pass), Launcher(cross_pass)


def _start(launcher: Launcher, arguments: Sequence[Any], constants: dict[str, Any], slots: Tensor) -> None:
    """Launch one program per row of `slots`."""
    rows: Tensor = arguments[0]
    if aligned(arguments):
        launcher((slots.shape[0], 1, 1), arguments, constants, WARPS, rows.device, rows.dtype)
    else:  # Triton finds the variant of each alignment
        launcher.kernel[(slots.shape[0],)](*arguments, **constants, num_warps=WARPS)


def programs(device: torch.device) -> int:
    """The rows of a `Slots` tensor that these kernels fill."""
    return PROGRAMS_PER_SM * multiprocessors(device)


def elements(rows: int, dtype: torch.dtype) -> int:
    """The neighbouring columns that a thread takes: 16 bytes of each row, less where many rows would overflow its
    registers."""
    return min(16 // dtype.itemsize, 8 if rows <= TILE_ROWS else 4)


def add_block(
    rows_Bnm: Tensor,
    weights_B: Tensor,
    grad_nm: Tensor,
    total: Tensor | None,
    slots: Tensor,
    plan: SlotPlan,
    first: bool,
) -> None:
    """Add a contiguous block's products to `slots` (programs, plan.width), write its weighted sum to `grad_nm`.

    weights_B: float32. total: (n m,) float32 scratch, needed where the plan has several diagonal launches. first: the
    slots are written, not added to. n m must stay below 2^31 / rows (offsets are 32 bits).
    """
    _, n, m = rows_Bnm.shape
    size, stride = n * m, rows_Bnm.stride(0)
    diagonal = plan.diagonal
    for launch in plan.launches:
        part = slots[:, launch.column :]
        a = rows_Bnm[launch.a]
        if launch.b is None:
            position = diagonal.index(launch)
            arguments = (
                a, weights_B[launch.a], grad_nm, grad_nm if total is None else total, part, m, size, stride,
                grad_nm.stride(0), slots.stride(0),
            )  # fmt: skip
            # A float32 total, and not grad in its place, is there just where one of the last two is True.
            constants = dict(
                R=len(a), E=elements(len(a), rows_Bnm.dtype), THREADS=THREADS, WIDTH=launch.width, FIRST=first,
                READ_TOTAL=position > 0, WRITE_TOTAL=position < len(diagonal) - 1,
            )  # fmt: skip
            _start(launch_gram, arguments, constants, part)
        else:
            _cross(rows_Bnm, launch, part, slots.stride(0), size, first)


def _cross(rows_Bnm: Tensor, launch: Launch, part: Tensor, slot_stride: int, size: int, first: bool) -> None:
    a, b = rows_Bnm[launch.a], rows_Bnm[launch.b]
    constants = dict(RA=len(a), RB=len(b), E=4, THREADS=THREADS, WIDTH=launch.width, FIRST=first)
    _start(launch_cross, (a, b, part, size, rows_Bnm.stride(0), slot_stride), constants, part)


def trial() -> None:
    """Raises where the kernel cannot be compiled or is wrong on this card."""
    rows, weights = torch.randn(2, 37, 61, device="cuda"), torch.tensor([1.0, -2.0], device="cuda")
    plan = SlotPlan.build([slice(0, 2)])
    grad, slots = torch.empty_like(rows[0]), plan.slots(programs(rows.device), rows.device)
    add_block(rows, weights, grad, None, slots, plan, first=True)
    check_trial(rows, weights, grad, slots)
