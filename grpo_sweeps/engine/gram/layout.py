"""How the rows of a block fall into groups and into a kernel's launches, and the sums over rows that parameters need.

A *unit* is a set of rows whose mutual inner products are wanted: one group, or all rows of the block when the
cross-group products are asked for. Grams travel as one flat float64 vector, the units' R x R matrices back to back,
so that a block of unequal groups costs no more than it must. Kernels leave the entries of that vector in *slots*, in
the order that a `SlotPlan` tells.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

HALF_TYPES = (torch.float16, torch.bfloat16)


class GramError(RuntimeError):
    """The Gram cannot be measured: the message names the parameter, module or argument that is at fault."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums within a block: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Batched a @ b with the result, not only the sum, in the accumulation dtype (half types would round it to 8
    bits)."""
    if a.dtype not in HALF_TYPES:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with the result in the accumulation dtype."""
    return wide_bmm(a[None], b[None])[0]


def reduced_float32() -> bool:
    """True when float32 matrix products on CUDA would be rounded to TF32."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        return bool(matmul.fp32_precision == "tf32")
    return bool(matmul.allow_tf32)


@dataclass(frozen=True)
class RowLayout:
    """Rows in order, groups back to back. `weights_B` is float64 on the model's device."""

    group_sizes: tuple[int, ...]
    weights_B: Tensor
    cross_groups: bool = False
    _weights: dict[torch.dtype, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        group_sizes: Sequence[int],
        weights: Sequence[float] | Tensor | None,
        cross_groups: bool,
        device: torch.device,
    ) -> RowLayout:
        """Check sizes and weights. Raises GramError naming the argument."""
        sizes = tuple(int(size) for size in group_sizes)
        if not sizes or min(sizes) < 1:
            raise GramError(f"group_sizes={list(group_sizes)}: one positive number of rows per group is needed")
        rows = sum(sizes)
        given = torch.ones(rows) if weights is None else torch.as_tensor(weights).detach()
        if given.shape != (rows,):
            raise GramError(
                f"weights has shape {tuple(given.shape)}, but group_sizes={list(sizes)} make {rows} rows: one "
                "weight per row"
            )
        if not given.is_cuda and not bool(torch.isfinite(given).all()):
            raise GramError(f"weights={given.tolist()}: every weight must be finite")
        # A copy: the caller may change what was given before the results are read.
        return cls(sizes, given.to(device=device, dtype=torch.float64, copy=True), bool(cross_groups))

    @functools.cached_property
    def rows(self) -> int:
        return sum(self.group_sizes)

    @functools.cached_property
    def unit_sizes(self) -> tuple[int, ...]:
        return (self.rows,) if self.cross_groups else self.group_sizes

    @functools.cached_property
    def units(self) -> list[slice]:
        """The rows of each unit."""
        return back_to_back(self.unit_sizes)

    def flat(self, grams: Sequence[Tensor]) -> Tensor:
        """Unit Grams as one float64 vector (flat_size,): as many entries as the units' squared sizes add up to."""
        return torch.cat([gram.reshape(-1) for gram in grams]).to(torch.float64)

    def unflat(self, flat: Tensor) -> list[Tensor]:
        """The units' (R, R) matrices of a vector that `flat` made, each exactly symmetric (rounding is not)."""
        parts = flat.split([size * size for size in self.unit_sizes])
        grams = [part.view(size, size) for part, size in zip(parts, self.unit_sizes, strict=True)]
        return [(gram + gram.T) / 2 for gram in grams]

    def inner(self, left_Bmn: Tensor, right_Bmn: Tensor | None = None) -> Tensor:
        """Inner products of the rows of each unit, (flat_size,) float64; `right` defaults to `left`."""
        right_Bmn = left_Bmn if right_Bmn is None else right_Bmn
        return self.flat([unit_inner(left_Bmn[unit], right_Bmn[unit]) for unit in self.units])

    def weights(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._weights:
            self._weights[dtype] = self.weights_B.to(dtype)
        return self._weights[dtype]

    def weighted_sum(self, rows_BN: Tensor, out: Tensor | None = None) -> Tensor:
        """sum_i w_i rows_i, (N,), in the accumulation dtype (`out` only where that is the dtype of the rows)."""
        return weighted_sum(self.weights(accumulation_dtype(rows_BN.dtype)), rows_BN, out)


def back_to_back(sizes: Sequence[int]) -> list[slice]:
    """The slices of runs of these lengths, each of which follows the one before."""
    return [slice(stop - size, stop) for stop, size in zip(itertools.accumulate(sizes), sizes, strict=True)]


def unit_inner(left_Rmn: Tensor, right_Rmn: Tensor) -> Tensor:
    """(R, R) float64 inner products: float32 (float64) within each of the m slices, float64 across them.

    Slices keep the float32 sums short (1e-8 instead of 5e-7 on 65,536 elements, at the same speed), and on CUDA they
    are the parallelism: one 8 x N by N x 8 product would fill a single multiprocessor.
    """
    return wide_bmm(left_Rmn.transpose(0, 1), right_Rmn.permute(1, 2, 0)).sum(0, dtype=torch.float64)


def squared_norm(matrix: Tensor) -> Tensor:
    """Squared Frobenius norm of an (m, n) matrix, () float64: accumulation dtype within a row, float64 across rows."""
    norms = torch.linalg.vector_norm(matrix, dim=1, dtype=accumulation_dtype(matrix.dtype))
    return norms.to(torch.float64).square().sum()


def weighted_sum(weights_B: Tensor, rows_BN: Tensor, out: Tensor | None = None) -> Tensor:
    """weights @ rows, (N,). The weights are float32 for half-type rows too: rounded to 8 bits they would miss the norm
    check.

    On CUDA the weight is split into a high and a low half-type part, whose products with the rows are exact in float32.
    """
    if rows_BN.dtype not in HALF_TYPES:
        return torch.mv(rows_BN.T, weights_B, out=out)
    if not rows_BN.is_cuda:
        return torch.mv(rows_BN.float().T, weights_B)
    high = weights_B.to(rows_BN.dtype)
    low = (weights_B - high.float()).to(rows_BN.dtype)
    return wide_mm(torch.stack([high, low]), rows_BN).sum(0)


# Rows of one kernel launch: their 136 products and the rows themselves just fit into a thread's registers.
MAX_ROWS = 16
# Rows of one tile of a larger unit: the 8 x 8 products of two tiles fit as well.
TILE_ROWS = 8
# Memory for slots is taken in pieces of this size.
SLOT_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Launch:
    """One pass over a block: products of the rows of `a` with those of `b`, or with one another where `b` is None.

    column: where its products begin in a slot. Products within `a` are the upper triangle row by row, then the squared
    norm of the weighted sum (0 in all but the last of these launches); with `b` they are the whole rectangle.
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
        """(programs, width) float64, not filled. Many are made at a time."""
        free = self._free.setdefault((programs, device), [])
        while True:
            try:
                return free.pop()  # without a look whether it is empty: plans serve all threads
            except IndexError:
                count = max(1, SLOT_BYTES // (programs * self.width * 8))
                free.extend(torch.empty(count, programs, self.width, dtype=torch.float64, device=device).unbind())

    def columns_on(self, device: torch.device) -> Tensor:
        """`columns` as a tensor on the device, copied once: a copy waits for all that the device has to do."""
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
    """The plan for units of these sizes, kept: training meets the same few layouts again and again."""
    return SlotPlan.build(back_to_back(unit_sizes))


def row_tiles(unit: slice) -> list[slice]:
    """The unit's rows in tiles, in one where one launch can take them all."""
    size = unit.stop - unit.start
    step = size if size <= MAX_ROWS else TILE_ROWS
    return [slice(low, min(unit.stop, low + step)) for low in range(unit.start, unit.stop, step)]
