"""Linear layers: the Gram of per-row weight gradients y_r' x_r without keeping any of them whole.

Two exact forms (the second is the ghost norm of Li et al. 2021, arXiv 2110.05679, for all pairs of rows instead of
the diagonal):

- blocks: for a block of output rows form the (B, block, i) gradients, take their Gram, and write their weighted sum
  into the weight's gradient. The ordinary weight-gradient product is not done a second time. Cost R o i per pair of
  rows.
- ghost: K_ij = sum_{t,s} <x_it, x_js> <y_it, y_js>, cost R^2 T^2 (o + i), plus the ordinary product. Cheaper for
  short T only.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from grpo_sweeps.engine.gram.embedding import TiedLink
from grpo_sweeps.engine.gram.layout import HALF_TYPES, RowLayout, accumulation_dtype, squared_norm, wide_mm
from grpo_sweeps.engine.gram.recorder import Recorder, Workspace

Form = Literal["auto", "blocks", "ghost"]

# A CPU block that stays in the second-level cache is read back for nothing: 2 MB was best from 0.25 to 64 MB.
BLOCK_BYTES = {"cpu": 2 * 2**20, "cuda": 256 * 2**20}
MAX_GHOST_BYTES = 64 * 2**20
# ghost when T^2 (o + i) < factor * o * i. By arithmetic the factor is 1; the R x R products and weighted sums of a
# block run at the speed of memory, which raises it. Measured by `python -m grpo_sweeps.bench ghost` (CPU, float32: 6
# to 10 for widths 512 to 8192; H100, bfloat16: 10 at 2048 x 8192 and more for narrower layers).
GHOST_FACTOR = {"cpu": 6.0, "cuda": 10.0}


def block_bytes_for(device: torch.device) -> int:
    return BLOCK_BYTES.get(device.type, BLOCK_BYTES["cpu"])


def prefer_ghost(T: int, o: int, i: int, largest_unit: int, dtype: torch.dtype, device: torch.device) -> bool:
    """The cost rule; T counts padding, which is multiplied like everything else."""
    pair_bytes = (largest_unit * T) ** 2 * accumulation_dtype(dtype).itemsize
    factor = GHOST_FACTOR.get(device.type, 1.0)
    return T * T * (o + i) < factor * o * i and pair_bytes <= MAX_GHOST_BYTES


class WeightSums:
    """Gathers one weight's rows block by block: `grad` (o, i) weighted sum, `gram` flat float64, `sq_norm` of the
    sum."""

    def __init__(self, layout: RowLayout, weight: Tensor, block_bytes: int, workspace: Workspace) -> None:
        self.layout = layout
        self.block_bytes = block_bytes
        self.workspace = workspace
        self.grad = torch.empty_like(weight, memory_format=torch.contiguous_format)
        self.gram = torch.zeros(layout.flat_size, dtype=torch.float64, device=weight.device)
        self.sq_norm = torch.zeros((), dtype=torch.float64, device=weight.device)

    def add(self, y_BTn: Tensor, x_BTi: Tensor, start: int = 0) -> None:
        """Add weight rows start .. start + n, in blocks of at most `block_bytes` (one weight row at least)."""
        B, _, n = y_BTn.shape
        i = x_BTi.shape[2]
        step = max(1, min(n, self.block_bytes // (B * i * y_BTn.element_size())))
        y_BnT = y_BTn.transpose(1, 2)
        for low in range(0, n, step):
            high = min(n, low + step)
            rows = self.workspace.get((B, high - low, i), y_BTn.dtype, y_BTn.device)
            torch.bmm(y_BnT[:, low:high], x_BTi, out=rows)
            self._add_block(rows, self.grad[start + low : start + high])

    def _add_block(self, rows_Bni: Tensor, grad_ni: Tensor) -> None:
        self.gram += self.layout.inner(rows_Bni)
        if rows_Bni.dtype in HALF_TYPES:
            total = self.layout.weighted_sum(rows_Bni.flatten(1))
            grad_ni.copy_(total.view_as(grad_ni))
        else:
            total = self.layout.weighted_sum(rows_Bni.flatten(1), out=grad_ni.view(-1))
        self.sq_norm += squared_norm(total.view_as(grad_ni))

    def add_ghost(self, y_BTo: Tensor, x_BTi: Tensor) -> None:
        """The same three sums for the whole weight by the ghost form."""
        layout = self.layout
        self.gram += layout.flat([ghost_gram(y_BTo[unit], x_BTi[unit]) for unit in layout.units])
        weighted_y = (y_BTo * layout.weights(accumulation_dtype(y_BTo.dtype))[:, None, None]).to(y_BTo.dtype)
        total = wide_mm(weighted_y.flatten(0, 1).T, x_BTi.flatten(0, 1))
        self.grad.copy_(total)
        self.sq_norm += squared_norm(total)


def ghost_gram(y_RTo: Tensor, x_RTi: Tensor) -> Tensor:
    """(R, R) float64: sum over t, s of <x_it, x_js> <y_it, y_js>."""
    R, T, _ = y_RTo.shape
    y, x = y_RTo.reshape(R * T, -1), x_RTi.reshape(R * T, -1)
    pairs = wide_mm(y, y.T).mul_(wide_mm(x, x.T))
    return pairs.view(R, T, R, T).sum((1, 3), dtype=torch.float64)


class LinearRecorder(Recorder):
    """Weight of a linear map. `transposed` for a weight stored (in, out); `link` when it is tied to the embedding."""

    def __init__(
        self,
        *args: Any,
        form: Form,
        block_bytes: int,
        workspace: Workspace,
        transposed: bool = False,
        link: TiedLink | None = None,
    ) -> None:
        super().__init__(*args)
        self.form = form
        self.block_bytes = block_bytes
        self.workspace = workspace
        self.transposed = transposed
        self.link = link

    def sums(self) -> WeightSums:
        return WeightSums(self.layout, self.parameter, self.block_bytes, self.workspace)

    def backward(self, gy: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = saved
        rows = self.layout.rows
        y_BTo, x_BTi = gy.reshape(rows, -1, gy.shape[-1]), x.reshape(rows, -1, x.shape[-1])
        left, right = (x_BTi, y_BTo) if self.transposed else (y_BTo, x_BTi)
        sums = self.sums()
        if self._ghost(left, right):
            sums.add_ghost(left, right)
        else:
            sums.add(left, right)
        if self.link is not None:
            self.link.offer_output_gradients(y_BTo, x_BTi, sums.grad)
        return sums.grad, self.record(sums.gram, sums.sq_norm)

    def _ghost(self, y_BTo: Tensor, x_BTi: Tensor) -> bool:
        if self.form != "auto":
            return self.form == "ghost"
        T, o, i = y_BTo.shape[1], y_BTo.shape[2], x_BTi.shape[2]
        return prefer_ghost(T, o, i, max(self.layout.unit_sizes), y_BTo.dtype, y_BTo.device)
