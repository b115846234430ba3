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
        from grpo_sweeps.engine.samplers.kernels import decode_attention, draw_tokens

        same = draw_tokens.trial(device, dtype) and decode_attention.trial(device, dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[-1]
        return f"Triton's kernels cannot be compiled or run here ({type(error).__name__}: {line})"
    return "" if same else "Triton's kernels failed their trial: they differ from torch's own operators"
