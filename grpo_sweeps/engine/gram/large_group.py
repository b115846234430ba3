"""A group larger than a micro-batch, exactly: its parts run one after the other, their products are formed at the end.

Each part is an ordinary measured block, which adds its weighted gradient to `.grad` and has its Gram. It does not have
the products between rows of different parts. For them every claimed module's input x (m, T, i) and output gradient
y (m, T, o) are kept. When the group closes they are brought together parameter by parameter and measured as one block
of all rows, by the same forms, and the gradient that this makes is thrown away.

Cost. Kept: for every token of the group and every linear layer, i + o numbers of the model's dtype (an input that
several layers share once; norms and biases their rows' gradients, R x N), on the device as far as its room goes and
else in host memory. A model of Qwen2.5-0.5B's shape in bf16 keeps 1.0 MB per token: 32 GB for 64 rows of 512 tokens,
which fit a card of 80 GB; a trip to the host and back costs more than the backward. The blockwise head keeps hidden
states instead of y, and forms the logits once more; a head through `model(...).logits` keeps y, T x V numbers per
row. Time: every weight's rows are multiplied once more, a third of a forward and backward, on top of what measuring
costs in one block. On 2 CPU cores, 16 rows of 128 tokens in parts of 4, a Llama 256 wide with 4 layers, float32: 0.64 s
where the group at once takes 0.44 s and a plain step 0.36 s; 125 MB are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_sweeps.engine.device_memory import free_bytes
from grpo_sweeps.engine.gram.embedding import EmbeddingRecorder
from grpo_sweeps.engine.gram.layout import GramError, RowLayout
from grpo_sweeps.engine.gram.linear import GramOptions
from grpo_sweeps.engine.gram.measurement import GramCheckError, Measurement, tolerance_of, widest_eps
from grpo_sweeps.engine.gram.patch import MeasuredModules, Recorders
from grpo_sweeps.engine.gram.recorder import Partial, Recorder, Rows
from grpo_sweeps.engine.gram.torch_private import version_of
from grpo_sweeps.engine.gram.uses import ParameterUse

# again(recorder of all rows, *operands) -> partial
Again = Callable[..., Partial]
OpenBlock = Callable[..., AbstractContextManager[Measurement]]


def room_for(device: torch.device) -> int:
    """Bytes to keep on the device by default: half of what is free there. The rest is for the next part."""
    if device.type != "cuda":
        return 0
    return free_bytes(device) // 2


@dataclass(frozen=True)
class Kept:
    """Tensors that one use of a parameter left in one part, with the part's rows first, and how to measure them.

    `again` is None where the tensors are a `Rows` partial, the rows' gradients and their sum.
    """

    rows: slice
    tensors: tuple[Tensor, ...]
    again: Again | None


def backward_again(recorder: Recorder, gy: Tensor, *saved: Tensor) -> Partial:
    """What the recorder's backward leaves for the Gram, without the gradient."""
    partial = recorder.backward(gy, *saved)[1]
    assert partial is not None  # nothing of a large group is delivered later
    return partial


class Store:
    """The operands of all parts, by (parameter, module). `room` bytes of them may stay on the device.

    A tensor that stays is not copied: autograd adds in place only to what nobody else holds.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.bytes = 0
        self.rows = slice(0, 0)
        self._kept: dict[tuple[str, str], list[Kept]] = {}
        self._last: dict[int, tuple[Tensor, Tensor]] = {}

    def add(
        self, recorder: Recorder, partial: Partial, operands: tuple[Tensor, ...], again: Again | None = None
    ) -> None:
        if isinstance(partial, Rows):
            total = partial.total.clone()  # it may be `.grad` by now, to which the next parts add
            kept = Kept(self.rows, (partial.values, total), None)
        else:
            placed = tuple(self._put(index, operand) for index, operand in enumerate(operands))
            kept = Kept(self.rows, placed, again or backward_again)
        self._kept.setdefault((recorder.name, recorder.module_name), []).append(kept)

    def _put(self, index: int, tensor: Tensor) -> Tensor:
        """The tensor in its place. The last one at this index is recognised: layers side by side share their input."""
        last = self._last.get(index)
        if last is not None and same(tensor, last[0]):
            return last[1]
        size = tensor.numel() * tensor.element_size()
        self.bytes += size
        stays = tensor.device.type == "cpu" or size <= self.room
        self.room -= size if stays else 0
        placed = tensor.detach() if stays else tensor.detach().to("cpu")
        self._last[index] = (tensor, placed)
        return placed

    def take(self, recorder: Recorder) -> list[Kept]:
        """What one use of a parameter left, handed over so that its memory is free once it is measured."""
        self._last.clear()
        return self._kept.pop((recorder.name, recorder.module_name), [])

    def clear(self) -> None:
        self._kept, self._last = {}, {}


def same(a: Tensor, b: Tensor) -> bool:
    """Whether both are the same numbers in the same memory."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())


def together(parts: list[Tensor], rows: list[slice], size: int, device: torch.device) -> Tensor:
    """One tensor of `size` rows from those of the parts. Shorter rows, and rows of no part, are filled up with 0."""
    shape = [max(lengths) for lengths in zip(*(part.shape[1:] for part in parts), strict=True)]
    if len(parts) == 1 and len(parts[0]) == size:
        return parts[0].to(device)
    whole = torch.zeros(size, *shape, dtype=parts[0].dtype, device=device)
    for part, where in zip(parts, rows, strict=True):
        whole[(where, *(slice(0, length) for length in part.shape[1:]))].copy_(part)
    return whole


class LargeGroup(Measurement):
    """The group that `GradientGram.measure_group` opens. Once closed it is read and checked like a `Measurement`."""

    def __init__(
        self,
        uses: list[ParameterUse],
        modules: MeasuredModules,
        layout: RowLayout,
        model_dtype: torch.dtype,
        options: GramOptions,
        open_block: OpenBlock,
        room: int,
    ) -> None:
        super().__init__(uses, layout, model_dtype)
        self.parts: list[tuple[slice, Measurement]] = []
        self._modules, self._options, self._open_block = modules, options, open_block
        self._store = Store(room)
        self._versions = self._parameter_versions()
        self._device = layout.weights_B.device

    @contextmanager
    def part(self, rows: int) -> Iterator[Measurement]:
        """Open a block for the next `rows` rows of the group, as `GradientGram.measure` does."""
        start = self.parts[-1][0].stop if self.parts else 0
        where = slice(start, start + rows)
        if rows < 1 or where.stop > self.layout.rows:
            raise GramError(f"part({rows}): {self.layout.rows - start} of the group's {self.layout.rows} rows are left")
        self._store.rows = where
        with self._open_block(RowLayout((rows,), self.layout.weights_B[where]), self._store) as measurement:
            yield measurement
        if not measurement.measured:
            raise GramError(
                f"rows {where.start} to {where.stop - 1} of the group were not measured: "
                "row_sums.sum().backward() must run in their part"
            )
        self.parts.append((where, measurement))

    def close(self) -> None:
        """Measure all rows together from what the parts kept. Raises GramError where rows are missing or a parameter
        changed."""
        seen = self.parts[-1][0].stop if self.parts else 0
        if seen != self.layout.rows:
            raise GramError(f"the parts hold {seen} rows, but the group was opened with {self.layout.rows}")
        if self._parameter_versions() != self._versions:
            raise GramError("a parameter changed while the group was open: its parts are of different models")
        recorders = Recorders(self._modules, self.layout, self.plan, self._options).every()
        with torch.no_grad():
            self._measure(recorders)
        self._finish(recorders)

    def _measure(self, recorders: list[Recorder]) -> None:
        """Measure heads before embeddings: a tied embedding's cross term needs the head's output gradients."""
        embeddings = [recorder for recorder in recorders if isinstance(recorder, EmbeddingRecorder)]
        operands = {id(embedding): self._operands(self._store.take(embedding)) for embedding in embeddings}
        for embedding in embeddings:
            if operands[id(embedding)]:
                embedding.see_ids(operands[id(embedding)][1])
        for recorder in recorders:
            if isinstance(recorder, EmbeddingRecorder):
                continue
            kept = self._store.take(recorder)
            if kept:
                recorder.partial = self._partial(recorder, kept)
        for embedding in embeddings:
            if operands[id(embedding)]:
                embedding.partial = backward_again(embedding, *operands[id(embedding)])

    def _partial(self, recorder: Recorder, kept: list[Kept]) -> Partial:
        again = kept[0].again
        if again is None:
            rows = together([k.tensors[0] for k in kept], [k.rows for k in kept], self.layout.rows, self._device)
            return Rows(rows, torch.stack([k.tensors[1] for k in kept]).sum(0))
        return again(recorder, *self._operands(kept))

    def _operands(self, kept: list[Kept]) -> list[Tensor]:
        rows = [k.rows for k in kept]
        columns: Any = zip(*(k.tensors for k in kept), strict=True)
        return [together(list(column), rows, self.layout.rows, self._device) for column in columns]

    def drop(self) -> None:
        self._store.clear()

    def _parameter_versions(self) -> list[int]:
        return [version_of(parameter) for parameter in self._parameters.values()]

    def check(self, tol: float | None = None) -> float:
        """The largest relative miss of `Measurement.check` for every part (against what it added to `.grad`) and for
        the whole, and of the parts' Grams against the blocks of the whole, within 2 tol |psi_i| |psi_j|: both may miss
        by tol. Raises GramCheckError with the numbers."""
        tol = tolerance_of(widest_eps(self._parameters.values())) if tol is None else tol
        worst = max([super().check(tol), *(part.check(tol) for _, part in self.parts)])
        gram = self.matrix()
        norms = gram.diagonal().clamp_min(0).sqrt()
        for rows, part in self.parts:
            scale = torch.outer(norms[rows], norms[rows]).clamp_min(torch.finfo(torch.float64).tiny)
            miss = float(((gram[rows, rows] - part.matrix()).abs() / scale).max())
            if not miss <= 2 * tol:
                raise GramCheckError(
                    f"rows {rows.start} to {rows.stop - 1}: their Gram differs from the whole group's by {miss:.3g} of "
                    f"|psi_i| |psi_j|, allowed are {2 * tol:.1g}"
                )
            worst = max(worst, miss)
        return worst
