"""The per-layer picture in whole reports, with and without the Grams that it needs."""

from __future__ import annotations

import io

import pandas as pd
import pytest

from grpo_sweeps.report.build import build
from grpo_sweeps.report.figures.layers import layer_figure
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.report.tables.layers import COLUMNS, layer_remarks, layer_table
from tests.unit.report import test_layers as unit
from tests.unit.report.test_layers import R

pytestmark = pytest.mark.integration
runs = unit.runs  # the fixture of the unit tests


def test_the_report_has_the_figure_and_the_table(runs, tmp_path, undrawn):
    out, _ = build("parts", runs, tmp_path / "out", ["report"])
    assert {"fig5.png", "fig5.pdf", "layers.csv"} <= {p.name for p in out.iterdir()}
    page, record = (out / "index.html").read_text(), (out / "manifest.json").read_text()
    assert "Figure 5. Effective rank and gradient energy" in page and 'href="layers.csv"' in page
    assert "analysis.by=parameter" not in page and '"fig5.pdf"' in record and '"layers.csv"' in record
    frame = pd.read_csv(io.StringIO((out / "layers.csv").read_text()))
    assert list(frame.columns) == COLUMNS and len(frame) == len(layer_table(load_sweep("parts", runs)))


def test_without_grams_of_parts_the_page_says_how_to_get_them(write, tmp_path, undrawn):
    write(tmp_path / "runs", "whole", R, 0, steps=2)
    sweep = load_sweep("whole", tmp_path / "runs")
    assert list(layer_table(sweep).columns) == COLUMNS and layer_figure(sweep, layer_table(sweep)) == []
    assert layer_remarks(sweep) == []  # it was not asked for, so it is not missing
    out, _ = build("whole", tmp_path / "runs", tmp_path / "out", ["report"])
    assert not list(out.glob("fig5*")) and not (out / "layers.csv").exists()
    assert "analysis.by=parameter" in (out / "index.html").read_text()
