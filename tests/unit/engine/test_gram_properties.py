"""Checks 4, 5: finite differences and the invariances that must hold; random shapes of the linear forms."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_sweeps.engine.gram.layout import RowLayout, SlotPlan, squared_norm
from grpo_sweeps.engine.gram.linear import WeightSums, ghost_gram, prefer_ghost
from grpo_sweeps.engine.gram.measurement import Reduction
from grpo_sweeps.engine.gram.recorder import Workspace
from tests.unit.engine.gram_oracle import VOCABULARY, build, head_sums, measured, pad, plain_sums, relative, trainable

TOL = 1e-11


def sequences(rows, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [(1 + row % 3, torch.randint(1, VOCABULARY, (4 + row,), generator=generator)) for row in range(rows)]


# transformers' RMS norms work in float32 whatever the model's dtype, so Llama's differences need a longer step.
@pytest.mark.parametrize("name, step, tol", [("llama", 3e-4, 1e-3), ("nemotron", 1e-5, 1e-6), ("gpt2", 1e-5, 1e-6)])
def test_finite_differences(name, step, tol):
    """sum_i w_i psi_i by central differences along a random direction, and its squared norm by the Gram."""
    model, b = build(name, True), pad(sequences(3), "left")
    w = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
    m = measured(model, b, [3], w, head_sums)
    generator = torch.Generator().manual_seed(0)
    direction = {n: torch.randn(p.shape, dtype=torch.float64, generator=generator) for n, p in trainable(model).items()}
    slope = sum(float((p.grad * direction[n]).sum()) for n, p in trainable(model).items())
    values = []
    with torch.no_grad():
        for sign in (1, -2):
            for n, p in trainable(model).items():
                p.add_(sign * step * direction[n])
            values.append(float(w @ plain_sums(model, b)))
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=tol)
    squares = sum(float(p.grad.square().sum()) for p in trainable(model).values())
    assert float(w @ m.matrix() @ w) == pytest.approx(squares, rel=1e-11)


@pytest.mark.parametrize("sums", [plain_sums, head_sums])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_amount_and_side_of_padding_change_nothing(padding, sums):
    model = build("llama", True)
    reference = measured(model, pad(sequences(4), "left"), [4], None, sums).matrix()
    for extra in (0, 5):
        assert relative(measured(model, pad(sequences(4), padding, extra), [4], None, sums).matrix(), reference) < TOL


def test_row_order_permutes_the_gram():
    model, rows = build("qwen2", True), sequences(4)
    order = [2, 0, 3, 1]
    reference = measured(model, pad(rows, "left"), [4]).matrix()
    permuted = measured(model, pad([rows[i] for i in order], "left"), [4]).matrix()
    assert relative(permuted, reference[order][:, order]) < TOL


def test_duplicated_rows_have_equal_gradients():
    model, rows = build("llama", False), sequences(2)
    gram = measured(model, pad([*rows, rows[0]], "left"), [3], None, head_sums).matrix()
    assert relative(gram[2], gram[0]) < TOL
    assert relative(gram[:, 2], gram[:, 0]) < TOL


def test_scaling_a_row_scales_its_row_and_column():
    model, b = build("llama", True), pad(sequences(3), "left")
    scale = torch.tensor([1.0, -4.0, 0.5], dtype=torch.float64)
    reference = measured(model, b, [3]).matrix()
    scaled = measured(model, b, [3], None, lambda model, b: plain_sums(model, b) * scale).matrix()
    assert relative(scaled, scale[:, None] * reference * scale) < TOL


def test_weights_change_the_gradient_and_not_the_gram():
    model, b = build("llama", True), pad(sequences(3), "left")
    zero = measured(model, b, [3], torch.zeros(3))
    one = measured(model, b, [3])
    assert torch.equal(zero.matrix(), one.matrix())
    assert zero.grad_sq_norm == 0 and zero.check() == 0
    measured(model, b, [3], torch.zeros(3))
    assert not any(p.grad.any() for p in trainable(model).values())


def test_one_batch_equals_its_halves():
    model, rows = build("llama", True), sequences(4)
    together = measured(model, pad(rows, "left"), [2, 2], cross_groups=False).matrices()
    for half, gram in enumerate(together):
        apart = measured(model, pad(rows[2 * half : 2 * half + 2], "left"), [2]).matrices()[0]
        assert relative(apart, gram) < TOL


@settings(max_examples=40, deadline=None)
@given(
    groups=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    T=st.integers(1, 6),
    o=st.integers(1, 7),
    i=st.integers(1, 7),
    block_bytes=st.integers(1, 2000),
    cross=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_linear_forms_agree_with_the_rows_themselves(groups, T, o, i, block_bytes, cross, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    B = sum(groups)
    y, x, w = draw(B, T, o), draw(B, T, i), draw(B)
    layout = RowLayout.build(groups, w, cross, torch.device("cpu"))
    rows = torch.einsum("bto,bti->boi", y, x)
    total = torch.einsum("b,boi->oi", w, rows)
    expected = layout.flat([torch.einsum("roi,soi->rs", rows[unit], rows[unit]) for unit in layout.units])
    plan = SlotPlan.of(layout)
    for form in ("blocks", "ghost"):
        sums = WeightSums(layout, plan, torch.empty(o, i, dtype=torch.float64), form, block_bytes, Workspace())
        sums.add(y, x)
        record = Reduction([sums.partial()], [0], layout, plan).read(1)[0]
        assert torch.allclose(record[:-1], expected, rtol=1e-11, atol=1e-11)
        assert torch.allclose(sums.grad, total, rtol=1e-11, atol=1e-11)
        assert torch.allclose(record[-1], squared_norm(total), rtol=1e-11, atol=1e-11)


def test_ghost_gram_by_hand():
    y = torch.tensor([[[1.0], [2.0]], [[3.0], [0.0]]], dtype=torch.float64)  # (2, 2, 1)
    x = torch.tensor([[[1.0], [1.0]], [[2.0], [5.0]]], dtype=torch.float64)
    assert torch.equal(ghost_gram(y, x), torch.tensor([[9.0, 18.0], [18.0, 36.0]], dtype=torch.float64))


def test_cost_rule_takes_the_ghost_for_short_rows_of_bounded_memory_only():
    f32 = torch.float32
    assert prefer_ghost("blocks", 8, 1024, 1024, 8, f32)
    assert not prefer_ghost("blocks", 128, 1024, 1024, 8, f32)
    assert not prefer_ghost("blocks", 8, 1024, 1024, 2**12, f32), "pairs of rows would take more than the bound"
