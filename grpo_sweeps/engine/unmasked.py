"""Attention without a mask, where rows are padded on the right and every layer is causal.

No token sees the padding then: it comes later. So nothing has to be masked, faster kernels take it, and transformers
does not look into the mask, for which the host would wait at the start of every forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_sweeps.engine.gram.host import on_host

ATTENTION = "grpo_sweeps_causal"
ON = "cuda"  # on a CPU the host waits for nothing, and results stay what they were
CAUSAL = ("gpt_neox", "llama", "mistral", "nemotron", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
"""Architectures (transformers' `model_type`) that a test holds to their masked selves."""


@contextmanager
def unmasked(causal: nn.Module, attention_mask_BT: Tensor) -> Iterator[None]:
    """A forward inside makes no mask where it needs none. Afterwards, as in a recomputation, attention is sdpa."""
    if not needs_none(causal, attention_mask_BT):
        yield
        return
    # The body's configuration alone decides about a mask; transformers makes none for an attention it does not know.
    config: Any = causal.base_model.config  # type: ignore[union-attr]
    before = config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[ATTENTION] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before
        ALL_ATTENTION_FUNCTIONS.pop(ATTENTION)


def needs_none(causal: nn.Module, attention_mask_BT: Tensor) -> bool:
    """Whether the host knows that padding is on the right, and that the model's layers are all plainly causal."""
    if attention_mask_BT.device.type != ON or (known_BT := on_host(attention_mask_BT)) is None:
        return False
    config: Any = getattr(causal, "config", None)
    if config is None or getattr(config, "model_type", "") not in CAUSAL or config._attn_implementation != "sdpa":
        return False
    windows = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return not windows and bool((known_BT[:, 1:] <= known_BT[:, :-1]).all())
