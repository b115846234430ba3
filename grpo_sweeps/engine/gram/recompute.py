"""Checkpointed layers inside a block, recomputed in the way that costs the host least.

Non-reentrant checkpointing calls Python for every tensor that a layer keeps, twice, and meets the measured modules'
own Python both in the forward and in the recomputation. Reentrant checkpointing runs the forward without gradients,
which needs none of it, and gives the same numbers: its known restrictions (an input that requires gradients, no
`torch.autograd.grad`) hold for a block's one backward anyway. So for the time of a block the layers' checkpoint
function is exchanged, where it is transformers' own.

One thing non-reentrant checkpointing does better: it stops a recomputation at the last tensor kept, so that the last
product of a layer is not made again. The first block runs as the user set it, and shows at which modules that happens
(`ends`); later ones leave those products out by themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAIN_OPTIONS = {"use_reentrant", "preserve_rng_state"}


class Recompute:
    """The layers of one model that recompute themselves; found once, looked at before every block."""

    def __init__(self, model: nn.Module) -> None:
        layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self.layers = [(layer, dropout_places(layer)) for layer in layers]

    def exchangeable(self) -> list[tuple[nn.Module, bool]]:
        """Layers that would recompute by torch's non-reentrant checkpointing with no more than its plain options, and
        whether the state of the random numbers must be kept for them."""
        return [(layer, draws(places)) for layer, places in self.layers if _exchangeable(layer)]


def _exchangeable(module: nn.Module) -> bool:
    own = module.__dict__
    function = own.get("_gradient_checkpointing_func")
    return (
        bool(own.get("gradient_checkpointing"))
        and module.training
        and isinstance(function, functools.partial)
        and function.func is checkpoint
        and not function.args
        and function.keywords.get("use_reentrant") is False
        and function.keywords.keys() <= PLAIN_OPTIONS
    )


@contextmanager
def exchanged(layers: list[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Reentrant checkpointing for these layers; what was there comes back in any case."""
    kept = [layer.__dict__["_gradient_checkpointing_func"] for layer, _ in layers]
    try:
        for (layer, random), function in zip(layers, kept, strict=True):
            random = random and bool(function.keywords.get("preserve_rng_state", True))
            layer.__dict__["_gradient_checkpointing_func"] = functools.partial(_reentrant, function, random)
        yield
    finally:
        for (layer, _), function in zip(layers, kept, strict=True):
            layer.__dict__["_gradient_checkpointing_func"] = function


def _reentrant(function: Any, random: bool, run: Any, *args: Any) -> Any:
    if any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        return checkpoint(run, *args, use_reentrant=True, preserve_rng_state=random)
    return function(run, *args)


def dropout_places(layer: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every number in the layer that may make it draw: a dropout module's p, and whatever has dropout in its name."""
    return [
        (module, name)
        for module in layer.modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float)
        and ("dropout" in name or (name == "p" and "Dropout" in type(module).__name__))
    ]


def draws(places: list[tuple[nn.Module, str]]) -> bool:
    return any(getattr(module, name) > 0 for module, name in places)
