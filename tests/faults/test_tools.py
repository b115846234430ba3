"""The tools that inject faults and make sweeps: that they run, and that their counting sees what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from grpo_sweeps import sync
from grpo_sweeps.tracking.local import LocalRecord, read_groups, read_metrics
from grpo_sweeps.tracking.status import RunStatus, write_status
from grpo_sweeps.types import EvalRecord
from tests.integration.test_mlflow_copy import make_run

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import fault_check

    return fault_check


def tool(name: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tools" / name), *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def test_a_signal_and_a_kill_cost_nothing(tmp_path: Path) -> None:
    """The whole way: processes, signals at random moments, the same command again, the comparison."""
    words = ("faults=usr2,checkpoint", "times=1", "reports=none", "json=found.json", f"where={tmp_path / 'trials'}")
    done = tool("faults.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    signalled, killed = json.loads((tmp_path / "found.json").read_text())
    for found in (signalled, killed):
        assert found["injected"] == 1 and found["finished"] == found["runs"] == 2 and found["records"] > 100
        assert found["lost"] == found["doubled"] == found["difference"] == found["wrong"] == 0
    assert signalled["repeated"] == 0  # at a step's end nothing is run again
    assert "| usr2 | 1 | 1 | 2 of 2 |" in done.stdout


def made(folder: Path, steps: int = 3) -> Path:
    with LocalRecord(folder) as record:
        for step in range(steps):
            record.log_metrics(step, {"reward": 0.5 * step, "step_time": 1.0})
            record.log_evals([EvalRecord(step, "p", 1, 1, 1, True, True)])
    write_status(folder, RunStatus("finished"))
    return folder


def test_the_counting_sees_what_is_lost_doubled_and_changed(tmp_path: Path, check) -> None:
    whole = made(tmp_path / "whole")
    same = check.compare(made(tmp_path / "same"), whole)
    assert (same.records, same.lost, same.doubled, same.largest, same.unequal) == (6, 0, 0, 0.0, 0)
    short = check.compare(made(tmp_path / "short", steps=2), whole)
    assert (short.lost, short.doubled, short.largest) == (2, 0, float("inf"))
    twice = made(tmp_path / "twice")
    lines = (twice / "metrics.jsonl").read_text().splitlines(keepends=True)
    other = {**json.loads(lines[-1]), "reward": 1.25}
    del other["crc32"]  # it belongs to the line as it was
    (twice / "metrics.jsonl").write_text("".join([*lines, json.dumps(other) + "\n"]))
    (segment,) = (twice / "evals").glob("segment-*")
    shutil.copy(segment, segment.with_name("segment-00007_steps-0000000-0000002.parquet"))
    found = check.compare(twice, whole)
    assert (found.lost, found.doubled, found.largest) == (0, 4, 0.25)  # a reader drops three of them
    (twice / "log.txt").write_text(
        "2026-01-01 10:00:00  step 1/3  reward 0\n2026-01-01 10:00:01  step 2/3\n" * 2
        + "2026-01-01 10:00:02  finished\n"
    )
    assert check.compare(twice, whole).repeated == 2


def test_tables_are_compared_number_by_number(tmp_path: Path, check) -> None:
    for name, text in (("a", "R,rank\n2,1.5\n"), ("b", "R,rank\n2,1.75\n"), ("c", "R,rank\n2,none\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "table1.csv").write_text(text)
    a, b, c = (tmp_path / name for name in "abc")
    assert check.compare_tables(a, a) == 0 and check.compare_tables(b, a) == 0.25
    assert check.compare_tables(c, a) == check.compare_tables(tmp_path, a) == float("inf")


def test_a_made_sweep_is_read_like_a_trained_one(tmp_path: Path) -> None:
    words = ("runs=2", "steps=30", "metrics=20", "groups=4", "runs_dir=runs")
    assert tool("made_sweep.py", *words, cwd=tmp_path).returncode == 0
    folders = sorted((tmp_path / "runs" / "made").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert len(read_groups(folder)) == 120 and all(record.gram is not None for record in read_groups(folder))
        assert read_metrics(folder).shape == (31, 2 + 21)  # step, time, the twenty, and what evaluations log
    again = tool("made_sweep.py", *words, cwd=tmp_path)
    assert again.returncode == 2 and "it is there already" in again.stderr


@pytest.mark.parametrize("name", ["faults.py", "made_sweep.py", "dead_server.py", "overhead.py", "record_damage.py"])
def test_a_bad_word_is_one_sentence_and_exit_code_2(tmp_path: Path, name: str) -> None:
    done = tool(name, "colour=red", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert tool(name, "--help", cwd=tmp_path).returncode == 0


def test_what_changes_quietly_is_noticed_and_costs_nothing(tmp_path: Path) -> None:
    words = ("faults=reward,copied run,forked helper,reward hangs,harmless", "times=1", "json=found.json")
    done = tool("quiet_faults.py", *words, f"where={tmp_path / 'trials'}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [seen["noticed"] for (seen,) in found.values()] == [True, True, None, True, None]
    assert all(seen[kind] == 0 for (seen,) in found.values() for kind in ("lost", "doubled", "false"))
    assert "| reward | 1 | 1 of 1 | 0 | 0 | 0 |" in done.stdout


def test_what_mlflow_lacks_holds_twice_or_has_wrong_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.chdir(tmp_path)
    import quiet_faults

    make_run(tmp_path / "runs" / "study", "0", error=None)
    uri = "sqlite:///mlflow.db"

    def counted() -> list[int]:
        capsys.readouterr()
        assert quiet_faults.stored([uri]) == 0
        return json.loads(capsys.readouterr().out)

    assert sync.main([f"uri={uri}", "experiment=grpo_sweeps"]) == 0 and counted() == [0, 0, 0]
    with closing(sqlite3.connect("mlflow.db")) as database, database:
        database.execute("DELETE FROM metrics WHERE key = 'reward' AND step = 1")
        database.execute("UPDATE metrics SET value = 9 WHERE key = 'reward' AND step = 0")
        database.execute("DELETE FROM params WHERE key = 'R'")
    assert counted() == [1, 0, 2]
