"""verify compares what was copied to MLflow with the records (SQLite)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_sweeps.config import TrackingConfig
from grpo_sweeps.tracking.mlflow_copy import CopyState
from grpo_sweeps.tracking.mlflow_store import Store
from grpo_sweeps.tracking.mlflow_tracker import MLflowTracker
from grpo_sweeps.verify import copies
from tests.integration.test_mlflow_copy import copy, make_run, uri

pytestmark = pytest.mark.integration


@pytest.fixture
def place(tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copy(template, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def differing(place: Path) -> dict[str, str]:
    tracker = MLflowTracker(TrackingConfig(uri=uri(place)))
    return dict(tracker.compare(place / "runs" / "study"))


def test_a_copy_that_is_not_as_its_record_is_named(place: Path) -> None:
    runs = {name: make_run(place / "runs" / "study", name) for name in ("0", "1", "2")}
    assert list(copies(place / "runs" / "study", None)) == []  # nothing was copied: nothing to compare
    copy(place)
    assert differing(place) == {}
    store = Store(uri(place), "grpo_sweeps")
    ids = {
        name: CopyState(run, f"study/{name}", store.uri, store.experiment).store.run_id for name, run in runs.items()
    }
    store.log_points(str(ids["0"]), [("reward", 9.0, 1, 1)])
    store.delete(str(ids["1"]))
    with open(runs["2"] / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "time": 1.0, "reward": 0.5}\n')
    found = differing(place)
    assert "has other values than the record (reward)" in found["R=8 seed=0"]
    assert "is no longer there" in found["R=8 seed=1"] and "lacks 1 of" in found["R=8 seed=2"]
    assert all("sync sweep=study mends it" in sentence for sentence in found.values())


def test_a_store_that_cannot_be_reached_is_a_finding(place: Path) -> None:
    run = make_run(place / "runs" / "study", "0")
    copy(place)
    (run / "config.yaml").write_text("tracking: {kind: mlflow, uri: 'http://127.0.0.1:9', experiment: grpo_sweeps}\n")
    (found,) = copies(place / "runs" / "study", None)
    assert "was not compared: nobody answers at http://127.0.0.1:9" in found.text
