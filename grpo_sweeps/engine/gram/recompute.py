"""Checkpointed decoder layers inside a block, recomputed in the way that costs the host least.

Non-reentrant checkpointing calls Python for every tensor that a layer keeps, twice, and meets the measured modules'
own Python both in the forward and in the recomputation. Reentrant checkpointing runs the forward without gradients,
which needs none of it. It is no general substitute (outputs in containers, tensors with a graph among the keywords,
random numbers), so it is exchanged for the time of a block in layers of known classes only, made of known parts,
without dropout and without hooks: everything else recomputes as the user set it.

One thing non-reentrant checkpointing does better: it stops a recomputation at the last tensor kept, so that the last
product of a layer is not made again. The first block runs as the user set it, and shows at which modules that happens
(`ends`); in later ones those products are left out, inside a recomputation of such a layer and nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_sweeps.engine.gram.layout import GramError
from grpo_sweeps.engine.gram.torch_private import module_hooks

PLAIN_OPTIONS = {"use_reentrant", "preserve_rng_state"}
# Layers that return one tensor, whose last operation adds the last product to the residual stream.
KNOWN_LAYERS = {
    "transformers.models.llama.modeling_llama": "LlamaDecoderLayer",
    "transformers.models.qwen2.modeling_qwen2": "Qwen2DecoderLayer",
    "transformers.models.nemotron.modeling_nemotron": "NemotronDecoderLayer",
}
KNOWN_PARTS = (*KNOWN_LAYERS, "transformers.activations", "torch.nn.modules.activation")


class Frame:
    """The state of one block's exchange. `inside`: a layer is being recomputed now."""

    def __init__(self) -> None:
        self.open = True
        self.inside = False


class StandInForward:
    """The base of what stands in for a claimed module's forward during a block. Any other forward on an instance makes
    its layer unknown."""


class Recompute:
    """The layers of one model that recompute themselves. They are found once and looked at before every block."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [m for m in model.modules() if KNOWN_LAYERS.get(type(m).__module__) == type(m).__name__]

    def exchangeable(self) -> list[nn.Module]:
        """The layers that recompute as torch does it. Whether they are plain is looked at when they run."""
        return [layer for layer in self.layers if _checkpoints_plainly(layer)]


def _checkpoints_plainly(layer: nn.Module) -> bool:
    """Whether the layer uses torch's non-reentrant checkpointing, with no more than its plain options."""
    own = layer.__dict__
    function = own.get("_gradient_checkpointing_func")
    return (
        bool(own.get("gradient_checkpointing"))
        and layer.training
        and isinstance(function, functools.partial)
        and function.func is checkpoint
        and not function.args
        and function.keywords.get("use_reentrant") is False
        and function.keywords.keys() <= PLAIN_OPTIONS
    )


def is_plain(layer: nn.Module) -> bool:
    """Whether the layer is made of known parts, none of which draws random numbers, has a hook or a replaced
    forward."""
    for module in layer.modules():
        own = module.__dict__
        known = type(module) is nn.Linear or type(module).__module__ in KNOWN_PARTS
        replaced = "forward" in own and not isinstance(own["forward"], StandInForward)
        if not known or replaced or module_hooks(module) or own.get("attention_dropout"):
            return False
    return True


@contextmanager
def exchanged(layers: list[nn.Module], frame: Frame) -> Iterator[None]:
    """Within it, these layers use reentrant checkpointing. What was there comes back in any case."""
    kept = [layer.__dict__["_gradient_checkpointing_func"] for layer in layers]
    try:
        for layer, function in zip(layers, kept, strict=True):
            layer.__dict__["_gradient_checkpointing_func"] = functools.partial(_recompute, layer, function, frame)
        yield
    finally:
        frame.open = False
        for layer, function in zip(layers, kept, strict=True):
            layer.__dict__["_gradient_checkpointing_func"] = function


def _recompute(layer: nn.Module, function: Any, frame: Frame, run: Any, hidden: Any, *rest: Any) -> Any:
    """The layer's output. It stands in for `function`, the layer's own, and leaves the call to it where the layer or
    its arguments are not what is known here."""
    if (
        not (isinstance(hidden, Tensor) and hidden.requires_grad)
        or not is_plain(layer)
        or _has_graph((rest, getattr(run, "keywords", {})))
    ):
        return function(run, hidden, *rest)
    return _reentrant(frame, run, hidden, *rest)


def _reentrant(frame: Frame, run: Any, hidden: Tensor, *rest: Any) -> Any:
    def inside(x: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return run(x, *rest)
        if not frame.open:
            raise GramError("the backward must run inside the measure() block: a checkpointed layer met it outside")
        frame.inside = True
        try:
            return run(x, *rest)
        finally:
            frame.inside = False

    return checkpoint(inside, hidden, use_reentrant=True, preserve_rng_state=False)


def _has_graph(value: Any) -> bool:
    """Whether a tensor with a gradient is anywhere in these arguments."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, dict):
        value = tuple(value.values())
    return isinstance(value, tuple | list) and any(_has_graph(entry) for entry in value)
