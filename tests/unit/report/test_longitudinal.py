"""The change of the mean rank over training, taken apart: what k does and what the scores do."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from grpo_sweeps.publish.drawing import render
from grpo_sweeps.report.claims import training
from grpo_sweeps.report.claims.training import change, parts_of_change, q3, tables, third_of
from grpo_sweeps.report.figures.rank_change import longitudinal_figure, rank_by_window
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.spectra import null_effective_rank


def made(shares0, shares1, rank, prompts=30, per=60, R=4, seed=0):
    """Groups of two thirds of training: `shares` of k = 1, 2, 3 and rank(k, third)."""
    rng = np.random.default_rng(seed)
    rows = []
    for third, shares in ((0, shares0), (1, shares0), (2, shares1)):
        for i in range(per):
            k = int(rng.choice([1, 2, 3], p=shares))
            rows.append((third * per + i, f"p{rng.integers(prompts)}", float(k), rank(k, third)))
    return pd.DataFrame(rows, columns=["step", "prompt_id", "k", "effective_rank"])


def null(k, third):
    return float(null_effective_rank(k, 4))


def whole(groups):
    counts, sums = tables(groups.assign(third=third_of(groups)))
    return change(counts.sum(axis=0), sums.sum(axis=0))


def test_parts_add_up_exactly():
    rng = np.random.default_rng(1)
    groups = made([0.2, 0.5, 0.3], [0.6, 0.2, 0.2], lambda k, third: float(rng.uniform(1, 4)))
    found = whole(groups)
    assert found is not None
    assert found.composition + found.geometry == pytest.approx(found.total, rel=1e-12) and found.matched == 1


def test_a_rank_that_k_alone_moves_is_composition():
    groups = made([0.1, 0.8, 0.1], [0.5, 0.0, 0.5], null)
    groups.loc[groups.index[-1], ["k", "effective_rank"]] = [2.0, 4.0]  # so that both thirds have every k
    found = whole(groups)
    assert found is not None
    assert found.total < -0.5 and found.geometry == pytest.approx(0, abs=1e-12)


def test_a_rank_that_falls_at_every_k_is_geometry():
    groups = made([0.2, 0.6, 0.2], [0.2, 0.6, 0.2], lambda k, third: null(k, third) - 0.25 * third)
    claim = q3("arm", {4: groups})
    (finding,) = claim.findings
    assert finding.interval.low <= -0.5 <= finding.interval.high and finding.interval.high < -0.45
    assert "geometry -0.5" in finding.measured and "100% of groups matched" in finding.measured


def test_what_only_one_third_has_is_left_out_and_said():
    groups = made([0.0, 1.0, 0.0], [0.5, 0.5, 0.0], null)
    found = whole(groups)
    assert found is not None and found.total == 0 and 0.5 < found.matched < 1
    none = made([1.0, 0.0, 0.0], [0.0, 0.0, 1.0], null)
    assert whole(none) is None
    assert q3("arm", {4: none}).findings[0].measured == "nothing measured"


def test_few_prompts_say_nothing():
    groups = made([0.2, 0.6, 0.2], [0.2, 0.6, 0.2], null, prompts=training.MIN_PROMPTS - 1)
    assert q3("arm", {4: groups}).findings[0].measured == "nothing measured"


def test_a_window_s_rank_at_fixed_k_against_the_definition():
    rng = np.random.default_rng(2)
    groups = made([0.2, 0.5, 0.3], [0.6, 0.2, 0.2], lambda k, third: float(rng.uniform(1, 4))).assign(seed=0, R=4)
    curve = rank_by_window(groups, windows=3)
    early = groups[groups["step"] < 60]
    shares = {k: (early["k"] == k).mean() for k in (1, 2, 3)}
    for i, row in curve.iterrows():
        part = groups[groups["step"] // 60 == i]
        assert (row["step"], row["mean"]) == pytest.approx((part["step"].mean(), part["effective_rank"].mean()))
        fixed = sum(shares[k] * part.loc[part["k"] == k, "effective_rank"].mean() for k in shares)
        assert row["fixed"] == pytest.approx(fixed)
    assert curve["fixed"][0] == pytest.approx(curve["mean"][0])


def test_what_k_alone_moves_stays_where_k_is_held():
    groups = made([0.1, 0.8, 0.1], [0.4, 0.2, 0.4], null).assign(seed=0, R=4)
    curve = rank_by_window(groups, windows=3)
    assert curve["mean"][2] < curve["mean"][0] - 0.4
    assert curve["fixed"].to_numpy() == pytest.approx(curve["mean"][0])


def test_a_window_without_a_k_that_was_common_has_no_value_at_fixed_k():
    curve = rank_by_window(made([0.3, 0.7, 0.0], [0.0, 1.0, 0.0], null).assign(seed=0, R=4), windows=3)
    assert curve["fixed"][:2].notna().all() and np.isnan(curve["fixed"][2])


def test_the_figure_has_its_curves_and_bars_and_says_them(full_sweep):
    sweep = load_sweep("full", full_sweep)
    (plot,) = longitudinal_figure(sweep)
    lines, bars = plot.panels
    assert lines.alt.count("k held fixed") == 3
    groups = sweep.groups[(sweep.groups["R"] == 8) & sweep.groups["measured"] & sweep.groups["mixed"]]
    moved = parts_of_change(groups)
    assert moved is not None
    parts = moved[1]
    assert f"R = 8: total {parts['total'].mean:.3f}, composition {parts['composition'].mean:.3f}" in bars.alt
    assert set(render(plot)) == {f"rank_change{end}" for end in (".png", ".pdf", "_1.svg", "_2.svg")}


def test_without_prompts_enough_there_is_no_figure(write, tmp_path):
    write(tmp_path, "short", 2, 0, steps=2)
    assert longitudinal_figure(load_sweep("short", tmp_path)) == []
