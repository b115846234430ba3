"""Forty random damages of the records of a finished and an interrupted sweep: each is named or changes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
TIMES, SEED = 40, 20260


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        import record_damage

        place = tmp_path_factory.mktemp("sweeps")
        return [
            record_damage.finished_sweep(place / "finished"),
            record_damage.interrupted_sweep(place / "interrupted", SEED),
        ]


def test_no_damage_of_records_is_silent(references: list[Path], tmp_path: Path) -> None:
    import record_damage

    assert [record_damage.look(reference).said for reference in references] == [[], []]
    out = record_damage.trials(references, range(TIMES), SEED, tmp_path / "trials")
    assert not out.silent
    assert out.count("named") >= TIMES // 2 and out.count("named") + out.count("harmless") == TIMES
    assert {kind for kind, _ in out.verdicts} >= {"bit flipped", "cut", "lines cut", "harmless"}


def test_the_commands_themselves_name_what_is_deleted_and_nothing_else(references: list[Path], tmp_path: Path) -> None:
    import record_damage

    before = record_damage.look_by_commands(references[0])
    assert before.said == [] and not before.refused and {"table1.csv", "ranks.csv"} <= before.tables.keys()
    shutil.copytree(references[0], tmp_path / "runs")
    (segment, *_) = sorted((tmp_path / "runs").glob("trial/*/evals/*.parquet"))
    segment.unlink()
    after = record_damage.look_by_commands(tmp_path / "runs")
    assert record_damage.verdict(before, after, "file deleted") == "named" and any("evals" in one for one in after.said)
    assert record_damage.verdict(before, record_damage.look_by_commands(references[0]), "harmless") == "harmless"
