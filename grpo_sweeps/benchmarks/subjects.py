"""The steps that are compared. One step is forward and backward of one micro-batch, and after it `.grad` holds the
gradient of the weighted loss; all but plain and stock also give the Gram of the rows.

    plain   the package's blockwise head, measurement off, the weights folded into the loss
    ours    the same model and head inside GradientGram.measure
    stock   transformers' logits of size T x V, log_softmax and gather, the weights folded into the loss
    naive   one forward and backward a row, every row's gradient kept, then all products

The others are in `rivals`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from grpo_sweeps.benchmarks.rows import RowProducts, logits_sums
from grpo_sweeps.benchmarks.setup import Batch, drop_grads, free_memory, trainable
from grpo_sweeps.engine.gram import GradientGram
from grpo_sweeps.engine.head import completion_log_probs

# What naive needs beside the rows: activations of one row, the widened pieces of its products.
NAIVE_MARGIN_BYTES = 2 * 2**30
LOWER_BOUND = "rows not kept: lower bound"


class Subject:
    """One way to make a step. `note` says in the table what a reader must know about it, `apart` that it leaves so
    much memory behind that it is timed after the others."""

    note = ""
    apart = False

    def __init__(self, model: nn.Module, batch: Batch, form: str = "auto", block_bytes: int | None = None) -> None:
        self.model, self.batch = model, batch

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Around a step and outside its time: what the subject changes on the model is undone here."""
        yield

    def step(self) -> list[Tensor] | None:
        """Forward and backward; returns one (R, R) float64 Gram a group on the CPU, or None where it makes none."""
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
    """Where the rows do not fit the memory, the passes alone are made: their time is below what a Gram would take."""

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
        # Here the error is gone, and with it the frames that held the rows.
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
    """(B,): summed log-probabilities of each row's scored tokens through the blockwise head."""
    attention_BT = torch.ones_like(batch.ids_BT)
    return completion_log_probs(model, batch.ids_BT, attention_BT, batch.completion_BT).sum(1)


def one_row(batch: Batch, i: int) -> Batch:
    row = slice(i, i + 1)
    return Batch(batch.ids_BT[row], batch.completion_BT[row], batch.weights_B[row], [1])


def rows_fit(model: nn.Module, batch: Batch) -> bool:
    """Do all rows' gradients fit what the card has free, the allocator's cache included? A CPU is taken at its word."""
    device = batch.ids_BT.device
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    row_bytes = sum(p.numel() * p.element_size() for p in trainable(model).values())
    return len(batch.weights_B) * row_bytes + NAIVE_MARGIN_BYTES <= free
