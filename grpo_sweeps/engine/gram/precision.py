"""What rounding leaves of a Gram: the floor that is reported with it, and the tolerance of the run-time check."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from grpo_sweeps.precision import tolerance

# In machine epsilons, for a model of which no more is known. Seen against a float64 copy of random models: float32
# up to 4; half types 0.2 to 0.7 at widths 64 to 256 (sums in float32 average their roundings), up to 3.8 at width 16. A
# trained and confident policy can be far less exact (1 - p cancels): `verify.measured_floor` measures it.
FLOOR_FACTOR = {torch.float64: 16.0, torch.float32: 16.0, torch.float16: 4.0, torch.bfloat16: 4.0}


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
    """`grpo_sweeps.precision.tolerance`: allowed miss of w'Kw against the squared gradient norm."""
    return tolerance(str(dtype).removeprefix("torch."))
