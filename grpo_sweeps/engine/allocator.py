"""How torch's allocator holds a GPU's memory."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_sweeps.engine.gram.torch_private import set_allocator

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where a user says how it works; torch reads them when it is imported."""


def grow_segments(environment: Mapping[str, str]) -> bool:
    """Have the allocator's segments grow, unless the user has set it up; whether this made them.

    Rows of uneven lengths leave gaps between segments of fixed size: after ten steps a fifth of what was reserved could
    not be used.
    """
    return not any(environment.get(name) for name in SETTINGS) and set_allocator("expandable_segments:True")
