"""Checks 1 and 2: the Gram and the weighted gradient against one autograd pass a row, in float64."""

import pytest
import torch

from grpo_sweeps.engine.gram import GradientGram, verify_against_autograd
from tests.unit.engine.gram_oracle import (
    ARCHITECTURES,
    SUMS,
    batch,
    build,
    measured,
    oracle_rows,
    plain_sums,
    relative,
    trainable,
    whole,
)

TOL = 1e-12
WEIGHTS = torch.tensor([0.5, -1.0, 0.0, 2.0, -0.25], dtype=torch.float64)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def tied(request):
    return request.param


@pytest.fixture(params=list(SUMS))
def path(request):
    return request.param


def assert_equals_oracle(model, b, rows, sums, group_sizes=(2, 3)):
    m = measured(model, b, list(group_sizes), WEIGHTS, sums)
    assert relative(m.matrix(), whole(rows)) < TOL
    by_parameter = m.matrices(by="parameter")
    largest = whole(rows).abs().max()
    for name, parameter in trainable(model).items():
        expected = rows[name] @ rows[name].T
        assert (m.parameter_matrix(name) - expected).abs().max() < TOL * largest, name
        assert torch.equal(by_parameter[name][1], m.parameter_matrix(name)[2:, 2:]), name
        weighted = WEIGHTS @ rows[name]
        assert (parameter.grad.flatten() - weighted).norm() < TOL * (1 + rows[name].norm()), name
        assert m.parameter_grad_sq_norm(name) == pytest.approx(float(weighted @ weighted), rel=1e-11, abs=1e-11), name
    assert m.check() < TOL


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_equals_separate_backward_passes(name, tied, padding, path):
    model, b = build(name, tied), batch(5, padding=padding)
    assert_equals_oracle(model, b, oracle_rows(model, b), SUMS[path])


@pytest.mark.parametrize("name", ["llama", "nemotron"])
def test_non_reentrant_checkpointing_in_train_mode(name, tied, path, monkeypatch):
    model, b = build(name, tied), batch(5)
    rows = oracle_rows(model, b)
    SUMS[path](model, b)  # the head looks at a model once, with forwards of its own
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    calls = {"forward": 0, "backward": 0}
    mlp = type(model.get_decoder().layers[0].mlp)
    forward = mlp.forward

    def counting(self, *args, **kwargs):
        calls["forward" if torch._C._current_graph_task_id() == -1 else "backward"] += 1
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(mlp, "forward", counting)
    m = measured(model, b, [5], WEIGHTS, SUMS[path])
    assert calls == {"forward": 2, "backward": 2}, "each layer must have been recomputed in the backward"
    assert relative(m.matrix(), whole(rows)) < TOL
    calls.update(forward=0, backward=0)
    assert_equals_oracle(model, b, rows, SUMS[path])
    assert calls["backward"] == 2


def test_reentrant_checkpointing_is_exact_too():
    model, b = build("llama", True), batch(5)
    rows = oracle_rows(model, b)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.train()
    assert_equals_oracle(model, b, rows, plain_sums)


def test_lora(path):
    peft = pytest.importorskip("peft", reason="the lora extra is not installed")
    base = build("llama", True)
    config = peft.LoraConfig(r=3, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(base, config).double().eval()
    names = trainable(model)
    assert names and all("lora_" in name for name in names)
    b = batch(5)
    assert_equals_oracle(model, b, oracle_rows(model, b), SUMS[path])
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)


def test_partly_frozen_model(tied, path):
    model, b = build("qwen2", tied), batch(5)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj.bias" in name or "down_proj" in name or "layers.1.input_layernorm" in name)
    assert_equals_oracle(model, b, oracle_rows(model, b), SUMS[path])


@pytest.mark.parametrize("form", ["blocks", "ghost"])
@pytest.mark.parametrize("block_bytes", [1, 700, 10**6])
def test_every_form_and_block_size(form, block_bytes, tied):
    model, b = build("llama", tied), batch(5)
    rows = oracle_rows(model, b)
    for sums in SUMS.values():
        m = measured(model, b, [5], WEIGHTS, sums, form=form, block_bytes=block_bytes)
        assert relative(m.matrix(), whole(rows)) < TOL
        assert m.check() < TOL


@pytest.mark.parametrize("group_sizes", [[5], [1, 4], [2, 2, 1], [1] * 5])
@pytest.mark.parametrize("cross_groups", [False, True])
def test_groups_are_diagonal_blocks_and_parts_add_up(group_sizes, cross_groups, path):
    model, b = build("llama", True), batch(5)
    full = whole(oracle_rows(model, b))
    m = measured(model, b, group_sizes, WEIGHTS, SUMS[path], cross_groups=cross_groups)
    start = 0
    for size, gram in zip(group_sizes, m.matrices(), strict=True):
        assert gram.dtype == torch.float64
        expected = full[start : start + size, start : start + size]
        assert (gram - expected).abs().max() < TOL * full.abs().max()
        start += size
    for by in ("layer", "parameter"):
        parts = m.matrices(by=by)
        for g, gram in enumerate(m.matrices()):
            assert relative(sum(part[g] for part in parts.values()), gram) < TOL
    assert list(m.matrices(by="layer")) == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]


def test_grad_accumulates_as_autograd_does():
    model, b = build("llama", True), batch(5)
    rows = oracle_rows(model, b)
    gram = GradientGram(model)
    for _ in range(2):
        with gram.measure([5], WEIGHTS) as m:
            plain_sums(model, b).sum().backward()
    assert m.check() < TOL
    for name, parameter in trainable(model).items():
        assert torch.allclose(parameter.grad.flatten(), 2 * WEIGHTS @ rows[name], atol=1e-11), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_forward_is_the_plain_one_bit_for_bit(name, dtype, path):
    model, b = build(name, True, dtype), batch(5)
    sums = SUMS[path]
    expected = sums(model, b).detach()
    with GradientGram(model).measure([5], WEIGHTS):
        row_sums = sums(model, b)
        row_sums.sum().backward()
    assert torch.equal(row_sums.detach(), expected)
    grads = {n: p.grad.clone() for n, p in trainable(model).items()}
    result = verify_against_autograd(model, GradientGram(model), lambda: sums(model, b), [2, 3], WEIGHTS)
    assert result.gradient <= {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 8e-2}[dtype]
    assert all(torch.equal(p.grad, grads[n]) for n, p in trainable(model).items()), (
        "verification must leave .grad alone"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_the_gram_of_its_own_rows(dtype, tied, path):
    """Beside separate backwards of the same dtype, not beside a wider model's, which are other gradients."""
    b = batch(5)
    model = build("llama", tied, dtype)
    m = measured(model, b, [5], WEIGHTS, SUMS[path])
    rows = {name: grads.double() for name, grads in oracle_rows(model, b, SUMS[path]).items()}
    assert relative(m.matrix(), whole(rows)) < m.floor
    assert m.check() < m.floor < 0.005
