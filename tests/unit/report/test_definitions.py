"""The other definitions of rank: what C8's rule says of them, and their figure by k."""

from __future__ import annotations

import dataclasses
import re

import pytest

from grpo_sweeps.publish.drawing import render
from grpo_sweeps.report.claims.ranks import DEFINITIONS
from grpo_sweeps.report.claims.rules import CONTRADICTED, HOLDS, UNDECIDED
from grpo_sweeps.report.claims.verdicts import judge_claims
from grpo_sweeps.report.figures import by_k as by_k_module
from grpo_sweeps.report.figures.by_k import by_k_figure
from grpo_sweeps.report.measure.spectral import QUANTITIES
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.report.tables.pooled import by_k


def said(sweep):
    """C8's verdict, and {definition: (verdict, the sentence)}."""
    (c8,) = [c for c in judge_claims(sweep) if c.id == "C8"]
    found = {}
    for name, words in DEFINITIONS.items():
        (sentence,) = [r for r in c8.remarks if r.startswith(f"By {words}, by the same rule: ")]
        (verdict,) = [v for v in (HOLDS, CONTRADICTED, UNDECIDED) if f"rule: {v} (" in sentence]
        found[name] = verdict, sentence
    return c8.verdict, found


def test_each_definition_has_its_verdict_and_values(full_sweep):
    sweep = load_sweep("full", full_sweep)
    verdict, found = said(sweep)
    assert verdict == CONTRADICTED and {v for v, _ in found.values()} == {CONTRADICTED}
    for name, (_, sentence) in found.items():
        for R in (2, 4, 8):
            groups = sweep.groups[(sweep.groups["R"] == R) & sweep.groups["mixed"].astype(bool)]
            value, null = groups[name].mean(), groups[f"null_orthogonal_{name}"].mean()
            number, orthogonal = re.search(rf"R = {R}: ([\d.]+)[^;)]*, orthogonal scores ([\d.]+)", sentence).groups()
            assert (float(number), float(orthogonal)) == pytest.approx((value, null), abs=0.0051)


def test_another_definition_can_say_otherwise_and_leaves_c8_as_it_is(paper_sweep):
    """Table 1's pairs: effective rank about 2 at each R, numerical rank R."""
    verdict, found = said(load_sweep("paper", paper_sweep))
    assert verdict == HOLDS and found["numerical_rank"][0] == found["stable_rank"][0] == CONTRADICTED


def test_coarse_grams_leave_every_definition_open(write, tmp_path):
    for R in (2, 4):
        write(tmp_path, "coarse", R, 0, steps=20, change=lambda g: dataclasses.replace(g, floor=0.3))
    _, found = said(load_sweep("coarse", tmp_path))
    for name, (verdict, sentence) in found.items():
        assert verdict == UNDECIDED
        assert sentence.count("the Grams too coarse") == (2 if name == "numerical_rank" else 0)  # it has no interval


def test_the_precision_of_a_half_type_decides_what_it_can(write, tmp_path):
    """Equal singular values at R = 8, known to .4%: a coarse K can only lower a rank, and every one is above 2."""
    write(tmp_path, "half", 8, 0, steps=20, change=lambda g: dataclasses.replace(g, floor=0.004))
    verdict, found = said(load_sweep("half", tmp_path))
    assert verdict == CONTRADICTED
    assert {name for name, (v, _) in found.items() if v == CONTRADICTED} == set(DEFINITIONS)


def test_the_figure_has_a_panel_a_definition(paper_sweep):
    sweep = load_sweep("paper", paper_sweep)
    table = by_k(sweep)
    (plot,) = by_k_figure(sweep, table)
    assert len(plot.panels) == len(QUANTITIES) and len(render(plot)) == 2 + len(plot.panels)
    values = table[(table["R"] == 8) & (table["groups"] > 0)].set_index("k")["stable_rank"]
    assert f"R = 8: most {values.max():.2f} (k = {values.idxmax()})" in plot.panels[3].alt
    assert by_k_figure(sweep, table.iloc[:0]) == []


def test_of_many_arms_the_first_are_drawn_and_the_caption_says_so(full_sweep, monkeypatch):
    sweep = load_sweep("full", full_sweep)
    table = by_k(sweep)
    monkeypatch.setattr(by_k_module, "arm_cells", lambda sweep: {arm: [2, 4, 8] for arm in ("all", "b", "c", "d")})
    (plot,) = by_k_figure(sweep, table)
    assert len(plot.panels) == 3 * 6 and plot.caption.endswith("the first 3 of 4 arms; by_k.csv has them all.")
    monkeypatch.setattr(by_k_module, "MOST_ARMS", 4)
    assert len(by_k_figure(sweep, table)[0].panels) == 4 * 6
