"""The steps that are compared, and the float64 Gram that they are compared with.

One step is forward and backward of one micro-batch, and after it `.grad` holds the gradient of the weighted loss; all
but plain and stock also give the Gram of the rows, K_ij = <psi_i, psi_j> within each group.

    plain      the package's blockwise head, measurement off, the weights folded into the loss
    ours       the same model and head inside GradientGram.measure
    stock      transformers' logits of size T x V, log_softmax and gather, the weights folded into the loss
    naive      one forward and backward per row, every row's gradient kept, then all products
    vmap       per-row gradients by torch.func, then the same products
    opacus     the same by Opacus, backpack by BackPACK, each as its documentation has it

The last three, the rivals, need every row's gradient at once and the T x V logits: they know no blockwise head.
Gradient checkpointing is off for them, since torch.func does not run it and its second forward calls the hooks of the
other two twice. Opacus and BackPACK are the extra `bench`; without them their rows say how to install them.

Rows that exist as tensors are the slow and obvious way to a Gram: products in float32 (float64 rows: float64), sums
over pieces of a row in float64, one parameter at a time, so that its rows can be freed once their products are taken.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from grpo_sweeps.benchmarks.setup import Batch, NotInstalled, drop_grads, free_memory, set_checkpointing, trainable
from grpo_sweeps.engine.device_memory import free_bytes
from grpo_sweeps.engine.gram import GradientGram
from grpo_sweeps.engine.gram.torch_private import MODULE_HOOK_FLAGS, MODULE_HOOKS
from grpo_sweeps.engine.head import completion_log_probs

# Rows are widened piece by piece; one piece of all rows takes this much. The CPU's fits its cache.
PIECE_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
# Columns of one product of a batched matmul: one long, thin product would keep a single multiprocessor busy.
COLUMNS = 4096
# What naive needs beside the rows: activations of one row, the widened pieces of its products.
NAIVE_MARGIN_BYTES = 2 * 2**30
LOWER_BOUND = "rows not kept: lower bound"
HOOKS = (*MODULE_HOOKS, *MODULE_HOOK_FLAGS)


class RowProducts:
    """Adds up the (R, R) Grams of equal groups, parameter by parameter."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        G, R = len(batch.group_sizes), batch.group_sizes[0]
        self.grams_GRR = torch.zeros(G, R, R, dtype=torch.float64, device=batch.ids_BT.device)

    def add(self, rows: Sequence[Tensor]) -> Tensor:
        """Add the B gradients of one parameter and return their weighted sum, in the parameter's shape."""
        flat = [row.reshape(-1) for row in rows]
        dtype = torch.promote_types(flat[0].dtype, torch.float32)
        total = torch.empty_like(flat[0])
        step = max(1, PIECE_BYTES[total.device.type] // (len(flat) * dtype.itemsize))
        weights_B = self.batch.weights_B.to(dtype)
        for low in range(0, total.numel(), step):
            piece_Bn = torch.stack([row[low : low + step] for row in flat]).to(dtype)
            total[low : low + step] = weights_B @ piece_Bn
            self.grams_GRR += products(piece_Bn.view(len(self.batch.group_sizes), self.batch.group_sizes[0], -1))
        return total.view_as(rows[0])

    def matrices(self) -> list[Tensor]:
        """One (R, R) float64 Gram per group, on the CPU."""
        return list(self.grams_GRR.cpu().unbind())


def products(piece_GRn: Tensor) -> Tensor:
    """Products of the rows of a piece, (G, R, R) float64."""
    G, R, n = piece_GRn.shape
    whole = n // COLUMNS * COLUMNS
    tail = piece_GRn[..., whole:]
    sums = (tail @ tail.mT).double()
    if whole:
        body = piece_GRn[..., :whole].view(G, R, -1, COLUMNS).transpose(1, 2)  # (G, n / COLUMNS, R, COLUMNS)
        sums += (body @ body.mT).sum(1, dtype=torch.float64)
    return sums


def logits_sums(model: nn.Module, ids_BT: Tensor, completion_BT: Tensor) -> Tensor:
    """Summed log-probabilities of each row's scored tokens, (B,), through the full T x V `model(...).logits`; float32
    (float64 models: float64)."""
    logits = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs_BT = logits.log_softmax(-1).gather(2, ids_BT[:, 1:, None]).squeeze(2)
    return (logprobs_BT * completion_BT[:, 1:]).sum(1)


def autograd_gram(
    model: nn.Module, batch: Batch, row_bytes: int, say: Callable[[str], None] = lambda _: None
) -> list[Tensor]:
    """Grams over all parameters by ordinary autograd, one row at a time, in the model's dtype; (R, R) float64 each.

    Rows are kept for as many parameters at once as fit into `row_bytes`, at least one; each such set costs B forward
    and backward passes.
    """
    sums = RowProducts(batch)
    B = len(batch.weights_B)
    sets = parameter_sets(list(trainable(model).values()), max(1, row_bytes // B))
    for number, parameters in enumerate(sets):
        rows = []
        for i in range(B):
            row_sum = logits_sums(model, batch.ids_BT[i : i + 1], batch.completion_BT[i : i + 1]).sum()
            rows.append(torch.autograd.grad(row_sum, parameters, allow_unused=True, materialize_grads=True))
        for of_parameter in zip(*rows, strict=True):
            sums.add(of_parameter)
        del rows, of_parameter
        say(f"parameter set {number + 1} of {len(sets)}")
    return sums.matrices()


def parameter_sets(parameters: Sequence[nn.Parameter], row_bytes: int) -> list[list[nn.Parameter]]:
    """The parameters in order, in sets of which one row takes at most `row_bytes`."""
    sets: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if not sets or filled + size > row_bytes:
            sets.append([])
            filled = 0
        sets[-1].append(parameter)
        filled += size
    return sets


def frobenius_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Norm of all groups' differences over the norm of all groups' exact Grams."""
    a, b = torch.stack(list(found)).double(), torch.stack(list(exact)).double()
    return float((a - b).norm() / b.norm())


class Subject:
    """One way to make a step. `note` says in the table what a reader must know about it, `apart` that it leaves so
    much memory behind that it is timed after the others."""

    note = ""
    apart = False

    def __init__(self, model: nn.Module, batch: Batch, form: str = "auto", block_bytes: int | None = None) -> None:
        self.model, self.batch = model, batch

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Context of a step, outside its time, that undoes what the subject changes on the model."""
        yield

    def step(self) -> list[Tensor] | None:
        """Forward and backward; returns one (R, R) float64 Gram per group on the CPU, or None where it makes none."""
        raise NotImplementedError


class Plain(Subject):
    def step(self) -> None:
        sums_B = blockwise_sums(self.model, self.batch)
        (sums_B * self.batch.weights_B).sum().backward()


class Ours(Subject):
    def __init__(self, model: nn.Module, batch: Batch, form: str = "auto", block_bytes: int | None = None) -> None:
        super().__init__(model, batch)
        self.gram = GradientGram(model, form, block_bytes)  # type: ignore[arg-type]

    def step(self) -> list[Tensor]:
        with self.gram.measure(self.batch.group_sizes, self.batch.weights_B) as m:
            blockwise_sums(self.model, self.batch).sum().backward()
        return m.matrices()


class Stock(Subject):
    note = "T x V logits"

    def step(self) -> None:
        sums_B = logits_sums(self.model, self.batch.ids_BT, self.batch.completion_BT)
        (sums_B * self.batch.weights_B).sum().backward()


class Naive(Subject):
    """Where the rows do not fit into memory it makes the passes alone: their time is below that of a Gram."""

    apart = True

    def __init__(self, model: nn.Module, batch: Batch, form: str = "auto", block_bytes: int | None = None) -> None:
        super().__init__(model, batch)
        self.keeps_rows = rows_fit(model, batch)

    @property
    def note(self) -> str:  # type: ignore[override]
        return "" if self.keeps_rows else LOWER_BOUND

    def step(self) -> list[Tensor] | None:
        if self.keeps_rows:
            try:
                return self.with_rows()
            except torch.OutOfMemoryError:
                self.keeps_rows = False
        else:
            self.without_rows()
            return None
        # After the except clause the error is gone, and with it the frames that held the rows.
        drop_grads(self.model)
        free_memory()
        self.without_rows()
        return None

    def with_rows(self) -> list[Tensor]:
        parameters = list(trainable(self.model).values())
        rows: list[list[Tensor]] = []
        for i in range(len(self.batch.weights_B)):
            blockwise_sums(self.model, one_row(self.batch, i)).sum().backward()
            # The gradient itself becomes the row: no copy.
            rows.append([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
            drop_grads(self.model)
        sums = RowProducts(self.batch)
        for parameter in reversed(parameters):  # popping frees each parameter's rows before the next sum is made
            parameter.grad = sums.add([row.pop() for row in rows])
        return sums.matrices()

    def without_rows(self) -> None:
        for i in range(len(self.batch.weights_B)):
            (blockwise_sums(self.model, one_row(self.batch, i)) * self.batch.weights_B[i]).sum().backward()


def blockwise_sums(model: nn.Module, batch: Batch) -> Tensor:
    """Summed log-probabilities of each row's scored tokens through the blockwise head, (B,)."""
    attention_BT = torch.ones_like(batch.ids_BT)
    return completion_log_probs(model, batch.ids_BT, attention_BT, batch.completion_BT).sum(1)


def one_row(batch: Batch, i: int) -> Batch:
    row = slice(i, i + 1)
    return Batch(batch.ids_BT[row], batch.completion_BT[row], batch.weights_B[row], [1])


def rows_fit(model: nn.Module, batch: Batch) -> bool:
    """Do all rows' gradients fit into the card's free memory, the allocator's cache included? On a CPU: True."""
    device = batch.ids_BT.device
    if device.type != "cuda":
        return True
    row_bytes = sum(p.numel() * p.element_size() for p in trainable(model).values())
    return len(batch.weights_B) * row_bytes + NAIVE_MARGIN_BYTES <= free_bytes(device)


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
        """Attach to the model what the rival needs there; `unchanged` removes it again."""

    def finish(self, rows: dict[str, Tensor]) -> list[Tensor]:
        """Products and weighted sum from {parameter: (B, ...)}; empties `rows`."""
        sums = RowProducts(self.batch)
        for name, parameter in trainable(self.model).items():
            parameter.grad = sums.add(rows.pop(name).detach().unbind())
        return sums.matrices()

    def take(self, attribute: str) -> dict[str, Tensor]:
        """Per-row gradients that a rival left on the parameters: one (B, ...) tensor each, or a list with one per
        use."""
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
    """Per-row gradients by torch.func, with unfused attention: not every fused kernel has a rule for vmap."""

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
    """An optional package. Raises NotInstalled where it is missing; an error inside the package stays what it is."""
    if not installed(package):
        raise NotInstalled("not installed: pip install grpo_sweeps[bench]")
    return importlib.import_module(package)


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Context after which the model's modules and parameters have the hooks and attributes that they had before.

    BackPACK cannot be detached from a model, and either package leaves activations on the modules when a step fails.
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
