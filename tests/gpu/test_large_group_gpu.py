"""A group in parts on a CUDA device, its operands on the device, in part or wholly in host memory."""

import pytest
import torch

from grpo_sweeps.engine.gram import GradientGram
from tests.unit.engine.gram_oracle import SUMS, Batch, batch, build, measured, oracle_rows, relative, whole
from tests.unit.engine.test_large_group import WEIGHTS, in_parts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def on_gpu(b: Batch) -> Batch:
    return Batch(b.input_ids.cuda(), b.attention_mask.cuda(), b.completion_mask.cuda())


@pytest.mark.parametrize("device_bytes", [None, 0, 50_000])
@pytest.mark.parametrize("path", list(SUMS))
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_float64_equals_separate_backward_passes(tied, path, device_bytes):
    model, b = build("llama", tied).cuda(), on_gpu(batch(7))
    rows = oracle_rows(model, b)
    group = in_parts(GradientGram(model), b, SUMS[path], device_bytes=device_bytes)
    assert relative(group.matrix(), whole(rows).cpu()) < 1e-12
    assert group.check() < 1e-12
    for name, parameter in model.named_parameters():
        weighted = WEIGHTS.cuda() @ rows[name]
        assert (parameter.grad.flatten() - weighted).norm() < 1e-12 * (1 + rows[name].norm()), name


@pytest.mark.parametrize("path", list(SUMS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_training_dtypes_are_as_exact_as_at_once(dtype, path):
    model, b = build("llama", True, dtype).cuda(), on_gpu(batch(40))
    weights = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    at_once = measured(model, b, [40], weights, SUMS[path]).matrix()
    model.zero_grad()
    parts = [slice(start, start + 8) for start in range(0, 40, 8)]
    group = in_parts(GradientGram(model), b, SUMS[path], parts, weights, device_bytes=0)
    exact = whole(oracle_rows(build("llama", True).to(dtype).double().cuda(), b, SUMS[path])).cpu()
    assert relative(group.matrix(), exact) < 1.5 * relative(at_once, exact)
    group.check()
