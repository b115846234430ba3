"""R* in a whole report: section, files and figure."""

from __future__ import annotations

import dataclasses

import pytest

from grpo_sweeps.publish.drawing import render
from grpo_sweeps.report.build import build
from grpo_sweeps.report.design.best_size import best_sizes
from grpo_sweeps.report.figures.group_size import best_size_figure
from grpo_sweeps.report.read.query import load_sweep
from tests.unit.report import test_best_size as unit

pytestmark = pytest.mark.integration
exact, drawn = unit.exact, unit.drawn  # the fixtures of the unit tests


def test_the_report_shows_it(drawn, tmp_path, undrawn):
    out, _ = build("mean", drawn, tmp_path / "out", ["report"])
    page = (out / "index.html").read_text()
    assert 'id="best_size"' in page and "Error of the gradient by group size" in page and "best_size.csv" in page
    assert {"best_size.csv", "best_size.png", "best_size.pdf"} <= {p.name for p in out.iterdir()}
    sweep = load_sweep("mean", drawn)
    sizes = best_sizes(sweep)
    assert [one.R for one in sizes] == [2, 4]
    (plot,) = best_size_figure(sweep, sizes)
    assert "R = 4: R*" in plot.panels[0].alt and set(render(plot)) >= {"best_size_1.svg"}
    assert best_size_figure(sweep, [dataclasses.replace(sizes[1], values={}, draws={})]) == []
