"""The sample completions on the page of a whole report."""

from __future__ import annotations

import pytest

from grpo_sweeps.report.build import build
from grpo_sweeps.report.page import silent_cells
from tests.unit.report.test_samples import bare, keep, texts

pytestmark = pytest.mark.integration


def test_without_a_mixed_group_one_with_advantages_and_else_the_latest(write, tmp_path, undrawn):
    runs = {R: bare(write, tmp_path, R) for R in (2, 4)}
    for R, run in runs.items():
        keep(run, 10, (1.0,) * R, baseline=0.0 if R == 2 else None)
        keep(run, 20, (0.0,) * R)
    two, shown = texts(tmp_path, 2)
    assert two == ["10/0/0", "10/0/1"] and texts(tmp_path, 4)[0] == ["20/0/0", "20/0/3"]
    assert silent_cells(shown) == "R = 4"
    out, _ = build("s", tmp_path, tmp_path / "out", ["report"])
    text = (out / "index.html").read_text()
    assert "No kept group taught anything, and the latest is shown, for: R = 4." in text
    assert "one group of rollouts from which the model learnt" in text
