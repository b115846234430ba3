"""What rounding leaves of a Gram: the tolerance of the run-time check."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from grpo_sweeps.spectra.floor import tolerance


def widest_eps(parameters: Iterable[nn.Parameter]) -> torch.dtype:
    """The dtype with the largest machine epsilon."""
    return max(
        {parameter.dtype for parameter in parameters if parameter.is_floating_point()},
        key=lambda dtype: torch.finfo(dtype).eps,
    )


def tolerance_of(dtype: torch.dtype) -> float:
    """`grpo_sweeps.spectra.floor.tolerance`: allowed miss of w'Kw against the squared gradient norm."""
    return tolerance(str(dtype).removeprefix("torch."))
