"""Which policies the graph sampler serves, and why it does not serve the others."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from grpo_sweeps.engine.policy import Policy

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
    if on_gpu and find_spec("triton") is None:
        return "it needs the package triton, which is not installed"
    if not _transformers_own(policy):
        return "the model's code is not of transformers"
    if config.model_type not in SERVED:
        return f"models of type {config.model_type} are not served (these are: {', '.join(SERVED)})"
    if changing := _ropes(config) & set(ROPES_THAT_CHANGE):
        return f"positions of rope type {min(changing)} change with the length of the text"
    if getattr(policy.model, "is_quantized", False):
        return "its weights are quantised"
    return _kernel_fault(policy.device) if on_gpu else ""


@cache
def _kernel_fault(device: torch.device) -> str:
    """Why Triton's kernels cannot be used here (no C compiler, an old card), seen by a trial of one of them."""
    from grpo_sweeps.engine.samplers.draw import draw, plain

    logits_BV = torch.tensor([[0.0, 1.0, -1.0, 2.0]], device=device)
    uniforms_B1 = torch.tensor([[0.5]], dtype=torch.float64, device=device)
    try:
        found, expected = draw(logits_BV, uniforms_B1, 1.0), plain(logits_BV, uniforms_B1, 1.0)
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[-1]
        return f"Triton's kernels cannot be compiled or run here ({type(error).__name__}: {line})"
    same = bool(found[0] == expected[0]) and torch.allclose(found[1], expected[1], atol=1e-5)
    return "" if same else "a trial of Triton's kernels gave another token than torch's own operators"


def _transformers_own(policy: Policy) -> bool:
    model = policy.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(base).__module__.startswith("transformers.models.")


def _ropes(config: object) -> set[str]:
    """The rope types that a model's configuration names: one for all layers, or one a kind of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    several = [value for value in given.values() if isinstance(value, dict)]
    return {str(rope.get("rope_type")) for rope in several or [given]}
