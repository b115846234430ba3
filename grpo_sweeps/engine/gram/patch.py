"""The recorders of one block, and the forward that stands in for each claimed module's own while the block is open.

An nn.Linear is measured in one of these ways (`PatchedForward.measured`); all give the same bits:

    where                                                    forward              parameters' gradients
    -------------------------------------------------------  -------------------  ------------------------------------
    gradients may wait for the block's `Delivery` node       F.linear (`linear`)  a hook on the output forms them and
                                                                                  leaves them there
    they may not (`.grad` is filled, hooks, large groups,    LinearProduct        by the same node as the input's
    checkpointing, compiled code around, a first module)     (`product`)
    ... and a recomputation that torch stops early ends      the module's own     a hook on the output forms them,
    at this module (`MeasuredModules.ends`)                  between `Carry`      `Carry` hands them on
    ... and `recompute` runs that recomputation              LinearProduct of a   by the same node as the input's
                                                             product not made
    the blockwise head computes the product itself           `engine.head`        its backward, by `recorder_of`

Each is there for its cost. The first saves the host a Python node per module. The second is one node where the general
way takes three. The last two save the product that ends a recomputation, which nobody reads. `Carry` is also the
general way of every other module (Conv1D, layer norms) where gradients may not wait.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo_sweeps.engine.gram.delivery import Delivery
from grpo_sweeps.engine.gram.embedding import EmbeddingRecorder, TiedLink
from grpo_sweeps.engine.gram.layout import GramError, RowLayout, SlotPlan
from grpo_sweeps.engine.gram.linear import GramOptions, LinearRecorder
from grpo_sweeps.engine.gram.norm import NormBiasRecorder, NormScaleRecorder, RowWeightRecorder, run_with
from grpo_sweeps.engine.gram.recompute import Frame, StandInForward
from grpo_sweeps.engine.gram.recorder import BiasRecorder, ModuleRecorders, Recorder, Tap, refuse_graph
from grpo_sweeps.engine.gram.torch_private import (
    StopRecomputation,
    backward_id,
    base_of,
    direct,
    is_view,
    parameters_of,
    saved_tensors_stay,
    torch_functions_off,
    unviewed,
)
from grpo_sweeps.engine.gram.uses import ParameterUse

if TYPE_CHECKING:
    from grpo_sweeps.engine.gram.large_group import Store


class MeasuredModules:
    """The modules of a model that use trainable parameters, and what stands in for their forwards in every block."""

    def __init__(self, uses: Sequence[ParameterUse]) -> None:
        self.uses: dict[nn.Module, list[ParameterUse]] = {}
        for use in uses:
            self.uses.setdefault(use.module, []).append(use)
        tied = {c.name for c in uses if c.kind == "embedding"} & {c.name for c in uses if c.kind == "linear"}
        self.tied = sorted(tied)
        self.block: Any = None  # the open one's Recorders
        self.ends: set[str] = set()  # names of those at which a checkpoint's recomputation was seen to end
        self._forwards: dict[type[PatchedForward], list[PatchedForward]] = {}

    def forwards(self, kind: type[PatchedForward]) -> list[PatchedForward]:
        if kind not in self._forwards:
            self._forwards[kind] = [kind(module, uses, self) for module, uses in self.uses.items()]
        return self._forwards[kind]


class Recorders:
    """The recorders of one block. Each is made when its module is first called: made all at once, they would keep the
    card waiting before the block's first product."""

    def __init__(
        self,
        modules: MeasuredModules,
        layout: RowLayout,
        plan: SlotPlan,
        options: GramOptions,
        store: Store | None = None,
        delivery: Delivery | None = None,
    ) -> None:
        self.delivery = delivery
        self.frame = Frame()
        self._common = (layout, plan, options)
        self._store = store
        self._uses = modules.uses
        # The two uses of a tied weight share one link.
        self._links = {name: TiedLink(layout) for name in modules.tied}
        self._of: dict[nn.Module, ModuleRecorders] = {}

    def of(self, module: nn.Module) -> ModuleRecorders:
        """The recorders of one module."""
        recorders = self._of.get(module)
        if recorders is None:
            found: dict[str, Recorder] = {}
            for use in self._uses[module]:
                recorder = found[use.attribute] = _make(use, *self._common, self._links, found)
                recorder.store, recorder.block_delivery = self._store, self.delivery
            recorders = self._of[module] = ModuleRecorders(found)
        return recorders

    def made(self) -> list[Recorder]:
        """The recorders of the modules that were called."""
        return [recorder for recorders in self._of.values() for recorder in recorders.each]

    def every(self) -> list[Recorder]:
        """All recorders, in the order of the model; those that were not made yet are made now."""
        return [recorder for module in self._uses for recorder in self.of(module).each]


class PatchedForward(StandInForward):
    """Callable that replaces `module.forward`: it gives the module's own output and feeds the recorders.

    Without gradients (evaluation inside a block, the first pass of reentrant checkpointing) the plain forward runs.
    """

    def __init__(self, module: nn.Module, uses: Sequence[ParameterUse], modules: MeasuredModules) -> None:
        self.module = module
        self.module_name = uses[0].module_name
        self.is_linear = type(module).forward is nn.Linear.forward
        self.device_type = uses[0].parameter.device.type
        self.modules = modules
        self.recorders: ModuleRecorders | None = None  # of the open block, once the module was called
        self.least_dims = 2 if isinstance(module, nn.Embedding) else 3

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            block = self.modules.block
            if block.delivery is not None and not block.delivery.attached:
                block.delivery = None  # what is recomputed later may come before its node
            return type(self.module).forward(self.module, *args, **kwargs)
        x: Tensor = args[0] if len(args) == 1 and not kwargs else self.one_input(args, kwargs)
        if x.dim() < self.least_dims or torch.is_autocast_enabled(self.device_type):
            self.refuse(x)
        block = self.modules.block
        recorders = self.recorders
        if recorders is None:
            recorders = self.recorders = block.of(self.module)
        rows = x.shape[0]
        for recorder in recorders.each:
            recorder.begin(rows)
        delivery = block.delivery
        if delivery is None or not saved_tensors_stay():
            return self.measured(x, recorders, None)
        if delivery.attached:
            return self.measured(x, recorders, delivery if x.requires_grad else None)
        y = self.measured(x, recorders, None)
        if backward_id() != -1 or isinstance(recorders.weight, RowWeightRecorder):
            return y  # a norm of any class may have saved y, and must see when that is changed
        return delivery.attach(y)

    def measured(self, x: Tensor, recorders: ModuleRecorders, delivery: Delivery | None) -> Tensor:
        """The module's output; the recorders are fed. delivery: where they may leave gradients, if they keep x until
        then."""
        module = self.module
        if self.is_linear:
            ends = bool(self.modules.ends) and self.module_name in self.modules.ends
            if self.modules.block.frame.inside if ends else delivery is None:
                return self.product(x, recorders, made=not ends)
            if delivery is not None:
                return self.linear(x, recorders, delivery)
        weight = recorders.weight
        if isinstance(weight, RowWeightRecorder):
            return run_with(module, {"weight": weight.row_weights(x.dim(), delivery)}, x)
        detached = {name: p if p is None else p.detach() for name, p in parameters_of(module).items()}
        if isinstance(weight, EmbeddingRecorder):
            weight.see_ids(x)
            return Tap.apply(run_with(module, detached, x), weight.parameter, weight, x)
        carried = recorders.carry(x) if delivery is None else x
        y = run_with(module, detached, carried)
        if is_view(y):  # changed in place, a view would leave the node that is watched
            y = unviewed(y)
        if delivery is None:
            recorders.watch(y, carried)
        else:
            recorders.deliver(y, x, delivery)
        return y

    def linear(self, x: Tensor, recorders: ModuleRecorders, delivery: Delivery) -> Tensor:
        """An nn.Linear's output in the common case, in few and plain calls: small models wait for them."""
        own = parameters_of(self.module)
        weight, bias = own["weight"], own["bias"]
        y = F.linear(x, weight.detach(), None if bias is None else bias.detach())
        # With a bias y may be a view; changed in place, it leaves its node, but its base's stays under the change.
        recorders.deliver(base_of(y), x, delivery)
        return y

    def product(self, x: Tensor, recorders: ModuleRecorders, made: bool) -> Tensor:
        """An nn.Linear's output by one node, which keeps the input only after the product is made.

        A recomputation that ends here, at the last tensor it needs, therefore makes a product that nobody reads. The
        module is then noted in `ends`, and taken in another way from there on: `recompute` leaves the product out
        (made=False), and elsewhere `Carry` keeps the input first.
        """
        own = parameters_of(self.module)
        weight, bias = own["weight"], own["bias"]
        try:
            y = direct(LinearProduct, x, weight, bias, recorders, made, *recorders.parameters)
            return y if made else y.as_subclass(Unmade)
        except StopRecomputation:
            self.modules.ends.add(self.module_name)
            raise

    def one_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The only argument. Raises GramError where there are others."""
        if len(args) + len(kwargs) != 1:
            raise GramError(
                f"module {self.module_name} was called with {len(args) + len(kwargs)} arguments instead of its "
                "one input"
            )
        return args[0] if args else next(iter(kwargs.values()))  # type: ignore[no-any-return]

    def refuse(self, x: Tensor) -> None:
        """Raise GramError for an input whose rows cannot be told apart, and under autocast."""
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


@functools.cache
def patched_between() -> type[PatchedForward]:
    """The class of forwards for compiled code around them, which breaks here, since Python feeds the recorders once per
    block. It is made when it is wanted: its decorator loads Dynamo, which takes a second and slows every block down."""

    class PatchedBetween(PatchedForward):
        @torch.compiler.disable
        def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().__call__(*args, **kwargs)

    return PatchedBetween


def _make(
    use: ParameterUse,
    layout: RowLayout,
    plan: SlotPlan,
    options: GramOptions,
    links: dict[str, TiedLink],
    found: dict[str, Recorder],
) -> Recorder:
    """The recorder of one use. found: recorders of the same module that were made before."""
    kind, common = use.kind, (use, layout)
    module: Any = use.module
    if kind == "linear" or kind == "conv1d":
        return LinearRecorder(*common, options, plan, kind == "conv1d", links.get(use.name))
    if kind == "row_norm":
        return RowWeightRecorder(*common)
    if kind == "bias":
        norm = found.get("weight")
        return NormBiasRecorder(*common, norm) if isinstance(norm, NormScaleRecorder) else BiasRecorder(*common)
    if kind == "embedding":
        return EmbeddingRecorder(*common, options.block_bytes, module.padding_idx, links.get(use.name))
    return NormScaleRecorder(*common, kind == "layer_norm", module.eps)


def patch(modules: MeasuredModules, block: Recorders, compiled: bool) -> list[PatchedForward]:
    """The forwards that are now on every claimed module, for `unpatch`. compiled: the code around them may be compiled.
    Raises GramError where a module's forward was replaced already."""
    forwards = modules.forwards(patched_between() if compiled else PatchedForward)
    for forward in forwards:
        if "forward" in forward.module.__dict__:
            raise GramError(
                f"module {forward.module_name}: its forward was replaced since it was claimed, or another measure() "
                "block is open"
            )
    modules.block = block
    for forward in forwards:
        forward.module.__dict__["forward"] = forward  # not by setattr: nn.Module's looks for parameters first
    return forwards


def unpatch(modules: MeasuredModules, forwards: list[PatchedForward]) -> None:
    """Give the modules their own forwards back."""
    for forward in forwards:
        del forward.module.__dict__["forward"]
        forward.recorders = None
    modules.block = None


@contextmanager
def aside(model: nn.Module) -> Iterator[None]:
    """Within it, calls of the model have nothing to do with the rows of the block that may be open."""
    patched = (module.__dict__.get("forward") for module in model.modules())
    block = next((forward.modules.block for forward in patched if isinstance(forward, PatchedForward)), None)
    if block is None:
        yield
        return
    delivery, block.delivery = block.delivery, None
    try:
        yield
    finally:
        block.delivery = delivery


def recorder_of(module: nn.Module, attribute: str = "weight") -> Recorder | None:
    """The recorder of a module's parameter while a block is open, else None. It serves code that computes the module's
    product itself."""
    patched = module.__dict__.get("forward")
    return patched.modules.block.of(module).of.get(attribute) if isinstance(patched, PatchedForward) else None


class LinearProduct(torch.autograd.Function):
    """F.linear of x (B, T, ..., i), weight (o, i) and bias (o,) or None. One node gives the gradients of x and of
    `parameters`, which are those of the recorders: nodes around a small product would cost more than the product."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recorders: ModuleRecorders,
        made: bool,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.recorders = recorders
        ctx.save_for_backward(x, weight)
        y = F.linear(x, weight, bias) if made else unmade(x, weight.shape[0])
        # With a bias it may be a view, which an activation in place would not be allowed to change.
        return unviewed(y) if is_view(y) else y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph()
        x, weight = ctx.saved_tensors
        gradients = [recorder.run_backward(gy, x) for recorder in ctx.recorders.each]
        gx = torch.mm(gy.reshape(-1, gy.shape[-1]), weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return (gx, None, None, None, None, *gradients)


def unmade(x: Tensor, o: int) -> Tensor:
    """(..., o) in place of a product that nobody reads: its values are whatever the memory holds."""
    return x.new_empty(*x.shape[:-1], o)


class Unmade(Tensor):
    """A product that was not made. Adding it to the residual stream, the last thing that a layer does, gives a tensor
    that nobody reads either, so the addition is left out as well."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch_functions_off():
            if function in ADDITIONS and len(args) == 2 and not kwargs and args[0].shape == args[1].shape:
                return direct(UnmadeSum, *args)
            return function(*args, **(kwargs or {}))


ADDITIONS = {Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add}


class UnmadeSum(torch.autograd.Function):
    """A tensor of the shape of left + right, and with its gradients."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        return unmade(left, left.shape[-1])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        refuse_graph()
        return g, g
