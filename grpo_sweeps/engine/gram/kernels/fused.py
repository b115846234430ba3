"""Hopper kernel: weight gradient and Gram in one, no row's gradient ever written to the card's memory.

A row's finished tile is rounded to the training dtype, as a written gradient would be, and waits on the chip until all
R are there (`fused.cu`). Registers and shared memory hold 8 rows; more are left to `onepass`.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from grpo_sweeps.engine.gram.kernels.launch import Kernel, cached_binary, check, check_trial, driver, multiprocessors
from grpo_sweeps.engine.gram.layout import SlotPlan
from grpo_sweeps.engine.gram.torch_private import raw_stream

# As in fused.cu.
STAGES = 6
THREADS = 384
SHARED_BYTES = STAGES * 16384 + 4 * 32768 + 128 + 32 + 8 * 65 * 4
ARGUMENTS = struct.Struct("QQQQiiiii")

MAP_TYPES = {torch.bfloat16: 9, torch.float16: 6}  # CU_TENSOR_MAP_DATA_TYPE_*
BOX = (64, 32, 1)  # elements, tokens, rows of one bulk copy
MAX_MAPS = 4096
COMPILERS = 4  # variants compiled at once, 2 to 3 s each


def options(R: int, dtype: torch.dtype, first: bool, read_total: bool, write_total: bool) -> list[str]:
    values = dict(
        R=R, BF16=dtype == torch.bfloat16, STAGES=STAGES, FIRST=first, READ_TOTAL=read_total, WRITE_TOTAL=write_total
    )
    return ["-arch=sm_90a", "-std=c++17", *[f"-D{name}={int(value)}" for name, value in values.items()]]


_compiled: dict[tuple[str, ...], Future[bytes]] = {}
_lock, _compilers = threading.Lock(), threading.Semaphore(COMPILERS)


def compiling(chosen: tuple[str, ...]) -> Future[bytes]:
    """The compiled variant, now or later: NVRTC works beside the interpreter, whose end does not wait for it."""
    with _lock:
        if chosen not in _compiled:
            _compiled[chosen] = Future()
            threading.Thread(target=_compile, args=(chosen, _compiled[chosen]), daemon=True).start()
        return _compiled[chosen]


def _compile(chosen: tuple[str, ...], future: Future[bytes]) -> None:
    try:
        with _compilers:
            future.set_result(cached_binary("fused.cu", ["hopper.cuh"], chosen))
    except BaseException as error:  # raised where the result is asked for
        future.set_exception(error)


def binary(chosen: tuple[str, ...]) -> bytes:
    """A compiled variant. Raises CudaError with the compiler's log."""
    return compiling(chosen).result()


def begin(groups: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
    """Begin to compile, in the background, what blocks of these groups launch: (R, groups) each."""
    for R, count in groups:
        several = [(False, True), (True, True), (True, False)] if count > 1 else []
        for first, (read, write) in itertools.product((True, False), [(False, False), *several]):
            compiling(tuple(options(R, dtype, first, read, write)))


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
    """The rows of a `Slots` tensor that this kernel fills: one program per multiprocessor."""
    return multiprocessors(device)


def in_order(rows_BTw: Tensor) -> Tensor:
    """The rows contiguous and on 16 bytes, as bulk copies need them."""
    if rows_BTw.is_contiguous() and rows_BTw.data_ptr() % 16 == 0:
        return rows_BTw
    return rows_BTw.clone(memory_format=torch.contiguous_format)  # a plain clone keeps the order of a transposed view


class Product:
    """The products and the weighted sum of y_b' x_b over the rows b, as `onepass.add_block` makes them of a written
    block.

    y_BTo, x_BTi: of one half type. first: the slots are written, not added to. Everything that can refuse a shape does
    so here, before anything is launched. Raises ValueError for a shape that bulk copies cannot take, CudaError where
    the compiler or the driver refuses one.
    """

    def __init__(self, y_BTo: Tensor, x_BTi: Tensor, plan: SlotPlan, first: bool) -> None:
        self.y, self.x, self.plan = in_order(y_BTo), in_order(x_BTi), plan
        _, self.T, self.o = y_BTo.shape
        self.i = x_BTi.shape[2]
        if not self.T:
            raise ValueError("there are no tokens")
        if self.o % 8 or self.i % 8:
            raise ValueError("a width is no multiple of 8")
        units, last = [(part.a.start, part.a.stop - part.a.start) for part in plan.launches], len(plan.launches) - 1
        self.maps = [self._maps(low, R) for low, R in units]
        self.variants = [
            variant(self.y.device, R, self.y.dtype, first, index > 0, index < last)
            for index, (_, R) in enumerate(units)
        ]

    def _maps(self, low: int, R: int) -> tuple[tuple[int, object], tuple[int, object]]:
        y, x, T, dtype = self.y.data_ptr(), self.x.data_ptr(), self.T, self.y.dtype
        y_map = tensor_map(y + 2 * low * T * self.o, R, T, self.o, dtype)
        return y_map, tensor_map(x + 2 * low * T * self.i, R, T, self.i, dtype)

    def add(self, weights_B: Tensor, grad_oi: Tensor, total: Tensor | None, slots: Tensor) -> None:
        """grad_oi: contiguous, on 16 bytes; total: (o i,) float32, needed for several units."""
        column_bytes, stream = slots.element_size(), raw_stream(self.y.device)
        for part, maps, one in zip(self.plan.launches, self.maps, self.variants, strict=True):
            with one.lock:
                one.parameters[0], one.parameters[1] = maps[0][0], maps[1][0]
                ARGUMENTS.pack_into(
                    one.buffer, 0, weights_B.data_ptr() + 4 * part.a.start, grad_oi.data_ptr(),
                    0 if total is None else total.data_ptr(), slots.data_ptr() + column_bytes * part.column,
                    self.T, self.o, self.i, slots.stride(0), part.width,
                )  # fmt: skip
                one.kernel.launch(slots.shape[0], THREADS, stream, ctypes.addressof(one.parameters))


def trial() -> None:
    """Raises where the kernel cannot be compiled or is wrong on this card, on two rows of odd length."""
    y, x = (torch.randn(2, 37, 136, device="cuda").bfloat16() for _ in range(2))
    plan, weights = SlotPlan.build([slice(0, 2)]), torch.tensor([1.0, -2.0], device="cuda")
    grad, slots = y.new_empty(136, 136), plan.slots(programs(y.device), y.device)
    Product(y, x, plan, first=True).add(weights, grad, None, slots)
    check_trial(y.transpose(1, 2) @ x, weights, grad, slots)
