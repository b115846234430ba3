"""Attention of one new token a row over the keys and values of its slot."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
    query_BHD: Tensor,
    key_BKD: Tensor,
    value_BKE: Tensor,
    keys_SKTD: Tensor,
    values_SKTE: Tensor,
    slots_B: Tensor,
    lengths_B: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Store each row's new key and value at the end of what its slot holds, and attend over all of it.

    H query heads share K key heads, H / K consecutive ones each. A row sees the keys 0 to its length, the new one
    included; with a window the last `window` of them.

    Args:
        keys_SKTD, values_SKTE: the cache, written in place at (slot, head, length).
        slots_B: the slot of each row. lengths_B: how many tokens it holds before the new one.
        softcap: scores become softcap tanh(score / softcap) (Gemma 2, arXiv 2408.00118).

    Returns:
        (B, H, E), in the query's dtype.
    """
    if query_BHD.is_cuda:
        from grpo_sweeps.engine.samplers.kernels.decode_attention import decode_attention

        return decode_attention(
            query_BHD, key_BKD, value_BKE, keys_SKTD, values_SKTE, slots_B, lengths_B, scale, window, softcap
        )
    return plain(query_BHD, key_BKD, value_BKE, keys_SKTD, values_SKTE, slots_B, lengths_B, scale, window, softcap)


def plain(
    query_BHD: Tensor,
    key_BKD: Tensor,
    value_BKE: Tensor,
    keys_SKTD: Tensor,
    values_SKTE: Tensor,
    slots_B: Tensor,
    lengths_B: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`attend` by torch's own operators: on a CPU, and what the kernel is held to."""
    keys_SKTD[slots_B, :, lengths_B] = key_BKD
    values_SKTE[slots_B, :, lengths_B] = value_BKE
    (B, H, D), K, T = query_BHD.shape, keys_SKTD.shape[1], keys_SKTD.shape[2]
    scores_BKGT = query_BHD.view(B, K, H // K, D) @ keys_SKTD[slots_B].transpose(2, 3) * scale
    if softcap is not None:
        scores_BKGT = softcap * torch.tanh(scores_BKGT / softcap)
    at_T = torch.arange(T, device=query_BHD.device)
    seen_BT = at_T <= lengths_B[:, None]
    if window is not None:
        seen_BT &= at_T > lengths_B[:, None] - window
    scores_BKGT = scores_BKGT.masked_fill(~seen_BT[:, None, None], float("-inf"))
    weights_BKGT = torch.softmax(scores_BKGT.float(), dim=-1).to(query_BHD.dtype)
    return (weights_BKGT @ values_SKTE[slots_B]).reshape(B, H, -1)
