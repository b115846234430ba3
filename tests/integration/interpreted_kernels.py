"""Triton's interpreter on a CPU, against the reference: run by test_kernels.py, with TRITON_INTERPRET=1 set before
Triton is imported."""

from __future__ import annotations

import sys

import torch

from grpo_sweeps.engine.gram.kernels import norm_rows, onepass
from grpo_sweeps.engine.gram.layout import RowLayout, SlotPlan
from grpo_sweeps.engine.gram.linear import WeightSums
from grpo_sweeps.engine.gram.measurement import Reduction
from grpo_sweeps.engine.gram.recorder import Record, Slots, Workspace
from grpo_sweeps.engine.samplers import attention, draw, kernels
from grpo_sweeps.engine.samplers.kernels import decode_attention, draw_tokens

CPU = torch.device("cpu")


def one_pass(sizes: list[int], cross: bool, T: int, o: int, i: int, blocks: list[slice], dtype: torch.dtype) -> float:
    """Largest relative difference of Gram, gradient and norm from the reference's, over several blocks."""
    torch.manual_seed(0)
    rows = sum(sizes)
    layout = RowLayout.build(sizes, torch.randn(rows), cross, CPU)
    plan = SlotPlan.of(layout)
    y, x = torch.randn(rows, T, o).to(dtype), torch.randn(rows, T, i).to(dtype)
    weight = torch.empty(o, i, dtype=dtype)
    reference = WeightSums(layout, plan, weight, "blocks", 2**20, Workspace())
    reference.add(y, x)
    slots = torch.full((3, plan.width), torch.nan, dtype=torch.float64)
    grad = torch.full_like(weight, torch.nan)
    for index, block in enumerate(blocks):
        product = torch.bmm(y.transpose(1, 2)[:, block], x)
        total = torch.full((product[0].numel(),), torch.nan)
        onepass.add_block(product, layout.weights(torch.float32), grad[block], total, slots, plan, first=index == 0)
    found, expected = (
        Reduction([Slots(slots)], [0], layout, plan).read(1),
        Reduction([reference.partial()], [0], layout, plan).read(1),
    )
    assert isinstance(reference.partial(), Record)
    grams = float((found - expected).abs().max() / expected.abs().max())
    return max(grams, float((grad.float() - reference.grad.float()).abs().max() / reference.grad.float().abs().max()))


def norm(centred: bool, T: int, H: int, dtype: torch.dtype, bias: bool = False) -> float:
    torch.manual_seed(0)
    x, gy = torch.randn(3, T, H).to(dtype), torch.randn(3, T, H).to(dtype)
    found = norm_rows.add_rows(x, gy, 1e-5, centred, bias)
    wide = x.double()
    normal = torch.nn.functional.layer_norm if centred else torch.nn.functional.rms_norm
    arguments = (None, None, 1e-5) if centred else (None, 1e-5)
    expected = (normal(wide, (H,), *arguments) * gy.double()).sum(1)
    if bias:
        expected = torch.stack([expected, gy.double().sum(1)], dim=1)
    return float((found.double() - expected).abs().max() / expected.abs().max())


def attends(
    heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, window: int | None, softcap: float | None
) -> float:
    """Largest difference of the decode attention, and of what it stores, from torch's own operators in float64."""
    torch.manual_seed(0)
    (H, K), (D, E), B, T, S = heads, dims, 5, 100, 7
    given = torch.randn(B, H, D), torch.randn(B, K, D), torch.randn(B, K, E)
    query, key, value = (x.to(dtype) for x in given)
    ours = [torch.randn(S, K, T, D).to(dtype), torch.randn(S, K, T, E).to(dtype)]
    plain = [x.double() for x in ours]
    rest = torch.tensor([6, 0, 3, 2, 5]), torch.tensor([0, 1, 40, 63, 99]), D**-0.5, window, softcap
    found = decode_attention.decode_attention(query, key, value, *ours, *rest)
    expected = attention.plain(query.double(), key.double(), value.double(), *plain, *rest)
    stored = max(float((a.double() - b).abs().max()) for a, b in zip(ours, plain, strict=True))
    return float((found.double() - expected).abs().max()) + stored


def draws(V: int, temperature: float) -> float:
    """1 for another token than torch's own operators draw, else the largest difference of log-probabilities."""
    generator = torch.Generator().manual_seed(0)
    logits_BV = torch.randn(6, V, generator=generator) * 3
    logits_BV[0, : V - 1] = -torch.inf  # the last word alone; and no word of a whole block
    logits_BV[1, 5:] = -torch.inf
    uniforms_B1 = torch.rand(6, 1, dtype=torch.float64, generator=generator)
    uniforms_B1[2], uniforms_B1[3] = 0.0, 1 - 1e-16
    tokens_B, logprobs_B = draw_tokens.draw_tokens(logits_BV, uniforms_B1, temperature)
    plain_B, plain_logprobs_B = draw.plain(logits_BV, uniforms_B1, temperature)
    return 1.0 if (tokens_B != plain_B).any() else float((logprobs_B - plain_logprobs_B).abs().max())


def main() -> int:
    f32, bf16 = torch.float32, torch.bfloat16
    halves = [slice(0, 5), slice(5, 12)]
    cases = {
        "one group": one_pass([8], False, 5, 12, 7, [slice(0, 12)], f32),
        "one row": one_pass([1], False, 5, 12, 7, [slice(0, 12)], f32),
        "two groups, two blocks": one_pass([4, 3], False, 5, 12, 7, halves, f32),
        "cross-group, tiles": one_pass([9, 11], True, 3, 12, 5, halves, f32),
        "sixteen rows": one_pass([16], False, 3, 6, 5, [slice(0, 6)], f32),
        "layer norm": norm(True, 70, 24, f32),
        "rms norm": norm(False, 3, 33, f32),
        "layer norm with its bias": norm(True, 40, 48, f32, bias=True),
        # a half gradient may round to its neighbour: the two add up their rows in different orders
        "half types": one_pass([5], False, 9, 12, 16, halves, bf16) / 1e3,
        "layer norm of half types": norm(True, 9, 32, bf16),
        "attention of one token": attends((4, 4), (64, 64), f32, None, None),
        "attention, grouped heads": attends((14, 2), (24, 40), f32, None, None),
        "attention, a window and a softcap": attends((6, 2), (16, 16), f32, 30, 0.7),
        # not bfloat16, whose products this interpreter takes as those of whole numbers; the tests on a card have it
        "attention of half types": attends((6, 2), (32, 32), torch.float16, None, None) / 1e3,
        "the trial of both": float(bool(kernels.fault(CPU, f32))),
        "draw of few words": draws(97, 1.0),
        "draw over two blocks": draws(5000, 0.7),
    }
    for name, miss in cases.items():
        print(f"{name}: {miss:.1e}")
    return 0 if all(miss < 1e-5 for miss in cases.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
