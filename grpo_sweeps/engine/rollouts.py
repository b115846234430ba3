"""Sampled completions: what identifies one, its text, and several as the padded tensors that a model scores."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_sweeps.engine.gram.host import sent


@dataclass(frozen=True)
class Rollout:
    """One sampled completion.

    completion_ids: the tokens drawn, the end-of-sequence token included where it was drawn.
    text: the completion without special tokens, cut before a stop string.
    logprobs: (T,) float32, log-probability of each token under the sampler (at the sampling temperature).
    truncated: True when neither an end-of-sequence token nor a stop string came within the limit.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    text: str
    logprobs: np.ndarray
    truncated: bool

    @property
    def length(self) -> int:
        return len(self.completion_ids)


def width(rollouts: Sequence[Rollout]) -> int:
    """Tokens of the longest of them, prompt and completion."""
    return max(len(one.prompt_ids) + one.length for one in rollouts)


def same_as(completions: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """For each completion of one prompt the first with the same tokens.

    >>> same_as([(5, 1), (7, 1), (5, 1)])
    (0, 1, 0)
    """
    first: dict[tuple[int, ...], int] = {}
    return tuple(first.setdefault(tokens, i) for i, tokens in enumerate(completions))


def row_seed(*parts: int | str) -> int:
    """A 64-bit seed from what identifies a row; the same on every platform and in every process."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def completion_text(tokenizer: Any, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """The text of a completion's tokens, without special tokens, cut before the first stop string."""
    text = str(tokenizer.decode(list(ids), skip_special_tokens=True))
    ends = [text.find(one) for one in stop if one in text]
    return text[: min(ends)] if ends else text


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
    shape = len(rollouts), width(rollouts)
    ids = torch.full(shape, pad_id, dtype=torch.long)
    attention = torch.zeros(shape, dtype=torch.long)
    completion = torch.zeros(shape, dtype=torch.bool)
    for row, r in enumerate(rollouts):
        start, end = len(r.prompt_ids), len(r.prompt_ids) + r.length
        ids[row, :end] = torch.tensor(r.prompt_ids + r.completion_ids)
        attention[row, :end] = 1
        completion[row, start:end] = True
    return MicroBatch(sent(ids, device), sent(attention, device), sent(completion, device))
