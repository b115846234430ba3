"""The Gram on a CUDA device: exact in float64, that of its own rows in the dtypes that train, and no block larger than
allowed."""

import pytest
import torch

from grpo_sweeps.engine.gram import GradientGram, GramError, measured_floor, verify_against_autograd
from grpo_sweeps.engine.gram.layout import RowLayout, unit_inner, weighted_sum, wide_mm
from grpo_sweeps.engine.gram.verify import SAFETY
from tests.unit.engine.gram_oracle import SUMS, Batch, batch, build, measured, oracle_rows, plain_sums, relative, whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
WEIGHTS = torch.tensor([0.5, -1.0, 0.0, 2.0, -0.25], dtype=torch.float64)


def on_gpu(b: Batch) -> Batch:
    return Batch(b.input_ids.cuda(), b.attention_mask.cuda(), b.completion_mask.cuda())


@pytest.mark.parametrize("path", list(SUMS))
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "nemotron"])
def test_float64_equals_separate_backward_passes(name, tied, path):
    model, b = build(name, tied).cuda(), on_gpu(batch(5))
    rows = oracle_rows(model, b)
    for group_sizes, cross_groups in (([5], False), ([2, 3], True)):
        m = measured(model, b, group_sizes, WEIGHTS, SUMS[path], cross_groups)
        assert relative(m.matrix(), whole(rows).cpu()) < 1e-12
        assert m.check() < 1e-12


@pytest.mark.parametrize("form", ["blocks", "ghost", "onepass", "auto"])
@pytest.mark.parametrize("path", list(SUMS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_training_dtypes_give_the_gram_of_their_own_rows(dtype, path, form):
    """Beside separate backwards of one forward in the same dtype: what K's own sums leave."""
    b, model = on_gpu(batch(5)), build("llama", True, dtype).cuda()
    m = measured(model, b, [5], WEIGHTS, SUMS[path], form=form)
    rows = {name: grads.double() for name, grads in oracle_rows(model, b, SUMS[path]).items()}
    assert relative(m.matrix(), whole(rows).cpu()) < m.floor
    assert m.check() < m.floor
    gram = GradientGram(model, form=form)
    assert measured_floor(model, gram, lambda: SUMS[path](model, b), [5]) < SAFETY * m.floor
    verify_against_autograd(model, gram, lambda: SUMS[path](model, b), [5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_are_float32_and_weights_are_not_rounded(dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(8, 64, 512, device="cuda", generator=generator).to(dtype)
    exact = rows.double().flatten(1) @ rows.double().flatten(1).T
    assert relative(unit_inner(rows, rows), exact) < 1e-5
    assert relative(wide_mm(rows[0], rows[0].T).double(), rows[0].double() @ rows[0].double().T) < 1e-5
    weights = torch.randn(8, device="cuda", generator=generator)
    total = weighted_sum(weights, rows.flatten(1))
    assert total.dtype == torch.float32
    assert relative(total.double(), weights.double() @ rows.double().flatten(1)) < 2e-5


def test_tf32_is_refused():
    model = build("llama", True, torch.float32).cuda()
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with pytest.raises(GramError, match="TF32"), GradientGram(model).measure([5]):
            raise AssertionError("must not be entered")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_a_weight_on_another_device_is_named():
    model = build("llama", False)
    model.lm_head.cuda()
    with pytest.raises(GramError, match=r"lm_head\.weight is on cuda"):
        GradientGram(model)


def test_memory_of_a_block_is_bounded():
    """A layer of 32 MB with 16 rows: whole, the rows' gradients would take 512 MB; a block may take 8."""
    linear = torch.nn.Linear(4096, 2048, bias=False).cuda()
    x = torch.randn(16, 32, 4096, device="cuda")
    gram = GradientGram(linear, form="blocks", block_bytes=8 * 2**20)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with gram.measure([16]) as m:
        linear(x).square().sum((1, 2)).sum().backward()
    assert m.check() < 1e-5
    assert torch.cuda.max_memory_allocated() - before < 96 * 2**20


def test_layout_lives_on_the_device():
    layout = RowLayout.build([2, 3], WEIGHTS, False, torch.device("cuda"))
    assert layout.weights_B.is_cuda
    model, b = build("llama", True).cuda(), on_gpu(batch(5))
    assert all(not gram.is_cuda for gram in measured(model, b, [5], WEIGHTS, plain_sums).matrices())
