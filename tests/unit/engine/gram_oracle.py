"""Tiny random models, batches and the slow oracle (one autograd pass a row) for the tests of the Gram."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo_sweeps.engine.gram import GradientGram, Measurement
from grpo_sweeps.engine.head import completion_log_probs, position_ids

VOCABULARY = 29
SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GPT2_SHAPE = dict(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=64, n_inner=24)
ARCHITECTURES = {
    "llama": lambda tied: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)),
    "qwen2": lambda tied: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=tied)),
    "qwen3": lambda tied: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=tied)),
    "nemotron": lambda tied: NemotronForCausalLM(NemotronConfig(**SHAPE, hidden_act="relu2", tie_word_embeddings=tied)),
    "gpt2": lambda tied: GPT2LMHeadModel(
        GPT2Config(
            **GPT2_SHAPE,
            tie_word_embeddings=tied,
            bos_token_id=1,
            eos_token_id=2,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
    ),
}


def build(name: str, tied: bool, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """A tiny model whose every parameter is drawn, norms and biases too (ones and zeros would hide mistakes)."""
    torch.manual_seed(seed)
    model = ARCHITECTURES[name](tied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype).eval()


@dataclass(frozen=True)
class Batch:
    input_ids: Tensor
    attention_mask: Tensor
    completion_mask: Tensor


def batch(rows: int, prompt: int = 4, completion: int = 5, padding: str = "left", seed: int = 1) -> Batch:
    """Random prompts and completions of unequal length, padded on one side ("left" pads prompts before, completions
    after)."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for row in range(rows):
        p, c = max(1, prompt - row % 3), max(1, completion - row % 2)
        sequences.append((p, torch.randint(1, VOCABULARY, (p + c,), generator=generator)))
    return pad(sequences, padding)


def pad(sequences: list[tuple[int, Tensor]], padding: str, extra: int = 0) -> Batch:
    """(prompt length, ids) a row -> Batch, with `extra` more columns of padding."""
    before = [max(p for p, _ in sequences) - p + extra if padding == "left" else 0 for p, _ in sequences]
    width = max(b + len(ids) for b, (_, ids) in zip(before, sequences, strict=True)) + extra
    input_ids = torch.zeros(len(sequences), width, dtype=torch.long)
    attention, completion = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
    for row, (start, (p, ids)) in enumerate(zip(before, sequences, strict=True)):
        end = start + len(ids)
        input_ids[row, start:end] = ids
        attention[row, start:end] = 1
        completion[row, start + p : end] = 1
    return Batch(input_ids, attention, completion)


def plain_sums(model: nn.Module, b: Batch, temperature: float = 1.0) -> Tensor:
    """Row sums of log-probabilities through `model(...).logits`."""
    out = model(
        input_ids=b.input_ids,
        attention_mask=b.attention_mask,
        position_ids=position_ids(b.attention_mask),
        use_cache=False,
    )
    logits = out.logits[:, :-1].to(torch.promote_types(out.logits.dtype, torch.float32)) / temperature
    logprobs = logits.log_softmax(-1).gather(2, b.input_ids[:, 1:, None]).squeeze(2)
    return (logprobs * b.completion_mask[:, 1:]).sum(1)


def head_sums(model: nn.Module, b: Batch, temperature: float = 1.0) -> Tensor:
    """Row sums of log-probabilities through the blockwise head."""
    return completion_log_probs(model, b.input_ids, b.attention_mask, b.completion_mask, temperature).sum(1)


Sums = Callable[[nn.Module, Batch], Tensor]
SUMS: dict[str, Sums] = {"logits": plain_sums, "head": head_sums}


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def oracle_rows(model: nn.Module, b: Batch, sums: Sums = plain_sums) -> dict[str, Tensor]:
    """{parameter: (rows, numel)} by one autograd pass a row."""
    row_sums = sums(model, b)
    parameters = trainable(model)
    passes = [
        torch.autograd.grad(row, list(parameters.values()), retain_graph=True, allow_unused=True)
        for row in row_sums.unbind()
    ]
    return {
        name: torch.stack(
            [torch.zeros_like(p).flatten() if grads[i] is None else grads[i].flatten() for grads in passes]
        )
        for i, (name, p) in enumerate(parameters.items())
    }


def measured(
    model: nn.Module,
    b: Batch,
    group_sizes: list[int],
    weights: Tensor | None = None,
    sums: Sums = plain_sums,
    cross_groups: bool = True,
    **options: object,
) -> Measurement:
    """One measured block; `.grad` starts from None."""
    model.zero_grad(set_to_none=True)
    gram = GradientGram(model, **options)  # type: ignore[arg-type]
    with gram.measure(group_sizes, weights, cross_groups) as m:
        sums(model, b).sum().backward()
    return m


def relative(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest entry of the reference b."""
    return float((a - b).abs().max() / b.abs().max())


def whole(rows: dict[str, Tensor]) -> Tensor:
    """(rows, rows) Gram of the oracle's rows."""
    return sum((r @ r.T for r in rows.values()), torch.zeros((), dtype=torch.float64))


def largest_error() -> tuple[float, str]:
    """Over every architecture, tying, padding side, checkpointing, path and form: the largest error and where it is."""
    weights = torch.tensor([0.5, -1.0, 0.0, 2.0, -0.25], dtype=torch.float64)
    errors = []
    for name, tied, side in itertools.product(ARCHITECTURES, (True, False), ("left", "right")):
        model, b = build(name, tied), batch(5, padding=side)
        exact = whole(oracle_rows(model, b))
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                model.train()
            for path, form in itertools.product(SUMS, ("blocks", "ghost")):
                found = measured(model, b, [2, 3], weights, SUMS[path], form=form).matrix()
                where = f"{name} tied={tied} padding={side} checkpointing={checkpointing} {path} {form}"
                errors.append((relative(found, exact), where))
    return max(errors)


if __name__ == "__main__":  # python -m tests.unit.engine.gram_oracle
    print("largest relative error {:.2e} ({})".format(*largest_error()))
