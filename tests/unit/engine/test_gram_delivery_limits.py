"""Where gradients may not wait for the block's node it stays out, and what it could not hand out right is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from grpo_sweeps.engine.gram import GradientGram, GramError
from tests.unit.engine.delivered import TOL, WEIGHTS, Chain, assert_gradients, measured, plain_gradients
from tests.unit.engine.gram_oracle import batch, plain_sums, relative


@pytest.mark.parametrize("kind", ["hook", "post"])
def test_it_stays_out_where_hooks_see_gradients(qwen2, handed, kind):
    """A hook of a parameter that the loss does not use is never called by autograd, and would be by the node."""
    seen: dict[str, torch.Tensor] = {}
    b = batch(5)
    qwen2.register_module("unused", nn.Linear(3, 2).double())
    expected = plain_gradients(qwen2, b)
    for name, parameter in qwen2.named_parameters():
        if kind == "hook":
            parameter.register_hook(lambda grad, name=name: seen.__setitem__(name, grad.clone()))
        else:
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.__setitem__(name, p.grad.clone()))
    measured(qwen2, b)
    assert not handed and seen.keys() == expected.keys()
    assert all(relative(seen[name], expected[name]) < TOL for name in seen)


def test_it_stays_out_where_gradients_would_lie_beside_others(qwen2, handed):
    b = batch(5)
    expected = plain_gradients(qwen2, b)
    for times in (1, 2, 3):
        measured(qwen2, b)
        assert_gradients(qwen2, expected, times)
        assert len(handed) == 1


def test_what_autograd_saves_may_be_taken_over(qwen2, handed):
    """Offloaded or packed tensors come back by autograd; inputs kept here would stay where they are."""
    b, packed = batch(5), []
    expected = plain_gradients(qwen2, b)
    inputs = {tuple(p.shape[1:]) for name, p in qwen2.named_parameters() if "proj.weight" in name}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(tuple(t.shape[2:])) or t, lambda t: t):
        measured(qwen2, b)
    assert inputs <= set(packed)
    assert_gradients(qwen2, expected)


def test_an_input_that_is_changed_after_its_use_is_refused():
    model, ids = Chain().double(), torch.randint(0, 11, (5, 4))

    def change(x, y):
        x.add_(1.0)
        return y

    model.between = change
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(ids).sum().backward()
    model.zero_grad()  # some were formed before
    with (
        pytest.raises(GramError, match="module first: its input was changed in place after it had been used"),
        GradientGram(model).measure([5]),
    ):
        model(ids).sum().backward()


def test_a_second_backward_is_refused(qwen2):
    b = batch(5)
    with pytest.raises(GramError, match="met a second backward"), GradientGram(qwen2).measure([5]):
        loss = plain_sums(qwen2, b).sum()
        loss.backward(retain_graph=True)
        loss.backward()


@pytest.mark.parametrize("asked", ["grad", "inputs", "one input", "activation", "activation grad"])
def test_a_backward_for_some_inputs_alone_is_refused(qwen2, asked):
    """It leaves out nodes of the graph, and what they measure would be lacking without a word."""
    parameters, hidden = list(qwen2.parameters()), []
    qwen2.model.layers[0].register_forward_hook(lambda module, args, y: hidden.append(y))
    with (
        pytest.raises(GramError, match=r"autograd.grad and backward\(inputs=...\) leave out"),
        GradientGram(qwen2).measure([5], WEIGHTS),
    ):
        loss = plain_sums(qwen2, batch(5)).sum()
        inputs = {"one input": parameters[5:6], "activation": hidden, "activation grad": hidden}.get(asked, parameters)
        if asked.endswith("grad"):
            torch.autograd.grad(loss, inputs)
        else:
            loss.backward(inputs=inputs)
    assert all(p.grad is None for p in qwen2.parameters())


def test_a_failed_backward_leaves_no_gradients_for_later(qwen2):
    b = batch(5)
    layer = qwen2.model.layers[0]

    def fail(grad):
        raise ZeroDivisionError

    layer.register_forward_hook(lambda module, args, y: y.register_hook(fail) and None)
    with pytest.raises(GramError, match="did not come to the head of the block"), GradientGram(qwen2).measure([5]):
        with pytest.raises(ZeroDivisionError):
            plain_sums(qwen2, b).sum().backward()
        qwen2.zero_grad()
    assert all(p.grad is None for p in qwen2.parameters())


def test_a_first_module_that_saved_its_output_sees_that_it_is_changed():
    class TanhNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(6, dtype=torch.float64) + 0.5)

        def forward(self, x):
            return torch.tanh(x * self.weight)

    model = nn.Sequential(TanhNorm(), nn.Linear(6, 3).double())
    x = torch.randn(5, 4, 6, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), GradientGram(model).measure([5]):
        model[1](model[0](x).mul_(2)).sum().backward()


def test_a_head_that_comes_after_recomputed_layers(handed):
    """With a frozen embedding the first module that is called with gradients lies behind reentrantly recomputed ones,
    whose gradients would come after its node had run."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).double()
    x = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)

    def sums(model, x):
        return model[1](checkpoint(model[0], x, use_reentrant=True)).sin().sum((1, 2))

    expected = plain_gradients(model, x, sums)
    assert measured(model, x, sums).keys() == expected.keys()
    assert_gradients(model, expected)
    assert not handed
