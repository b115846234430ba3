"""WeightSums: the three sums over rows that one weight needs, by whichever form was chosen.

gram     inner products of the rows' gradients y_b' x_b
grad     sum_b w_b y_b' x_b, the weight's gradient
sq_norm  ||grad||^2, for the check of w'Kw
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_sweeps.engine.gram.forms import kernels, refuse_shape
from grpo_sweeps.engine.gram.kernels.cuda import CudaError
from grpo_sweeps.engine.gram.layout import HALF_TYPES, RowLayout, accumulation_dtype, squared_norm, wide_mm
from grpo_sweeps.engine.gram.partials import Partial, Record, SlotPlan, Slots
from grpo_sweeps.engine.gram.recorder import Workspace

# Most memory of one block. A CPU block that stays in the second-level cache is read back for nothing: 2 MB was best
# from 0.25 to 64 MB. On a GPU small blocks do not pay, though its cache would hold them: the batched products slow
# down by more (H100, 9216 x 3072, R=8: 0.55 ms whole, 0.71 in blocks of 25 MB).
BLOCK_BYTES = {"cpu": 2 * 2**20, "cuda": 512 * 2**20}
# Elements of a block: the kernels' offsets are 32 bits, also those of a program's next turn, which lies beyond it.
MOST_ELEMENTS = 2**31 - 2**20
# Slots that take more room are summed at once: those of all weights are kept until the block ends.
KEPT_SLOT_BYTES = 4 * 2**20


def block_bytes_for(device: torch.device) -> int:
    return BLOCK_BYTES.get(device.type, BLOCK_BYTES["cpu"])


class WeightSums:
    """Gathers one weight's sums, whole or block of output rows by block; `form` is one of forms.FORMS but "auto"."""

    def __init__(
        self, layout: RowLayout, plan: SlotPlan, weight: Tensor, form: str, block_bytes: int, workspace: Workspace
    ) -> None:
        self.layout = layout
        self.plan = plan
        self.form = form
        self.block_bytes = block_bytes
        self.workspace = workspace
        self.grad = torch.empty_like(weight, memory_format=torch.contiguous_format)
        self._gram = self._sq_norm = self._slots = None  # type: Any

    def add(self, y_BTn: Tensor, x_BTi: Tensor, start: int = 0) -> None:
        """Add weight rows start .. start + n."""
        if self.form == "ghost":
            self._add_ghost(y_BTn, x_BTi)
        elif self.form != "fused" or not self._add_fused(y_BTn, x_BTi, self.grad[start : start + y_BTn.shape[2]]):
            self._add_blocks(y_BTn, x_BTi, start)

    def partial(self) -> Partial:
        """What was gathered, without `grad`: of a kernel, of the reference, or of both where one stood in."""
        self.workspace.forms[self.form] += 1
        slots = self._slots
        if self._gram is None:
            assert slots is not None
            large = slots.numel() * slots.element_size() > KEPT_SLOT_BYTES
            return Record(self.plan.summed(slots)) if large else Slots(slots)
        record = torch.cat([self._gram, self._sq_norm.reshape(1)])
        return Record(record if slots is None else record + self.plan.summed(slots))

    def _add_blocks(self, y_BTn: Tensor, x_BTi: Tensor, start: int) -> None:
        """In blocks of at most `block_bytes` (one weight row at least)."""
        B, _, n = y_BTn.shape
        i = x_BTi.shape[2]
        step = max(1, min(n, self.block_bytes // (B * i * y_BTn.element_size()), MOST_ELEMENTS // (B * i)))
        y_BnT = y_BTn.transpose(1, 2)
        for low in range(0, n, step):
            high = min(n, low + step)
            rows = self.workspace.get("rows", (B, high - low, i), y_BTn.dtype, y_BTn.device)
            torch.bmm(y_BnT[:, low:high], x_BTi, out=rows)
            grad_ni = self.grad[start + low : start + high]
            if self.form != "onepass" or not self._pass(rows, grad_ni):
                self._sum(rows, grad_ni)

    def _sum(self, rows_Bni: Tensor, grad_ni: Tensor) -> None:
        """The reference: library calls, each of which reads the block."""
        gram = self.layout.inner(rows_Bni)
        if rows_Bni.dtype in HALF_TYPES:
            total = self.layout.weighted_sum(rows_Bni.flatten(1))
            grad_ni.copy_(total.view_as(grad_ni))
        else:
            total = self.layout.weighted_sum(rows_Bni.flatten(1), out=grad_ni.view(-1))
        self._keep(gram, squared_norm(total.view_as(grad_ni)))

    def _pass(self, rows_Bni: Tensor, grad_ni: Tensor) -> bool:
        """False where the compiler refuses these rows: nothing has been added then."""
        onepass: Any = kernels("onepass")
        first = self._claim_slots(onepass)
        total = self._total(grad_ni.shape) if len(self.plan.diagonal) > 1 else None
        weights = self.layout.weights(torch.float32)
        try:
            onepass.add_block(rows_Bni, weights, grad_ni, total, self._slots, self.plan, first)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler may raise anything
            if not first:  # what was added before would be counted twice
                raise
            self._stand_in("onepass", error)
            self._slots = None
        return self.form == "onepass"

    def _add_fused(self, y_BTn: Tensor, x_BTi: Tensor, grad_ni: Tensor) -> bool:
        """False where the kernel cannot take these shapes: nothing has been added then."""
        fused: Any = kernels("fused")
        try:
            product = fused.Product(y_BTn, x_BTi, self.plan, first=self._slots is None)
        except (ValueError, CudaError) as error:
            self._stand_in("fused", error)
            return False
        self._claim_slots(fused)
        total = self._total(grad_ni.shape) if len(self.plan.launches) > 1 else None
        product.add(self.layout.weights(torch.float32), grad_ni, total, self._slots)
        return True

    def _stand_in(self, form: str, error: Exception) -> None:
        """The reference takes over, for this weight from here on; said once per reason."""
        refuse_shape(form, str(error))
        self.form = "blocks"

    def _claim_slots(self, module: Any) -> bool:
        """Make room for a kernel's sums; True where nothing is in it yet."""
        if self._slots is not None:
            return False
        self._slots = self.plan.slots(module.programs(self.grad.device), self.grad.device)
        return True

    def _total(self, shape: torch.Size) -> Tensor:
        """Scratch for a weighted sum that several launches add to."""
        return self.workspace.get("total", (shape.numel(),), torch.float32, self.grad.device)

    def _add_ghost(self, y_BTo: Tensor, x_BTi: Tensor) -> None:
        layout = self.layout
        gram = layout.flat([ghost_gram(y_BTo[unit], x_BTi[unit]) for unit in layout.units])
        weights_B = layout.weights(accumulation_dtype(y_BTo.dtype))
        # By a power of two, so that no bit changes: float16 would lose the products of small weights with small y.
        size = torch.exp2(weights_B.abs().max().clamp_min(2.0**-100).log2().ceil())
        weighted_y = (y_BTo * (weights_B / size)[:, None, None]).to(y_BTo.dtype)
        total = wide_mm(weighted_y.flatten(0, 1).T, x_BTi.flatten(0, 1)).mul_(size)
        self.grad.copy_(total)
        self._keep(gram, squared_norm(total))

    def _keep(self, gram: Tensor, sq_norm: Tensor) -> None:
        self._gram = gram if self._gram is None else self._gram + gram
        self._sq_norm = sq_norm if self._sq_norm is None else self._sq_norm + sq_norm


def ghost_gram(y_RTo: Tensor, x_RTi: Tensor) -> Tensor:
    """(R, R) float64: sum over t, s of <x_it, x_js> <y_it, y_js>."""
    R, T, _ = y_RTo.shape
    y, x = y_RTo.reshape(R * T, y_RTo.shape[2]), x_RTi.reshape(R * T, x_RTi.shape[2])
    pairs = wide_mm(y, y.T).mul_(wide_mm(x, x.T))
    return pairs.view(R, T, R, T).sum((1, 3), dtype=torch.float64)
