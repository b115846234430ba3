"""Triton kernels: one pass over a block of per-row gradients takes its Gram and writes its weighted sum.

The block, (rows, n, m) as a batched product left it, is read once. A thread holds E neighbouring columns of every row
and adds their products to its float32 sums, which are reduced once per launch. Sums over programs and launches are
float64 (`recorder.Slots`), each program in its slot, so that results do not depend on the order of execution.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_sweeps.engine.gram.kernels.launch import Launcher, aligned, check_trial, multiprocessors
from grpo_sweeps.engine.gram.layout import TILE_ROWS, Launch, SlotPlan

log = logging.getLogger(__name__)

WARPS = 4
THREADS = 32 * WARPS
PROGRAMS_PER_SM = 4  # 2 and 8 were slower on an H100
COMPILERS = 8  # variants that are compiled at once; each takes seconds, almost all of them outside the interpreter


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
    if (compiling := _compiling.pop(_key(launcher, rows.dtype, constants), None)) is not None:
        compiling.join()
    if aligned(arguments):
        launcher((slots.shape[0], 1, 1), arguments, constants, WARPS, rows.device, rows.dtype)
    else:  # Triton finds the variant of each alignment
        launcher.kernel[(slots.shape[0],)](*arguments, **constants, num_warps=WARPS)


_compiling: dict[Hashable, threading.Thread] = {}
_compilers = threading.Semaphore(COMPILERS)


def begin(plan: SlotPlan, dtype: torch.dtype, device: torch.device) -> None:
    """Begin to compile, in the background, every variant that `add_block` launches for the plan, where its arguments
    lie on 16 bytes: others are compiled at their first launch."""
    for launcher, constants in variants(plan, dtype):
        key = _key(launcher, dtype, constants)
        if key not in _compiling:
            _compiling[key] = threading.Thread(target=_compile, args=(launcher, dtype, constants, device), daemon=True)
            _compiling[key].start()


def _key(launcher: Launcher, dtype: torch.dtype, constants: dict[str, Any]) -> Hashable:
    return launcher, dtype, *constants.values()


def variants(plan: SlotPlan, dtype: torch.dtype) -> Iterator[tuple[Launcher, dict[str, Any]]]:
    for first in (True, False):
        for launch in plan.launches:
            yield (launch_gram if launch.b is None else launch_cross), _constants(plan, launch, dtype, first)


def _compile(launcher: Launcher, dtype: torch.dtype, constants: dict[str, Any], device: torch.device) -> None:
    """Into Triton's own store, from which the launch takes it. What goes wrong here goes wrong there again, and is
    said there."""
    f32, f64 = torch.float32, torch.float64
    if launcher is launch_cross:
        arguments: tuple[Any, ...] = (dtype, dtype, f64, 16, 16, 16)
    else:
        total = f32 if constants["READ_TOTAL"] or constants["WRITE_TOTAL"] else dtype
        arguments = (dtype, f32, dtype, total, f64, 16, 16, 16, 16, 16)
    try:
        with _compilers, torch.cuda.device(device):
            launcher.kernel.warmup(*arguments, grid=(1,), num_warps=WARPS, **constants)
    except Exception as error:
        log.debug("a variant of the onepass kernel does not compile: %s", error)


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
    for launch in plan.launches:
        part, constants = slots[:, launch.column :], _constants(plan, launch, rows_Bnm.dtype, first)
        a = rows_Bnm[launch.a]
        if launch.b is None:
            arguments = (
                a, weights_B[launch.a], grad_nm, grad_nm if total is None else total, part, m, size, stride,
                grad_nm.stride(0), slots.stride(0),
            )  # fmt: skip
            _start(launch_gram, arguments, constants, part)
        else:
            _start(launch_cross, (a, rows_Bnm[launch.b], part, size, stride, slots.stride(0)), constants, part)


def _constants(plan: SlotPlan, launch: Launch, dtype: torch.dtype, first: bool) -> dict[str, Any]:
    """The compile-time arguments of one launch."""
    a = launch.a.stop - launch.a.start
    if launch.b is not None:
        b = launch.b.stop - launch.b.start
        return dict(RA=a, RB=b, E=4, THREADS=THREADS, WIDTH=launch.width, FIRST=first)
    diagonal = plan.diagonal
    position = diagonal.index(launch)
    # A float32 total, and not grad in its place, is there just where one of the last two is True.
    return dict(
        R=a, E=elements(a, dtype), THREADS=THREADS, WIDTH=launch.width, FIRST=first, READ_TOTAL=position > 0,
        WRITE_TOTAL=position < len(diagonal) - 1,
    )  # fmt: skip


def trial() -> None:
    """Raises where the kernel cannot be compiled or is wrong on this card."""
    rows, weights = torch.randn(2, 37, 61, device="cuda"), torch.tensor([1.0, -2.0], device="cuda")
    plan = SlotPlan.build([slice(0, 2)])
    grad, slots = torch.empty_like(rows[0]), plan.slots(programs(rows.device), rows.device)
    add_block(rows, weights, grad, None, slots, plan, first=True)
    check_trial(rows, weights, grad, slots)
