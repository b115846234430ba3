"""A block begins by making sure that the model is the one that was claimed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from grpo_sweeps.engine.gram import GradientGram, GramError
from tests.unit.engine.gram_oracle import relative

IDS = torch.arange(10).view(2, 5) % 7


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))
        self[2].weight.requires_grad_(False)
        self.double()


def run(gram, model):
    model.zero_grad()
    with gram.measure([2]) as m:
        model(IDS).sin().sum().backward()
    return m.matrix()


CHANGES = {
    "replaced linear": lambda m: m.__setitem__(3, nn.Linear(4, 3).double()),
    "replaced norm": lambda m: m.__setitem__(2, nn.LayerNorm(4).double()),
    "replaced embedding": lambda m: m.__setitem__(0, nn.Embedding(7, 4).double()),
    "replaced parameter": lambda m: setattr(m[1], "weight", nn.Parameter(m[1].weight.detach().clone())),
    "frozen": lambda m: m[1].weight.requires_grad_(False),
    "unfrozen": lambda m: m[2].weight.requires_grad_(True),
    "bias taken away": lambda m: setattr(m[1], "bias", None),
    "parameter added": lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(1))),
    "module added": lambda m: m.append(nn.Linear(3, 3).double()),
    "module taken away": lambda m: m.__delitem__(3),
    "meta": lambda m: m[1].to("meta"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_refused(change):
    model = Net()
    gram = GradientGram(model)
    run(gram, model)
    CHANGES[change](model)
    with pytest.raises(GramError, match=r"make a new one|gained or lost|moved to"):
        run(gram, model)


def test_rows_that_come_to_interact_are_refused():
    model = Net()
    gram = GradientGram(model)
    run(gram, model)
    model.insert(1, nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(4, affine=False), nn.Unflatten(0, (2, 5))))
    with pytest.raises(GramError, match="takes statistics over the batch"):
        run(gram, model)


def test_a_model_that_comes_to_hold_a_loss_over_all_rows_is_refused():
    model = Net()
    model.config = SimpleNamespace(output_router_logits=False)
    gram = GradientGram(model)
    run(gram, model)
    model.config.output_router_logits = True
    with pytest.raises(GramError, match="adds a load-balancing loss over all rows"):
        run(gram, model)


def test_a_change_that_is_undone_is_no_change():
    model = Net()
    gram = GradientGram(model)
    before = run(gram, model)
    kept = model[3]
    model[3] = nn.Linear(4, 3).double()
    with pytest.raises(GramError):
        run(gram, model)
    model[3] = kept
    assert relative(run(gram, model), before) < 1e-14


def test_values_may_change_and_dtypes():
    model = Net()
    gram = GradientGram(model)
    run(gram, model)
    with torch.no_grad():
        model[1].weight.mul_(2)
    model[3].weight.data = model[3].weight.data + 1
    assert relative(run(gram, model), run(GradientGram(model), model)) < 1e-14
    model.float()
    assert run(gram, model).dtype == torch.float64 and gram.held[0].parameter.dtype == torch.float32


def test_the_callers_weights_may_change_before_the_results_are_read():
    model, weights = Net(), torch.tensor([1.0, -2.0], dtype=torch.float64)
    with GradientGram(model).measure([2], weights) as m:
        model(IDS).sin().sum((1, 2)).sum().backward()
    weights.zero_()
    assert m.check() < 1e-12
