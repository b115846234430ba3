"""An SQLite store is there whole or not at all, and one that an earlier version left half made is made again."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_sweeps import sync
from grpo_sweeps.tracking import mlflow_making
from grpo_sweeps.tracking.mlflow_store import Store, StoreError
from tests.integration.test_mlflow_follower import runs_in, wait_until, write_run

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


def half_made(place: Path, template: Path) -> Path:
    """The tables of a store whose making was killed in the middle of a migration; made long ago."""
    path = place / "mlflow.db"
    shutil.copy(template, path)
    with sqlite3.connect(path) as store:
        store.execute("DELETE FROM experiment_tags")
        store.execute("DELETE FROM experiments")
        store.execute("DROP TABLE datasets")
        store.execute("UPDATE alembic_version SET version_num = 'c8d9e0f1a2b3'")
    store.close()
    os.utime(path, (time.time() - 60,) * 2)
    return path


def test_a_kill_while_the_store_is_made_leaves_none_and_the_next_start_makes_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpo_sweeps.sync", "--init", "experiment=study"]
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    wait_until(lambda: any(p.stat().st_size for p in tmp_path.glob(".tmp-mlflow.db-*")))
    process.kill()
    process.wait()
    assert not (tmp_path / "mlflow.db").exists()
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert Store(f"sqlite:///{tmp_path}/mlflow.db", "study").client.get_experiment_by_name("study") is not None


def test_a_full_disk_while_the_store_is_made_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        path.write_bytes(b"SQLite format 3\0 half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(mlflow_making, "_migrate", full)
        with pytest.raises(StoreError, match="No space left"):
            Store(f"sqlite:///{tmp_path}/mlflow.db", "study")
    assert list(tmp_path.iterdir()) == []
    Store(f"sqlite:///{tmp_path}/mlflow.db", "study")
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_a_half_made_store_of_before_is_put_aside_and_made_again(
    tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    half = half_made(tmp_path, template).read_bytes()
    (tmp_path / "mlflow.db.half-made-1").write_bytes(b"an earlier one")
    write_run(tmp_path / "runs" / "study" / "2", steps=2)
    assert sync.main(["sweep=study"]) == 0
    said = capsys.readouterr().out.splitlines()[0]
    assert said.endswith("is now mlflow.db.half-made-2, and a new store is made.")
    assert (tmp_path / "mlflow.db.half-made-2").read_bytes() == half
    assert runs_in(f"sqlite:///{tmp_path}/mlflow.db")["R=2"] == ("FINISHED", [0.0, 1.0])


@pytest.mark.parametrize("rows", ["a whole store", "an older version's", "another program's"])
def test_a_store_that_somebody_uses_is_left_where_it_is(tmp_path: Path, template: Path, rows: str) -> None:
    path = half_made(tmp_path, template)
    if rows == "a whole store":
        shutil.copy(template, path)
    elif rows == "an older version's":  # it asks for mlflow db upgrade and must keep what it holds
        with sqlite3.connect(path) as store:
            store.execute(
                "INSERT INTO experiments (experiment_id, name, lifecycle_stage) VALUES (0, 'Default', 'active')"
            )
        store.close()
    elif rows == "another program's":
        path.unlink()
        with sqlite3.connect(path) as store:
            store.execute("CREATE TABLE cities (name TEXT)")
        store.close()
    before = path.read_bytes()
    mlflow_making.make(path)
    assert path.read_bytes() == before


def test_a_store_that_another_program_is_making_is_waited_for(
    tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = half_made(tmp_path, template)
    path.touch()
    waits: list[float] = []

    def others_work(seconds: float) -> None:
        waits.append(seconds)
        shutil.copy(template, path)

    monkeypatch.setattr(mlflow_making.time, "sleep", others_work)
    assert not mlflow_making.half_made(path) and len(waits) == 1
