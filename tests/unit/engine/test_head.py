"""The blockwise head against the plain logits, in values, gradients, entropies and memory."""

import pytest
import torch
from torch import nn

from grpo_sweeps.engine import head as head_module
from grpo_sweeps.engine.gram import GramError
from grpo_sweeps.engine.head import completion_log_probs, position_ids
from tests.unit.engine.gram_oracle import ARCHITECTURES, VOCABULARY, batch, build, head_sums, plain_sums, trainable


def distributions(model, b, temperature):
    out = model(
        input_ids=b.input_ids,
        attention_mask=b.attention_mask,
        position_ids=position_ids(b.attention_mask),
        use_cache=False,
    )
    return (out.logits / temperature).log_softmax(-1)


@pytest.fixture(params=[1, 10**3, 10**9], ids=["one-word blocks", "small blocks", "one block"])
def logit_bytes(request, monkeypatch):
    monkeypatch.setitem(head_module.LOGIT_BYTES, "cpu", request.param)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_equals_plain_logits(padding, temperature, logit_bytes):
    model, b = build("llama", False), batch(5, padding=padding)
    logprobs, entropy = completion_log_probs(
        model, b.input_ids, b.attention_mask, b.completion_mask, temperature, with_entropy=True
    )
    full = distributions(model, b, temperature)
    expected = torch.zeros_like(logprobs)
    expected[:, 1:] = full[:, :-1].gather(2, b.input_ids[:, 1:, None]).squeeze(2)
    expected_entropy = torch.zeros_like(entropy)
    expected_entropy[:, 1:] = -(full.exp() * full).sum(-1)[:, :-1]
    assert torch.allclose(logprobs, expected * b.completion_mask, atol=1e-13, rtol=0)
    assert torch.allclose(entropy, expected_entropy * b.completion_mask, atol=1e-13, rtol=0)
    assert not entropy.requires_grad and logprobs.dtype == torch.float64


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_gradients_without_a_measure(name, logit_bytes):
    model, b = build(name, True), batch(4)
    grads = []
    for sums in (plain_sums, head_sums):
        model.zero_grad()
        (sums(model, b, 0.7) * torch.tensor([1.0, -2.0, 0.5, 0.0])).sum().backward()
        grads.append([p.grad.clone() for p in trainable(model).values()])
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*grads, strict=True))


def test_half_precision_gives_float32():
    model, b = build("llama", True, torch.bfloat16), batch(3)
    logprobs = completion_log_probs(model, b.input_ids, b.attention_mask, b.completion_mask)
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
    reference = plain_sums(build("llama", True, torch.bfloat16), b)
    assert torch.allclose(logprobs.sum(1), reference, atol=1e-5)


def test_a_padded_row_equals_the_unpadded_one():
    model, b = build("llama", True), batch(3, padding="left")
    together = completion_log_probs(model, b.input_ids, b.attention_mask, b.completion_mask)
    for row in range(3):
        real = b.attention_mask[row].bool()
        alone = completion_log_probs(
            model, b.input_ids[row, real][None], b.attention_mask[row, real][None], b.completion_mask[row, real][None]
        )
        assert torch.allclose(alone[0], together[row, real], atol=1e-13, rtol=0)


def test_padding_token_inside_a_completion_counts():
    """EOS is often the pad token too: masks decide, never the id."""
    model, b = build("llama", True), batch(3)
    b.input_ids[:, -2] = 0
    logprobs = completion_log_probs(model, b.input_ids, b.attention_mask, b.completion_mask)
    assert (logprobs[:, -2] < 0).all()


def test_empty_completion_is_zero_and_differentiable():
    model, b = build("llama", True), batch(3)
    b.completion_mask[1] = 0
    sums = head_sums(model, b)
    assert sums[1] == 0
    sums.sum().backward()
    b.completion_mask[:] = 0
    assert torch.equal(head_sums(model, b), torch.zeros(3, dtype=torch.float64))


def test_no_tensor_as_large_as_the_logits_in_either_direction(monkeypatch):
    """Every tensor made on the way, forward and backward, is smaller than completion tokens x vocabulary."""
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setitem(head_module.LOGIT_BYTES, "cpu", 4096)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    hidden = torch.randn(4, 32, 8, requires_grad=True)
    head = nn.Linear(8, 300, bias=False)
    with Sizes():
        logprobs, _ = head_module.head_log_probs(hidden, head, torch.randint(0, 300, (4, 32)), 1.0, True)
        logprobs.sum().backward()
    assert head.weight.numel() <= largest < 32 * 300


@pytest.mark.parametrize("setting", ["final_logit_softcapping", "logit_scale", "logits_scaling"])
def test_logit_transforms_are_refused_by_name(setting):
    model, b = build("llama", True), batch(2)
    setattr(model.config, setting, 30.0)
    with pytest.raises(GramError, match=setting):
        head_sums(model, b)


def test_a_transform_that_nobody_listed_is_found():
    model, b = build("llama", True), batch(2)

    class Shifted(type(model)):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = 1.01 * out.logits
            return out

    model.__class__ = Shifted
    model.train()
    with pytest.raises(GramError, match="changes its logits after the head"):
        head_sums(model, b)
    assert all(module.training for module in model.modules())


def test_a_head_with_bias_is_refused():
    model, b = build("llama", False), batch(2)
    model.lm_head = nn.Linear(16, VOCABULARY).double()
    with pytest.raises(GramError, match="without bias"):
        head_sums(model, b)


def test_bad_masks_and_temperature():
    model, b = build("llama", True), batch(2)
    with pytest.raises(ValueError, match="column 0"):
        completion_log_probs(model, b.input_ids, b.attention_mask, torch.ones_like(b.input_ids))
    with pytest.raises(ValueError, match="all of one shape"):
        completion_log_probs(model, b.input_ids, b.attention_mask[:, 1:], b.completion_mask)
    with pytest.raises(ValueError, match="temperature=0"):
        completion_log_probs(model, b.input_ids, b.attention_mask, b.completion_mask, 0.0)


def test_position_ids():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]
