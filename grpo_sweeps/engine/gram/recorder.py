"""`Recorder`, which keeps what one use of a parameter leaves during one block, and the autograd functions that feed it.

A claimed module runs its own forward on detached parameters, so its output is the plain one, bit for bit, and the
gradient of its input comes from autograd's own kernels. A hook on the output forms the parameters' gradients, and with
them what the Gram is made of, which stays with the recorders. Mostly the module's input is kept beside the hook, and
the gradients are left with the block's `delivery`. Where that is not possible, `Carry` goes around the module: it takes
the parameters in, keeps the input, and its backward hands the gradients on. It keeps the input before the module's
product and not after it, because checkpointing stops its recomputation at the last tensor kept: the last product of a
layer is not made again.

There are no module hooks: checkpointing recomputes forwards, but each node of the backward runs once. A second time is
refused.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpo_sweeps.engine.gram.layout import GramError, RowLayout, accumulation_dtype
from grpo_sweeps.engine.gram.torch_private import backward_id, direct, unviewed, version_of

if TYPE_CHECKING:
    from grpo_sweeps.engine.gram.delivery import Delivery
    from grpo_sweeps.engine.gram.large_group import Store
    from grpo_sweeps.engine.gram.uses import ParameterUse


@dataclass(slots=True)
class Record:
    """A finished (flat_size + 1,) float64: the flat Gram, then the squared norm of the weighted sum."""

    values: Tensor


@dataclass(slots=True)
class Slots:
    """What each program of a kernel summed, (programs, width) float64, in the columns that the `SlotPlan` tells."""

    values: Tensor


@dataclass(slots=True)
class Rows:
    """The rows' gradients of a bias or a norm, whole, (B, N) in the accumulation dtype.

    total: (N,), their weighted sum as it was handed out, before rounding. Its norm is that of the gradient, not of what
    the Gram is made of, since the two are checked against each other.
    """

    values: Tensor
    total: Tensor


Partial = Record | Slots | Rows

# The gradient and what the Gram is made of, or neither yet.
Formed = tuple[Tensor, Partial] | tuple[None, None]


class Workspace:
    """Buffers and counts that the blocks of one GradientGram share.

    There is one buffer per purpose and dtype. It grows to the largest use and stays between blocks: fresh pages would
    cost more than the products. Two buffers that are in use at once need two purposes. forms: how often a weight was
    measured by each form.
    """

    def __init__(self) -> None:
        self.forms: Counter[str] = Counter()
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get(self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        numel = math.prod(shape)
        buffer = self._buffers.get((purpose, dtype, device))
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[purpose, dtype, device] = torch.empty(numel, dtype=dtype, device=device)
        return buffer[:numel].view(shape)


class Recorder:
    """One use of one parameter in one block.

    A subclass says how the rows' gradients follow from the output gradient: `backward(gy, *saved) -> (grad, partial)`,
    or None twice where `delivery` forms both later. After the backward `partial` holds what the Gram is made of, and
    `handed` where the gradient lay that autograd was given, and in which version: if `.grad` is that very tensor,
    nothing else has been added to it.
    """

    # What a block begins with. Every block makes a recorder per parameter, so defaults are not set one by one.
    store: Store | None = None  # set in a part of a large group
    delivery: Delivery | None = None  # set where the gradient is left with it
    block_delivery: Delivery | None = None  # the block's, where it has one
    partial: Partial | None = None
    handed: tuple[int, int] | None = None
    calls = 0
    backwards = 0
    closed = False
    recomputed = False  # True: its module was called in a recomputation

    def __init__(self, use: ParameterUse, layout: RowLayout) -> None:
        self.name = use.name
        self.module_name = use.module_name
        self.parameter = use.parameter
        self.layout = layout

    def begin(self, first_dim: int) -> None:
        """Count a forward that will be differentiated. A recomputation (inside a backward) is no new forward."""
        if first_dim != self.layout.rows:
            raise GramError(
                f"module {self.module_name}: its input has {first_dim} rows in dimension 0, but group_sizes make "
                f"{self.layout.rows}; "
                "packed rows (1, sum T) and ids of shape (1, T) are refused: every module must see one row per rollout"
            )
        if backward_id() != -1:
            self.recomputed = True
            return
        self.calls += 1
        if self.calls > 1:
            raise GramError(
                f"module {self.module_name} was called {self.calls} times in one block: the products between the "
                "calls are not "
                f"measured (parameter {self.name}). One block takes one forward and one backward; shared modules "
                "are refused"
            )

    def run_backward(self, gy: Tensor, *saved: Tensor) -> Tensor | None:
        self.begin_backward()
        grad, partial = self.backward(gy, *saved)
        if grad is None or partial is None:
            return None
        if self.store is not None:
            self.store.add(self, partial, (gy, *saved))
        return self.keep(grad, partial)

    def keep(self, grad: Tensor, partial: Partial) -> Tensor:
        """`grad`, after a note of what was measured with it."""
        self.partial = partial
        self.handed = state_of(grad)
        return grad

    def drop(self) -> None:
        """Let go of what was measured: a loss that is kept keeps the recorder."""
        self.partial = None

    def begin_backward(self) -> None:
        if self.closed:
            raise GramError(f"parameter {self.name}: the backward must run inside the measure() block")
        if self.delivery is None and self.block_delivery is not None:
            self.block_delivery.arrive(None, self.recomputed)
        self.backwards += 1
        if self.backwards > 1:
            raise GramError(f"parameter {self.name} (module {self.module_name}) met a second backward in one block")

    def backward(self, gy: Tensor, *saved: Tensor) -> Formed:
        raise NotImplementedError(type(self).__name__)

    def from_rows(self, rows_BN: Tensor) -> Formed:
        """Gradient and partial of a bias or a norm from its rows' gradients, formed whole; neither where `delivery`
        forms both later."""
        if self.delivery is not None:
            self.delivery.put_rows(self, rows_BN)
            return None, None
        return self.summed(rows_BN)

    def summed(self, rows_BN: Tensor) -> tuple[Tensor, Rows]:
        """Gradient and partial from the rows' gradients, formed now."""
        rows_BN = rows_BN.to(accumulation_dtype(rows_BN.dtype))
        total = sum_of_rows(self.layout, rows_BN)
        # A copy in any case: autograd would make one of a gradient that is held elsewhere, and `handed` be in vain.
        return total.to(self.parameter.dtype, copy=True), Rows(rows_BN, total)


def sum_of_rows(layout: RowLayout, rows_PBN: Tensor) -> Tensor:
    """(..., N) weighted sums of (..., B, N) in the accumulation dtype: the same to the last bit for one parameter and
    for many together, so that a resumed run does not depend on which of its blocks was the first."""
    return (rows_PBN * layout.weights(rows_PBN.dtype)[:, None]).sum(-2)


def refuse_graph() -> None:
    """Refuse a backward that would make a graph. Every backward here calls it: it is cheaper than torch's
    once_differentiable, and names the cause."""
    if torch.is_grad_enabled():
        raise GramError(
            "backward(create_graph=True) is not covered: second derivatives of a measured block are refused"
        )


def state_of(tensor: Tensor) -> tuple[int, int]:
    """Where the tensor lies, and in which version."""
    return tensor.data_ptr(), version_of(tensor)


class ModuleRecorders:
    """The recorders of one module in one block, by attribute. One `Carry` or one hook feeds them together."""

    def __init__(self, of: dict[str, Recorder]) -> None:
        self.of = of
        self.each = list(of.values())
        self.weight = of.get("weight")
        self.gradients: list[Tensor | None] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [recorder.parameter for recorder in self.each]

    def carry(self, x: Tensor) -> Tensor:
        """x, for the module to work on."""
        return direct(Carry, x, self, *self.parameters)

    def watch(self, y: Tensor, carried: Tensor) -> None:
        """Form the parameters' gradients as soon as the gradient of the module's output y is there."""
        node: Any = carried.grad_fn
        # On the node and not on y: hooks that change y's gradient have run by then.
        output: Any = y.grad_fn
        output.register_prehook(lambda gys: self.receive(gys[0], node))

    def deliver(self, y: Tensor | None, x: Tensor, delivery: Delivery) -> None:
        """Like `watch`, for a module that worked on x itself and leaves its gradients with `delivery`."""
        # x is kept as autograd keeps what it saves: until it is used, and not if it was changed. A bias uses none.
        kept, version = [x], version_of(x)
        for recorder in self.each:
            recorder.delivery = delivery

        def receive(gys: tuple[Tensor | None, ...]) -> None:
            refuse_graph()
            gy = gys[0]
            if gy is None:
                return
            inputs, kept[:] = tuple(kept), ()  # gone in a second backward, which the recorders refuse
            if inputs and version_of(inputs[0]) != version and self.weight is not None:
                raise GramError(
                    f"module {self.each[0].module_name}: its input was changed in place after it had been used"
                )
            delivery.arrive(inputs[0] if inputs else None, self.each[0].recomputed)
            for recorder in self.each:
                grad = recorder.run_backward(gy, *inputs)
                if grad is not None:
                    delivery.put(recorder, grad)

        node: Any = y.grad_fn  # type: ignore[union-attr]
        node.register_prehook(receive)

    def receive(self, gy: Tensor | None, node: Any) -> None:
        refuse_graph()
        if gy is None:
            return
        (x,) = node.saved_tensors
        self.gradients = [recorder.run_backward(gy, x) for recorder in self.each]


class Carry(torch.autograd.Function):
    """Identity on x. Its backward runs after the hook of `ModuleRecorders.watch` and hands out what the hook formed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recorders: ModuleRecorders, *parameters: Tensor) -> Tensor:
        ctx.recorders = recorders
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gx: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph()
        gradients, ctx.recorders.gradients = ctx.recorders.gradients, []
        return (gx, None, *(gradients or [None] * len(ctx.recorders.each)))


class Tap(torch.autograd.Function):
    """Identity on the output y of a module whose input has no gradient (token ids)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, parameter: Tensor, recorder: Recorder, *saved: Tensor) -> Tensor:
        ctx.recorder = recorder
        ctx.save_for_backward(*saved)
        return unviewed(y)  # it may be changed in place

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph()
        saved = ctx.saved_tensors
        return (gy, ctx.recorder.run_backward(gy, *saved), None, *(None for _ in saved))


class BiasRecorder(Recorder):
    """Bias of a linear map: a row's gradient is the sum of its output gradients over everything but the last
    dimension."""

    def backward(self, gy: Tensor, *saved: Tensor) -> Formed:
        gy_BTN = gy if gy.dim() == 3 else gy.reshape(self.layout.rows, -1, gy.shape[-1])
        return self.from_rows(gy_BTN.sum(1, dtype=accumulation_dtype(gy.dtype)))
