"""Norm layers. Two ways, by what the module's arithmetic allows:

- RMSNorm classes multiply by `self.weight` with broadcasting, so they run with one weight per row, (B, 1, ..., H):
  autograd itself then returns the rows' gradients, whatever the class does in between (casts, 1 + weight).
  `takes_row_weights` tries whether it does.
- F.layer_norm and F.rms_norm take no weight per row: a row's gradient is sum_t gy * normalised(x), formed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo_sweeps.engine.gram.layout import HALF_TYPES, RowLayout, accumulation_dtype
from grpo_sweeps.engine.gram.linear import kernels
from grpo_sweeps.engine.gram.recorder import BiasRecorder, Formed, Recorder, refuse_graph
from grpo_sweeps.engine.gram.torch_private import direct, parameters_of

if TYPE_CHECKING:
    from grpo_sweeps.engine.gram.delivery import Delivery
    from grpo_sweeps.engine.gram.uses import ParameterUse


def run_with(module: nn.Module, parameters: dict[str, Tensor | None], x: Tensor) -> Tensor:
    """The output of the module's own forward on other parameters."""
    own = parameters_of(module)
    kept = own.copy()
    own.update(parameters)
    try:
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    finally:
        own.update(kept)


def row_shape(rows: int, x_dim: int, H: int) -> tuple[int, ...]:
    """(rows, 1, ..., H): the shape of one weight per row for an input of `x_dim` dimensions."""
    return (rows, *(1 for _ in range(x_dim - 2)), H)


def takes_row_weights(module: nn.Module, name: str = "weight") -> bool:
    """Whether the module, given one weight per row, makes of each row what it makes with that row's weight alone. Tried
    on two rows of two tokens."""
    weight = getattr(module, name).detach()
    if weight.dim() != 1:
        return False
    H = weight.shape[0]
    x = torch.linspace(-1.0, 2.0, 2 * 2 * H, device=weight.device).to(weight.dtype).view(2, 2, H)
    weights = [weight + 0.5, weight * 2 - 0.25]
    rows = torch.stack(weights).view(2, 1, H)
    with torch.no_grad():
        try:
            together = run_with(module, {name: rows}, x)
            apart = torch.cat([run_with(module, {name: w}, x[row : row + 1]) for row, w in enumerate(weights)])
        except (RuntimeError, TypeError, ValueError):
            return False
    return together.shape == apart.shape and torch.equal(together, apart)


class RowWeights(torch.autograd.Function):
    """weight (H,) -> (B, 1, ..., H). The backward gets the rows' gradients apart."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, recorder: Recorder, shape: tuple[int, ...]) -> Tensor:
        ctx.recorder = recorder
        return weight.expand(shape)

    @staticmethod
    def backward(ctx: Any, rows: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph()
        return ctx.recorder.run_backward(rows), None, None


class RowWeightRecorder(Recorder):
    """Measures a norm's weight that is handed out once per row."""

    def row_weights(self, x_dim: int, delivery: Delivery | None) -> Tensor:
        """The weight once per row, for an input of `x_dim` dimensions."""
        shape = row_shape(self.layout.rows, x_dim, self.parameter.shape[0])
        self.delivery = delivery
        if delivery is None:
            return direct(RowWeights, self.parameter, self, shape)
        rows = self.parameter.detach().expand(shape).requires_grad_()
        rows.register_post_accumulate_grad_hook(self.take_rows)
        return rows

    def take_rows(self, rows: Tensor) -> None:
        """Take the rows' gradients from the leaf that the module worked on."""
        refuse_graph()
        grad, rows.grad = rows.grad, None
        if grad is not None and self.delivery is not None:
            self.delivery.arrive(None, self.recomputed)  # a leaf: it is the end
            self.run_backward(grad)

    def backward(self, gy: Tensor, *saved: Tensor) -> Formed:
        return self.from_rows(gy.reshape(self.layout.rows, -1))


class NormScaleRecorder(Recorder):
    """Measures the weight of a layer norm (also with weight + 1, which has the same gradient) or of torch's RMSNorm."""

    def __init__(self, use: ParameterUse, layout: RowLayout, centred: bool, eps: float | None) -> None:
        super().__init__(use, layout)
        self.centred = centred
        self.eps = eps
        self.with_bias = False  # True: the bias is measured too, and its rows' gradients are made here
        self.for_bias: Tensor | None = None  # (B, N), its rows' gradients

    def backward(self, gy: Tensor, *saved: Tensor) -> Formed:
        (x,) = saved
        rows, H = self.layout.rows, x.shape[-1]
        x_BTH, gy_BTH = x.reshape(rows, -1, H), gy.reshape(rows, -1, H)
        if takes_norm_kernel(x):
            return self.by_kernel(x_BTH, gy_BTH)
        shape = (H,)
        wide = x_BTH.to(accumulation_dtype(x.dtype))
        if self.centred:
            scaled = F.layer_norm(wide, shape, None, None, self.epsilon(x)).mul_(gy_BTH)
        else:
            scaled = F.rms_norm(wide, shape, None, self.epsilon(x)).mul_(gy_BTH)
        return self.from_rows(scaled.sum(1))

    def by_kernel(self, x_BTH: Tensor, gy_BTH: Tensor) -> Formed:
        kernel: Any = kernels("norm_rows")
        rows = kernel.add_rows(x_BTH, gy_BTH, self.epsilon(x_BTH), self.centred, self.with_bias)
        if not self.with_bias:
            return self.from_rows(rows)
        self.for_bias = rows[:, 1]
        return self.from_rows(rows[:, 0])

    def epsilon(self, x: Tensor) -> float:
        """The eps of the norm. torch's RMSNorm without one takes the machine epsilon of its input."""
        return torch.finfo(x.dtype).eps if self.eps is None else self.eps


class NormBiasRecorder(BiasRecorder):
    """Measures the bias of a norm whose weight is measured as well, by the same kernel where there is one."""

    def __init__(self, use: ParameterUse, layout: RowLayout, weight: NormScaleRecorder) -> None:
        super().__init__(use, layout)
        self.weight = weight
        weight.with_bias = True

    def backward(self, gy: Tensor, *saved: Tensor) -> Formed:
        rows, self.weight.for_bias = self.weight.for_bias, None
        return super().backward(gy, *saved) if rows is None else self.from_rows(rows)


def takes_norm_kernel(x: Tensor) -> bool:
    """Whether the Triton kernel measures a norm of this input."""
    fits = x.is_cuda and x.dtype in (torch.float32, *HALF_TYPES)
    module: Any = kernels("norm_rows") if fits else None
    return module is not None and x.shape[-1] <= module.MAX_WIDTH
