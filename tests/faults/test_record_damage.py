"""Forty random damages of the records of a finished and an interrupted sweep: each is named or changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
TIMES, SEED = 40, 20260


def test_no_damage_of_records_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import record_damage

    references = [
        record_damage.finished_sweep(tmp_path / "finished"),
        record_damage.interrupted_sweep(tmp_path / "interrupted", SEED),
    ]
    assert [record_damage.look(reference).said for reference in references] == [[], []]
    out = record_damage.trials(references, TIMES, SEED, tmp_path / "trials")
    assert not out.silent
    assert out.count("named") >= TIMES // 2 and out.count("named") + out.count("harmless") == TIMES
    assert {kind for kind, _ in out.verdicts} >= {"bit flipped", "cut", "lines cut", "harmless"}
