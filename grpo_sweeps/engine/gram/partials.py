"""What a recorder leaves behind, and the one reduction at the end of a block that makes Grams of it.

Small launches would cost more than the arithmetic, so a recorder keeps what it has at hand and the sums over kernel
programs, and the Grams of all small parameters, are formed once a block, together.

    Record  a finished (flat_size + 1,) float64: the flat Gram, then the squared norm of the weighted sum
    Slots   (programs, width) float64: what each program of a kernel summed, columns as the `SlotPlan` says
    Rows    (B, N) in the accumulation dtype: the rows' gradients of a bias or a norm, whole, and (N,) their weighted
            sum as it was handed out (before rounding): the norm is that of the gradient, not of what the Gram is
            made of, since the two are checked against each other
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from grpo_sweeps.engine.gram.layout import RowLayout, back_to_back

# Rows of one kernel launch: their 136 products and the rows themselves just fit a thread's registers.
MAX_ROWS = 16
# Larger units are cut into tiles of so many rows; 8 x 8 products of two tiles fit as well.
TILE_ROWS = 8
# Room for slots is taken so much at a time.
SLOT_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Launch:
    """One pass over a block: products of the rows of `a` with those of `b`, or with one another where `b` is None.

    column: where its products begin in a slot. Products within `a` are the upper triangle row by row, then the
    squared norm of the weighted sum (0 in all launches but the last of these); with `b` the whole rectangle.
    """

    a: slice
    b: slice | None
    column: int
    width: int


@dataclass
class SlotPlan:
    """The launches for one RowLayout, and where each entry of the flat Gram lies in a slot."""

    launches: list[Launch] = field(default_factory=list)
    width: int = 0
    columns: list[int] = field(default_factory=list)  # (flat_size + 1,) column of each entry, the norm's last
    _free: dict[tuple[int, torch.device], list[Tensor]] = field(default_factory=dict, repr=False)
    _columns_on: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(layout: RowLayout) -> SlotPlan:
        return plan_for(layout.unit_sizes)

    @classmethod
    def build(cls, units: Sequence[slice]) -> SlotPlan:
        plan = cls()
        norm_column = 0
        for unit in units:
            where: dict[tuple[int, int], int] = {}
            tiles = row_tiles(unit)
            for index, a in enumerate(tiles):
                size = a.stop - a.start
                launch = plan._launch(a, None, size * (size + 1) // 2 + 1)
                pairs = [(i, j) for i in range(a.start, a.stop) for j in range(i, a.stop)]
                where |= {pair: launch.column + k for k, pair in enumerate(pairs)}
                norm_column = launch.column + len(pairs)
                for b in tiles[index + 1 :]:
                    launch = plan._launch(a, b, size * (b.stop - b.start))
                    pairs = [(i, j) for i in range(a.start, a.stop) for j in range(b.start, b.stop)]
                    where |= {pair: launch.column + k for k, pair in enumerate(pairs)}
            rows = range(unit.start, unit.stop)
            plan.columns += [where[min(i, j), max(i, j)] for i in rows for j in rows]
        plan.columns.append(norm_column)
        return plan

    def _launch(self, a: slice, b: slice | None, products: int) -> Launch:
        launch = Launch(a, b, self.width, 1 << (products - 1).bit_length())
        self.launches.append(launch)
        self.width += launch.width
        return launch

    def slots(self, programs: int, device: torch.device) -> Tensor:
        """(programs, width) float64, not filled; made many at a time."""
        free = self._free.setdefault((programs, device), [])
        while True:
            try:
                return free.pop()  # not after a look whether it is empty: plans serve all threads
            except IndexError:
                count = max(1, SLOT_BYTES // (programs * self.width * 8))
                free.extend(torch.empty(count, programs, self.width, dtype=torch.float64, device=device).unbind())

    def columns_on(self, device: torch.device) -> Tensor:
        """`columns` as a tensor, copied there once: a copy waits for all that the device has to do."""
        if device not in self._columns_on:
            self._columns_on[device] = torch.tensor(self.columns, device=device)
        return self._columns_on[device]

    def summed(self, slots: Tensor) -> Tensor:
        """(flat_size + 1,) float64: the flat Gram and the norm that lie in the slots of one weight."""
        return slots.sum(0).index_select(0, self.columns_on(slots.device))

    @property
    def diagonal(self) -> list[Launch]:
        """The launches that also add to the weighted sum; every row is in one of them."""
        return [launch for launch in self.launches if launch.b is None]


@functools.lru_cache(maxsize=64)
def plan_for(unit_sizes: tuple[int, ...]) -> SlotPlan:
    """Training meets the same few layouts again and again."""
    return SlotPlan.build(back_to_back(unit_sizes))


def row_tiles(unit: slice) -> list[slice]:
    """A unit's rows, whole where one launch can take them."""
    size = unit.stop - unit.start
    step = size if size <= MAX_ROWS else TILE_ROWS
    return [slice(low, min(unit.stop, low + step)) for low in range(unit.start, unit.stop, step)]


@dataclass(slots=True)
class Record:
    values: Tensor


@dataclass(slots=True)
class Slots:
    values: Tensor


@dataclass(slots=True)
class Rows:
    values: Tensor
    total: Tensor


Partial = Record | Slots | Rows


class Reduction:
    """Records of many partials on their way to the host, in one transfer: nothing waits for them before `read`.

    owners: for each partial the row of the result that it is added to.

    What is left to do on the host is done by numpy. A few of torch's operators there open an OpenMP region for any
    size, which ends when the slowest core has been there: on a shared host that held up steps by 30 to 55 ms.
    """

    def __init__(self, partials: Sequence[Partial], owners: Sequence[int], layout: RowLayout, plan: SlotPlan) -> None:
        groups: dict[tuple[type, torch.Size, torch.dtype], list[int]] = {}
        for index, partial in enumerate(partials):
            groups.setdefault((type(partial), partial.values.shape, partial.values.dtype), []).append(index)
        records: list[Tensor] = []
        for (kind, _, _), members in groups.items():
            stacked = torch.stack([partials[index].values for index in members])
            if kind is Slots:
                stacked = stacked.sum(1).index_select(1, plan.columns_on(stacked.device))
            elif kind is Rows:
                totals = torch.stack([partials[index].total for index in members])  # type: ignore[union-attr]
                stacked = records_of_rows(stacked, totals, layout)
            records.append(stacked)
        found = torch.cat(records)
        self._arrived: torch.cuda.Event | None = None
        if found.is_cuda:
            host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            found = host.copy_(found, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(partials[0].values.device))
        self._found = found
        self._owners = [owners[index] for members in groups.values() for index in members]

    def read(self, rows: int) -> Tensor:
        """(rows, flat_size + 1) float64 on the host; zeros for who owns nothing."""
        if self._arrived is not None:
            self._arrived.synchronize()
        records = np.zeros((rows, self._found.shape[1]))
        np.add.at(records, self._owners, self._found.numpy())
        return torch.from_numpy(records)


def records_of_rows(rows_PBN: Tensor, totals_PN: Tensor, layout: RowLayout) -> Tensor:
    """(P, flat_size + 1) of P parameters whose rows' gradients are known whole, in float64."""
    rows = rows_PBN.double()
    grams = [torch.bmm(rows[:, unit], rows[:, unit].transpose(1, 2)).flatten(1) for unit in layout.units]
    return torch.cat([*grams, totals_PN.double().square().sum(1, keepdim=True)], dim=1)
