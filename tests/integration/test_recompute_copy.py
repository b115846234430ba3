"""`sync` of older runs: MLflow shows the recomputed values and only them, in a run that says so (SQLite)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps import sync
from grpo_sweeps.tracking import mirror as mirroring
from grpo_sweeps.tracking.lines import METRICS, RECOMPUTED
from grpo_sweeps.tracking.local import read_metrics
from grpo_sweeps.tracking.mlflow_tracker import Mirror
from grpo_sweeps.tracking.status import read_status, write_status
from tests.integration.test_mlflow_copy import contents, killed_around
from tests.older_runs import STEPS, older_run, right_values

pytestmark = pytest.mark.integration


@pytest.fixture
def place(tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with an initialised mlflow.db and an older run."""
    shutil.copy(template, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    older_run(tmp_path / "runs" / "study" / "0")
    yield tmp_path


def uri(place: Path) -> str:
    return f"sqlite:///{place}/mlflow.db"


def copy(place: Path) -> None:
    """As versions did that corrected nothing."""
    assert Mirror(place / "runs" / "study", uri(place), "grpo_sweeps").copy(wait=5.0) is not None


def synced(place: Path) -> int:
    return sync.main(["sweep=study", f"uri={uri(place)}"])


def children(place: Path) -> dict[str, dict[str, Any]]:
    found = contents(uri(place), deleted=True)
    return {i: r for i, r in found.items() if r["tags"]["grpo_sweeps.kind"] == "run"}


def note(place: Path) -> str:
    return read_status(place / "runs" / "study" / "0").notes[-1]


def assert_one_active_that_is_right(place: Path) -> str:
    """The one run that is not deleted; it has every point of the record once, those of the Grams among them."""
    (run_id,) = [i for i, r in children(place).items() if r["info"][-1] == "active"]
    run = children(place)[run_id]
    history = run["history"]
    assert all(len({step for step, _, _ in points}) == len(points) for points in history.values())
    metrics = read_metrics(place / "runs" / "study" / "0").set_index("step")
    for name in metrics.columns.drop("time"):
        of_record = metrics[name].dropna().to_dict()
        assert {step: float(value) for step, _, value in history[name]} == of_record
    for step in STEPS:
        for name, value in right_values(step).items():
            assert metrics.loc[step, name] == pytest.approx(value, rel=1e-12)
    assert [step for step, _, _ in history[RECOMPUTED]] == STEPS
    assert run["tags"]["grpo_sweeps.recomputed"] == note(place)
    assert run["info"][:2] == ("R=8 seed=0", "FINISHED") and "grams.parquet" in run["files"]
    return run_id


def test_a_new_run_replaces_the_copy_that_shows_cut_values(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy(place)
    ((old, before),) = children(place).items()
    parents = contents(uri(place)).keys() - {old}
    assert synced(place) == 0
    new = assert_one_active_that_is_right(place)
    assert f"runs/study/0: {note(place)}." in capsys.readouterr().out.splitlines()
    assert note(place).startswith(f"spectral values of {len(STEPS)} steps were recomputed")
    found = contents(uri(place), deleted=True)
    assert found.keys() == parents | {old, new} and found[new]["tags"]["grpo_sweeps.replaces"] == old
    assert found[new]["tags"]["mlflow.parentRunId"] in parents
    why = {"grpo_sweeps.replaced_by": new, "grpo_sweeps.replaced_because": note(place)}
    assert found[old]["tags"] == before["tags"] | why and found[old]["info"][-1] == "deleted"
    assert repr(found[old]["history"]) == repr(before["history"])  # as it was, for whoever restores it

    record = (place / "runs" / "study" / "0" / METRICS).read_bytes()
    assert synced(place) == 0
    assert repr(contents(uri(place), deleted=True)) == repr(found)
    assert (place / "runs" / "study" / "0" / METRICS).read_bytes() == record


def test_a_run_that_was_never_copied_is_copied_corrected(place: Path) -> None:
    assert synced(place) == 0
    assert_one_active_that_is_right(place)
    assert len(contents(uri(place), deleted=True)) == 2


def test_with_the_store_away_the_record_is_corrected_and_the_copy_follows(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy(place)
    (place / "mlflow.db").rename(place / "away.db")
    (place / "mlflow.db").write_bytes(b"no database at all")
    assert synced(place) == 1
    assert "were recomputed" in capsys.readouterr().out
    (place / "away.db").replace(place / "mlflow.db")
    assert synced(place) == 0
    assert_one_active_that_is_right(place)
    assert len(children(place)) == 2


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", ["create", "set_tags", "delete", "log_points", "upload"])
def test_killed_around_any_call_a_second_sync_replaces_it_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, call: str, after: bool
) -> None:
    copy(place)
    with killed_around(monkeypatch, call, after):
        synced(place)
    assert synced(place) == 0
    assert_one_active_that_is_right(place)
    assert len(children(place)) == 2


def test_a_follower_that_copies_meanwhile_replaces_it_too(place: Path) -> None:
    """Its view of the file grows by the lines of correction."""
    mirror = Mirror(place / "runs" / "study", uri(place), "grpo_sweeps")
    mirror.copy()
    mirroring.correct(place / "runs" / "study", None)
    mirror.copy()
    assert_one_active_that_is_right(place)
    assert len(children(place)) == 2


def test_what_cannot_be_corrected_gives_exit_code_1_and_is_copied(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = place / "runs" / "study" / "0"
    for path in (run / "grams").glob("*.parquet"):
        path.write_bytes(path.read_bytes()[:-1])
    older_run(place / "runs" / "study" / "1", "journal")
    (place / "runs" / "study" / "1" / "grams" / "segment-00000_steps-0000000-0000000.parquet").write_bytes(b"x")
    assert synced(place) == 1
    error = capsys.readouterr().err
    assert "study/1: " in error and "is damaged" in error
    assert len(children(place)) == 2


def test_a_run_that_has_not_ended_is_copied_as_it_is(place: Path) -> None:
    run = place / "runs" / "study" / "0"
    write_status(run, replace(read_status(run), state="running", ended=None))
    before = (run / METRICS).read_bytes()
    assert synced(place) == 0
    assert (run / METRICS).read_bytes() == before
    ((_, copied),) = children(place).items()
    assert RECOMPUTED not in copied["history"] and "grpo_sweeps.recomputed" not in copied["tags"]
