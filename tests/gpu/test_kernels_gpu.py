"""Every form of one weight's sums against float64, over shapes, groups, partly empty tiles and dtypes."""

from __future__ import annotations

import pytest
import torch

from grpo_sweeps.engine.gram.layout import RowLayout, SlotPlan
from grpo_sweeps.engine.gram.linear import WeightSums, kernels, why_not
from grpo_sweeps.engine.gram.measurement import Reduction
from grpo_sweeps.engine.gram.recorder import Workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# groups, cross-group products, T, o, i: odd sizes leave tiles, stages and programs partly empty
CASES = {
    "one_group_of_8": ([8], False, 64, 256, 384),
    "short_tail": ([8], False, 37, 136, 72),
    "one_token": ([4], False, 1, 128, 128),
    "many_tiles": ([8], False, 96, 2056, 1288),
    "one_row": ([1], False, 33, 64, 200),
    "two_rows": ([2], False, 511, 640, 384),
    "unequal_groups": ([3, 5, 8], False, 50, 264, 136),
    "seven": ([7], False, 40, 128, 256),
    "sixteen": ([16], False, 40, 128, 256),
    "cross_groups": ([4, 4], True, 40, 128, 256),
    "cross_groups_in_tiles": ([8, 8, 5], True, 40, 128, 264),
    "thirty_two": ([32], False, 24, 128, 264),
}


def sums_of(form, layout, y, x, block_bytes, blocks):
    plan = SlotPlan.of(layout)
    weight = torch.empty(y.shape[2], x.shape[2], dtype=y.dtype, device="cuda")
    sums = WeightSums(layout, plan, weight, form, block_bytes, Workspace())
    for low, high in blocks:
        sums.add(y[:, :, low:high], x, low)
    record = Reduction([sums.partial()], [0], layout, plan).read(1)[0]
    return record[:-1], record[-1], sums.grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["onepass", "fused", "blocks"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_form_gives_the_rows_own_products(form, case, dtype, pieces):
    groups, cross, T, o, i = CASES[case]
    dtype, device = DTYPES[dtype], torch.device("cuda")
    layout = RowLayout.build(groups, torch.randn(sum(groups)), cross, device)
    reason = why_not(form, o, i, max(layout.unit_sizes), dtype, device)
    if reason:
        pytest.skip(reason)
    torch.manual_seed(0)
    y, x = (
        torch.randn(layout.rows, T, o, device=device).to(dtype),
        torch.randn(layout.rows, T, i, device=device).to(dtype),
    )
    cut = o // 2 // 8 * 8
    blocks = [(0, o)] if pieces == 1 else [(0, cut), (cut, o)]
    gram, sq_norm, grad = sums_of(form, layout, y, x, 2**17, blocks)
    rows = torch.einsum("bto,bti->boi", y.double(), x.double())
    expected = layout.flat([torch.einsum("roi,soi->rs", rows[u], rows[u]) for u in layout.units]).cpu()
    total = torch.einsum("b,boi->oi", layout.weights_B, rows)
    # a row's gradient is rounded to the dtype once, element by element: the errors of its products average out
    eps = torch.finfo(dtype).eps
    scale = float(expected.abs().max())
    tol = 3 * eps / (o * i) ** 0.5 * 8 + 3e-6
    assert float((gram - expected).abs().max()) / scale < tol
    assert float((grad.double() - total).norm() / total.norm()) < 2 * eps + 1e-6
    assert (
        abs(float(sq_norm) / float(total.square().sum()) - 1)
        < 4 * eps / (o * i) ** 0.5 * 8 + 1e-4 * (eps > 1e-5) + 3e-6
    )


@pytest.mark.parametrize("form", ["onepass", "fused"])
def test_a_kernel_gives_the_same_bits_twice(form):
    layout = RowLayout.build([8], torch.randn(8), False, torch.device("cuda"))
    y, x = torch.randn(8, 200, 1024, device="cuda").bfloat16(), torch.randn(8, 200, 768, device="cuda").bfloat16()
    if why_not(form, 1024, 768, 8, torch.bfloat16, torch.device("cuda")):
        pytest.skip("not on this card")
    first, second = (sums_of(form, layout, y, x, 2**22, [(0, 1024)]) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[2], second[2])


@pytest.mark.parametrize("form", ["onepass", "fused"])
def test_inputs_that_do_not_lie_in_order(form):
    """Views with other strides and an odd start, as transposed weights and sliced activations bring them."""
    layout = RowLayout.build([4], torch.randn(4), False, torch.device("cuda"))
    wide = torch.randn(4, 51, 264, device="cuda").bfloat16()
    y, x = wide[:, 1:, 3:131], wide.transpose(0, 1).contiguous().transpose(0, 1)[:, 1:, 8:136]
    if why_not(form, 128, 128, 4, torch.bfloat16, torch.device("cuda")):
        pytest.skip("not on this card")
    found, expected = sums_of(form, layout, y, x, 2**22, [(0, 128)]), sums_of("blocks", layout, y, x, 2**22, [(0, 128)])
    assert torch.allclose(found[0], expected[0], rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("T", "H", "centred"), [(70, 64, True), (1, 3072, True), (300, 896, False), (33, 100, False)])
def test_norm_rows_against_float64(dtype, T, H, centred, bias):
    norm_rows = pytest.importorskip("grpo_sweeps.engine.gram.kernels.norm_rows", reason="needs Triton")
    torch.manual_seed(0)
    x = torch.randn(5, T, H, device="cuda").to(DTYPES[dtype])
    gy = torch.randn(5, T, H, device="cuda").to(DTYPES[dtype])
    found = norm_rows.add_rows(x, gy, 1e-5, centred, bias).double()
    normal = torch.nn.functional.layer_norm if centred else torch.nn.functional.rms_norm
    arguments = (None, None, 1e-5) if centred else (None, 1e-5)
    expected = (normal(x.double(), (H,), *arguments) * gy.double()).sum(1)
    if bias:
        expected = torch.stack([expected, gy.double().sum(1)], dim=1)
    assert float((found - expected).abs().max() / expected.abs().max()) < 2e-6


@pytest.mark.parametrize("units", [(28,), (8, 8), (12, 12)])
def test_variants_that_were_begun_are_those_that_are_launched(units):
    """Each launch finds its variant in Triton's store: none is compiled a second time, in the middle of a step. (Groups
    whose weights begin off 16 bytes, as the second of 6 rows, take another variant, which nobody begins.)"""
    onepass, device, dtype = kernels("onepass"), torch.device("cuda"), torch.bfloat16
    layout = RowLayout.build(units, torch.randn(sum(units)), False, device)
    plan = SlotPlan.of(layout)
    onepass.begin(plan, dtype, device)
    for thread in list(onepass._compiling.values()):
        thread.join()
    stores = [launcher.kernel.device_caches[0][0] for launcher in (onepass.launch_gram, onepass.launch_cross)]
    before = [len(store) for store in stores]
    y, x = (torch.randn(layout.rows, 24, n, device=device).to(dtype) for n in (128, 256))
    weight = torch.empty(128, 256, dtype=dtype, device=device)
    sums = WeightSums(layout, plan, weight, "onepass", 2**16, Workspace())
    for low in (0, 64):
        sums.add(y[:, :, low : low + 64], x, low)
    sums.partial()
    torch.cuda.synchronize()
    assert [len(store) for store in stores] == before
    assert not onepass._compiling
