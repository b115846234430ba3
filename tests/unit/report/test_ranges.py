"""No interval of a report holds what its quantity cannot take: two seeds that differ, all tables and claims."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from grpo_sweeps.maths.intervals import SHARE
from grpo_sweeps.publish.formats import with_interval_of
from grpo_sweeps.report.claims.verdicts import judge_claims
from grpo_sweeps.report.measure.spectral import range_of, range_of_difference
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.report.remarks import missing
from grpo_sweeps.report.tables import pooled as table
from grpo_sweeps.report.tables.estimators import estimator_table
from grpo_sweeps.report.tables.logged import VALUES, curve_table

OF_TABLE1 = {
    "accuracy": SHARE, "accuracy_greedy": SHARE, "accuracy_gain": table.CHANGE, "accuracy_greedy_gain": table.CHANGE
}  # fmt: skip


@pytest.fixture(scope="module")
def sweep(write, tmp_path_factory):
    """Two seeds, one of effective rank about 2, one of R, and of other gains. To be read only."""
    folder = tmp_path_factory.mktemp("ranges")
    for R in (2, 4, 8):
        for seed, kind in enumerate(("paper", "full")):
            write(folder, "two", R, seed, kind, steps=12, gain=0.6 - 0.9 * seed)
    return load_sweep("two", folder)


def ends_of(frame: pd.DataFrame) -> list[str]:
    names = [name.removesuffix("_low") for name in frame if name.endswith("_low")]
    return [name for name in names if {name, f"{name}_high"} <= set(frame)]


def assert_inside(frame: pd.DataFrame, name: str, low: float, high: float) -> None:
    found = frame[[name, f"{name}_low", f"{name}_high"]].astype(float).dropna().to_numpy()
    assert (low - 1e-9 <= found).all() and (found <= high + 1e-9).all(), (name, found)


@pytest.mark.parametrize("R", [2, 4, 8])
def test_every_interval_of_a_table_is_one_of_values_that_can_be(sweep, R):
    for frame in (table.table1(sweep), table.by_k(sweep), estimator_table(sweep)):
        part = frame[frame["R"] == R]
        for name in ends_of(frame):
            if name == "measured_minus_null":
                assert_inside(part, name, *range_of_difference("effective_rank", R))
            elif name == "measured_minus_null_both":
                assert_inside(part, name, 1.0 - R, 0.0)
            elif name == "cosine":
                assert_inside(part, name, -1.0, 1.0)
            else:
                assert_inside(part, name, *OF_TABLE1.get(name, range_of(name, R)))
    ranks = table.ranks(sweep)
    for row in ranks[ranks["R"] == R].to_dict("records"):
        centred = "centred_" if "centred" in row["matrix"] else ""
        low, high = range_of(f"{centred}{row['quantity']}", R)
        assert low - 1e-9 <= row["low"] and row["high"] <= high + 1e-9, row


def test_the_difference_of_two_seeds_fills_the_range_and_no_more(sweep):
    """Two seeds that differ say nothing: the interval is all that an effective rank can be."""
    (c8,) = (claim for claim in judge_claims(sweep) if claim.id == "C8")
    found = {f.R: f for f in c8.findings}
    assert (found[4].interval.low, found[4].interval.high) == (1.0, 4.0)
    assert found[8].measured == f"effective rank {with_interval_of(found[8].interval)}"
    assert found[8].measured.endswith("[1.00, 8.00]")


def test_no_claim_prints_an_effective_rank_that_cannot_be(sweep):
    for claim in judge_claims(sweep):
        for f in claim.findings:
            for low, high in re.findall(r"effective rank [\d.]+ \[(-?[\d.]+), (-?[\d.]+)\]", f.measured):
                assert 1.0 <= float(low) <= float(high) <= max(8, 4 * f.R), (claim.id, f.measured)
            for low, high in re.findall(r"(?:top-1|accuracy|rollouts) [\d.]+ \[(-?[\d.]+), (-?[\d.]+)\]", f.measured):
                assert -1.0 <= float(low) <= float(high) <= 1.0, (claim.id, f.measured)


def test_means_over_two_runs_have_no_interval_and_the_page_says_why(sweep):
    curves = curve_table(sweep)
    assert (curves["runs"] == 2).all()
    assert not np.isfinite(curves[[f"{name}_low" for name in VALUES]].astype(float)).any(axis=None)
    assert [line for line in missing(sweep) if line.startswith("Two seeds: a mean over runs has no interval")]
    (c6,) = (claim for claim in judge_claims(sweep) if claim.id == "C6")
    assert all("(no interval from fewer than 3 seeds)" in f.measured for f in c6.findings)
