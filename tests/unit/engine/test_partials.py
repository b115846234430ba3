"""Where products lie in a slot, what is reduced from partials, and which form the rule takes."""

import pytest
import torch

from grpo_sweeps.engine.gram.layout import MAX_ROWS, GramError, RowLayout, SlotPlan, plan_for, row_tiles
from grpo_sweeps.engine.gram.linear import FORMS, choose_form, prefer_ghost, why_not
from grpo_sweeps.engine.gram.measurement import Reduction
from grpo_sweeps.engine.gram.recorder import Record, Rows, Slots

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def layout_of(sizes, cross=False):
    generator = torch.Generator().manual_seed(0)
    return RowLayout.build(sizes, torch.randn(sum(sizes), generator=generator), cross, CPU)


def slots_as_a_kernel_would(rows_BN, layout, plan, programs=3):
    """Every launch's products, split at random over programs, and the norm in the last diagonal launch."""
    slots = torch.zeros(programs, plan.width, dtype=torch.float64)
    shares = torch.rand(programs, dtype=torch.float64)
    shares /= shares.sum()
    for launch in plan.launches:
        a = rows_BN[launch.a]
        if launch.b is None:
            size = len(a)
            upper = torch.triu_indices(size, size)
            values = (a @ a.T)[upper[0], upper[1]]
            norm = (layout.weights_B @ rows_BN).square().sum() if launch is plan.diagonal[-1] else torch.zeros(())
            values = torch.cat([values, norm.reshape(1)])
        else:
            values = (a @ rows_BN[launch.b].T).flatten()
        slots[:, launch.column : launch.column + len(values)] = shares[:, None] * values
    return slots


@pytest.mark.parametrize(
    ("sizes", "cross"),
    [([1], False), ([4, 3], False), ([16], False), ([17], False), ([8, 8, 5], True), ([40, 2], False)],
)
def test_slots_and_rows_give_the_flat_gram(sizes, cross):
    layout = layout_of(sizes, cross)
    plan = SlotPlan.of(layout)
    rows = torch.randn(layout.rows, 11, dtype=torch.float64)
    grams = [rows[unit] @ rows[unit].T for unit in layout.units]
    total = layout.weights_B @ rows
    expected = torch.cat([*(gram.flatten() for gram in grams), total.square().sum().reshape(1)])
    slots = Slots(slots_as_a_kernel_would(rows, layout, plan))
    found = Reduction([Record(expected), slots, Rows(rows, total), slots], [0, 1, 2, 3], layout, plan).read(4)
    assert found.shape == (4, sum(size * size for size in layout.unit_sizes) + 1)
    for row in found:
        assert torch.allclose(row, expected, rtol=1e-12, atol=1e-12)


def test_every_pair_of_a_unit_is_in_exactly_one_launch():
    for size in (1, 2, 15, 16, 17, 24, 31, 64):
        plan = plan_for((size,))
        pairs = []
        for launch in plan.launches:
            assert (launch.a.stop - launch.a.start) <= MAX_ROWS
            if launch.b is None:
                pairs += [(i, j) for i in range(launch.a.start, launch.a.stop) for j in range(i, launch.a.stop)]
            else:
                a, b = range(launch.a.start, launch.a.stop), range(launch.b.start, launch.b.stop)
                pairs += [(i, j) for i in a for j in b]
        assert sorted(pairs) == [(i, j) for i in range(size) for j in range(i, size)]
        assert sorted(row for tile in row_tiles(slice(0, size)) for row in range(tile.start, tile.stop)) == [
            *range(size)
        ]


def test_slots_are_not_given_out_twice():
    plan = SlotPlan.build([slice(0, 3)])
    given = [plan.slots(2, CPU) for _ in range(700)]
    assert len({slots.data_ptr() for slots in given}) == 700 and given[0].shape == (2, plan.width)


def test_the_norm_is_the_gradients_and_not_the_grams():
    layout = layout_of([3])
    rows = torch.randn(3, 5, dtype=torch.float64)
    found = Reduction([Rows(0 * rows, layout.weights_B @ rows)], [0], layout, SlotPlan.of(layout)).read(1)[0]
    assert not found[:-1].any() and found[-1] > 0


def test_the_rule_on_a_cpu_and_what_cannot_be_had_there():
    assert choose_form("auto", 4, 512, 512, 8, torch.float32, CPU) == "ghost"
    assert choose_form("auto", 4, 512, 512, 8, torch.float32, CPU, whole=False) == "blocks"
    assert choose_form("auto", 256, 512, 512, 8, torch.float32, CPU) == "blocks"
    assert choose_form("ghost", 256, 512, 512, 8, torch.float32, CPU) == "ghost"
    for form in ("onepass", "fused"):
        with pytest.raises(GramError, match=f"form={form}: {form} needs CUDA, not cpu"):
            choose_form(form, 256, 512, 512, 8, torch.float32, CPU)


def test_why_a_form_cannot_be_had():
    assert all(why_not(form, 8, 8, 99, torch.float64, CPU) == "" for form in ("blocks", "ghost"))
    assert why_not("onepass", 8, 8, 4, torch.float64, CUDA) == "onepass does not know torch.float64"
    assert why_not("fused", 8, 8, 4, torch.float32, CUDA) == "fused needs a half type, not torch.float32"
    assert why_not("fused", 8, 8, 9, torch.bfloat16, CUDA) == "fused takes up to 8 rows per group, not 9"
    assert why_not("fused", 12, 8, 8, torch.bfloat16, CUDA).startswith("fused needs widths that are multiples of 8")
    assert FORMS == ("auto", "blocks", "onepass", "fused", "ghost")


def test_ghost_is_bounded_by_the_memory_of_its_pairs():
    assert prefer_ghost("fused", 2, 4096, 4096, 8, torch.bfloat16)
    assert not prefer_ghost("fused", 600, 2**20, 2**20, 8, torch.bfloat16)
