"""Blocks of five weighted rows and what ordinary autograd makes of them, for the tests of the delivery of gradients."""

from __future__ import annotations

import torch
from torch import nn

from grpo_sweeps.engine.gram import GradientGram
from tests.unit.engine.gram_oracle import plain_sums, relative

WEIGHTS = torch.tensor([0.5, -1.0, 2.0, 0.25, 1.0], dtype=torch.float64)
TOL = 1e-12


def plain_gradients(model, b, sums=plain_sums):
    for parameter in model.parameters():
        parameter.grad = None
    (sums(model, b) * WEIGHTS).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found


def assert_gradients(model, expected, times=1):
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        assert relative(grad, times * expected[name]) < TOL, name


def measured(model, b, sums=plain_sums):
    with GradientGram(model).measure([5], WEIGHTS) as m:
        sums(model, b).sum().backward()
        inside = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert m.check() < TOL
    return inside


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.last = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.between = lambda x, y: y

    def forward(self, ids_BT):
        x = self.embed(ids_BT) * 1.0
        y = self.between(x, self.first(x))
        return self.last(y).tanh().sum((1, 2))
