"""Per-row gradients by torch.func, Opacus and BackPACK, each as its documentation has it, then the same products.

All three need every row's gradient at once and the T x V logits: they know no blockwise head. Gradient checkpointing
is off for them, since torch.func does not run it and its second forward calls the hooks of the other two twice. Opacus
and BackPACK are the extra `bench`; without them their rows say how to install them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from grpo_sweeps.benchmarks.rows import RowProducts, logits_sums
from grpo_sweeps.benchmarks.setup import Batch, NotInstalled, set_checkpointing, trainable
from grpo_sweeps.benchmarks.subjects import Naive, Ours, Plain, Stock, Subject

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class Rival(Subject):
    """A step on the logits, without checkpointing, from (B, ...) gradients of every parameter."""

    note = "T x V logits"
    apart = True

    def __init__(self, model: nn.Module, batch: Batch, form: str = "auto", block_bytes: int | None = None) -> None:
        super().__init__(model, batch)
        self.checkpointed = bool(getattr(model, "is_gradient_checkpointing", False))
        if self.checkpointed:
            self.note = f"{self.note}, checkpointing off"

    @contextmanager
    def attached(self) -> Iterator[None]:
        with ExitStack() as undo:
            undo.callback(self.model.train, self.model.training)
            if self.checkpointed:
                undo.callback(set_checkpointing, self.model, True)
                set_checkpointing(self.model, False)
            undo.enter_context(unchanged(self.model))
            self.attach()
            yield

    def attach(self) -> None:
        """Put on the model what the rival needs there; `unchanged` takes it away again."""

    def finish(self, rows: dict[str, Tensor]) -> list[Tensor]:
        """Products and weighted sum from {parameter: (B, ...)}; empties `rows`."""
        sums = RowProducts(self.batch)
        for name, parameter in trainable(self.model).items():
            parameter.grad = sums.add(rows.pop(name).detach().unbind())
        return sums.matrices()

    def take(self, attribute: str) -> dict[str, Tensor]:
        """What a rival left on the parameters: one (B, ...) tensor, or a list of them, one a use of the parameter."""
        rows: dict[str, Tensor] = {}
        for name, parameter in trainable(self.model).items():
            left: Any = getattr(parameter, attribute, None)
            if left is None:
                raise RuntimeError(f"it made no {attribute} for parameter {name}")
            delattr(parameter, attribute)
            parameter.grad = None
            rows[name] = reduce(torch.add, left) if isinstance(left, list) else left
        return rows


class Vmap(Rival):
    """Attention by its plain products: not every fused kernel has a rule for vmap."""

    note = "T x V logits, math attention"

    def step(self) -> list[Tensor]:
        parameters = {name: p.detach() for name, p in trainable(self.model).items()}

        def row_sum(values: dict[str, Tensor], ids_T: Tensor, completion_T: Tensor) -> Tensor:
            return torch.func.functional_call(Sums(self.model), prefixed(values), (ids_T[None], completion_T[None]))

        per_row = torch.func.vmap(torch.func.grad(row_sum), in_dims=(None, 0, 0))
        with sdpa_kernel(SDPBackend.MATH):
            rows = per_row(parameters, self.batch.ids_BT, self.batch.completion_BT)
        return self.finish(rows)


class Sums(nn.Module):
    """`logits_sums` of one row as a module, which `functional_call` needs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BT: Tensor, completion_BT: Tensor) -> Tensor:
        return logits_sums(self.model, ids_BT, completion_BT).sum()


def prefixed(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": value for name, value in values.items()}


class Opacus(Rival):
    def __init__(self, model: nn.Module, batch: Batch, form: str = "auto", block_bytes: int | None = None) -> None:
        super().__init__(model, batch)
        self.package: Any = imported("opacus")

    def attach(self) -> None:
        self.model.train()  # its hooks look away in eval mode; none of the models has dropout
        self.wrapped = self.package.GradSampleModule(self.model, batch_first=True, loss_reduction="sum")

    def step(self) -> list[Tensor]:
        logits_sums(self.wrapped, self.batch.ids_BT, self.batch.completion_BT).sum().backward()
        return self.finish(self.take("grad_sample"))


class BackPACK(Rival):
    def __init__(self, model: nn.Module, batch: Batch, form: str = "auto", block_bytes: int | None = None) -> None:
        super().__init__(model, batch)
        self.package: Any = imported("backpack")
        self.extensions: Any = importlib.import_module("backpack.extensions")

    def attach(self) -> None:
        self.package.extend(self.model)

    def step(self) -> list[Tensor]:
        with self.package.backpack(self.extensions.BatchGrad()):
            logits_sums(self.model, self.batch.ids_BT, self.batch.completion_BT).sum().backward()
        return self.finish(self.take("grad_batch"))


def imported(package: str) -> Any:
    """Imported by name, since it is optional. Raises NotInstalled; an error inside the package stays what it is."""
    if not installed(package):
        raise NotInstalled("not installed: pip install grpo_sweeps[bench]")
    return importlib.import_module(package)


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """After the block the model's modules and parameters have the hooks and attributes that they had before.

    BackPACK cannot be taken off a model, and either package leaves activations on the modules when a step fails.
    """
    modules = {m: (set(vars(m)), {name: dict(vars(m)[name]) for name in HOOKS}) for m in model.modules()}
    parameters = {p: set(vars(p)) for p in model.parameters()}
    try:
        yield
    finally:
        for module, (attributes, hooks) in modules.items():
            for name, before in hooks.items():
                vars(module)[name].clear()
                vars(module)[name].update(before)
            for name in set(vars(module)) - attributes:
                delattr(module, name)
        for parameter, attributes in parameters.items():
            for name in set(vars(parameter)) - attributes:
                delattr(parameter, name)


SUBJECTS: dict[str, type[Subject]] = {
    "plain": Plain,
    "ours": Ours,
    "stock": Stock,
    "naive": Naive,
    "vmap": Vmap,
    "opacus": Opacus,
    "backpack": BackPACK,
}
