"""The architectures of the models that conf/model names, as facts of their published config.json files.

They serve where no trained weights are needed: cost measurements with random weights (`model.random=true`) and the
tests' small twins. Sources: the config.json of HuggingFaceTB/SmolLM2-135M-Instruct, Qwen/Qwen2.5-0.5B-Instruct,
Qwen/Qwen2.5-Coder-0.5B-Instruct, Qwen/Qwen2.5-1.5B-Instruct, nvidia/Nemotron-Mini-4B-Instruct; for
Llama-3.1-Nemotron-Nano-4B the model card of its base, Llama-3.1-Minitron-4B-Width.
"""

from __future__ import annotations

from typing import Any

QWEN2_5_0_5B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2_135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "qwen2_5_0_5b": QWEN2_5_0_5B,
    "qwen2_5_coder_0_5b": QWEN2_5_0_5B,  # another training, the same architecture
    "qwen2_5_1_5b": {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
    },
    "nemotron_mini_4b": {
        "model_type": "nemotron",
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "relu2",
        "norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10_000.0,
        "vocab_size": 256_000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "llama_nemotron_nano_4b": {
        "model_type": "llama",
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    },
}


def shape_config(name: str, **changes: Any) -> Any:
    """transformers configuration of `name`, with some fields changed (fewer layers, fewer words).

    Raises:
        KeyError: for a name that is not in `SHAPES`.
    """
    from transformers import AutoConfig

    fields = SHAPES[name] | changes
    return AutoConfig.for_model(fields["model_type"], **{k: v for k, v in fields.items() if k != "model_type"})


def twin_config(name: str, layers: int = 2, vocab_size: int = 97) -> Any:
    """A small twin for tests, with the real ratio of query to key-value heads (at most four), head size, biases, norm
    and tying."""
    shape = SHAPES[name]
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    ratio = shape["num_attention_heads"] // shape["num_key_value_heads"]
    heads = min(ratio, 4)
    return shape_config(
        name,
        num_hidden_layers=layers,
        hidden_size=heads * head if shape["hidden_size"] == shape["num_attention_heads"] * head else heads * head // 2,
        intermediate_size=2 * head,
        num_attention_heads=heads,
        num_key_value_heads=1,
        vocab_size=vocab_size,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
