"""What rounding leaves of a Gram: the tolerance of the run-time check."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

# Seen: 1 epsilon (float64), 0.05 (float32), 0.004 (half types; the ghost form rounds the weighted gradients once more).
CHECK_FACTOR = {torch.float64: 1e4, torch.float32: 40.0, torch.float16: 2.0, torch.bfloat16: 0.5}


def widest_eps(parameters: Iterable[nn.Parameter]) -> torch.dtype:
    """The dtype with the largest machine epsilon."""
    return max(
        {parameter.dtype for parameter in parameters if parameter.is_floating_point()},
        key=lambda dtype: torch.finfo(dtype).eps,
    )


def tolerance_of(dtype: torch.dtype) -> float:
    """Allowed miss of w'Kw against the squared gradient norm, relative to |w|'|K||w|.

    Both are made from the same rows, so only the roundings of their sums (and of the gradient to its dtype) separate
    them.
    """
    return CHECK_FACTOR[dtype] * torch.finfo(dtype).eps
