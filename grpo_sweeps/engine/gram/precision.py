"""What rounding leaves of a Gram: the floor that is reported with it, and the tolerance of the run-time check."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

# In machine epsilons, for a model of which no more is known. Seen against a float64 copy of random models: float32
# up to 4; half types 0.2 to 0.7 at widths 64 to 256 (sums in float32 average their roundings), up to 3.8 at width 16. A
# trained and confident policy can be far less exact (1 - p cancels): `verify.measured_floor` measures it.
FLOOR_FACTOR = {torch.float64: 16.0, torch.float32: 16.0, torch.float16: 4.0, torch.bfloat16: 4.0}
# Seen: 1 epsilon (float64), 0.05 (float32), 0.004 (half types; the ghost form rounds the weighted gradients once more).
CHECK_FACTOR = {torch.float64: 1e4, torch.float32: 40.0, torch.float16: 2.0, torch.bfloat16: 0.5}


def widest_eps(parameters: Iterable[nn.Parameter]) -> torch.dtype:
    """The dtype with the largest machine epsilon."""
    return max(
        {parameter.dtype for parameter in parameters if parameter.is_floating_point()},
        key=lambda dtype: torch.finfo(dtype).eps,
    )


def floor_of(dtype: torch.dtype) -> float:
    """Error of K_ij relative to sqrt(K_ii K_jj): FLOOR_FACTOR epsilons of the training dtype.

    The activations and gradients that K is made of are rounded to that dtype once a layer; the R x R sums add less.
    """
    return FLOOR_FACTOR[dtype] * torch.finfo(dtype).eps


def tolerance_of(dtype: torch.dtype) -> float:
    """Allowed miss of w'Kw against the squared gradient norm, relative to |w|'|K||w|.

    Both are made from the same rows, so only the roundings of their sums (and of the gradient to its dtype) separate
    them.
    """
    return CHECK_FACTOR[dtype] * torch.finfo(dtype).eps
