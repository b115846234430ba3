"""How training went, on the page of a whole report."""

from __future__ import annotations

import pandas as pd
import pytest

from grpo_sweeps.report.build import build
from grpo_sweeps.report.tables.logged import VALUES
from tests.unit.report import test_curves as unit

pytestmark = pytest.mark.integration
runs = unit.runs  # the fixture of the unit tests


def test_the_page_shows_training_before_the_ranks_and_other_figures_keep_their_numbers(runs, tmp_path, undrawn):
    out, _ = build("learnt", runs, tmp_path, ["report"])
    assert {"curves.csv", "curves.png", "curves.pdf", "noise.png", "noise.pdf"} <= {p.name for p in out.iterdir()}
    frame = pd.read_csv(out / "curves.csv")
    ends = [f"{name}{end}" for name in VALUES for end in ("", "_low", "_high")]
    assert list(frame.columns) == ["arm", "R", "step", "first_step", "last_step", "runs", *ends] and len(frame) == 24
    text = (out / "index.html").read_text()
    marks = ('id="training"', "How training went.", "Figure 1.", "Figure 4.", "Figure 6. Every")
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places) and 'href="#training"' in text and text.count('href="curves.csv"') == 2
