"""One damaged run folder is named and left out; the others are shown and copied."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps import status as table
from grpo_sweeps import sync
from grpo_sweeps.tracking import mlflow_copy, mlflow_tracker
from grpo_sweeps.tracking.lines import line_fault
from grpo_sweeps.tracking.local import read_metrics
from grpo_sweeps.tracking.mlflow_store import Store, StoreError, check_uri
from grpo_sweeps.tracking.status import RecordError, RunStatus, read_status, write_status
from grpo_sweeps.types import ConfigError

GOOD = '{"step":0,"time":1.0,"reward":0.5,"loss":"NaN"}'
BAD = [
    "[]", "{", '{"time":1.0,"reward":1}', '{"step":"1","time":1.0}', '{"step":1.5,"time":1.0}', '{"step":1,"reward":1}',
    '{"step":1,"time":"now"}', '{"step":1,"time":NaN}', '{"step":1,"time":1.0,"reward":"high"}',
    '{"step":1,"time":1.0,"reward":[1]}', '{"step":1,"time":1.0,"reward":1' + "0" * 400 + "}",
]  # fmt: skip


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two finished runs, a and b, with one line of metrics each."""
    for name in ("a", "b"):
        run = tmp_path / "mine" / name
        run.mkdir(parents=True)
        write_status(run, RunStatus("finished", identity=name, name=name, sweep="mine", step=1, total=1))
        (run / "metrics.jsonl").write_text(GOOD + "\n")
    return tmp_path / "mine"


def damage_status(run: Path, **changes: Any) -> None:
    content = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(content | changes))


@pytest.mark.parametrize(
    "changes",
    [{"pid": "z"}, {"name": 5}, {"versions": 3}, {"versions": {"torch": 2}}, {"total": [1]}, {"step": True},
     {"heartbeat": None}, {"started": "now"}, {"dirty": 1}, {"step": 10**30}],
)  # fmt: skip
def test_a_value_of_another_type_is_one_sentence(sweep: Path, changes: dict[str, Any]) -> None:
    damage_status(sweep / "a", **changes)
    with pytest.raises(RecordError, match=rf"status\.json is damaged: {next(iter(changes))} is ") as caught:
        read_status(sweep / "a")
    assert "\n" not in str(caught.value)


def test_the_table_and_the_copy_go_on_past_a_damaged_status(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage_status(sweep / "a", pid="z", name=5, versions=3, total=[1])
    assert table.main([f"runs_dir={sweep.parent}"]) == 0
    printed = capsys.readouterr()
    assert "1 finished, 1 unreadable" in printed.out and "pid is 'z', " not in printed.out
    assert printed.err.count("\n") == 1 and "total is [1]" in printed.err
    runs, problems = mlflow_copy.read_statuses(sweep)
    assert [folder.name for folder, _ in runs] == ["b"] and len(problems) == 1


@pytest.mark.parametrize("line", BAD)
def test_a_damaged_line_is_left_out_everywhere(sweep: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = sweep / "a" / "metrics.jsonl"
    path.write_text(f"{line}\n{GOOD}\n")
    row = table.collect(sweep.parent)[0]
    assert (row.state, row.reward) == ("finished", 0.5) and row.damage is not None and str(path) in row.damage
    for _ in range(2):
        points = mlflow_copy._points(path.read_bytes(), path)
        assert [(name, step) for name, _, _, step in points] == [("reward", 0), ("loss", 0)]
    assert capsys.readouterr().out.count("a line is damaged and left out") == 1
    with pytest.warns(UserWarning, match="left out"):
        assert list(read_metrics(sweep / "a")["reward"]) == [0.5]


def test_what_the_record_writes_has_no_fault() -> None:
    for value in (1, -0.5, None, "NaN", "Infinity", "-Infinity"):
        assert line_fault({"step": 3, "time": 1.7e9, "reward": value}) is None


def test_a_folder_in_place_of_the_metrics(sweep: Path) -> None:
    (sweep / "a" / "metrics.jsonl").unlink()
    (sweep / "a" / "metrics.jsonl").mkdir()
    first, second = table.collect(sweep.parent)
    assert first.damage is not None and "Is a directory" in first.damage and second.reward == 0.5


def test_a_renamed_sweep_is_shown_by_its_folder(sweep: Path) -> None:
    shutil.move(sweep, sweep.parent / "yours")
    assert {row.sweep for row in table.collect(sweep.parent)} == {"yours"}


@pytest.mark.parametrize("error", [KeyError("step"), TypeError("odd"), AttributeError("pop"), OSError("gone")])
def test_one_run_that_cannot_be_copied_does_not_stop_the_others(
    sweep: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = []

    def copy_run(store: object, folder: Path, *_: object) -> mlflow_copy.Copied:
        if folder.name == "a":
            raise error
        copied.append(folder.name)
        return mlflow_copy.Copied(runs=1)

    monkeypatch.setattr(mlflow_tracker, "Store", lambda *_, **__: None)
    monkeypatch.setattr(mlflow_copy, "copy_run", copy_run)
    monkeypatch.setattr(mlflow_copy, "copy_parent", lambda *_, **__: "parent")
    monkeypatch.setattr(mlflow_copy, "finish_parent", lambda *_: None)
    this = mlflow_tracker.Mirror(sweep, f"sqlite:///{sweep.parent}/store.db", "e")
    assert this.copy() == mlflow_copy.Copied(runs=1) and copied == ["b"]
    assert len(this.problems) == 1 and str(sweep / "a") in this.problems[0]


@pytest.mark.parametrize("uri", ["sqlite:///x.db", "sqlite:////abs/x.db", "http://h:5000", "https://u:p@h/x",
                                 "postgresql+psycopg2://h/db"])  # fmt: skip
def test_addresses_that_are_taken(uri: str) -> None:
    check_uri(uri)


@pytest.mark.parametrize("uri", ["ftp://x", "", "mlruns", "file:///x", "sqlite://x.db", "sqlite:///", "http://",
                                 "http://h:port", "http://[x", "ftp://ann:s3cret@x"])  # fmt: skip
def test_addresses_that_are_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="allowed are sqlite:///FILE, http://") as caught:
        check_uri(uri)
    assert "s3cret" not in str(caught.value)


def test_a_file_that_is_no_database_is_one_sentence(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = sweep.parent / "notes.txt"
    text.write_text("nothing of the kind, at some length")
    with pytest.raises(StoreError, match=r"notes\.txt: the file is no SQLite database"):
        Store(f"sqlite:///{text}", "e")
    if find_spec("mlflow") is not None:
        assert sync.main(["sweep=mine", f"runs_dir={sweep.parent}", f"uri=sqlite:///{text}"]) == 1
        printed = capsys.readouterr()
        assert printed.err.count("\n") == 1 and f"uri=sqlite:///{text}" in printed.err
