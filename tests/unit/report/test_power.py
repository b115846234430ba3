"""How many prompts an interval takes: against plain searches, drawn samples and the intervals of a report."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest

from grpo_sweeps.maths.intervals import mean_interval, t_quantile
from grpo_sweeps.report.claims.gradient import slope
from grpo_sweeps.report.design.best_size import best_sizes
from grpo_sweeps.report.design.power import Need, needs, power_section, power_table, spread_of, units_needed
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.report.tables.pooled import pooled, usable_groups
from grpo_sweeps.tracking.local import LocalRecord
from tests.unit.report.exact_runs import enumerations, write_exact


@pytest.mark.parametrize(("spread", "half_width"), [(0.5, 0.1), (1.0, 0.9), (0.3, 1.0), (2.0, 0.33)])
def test_the_least_number_by_a_plain_search(spread, half_width):
    n = 2
    while t_quantile(0.975, n - 1.0) * spread / math.sqrt(n) > half_width:
        n += 1
    assert units_needed(spread, half_width) == n


def test_bounds():
    assert units_needed(1.0, 1e-9) == math.inf and math.isnan(units_needed(math.nan, 0.1)) and units_needed(0, 1) == 2
    for width in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="a number above 0 is needed"):
            units_needed(1.0, width)


def test_so_many_prompts_give_that_width():
    """Prompts with one to five groups each that share something: the spread of a pilot tells the width of more."""
    rng = np.random.default_rng(0)

    def draw(prompts):
        sizes = rng.integers(1, 6, prompts)
        own = np.repeat(rng.normal(0, 0.5, prompts), sizes)
        return own + rng.normal(0, 0.4, len(own)), np.repeat(np.arange(prompts), sizes)

    P, spread = spread_of(*draw(300))
    assert P == 300
    n = int(units_needed(spread, 0.08))
    values, prompts = draw(n)
    found = mean_interval(values, prompts)
    assert (found.high - found.low) / 2 == pytest.approx(0.08, rel=0.15)


def test_the_spread_gives_back_the_reports_own_interval(tmp_path):
    write_exact(tmp_path, "s", enumerations(), 4, 60, 8)
    sweep = load_sweep("s", tmp_path)
    found = {need.quantity: need for need in needs(sweep, best_sizes(sweep))}
    assert set(found) == {"mean effective rank", "norm slope", "R*"} and found["R*"].unit == "steps"
    groups = usable_groups(sweep, "all", 4)
    for name, interval in (
        ("mean effective rank", pooled(groups, "effective_rank")), ("norm slope", slope(groups, 0.05))
    ):  # fmt: skip
        assert found[name].half_width == pytest.approx((interval.high - interval.low) / 2)
    low, high = best_sizes(sweep)[0].interval("best_R")
    assert found["R*"].half_width == pytest.approx((high - low) / 2, rel=0.05)
    table = power_table(list(found.values()))
    first = table[(table["quantity"] == "mean effective rank") & (table["half_width"] == 0.05)].iloc[0]
    assert first["needed"] == found["mean effective rank"].needs(0.05)
    assert first["groups"] == first["needed"] * 480 / 6 and first["rollouts"] == 4 * first["groups"]
    section = power_section(list(found.values()))
    assert [row[1] for row in section.rows] == list(found) and "±0.05: " in section.rows[0][-1]


def test_discarded_groups_were_sampled_too(write, tmp_path):
    """A step of 4 groups that threw 8 away drew 12: a prompt with a mixed group takes three times the groups."""
    found = []
    for name, discarded in (("plain", 0), ("resampled", 8)):
        folder = write(tmp_path, name, 4, 0)
        if discarded:
            with LocalRecord(folder) as record:
                for step in range(20):
                    record.log_metrics(step, {"resample/discarded_rollouts": 4.0 * discarded})
        sweep = load_sweep(name, tmp_path)
        found.append(needs(sweep, best_sizes(sweep))[0])
    plain, resampled = found
    assert resampled.groups == pytest.approx(3 * plain.groups) and resampled.spread == plain.spread


def test_nothing_measured_needs_nothing(write, tmp_path):
    write(
        tmp_path,
        "s",
        4,
        0,
        steps=2,
        config={"aggregation": "length"},
        change=lambda g: dataclasses.replace(g, gram=None),
    )
    sweep = load_sweep("s", tmp_path)
    assert needs(sweep, best_sizes(sweep)) == [] and power_table([]).empty
    assert spread_of(np.array([]), np.array([]))[0] == 0
    same = Need("all", 4, "R*", "steps", 10, 0.0, 4.0)
    assert power_section([same]).rows[0][5].startswith("–") and isinstance(power_table([same]), pd.DataFrame)
