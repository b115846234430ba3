"""What one claimed parameter keeps during one block: `Recorder`, and `Tap`, the autograd function that feeds it.

A claimed module runs its own forward on detached parameters (so its output is the plain one, bit for bit, and the
gradient of its input comes from autograd's own kernels). `Tap` hands that output on unchanged; in the backward it
forms the parameter's gradient, and with it the Gram of the rows' gradients. The Gram leaves as the gradient of a
small float64 leaf: no hooks and no side effects, so non-reentrant checkpointing, which recomputes forwards but runs
each backward once, is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from grpo_sweeps.engine.gram.layout import GramError, RowLayout, accumulation_dtype, squared_norm


class Workspace:
    """One buffer a dtype, grown to the largest block and kept between blocks: fresh pages would cost more than the
    products."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def get(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        numel = int(torch.Size(shape).numel())
        buffer = self._buffers.get((dtype, device))
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[dtype, device] = torch.empty(numel, dtype=dtype, device=device)
        return buffer[:numel].view(shape)


class Recorder:
    """One use of one parameter in one block.

    `leaf` is (flat_size + 1,) float64: the flat Gram, then the squared norm of the weighted sum that went to `.grad`.
    A subclass says how the rows' gradients follow from the output gradient: `backward(gy, *saved) -> (grad, record)`.
    """

    def __init__(self, name: str, module_name: str, parameter: nn.Parameter, layout: RowLayout, leaf: Tensor) -> None:
        self.name = name
        self.module_name = module_name
        self.parameter = parameter
        self.layout = layout
        self.leaf = leaf
        self.calls = 0
        self.backwards = 0
        self.closed = False

    def begin(self, first_dim: int) -> None:
        """Count a forward that will be differentiated. A recomputation (inside a backward) is no new forward."""
        if first_dim != self.layout.rows:
            raise GramError(
                f"module {self.module_name}: its input has {first_dim} rows in dimension 0, but group_sizes make "
                f"{self.layout.rows}; "
                "packed rows (1, sum T) and ids of shape (1, T) are refused: every module must see one row a rollout"
            )
        if torch._C._current_graph_task_id() != -1:
            return
        self.calls += 1
        if self.calls > 1:
            raise GramError(
                f"module {self.module_name} was called {self.calls} times in one block: the products between the "
                "calls are not "
                f"measured (parameter {self.name}). One block takes one forward and one backward; shared modules "
                "are refused"
            )

    def tap(self, y: Tensor, *saved: Tensor) -> Tensor:
        return Tap.apply(y, self.parameter, self.leaf, self, *saved)

    def run_backward(self, gy: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor]:
        self.begin_backward()
        return self.backward(gy, *saved)

    def begin_backward(self) -> None:
        if self.closed:
            raise GramError(f"parameter {self.name}: the backward must run inside the measure() block")
        self.backwards += 1
        if self.backwards > 1:
            raise GramError(f"parameter {self.name} (module {self.module_name}) met a second backward in one block")

    def backward(self, gy: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(type(self).__name__)

    def record(self, gram_flat: Tensor, sq_norm: Tensor) -> Tensor:
        return torch.cat([gram_flat, sq_norm.reshape(1)])

    def from_rows(self, rows_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient and record of a small parameter from its rows' gradients, formed whole (biases and norms)."""
        total = self.layout.weighted_sum(rows_BN)
        record = self.record(self.layout.inner(rows_BN[:, None]), squared_norm(total[None]))
        return total.to(self.parameter.dtype).view_as(self.parameter), record


class Tap(torch.autograd.Function):
    """Identity on y; its backward gives the parameter its weighted gradient and the leaf its record."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, parameter: Tensor, leaf: Tensor, recorder: Recorder, *saved: Tensor) -> Tensor:
        ctx.recorder = recorder
        ctx.save_for_backward(*saved)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grad, record = ctx.recorder.run_backward(gy, *saved)
        return (gy, grad, record, None, *(None for _ in saved))


class BiasRecorder(Recorder):
    """Bias of a linear map: a row's gradient is the sum of its output gradients over everything but the last
    dimension."""

    def backward(self, gy: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.layout.rows
        return self.from_rows(gy.reshape(rows, -1, gy.shape[-1]).sum(1, dtype=accumulation_dtype(gy.dtype)))
