"""From claims to recorders, and the forward that stands in for a claimed module's own while a block is open."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError

from grpo_sweeps.engine.gram.claims import Claim
from grpo_sweeps.engine.gram.delivery import Delivery
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


class MeasuredModules:
    """The claimed modules of a model with their claims, and what stands in for their forwards from block to block."""

    def __init__(self, claims: Sequence[Claim]) -> None:
        self.claims: dict[nn.Module, list[Claim]] = {}
        for claim in claims:
            self.claims.setdefault(claim.module, []).append(claim)
        tied = {c.name for c in claims if c.kind == "embedding"} & {c.name for c in claims if c.kind == "linear"}
        self.tied = sorted(tied)
        self._forwards: dict[type[PatchedForward], list[PatchedForward]] = {}

    def forwards(self, kind: type[PatchedForward]) -> list[PatchedForward]:
        if kind not in self._forwards:
            self._forwards[kind] = [kind(module, claims) for module, claims in self.claims.items()]
        return self._forwards[kind]


class Recorders:
    """The recorders of one block, each made when its module is first called: made all at once, they would keep the
    card waiting before the block's first product."""

    def __init__(
        self,
        modules: MeasuredModules,
        layout: RowLayout,
        plan: SlotPlan,
        options: Options,
        store: Store | None = None,
        delivery: Delivery | None = None,
    ) -> None:
        self.delivery = delivery
        self._common = (layout, plan, options)
        self._store = store
        self._claims = modules.claims
        # The two uses of a tied weight share one link.
        self._links = {name: TiedLink(layout) for name in modules.tied}
        self._of: dict[nn.Module, dict[str, Recorder]] = {}

    def of(self, module: nn.Module) -> dict[str, Recorder]:
        """{attribute: its recorder} of one module."""
        found = self._of.get(module)
        if found is None:
            found = self._of[module] = {}
            delivery = self.delivery if self.delivery is not None and self.delivery.attached else None
            norm: NormScaleRecorder | None = None
            for claim in self._claims[module]:
                recorder = _make(claim, *self._common, self._links.get(claim.name), norm)
                recorder.store, recorder.delivery = self._store, delivery
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

    def __init__(self, module: nn.Module, claims: Sequence[Claim]) -> None:
        self.module = module
        self.module_name = claims[0].module_name
        self.is_linear = type(module).forward is nn.Linear.forward
        self.device_type = claims[0].parameter.device.type
        self.least_dims = 2 if isinstance(module, nn.Embedding) else 3

    def open(self, block: Recorders, ends: set[str], frame: Frame) -> None:
        """For one block; ends: see `product`."""
        self.block, self.ends, self.frame = block, ends, frame
        self.uses: Uses | None = None

    def close(self) -> None:
        """Let go of the block, which holds what it measured."""
        del self.block, self.frame, self.uses

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return type(self.module).forward(self.module, *args, **kwargs)
        x: Tensor = args[0] if len(args) == 1 and not kwargs else self.one_input(args, kwargs)
        if x.dim() < self.least_dims or torch.is_autocast_enabled(self.device_type):
            self.refuse(x)
        uses = self.uses
        if uses is None:
            uses = self.uses = Uses(self.block.of(self.module))
        rows = x.shape[0]
        for recorder in uses.recorders:
            recorder.begin(rows)
        delivery = self.block.delivery
        if delivery is None or not saved_tensors_stay():
            return self.measured(x, uses, None)
        if delivery.attached:
            return self.measured(x, uses, delivery if x.requires_grad else None)
        y = self.measured(x, uses, None)
        return delivery.attach(y) if torch._C._current_graph_task_id() == -1 else y

    def measured(self, x: Tensor, uses: Uses, delivery: Delivery | None) -> Tensor:
        """The module's output, with recorders fed. delivery: where they may leave gradients, if they keep x so long."""
        module, weight = self.module, uses.weight
        if isinstance(weight, EmbeddingRecorder):
            weight.see_ids(x)
            return Tap.apply(run_with(module, self.detached(), x), weight.parameter, weight, x)
        if isinstance(weight, RowWeightRecorder):
            return run_with(module, {"weight": weight.row_weights(x.dim())}, x)
        ends = self.is_linear and self.module_name in self.ends
        if self.is_linear and (self.frame.inside if ends else delivery is None):
            return self.product(x, uses, made=not ends)
        carried = uses.carry(x) if delivery is None else x
        y = run_with(module, self.detached(), carried)
        if delivery is not None:
            uses.deliver(y, x, delivery)
            return y
        if y._is_view():  # changed in place, a view would leave the node that is watched
            y = torch.ops.aten._unsafe_view.default(y, y.shape)
        uses.watch(y, carried)
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

    def one_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if len(args) + len(kwargs) != 1:
            raise GramError(
                f"module {self.module_name} was called with {len(args) + len(kwargs)} arguments instead of its "
                "one input"
            )
        return args[0] if args else next(iter(kwargs.values()))  # type: ignore[no-any-return]

    def refuse(self, x: Tensor) -> None:
        if torch.is_autocast_enabled(self.device_type):
            raise GramError(
                f"module {self.module_name} runs under autocast, which mixes dtypes: load the model in the dtype "
                "to train in"
            )
        raise GramError(
            f"module {self.module_name} got an input of shape {tuple(x.shape)}: rows and tokens must be "
            "separate dimensions "
            "(rows, T, ...), flattened tokens are refused"
        )


def saved_tensors_stay() -> bool:
    """Does nobody take over what autograd saves (checkpointing, offloading)?"""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is None


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


def patch(
    modules: MeasuredModules, block: Recorders, ends: set[str], frame: Frame, compiled: bool
) -> list[PatchedForward]:
    """Put a PatchedForward on every claimed module; returns them for `unpatch`. compiled: the code around them may
    be."""
    forwards = modules.forwards(patched_between() if compiled else PatchedForward)
    for forward in forwards:
        if "forward" in forward.module.__dict__:
            raise GramError(
                f"module {forward.module_name}: its forward was replaced since it was claimed, or another measure() "
                "block is open"
            )
    for forward in forwards:
        forward.open(block, ends, frame)
        forward.module.__dict__["forward"] = forward  # not by setattr: nn.Module's looks for parameters first
    return forwards


def unpatch(forwards: list[PatchedForward]) -> None:
    for forward in forwards:
        del forward.module.__dict__["forward"]
        forward.close()


def recorder_of(module: nn.Module, attribute: str = "weight") -> Recorder | None:
    """The recorder of a module's parameter while a block is open, else None: for code that computes the module's
    product itself."""
    patched = module.__dict__.get("forward")
    return patched.block.of(module).get(attribute) if isinstance(patched, PatchedForward) else None
