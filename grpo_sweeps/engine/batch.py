"""`collate` makes padded tensors of rollouts: the model's input when a micro-batch is scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_sweeps.engine.sampler import Rollout


@dataclass(frozen=True)
class MicroBatch:
    """B rows, padded on the right.

    input_ids_BT: prompt, completion, padding. attention_mask_BT: 1 on prompt and completion. completion_mask_BT: 1 on
    the completion's tokens, end-of-sequence included. The masks come from lengths: the padding id may be a token of the
    text.
    """

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    completion_mask_BT: Tensor


def collate(rollouts: Sequence[Rollout], pad_id: int, device: torch.device) -> MicroBatch:
    """The rollouts as one micro-batch, padded to the longest of them."""
    width = max(len(r.prompt_ids) + r.length for r in rollouts)
    ids = torch.full((len(rollouts), width), pad_id, dtype=torch.long)
    attention = torch.zeros((len(rollouts), width), dtype=torch.long)
    completion = torch.zeros((len(rollouts), width), dtype=torch.bool)
    for row, r in enumerate(rollouts):
        start, end = len(r.prompt_ids), len(r.prompt_ids) + r.length
        ids[row, :end] = torch.tensor(r.prompt_ids + r.completion_ids)
        attention[row, :end] = 1
        completion[row, start:end] = True
    return MicroBatch(ids.to(device), attention.to(device), completion.to(device))
