"""Forward and backward of whole groups in a measured block, and what is read of it group by group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpo_sweeps.engine.gram import LargeGroup, Measurement
from grpo_sweeps.engine.optim import require_finite
from grpo_sweeps.engine.rollouts import Rollout, same_as
from grpo_sweeps.loop.scoring import micro_batches
from grpo_sweeps.loop.setup import Setup, due, micro_batch_rows
from grpo_sweeps.spectra.equal import same_rows_of_the_loss
from grpo_sweeps.spectra.stacked import stacked_summary


@dataclass(frozen=True)
class Measured:
    """What one group's backward gave: log-probability sums (R,), and where measured its Gram, floor and parts."""

    logprob_sums: np.ndarray
    gram: np.ndarray | None = None
    floor: float = 0.0
    gram_by: dict[str, np.ndarray] | None = None


@dataclass(frozen=True)
class Block:
    """A block that was measured and not yet read: reading waits for the device, and what comes next need not.

    scalars: (B,) of its rows, as the block's caller gave them.
    """

    m: Measurement
    scalars: Tensor
    checked: bool

    def read(self, setup: Setup, sums: Tensor) -> list[Measured]:
        """What was measured, group by group, checked where it is to be; sums: (B,) log-probabilities of the rows.

        Raises grpo_sweeps.engine.gram.GramCheckError, FloatingPointError where the gradient is not finite.
        """
        if self.checked:
            require_finite(self.m.grad_sq_norm)  # no fault of the Gram
            self.m.check()
        m, by = self.m, setup.config.analysis.by
        sums_GR = sums.double().cpu().numpy().reshape(-1, setup.config.R)
        parts = {} if by == "whole" else m.matrices(by="layer" if by == "layer" else "parameter")
        floor = m.floor if setup.precision.floor is None else setup.precision.floor
        return [
            Measured(
                sums_GR[j], gram.cpu().numpy(), floor, {name: grams[j].cpu().numpy() for name, grams in parts.items()}
            )
            for j, gram in enumerate(m.matrices())
        ]


def measured_block(
    setup: Setup, weights: Tensor, row_scalars: Callable[[slice], Tensor], check: bool, together: bool = False
) -> Block:
    """Forward and backward of whole groups, or of one in parts; row_scalars: (B,), each from its own row alone.
    together: measure the products between groups too.
    """
    assert setup.gram is not None
    R = setup.config.R
    m: Measurement
    if micro_batch_rows(setup) < R:
        m, scalars = _measure_in_parts(setup, weights, row_scalars)
    else:
        groups = len(weights) // R
        cross_groups = (check or together) and groups > 1
        with setup.gram.measure(group_sizes=[R] * groups, weights=weights, cross_groups=cross_groups) as m:
            scalars = row_scalars(slice(0, len(weights)))
            scalars.sum().backward()
    return Block(m, scalars.detach(), check)


def stacks(setup: Setup, step: int, parts: Sequence[object]) -> bool:
    """Are the groups of this step, cut into `parts`, to be measured together?"""
    return len(parts) == 1 and due(step, setup.config.analysis.stacked_every)


def keep_stack(setup: Setup, m: Measurement, rollouts: Sequence[Rollout], weights_B: Tensor, loss: bool) -> None:
    """Log the spectrum of all groups of a block together. weights_B: w_i; `loss`: the rows have theirs in them."""
    R = setup.config.R
    gram = m.matrix().cpu().numpy()
    texts = np.array([same_as([o.completion_ids for o in rollouts[i : i + R]]) for i in range(0, len(rollouts), R)])
    weights = weights_B.double().cpu().numpy()
    rows = same_rows_of_the_loss(texts, weights.reshape(texts.shape)) if loss else texts
    same = (rows + np.arange(0, len(rollouts), R)[:, None]).reshape(-1)
    found = stacked_summary(gram, None if loss else weights, [R] * len(texts), same)
    setup.stack.metrics = {f"stacked/{name}": value for name, value in found.items()}


def _measure_in_parts(
    setup: Setup, weights: Tensor, row_scalars: Callable[[slice], Tensor]
) -> tuple[LargeGroup, Tensor]:  # fmt: skip
    """One group that is larger than a micro-batch, and its rows' scalars."""
    assert setup.gram is not None
    found = []
    with setup.gram.measure_group(len(weights), weights) as group:
        for rows in micro_batches(setup, len(weights)):
            with group.part(rows.stop - rows.start):
                scalars = row_scalars(rows)
                scalars.sum().backward()
            found.append(scalars.detach())
    return group, torch.cat(found)
