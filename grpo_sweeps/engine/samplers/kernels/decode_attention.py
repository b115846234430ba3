"""Triton kernel: one new token a row attends over its slot of the cache, in one read of keys and values.

A program serves the query heads of one row that share a key head. It stores the new key and value, starts the running
softmax with them, and goes over the slot in blocks up to the row's length: what lies beyond is never read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_BYTES = 16384  # of keys, or of values, that a program holds at once: 64 keys of 128 numbers in a half type
MOST_KEYS = 64
WARPS = 4
STAGES = 3


@triton.jit
def _decode(
    query, key, value, keys, values, slots, lengths, out, scale, softcap, window,
    query_b, query_h, key_b, key_k, value_b, value_k, keys_s, keys_k, keys_t, values_s, values_k, values_t, heads,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    DIMS: tl.constexpr, VALUE_DIMS: tl.constexpr, KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(slots + row)
    length = tl.load(lengths + row)
    g = tl.arange(0, QUERIES)
    d = tl.arange(0, DIMS)
    e = tl.arange(0, VALUE_DIMS)
    query_gd = query + row * query_b + (head * GROUP + g[:, None]) * query_h + d[None, :]
    q = tl.load(query_gd, mask=(g[:, None] < GROUP) & (d[None, :] < D), other=0.0)
    k = tl.load(key + row * key_b + head * key_k + d, mask=d < D, other=0.0)
    v = tl.load(value + row * value_b + head * value_k + e, mask=e < E, other=0.0)
    slot_keys = keys + slot * keys_s + head * keys_k
    slot_values = values + slot * values_s + head * values_k
    tl.store(slot_keys + length * keys_t + d, k, mask=d < D)
    tl.store(slot_values + length * values_t + e, v, mask=e < E)

    score = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], axis=1) * scale
    if SOFTCAP:
        score = softcap * (2 / (1 + tl.exp(-2 * score / softcap)) - 1)
    largest = score
    total = tl.full((QUERIES,), 1.0, tl.float32)
    mean = tl.zeros((QUERIES, VALUE_DIMS), tl.float32) + v.to(tl.float32)[None, :]
    first = 0
    if WINDOW:
        first = tl.maximum(length + 1 - window, 0)
    for start in range(first // KEYS * KEYS, length, KEYS):
        t = start + tl.arange(0, KEYS)
        seen = (t >= first) & (t < length)
        kt = tl.load(slot_keys + t[None, :] * keys_t + d[:, None], mask=seen[None, :] & (d[:, None] < D), other=0.0)
        s = tl.dot(q, kt, input_precision="ieee") * scale
        if SOFTCAP:
            s = softcap * (2 / (1 + tl.exp(-2 * s / softcap)) - 1)
        s = tl.where(seen[None, :], s, float("-inf"))
        higher = tl.maximum(largest, tl.max(s, axis=1))
        p = tl.exp(s - higher[:, None])
        rescale = tl.exp(largest - higher)
        vt = tl.load(slot_values + t[:, None] * values_t + e[None, :], mask=seen[:, None] & (e[None, :] < E), other=0.0)
        total = total * rescale + tl.sum(p, axis=1)
        mean = mean * rescale[:, None] + tl.dot(p.to(vt.dtype), vt, input_precision="ieee")
        largest = higher
    mean = mean / total[:, None]
    out_ge = out + (row * heads + head * GROUP + g[:, None]) * E + e[None, :]
    tl.store(out_ge, mean.to(out.dtype.element_ty), mask=(g[:, None] < GROUP) & (e[None, :] < E))


def decode_attention(
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
    """See `attention.attend`."""
    (B, H, D), K, E = query_BHD.shape, keys_SKTD.shape[1], values_SKTE.shape[3]
    query_BHD, key_BKD, value_BKE = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (query_BHD, key_BKD, value_BKE)
    )
    dims, value_dims = (max(16, triton.next_power_of_2(n)) for n in (D, E))
    keys = max(16, min(MOST_KEYS, BLOCK_BYTES // (max(dims, value_dims) * keys_SKTD.element_size())))
    out_BHE = torch.empty(B, H, E, dtype=query_BHD.dtype, device=query_BHD.device)
    _decode[(B, K)](
        query_BHD, key_BKD, value_BKE, keys_SKTD, values_SKTE, slots_B, lengths_B, out_BHE,
        float(scale), float(softcap or 0.0), int(window or 0),
        *query_BHD.stride()[:2], *key_BKD.stride()[:2], *value_BKE.stride()[:2],
        *keys_SKTD.stride()[:3], *values_SKTE.stride()[:3], H,
        GROUP=H // K, QUERIES=max(16, triton.next_power_of_2(H // K)), D=D, E=E,
        DIMS=dims, VALUE_DIMS=value_dims, KEYS=keys,
        SOFTCAP=softcap is not None, WINDOW=window is not None, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out_BHE


def trial(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a row without a past gives its own value, and one whose keys are all alike the mean of what it sees."""
    B, H, K, T, D = 2, 4, 2, 32, 16
    query_BHD, key_BKD = (
        torch.ones(B, H, D, device=device, dtype=dtype),
        torch.zeros(B, K, D, device=device, dtype=dtype),
    )
    values_SKTD = torch.linspace(-2, 2, (B + 1) * K * T * D, device=device).view(B + 1, K, T, D).to(dtype)
    value_BKD, keys_SKTD = values_SKTD[B, :, :B].transpose(0, 1), torch.zeros_like(values_SKTD)
    slots_B, lengths_B = torch.tensor([1, 0], device=device), torch.tensor([0, 20], device=device)
    out_BHD = decode_attention(query_BHD, key_BKD, value_BKD, keys_SKTD, values_SKTD, slots_B, lengths_B, D**-0.5)
    expected_BKD = torch.stack([value_BKD[0], values_SKTD[0, :, :21].double().mean(1).to(dtype)])
    stored = torch.equal(values_SKTD[0, :, 20], value_BKD[1])
    expected_BHD = expected_BKD.repeat_interleave(H // K, dim=1)
    return stored and torch.allclose(out_BHD.double(), expected_BHD.double(), atol=16 * torch.finfo(dtype).eps)
