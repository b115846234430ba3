"""What verification catches that equal weights and w'Kw do not, and what K's own precision is."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from grpo_sweeps.engine.gram import GradientGram, GramCheckError, Measurement, measured_floor, verify_against_autograd
from grpo_sweeps.engine.gram.verify import SAFETY, default_weights
from tests.unit.engine.gram_oracle import SUMS, batch, build, measured, oracle_rows, trainable, whole


def test_default_weights_have_no_period_and_tell_every_row_apart():
    weights = default_weights(256)
    assert {abs(w) for w in weights} == {0.5, 1.0, 2.0, 4.0}
    for start in range(0, 256, 8):
        assert len(set(weights[start : start + 8])) == 8, "each eight rows have all of them"
    for shift in range(1, 129):
        same = sum(a == b for a, b in zip(weights, weights[shift:], strict=False))
        assert same < 0.5 * (256 - shift), f"a shift by {shift} rows must show"
    for R in (2, 4, 8):
        groups = [weights[start : start + R] for start in range(0, 64, R)]
        assert all(a != b for a, b in itertools.pairwise(groups)), "neighbouring groups differ"
    assert default_weights(5) == weights[:5]


class Scorer(nn.Module):
    """Row sums of a small network over (B, T) numbers; `mixing` is done to the rows' values at the end."""

    def __init__(self, mixing=lambda sums: sums):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(1, 8), nn.Linear(8, 1, bias=False)
        self.mixing = mixing
        self.double()

    def forward(self, x_BT: Tensor) -> Tensor:
        values = self.last(torch.tanh(self.first(x_BT[..., None])))
        return self.mixing(values.sum((1, 2)))


B, R = 8, 4
MIXED = {
    "mean of the batch subtracted": lambda sums: sums - sums.mean(),
    **{f"rows rolled by {n}": lambda sums, n=n: sums.roll(n) for n in range(1, B)},
    **{
        f"rows rolled by {n} within their group": lambda sums, n=n: sums.view(-1, R).roll(n, 1).flatten()
        for n in range(1, R)
    },
    "two groups swapped": lambda sums: sums.view(-1, R).flip(0).flatten(),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_interact_or_changed_places_are_caught(name):
    x = torch.randn(B, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = Scorer(MIXED[name])
    with pytest.raises(GramCheckError):
        verify_against_autograd(model, GradientGram(model), lambda: model(x), [R, R])
    with pytest.raises(GramCheckError):
        measured_floor(model, GradientGram(model), lambda: model(x), [R, R])
    right = Scorer()
    verify_against_autograd(right, GradientGram(right), lambda: right(x), [R, R])


def test_time_first_input_with_as_many_tokens_as_rows_is_caught():
    """Dimension 0 has the right length and is time: equal weights see nothing."""
    x = torch.randn(B, B, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    model = Scorer()

    def time_first() -> Tensor:
        return model.last(torch.tanh(model.first(x.T[..., None]))).sum((0, 2))

    verify_against_autograd(model, GradientGram(model), time_first, [R, R], weights=[1.0] * B)
    with pytest.raises(GramCheckError):
        verify_against_autograd(model, GradientGram(model), time_first, [R, R])


@pytest.mark.parametrize("path", list(SUMS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_floor_is_of_the_sums_and_not_of_the_dtype(dtype, path):
    """The oracle: every row's gradient by a backward of its own, of one forward, in float64 products."""
    model, b = build("llama", True, dtype), batch(4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: p.grad for name, p in trainable(model).items()}
    floor = measured_floor(model, GradientGram(model), lambda: SUMS[path](model, b), [4])
    assert all(p.grad is before[name] for name, p in trainable(model).items()), ".grad is left alone"
    exact = whole({name: rows.double() for name, rows in oracle_rows(model, b, SUMS[path]).items()})
    found = measured(model, b, [4], None, SUMS[path]).matrix()
    norms = exact.diagonal().sqrt()
    error = float(((found - exact).abs() / torch.outer(norms, norms)).max())
    assert floor == pytest.approx(SAFETY * error, rel=0.2, abs=1e-6)
    assert error < {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1.25e-3}[dtype]


def test_a_gram_that_is_not_of_the_rows_is_named_with_both_numbers(monkeypatch):
    model, b = build("llama", True), batch(4)
    matrix = Measurement.matrix
    monkeypatch.setattr(Measurement, "matrix", lambda self: matrix(self) * 1.5)
    with pytest.raises(GramCheckError, match=r"K\[\d, \d\] = .* but separate backwards give"):
        measured_floor(model, GradientGram(model), lambda: SUMS["head"](model, b), [4])
