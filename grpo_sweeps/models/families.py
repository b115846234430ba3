"""Which models `GradientGram`, or a run's log-probabilities, do not know, as far as a model's config.json tells. Needs
neither torch nor transformers; docs/models.md has the list, and what is measured exactly.

What the file does not tell is refused when the model is loaded, with the name of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Settings by which known models change the logits after the head (Gemma 2, Cohere, Granite, Falcon H1).
LOGIT_SETTINGS = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier_scale",
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
STATEFUL = (
    "mamba", "falcon_mamba", "falcon_h1", "bamba", "jamba", "nemotron_h", "recurrent_gemma", "zamba", "rwkv", "xlstm",
)  # fmt: skip
NO_ATTENTION = "some of its layers are no attention: state-space, recurrent, linear or convolution layers"
ATTENDING = ("full_attention", "sliding_attention", "chunked_attention")
SCALED, SHIFTED, BIASED = ("gemma", "biogpt"), ("opt",), ("phi", "gptj", "codegen")


def text_shape(shape: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that is of the language model."""
    inner = shape.get("text_config")
    return inner if isinstance(inner, Mapping) else shape


def unmeasured(shape: Mapping[str, Any]) -> str:
    """Why GradientGram does not measure all weights of the model with this configuration; "" where nothing is known
    against it.

    >>> unmeasured({"model_type": "opt"})
    'its learned positions are an embedding with an offset of its own'
    """
    shape = text_shape(shape)
    kind, layers = str(shape.get("model_type", "")), shape.get("layer_types")
    if kind.startswith(STATEFUL) or any(one not in ATTENDING for one in layers or ()):
        return NO_ATTENTION
    if any(isinstance(shape.get(key), int) and shape[key] > 1 for key in EXPERTS):
        return "it is a mixture of experts, whose experts and router are no linear layers that see whole rows"
    if kind.startswith(SCALED):
        return "its embedding is multiplied by a constant in a module of its own"
    if kind in SHIFTED:
        return "its learned positions are an embedding with an offset of its own"
    return ""


def unscored(shape: Mapping[str, Any]) -> str:
    """Why a run cannot compute the log-probabilities of the model; "" where nothing is known against it."""
    shape = text_shape(shape)
    for name in LOGIT_SETTINGS:
        if shape.get(name) not in (None, 1, 1.0):
            return f"its {name}={shape[name]} changes the logits after the output head"
    return "its output head has a bias" if shape.get("model_type") in BIASED else ""
