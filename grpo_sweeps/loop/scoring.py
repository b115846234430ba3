"""Log-probabilities of rollouts under a model, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from grpo_sweeps.engine.head import causal_model, completion_log_probs, hidden_states
from grpo_sweeps.engine.rollouts import Rollout, collate, width
from grpo_sweeps.loop.setup import Setup, micro_batch_groups, micro_batch_rows

if TYPE_CHECKING:
    from grpo_sweeps.loop.rollouts import Rated

SORTED_ON = "cuda"


def token_log_probs(
    setup: Setup, rollouts: Sequence[Rollout], model: nn.Module | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(B, T) log-probabilities of the rollouts' tokens under the policy or `model`, 0 elsewhere, each row from its own
    tokens alone; and the (B, T) mask of those tokens."""
    batch = collate(rollouts, setup.policy.pad_id, setup.policy.device)
    logprobs_BT = completion_log_probs(
        model or setup.policy.model,
        batch.input_ids_BT,
        batch.attention_mask_BT,
        batch.completion_mask_BT,
        setup.config.rollout.temperature,
    )
    return logprobs_BT, batch.completion_mask_BT


def row_sums(setup: Setup, rollouts: Sequence[Rollout]) -> Tensor:
    """(B,) log-probabilities of the rollouts under the policy, each from its own row alone."""
    return token_log_probs(setup, rollouts)[0].sum(dim=1)


def micro_batches(setup: Setup, rows: int) -> list[slice]:
    """The rows that go through the model together."""
    size = micro_batch_rows(setup)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def blocks(setup: Setup, rated: Rated, groups: Sequence[int]) -> list[list[int]]:
    """The groups that are measured together: as many whole ones as a micro-batch holds, or one in parts.

    On a GPU groups of like length go together: less padding. On a CPU they stay in order, and so do the sums.
    """
    size = micro_batch_groups(setup)
    if setup.policy.device.type == SORTED_ON:
        groups = sorted(groups, key=lambda g: width(rated.rollouts[rated.rows(g)]))
    return [list(groups[start : start + size]) for start in range(0, len(groups), size)]


@torch.no_grad()
def scored(setup: Setup, rollouts: Sequence[Rollout], model: nn.Module | None = None) -> list[Tensor]:
    """Each rollout's log-probabilities under the policy or `model`, (its length,), without gradient.

    The rows are cut as a backward over them cuts them, so that a policy that has not changed gives the same numbers.
    """
    found: list[Tensor] = []
    for rows in micro_batches(setup, len(rollouts)):
        logprobs_BT, mask_BT = token_log_probs(setup, rollouts[rows], model)
        found += [values_T[mask_T] for values_T, mask_T in zip(logprobs_BT, mask_BT, strict=True)]
    return found


@torch.no_grad()
def features(setup: Setup, rollouts: Sequence[Rollout]) -> list[Tensor]:
    """Each rollout's hidden states from which its tokens are predicted, (its length, H) float32, without gradient."""
    found: list[Tensor] = []
    causal = causal_model(setup.policy.model)
    for rows in micro_batches(setup, len(rollouts)):
        batch = collate(rollouts[rows], setup.policy.pad_id, setup.policy.device)
        hidden_BTH = hidden_states(setup.policy.model, causal, batch.input_ids_BT, batch.attention_mask_BT)
        before_BTH, mask_BT = hidden_BTH[:, :-1], batch.completion_mask_BT[:, 1:]
        found += [h_TH[mask_T].float() for h_TH, mask_T in zip(before_BTH, mask_BT, strict=True)]
    return found


def spread(values: Sequence[Tensor], mask_BT: Tensor) -> Tensor:
    """The inverse of the cut that `scored` makes: one tensor a row -> (B, T), 0 outside the mask."""
    flat = torch.cat(list(values))
    return torch.zeros(mask_BT.shape, dtype=flat.dtype, device=mask_BT.device).masked_scatter(mask_BT, flat)
