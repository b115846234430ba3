"""Hopper kernel: weight gradient and Gram in one, no row's gradient ever written to the card's memory.

One program makes a 128 x 128 tile of the weight, row after row: a producer warp brings y and x by bulk copies into a
ring of shared memory, two warpgroups multiply (accumulators in registers). A row's finished tile is rounded to the
training dtype, as a written gradient would be, and waits on the chip: the first rows in shared memory, the rest in
registers. When all R rows are there, each thread takes their products on its own 64 elements and writes the weighted
sum. Registers and shared memory hold 8 rows; more are left to `onepass`.

Written in Gluon (Triton's layer with explicit layouts), which Triton still calls experimental: whoever imports this
module must be ready for ImportError.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from grpo_sweeps.engine.gram.kernels.launch import Launcher, check_trial, multiprocessors
from grpo_sweeps.engine.gram.partials import SlotPlan

# Renamed after Triton 3.6.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

WARPS = 8
SIDE = 128  # of a tile
DEPTH = 32  # tokens of one stage; 64 left too few stages in flight (0.53 ms instead of 0.45, 9216 x 3072, R=8, T=512)
STRIP = 8  # tiles in a strip that is walked together, so that x is found in the second-level cache
REGISTER_ROWS = 4
SHARED_BYTES = 227 * 1024 - 2048  # less barriers and the reduction's scratch
ROW_BYTES = SIDE * SIDE * 2
STAGE_BYTES = 2 * SIDE * DEPTH * 2


@gluon.jit
def _place(tile, down, right, STRIP: gl.constexpr):
    strip = tile // (STRIP * right)
    height = min(down - strip * STRIP, STRIP)
    inside = tile - strip * (STRIP * right)
    return strip * STRIP + inside % height, inside // height


@gluon.jit
def _produce(
    y, x, y_ring, x_ring, full, empty, T, o, i, R: gl.constexpr, SIDE: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, STRIP: gl.constexpr,
):  # fmt: skip
    """One warp: keep the ring full, in the order in which `_consume` reads it. Beyond T the copies bring zeros."""
    down = (o + SIDE - 1) // SIDE
    right = (i + SIDE - 1) // SIDE
    step = 0
    for tile in range(gl.program_id(0), down * right, gl.num_programs(0)):
        a, b = _place(tile, down, right, STRIP)
        for r in range(R):
            for t in range(0, T, DEPTH):
                stage = step % STAGES
                mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(stage), 2 * SIDE * DEPTH * 2)
                async_load(y, [r, t, a * SIDE], full.index(stage), y_ring.index(stage))
                async_load(x, [r, t, b * SIDE], full.index(stage), x_ring.index(stage))
                step += 1


@gluon.jit
def _row_product(
    y_ring, x_ring, full, empty, step, steps, mma: gl.constexpr, SIDE: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """y_r' x_r on one tile, float32; a stage is given back once the product after it has been issued."""
    acc = gl.zeros([SIDE, SIDE], gl.float32, mma)
    for k in range(steps):
        stage = (step + k) % STAGES
        mbarrier.wait(full.index(stage), ((step + k) // STAGES) & 1)
        a = y_ring.index(stage).reshape([DEPTH, SIDE]).permute([1, 0])
        b = x_ring.index(stage).reshape([DEPTH, SIDE])
        issued = warpgroup_mma(a, b, acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[issued])
        if k > 0:
            mbarrier.arrive(empty.index((step + k - 1) % STAGES), count=1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((step + steps - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _each(x, N: gl.constexpr, COUNT: gl.constexpr, layout: gl.constexpr):
    """(N, COUNT) -> COUNT tensors (N,): names for registers, nothing moves."""
    if COUNT == 1:
        return (gl.convert_layout(x.reshape([N]), layout, assert_trivial=True),)
    else:
        low, high = gl.split(x.reshape([N, 2, COUNT // 2]).permute(0, 2, 1))
        return _each(low, N, COUNT // 2, layout) + _each(high, N, COUNT // 2, layout)


@gluon.jit
def _four(xs, LOW: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """Four (N,) -> (N, 4), for one 16-byte access."""
    evens = gl.join(xs[LOW], xs[LOW + 2])
    odds = gl.join(xs[LOW + 1], xs[LOW + 3])
    return gl.convert_layout(gl.join(evens, odds).reshape([N, 4]), layout, assert_trivial=True)


@gluon.jit
def _pack(low, high, BF16: gl.constexpr):
    """Two float32 -> two halves in one register."""
    asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if BF16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(asm, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack(pair, BF16: gl.constexpr):
    if BF16:
        return (pair << 16).to(gl.float32, bitcast=True), (pair & -65536).to(gl.float32, bitcast=True)
    else:
        return gl.inline_asm_elementwise(
            "{.reg .f16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}", "=r,=r,r", [pair],
            dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
        )  # fmt: skip


@gluon.jit
def _packed_tile(acc, N: gl.constexpr, PAIRS: gl.constexpr, layout: gl.constexpr, BF16: gl.constexpr):
    """An accumulator tile as PAIRS tensors (N,) of packed halves, thread by thread as they lie.

    Thread (warp, g, q) holds rows 16 warp + g + 8 h and columns 8 j + 2 q + (0, 1) for h in 0..1, j in 0..15; pair
    16 h + j.
    """
    x = acc.reshape([N // 32, 2, 8, 16, 4, 2]).permute(0, 2, 4, 1, 3, 5).reshape([N, PAIRS, 2])
    low, high = gl.split(x)
    return _each(_pack(low, high, BF16), N, PAIRS, layout)


@gluon.jit
def _stack(sums, LOW: gl.constexpr, WIDTH: gl.constexpr, COUNT: gl.constexpr, N: gl.constexpr):
    if WIDTH == 1:
        if LOW < COUNT:
            return sums[LOW].reshape([N, 1])
        else:
            return gl.zeros_like(sums[0]).reshape([N, 1])
    else:
        left = _stack(sums, LOW, WIDTH // 2, COUNT, N)
        right = _stack(sums, LOW + WIDTH // 2, WIDTH // 2, COUNT, N)
        return gl.join(left, right).permute(0, 2, 1).reshape([N, WIDTH])


@gluon.jit
def _products(sums, lows, highs, R: gl.constexpr):
    """Upper triangle of the rows' products on two elements, added to `sums`."""
    new = ()
    for m in gl.static_range(R):
        for n in gl.static_range(m, R):
            so_far = sums[m * R - m * (m - 1) // 2 + n - m]
            new = new + (gl.fma(highs[m], highs[n], gl.fma(lows[m], lows[n], so_far)),)
    return new


@gluon.jit
def _finish_tile(
    sums, kept, held, w, grad, total, rows, columns, o, i, row1: gl.constexpr, row4: gl.constexpr, R: gl.constexpr,
    SHARED: gl.constexpr, SIDE: gl.constexpr, N: gl.constexpr, BF16: gl.constexpr, READ_TOTAL: gl.constexpr,
    WRITE_TOTAL: gl.constexpr,
):  # fmt: skip
    """Products of the R tiles, each thread on its own elements, and their weighted sum to `grad` or `total`.

    rows, columns: of a thread's first element. Returns `sums` with the products added.
    """
    PAIRS: gl.constexpr = SIDE * SIDE // N // 2
    COUNT: gl.constexpr = R * (R + 1) // 2 + 1
    FOURS: gl.constexpr = PAIRS // 4
    # in pairs of elements; i is even
    origin = rows.to(gl.int64) * (i // 2) + columns // 2
    for c in gl.static_range(FOURS):
        shared = ()
        for n in gl.static_range(SHARED):
            shared = shared + _each(held.index(n * FOURS + c).load(row4), N, 4, row1)
        for e in gl.static_range(4):
            low_sum = gl.zeros([N], gl.float32, row1)
            high_sum = gl.zeros([N], gl.float32, row1)
            at_row = (4 * c + e) // 16 * 8
            at_column = (4 * c + e) % 16 * 8
            target = origin + at_row * (i // 2) + at_column // 2
            inside = (rows + at_row < o) & (columns + at_column < i)
            if READ_TOTAL:
                low_sum += gl.load(total + 2 * target, mask=inside, other=0.0)
                high_sum += gl.load(total + 2 * target + 1, mask=inside, other=0.0)
            lows = ()
            highs = ()
            for n in gl.static_range(R):
                if n < SHARED:
                    low, high = _unpack(shared[4 * n + e], BF16)
                else:
                    low, high = _unpack(kept[(n - SHARED) * PAIRS + 4 * c + e], BF16)
                low_sum = gl.fma(low, w[n], low_sum)
                high_sum = gl.fma(high, w[n], high_sum)
                lows = lows + (low,)
                highs = highs + (high,)
            new = _products(sums, lows, highs, R)
            if WRITE_TOTAL:
                gl.store(total + 2 * target, low_sum, mask=inside)
                gl.store(total + 2 * target + 1, high_sum, mask=inside)
                sums = new + (sums[COUNT - 1],)
            else:
                gl.store(grad + target, _pack(low_sum, high_sum, BF16), mask=inside)
                norm = gl.fma(high_sum, high_sum, gl.fma(low_sum, low_sum, sums[COUNT - 1]))
                sums = new + (norm,)
    return sums


@gluon.jit
def _consume(
    y_ring, x_ring, held, full, empty, weights, grad, total, slots, T, o, i, slot_stride, R: gl.constexpr,
    SHARED: gl.constexpr, WIDTH: gl.constexpr, SIDE: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    STRIP: gl.constexpr, WARPS: gl.constexpr, FIRST: gl.constexpr, READ_TOTAL: gl.constexpr,
    WRITE_TOTAL: gl.constexpr,
):  # fmt: skip
    N: gl.constexpr = 32 * WARPS
    PAIRS: gl.constexpr = SIDE * SIDE // N // 2
    FOURS: gl.constexpr = PAIRS // 4
    COUNT: gl.constexpr = R * (R + 1) // 2 + 1
    BF16: gl.constexpr = y_ring.dtype == gl.bfloat16
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, SIDE, 16])
    row4: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    row1: gl.constexpr = gl.SliceLayout(1, row4)
    thread = gl.arange(0, N, row1)
    own_row = thread // 32 * 16 + thread % 32 // 4
    own_column = thread % 4 * 2
    w = ()
    for n in gl.static_range(R):
        w = w + (gl.load(weights + n),)
    sums = ()
    for _ in gl.static_range(COUNT):
        sums = sums + (gl.zeros([N], gl.float32, row1),)
    steps = (T + DEPTH - 1) // DEPTH
    down = (o + SIDE - 1) // SIDE
    right = (i + SIDE - 1) // SIDE
    step = 0
    for tile in range(gl.program_id(0), down * right, gl.num_programs(0)):
        for r in range(SHARED):
            acc = _row_product(y_ring, x_ring, full, empty, step, steps, mma, SIDE, DEPTH, STAGES)
            step += steps
            packed = _packed_tile(acc, N, PAIRS, row1, BF16)
            for c in gl.static_range(FOURS):
                held.index(r * FOURS + c).store(_four(packed, 4 * c, N, row4))
        kept = ()
        for _ in gl.static_range(R - SHARED):
            acc = _row_product(y_ring, x_ring, full, empty, step, steps, mma, SIDE, DEPTH, STAGES)
            step += steps
            kept = kept + _packed_tile(acc, N, PAIRS, row1, BF16)
        a, b = _place(tile, down, right, STRIP)
        rows = a * SIDE + own_row
        columns = b * SIDE + own_column
        sums = _finish_tile(
            sums, kept, held, w, grad, total, rows, columns, o, i, row1, row4, R, SHARED, SIDE, N, BF16, READ_TOTAL,
            WRITE_TOTAL,
        )  # fmt: skip
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    values = gl.convert_layout(gl.sum(_stack(sums, 0, WIDTH, COUNT, N), 0), flat).to(gl.float64)
    own = slots + gl.program_id(0) * slot_stride + gl.arange(0, WIDTH, flat)
    if not FIRST:
        values += gl.load(own)
    gl.store(own, values)


@gluon.jit(
    do_not_specialize=["T", "o", "i", "slot_stride"],
    do_not_specialize_on_alignment=["weights", "grad", "total", "slots"],
)
def _weight_gram(
    y, x, weights, grad, total, slots, T, o, i, slot_stride, R: gl.constexpr, SHARED: gl.constexpr,
    WIDTH: gl.constexpr, SIDE: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, STRIP: gl.constexpr,
    WARPS: gl.constexpr, FIRST: gl.constexpr, READ_TOTAL: gl.constexpr, WRITE_TOTAL: gl.constexpr,
):  # fmt: skip
    y_ring = gl.allocate_shared_memory(y.dtype, [STAGES, 1, DEPTH, SIDE], y.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, 1, DEPTH, SIDE], x.layout)
    fours: gl.constexpr = SIDE * SIDE // (32 * WARPS) // 8
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    held = gl.allocate_shared_memory(gl.int32, [max(SHARED, 1) * fours, 32 * WARPS, 4], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (y_ring, x_ring, held, full, empty, weights, grad, total, slots, T, o, i, slot_stride, R,
                        SHARED, WIDTH, SIDE, DEPTH, STAGES, STRIP, WARPS, FIRST, READ_TOTAL, WRITE_TOTAL)),
            (_produce, (y, x, y_ring, x_ring, full, empty, T, o, i, R, SIDE, DEPTH, STAGES, STRIP)),
        ],
        [1],
        [24],
    )  # fmt: skip


def shared_rows(R: int) -> int:
    """Rows whose tiles wait in shared memory; with none there, room for one is taken all the same."""
    return max(0, R - REGISTER_ROWS)


def stages(R: int) -> int:
    return (SHARED_BYTES - max(shared_rows(R), 1) * ROW_BYTES) // STAGE_BYTES


def constants_of(R: int, width: int, first: bool, read_total: bool, write_total: bool) -> dict[str, object]:
    """The compile-time arguments of `_weight_gram`, which select its variant."""
    return dict(
        R=R, SHARED=shared_rows(R), WIDTH=width, SIDE=SIDE, DEPTH=DEPTH, STAGES=stages(R), STRIP=STRIP, WARPS=WARPS,
        FIRST=first, READ_TOTAL=read_total, WRITE_TOTAL=write_total,
    )  # fmt: skip


def programs(device: torch.device) -> int:
    """Rows of a `Slots` tensor that this kernel fills: one program a multiprocessor."""
    return multiprocessors(device)


def described(rows_RTw: Tensor, R: int, T: int, width: int) -> TensorDescriptor:
    """(R, T, width) as blocks for a bulk copy, without the checks of TensorDescriptor's own constructor: they take
    longer than the launch, and what they look at holds here by construction."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base = rows_RTw
    descriptor.shape = [R, T, width]
    descriptor.strides = [T * width, width, 1]
    descriptor.block_shape = BLOCK
    descriptor.layout = LAYOUT
    descriptor.padding = "zero"
    return descriptor


def in_order(rows_BTw: Tensor) -> Tensor:
    """Contiguous and on 16 bytes, as bulk copies want it."""
    if rows_BTw.is_contiguous() and rows_BTw.data_ptr() % 16 == 0:
        return rows_BTw
    return rows_BTw.clone(memory_format=torch.contiguous_format)  # a plain clone keeps the order of a transposed view


launch = Launcher(_weight_gram)
BLOCK = [1, DEPTH, SIDE]
LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


def add_product(
    y_BTo: Tensor, x_BTi: Tensor, weights_B: Tensor, grad_oi: Tensor, total: Tensor | None, slots: Tensor,
    plan: SlotPlan, first: bool,
) -> None:  # fmt: skip
    """Products and weighted sum of y_b' x_b over the rows b, as `onepass.add_block` makes them of a written block.

    grad_oi: contiguous; total: (o i,) float32, needed for several units.
    """
    y_BTo, x_BTi = in_order(y_BTo), in_order(x_BTi)
    B, T, o = y_BTo.shape
    i = x_BTi.shape[2]
    pairs = grad_oi.view(torch.int32)
    for index, part in enumerate(plan.launches):
        R = part.a.stop - part.a.start
        y, x, weights = (t if R == B else t[part.a] for t in (y_BTo, x_BTi, weights_B))
        arguments = (
            described(y, R, T, o), described(x, R, T, i), weights, pairs, weights if total is None else total,
            slots[:, part.column :] if part.column else slots, T, o, i, plan.width,
        )  # fmt: skip
        constants = constants_of(R, part.width, first, index > 0, index < len(plan.launches) - 1)
        launch((slots.shape[0], 1, 1), arguments, constants, WARPS, y.device, y.dtype)


def trial() -> None:
    """Raises where the kernel cannot be compiled or is wrong on this card, on two rows of odd length."""
    y, x = (torch.randn(2, 37, 136, device="cuda").bfloat16() for _ in range(2))
    plan, weights = SlotPlan.build([slice(0, 2)]), torch.tensor([1.0, -2.0], device="cuda")
    grad, slots = y.new_empty(136, 136), plan.slots(programs(y.device), y.device)
    add_product(y, x, weights, grad, None, slots, plan, first=True)
    check_trial(y.transpose(1, 2) @ x, weights, grad, slots)
