"""A linear layer as one autograd function: the same product forward, the input's gradient and the recorders' in one
node. On a GPU the host would else spend longer on the nodes around a small product than the card on the product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_sweeps.engine.gram.recorder import Uses, direct, refuse_graph


class LinearProduct(torch.autograd.Function):
    """x (B, T, ..., i), weight (o, i), bias (o,) or None -> F.linear; `parameters` are those of the recorders."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, uses: Uses, made: bool, *parameters: Tensor
    ) -> Tensor:
        ctx.uses = uses
        ctx.save_for_backward(x, weight)
        y = F.linear(x, weight, bias) if made else unmade(x, weight.shape[0])
        # With a bias it may be a view, which an activation in place would not be allowed to change.
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph()
        x, weight = ctx.saved_tensors
        gradients = [recorder.run_backward(gy, x) for recorder in ctx.uses.recorders]
        gx = torch.mm(gy.reshape(-1, gy.shape[-1]), weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return (gx, None, None, None, None, *gradients)


def unmade(x: Tensor, o: int) -> Tensor:
    """(..., o) in place of what nobody reads: its values are whatever the memory holds."""
    return x.new_empty(*x.shape[:-1], o)


class Unmade(Tensor):
    """A product that was not made. Added to the residual stream, the last thing that a layer does, it gives a tensor
    that nobody reads either, so the addition is left out as well."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function in ADDITIONS and len(args) == 2 and not kwargs and args[0].shape == args[1].shape:
                return direct(UnmadeSum, *args)
            return function(*args, **(kwargs or {}))


ADDITIONS = {Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add}


class UnmadeSum(torch.autograd.Function):
    """The gradients of left + right, and its shape."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        return unmade(left, left.shape[-1])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        refuse_graph()
        return g, g
