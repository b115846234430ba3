"""Launches of one kernel without the cost of Triton's argument analysis, which exceeds that of a small kernel.

Triton looks at every argument of every launch to find the variant to run. Whoever launches through here vouches that
the compile-time arguments alone tell it: the run-time ones are declared not to be specialised on, or always alike.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor


class Launcher:
    """kernel: a jitted function whose run-time arguments come first."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[Hashable, Any] = {}

    def __call__(
        self, grid: tuple[int, int, int], arguments: Sequence[Any], constants: dict[str, Any], warps: int,
        device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """dtype: of the tensors that vary in it; everything else that selects a variant is in `constants`, or all
        arguments on which the kernel may be specialised are `aligned`."""
        key = (device, dtype, warps, *constants.values())
        compiled = self.compiled.get(key)
        if compiled is None:
            self.compiled[key] = self.kernel[grid](*arguments, **constants, num_warps=warps)
        else:
            compiled[grid](*arguments, *constants.values())


def aligned(arguments: Sequence[Any]) -> bool:
    """Tensors on 16 bytes, whole numbers multiples of 16: one variant serves all such arguments."""
    return all(
        (a.data_ptr() if isinstance(a, Tensor) else a) % 16 == 0 for a in arguments if isinstance(a, Tensor | int)
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """1 on a CPU, where only Triton's interpreter runs kernels."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def check_trial(rows_Roi: Tensor, weights_R: Tensor, grad_oi: Tensor, slots: Tensor) -> None:
    """Two rows' products and weighted sum against what a kernel made of them. Raises ArithmeticError."""
    rows = rows_Roi.double().flatten(1)
    gram, total = rows @ rows.T, weights_R.double() @ rows
    found = slots.sum(0)[:4]
    expected = torch.stack([gram[0, 0], gram[0, 1], gram[1, 1], total.square().sum()])
    eps = torch.finfo(rows_Roi.dtype).eps
    near = bool((found - expected).abs().max() <= 0.8 * eps**0.5 * expected.abs().max())
    if not near or not torch.allclose(
        grad_oi.double().flatten(), total, rtol=8 * eps, atol=8 * eps * total.abs().max()
    ):
        raise ArithmeticError("wrong sums in the trial of a kernel")
