"""Hopper kernel: weight gradient and Gram in one, no row's gradient ever written to the card's memory.

A row's finished tile is rounded to the training dtype, as a written gradient would be, and waits on the chip until all
R are there (`fused.cu`). Registers and shared memory hold 8 rows; more are left to `onepass`.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading

import torch
from torch import Tensor

from grpo_sweeps.engine.gram.kernels.cuda import Kernel, check, compile_source, driver
from grpo_sweeps.engine.gram.kernels.launch import check_trial, multiprocessors
from grpo_sweeps.engine.gram.partials import SlotPlan

# As in fused.cu.
STAGES = 6
THREADS = 384
SHARED_BYTES = STAGES * 16384 + 4 * 32768 + 128 + 32 + 8 * 65 * 4
ARGUMENTS = struct.Struct("QQQQiiiii")

MAP_TYPES = {torch.bfloat16: 9, torch.float16: 6}  # CU_TENSOR_MAP_DATA_TYPE_*
BOX = (64, 32, 1)  # elements, tokens, rows of one bulk copy
MAX_MAPS = 4096


def options(R: int, dtype: torch.dtype, first: bool, read_total: bool, write_total: bool) -> list[str]:
    values = dict(
        R=R, BF16=dtype == torch.bfloat16, STAGES=STAGES, FIRST=first, READ_TOTAL=read_total, WRITE_TOTAL=write_total
    )
    return ["-arch=sm_90a", "-std=c++17", *[f"-D{name}={int(value)}" for name, value in values.items()]]


@functools.cache
def binary(chosen: tuple[str, ...]) -> bytes:
    return compile_source("fused.cu", ["hopper.cuh"], chosen)[0]


class Variant:
    """A compiled variant on one device, with the memory from which a launch reads its arguments."""

    def __init__(self, device: torch.device, chosen: list[str]) -> None:
        self.kernel = Kernel(binary(tuple(chosen)), "weight_gram", SHARED_BYTES, device)
        self.buffer = ctypes.create_string_buffer(ARGUMENTS.size)
        self.parameters = (ctypes.c_void_p * 3)(None, None, ctypes.addressof(self.buffer))
        self.lock = threading.Lock()  # between filling the buffer and the launch, which reads it


@functools.cache
def variant(
    device: torch.device, R: int, dtype: torch.dtype, first: bool, read_total: bool, write_total: bool
) -> Variant:
    return Variant(device, options(R, dtype, first, read_total, write_total))


@functools.lru_cache(MAX_MAPS)
def tensor_map(pointer: int, R: int, T: int, width: int, dtype: torch.dtype) -> tuple[int, object]:
    """Address of the descriptor of a contiguous (R, T, width), and what keeps it alive. It holds no more than the
    arguments of this function, so it serves whatever lies at `pointer` later."""
    memory = ctypes.create_string_buffer(128 + 64)
    address = (ctypes.addressof(memory) + 63) // 64 * 64
    ones, box = (ctypes.c_uint32 * 3)(1, 1, 1), (ctypes.c_uint32 * 3)(*BOX)
    size, strides = (ctypes.c_uint64 * 3)(width, T, R), (ctypes.c_uint64 * 2)(width * 2, T * width * 2)
    status = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(address), MAP_TYPES[dtype], 3, ctypes.c_void_p(pointer), size, strides, box, ones,
        0, 3, 2, 0,  # not interleaved, swizzled over 128 bytes, 128 bytes to the second-level cache, zeros beyond
    )  # fmt: skip
    check(status, f"cuTensorMapEncodeTiled of {(R, T, width)} at {pointer:#x}")
    return address, memory


def programs(device: torch.device) -> int:
    """Rows of a `Slots` tensor that this kernel fills: one program a multiprocessor."""
    return multiprocessors(device)


def in_order(rows_BTw: Tensor) -> Tensor:
    """Contiguous and on 16 bytes, as bulk copies want it."""
    if rows_BTw.is_contiguous() and rows_BTw.data_ptr() % 16 == 0:
        return rows_BTw
    return rows_BTw.clone(memory_format=torch.contiguous_format)  # a plain clone keeps the order of a transposed view


def add_product(
    y_BTo: Tensor, x_BTi: Tensor, weights_B: Tensor, grad_oi: Tensor, total: Tensor | None, slots: Tensor,
    plan: SlotPlan, first: bool,
) -> None:  # fmt: skip
    """Products and weighted sum of y_b' x_b over the rows b, as `onepass.add_block` makes them of a written block.

    grad_oi: contiguous, on 16 bytes; total: (o i,) float32, needed for several units; widths: multiples of 8.
    """
    y_BTo, x_BTi = in_order(y_BTo), in_order(x_BTi)
    _, T, o = y_BTo.shape
    i, device, dtype = x_BTi.shape[2], y_BTo.device, y_BTo.dtype
    y, x, weights, column_bytes = y_BTo.data_ptr(), x_BTi.data_ptr(), weights_B.data_ptr(), slots.element_size()
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    last = len(plan.launches) - 1
    for index, part in enumerate(plan.launches):
        low, R = part.a.start, part.a.stop - part.a.start
        one = variant(device, R, dtype, first, index > 0, index < last)
        with one.lock:
            one.parameters[0] = tensor_map(y + 2 * low * T * o, R, T, o, dtype)[0]
            one.parameters[1] = tensor_map(x + 2 * low * T * i, R, T, i, dtype)[0]
            ARGUMENTS.pack_into(
                one.buffer, 0, weights + 4 * low, grad_oi.data_ptr(), 0 if total is None else total.data_ptr(),
                slots.data_ptr() + column_bytes * part.column, T, o, i, slots.stride(0), part.width,
            )  # fmt: skip
            one.kernel.launch(slots.shape[0], THREADS, stream, ctypes.addressof(one.parameters))


def trial() -> None:
    """Raises where the kernel cannot be compiled or is wrong on this card, on two rows of odd length."""
    y, x = (torch.randn(2, 37, 136, device="cuda").bfloat16() for _ in range(2))
    plan, weights = SlotPlan.build([slice(0, 2)]), torch.tensor([1.0, -2.0], device="cuda")
    grad, slots = y.new_empty(136, 136), plan.slots(programs(y.device), y.device)
    add_product(y, x, weights, grad, None, slots, plan, first=True)
    check_trial(y.transpose(1, 2) @ x, weights, grad, slots)
