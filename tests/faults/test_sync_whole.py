"""`python -m grpo_sweeps.sync` ends with MLflow equal to the records, whatever happened to either.

In an SQLite file, and once through a real server.
"""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_sweeps import sync
from grpo_sweeps.config.choices import choice_names
from grpo_sweeps.tracking import provenance
from grpo_sweeps.tracking.lines import parse_lines
from grpo_sweeps.tracking.mlflow_copy import flatten
from grpo_sweeps.tracking.mlflow_store import LARGEST, Store, StoreError
from grpo_sweeps.tracking.status import read_status
from tests.integration.test_mlflow_copy import contents, make_run, uri
from tests.integration.test_mlflow_follower import free_port, server

pytestmark = pytest.mark.integration

WORDS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


@dataclass
class Place:
    """A working directory with a sweep of two runs whose copy is complete. run_id: of run 0 in MLflow.

    address: of a server that keeps database and artifacts in the same directory; "" where the store is a file."""

    path: Path
    address: str = ""
    run_id: str = ""
    parent_id: str = ""

    def made(self) -> Place:
        """The same, with the runs written and copied."""
        make_run(self.path / "runs" / "study", "0", error=None)
        make_run(self.path / "runs" / "study", "1", "failed", error="ValueError: boom")
        assert self.sync() == 0
        return self.looked_up()

    def looked_up(self) -> Place:
        """The same, with the runs that MLflow has now."""
        for run_id, run in self.contents().items():
            if run["tags"].get("identity") == "0":
                self.run_id = run_id
            elif run["tags"]["grpo_sweeps.kind"] == "sweep":
                self.parent_id = run_id
        return self

    @property
    def uri(self) -> str:
        return self.address or uri(self.path)

    @property
    def artifacts(self) -> Path:
        return self.path / ("served" if self.address else "mlartifacts")

    def contents(self, **choice: Any) -> dict[str, Any]:
        return contents(self.uri, served=self.artifacts if self.address else None, **choice)

    @property
    def sweep_dir(self) -> Path:
        (found,) = (self.path / "runs").glob("[!.]*")
        return found

    def store(self) -> Store:
        return Store(self.uri, "grpo_sweeps")

    def sql(self, *statements: str) -> None:
        """Change the store behind MLflow's back; {run} stands for run 0's id."""
        with sqlite3.connect(self.path / ("server.db" if self.address else "mlflow.db")) as database:
            for statement in statements:
                assert database.execute(statement.format(run=self.run_id, parent=self.parent_id)).rowcount, statement
        database.close()

    def sync(self, *words: str) -> int:
        return sync.main([f"uri={self.uri}", "experiment=grpo_sweeps", *words])


@pytest.fixture
def place(tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    shutil.copy(template, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path).made()


def recorded(run_dir: Path) -> dict[tuple[str, int], float]:
    """(metric, step): value, from the lines of the record alone."""
    lines, faults = parse_lines((run_dir / "metrics.jsonl").read_bytes().splitlines())
    assert not faults
    out = {}
    for line in lines:
        for name, value in line.items():
            if name not in ("step", "time"):
                number = float(value)
                out[name, line["step"]] = LARGEST if math.isinf(number) else number
    return out


def assert_as_recorded(place: Place) -> None:
    """Every field of every run, and no other run."""
    found = place.contents()
    folders = sorted(path.parent for path in place.sweep_dir.glob("[!.]*/status.json"))
    children = {run["tags"]["identity"]: run for run in found.values() if run["tags"]["grpo_sweeps.kind"] == "run"}
    ((parent_id, parent),) = [(i, run) for i, run in found.items() if run["tags"]["grpo_sweeps.kind"] == "sweep"]
    assert sorted(children) == [folder.name for folder in folders] and len(found) == len(folders) + 1
    assert parent["info"][0] == parent["tags"]["grpo_sweeps.sweep"] == place.sweep_dir.name
    assert parent["tags"]["command"] == "python -m grpo_sweeps.run R=8"
    states = []
    for folder in folders:
        run, status = children[folder.name], read_status(folder)
        states.append(WORDS[status.state])
        there = {(name, step): float(value) for name, points in run["history"].items() for step, _, value in points}
        assert sum(map(len, run["history"].values())) == len(there)  # no point twice
        here = recorded(folder)
        assert there.keys() == here.keys()
        assert not [place for place in here if repr(there[place]) != repr(here[place])]
        config = yaml.safe_load((folder / "config.yaml").read_text())
        source = provenance.read(folder, with_diff=False)
        own = flatten(config) | flatten(choice_names(config, source.choices if source else {}))
        assert run["params"] == {key: value[:6000] for key, value in own.items()}
        assert (
            run["tags"]["mlflow.parentRunId"] == parent_id and run["tags"]["grpo_sweeps.sweep"] == place.sweep_dir.name
        )
        for tag, value in {
            "git_commit": status.commit, "host": status.host, "error": status.error or "", "stale": "",
            "command": status.command, "version.torch": "2.13.0", "slurm_job_id": status.job_id,
        }.items():  # fmt: skip
            assert run["tags"].get(tag, "") == value, tag
        assert run["info"][:2] == (status.name, WORDS[status.state])
        assert run["info"][3] == round((status.ended or 0) * 1000)
        files = {name: data for name, (_, data) in run["files"].items()}
        assert sorted(files) == ["completions.parquet", "config.yaml", "environment.json", "grams.parquet", "log.txt"]
        assert files["config.yaml"].decode() == (folder / "config.yaml").read_text().replace("ann:s3cret", "***")
        assert files["log.txt"].decode() == (folder / "log.txt").read_text().replace("ann:s3cret", "***")
        assert json.loads(files["environment.json"])["commit"] == status.commit
        assert files["grams.parquet"][:4] == b"PAR1"
    assert parent["info"][1] == ("FAILED" if "FAILED" in states else "FINISHED")


def artifact(place: Place, name: str) -> Path:
    (found,) = place.artifacts.rglob(f"{place.run_id}/artifacts/{name}")
    return found


WRONG = "UPDATE metrics SET value = 9 WHERE key = 'reward' AND step = 1 AND run_uuid = '{run}'"


def lose_notes(place: Place) -> None:
    for note in place.sweep_dir.rglob("mlflow.json"):
        note.unlink()


def experiment_deleted(place: Place) -> None:
    """With a run in it that another one replaced before, which must not come back."""
    place.sql(WRONG)
    assert place.sync() == 0
    store = place.store()
    store.client.delete_experiment(store.experiment_id)


FAULTS: dict[str, Callable[[Place], object]] = {
    "points lost": lambda p: p.sql("DELETE FROM metrics WHERE key = 'reward' AND run_uuid = '{run}'",
                                   "DELETE FROM latest_metrics WHERE key = 'reward' AND run_uuid = '{run}'"),
    "a point twice": lambda p: p.store().log_points(p.run_id, [("reward", 0.1, 7, 1)]),
    "a wrong value": lambda p: p.sql(WRONG),
    "a wrong timing": lambda p: p.sql(WRONG.replace("reward", "step_time")),
    "a point of no step": lambda p: p.store().log_points(p.run_id, [("reward", 0.1, 7, 99)]),
    "parameters missing": lambda p: p.sql("DELETE FROM params WHERE key LIKE 'trainer.%' AND run_uuid = '{run}'"),
    "a tag changed": lambda p: p.store().set_tags(p.run_id, {"git_commit": "other", "error": "none of its own"}),
    "a tag deleted": lambda p: p.store().client.delete_tag(p.run_id, "host"),
    "another parent": lambda p: p.store().set_tags(p.run_id, {"mlflow.parentRunId": p.run_id}),
    "the parent's tag changed": lambda p: p.store().set_tags(p.parent_id, {"command": "other"}),
    "another name": lambda p: p.store().rename(p.run_id, "other"),
    "another status": lambda p: p.store().set_status(p.run_id, "KILLED", 5.0),
    "the parent's status": lambda p: p.store().set_status(p.parent_id, "RUNNING", None),
    "a file deleted": lambda p: artifact(p, "config.yaml").unlink(),
    "a file changed": lambda p: artifact(p, "log.txt").write_bytes(artifact(p, "log.txt").read_bytes()[::-1]),
    "a file cut": lambda p: artifact(p, "log.txt").write_bytes(artifact(p, "log.txt").read_bytes()[:-1]),
    "a run deleted in MLflow": lambda p: p.store().delete(p.run_id),
    "the parent deleted in MLflow": lambda p: p.store().delete(p.parent_id),
    "the experiment deleted in MLflow": experiment_deleted,
    "the sweep renamed": lambda p: p.sweep_dir.rename(p.sweep_dir.with_name("renamed")),
    "the sweep renamed and its notes lost": lambda p: (
        lose_notes(p), p.sweep_dir.rename(p.sweep_dir.with_name("other"))),
    "a run's folder deleted": lambda p: shutil.rmtree(p.sweep_dir / "0"),
    "the notes lost": lose_notes,
    "a replaced run restored": lambda p: (
        p.sql(WRONG),
        p.sync(), p.store().client.restore_run(p.run_id)),
}  # fmt: skip
BESIDE = ("the sweep renamed and its notes lost", "a run's folder deleted", "a replaced run restored")


@pytest.mark.parametrize("fault", FAULTS)
def test_after_any_fault_the_store_is_as_the_records_are(
    place: Place, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_made_whole(place, fault, capsys)


def assert_made_whole(place: Place, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The fault shows, one `sync` mends it (with prune=true where there is something beside), a second does nothing."""
    assert_as_recorded(place)
    FAULTS[fault](place)
    if fault != "the notes lost":
        with pytest.raises((AssertionError, ValueError, StoreError)):
            assert_as_recorded(place)
    capsys.readouterr()
    assert place.sync() == 0
    said = capsys.readouterr().out
    assert ("prune=true deletes them there" in said) == (fault in BESIDE)
    if fault in BESIDE:
        assert place.sync("prune=true") == 0
        assert "deleted in MLflow (mlflow runs restore brings a run back)" in capsys.readouterr().out
    assert_as_recorded(place)
    before = place.contents()
    assert place.sync("prune=true") == 0
    assert repr(place.contents()) == repr(before)
    assert "0 points and 0 files new" in capsys.readouterr().out.splitlines()[-1]


OVER_HTTP = (  # of a file behind a server the size is known: what changes without changing it is not seen
    "points lost", "a wrong value", "a tag deleted", "another status", "a file deleted", "a file cut",
    "a run deleted in MLflow", "the notes lost", "the sweep renamed", "a run's folder deleted",
)  # fmt: skip


def test_through_a_server_it_is_the_same(
    tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault after fault of the same sweep, from its first copy on."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(template, tmp_path / "server.db")
    port = free_port()
    with server(tmp_path, port):
        place = Place(tmp_path, f"http://127.0.0.1:{port}").made()
        for fault in OVER_HTTP:
            assert_made_whole(place.looked_up(), fault, capsys)
    assert not (tmp_path / "mlflow.db").exists() and not (tmp_path / "mlartifacts").exists()


def test_prune_removes_what_was_copied_from_here_and_nothing_else(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other people's runs stay, those of a copied folder of runs, of other experiments, of folders not copied yet."""
    store = place.store()
    tags = {"grpo_sweeps.kind": "run", "grpo_sweeps.sweep": "study", "identity": "9", "grpo_sweeps.record": "0" * 32}
    other = Store(uri(place.path), "other")
    mine = {k: v for k, v in store.read(place.run_id).tags.items() if k != "mlflow.runName"}
    kept = {
        store.create("by hand", 1.0, {}),
        store.create("before places were noted", 1.0, tags),
        store.create("another machine", 1.0, {**tags, **{k: mine[k] for k in ["grpo_sweeps.runs_dir"]}}),
        store.create("a copied folder of runs", 1.0,
                     {**tags, "grpo_sweeps.place": mine["grpo_sweeps.place"], "grpo_sweeps.runs_dir": "/elsewhere"}),
        other.create("another experiment", 1.0, mine | {"identity": "9"}),
    }  # fmt: skip
    uncopied = make_run(place.path / "runs" / "second", "5")
    not_yet = store.create("not copied yet", 1.0, mine | {"grpo_sweeps.sweep": "second", "identity": "5"})
    shutil.rmtree(place.path / "runs" / "study" / "0")
    assert place.sync("sweep=study", "prune=true") == 0
    said = capsys.readouterr().out
    assert f"1 run was copied from folders that are no longer in runs: study/R=8 seed=0 ({place.run_id})" in said
    active = contents(uri(place.path)).keys() | contents(uri(place.path), "other").keys()
    assert kept | {not_yet} <= active and place.run_id not in active
    deleted = contents(uri(place.path), deleted=True)
    assert deleted[place.run_id]["info"][-1] == "deleted" and deleted[place.run_id]["history"]  # restorably
    assert uncopied.exists()


def test_what_is_left_of_the_last_sweep_is_removed_too(place: Place) -> None:
    shutil.rmtree(place.sweep_dir)
    assert place.sync("prune=true") == 0
    assert contents(uri(place.path)) == {}


@pytest.mark.parametrize("words", [["--follow"], ["sweep=study", "run=0"], ["--init"]])
def test_prune_goes_with_whole_sweeps(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert sync.main([*words, "prune=true"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_nothing_is_removed_while_a_run_cannot_be_copied(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(place.sweep_dir / "0")
    (place.sweep_dir / "1" / "status.json").write_text("{")
    before = contents(uri(place.path)).keys()
    assert place.sync("prune=true") == 1
    assert "nothing is deleted while a run cannot be copied" in capsys.readouterr().err
    assert contents(uri(place.path)).keys() == before


def test_a_sweep_copied_beside_the_first_keeps_its_own_runs(place: Place) -> None:
    """Unlike a renamed one: the folder of the first is still there."""
    first: Any = contents(uri(place.path))
    shutil.copytree(place.sweep_dir, place.path / "runs" / "twin")
    assert place.sync() == 0
    after = contents(uri(place.path))
    assert len(after) == 6 and all(repr(after[i]) == repr(run) for i, run in first.items())
