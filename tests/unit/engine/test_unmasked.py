"""Forwards without a mask against those with one, and when no mask is needed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MistralConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_sweeps.engine import unmasked
from grpo_sweeps.engine.gram import GradientGram
from grpo_sweeps.engine.gram.host import KNOWN, fetched, on_host
from grpo_sweeps.engine.head import completion_log_probs
from tests.unit.engine.test_graph_sampler import MODELS, shape

VOCABULARY, LENGTHS, PROMPT = 64, (9, 5, 12, 3), 2
PLAIN = {name: make for name, make in MODELS.items() if name in unmasked.CAUSAL}
PLAIN["mistral"] = shape(MistralConfig, sliding_window=None)


@dataclasses.dataclass(frozen=True)
class Batch:
    ids: Tensor
    mask: Tensor
    completion: Tensor


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=generator)
    inside = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    return Batch(ids, inside.long(), inside & (torch.arange(max(LENGTHS)) >= PROMPT))


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of the attention had a mask, on a CPU that is treated as a GPU."""
    monkeypatch.setattr(unmasked, "ON", "cpu")
    seen, sdpa = list[bool](), ALL_ATTENTION_FUNCTIONS["sdpa"]

    def watched(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        seen.append(attention_mask is not None)
        return sdpa(module, q, k, v, attention_mask, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", watched)
    return seen


def model_of(name: str) -> Any:
    torch.manual_seed(1)
    model: Any = (MODELS | PLAIN)[name](VOCABULARY).double().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    return model


def scores(model: Any, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    logprobs_BT = completion_log_probs(model, batch.ids, batch.mask, batch.completion)
    parameters = list(model.parameters())
    return logprobs_BT.detach(), list(torch.autograd.grad(logprobs_BT.sum(), parameters))


def test_every_architecture_is_tried() -> None:
    assert set(PLAIN) == set(unmasked.CAUSAL)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_the_same_log_probabilities_and_gradients(
    name: str, checkpointing: bool, batch: Batch, masks: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(name)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = scores(model, batch)
    assert masks and not any(masks)
    masks.clear()
    monkeypatch.setattr(unmasked, "ON", "another device")
    expected = scores(model, batch)
    assert masks and all(masks)
    assert torch.allclose(found[0], expected[0], atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-11) for a, b in zip(found[1], expected[1], strict=True))


def test_the_gram_is_the_same(batch: Batch, masks: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    model, grams = model_of("qwen2"), []
    gram = GradientGram(model)
    for device in ("cpu", "another device"):
        monkeypatch.setattr(unmasked, "ON", device)
        with gram.measure([len(LENGTHS)]) as m:
            completion_log_probs(model, batch.ids, batch.mask, batch.completion).sum().backward()
        grams.append(m.matrix())
        model.zero_grad()
    assert masks[: len(masks) // 2] != masks[len(masks) // 2 :]
    assert torch.allclose(grams[0], grams[1], rtol=1e-10)


def test_the_model_is_as_it_was(batch: Batch, masks: list[bool]) -> None:
    model = model_of("llama")
    scores(model, batch)
    assert model.config._attn_implementation == "sdpa"
    assert unmasked.ATTENTION not in ALL_ATTENTION_FUNCTIONS
    with pytest.raises(KeyError), unmasked.unmasked(model, batch.mask):
        raise KeyError
    assert model.config._attn_implementation == "sdpa" and unmasked.ATTENTION not in ALL_ATTENTION_FUNCTIONS


@pytest.mark.parametrize("name", [name for name in MODELS if "window" in name or "eager" in name])
def test_other_attention_keeps_its_mask(name: str, batch: Batch, masks: list[bool]) -> None:
    assert not unmasked.needs_none(model_of(name), batch.mask)


def test_padding_on_the_left_keeps_its_mask(batch: Batch, masks: list[bool]) -> None:
    model = model_of("llama")
    assert unmasked.needs_none(model, batch.mask)
    assert not unmasked.needs_none(model, batch.mask.flip(1))


def test_what_the_host_does_not_know_keeps_its_mask(batch: Batch, masks: list[bool]) -> None:
    unknown = batch.mask.to("meta")
    assert on_host(unknown) is None and not unmasked.needs_none(model_of("llama"), unknown)


def test_values_that_were_sent_are_known_until_they_change() -> None:
    class Elsewhere(torch.Tensor):
        """A tensor that says it is on another device."""

        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("meta")

    there = torch.arange(4).as_subclass(Elsewhere)
    assert on_host(there) is None
    setattr(there, KNOWN, (torch.arange(4), there._version))
    known = on_host(there)
    assert known is not None and known.tolist() == [0, 1, 2, 3]
    there.add_(1)
    assert on_host(there) is None


def test_fetched_gives_the_values() -> None:
    assert fetched(torch.tensor([3, 4])).tolist() == [3, 4]
