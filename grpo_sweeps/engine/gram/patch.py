"""From claims to recorders, and the forward that stands in for a claimed module's own while a block is open."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError

from grpo_sweeps.engine.gram.claims import Claim
from grpo_sweeps.engine.gram.embedding import EmbeddingRecorder, TiedLink
from grpo_sweeps.engine.gram.layout import GramError, RowLayout
from grpo_sweeps.engine.gram.linear import LinearRecorder, Options
from grpo_sweeps.engine.gram.norm import NormBiasRecorder, NormScaleRecorder, RowWeightRecorder, run_with
from grpo_sweeps.engine.gram.partials import SlotPlan
from grpo_sweeps.engine.gram.product import LinearProduct, Unmade
from grpo_sweeps.engine.gram.recompute import Frame, StandInForward
from grpo_sweeps.engine.gram.recorder import BiasRecorder, Recorder, Tap, Uses, direct

if TYPE_CHECKING:
    from grpo_sweeps.engine.gram.large_group import Store


class Recorders:
    """The recorders of one block, each made when its module is first called: made all at once, they would keep the
    card waiting before the block's first product."""

    def __init__(
        self,
        claims: Sequence[Claim],
        layout: RowLayout,
        plan: SlotPlan,
        options: Options,
        store: Store | None = None,
    ) -> None:
        self._common = (layout, plan, options)
        self._store = store
        self._claims: dict[nn.Module, list[Claim]] = {}
        for claim in claims:
            self._claims.setdefault(claim.module, []).append(claim)
        # The two uses of a tied weight share one link.
        tied = {c.name for c in claims if c.kind == "embedding"} & {c.name for c in claims if c.kind == "linear"}
        self._links = {name: TiedLink(layout) for name in tied}
        self._of: dict[nn.Module, dict[str, Recorder]] = {}

    def modules(self) -> list[tuple[nn.Module, str]]:
        """Every claimed module with its name."""
        return [(module, claims[0].module_name) for module, claims in self._claims.items()]

    def of(self, module: nn.Module) -> dict[str, Recorder]:
        """{attribute: its recorder} of one module."""
        found = self._of.get(module)
        if found is None:
            found = self._of[module] = {}
            norm: NormScaleRecorder | None = None
            for claim in self._claims[module]:
                recorder = _make(claim, *self._common, self._links.get(claim.name), norm)
                recorder.store = self._store
                norm = recorder if isinstance(recorder, NormScaleRecorder) else norm
                found[claim.attribute] = recorder
        return found

    def made(self) -> list[Recorder]:
        return [recorder for recorders in self._of.values() for recorder in recorders.values()]

    def every(self) -> list[Recorder]:
        """Made now where they were not yet, in the order of the model."""
        return [recorder for module in self._claims for recorder in self.of(module).values()]


class PatchedForward(StandInForward):
    """Callable that replaces `module.forward`: the module's own forward on detached parameters, with recorders fed.

    Without gradients (evaluation inside a block, the first pass of reentrant checkpointing) the plain forward runs.
    """

    def __init__(self, module: nn.Module, module_name: str, block: Recorders, ends: set[str], frame: Frame) -> None:
        self.module = module
        self.module_name = module_name
        self.block = block
        self.uses: Uses | None = None
        self.is_linear = type(module).forward is nn.Linear.forward
        self.ends = ends
        self.frame = frame

    @property
    def recorders(self) -> dict[str, Recorder]:
        return self.block.of(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        module = self.module
        if not torch.is_grad_enabled():
            return type(module).forward(module, *args, **kwargs)
        if len(args) + len(kwargs) != 1:
            raise GramError(
                f"module {self.module_name} was called with {len(args) + len(kwargs)} arguments instead of its "
                "one input"
            )
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        self.check(x)
        rows = x.shape[0]
        recorders = self.recorders
        if self.uses is None:
            self.uses = Uses(list(recorders.values()))
        for recorder in recorders.values():
            recorder.begin(rows)
        weight = recorders.get("weight")
        if isinstance(weight, EmbeddingRecorder):
            weight.see_ids(x)
            return Tap.apply(run_with(module, self.detached(), x), weight.parameter, weight, x)
        if isinstance(weight, RowWeightRecorder):
            return run_with(module, {"weight": weight.row_weights(x.dim())}, x)
        if self.is_linear:
            ends = self.module_name in self.ends
            if not ends or self.frame.inside:
                return self.product(x, self.uses, made=not ends)
        carried = self.uses.carry(x)
        y = run_with(module, self.detached(), carried)
        if y._is_view():  # changed in place, a view would leave the node that is watched
            y = torch.ops.aten._unsafe_view(y, y.shape)
        self.uses.watch(y, carried)
        return y

    def product(self, x: Tensor, uses: Uses, made: bool) -> Tensor:
        """A linear layer in one node. Its input is kept only after the product is made, so a recomputation that ends
        here, at the last tensor it needs, makes a product that nobody needs: noted, and done otherwise from then on
        (`recompute` leaves it out, made=False; else `Carry` keeps the input first).
        """
        weight, bias = self.module._parameters["weight"], self.module._parameters["bias"]
        try:
            y = direct(LinearProduct, x, weight, bias, uses, made, *uses.parameters)
            return y if made else y.as_subclass(Unmade)
        except _StopRecomputationError:
            self.ends.add(self.module_name)
            raise

    def detached(self) -> dict[str, Tensor | None]:
        return {name: p if p is None else p.detach() for name, p in self.module._parameters.items()}

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


@functools.cache
def patched_between() -> type[PatchedForward]:
    """For code around it that is compiled: that breaks here, as recorders are fed by Python, once a block. Made when
    wanted, since the decorator loads Dynamo, which takes a second and slows every block down."""

    class PatchedBetween(PatchedForward):
        @torch.compiler.disable
        def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().__call__(*args, **kwargs)

    return PatchedBetween


def _make(
    claim: Claim,
    layout: RowLayout,
    plan: SlotPlan,
    options: Options,
    link: TiedLink | None,
    norm: NormScaleRecorder | None,
) -> Recorder:
    """norm: the recorder of the same module's weight, where that is a norm's."""
    common = (claim.name, claim.module_name, claim.parameter, layout)
    module: Any = claim.module
    if claim.kind in ("linear", "conv1d"):
        return LinearRecorder(*common, options=options, plan=plan, transposed=claim.kind == "conv1d", link=link)
    if claim.kind == "embedding":
        return EmbeddingRecorder(*common, block_bytes=options.block_bytes, padding_idx=module.padding_idx, link=link)
    if claim.kind in ("layer_norm", "rms_norm"):
        return NormScaleRecorder(*common, centred=claim.kind == "layer_norm", eps=module.eps)
    if claim.kind == "row_norm":
        return RowWeightRecorder(*common)
    return BiasRecorder(*common) if norm is None else NormBiasRecorder(*common, weight=norm)


def patch(recorders: Recorders, ends: set[str], frame: Frame, compiled: bool) -> list[nn.Module]:
    """Put a PatchedForward on every claimed module; returns the modules for `unpatch`. ends: see `product`. compiled:
    the code around them may be."""
    modules = recorders.modules()
    for module, name in modules:
        if "forward" in module.__dict__:
            raise GramError(
                f"module {name}: its forward was replaced since it was claimed, or another measure() block is open"
            )
    kind = patched_between() if compiled else PatchedForward
    for module, name in modules:
        # not by setattr: nn.Module's looks for parameters first
        module.__dict__["forward"] = kind(module, name, recorders, ends, frame)
    return [module for module, _ in modules]


def unpatch(modules: list[nn.Module]) -> None:
    for module in modules:
        del module.__dict__["forward"]


def recorder_of(module: nn.Module, attribute: str = "weight") -> Recorder | None:
    """The recorder of a module's parameter while a block is open, else None: for code that computes the module's
    product itself."""
    patched = module.__dict__.get("forward")
    return patched.recorders.get(attribute) if isinstance(patched, PatchedForward) else None
