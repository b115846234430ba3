"""A whole report of real Grams as an older version recorded them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from grpo_sweeps.report.build import build
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.report.tables.pooled import usable_groups
from tests.unit import test_real_grams as unit
from tests.unit.report.conftest import undrawn
from tests.unit.test_real_grams import GROUPS, VALUES, R

__all__ = ["undrawn"]

pytestmark = pytest.mark.integration
runs = unit.runs  # the fixture of the unit tests


@pytest.mark.usefixtures("undrawn")
def test_a_report_of_older_records_has_the_values_of_their_grams(runs: Path, tmp_path: Path):
    folder, claims = build("real", runs, tmp_path / "out", ["report"])
    table = pd.read_csv(folder / "table1.csv")
    groups = usable_groups(load_sweep("real", runs), "all", R)
    assert len(groups) == len(GROUPS)
    for name in VALUES:
        mean = np.mean([g[name] for g in GROUPS])
        assert groups[name].mean() == pytest.approx(mean, rel=1e-9)
        assert table.at[0, name] == pytest.approx(mean, rel=1e-8)  # nine digits in a report's files
        low, high = (groups[f"{name}_floor_{end}"] for end in ("low", "high"))
        assert (low < groups[name]).all() and (groups[name] < high).all()
    page = (folder / "index.html").read_text()
    assert "20 of 20 measured groups were recorded before" in page and "cosine of 1 - 1e-9" in page
    assert "tolerance of the run&#39;s own check (0.0039)" in page
    (c8,) = (c for c in claims if c.id == "C8")
    (finding,) = c8.findings
    assert c8.verdict == finding.verdict == rules.CONTRADICTED and finding.groups == len(GROUPS) < rules.MIN_GROUPS
