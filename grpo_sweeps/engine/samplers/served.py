"""Which policies the graph sampler serves, and why it does not serve the others."""

from __future__ import annotations

from grpo_sweeps.engine.policy import Policy
from grpo_sweeps.engine.samplers import kernels

SERVED = (
    "gemma2",
    "gpt_neox",
    "llama",
    "mistral",
    "nemotron",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
)
"""Architectures (transformers' `model_type`) whose tokens are held to those of `eager` by a test each."""

ROPES_THAT_CHANGE = ("dynamic", "longrope")  # recomputed from the positions of a call, on the host


def why_not_served(policy: Policy, on_gpu: bool = True) -> str:
    """What stands against the graph sampler, as a clause; empty where nothing does."""
    config = policy.model.config.get_text_config(decoder=True)
    if on_gpu and policy.device.type != "cuda":
        return f"it needs a CUDA GPU, and the policy is on {policy.device}"
    if not _transformers_own(policy):
        return "the model's code is not of transformers"
    if config.model_type not in SERVED:
        return f"models of type {config.model_type} are not served (these are: {', '.join(SERVED)})"
    if changing := _ropes(config) & set(ROPES_THAT_CHANGE):
        return f"positions of rope type {min(changing)} change with the length of the text"
    if getattr(policy.model, "is_quantized", False):
        return "its weights are quantised"
    if getattr(config, "is_causal", True) is False:
        return "its attention is not causal"
    if getattr(config, "use_sliding_window", True) is False and "sliding_attention" in (
        getattr(config, "layer_types", None) or ()
    ):
        return "its configuration has layers with a window, and windows switched off"
    return kernels.fault(policy.device, policy.model.dtype) if on_gpu else ""


def _transformers_own(policy: Policy) -> bool:
    model = policy.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(base).__module__.startswith("transformers.models.")


def _ropes(config: object) -> set[str]:
    """The rope types that a model's configuration names: one for all layers, or one a kind of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    several = [value for value in given.values() if isinstance(value, dict)]
    return {str(rope.get("rope_type")) for rope in several or [given]}
