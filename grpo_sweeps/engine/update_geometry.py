"""`UpdateGeometry` measures one update of the weights: how many move, how sparse the step is, the rank of each change.

The optimiser calls `gradient` before its step, then for each parameter `part` around each part of the step that updates
it, and `end`: no more than one part's weights are held twice, a whole matrix's only where its ranks are measured. The
change is that of the weights the optimiser keeps (float32 masters, or the weights themselves where they are float32 or
float64). What is left of it in the training dtype is counted beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_sweeps import spectra
from grpo_sweeps.engine.gram.uses import layer_of
from grpo_sweeps.types import UpdateRecord

MAX_SIDE = 1024
"""Smaller side of a matrix beyond which its ranks are left out: they cost its third power (896: 0.1 s on a core)."""

BLOCK = 2**22  # entries that are made float64 at a time


def hoyer(l1: float, sq_norm: float, n: int) -> float:
    """(sqrt n - l1/l2) / (sqrt n - 1): 0 where all n entries are of one size, 1 where only one is not 0 (Hoyer 2004).

    NaN where the entries are all 0 or not finite, and for a single entry.

    >>> hoyer(3.0, 3.0, 3), hoyer(2.0, 4.0, 9)
    (0.0, 1.0)
    """
    if not 0 < sq_norm < math.inf or n < 2:
        return math.nan
    root = math.sqrt(n)
    return min(1.0, max(0.0, (root - l1 / math.sqrt(sq_norm)) / (root - 1.0)))  # rounding may pass an end


def matrix_ranks(change: Tensor) -> tuple[float, float]:
    """(stable rank, effective rank) of an (m, n) change: sum s^2 / s_1^2 and (sum s)^2 / sum s^2.

    The squares of its singular values s are the eigenvalues of the float64 Gram of its smaller side, those that
    rounding made negative set to 0; rounding leaves up to 1e-8 of the largest s where one is 0. NaN where the parameter
    is no matrix, does not change, or is wider than `MAX_SIDE` on both sides.
    """
    if not _has_ranks(change.shape):
        return math.nan, math.nan
    wide = change if change.shape[0] <= change.shape[1] else change.T
    side = wide.shape[0]
    gram = torch.zeros(side, side, dtype=torch.float64, device=change.device)
    for block in wide.split(max(1, BLOCK // side), dim=1):
        rows = block.double()
        gram.addmm_(rows, rows.T)
    values = torch.linalg.eigvalsh(gram).clamp(min=0.0).sqrt().cpu().numpy()
    return float(spectra.stable_rank(values)), float(spectra.effective_rank(values))


def _has_ranks(shape: Sequence[int]) -> bool:
    return len(shape) == 2 and 0 < min(shape) <= MAX_SIDE


@dataclass
class Parts:
    """What the parts of a parameter so far add up to."""

    l1: float = 0.0
    sq_norm: float = 0.0
    changed: int = 0
    changed_float32: int = 0
    ranks: tuple[float, float] = (math.nan, math.nan)


class UpdateGeometry:
    """Measures one update. `names`: the trainable parameters', in the optimiser's order."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._gradient = (0.0, 0.0)  # 1-norm and squared 2-norm
        self._weights_sq = 0.0
        self._open = Parts()
        self._found: list[UpdateRecord] = []

    def gradient(self, grads: Iterable[Tensor]) -> None:
        """Take in the whole step's gradient, as it was before clipping. A parameter without one counts as zeros."""
        sizes = [_sizes(grad) for grad in grads]
        self._gradient = sum(l1 for l1, _ in sizes), sum(sq for _, sq in sizes)

    @staticmethod
    def wants_whole(parameter: Tensor) -> bool:
        """Whether the parameter's ranks are measured, which its whole change is needed for."""
        return _has_ranks(parameter.shape)

    def part(self, before: Tensor, after: Tensor, stored_before: Tensor, stored_after: Tensor) -> None:
        """Take in a part of the next parameter, or all of it: the optimiser's weights, and those of the training dtype,
        before and after its update."""
        found, change = self._open, after - before
        l1, sq_norm = _sizes(change)
        if _has_ranks(change.shape) and 0 < sq_norm < math.inf:
            found.ranks = matrix_ranks(change)
        found.l1 += l1
        found.sq_norm += sq_norm
        found.changed += int((stored_before != stored_after).sum())
        found.changed_float32 += int((before != after).sum())
        self._weights_sq += _sizes(before)[1]

    def end(self, shape: Sequence[int]) -> None:
        """The parameter, of that shape, is taken in whole."""
        found, self._open = self._open, Parts()
        name = self._names[len(self._found)]
        self._found.append(
            UpdateRecord(
                step=-1,
                name=name,
                layer=layer_of(name),
                shape=tuple(shape),
                sq_norm=found.sq_norm,
                l1=found.l1,
                sparsity=hoyer(found.l1, found.sq_norm, math.prod(shape)),
                changed=found.changed,
                changed_float32=found.changed_float32,
                stable_rank=found.ranks[0],
                effective_rank=found.ranks[1],
            )
        )

    def records(self, step: int) -> list[UpdateRecord]:
        """One record per parameter."""
        return [replace(record, step=step) for record in self._found]

    def metrics(self) -> dict[str, float]:
        """The numbers of the step, without the Hoyer sparsity of a gradient or a change that is 0 everywhere."""
        n = sum(math.prod(record.shape) for record in self._found)
        sq_norm = sum(record.sq_norm for record in self._found)
        found = {
            "update/changed_share": sum(record.changed for record in self._found) / n,
            "update/changed_share_float32": sum(record.changed_float32 for record in self._found) / n,
            "update/norm": math.sqrt(sq_norm),
            "update/relative_norm": math.sqrt(sq_norm / self._weights_sq) if self._weights_sq > 0 else math.nan,
            "update/hoyer": hoyer(sum(record.l1 for record in self._found), sq_norm, n),
            "gradient/hoyer": hoyer(*self._gradient, n),
        }
        return {name: value for name, value in found.items() if not math.isnan(value)}


def _sizes(values: Tensor) -> tuple[float, float]:
    """The 1-norm and the squared 2-norm, summed in float64, block by block."""
    blocks = values.reshape(-1).split(BLOCK)
    norms = [torch.linalg.vector_norm(b, order, dtype=torch.float64) for b in blocks for order in (1, 2)]
    found = torch.stack(norms).tolist()
    return sum(found[::2]), sum(norm**2 for norm in found[1::2])
