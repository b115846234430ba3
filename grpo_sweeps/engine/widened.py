"""A model's parameters in float32 for a while, at the same names and in the same modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """The model computes in float32 inside, on the values that its parameters have; afterwards it is as it was.

    Every half-type parameter gets its values in float32, exactly, and its own tensor back at the end, so that nothing
    that holds on to the parameters (an optimiser, a captured graph) sees a change. Takes 4 bytes per parameter; buffers
    keep their dtype, and gradients are set aside.
    """
    kept = [(p, p.data, p.grad) for p in model.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    try:
        for parameter, values, _ in kept:
            parameter.grad = None
            parameter.data = values.float()
        yield
    finally:
        for parameter, values, grad in kept:
            parameter.grad = None
            parameter.data = values
            parameter.grad = grad
