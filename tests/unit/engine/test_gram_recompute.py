"""Checkpointed layers inside a block: from the second block on they recompute in another way, to the same numbers."""

import pytest
import torch
from torch import nn

from grpo_sweeps.engine.gram import GradientGram, GramError, verify_against_autograd
from grpo_sweeps.engine.gram import patch as patch_module
from grpo_sweeps.engine.gram import recompute as recompute_module
from tests.unit.engine.gram_oracle import SUMS, batch, build, oracle_rows, relative, trainable, whole

WEIGHTS = torch.tensor([0.5, -1.0, 0.0, 2.0, -0.25], dtype=torch.float64)


def checkpointed(name, tied=True, **options):
    model = build(name, tied)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False} | options)
    return model.train()


def functions(model):
    return [m.__dict__["_gradient_checkpointing_func"] for m in model.modules() if hasattr(m, "gradient_checkpointing")]


def count_exchanges(monkeypatch):
    """A list that grows by one with each layer that recomputes reentrantly."""
    found = []
    inner = recompute_module._reentrant
    monkeypatch.setattr(recompute_module, "_reentrant", lambda *args: found.append(1) or inner(*args))
    return found


@pytest.mark.parametrize("path", list(SUMS))
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "nemotron"])
def test_later_blocks_equal_separate_backward_passes(name, tied, path, monkeypatch):
    """Also with nonsense where the products are that are left out."""
    model, b = checkpointed(name, tied), batch(5)
    rows = oracle_rows(model, b)
    gram = GradientGram(model)
    left_out = []

    def nonsense(x, o):
        left_out.append(o)
        return torch.full((*x.shape[:-1], o), torch.nan, dtype=x.dtype)

    monkeypatch.setattr(patch_module, "unmade", nonsense)
    reentrant = count_exchanges(monkeypatch)
    before = functions(model)
    for block in range(3):
        model.zero_grad()
        with gram.measure([2, 3], WEIGHTS, cross_groups=True) as m:
            SUMS[path](model, b).sum().backward()
        assert relative(m.matrix(), whole(rows)) < 1e-12
        m.check()
        for parameter_name, parameter in trainable(model).items():
            expected = WEIGHTS @ rows[parameter_name]
            assert (parameter.grad.flatten() - expected).norm() < 1e-12 * (1 + rows[parameter_name].norm())
        assert functions(model) == before
        assert (len(left_out), len(reentrant)) == (4 * block, 2 * block), "product and sum of a layer, from the second"


def test_verification_sees_the_exchange_as_exact():
    model, b = checkpointed("llama"), batch(5)
    gram = GradientGram(model)
    for _ in range(2):
        verify_against_autograd(model, gram, lambda: SUMS["head"](model, b), [5], WEIGHTS)
    assert gram.measured.ends


def test_everything_comes_back_after_an_exception():
    model, b = checkpointed("llama"), batch(5)
    gram, before = GradientGram(model), functions(model)
    with gram.measure([5]):
        SUMS["head"](model, b).sum().backward()
    with pytest.raises(ZeroDivisionError), gram.measure([5]):
        SUMS["head"](model, b)
        raise ZeroDivisionError
    assert functions(model) == before


@pytest.mark.parametrize("change", ["dropout", "hook", "part", "forward", "eval", "one layer off"])
def test_layers_that_are_not_plain_recompute_as_they_were_set(change, monkeypatch):
    """After the ends are known: each would be wrong if the exchange, or the products left out, went too far."""
    model, b = checkpointed("llama"), batch(5)
    gram, layer = GradientGram(model), model.model.layers[1]
    exchanges = count_exchanges(monkeypatch)
    for block in range(2):
        with gram.measure([5]):
            SUMS["head"](model, b).sum().backward()
        assert gram.measured.ends and len(exchanges) == 2 * block
    exchanges.clear()
    if change == "dropout":
        layer.self_attn.attention_dropout = 0.5
    elif change == "hook":
        layer.mlp.down_proj.register_forward_hook(lambda module, args, y: y.tanh())
    elif change == "part":
        layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.3))
    elif change == "forward":
        layer.mlp.act_fn.forward = lambda x: nn.functional.dropout(x.tanh(), 0.3)
    elif change == "eval":
        layer.eval()
    else:
        layer.gradient_checkpointing = False
    found = []
    for measured in (False, True):
        model.zero_grad()
        torch.manual_seed(3)
        if measured:
            with gram.measure([5], WEIGHTS) as m:
                SUMS["head"](model, b).sum().backward()
            m.check()
        else:
            (SUMS["head"](model, b) * WEIGHTS).sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in trainable(model).values()]))
    assert relative(found[1], found[0]) < 1e-12
    assert len(exchanges) == 1, "the other layer alone"


def test_a_frozen_embedding_and_a_backward_after_the_block():
    model, b = checkpointed("llama", False), batch(5)
    model.disable_input_require_grads()
    model.get_input_embeddings().weight.requires_grad_(False)
    gram, rows = GradientGram(model), oracle_rows(model, b)
    for _ in range(3):
        with gram.measure([5]) as m:
            SUMS["head"](model, b).sum().backward()
        assert relative(m.matrix(), whole(rows)) < 1e-12
    with gram.measure([5]):
        row_sums = SUMS["head"](model, b)
    with pytest.raises(GramError, match="the backward must run inside the measure"):
        row_sums.sum().backward()


@pytest.mark.parametrize("options", [{"context_fn": lambda: None}, {"debug": True}])
def test_other_ways_to_recompute_are_left_alone(options):
    assert not GradientGram(checkpointed("llama", **options)).recompute.exchangeable()


def test_a_models_own_function_is_left_alone():
    model = checkpointed("llama")
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = lambda run, *args: run(*args)
    assert not GradientGram(model).recompute.exchangeable()
