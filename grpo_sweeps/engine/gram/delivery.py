"""`Delivery` hands the gradients of a block to autograd all at once, on their way into `.grad`.

A node in every measured module, only to hand its parameter's gradient to autograd, costs the host more than the
module's product does in a small model. So one node at the head of the block has edges to all parameters, and modules
leave their gradients with it. It is made before the nodes of these modules, and autograd prefers those that were made
later, so it runs last. The sums of biases and norms wait for it too, and are formed together.

It pays: in 40 interleaved rounds on a card, steps without it were slower in 33, 32, 28 and 32 of them at four shapes,
by 7% of a step at 8 rows of a 0.5B model and by 0.3% to 0.5% at 32 rows. At 4B no difference was seen.

It serves where the gradients may wait: nothing is in `.grad` yet (they would lie beside it until the end of the
backward) and no hook wants to see them. In a backward that does not lead to the node (the first module's output is
detached or not used, or several backwards run over separate parts) each gradient goes to autograd where it is formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpo_sweeps.engine.gram.layout import GramError, RowLayout, accumulation_dtype
from grpo_sweeps.engine.gram.recorder import Recorder, Rows, refuse_graph, sum_of_rows
from grpo_sweeps.engine.gram.torch_private import backward_id, copy_each, direct, runs_to_its_end, unviewed, will_run

PARTS_LEFT_OUT = (
    "autograd.grad and backward(inputs=...) leave out parts of the backward, which would not be measured: "
    "a block takes row_sums.sum().backward()"
)


class Delivery:
    """What the modules of one block leave for its one node. It takes part once `attach` was called.

    parameters: each once.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layout: RowLayout) -> None:
        self._parameters = list(parameters)
        self._layout = layout
        self._gradients: dict[int, Tensor] = {}  # by the parameter's id: a tensor's hash is made in Python
        self._waiting: list[tuple[Recorder, Tensor]] = []
        self.attached = False
        self._node: Any = None  # from `attach` until it has run
        self._leads_here = True  # the backward that runs, as far as is known
        self._seen_whole = -1  # the last backward that leads elsewhere and was asked for everything

    def attach(self, y: Tensor) -> Tensor:
        """y behind the block's node, which is then at the head of all that delivers here."""
        self.attached = True
        headed = direct(Deliver, y, torch.zeros((), requires_grad=True), self, *self._parameters)
        self._node = headed.grad_fn
        return headed

    def arrive(self, x: Tensor | None, recomputed: bool) -> None:
        """Find out whether the backward that runs leads to the block's node. Every node that measures calls this before
        it puts gradients.

        x: what this node's gradients go on to, if anything. recomputed: the node belongs to a recomputation, inside the
        backward that leads to this one.
        """
        if recomputed:  # its own graph ends before the node: nothing new is known
            return
        self._leads_here = self._node is not None and will_run(self._node)
        if self._leads_here:
            return
        task = backward_id()
        if x is not None and task != self._seen_whole:
            if not runs_to_its_end(x):
                raise GramError(PARTS_LEFT_OUT)
            self._seen_whole = task
        if self._gradients or self._waiting:  # of recomputations that came before this was known
            left = [(p, g) for p, g in zip(self._parameters, self.take(), strict=True) if g is not None]
            torch.autograd.backward([p for p, _ in left], [g for _, g in left])

    def put(self, recorder: Recorder, gradient: Tensor) -> None:
        """Leave a parameter's gradient here, or hand it on where the backward leads elsewhere."""
        if self._leads_here:
            self._gradients[id(recorder.parameter)] = gradient
        else:
            torch.autograd.backward(recorder.parameter, gradient)

    def put_rows(self, recorder: Recorder, rows_BN: Tensor) -> None:
        """Leave the rows' gradients of a bias or a norm, of which `take` forms the weighted sum."""
        if self._leads_here:
            self._waiting.append((recorder, rows_BN))
        else:
            torch.autograd.backward(recorder.parameter, recorder.keep(*recorder.summed(rows_BN)))

    def take(self) -> list[Tensor | None]:
        """Every parameter's gradient, or None. The sums that waited are formed first."""
        self._sum_up()
        gradients, self._gradients, self._node, self._leads_here = self._gradients, {}, None, False
        return [gradients.get(id(parameter)) for parameter in self._parameters]

    def close(self) -> None:
        """Make sure that nothing is left. Raises GramError where gradients still wait."""
        left = len(self._gradients) + len(self._waiting)
        if left:
            raise GramError(
                f"the backward did not come to the head of the block, where the gradients of {left} parameters wait: "
                "it failed on the way, or the first measured module's output was detached before a recomputed layer"
            )

    def drop(self) -> None:
        """Let go of everything, above all of the node: they hold one another."""
        self._gradients, self._waiting, self._node = {}, [], None

    def _sum_up(self) -> None:
        groups: dict[tuple[torch.Size, torch.dtype, torch.dtype], list[tuple[Recorder, Tensor]]] = {}
        for recorder, rows in self._waiting:
            groups.setdefault((rows.shape, rows.dtype, recorder.parameter.dtype), []).append((recorder, rows))
        self._waiting = []
        for (_, rows_dtype, dtype), members in groups.items():
            wide = accumulation_dtype(rows_dtype)
            rows_PBN = torch.stack([rows for _, rows in members]).to(wide)
            totals_PN = sum_of_rows(self._layout, rows_PBN)
            # Separate tensors, as other gradients are.
            grads = [torch.empty_like(recorder.parameter) for recorder, _ in members]
            copy_each(grads, totals_PN.to(dtype).unbind())
            made = zip(members, rows_PBN.unbind(), totals_PN.unbind(), grads, strict=True)
            for (recorder, _), rows, total, grad in made:
                self._gradients[id(recorder.parameter)] = recorder.keep(grad, Rows(rows, total))


class Deliver(torch.autograd.Function):
    """Identity on y (B, ...). Its backward hands out what was delivered. unasked: a leaf whose gradient nobody can ask
    for."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, unasked: Tensor, delivery: Delivery, *parameters: Tensor) -> Tensor:
        ctx.delivery = delivery
        return unviewed(y)  # it may be changed in place

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph()
        if not will_run(ctx.next_functions[1][0]):
            raise GramError(PARTS_LEFT_OUT)
        return (gy, None, None, *ctx.delivery.take())
