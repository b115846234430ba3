"""Which module uses which trainable parameter: one use each (two of a tied weight), or a refusal that names it.

Known are nn.Linear, transformers' Conv1D, nn.Embedding (an embedding and an nn.Linear may share a weight: a tied head)
and norm layers with a weight of shape (H,). LoRA needs no code here: peft's factors are nn.Linear modules, and frozen
parameters are skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from grpo_sweeps.engine.gram.layout import GramError
from grpo_sweeps.engine.gram.norm import takes_row_weights
from grpo_sweeps.engine.gram.torch_private import WRAPPED, BatchNorm, parameters_of

Kind = Literal["linear", "conv1d", "embedding", "layer_norm", "rms_norm", "row_norm", "bias"]
COVERED = "nn.Linear, Conv1D, nn.Embedding, layer norms and RMS norms"


@dataclass(frozen=True)
class ParameterUse:
    """One module's use of one trainable parameter."""

    name: str
    parameter: nn.Parameter
    module_name: str
    module: nn.Module
    attribute: str
    kind: Kind


def claim_parameters(model: nn.Module) -> list[ParameterUse]:
    """The use of every trainable parameter, two uses of a tied weight. Raises GramError naming what is not covered."""
    refuse_couplings(model, dict(model.named_modules()))
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    if len(set(names.values())) < len(names):
        raise GramError("two parameters have the same name once torch.compile's _orig_mod is left out")
    found: dict[int, list[ParameterUse]] = {}
    for module_name, module in model.named_modules():
        for attribute, parameter in parameters_of(module).items():
            if parameter is None or not parameter.requires_grad:
                continue
            name = names[id(parameter)]
            refuse_storage(name, parameter)
            kind = kind_of(name, module_name, module, attribute)
            use = ParameterUse(name, parameter, plain_name(module_name), module, attribute, kind)
            found.setdefault(id(parameter), []).append(use)
    for uses in found.values():
        refuse_sharing(uses)
    if not found:
        raise GramError("the model has no trainable parameter: nothing to measure")
    every = [use for uses in found.values() for use in uses]
    refuse_devices(every)
    return every


def kind_of(name: str, module_name: str, module: nn.Module, attribute: str) -> Kind:
    """The way in which the module uses the parameter. Raises GramError where it is not covered."""
    where = f"parameter {name} of module {module_name or '(the model itself)'} ({type(module).__name__})"
    if "forward" in module.__dict__:
        raise GramError(f"{where}: the module's forward was replaced on the instance, so what it computes is unknown")
    if attribute not in ("weight", "bias"):
        raise GramError(
            f"{where} is not covered; known are {COVERED}. Freeze it with requires_grad_(False) or extend uses.kind_of"
        )
    kind = weight_kind(where, module)
    if kind is None or (attribute == "bias" and kind in ("embedding", "rms_norm", "row_norm")):
        raise GramError(
            f"{where} is not covered; known are {COVERED}. Freeze it with requires_grad_(False) or extend uses.kind_of"
        )
    return "bias" if attribute == "bias" else kind


def weight_kind(where: str, module: nn.Module) -> Kind | None:
    """The kind of the module's weight, None where it is not covered. The forward that will run decides, not the class
    alone: a subclass may compute something else."""
    forward = type(module).forward
    if forward is nn.Linear.forward:
        return "linear"
    if _is_conv1d(module):
        return "conv1d"
    if type(module) is nn.Embedding:
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise GramError(
                f"{where}: max_norm, scale_grad_by_freq and sparse gradients of an embedding are not covered"
            )
        return "embedding"
    if forward is nn.LayerNorm.forward or _is_layer_norm_1p(module):
        return "layer_norm" if len(module.normalized_shape) == 1 else None  # type: ignore[arg-type]
    if forward is nn.RMSNorm.forward:
        return "rms_norm" if len(module.normalized_shape) == 1 else None  # type: ignore[arg-type]
    if "Norm" in type(module).__name__ and [name for name, _ in module.named_parameters()] == ["weight"]:
        return "row_norm" if takes_row_weights(module) else None
    return None


def _is_conv1d(module: nn.Module) -> bool:
    utils = sys.modules.get("transformers.pytorch_utils")
    return utils is not None and type(module) is utils.Conv1D


def _is_layer_norm_1p(module: nn.Module) -> bool:
    """Whether it is Nemotron's layer norm with weight + 1, whose weight's gradient is that of a plain layer norm."""
    nemotron = sys.modules.get("transformers.models.nemotron.modeling_nemotron")
    return nemotron is not None and type(module) is nemotron.NemotronLayerNorm1P


@dataclass(frozen=True)
class Held:
    """One place where a module holds a parameter, and whether the parameter trains."""

    name: str
    parameter: nn.Parameter
    module: nn.Module
    attribute: str
    trains: bool


def held_parameters(model: nn.Module) -> list[Held]:
    """Every place where the model holds a parameter; a shared parameter has its first name at each of them."""
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    return [
        Held(names[id(parameter)], parameter, module, attribute, parameter.requires_grad)
        for module in model.modules()
        for attribute, parameter in parameters_of(module).items()
        if parameter is not None
    ]


def refuse_changes(modules: Iterable[nn.Module], held: Sequence[Held], device: torch.device) -> None:
    """Compare the modules of a model with what was `held` on `device` when it was claimed.

    Modules that torch.compile put around others are no change. Raises GramError where a parameter was frozen, unfrozen,
    replaced or moved, and where the model gained or lost parameters.
    """
    now = {
        (module, attribute): parameter
        for module in modules
        for attribute, parameter in parameters_of(module).items()
        if parameter is not None
    }
    for was in held:
        parameter = now.get((was.module, was.attribute))
        if parameter is not was.parameter or parameter.requires_grad != was.trains:
            raise GramError(
                f"parameter {was.name} was frozen, unfrozen or replaced since GradientGram was made: make a new one"
            )
        if was.trains and parameter.device != device:
            raise GramError(
                f"parameter {was.name} moved to {parameter.device} since GradientGram was made: make a new one"
            )
    if len(now) != len(held):
        raise GramError("the model gained or lost parameters since GradientGram was made: make a new one")


def refuse_couplings(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Refuse what makes a row's gradient depend on other rows, or hides the modules that would be measured.

    modules: the model's `named_modules`.
    """
    for name, module in modules.items():
        kind = type(module).__name__
        if isinstance(module, BatchNorm):
            raise GramError(f"module {name} ({kind}) takes statistics over the batch: rows of the batch interact")
        if kind == "FullyShardedDataParallel":
            raise GramError(f"module {name or '(the model itself)'} is a {kind}: pass the plain module that it wraps")
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise GramError(
            "config.output_router_logits=True adds a load-balancing loss over all rows: rows of the batch interact"
        )


def refuse_storage(name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter that is sharded, sparse, no float or on no device."""
    if hasattr(parameter, "device_mesh"):
        raise GramError(f"parameter {name} is sharded (DTensor): the gradients of sharded parameters are not covered")
    if not parameter.is_floating_point() or parameter.is_sparse or parameter.device.type == "meta":
        raise GramError(
            f"parameter {name} ({parameter.dtype}, {parameter.layout}, {parameter.device}) is not a dense float "
            "tensor on a device"
        )


def refuse_sharing(uses: list[ParameterUse]) -> None:
    """Refuse a shared parameter, but for an embedding's weight that is also a linear head's."""
    if len(uses) == 1 or sorted(use.kind for use in uses) == ["embedding", "linear"]:
        return
    where = " and ".join(f"{use.module_name} ({type(use.module).__name__})" for use in uses)
    raise GramError(
        f"parameter {uses[0].name} is shared by {where}: only an embedding tied to one linear head is covered"
    )


def refuse_devices(uses: list[ParameterUse]) -> None:
    """Refuse a model whose parameters are on several devices."""
    first = uses[0]
    for use in uses:
        if use.parameter.device != first.parameter.device:
            raise GramError(
                f"parameter {use.name} is on {use.parameter.device}, {first.name} on {first.parameter.device}: "
                "one device per model is covered"
            )


def plain_name(name: str) -> str:
    """The parameter's or module's name without the `_orig_mod` of modules that torch.compile wraps around others."""
    return ".".join(part for part in name.split(".") if part != WRAPPED) if WRAPPED in name else name


def layer_of(name: str) -> str:
    """The layer a parameter belongs to: up to its first number ("model.layers.3"), else its module ("model.norm")."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1]) or name
