"""feasibility: theory's figures, and random spectra as the oracle of both bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_sweeps.maths.feasibility import cell_range, effective_rank_hull, effective_rank_range, energy_in_two
from grpo_sweeps.spectra import effective_rank, top1_fraction


@pytest.mark.parametrize(
    ("R", "top1", "one", "averages"),
    [(2, (0.6, 0.7), (1.92, 1.98), 1.60), (4, (0.7, 0.8), (1.80, 3.19), 1.40), (8, (0.5, 0.6), (1.98, 6.65), 1.80)],
)
def test_cells_of_table_1(R, top1, one, averages):
    assert tuple(round(x, 2) for x in cell_range(*top1, R)) == one
    assert round(cell_range(*top1, R, averages=True)[0], 2) == averages


@given(st.integers(0, 2**32 - 1), st.integers(2, 8), st.floats(0.1, 8))
@settings(deadline=None, max_examples=60)
def test_random_spectra_lie_in_the_range_and_their_averages_in_the_hull(seed, R, power):
    s = np.random.default_rng(seed).random((200, R)) ** power
    f, rank = top1_fraction(s), effective_rank(s)
    for fraction, value in zip(f, rank, strict=True):
        low, high = effective_rank_range(min(fraction, 1.0), R)
        assert low - 1e-6 <= value <= high + 1e-6  # sqrt(1 - f) loses digits as f nears 1
    low, high = effective_rank_hull(float(f.mean()), R)
    assert low - 1e-6 <= rank.mean() <= high + 1e-6


@pytest.mark.parametrize("R", [2, 4, 8])
def test_bounds_are_reached(R):
    for f in np.linspace(1 / R, 1, 23):
        low, high = effective_rank_range(float(f), R)
        spread = np.sqrt([f, *[(1 - f) / (R - 1)] * (R - 1)])
        m = int(1 / f + 1e-9)
        packed = np.sqrt([f] * m + [max(0.0, 1 - m * f)])
        assert effective_rank(spread) == pytest.approx(high) and effective_rank(packed) == pytest.approx(low)


def test_energy_needed_in_two_values_against_a_search():
    rng = np.random.default_rng(0)
    rest = rng.dirichlet([0.1] * 7, 100_000) * 0.4
    keep = rest.max(axis=1) <= 0.6
    q = np.column_stack([np.full(keep.sum(), 0.6), rest[keep]])
    rank, two = np.sqrt(q).sum(axis=1) ** 2, 0.6 + q[:, 1:].max(axis=1)
    for bound in (2.25, 2.5):
        found = two[rank <= bound].min()
        assert energy_in_two(bound, 0.6) <= found + 1e-9
        assert found == pytest.approx(energy_in_two(bound, 0.6), abs=0.02)
    assert round(energy_in_two(2.25, 0.6), 2) == 0.99 and round(energy_in_two(2.5, 0.6), 3) == 0.956
    assert np.isnan(energy_in_two(1.5, 0.6))


def test_impossible_fractions_are_refused():
    with pytest.raises(ValueError, match="between 1/4 and 1"):
        effective_rank_range(0.2, 4)
    with pytest.raises(ValueError, match="between 1/2 and 1"):
        energy_in_two(2.0, 0.4)
