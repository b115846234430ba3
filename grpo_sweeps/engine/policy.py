"""The policy: a causal language model with its tokenizer, the frozen reference beside it, and its values in float32."""

from __future__ import annotations

import copy
import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from jinja2 import TemplateError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from grpo_sweeps.config import LoraConfig, ModelConfig
from grpo_sweeps.models import tiny_path
from grpo_sweeps.models.shapes import SHAPES, shape_config
from grpo_sweeps.models.templates import unread
from grpo_sweeps.types import ConfigError

log = logging.getLogger(__name__)

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Turns:
    """What is around a prompt: the messages `before` the user's turn, the `prefix` with which the answer begins, and
    more arguments of the chat template."""

    before: tuple[Mapping[str, str], ...] = ()
    prefix: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Policy:
    """The model that is sampled and differentiated, with what is needed to talk to it.

    eos_ids: every token id that ends a rollout. pad_id: fills batches. It may be one of them: lengths mask the rows.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    pad_id: int
    device: torch.device
    chat_template: bool = False
    turns: Turns = Turns()

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """The token ids of each prompt, by the chat template where the model configuration asks for it.

        Raises ConfigError for a prompt without a token: nothing predicts what would follow it.
        """
        if self.chat_template:
            texts = [self._chat(prompt) for prompt in prompts]
            found = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        else:
            found = [self.tokenizer(prompt + self.turns.prefix)["input_ids"] for prompt in prompts]
        if [] in found:
            text = prompts[found.index([])]
            raise ConfigError(f"the prompt {text!r} has no token for this tokenizer; a prompt needs at least one")
        return found

    def messages(self, prompt: str) -> list[dict[str, str]]:
        """What the chat template is given."""
        return [*(dict(message) for message in self.turns.before), {"role": "user", "content": prompt}]

    def _chat(self, prompt: str) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                self.messages(prompt), tokenize=False, add_generation_prompt=True, **self.turns.arguments
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in self.messages(prompt))
            raise ConfigError(
                f"the model's chat template refuses messages of {roles} ({error}); task.system=null and "
                "task.few_shot=[] ask with the user's turn alone"
            ) from error
        return f"{text}{self.turns.prefix}"


def resolve_device(name: str) -> torch.device:
    """The device of that name; `auto` is the GPU where there is one, else the CPU.

    Raises:
        ConfigError: for a device that this machine does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"trainer.device={name}: allowed are auto, cpu, cuda and cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"trainer.device={name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def load_policy(config: ModelConfig, device: torch.device) -> Policy:
    """Model and tokenizer, ready to train on `device`.

    Raises:
        ConfigError: for a model that cannot be read, naming model.path and what is allowed.
    """
    transformers_logging.disable_progress_bar()  # the run shows its progress itself
    tokenizer = _guarded(config, lambda: AutoTokenizer.from_pretrained(**_source(config)))
    if config.chat_template and not tokenizer.chat_template:
        raise ConfigError(
            f"model.chat_template=true: the tokenizer of {config.path} has no chat template; set it to false"
        )
    if sentence := next(unread(config.path, config.chat_template_kwargs, str(tokenizer.chat_template)), ""):
        raise ConfigError(sentence)
    model = load_model(config).to(device)
    if name := not_finite(model):
        raise ConfigError(
            f"model.path={config.path}: the weights {name} hold values that are not finite (NaN or infinite) in "
            f"model.dtype={config.dtype}; whole weights are needed, or a dtype that holds them"
        )
    eos_ids = _eos_ids(model, tokenizer)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
    return Policy(model, tokenizer, eos_ids, int(pad_id), device, config.chat_template)


def not_finite(model: torch.nn.Module) -> str:
    """The first parameter that holds NaN or an infinity; empty where none does."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    whole = torch.stack([torch.isfinite(p.detach()).all() for p in parameters]).tolist()  # one wait for the device
    return next((name for name, good in zip(names, whole, strict=True) if not good), "")


def load_model(config: ModelConfig) -> PreTrainedModel:
    """The model alone, in its training dtype, on the CPU; LoRA and gradient checkpointing applied.

    Raises:
        ConfigError: as `load_policy`.
    """
    dtype = DTYPES[config.dtype]
    if config.random:
        hf_config = _shape(config)
        model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, attn_implementation=config.attention)
    else:
        model = _guarded(
            config,
            lambda: AutoModelForCausalLM.from_pretrained(
                **_source(config),
                dtype=dtype,
                attn_implementation=config.attention,
                use_safetensors=_safetensors(config),
                **_unpacked(config),
            ),
        )
        if _gguf(config):
            model = _dequantized(model, dtype, config.attention)
    model.config.use_cache = False
    if config.lora.r:
        model = _with_lora(model, config.lora)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if config.lora.r:
            model.enable_input_require_grads()
    # Checkpointing is active in train mode only; nothing else may depend on the mode, so dropout is refused.
    _refuse_dropout(model, config)
    model.train(config.gradient_checkpointing)
    return model


def _shape(config: ModelConfig) -> Any:
    """The architecture alone, of a local model where one is named, else the published shape, which needs no hub."""
    if config.name in SHAPES and not Path(config.path).expanduser().exists():
        return shape_config(config.name)
    return _guarded(config, lambda: AutoConfig.from_pretrained(**_source(config)))


def save_plain(config: ModelConfig, folder: Path) -> None:
    """Write model and tokenizer as safetensors, so that a GGUF file need be converted only once."""
    model = load_model(config)
    model.config.use_cache = True
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**_source(config)).save_pretrained(folder)


def _gguf(config: ModelConfig) -> bool:
    return config.path.endswith(".gguf")


def _safetensors(config: ModelConfig) -> bool | None:
    # A pickle is never executed: hub ids and folders must hold safetensors. GGUF has another reader.
    return None if _gguf(config) else True


def _unpacked(config: ModelConfig) -> dict[str, Any]:
    """The argument by which a GGUF file's weights are unpacked: later releases of transformers keep them packed."""
    settings = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": settings(dequantize=True)} if settings and _gguf(config) else {}


def _source(config: ModelConfig) -> dict[str, Any]:
    """The keyword arguments of `from_pretrained` that say where the model lies."""
    common: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if config.path == "embedded":
        return {"pretrained_model_name_or_path": str(tiny_path()), **common}
    if _gguf(config):
        path = Path(config.path).expanduser()
        common |= {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        return common
    local = Path(config.path).expanduser()
    if local.is_dir():
        return {"pretrained_model_name_or_path": str(local), **common}
    return {"pretrained_model_name_or_path": config.path, "revision": config.revision or "main", **common}


def place_of(config: ModelConfig) -> str:
    """Where the model lies, for others: a hub id, or a folder or file by its whole path."""
    path = Path(_source(config)["pretrained_model_name_or_path"])
    return str(path.resolve()) if path.exists() else config.path


def _guarded(config: ModelConfig, load: Any) -> Any:
    """What `load` returns. The many ways in which a model cannot be read become one sentence, with the original as its
    cause."""
    try:
        return load()
    except (OSError, ValueError, ImportError, LookupError, RuntimeError, SafetensorError, struct.error) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "does not support an attention implementation" in reason:
            raise ConfigError(
                f"model.attention={config.attention}: {reason.split()[0]} does not have it; model.attention=eager is "
                f"what every model has"
            ) from error
        raise ConfigError(
            f"model.path={config.path}: cannot be read ({reason}); allowed are 'embedded', a hub id that is reachable "
            f"or cached, a local folder with safetensors, or a GGUF file (extra: gguf)"
        ) from error


def _dequantized(model: PreTrainedModel, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The same weights in a model that does not call itself quantised, which would refuse to be trained and saved."""
    hf_config = model.config
    if hasattr(hf_config, "quantization_config"):
        del hf_config.quantization_config
    plain = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, attn_implementation=attention)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain


def _with_lora(model: PreTrainedModel, lora: LoraConfig) -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError("model.lora.r > 0: needs the package peft (extra: lora); or set model.lora.r=0") from None
    targets: str | list[str] = lora.targets if lora.targets == "all-linear" else lora.targets.split(",")
    settings = peft.LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, settings)


def _refuse_dropout(model: PreTrainedModel, config: ModelConfig) -> None:
    if not config.gradient_checkpointing:
        return
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop", "dropout"):
        value = getattr(model.config, name, 0.0)
        if value:
            raise ConfigError(
                f"model.gradient_checkpointing=true: the model's {name} is {value}, and dropout would be active; "
                f"allowed is a model without dropout, or model.gradient_checkpointing=false"
            )


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a rollout, by the generation configuration (one or several) and the tokenizer."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    ids = set(declared if isinstance(declared, list | tuple) else [declared])
    ids |= {tokenizer.eos_token_id}
    found = tuple(sorted(int(i) for i in ids if i is not None))
    if not found:
        raise ConfigError(
            "model.path: neither the tokenizer nor the generation configuration names an end-of-sequence token"
        )
    return found


class Reference:
    """The reference of a KL term: the policy as it was before the first update, frozen.

    It is made before anything is trained or loaded from a checkpoint, so a resumed run has the same one. With LoRA the
    frozen weights below the adapters are that policy, since fresh adapters add zero: nothing is copied. Without, a copy
    in the training dtype stays beside the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.copy: nn.Module | None = None
        if getattr(model, "active_peft_config", None) is None:
            self.copy = copy.deepcopy(model).eval().requires_grad_(False)

    @contextmanager
    def opened(self) -> Iterator[nn.Module]:
        """The model whose log-probabilities are the reference's, within the block."""
        if self.copy is not None:
            yield self.copy
            return
        with self.model.disable_adapter():
            yield self.model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model is in evaluation mode inside; afterwards in the mode in which it was."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """The model computes in float32 inside, on the values that its parameters have; afterwards it is as it was.

    Every half-type parameter gets its values in float32, exactly, and its own tensor back at the end, so that nothing
    that holds on to the parameters (an optimiser, a captured graph) sees a change. Takes 4 bytes per parameter; buffers
    keep their dtype, and gradients are set aside.
    """
    kept = [(p, p.data, p.grad) for p in model.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    try:
        for parameter, values, _ in kept:
            parameter.grad = None
            parameter.data = values.float()
        yield
    finally:
        for parameter, values, grad in kept:
            parameter.grad = None
            parameter.data = values
            parameter.grad = grad
