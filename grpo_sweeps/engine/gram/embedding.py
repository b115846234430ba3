"""Token embeddings, and the cross term between an embedding and an output head that share one weight.

A row's embedding gradient is zero but for the ids that occur in it, so only the unit's unique ids are laid out, block
by block.

Tied weight: row i's whole gradient is E_i + H_i (embedding and head), so K_ij also holds <E_i, H_j> + <H_i, E_j>. E_i
lives on the ids that occur; there H_j[v] = sum_s dlogit_j[s, v] x_j[s], a gather of the head's output gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_sweeps.engine.gram.layout import GramError, RowLayout, accumulation_dtype, squared_norm, unit_inner, wide_bmm
from grpo_sweeps.engine.gram.partials import Partial, Record
from grpo_sweeps.engine.gram.recorder import Recorder

# columns(unit, low, high) -> (R, S, high - low): output gradients of the unit's rows at its unique ids low .. high
Columns = Callable[[int, int, int], Tensor]


@dataclass(frozen=True)
class UnitIds:
    """Unique ids of one unit and where they occur.

    ids_U: sorted unique ids. order: positions in the unit's flat (R T) ids, sorted by id; local: their index into
    ids_U. starts: U + 1 offsets into `order`, on the host.
    """

    ids_U: Tensor
    order: Tensor
    local: Tensor
    starts: list[int]

    @classmethod
    def of(cls, ids_RT: Tensor) -> UnitIds:
        ids_U, inverse, counts = torch.unique(ids_RT.reshape(-1), return_inverse=True, return_counts=True)
        order = torch.argsort(inverse, stable=True)
        return cls(ids_U, order, inverse[order], [0, *counts.cumsum(0).tolist()])

    def row_gradients(self, gy_RTH: Tensor, low: int, high: int) -> Tensor:
        """(R, high - low, H): each row's embedding gradient at ids low .. high, in the accumulation dtype."""
        R, T, H = gy_RTH.shape
        chosen = slice(self.starts[low], self.starts[high])
        position = self.order[chosen]
        target = torch.div(position, T, rounding_mode="floor") * (high - low) + self.local[chosen] - low
        dtype = accumulation_dtype(gy_RTH.dtype)
        out = torch.zeros(R * (high - low), H, dtype=dtype, device=gy_RTH.device)
        return out.index_add_(0, target, gy_RTH.reshape(R * T, H)[position].to(dtype)).view(R, high - low, H)


def union_of(units: list[UnitIds]) -> Tensor:
    return units[0].ids_U if len(units) == 1 else torch.unique(torch.cat([unit.ids_U for unit in units]))


class TiedLink:
    """What the head's backward leaves for the embedding's, which runs later, when both use one weight."""

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self.unit_ids: list[UnitIds] = []
        self.columns: Columns | None = None
        self.x_BSH: Tensor | None = None
        self.union_ids: Tensor | None = None
        self.head_rows: Tensor | None = None
        self.finished = False

    def see_ids(self, ids_BT: Tensor) -> None:
        self.unit_ids = [UnitIds.of(ids_BT[unit]) for unit in self.layout.units]
        self.union_ids = union_of(self.unit_ids)

    def offer(self, columns: Columns, x_BSH: Tensor, head_grad_VH: Tensor) -> None:
        """Keep what the cross term needs. Of the head's weighted gradient the rows at the ids that occur are kept,
        so that the norm of the whole gradient is formed from the gradients and not from the Gram that it checks."""
        if self.finished:
            raise GramError("the output head's backward ran after the tied embedding's: their cross term is lost")
        if self.union_ids is not None:
            self.columns, self.x_BSH = columns, x_BSH
            self.head_rows = head_grad_VH[self.union_ids]

    def offer_output_gradients(self, y_BSV: Tensor, x_BSH: Tensor, head_grad_VH: Tensor) -> None:
        """`offer` for a head whose output gradients exist as a tensor: their columns at the unique ids are copied."""
        units = zip(self.layout.units, self.unit_ids, strict=False)
        kept = [y_BSV[unit].index_select(2, ids.ids_U) for unit, ids in units]
        self.offer(lambda unit, low, high: kept[unit][:, :, low:high], x_BSH, head_grad_VH)

    def head_row_gradients(self, unit: int, low: int, high: int) -> Tensor:
        """(R, high - low, H): each row's head gradient at the unit's ids low .. high."""
        assert self.columns is not None and self.x_BSH is not None
        columns_RSu = self.columns(unit, low, high)
        return wide_bmm(columns_RSu.transpose(1, 2), self.x_BSH[self.layout.units[unit]])


class EmbeddingRecorder(Recorder):
    """Weight (V, H) of an embedding; `link` when it is tied to the head."""

    def __init__(self, *args: Any, block_bytes: int, padding_idx: int | None, link: TiedLink | None) -> None:
        super().__init__(*args)
        self.block_bytes = block_bytes
        self.padding_idx = padding_idx
        self.link = link
        self.unit_ids: list[UnitIds] = []

    def see_ids(self, ids_BT: Tensor) -> None:
        """Called at the forward, so that the one wait for the device falls where the host is ahead anyway."""
        if self.link is not None:
            self.link.see_ids(ids_BT)
            self.unit_ids = self.link.unit_ids
        else:
            self.unit_ids = [UnitIds.of(ids_BT[unit]) for unit in self.layout.units]

    def backward(self, gy: Tensor, *saved: Tensor) -> tuple[Tensor, Partial]:
        (ids_BT,) = saved
        if self.padding_idx is not None:
            gy = gy.masked_fill((ids_BT == self.padding_idx)[..., None], 0)
        gy = gy.reshape(self.layout.rows, -1, gy.shape[-1])
        grad = torch.zeros_like(self.parameter, memory_format=torch.contiguous_format)
        grams = [self._unit(index, unit, gy, grad) for index, unit in enumerate(self.layout.units)]
        sq_norm = squared_norm(grad[self._union()])  # it is 0 elsewhere
        if self.link is not None and self.link.head_rows is not None:
            dtype = accumulation_dtype(grad.dtype)
            products = torch.linalg.vecdot(grad[self.link.union_ids].to(dtype), self.link.head_rows.to(dtype))
            sq_norm = sq_norm + 2 * products.sum(dtype=torch.float64)
        if self.link is not None:
            self.link.finished = True
        return grad, Record(torch.cat([self.layout.flat(grams), sq_norm.reshape(1)]))

    def _union(self) -> Tensor:
        """Ids that occur in any unit."""
        if self.link is not None and self.link.union_ids is not None:
            return self.link.union_ids
        return union_of(self.unit_ids)

    def _unit(self, index: int, unit: slice, gy_BTH: Tensor, grad_VH: Tensor) -> Tensor:
        """Gram of one unit, cross term included; adds the unit's weighted gradient to `grad_VH`."""
        ids, gy_RTH = self.unit_ids[index], gy_BTH[unit]
        R, _, H = gy_RTH.shape
        dtype = accumulation_dtype(gy_RTH.dtype)
        weights_R = self.layout.weights(dtype)[unit]
        gram = torch.zeros(R, R, dtype=torch.float64, device=gy_RTH.device)
        step = max(1, self.block_bytes // (R * H * dtype.itemsize))
        U = len(ids.starts) - 1
        for low in range(0, U, step):
            high = min(U, low + step)
            rows_RuH = ids.row_gradients(gy_RTH, low, high)
            flat = rows_RuH.flatten(1)
            total = torch.mv(flat.T, weights_R).view(-1, H)
            grad_VH.index_add_(0, ids.ids_U[low:high], total.to(grad_VH.dtype))
            gram += unit_inner(rows_RuH, rows_RuH)
            if self.link is not None and self.link.columns is not None:
                cross = unit_inner(rows_RuH, self.link.head_row_gradients(index, low, high))
                gram += cross + cross.T
        return gram
