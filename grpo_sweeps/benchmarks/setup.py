"""What every benchmark starts from: a model of a published shape with random weights, a batch, a device, the head of
its JSON file."""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn

from grpo_sweeps.benchmarks.options import ModelOptions
from grpo_sweeps.engine.gram.linear import FORMS
from grpo_sweeps.models import tiny_path
from grpo_sweeps.models.shapes import SHAPES, shape_config, twin_config
from grpo_sweeps.types import ConfigError

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
OWN_SHAPES: dict[str, dict[str, Any]] = {
    "test": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 256},
    "llama_512": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 16_000},
}
MODELS = ("tiny", *OWN_SHAPES, *SHAPES)


def check_model(options: ModelOptions) -> None:
    """Raises ConfigError for a model, dtype or form that does not exist."""
    check_choice("model", options.model, MODELS)
    check_choice("dtype", options.dtype, tuple(DTYPES))
    check_choice("form", options.form, FORMS)


class Placed(Protocol):
    """Options that say where a benchmark runs."""

    @property
    def device(self) -> str: ...

    @property
    def threads(self) -> int: ...


def prepare(options: Placed) -> torch.device:
    """Set the threads; the device to work on."""
    if options.threads:
        torch.set_num_threads(options.threads)
    return device_of(options.device)


class NotInstalled(Exception):
    """A rival's package is missing. The message is the whole text of its row."""


@dataclass(frozen=True)
class Batch:
    """ids_BT: random tokens, (B, T), none of them padding. completion_BT: 1 at the tokens that are scored.
    weights_B: float32, one weight per row. group_sizes: rows of each group, all equal."""

    ids_BT: Tensor
    completion_BT: Tensor
    weights_B: Tensor
    group_sizes: list[int]


def check_choice(key: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ConfigError, with the key, the value and what is allowed, for a value that is not."""
    if value not in allowed:
        raise ConfigError(f"bench: {key}={value}: allowed are {', '.join(allowed)}")


def check_positive(**values: int) -> None:
    """Raise ConfigError for the first value below 1."""
    for key, value in values.items():
        if value < 1:
            raise ConfigError(f"bench: {key}={value}: allowed are whole numbers from 1")


def check_lengths(prompt: int, lengths: Sequence[int]) -> None:
    """Raise ConfigError unless every row has a token to score and, before it, one that predicts it."""
    check_positive(prompt=prompt)
    for T in lengths:
        if prompt >= T:
            raise ConfigError(f"bench: T={T}: allowed are whole numbers larger than prompt={prompt}")


def device_of(name: str) -> torch.device:
    """The device of a name; auto: the first CUDA device, else the CPU. Raises ConfigError for what torch does not know
    or does not see."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"bench: device={name}: allowed are auto, cpu, cuda and cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"bench: device={name}: allowed are auto, cpu, cuda and cuda:N")
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
        raise ConfigError(f"bench: device={name}: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def model_config(model: str, **changes: Any) -> Any:
    """transformers configuration of a name in MODELS, with some fields changed."""
    from transformers import AutoConfig, LlamaConfig

    if model == "tiny":
        return AutoConfig.from_pretrained(tiny_path(), **changes)
    if model in OWN_SHAPES:
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
        return LlamaConfig(**(OWN_SHAPES[model] | heads | changes))
    return shape_config(model, **changes)


def small_config(model: str) -> Any:
    """The same architecture with two layers and few words, for a comparison with float64 rows."""
    if model not in SHAPES:
        return model_config(model, num_hidden_layers=2)
    config = twin_config(model, layers=2, vocab_size=256)
    config.pad_token_id = None  # as in the full shapes: no row of the embedding is held at zero gradient
    return config


def random_model(config: Any, dtype: str, device: torch.device, checkpointing: bool = False) -> nn.Module:
    """A causal model with weights as its architecture initialises them; needs no files. checkpointing: non-reentrant,
    in train mode (none of these models has dropout)."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation="sdpa")
    set_checkpointing(model, checkpointing)
    return model  # type: ignore[no-any-return]


def set_checkpointing(model: Any, on: bool) -> None:
    """Switch checkpointing on or off; off also removes the embedding's hook, which transformers leaves and torch.func
    refuses."""
    if on:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif model.is_gradient_checkpointing:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()
    model.train(on)


def random_batch(model: nn.Module, R: int, groups: int, T: int, prompt: int) -> Batch:
    """groups x R rows of T random tokens, of which the first `prompt` are not scored; weights are normal."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    vocabulary, device = embedding.weight.shape[0], embedding.weight.device
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(0, vocabulary, (groups * R, T), generator=generator).to(device)
    completion_BT = torch.ones_like(ids_BT)
    completion_BT[:, :prompt] = 0
    weights_B = torch.randn(groups * R, generator=generator).to(device)
    return Batch(ids_BT, completion_BT, weights_B, [R] * groups)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name; a tied one appears once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def drop_grads(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)


def free_memory() -> None:
    """Free what a subject that failed or ended left behind: reference cycles, then the allocator's cache."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def one_line(error: BaseException) -> str:
    """Type and first line of an error's text, cut at 240 characters to fit a row of a table."""
    if isinstance(error, NotInstalled):
        return str(error)
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    return text if len(text) <= 240 else text[:237] + "..."


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def environment(name: str, command: str, options: Any, device: torch.device) -> dict[str, Any]:
    """The head of every JSON file: the command and its options, the device, the versions."""
    return {
        "benchmark": name,
        "command": command,
        "options": asdict(options),
        "device": device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def write_json(path: str, result: dict[str, Any]) -> None:
    """Write the result to a path and create its folders; without a path do nothing."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
