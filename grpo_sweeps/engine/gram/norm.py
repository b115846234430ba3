"""Norm layers. Two ways, by what the module's arithmetic allows:

- RMSNorm classes multiply by `self.weight` with broadcasting, so they are run with one weight a row, (B, 1, ..., H):
  autograd itself then returns the rows' gradients, whatever the class does between (casts, 1 + weight).
  `takes_row_weights` tries it.
- F.layer_norm and F.rms_norm take no weight a row: a row's gradient is sum_t gy * normalised(x), formed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from grpo_sweeps.engine.gram.layout import accumulation_dtype
from grpo_sweeps.engine.gram.recorder import Recorder

Normalise = Callable[[Tensor, tuple[int, ...], float | None], Tensor]


class Stand:
    """Stands in for `module` as the `self` of its own forward, with some attributes replaced (parameters, mostly)."""

    def __init__(self, module: nn.Module, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def run_with(module: nn.Module, parameters: dict[str, Tensor | None], *args: Any, **kwargs: Any) -> Tensor:
    """The module's own forward on other parameters."""
    return type(module).forward(Stand(module, **parameters), *args, **kwargs)


def row_shape(rows: int, x_dim: int, H: int) -> tuple[int, ...]:
    return (rows, *(1 for _ in range(x_dim - 2)), H)


def takes_row_weights(module: nn.Module, name: str = "weight") -> bool:
    """Try on four numbers a row: is the output of a row, with its own weight, that of the module with this weight?"""
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
    """weight (H,) -> (B, 1, ..., H); the backward takes the rows' gradients apart."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, leaf: Tensor, recorder: Recorder, shape: tuple[int, ...]) -> Tensor:
        ctx.recorder = recorder
        return weight.expand(shape).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor) -> tuple[Tensor | None, ...]:
        grad, record = ctx.recorder.run_backward(rows)
        return grad, record, None, None


class RowWeightRecorder(Recorder):
    """A norm's weight handed out once a row."""

    def row_weights(self, x_dim: int) -> Tensor:
        shape = row_shape(self.layout.rows, x_dim, self.parameter.shape[0])
        return RowWeights.apply(self.parameter, self.leaf, self, shape)

    def backward(self, gy: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor]:
        rows = gy.reshape(self.layout.rows, -1)
        return self.from_rows(rows.to(accumulation_dtype(rows.dtype)))


def normalise_layer(x: Tensor, shape: tuple[int, ...], eps: float | None) -> Tensor:
    return F.layer_norm(x, shape, None, None, 1e-5 if eps is None else eps)


def normalise_rms(x: Tensor, shape: tuple[int, ...], eps: float | None) -> Tensor:
    return F.rms_norm(x, shape, None, eps)


class NormScaleRecorder(Recorder):
    """Weight of a layer norm (also of layer norm with weight + 1, which has the same gradient) or of torch's
    RMSNorm."""

    def __init__(self, *args: Any, normalise: Normalise, shape: tuple[int, ...], eps: float | None) -> None:
        super().__init__(*args)
        self.normalise = normalise
        self.shape = shape
        self.eps = eps

    def backward(self, gy: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = saved
        dtype = accumulation_dtype(x.dtype)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        scaled = self.normalise(x.to(dtype), self.shape, eps).mul_(gy)
        return self.from_rows(scaled.reshape(self.layout.rows, -1, self.shape[-1]).sum(1))
