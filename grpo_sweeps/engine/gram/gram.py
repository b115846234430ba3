"""GradientGram: exact inner products of per-rollout gradients over all trainable parameters, in one backward.

For rows i with scalar row_sums[i] and psi_i its gradient over all trainable parameters, a block yields K_ij = <psi_i,
psi_j> and adds sum_i w_i psi_i to `.grad`. Rows must not interact in the forward; no psi_i is ever held whole.

    gram = GradientGram(model)
    with gram.measure(group_sizes=[8, 8], weights=w) as m:
        log_probs(model, batch).sum().backward()
    m.matrices()

torch.compile: the model, or its layers, may be compiled (in place, or as a module that wraps them), before or after.
A block runs uncompiled, and plain steps keep their compiled code whole, unless `compile_between` is set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from grpo_sweeps.engine.gram.delivery import Delivery
from grpo_sweeps.engine.gram.large_group import LargeGroup, Store, room_for
from grpo_sweeps.engine.gram.layout import GramError, RowLayout, reduced_float32
from grpo_sweeps.engine.gram.linear import FORMS, Form, GramOptions, begin_compiling, block_bytes_for
from grpo_sweeps.engine.gram.measurement import Measurement, widest_eps
from grpo_sweeps.engine.gram.patch import MeasuredModules, Recorders, patch, unpatch
from grpo_sweeps.engine.gram.recompute import Recompute, exchanged
from grpo_sweeps.engine.gram.recorder import Workspace
from grpo_sweeps.engine.gram.torch_private import compiled_code, trial
from grpo_sweeps.engine.gram.uses import claim_parameters, held_parameters, refuse_changes, refuse_couplings


class GradientGram:
    """Claims every trainable parameter of `model`, or raises GramError naming the parameter and module it cannot cover.

    form: how linear layers are measured: "auto" by measured cost, or one of `forms.FORMS` ("blocks", "onepass",
    "fused", "ghost"). block_bytes: most memory of one block of per-row gradients, where a form writes one; by default
    2 MB on a CPU (cache) and 512 MB on CUDA. compile_between: what torch.compile compiled runs compiled in a block too,
    in pieces between the claimed modules. It is for runs that measure every step: Dynamo serves later plain steps from
    these pieces as well, which is right but slower than whole layers. It has no effect under checkpointing.
    """

    def __init__(
        self,
        model: nn.Module,
        form: Form = "auto",
        block_bytes: int | None = None,
        compile_between: bool = False,
    ) -> None:
        if form not in FORMS:
            raise GramError(f"form={form!r}: allowed are {', '.join(FORMS)}")
        if block_bytes is not None and block_bytes < 1:
            raise GramError(f"block_bytes={block_bytes}: a positive number of bytes is needed")
        trial()
        self.model = model
        self.compile_between = compile_between
        self.claims = claim_parameters(model)
        self.held = held_parameters(model)
        self.device = self.claims[0].parameter.device
        self.measured = MeasuredModules(self.claims)
        self.recompute = Recompute(model)
        self.options = GramOptions(form, block_bytes or block_bytes_for(self.device), Workspace())

    def expect(self, groups: Sequence[tuple[int, int]], cross_groups: bool = False) -> None:
        """Begin to compile, in the background, the kernels for blocks of these groups, (rows per group, groups) each;
        cross_groups: for blocks that measure the products between groups too."""
        begin_compiling(groups, cross_groups, self._dtype(), self.device)

    @property
    def forms_taken(self) -> dict[str, int]:
        """{form: weights measured by it} over all blocks so far. "blocks" is the reference."""
        return dict(self.options.workspace.forms)

    @contextmanager
    def measure(
        self, group_sizes: Sequence[int], weights: Sequence[float] | Tensor | None = None, cross_groups: bool = False
    ) -> Iterator[Measurement]:
        """Open a block for one micro-batch: one forward over sum(group_sizes) rows, one backward of their summed
        scalars.

        group_sizes: rows of each group, back to back. weights: (rows,), default 1. cross_groups: also measure the
        products between groups. After the block `.grad` has gained sum_i w_i psi_i and the model is as it was, also
        after an exception. Results are read when they are asked for: until then nothing waits for the device. Raises
        GramError where rows cannot be told apart, where a module runs twice, for a backward of some inputs alone, and
        under autocast or TF32.
        """
        layout = RowLayout.build(group_sizes, weights, cross_groups, self.device)
        with self._block(layout) as measurement:
            yield measurement

    @contextmanager
    def measure_group(
        self, size: int, weights: Sequence[float] | Tensor | None = None, device_bytes: int | None = None
    ) -> Iterator[LargeGroup]:
        """Open a group of `size` rows that do not fit one micro-batch: forward and backward go part by part.

            with gram.measure_group(size=64, weights=w) as group:
                for rows in micro_batches:                     # in the order of the weights
                    with group.part(len(rows)):
                        row_sums(rows).sum().backward()
            group.matrix()                                     # (64, 64)

        It is read like what `measure` gives, and `.grad` gains the same. It is exact, at the cost that `large_group`
        tells: the inputs and output gradients of every claimed module are kept until the group closes, `device_bytes`
        of them on the device (None: half of what is free there now) and the rest in host memory. Raises GramError also
        where the parts do not make up the group or a parameter changes before it closes.
        """
        layout = RowLayout.build([size], weights, False, self.device)
        room = room_for(self.device) if device_bytes is None else device_bytes
        group = LargeGroup(self.claims, self.measured, layout, self._dtype(), self.options, self._block, room)
        try:
            yield group
            group.close()
        finally:
            group.drop()

    @contextmanager
    def _block(self, layout: RowLayout, store: Store | None = None) -> Iterator[Measurement]:
        modules = dict(self.model.named_modules())
        refuse_couplings(self.model, modules)
        refuse_changes(modules.values(), self.held, self.device)
        self._refuse_modes()
        measurement = Measurement(self.claims, layout, self._dtype())
        between = self._compiles_between(modules.values())
        waits = store is None and not between and measurement.may_wait
        delivery = Delivery(measurement.parameters, layout) if waits else None
        recorders = Recorders(self.measured, layout, measurement.plan, self.options, store, delivery)
        # The first block of a checkpointed model shows the ends.
        exchange = self.recompute.exchangeable() if self.measured.ends else []
        forwards = patch(self.measured, recorders, between)
        try:
            try:
                # Python nodes of a backward cost more on autograd's own threads, which hold no Python state.
                with (
                    nullcontext() if between else uncompiled(modules.values()),
                    exchanged(exchange, recorders.frame),
                    torch.autograd.set_multithreading_enabled(False),
                ):
                    yield measurement
            finally:
                unpatch(self.measured, forwards)
                made = recorders.made()
                for recorder in made:
                    recorder.closed = True
            if delivery is not None:
                delivery.close()
            measurement._finish(made)
        finally:
            for recorder in recorders.made():  # a loss that is kept keeps them
                recorder.drop()
            if delivery is not None:
                delivery.drop()

    def _dtype(self) -> torch.dtype:
        return widest_eps(held.parameter for held in self.held)

    def _compiles_between(self, modules: Iterable[nn.Module]) -> bool:
        """Whether code between claimed modules runs compiled: never under checkpointing, since Dynamo traces a
        checkpoint whole or not at all, and gives up a layer's code for good when it meets a claimed module there."""
        return self.compile_between and not any(
            module.__dict__.get("gradient_checkpointing") and module.training for module in modules
        )

    def _refuse_modes(self) -> None:
        if torch.is_autocast_enabled(self.device.type):
            raise GramError("autocast is on, which mixes dtypes: load the model in the dtype to train in")
        if self.device.type == "cuda" and reduced_float32():
            raise GramError(
                "TF32 products are on (torch.backends.cuda.matmul): the Gram wants full float32, switch them off"
            )


def uncompiled(modules: Iterable[nn.Module]) -> AbstractContextManager[Any]:
    """Run what torch.compile compiled as it was written, in a model of these modules or around it. Where nothing was
    compiled, the stance is left alone: every Python frame pays for it."""
    return torch.compiler.set_stance("force_eager") if compiled_code(modules) else nullcontext()
