"""How many rows go through the model together on a GPU, by the memory that some of them really took.

Where trainer.micro_batch is null, a group of the first step is differentiated once more than it needs to be, before
anything else is, and what it took beside what stays is scaled to the longest rollouts that there can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from grpo_sweeps.engine.device_memory import free_bytes
from grpo_sweeps.engine.gram.verify import set_aside
from grpo_sweeps.engine.rollouts import Rollout, width
from grpo_sweeps.loop.results import StepTimes
from grpo_sweeps.loop.scoring import row_sums
from grpo_sweeps.loop.setup import Setup, micro_batch_rows

SHARE = 0.85  # of what is free: an allocator leaves gaps


def measure_room(setup: Setup, rollouts: Sequence[Rollout], times: StepTimes) -> None:
    """Find `setup.room.rows`, once in a process, on a GPU whose micro-batch nobody has chosen; see the module.

    analysis.stacked_every chooses it too: all rows of a step.

    Raises torch.OutOfMemoryError where one row does not fit.
    """
    chosen = setup.config.trainer.micro_batch or setup.config.analysis.stacked_every
    if chosen or setup.room.rows or setup.policy.device.type != "cuda":
        return
    R, wanted = setup.config.R, micro_batch_rows(setup)
    longest = max(len(o.prompt_ids) for o in rollouts) + setup.config.rollout.max_new_tokens
    starts = range(0, len(rollouts), R)
    first = max(starts, key=lambda start: width(rollouts[start : start + R]))
    rows, taken = R, None
    while taken is None:
        taken = _taken(setup, rollouts[first : first + rows])
        if taken is None and rows == 1:
            raise torch.OutOfMemoryError("one rollout's forward and backward do not fit the GPU's memory")
        rows = rows if taken is not None else rows // 2
    row_bytes = taken / rows * longest / width(rollouts[first : first + rows])
    setup.room.rows = rows_that_fit(wanted, R, row_bytes, _free(setup) * SHARE)
    if setup.room.rows < wanted:
        setup.say(f"micro-batches have {setup.room.rows} rows, not {wanted}: more would not fit the GPU's memory")
    times.mark("room")


def rows_that_fit(wanted: int, R: int, row_bytes: float, room: float) -> int:
    """As many rows as fit, of the wanted ones: whole groups, or part of one; one at least.

    >>> rows_that_fit(32, 8, 1e9, 20e9), rows_that_fit(32, 8, 1e9, 5e9), rows_that_fit(32, 8, 1e9, 1e8)
    (16, 5, 1)
    """
    rows = min(wanted, int(room / row_bytes))
    return rows // R * R if rows >= R else max(1, rows)


def _taken(setup: Setup, rollouts: Sequence[Rollout]) -> int | None:
    """Bytes that forward and backward of these rows took at most, beside the gradients that they left; None where they
    do not fit. `.grad` is as it was."""
    parameters = [p for p in setup.policy.model.parameters() if p.requires_grad]
    with set_aside(parameters):
        for parameter in parameters:  # as for a later micro-batch: what they take must not count as the rows'
            parameter.grad = torch.zeros_like(parameter)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            with nullcontext() if setup.gram is None else setup.gram.measure([len(rollouts)]):
                row_sums(setup, rollouts).sum().backward()
        except torch.OutOfMemoryError:
            return None
        return torch.cuda.max_memory_allocated() - before


def _free(setup: Setup) -> int:
    """Bytes for a micro-batch, once gradients and the optimiser's moments are there too."""
    parameters = [p for p in setup.policy.model.parameters() if p.requires_grad]
    grads = sum(p.nbytes for p in parameters if p.grad is None)
    return free_bytes(setup.policy.device) - grads - setup.optimizer.bytes_to_come
