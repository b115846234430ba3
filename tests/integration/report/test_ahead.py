"""Helpers make what is kept of runs, and a report reads it as if it had made it itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from grpo_sweeps.report.read import ahead
from grpo_sweeps.report.read.ahead import RunToRead, make_ahead
from grpo_sweeps.report.read.query import load_sweep

pytestmark = pytest.mark.integration


@pytest.fixture
def runs(write, tmp_path: Path) -> list[RunToRead]:
    folders = [write(tmp_path / "runs", "made", 4, seed, steps=6) for seed in (0, 1, 2)]
    return [RunToRead(str(folder), seed, 4, "float32") for seed, folder in enumerate(folders)]


def kept(run: RunToRead) -> list[str]:
    return sorted(path.name for path in (Path(run.path) / ".cache").glob("*.rows.parquet"))


def forget(runs: list[RunToRead]) -> None:
    for run in runs:
        shutil.rmtree(Path(run.path) / ".cache", ignore_errors=True)


def test_helpers_keep_what_a_report_then_reads(runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "LEAST", 1)
    said: list[str] = []
    make_ahead(runs, 2, said.append)
    assert sorted(said) == [f"{n} of 3 runs are measured" for n in (1, 2, 3)]
    assert all(kept(run) and run.rows.bytes_to_measure() == 0 for run in runs)
    found = load_sweep("made", tmp_path / "runs").groups
    forget(runs)
    monkeypatch.setattr(ahead, "LEAST", 10**12)
    pd.testing.assert_frame_equal(found, load_sweep("made", tmp_path / "runs").groups, check_exact=True)


def test_what_a_helper_does_not_make_is_made_here(runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "LEAST", 1)
    monkeypatch.setattr(ahead.sys, "executable", shutil.which("false"))
    make_ahead(runs, 2, lambda sentence: None)
    assert not any(kept(run) for run in runs)
    assert len(load_sweep("made", tmp_path / "runs").groups)


def test_nothing_is_started_where_it_would_not_pay(runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a helper was started")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", started)
        make_ahead(runs, 2, lambda sentence: None)  # few bytes
        patch.setattr(ahead, "LEAST", 1)
        make_ahead(runs, 1, lambda sentence: None)  # one processor
        make_ahead(runs[:1], 2, lambda sentence: None)  # one run
    monkeypatch.setattr(ahead, "LEAST", 1)
    make_ahead(runs, 2, lambda sentence: None)
    monkeypatch.setattr(subprocess, "Popen", started)
    make_ahead(runs, 2, lambda sentence: None)  # all is kept
