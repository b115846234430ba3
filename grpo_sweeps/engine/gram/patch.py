"""From claims to recorders, and the forward that stands in for a claimed module's own while a block is open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo_sweeps.engine.gram.claims import Claim
from grpo_sweeps.engine.gram.embedding import EmbeddingRecorder, TiedLink
from grpo_sweeps.engine.gram.layout import GramError, RowLayout
from grpo_sweeps.engine.gram.linear import Form, LinearRecorder
from grpo_sweeps.engine.gram.norm import NormScaleRecorder, RowWeightRecorder, normalise_layer, normalise_rms, run_with
from grpo_sweeps.engine.gram.recorder import BiasRecorder, Recorder, Workspace


@dataclass(frozen=True)
class Options:
    """How Grams are formed. block_bytes: most memory of one block of per-row gradients."""

    form: Form
    block_bytes: int
    workspace: Workspace


class PatchedForward:
    """Callable that replaces `module.forward`: the module's own forward on detached parameters, then one tap a
    parameter.

    Without gradients (evaluation inside a block, the first pass of reentrant checkpointing) the plain forward runs.
    """

    def __init__(self, module: nn.Module, module_name: str, recorders: dict[str, Recorder]) -> None:
        self.module = module
        self.module_name = module_name
        self.recorders = recorders

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return type(self.module).forward(self.module, *args, **kwargs)
        if len(args) + len(kwargs) != 1:
            raise GramError(
                f"module {self.module_name} was called with {len(args) + len(kwargs)} arguments instead of its "
                "one input"
            )
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        self.check(x)
        for recorder in self.recorders.values():
            recorder.begin(x.shape[0])
        stand_ins = {name: p if p is None else p.detach() for name, p in self.module._parameters.items()}
        for name, recorder in self.recorders.items():
            if isinstance(recorder, RowWeightRecorder):
                stand_ins[name] = recorder.row_weights(x.dim())
            if isinstance(recorder, EmbeddingRecorder):
                recorder.see_ids(x)
        y = run_with(self.module, stand_ins, x)
        for recorder in self.recorders.values():
            if isinstance(recorder, BiasRecorder):
                y = recorder.tap(y)
            elif not isinstance(recorder, RowWeightRecorder):
                y = recorder.tap(y, x)
        return y

    def check(self, x: Tensor) -> None:
        if torch.is_autocast_enabled(x.device.type):
            raise GramError(
                f"module {self.module_name} runs under autocast, which mixes dtypes: load the model in the dtype "
                "to train in"
            )
        least = 2 if isinstance(self.module, nn.Embedding) else 3
        if x.dim() < least:
            raise GramError(
                f"module {self.module_name} got an input of shape {tuple(x.shape)}: rows and tokens must be "
                "separate dimensions "
                "(rows, T, ...), flattened tokens are refused"
            )


def make_recorders(
    claims: list[Claim], layout: RowLayout, leaves: dict[str, Tensor], options: Options
) -> dict[Claim, Recorder]:
    """One recorder a claim; the two claims of a tied weight get one leaf and one link."""
    tied = {claim.name for claim in claims if claim.kind == "embedding"} & {
        c.name for c in claims if c.kind == "linear"
    }
    links = {name: TiedLink(layout) for name in tied}
    return {claim: _make(claim, layout, leaves[claim.name], options, links.get(claim.name)) for claim in claims}


def _make(claim: Claim, layout: RowLayout, leaf: Tensor, options: Options, link: TiedLink | None) -> Recorder:
    common = (claim.name, claim.module_name, claim.parameter, layout, leaf)
    module: Any = claim.module
    if claim.kind in ("linear", "conv1d"):
        return LinearRecorder(
            *common,
            form=options.form,
            block_bytes=options.block_bytes,
            workspace=options.workspace,
            transposed=claim.kind == "conv1d",
            link=link,
        )
    if claim.kind == "embedding":
        return EmbeddingRecorder(*common, block_bytes=options.block_bytes, padding_idx=module.padding_idx, link=link)
    if claim.kind in ("layer_norm", "rms_norm"):
        normalise = normalise_layer if claim.kind == "layer_norm" else normalise_rms
        return NormScaleRecorder(*common, normalise=normalise, shape=tuple(module.normalized_shape), eps=module.eps)
    if claim.kind == "row_norm":
        return RowWeightRecorder(*common)
    return BiasRecorder(*common)


def patch(recorders: dict[Claim, Recorder]) -> list[nn.Module]:
    """Put a PatchedForward on every claimed module; returns the modules for `unpatch`."""
    by_module: dict[nn.Module, dict[str, Recorder]] = {}
    names: dict[nn.Module, str] = {}
    for claim, recorder in recorders.items():
        by_module.setdefault(claim.module, {})[claim.attribute] = recorder
        names[claim.module] = claim.module_name
    for module, name in names.items():
        if "forward" in module.__dict__:
            raise GramError(
                f"module {name}: its forward was replaced since it was claimed, or another measure() block is open"
            )
    for module, attributes in by_module.items():
        module.forward = PatchedForward(module, names[module], attributes)
    return list(by_module)


def unpatch(modules: list[nn.Module]) -> None:
    for module in modules:
        del module.forward


def recorder_of(module: nn.Module, attribute: str = "weight") -> Recorder | None:
    """The recorder of a module's parameter while a block is open, else None: for code that computes the module's
    product itself."""
    patched = module.__dict__.get("forward")
    return patched.recorders.get(attribute) if isinstance(patched, PatchedForward) else None
