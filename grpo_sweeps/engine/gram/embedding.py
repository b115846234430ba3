"""Token embeddings, and the cross term between an embedding and an output head that share one weight.

A row's embedding gradient is zero but for the ids that occur in it. Ids that several rows of a unit share are laid out
for all of its rows, block by block. Ids of one row, most in practice, are laid out for that row alone: they add to its
norm only.

Tied weight: row i's whole gradient is E_i + H_i (embedding and head), so K_ij also holds <E_i, H_j> + <H_i, E_j>. E_i
lives on the ids that occur; there H_j[v] = sum_s dlogit_j[s, v] x_j[s], a gather of the head's output gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from grpo_sweeps.engine.gram.host import fetched, sent
from grpo_sweeps.engine.gram.layout import GramError, RowLayout, accumulation_dtype, squared_norm, unit_inner, wide_bmm
from grpo_sweeps.engine.gram.recorder import Partial, Record, Recorder

if TYPE_CHECKING:
    from grpo_sweeps.engine.gram.uses import ParameterUse

# columns(unit, low, high) -> (R, S, high - low): output gradients of the unit's rows at its unique ids low .. high
Columns = Callable[[int, int, int], Tensor]


@dataclass(frozen=True)
class UnitIds:
    """Unique ids of one unit and where they occur.

    ids_U: unique ids, the `shared` ones that occur in several rows first. order: positions in the unit's flat (R T)
    ids, in that order of ids; local: their index into ids_U. starts: U + 1 offsets into `order`, on the host.
    """

    ids_U: Tensor
    order: Tensor
    local: Tensor
    starts: list[int]
    shared: int

    @classmethod
    def of(cls, ids_RT: np.ndarray, device: torch.device) -> UnitIds:
        """By numpy: the sizes of what follows are wanted on the host, and torch's own operators there open an OpenMP
        region (see `measurement.Reduction`)."""
        T = ids_RT[0].size
        ids_U, inverse, counts_U = np.unique(ids_RT.reshape(-1), return_inverse=True, return_counts=True)
        position = np.argsort(inverse, kind="stable")
        ends_U = counts_U.cumsum()
        single_U = position[ends_U - counts_U] // T == position[ends_U - 1] // T  # first and last in one row
        by_use = np.argsort(single_U, kind="stable")
        place_U = np.empty_like(by_use)
        place_U[by_use] = np.arange(len(by_use))
        local = place_U[inverse]
        order = np.argsort(local, kind="stable")
        starts = [0, *counts_U[by_use].cumsum().tolist()]
        arrays = ids_U[by_use], order, local[order]
        known_U, order_N, local_N = (sent(torch.from_numpy(array), device) for array in arrays)
        return cls(known_U, order_N, local_N, starts, len(ids_U) - int(single_U.sum()))

    def row_gradients(self, gy_RTH: Tensor, low: int, high: int) -> Tensor:
        """(R, high - low, H): each row's embedding gradient at ids low .. high, in the accumulation dtype."""
        R, T, H = gy_RTH.shape
        position, local = self._occurrences(low, high)
        return self._sum(gy_RTH, position, position // T * (high - low) + local, R * (high - low)).view(R, -1, H)

    def single_gradients(self, gy_RTH: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
        """(high - low, H), the gradient of the one row in which each id occurs, and (high - low,), which row that is;
        low >= shared."""
        position, local = self._occurrences(low, high)
        row_u = torch.empty(high - low, dtype=torch.long, device=position.device)
        return self._sum(gy_RTH, position, local, high - low), row_u.scatter_(0, local, position // gy_RTH.shape[1])

    def _occurrences(self, low: int, high: int) -> tuple[Tensor, Tensor]:
        """The positions where ids low .. high occur, and the indices of these ids from low."""
        chosen = slice(self.starts[low], self.starts[high])
        return self.order[chosen], self.local[chosen] - low

    @staticmethod
    def _sum(gy_RTH: Tensor, position: Tensor, target: Tensor, count: int) -> Tensor:
        H, dtype = gy_RTH.shape[2], accumulation_dtype(gy_RTH.dtype)
        out = torch.zeros(count, H, dtype=dtype, device=gy_RTH.device)
        return out.index_add_(0, target, gy_RTH.reshape(-1, H)[position].to(dtype))


def unit_ids(ids_BT: Tensor, layout: RowLayout) -> list[UnitIds]:
    """The unique ids of each unit, found at the forward. Where the host does not know the ids it waits for the device
    here, where it is ahead anyway."""
    known_BT = fetched(ids_BT)
    return [UnitIds.of(known_BT[unit], ids_BT.device) for unit in layout.units]


def union_of(units: list[UnitIds]) -> Tensor:
    if len(units) == 1:
        return units[0].ids_U
    union = np.unique(np.concatenate([fetched(unit.ids_U) for unit in units]))
    return sent(torch.from_numpy(union), units[0].ids_U.device)


class TiedLink:
    """Holds what the head's backward leaves for the embedding's, which runs later, when both use one weight."""

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self.unit_ids: list[UnitIds] = []
        self.columns: Columns | None = None
        self.x_BSH: Tensor | None = None
        self.union_ids: Tensor | None = None
        self.head_rows: Tensor | None = None
        self.finished = False

    def see_ids(self, ids_BT: Tensor) -> None:
        self.unit_ids = unit_ids(ids_BT, self.layout)
        self.union_ids = union_of(self.unit_ids)

    def offer(self, columns: Columns, x_BSH: Tensor, head_grad_VH: Tensor) -> None:
        """Keep what the cross term needs, with the rows of the head's weighted gradient at the ids that occur: the norm
        of the whole gradient is formed from the gradients and not from the Gram that it checks."""
        if self.finished:
            raise GramError("the output head's backward ran after the tied embedding's: their cross term is lost")
        if self.union_ids is not None:
            self.columns, self.x_BSH = columns, x_BSH
            self.head_rows = head_grad_VH[self.union_ids]

    def offer_output_gradients(self, y_BSV: Tensor, x_BSH: Tensor, head_grad_VH: Tensor) -> None:
        """`offer` for a head whose output gradients exist as a tensor. Their columns at the unique ids are copied."""
        units = zip(self.layout.units, self.unit_ids, strict=False)
        kept = [y_BSV[unit].index_select(2, ids.ids_U) for unit, ids in units]
        self.offer(lambda unit, low, high: kept[unit][:, :, low:high], x_BSH, head_grad_VH)

    def clear(self) -> None:
        """Let go of the head's tensors. Their graph leads to this link by the embedding's node: a cycle into which
        Python's collector cannot see, and which would keep every block's graph for good."""
        self.columns = self.x_BSH = self.head_rows = None

    def head_row_gradients(self, unit: int, low: int, high: int) -> Tensor:
        """(R, high - low, H): each row's head gradient at the unit's ids low .. high."""
        assert self.columns is not None and self.x_BSH is not None
        columns_RSu = self.columns(unit, low, high)
        return wide_bmm(columns_RSu.transpose(1, 2), self.x_BSH[self.layout.units[unit]])


class EmbeddingRecorder(Recorder):
    """Measures the weight (V, H) of an embedding. `link`: where it is tied to the head."""

    def __init__(
        self, use: ParameterUse, layout: RowLayout, block_bytes: int, padding_idx: int | None, link: TiedLink | None
    ) -> None:
        super().__init__(use, layout)
        self.block_bytes = block_bytes
        self.padding_idx = padding_idx
        self.link = link
        self.unit_ids: list[UnitIds] = []

    def drop(self) -> None:
        super().drop()
        if self.link is not None:
            self.link.clear()

    def see_ids(self, ids_BT: Tensor) -> None:
        if self.link is not None:
            self.link.see_ids(ids_BT)
            self.unit_ids = self.link.unit_ids
        else:
            self.unit_ids = unit_ids(ids_BT, self.layout)

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
        """The ids that occur in any unit."""
        if self.link is not None and self.link.union_ids is not None:
            return self.link.union_ids
        return union_of(self.unit_ids)

    def _unit(self, index: int, unit: slice, gy_BTH: Tensor, grad_VH: Tensor) -> Tensor:
        """(R, R) Gram of one unit, cross term included. Adds the unit's weighted gradient to `grad_VH`."""
        ids, gy_RTH = self.unit_ids[index], gy_BTH[unit]
        R, _, H = gy_RTH.shape
        dtype = accumulation_dtype(gy_RTH.dtype)
        weights_R = self.layout.weights(dtype)[unit]
        gram = torch.zeros(R, R, dtype=torch.float64, device=gy_RTH.device)
        U = len(ids.starts) - 1
        link = self.link if self.link is not None and self.link.columns is not None else None
        shared = U if link is not None else ids.shared  # the head's gradient has every id in every row
        for low, high in _blocks(0, shared, self.block_bytes // (R * H * dtype.itemsize)):
            rows_RuH = ids.row_gradients(gy_RTH, low, high)
            total = torch.mv(rows_RuH.flatten(1).T, weights_R).view(-1, H)
            grad_VH.index_add_(0, ids.ids_U[low:high], total.to(grad_VH.dtype))
            gram += unit_inner(rows_RuH, rows_RuH)
            if link is not None:
                cross = unit_inner(rows_RuH, link.head_row_gradients(index, low, high))
                gram += cross + cross.T
        for low, high in _blocks(shared, U, self.block_bytes // (H * dtype.itemsize)):
            rows_uH, row_u = ids.single_gradients(gy_RTH, low, high)
            grad_VH.index_add_(0, ids.ids_U[low:high], (rows_uH * weights_R[row_u, None]).to(grad_VH.dtype))
            in_row_Ru = row_u == torch.arange(R, device=row_u.device)[:, None]
            gram.diagonal().add_(in_row_Ru.double() @ torch.linalg.vecdot(rows_uH, rows_uH).double())
        return gram


def _blocks(low: int, high: int, step: int) -> Iterator[tuple[int, int]]:
    step = max(1, step)
    return ((start, min(high, start + step)) for start in range(low, high, step))
