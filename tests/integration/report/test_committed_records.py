"""The records that are published in reports/: the report made from them again is the committed one, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_sweeps import verify
from grpo_sweeps.report.__main__ import main
from grpo_sweeps.report.records import MOST_BYTES
from tests.unit.report.conftest import blank_figures

pytestmark = pytest.mark.integration
REPORTS = Path(__file__).resolve().parents[3] / "reports"
PUBLISHED = sorted(path.parent for path in REPORTS.glob("*/records/*/published.json"))
SAME = ("table1.csv", "by_k.csv", "claims.csv")


@pytest.mark.skipif(not PUBLISHED, reason="no records are published in reports/ yet")
@pytest.mark.parametrize("sweep_dir", PUBLISHED, ids=lambda path: f"{path.parents[1].name}/{path.name}")
def test_the_committed_report_is_made_again(sweep_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blank_figures(monkeypatch)
    assert verify.main([f"sweep={sweep_dir.name}", f"runs_dir={sweep_dir.parent}"]) == 0
    made_by = json.loads((sweep_dir.parents[1] / "manifest.json").read_text())["command"].split()
    words = [f"sweep={sweep_dir.name}", f"runs_dir={sweep_dir.parent}", f"out={tmp_path}"]
    words += [word for word in made_by if word == "commits=allow"]
    assert main(words) == 0
    for name in SAME:
        assert (tmp_path / name).read_bytes() == (sweep_dir.parents[1] / name).read_bytes(), name
    assert sum(path.stat().st_size for path in sweep_dir.rglob("*") if path.is_file()) <= MOST_BYTES
