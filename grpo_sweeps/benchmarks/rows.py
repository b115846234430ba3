"""Grams from rows that exist as tensors, the slow and obvious way that the measurement is compared with.

K_ij = <psi_i, psi_j> within each group: products of the rows in float32 (float64 rows: float64), sums over pieces of
a row in float64. Rows of one parameter at a time, so that they can be freed as soon as their products are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from grpo_sweeps.benchmarks.setup import Batch, trainable

# Rows are widened piece by piece; one piece of all rows takes this much. The CPU's fits its cache.
PIECE_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
# Columns of one product of a batched matmul: one long, thin product would keep a single multiprocessor busy.
COLUMNS = 4096


class RowProducts:
    """Adds up the (R, R) Grams of equal groups, parameter by parameter."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        G, R = len(batch.group_sizes), batch.group_sizes[0]
        self.grams_GRR = torch.zeros(G, R, R, dtype=torch.float64, device=batch.ids_BT.device)

    def add(self, rows: Sequence[Tensor]) -> Tensor:
        """Take in the B gradients of one parameter; returns their sum with the batch's weights, shaped like one."""
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
        """One (R, R) float64 Gram a group, on the CPU."""
        return list(self.grams_GRR.cpu().unbind())


def products(piece_GRn: Tensor) -> Tensor:
    """(G, R, R) float64 products of the rows of a piece."""
    G, R, n = piece_GRn.shape
    whole = n // COLUMNS * COLUMNS
    tail = piece_GRn[..., whole:]
    sums = (tail @ tail.mT).double()
    if whole:
        body = piece_GRn[..., :whole].view(G, R, -1, COLUMNS).transpose(1, 2)  # (G, n / COLUMNS, R, COLUMNS)
        sums += (body @ body.mT).sum(1, dtype=torch.float64)
    return sums


def logits_sums(model: nn.Module, ids_BT: Tensor, completion_BT: Tensor) -> Tensor:
    """(B,): summed log-probabilities of each row's scored tokens through `model(...).logits`, T x V logits and all;
    float32 (float64 models: float64)."""
    logits = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs_BT = logits.log_softmax(-1).gather(2, ids_BT[:, 1:, None]).squeeze(2)
    return (logprobs_BT * completion_BT[:, 1:]).sum(1)


def autograd_gram(
    model: nn.Module, batch: Batch, row_bytes: int, say: Callable[[str], None] = lambda _: None
) -> list[Tensor]:
    """Grams over all parameters by ordinary autograd, one row at a time, in the model's dtype; (R, R) float64 each.

    Rows are kept for as many parameters at once as fit `row_bytes`, one parameter at least; every such set costs B
    forward and backward passes.
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
    """The parameters in order, cut where one row of a set would pass `row_bytes`."""
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
