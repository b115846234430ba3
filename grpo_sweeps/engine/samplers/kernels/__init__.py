"""Triton kernels of sampling, imported only where they run, and whether they can: `fault`."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def fault(device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernels cannot be used for a policy in `dtype` on a device, as a clause; empty where they can.

    They are tried once a process on a few numbers: a C compiler may be missing, and Triton may not know the card.
    """
    if dtype == torch.float64:
        return "its kernels compute in float32, and the policy is in float64"
    if find_spec("triton") is None:
        return "it needs the package triton, which is not installed"
    try:
        same = _draws_alike(device, dtype) and _attends_alike(device, dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[-1]
        return f"Triton's kernels cannot be compiled or run here ({type(error).__name__}: {line})"
    return "" if same else "Triton's kernels failed their trial: they differ from torch's own operators"


def _draws_alike(device: torch.device, dtype: torch.dtype) -> bool:
    from grpo_sweeps.engine.samplers.draw import plain
    from grpo_sweeps.engine.samplers.kernels.draw_tokens import draw_tokens

    logits_BV = torch.tensor([[0.0, 1.0, -1.0, 2.0], [3.0, 0.0, 0.0, -2.0]], dtype=dtype, device=device)
    uniforms_B1 = torch.tensor([[0.5], [0.9]], dtype=torch.float64, device=device)
    found, expected = draw_tokens(logits_BV, uniforms_B1, 1.0), plain(logits_BV, uniforms_B1, 1.0)
    return torch.equal(found[0], expected[0]) and torch.allclose(found[1], expected[1], atol=1e-5)


def _attends_alike(device: torch.device, dtype: torch.dtype) -> bool:
    from grpo_sweeps.engine.samplers.attention import plain
    from grpo_sweeps.engine.samplers.kernels.decode_attention import decode_attention

    B, H, K, T, D = 2, 4, 2, 32, 16
    at = torch.linspace(-1, 1, B * H * D + 2 * B * K * D, device=device).sin()
    query, key, value = at.split([B * H * D, B * K * D, B * K * D])
    new = query.view(B, H, D).to(dtype), key.view(B, K, D).to(dtype), value.view(B, K, D).to(dtype)
    old = torch.linspace(-2, 2, (B + 1) * K * T * D, device=device).cos().view(B + 1, K, T, D).to(dtype)
    rest = torch.arange(B, device=device), torch.tensor([0, 20], device=device), D**-0.5
    found = decode_attention(*new, old.clone(), old.flip(0).clone(), *rest)
    expected = plain(*(x.double() for x in new), old.double(), old.flip(0).double(), *rest)
    return torch.allclose(found.double(), expected, atol=8 * torch.finfo(dtype).eps)
