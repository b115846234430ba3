"""What updates do to the weights, in a whole report."""

from __future__ import annotations

import pandas as pd
import pytest

from grpo_sweeps.report.build import build
from tests.unit.report import test_updates as unit

pytestmark = pytest.mark.integration
runs = unit.runs  # the fixture of the unit tests


def test_the_report_has_its_table_and_files_and_c6_its_numbers(runs, tmp_path, undrawn):
    out, claims = build("moved", runs, tmp_path, ["report"])
    files = {path.name for path in out.iterdir()}
    assert {"updates.csv", "update_layers.csv", "updates.png", "updates.pdf"} <= files
    assert len(pd.read_csv(out / "updates.csv")) == 8
    text = (out / "index.html").read_text()
    assert 'id="updates"' in text and 'href="#updates"' in text and "update_layers.csv" in text
    (c6,) = [c for c in claims if c.id == "C6"]
    measured = {f.R: f.measured for f in c6.findings}[4]
    # thirds of steps 0 to 12: 0 and 3, and 9 (still, left out) and 12
    told = "2 and 1 measured steps in the first and the last third, fewer than 3: no change is told"
    assert told in measured
    assert "weights that a step changes" in measured and "Hoyer sparsity of the gradient" in measured
    assert any("Beside it the share of weights" in r for r in c6.remarks)
