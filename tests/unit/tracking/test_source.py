"""The code behind a run: what is kept at submission, and what is said when it has changed by the start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_sweeps.sweep.execute import execute
from grpo_sweeps.tracking import provenance
from grpo_sweeps.tracking.status import read_status
from tests.unit.sweep.conftest import (
    frozen_config,
    workplace,  # noqa: F401  (a fixture)
)


def with_diff(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    monkeypatch.setattr(provenance, "diff", lambda: text)


def test_a_snapshot_is_whole_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_diff(monkeypatch, "+uri = https://ann:s3cret@host/x\n")
    taken = provenance.snapshot("run uri=https://ann:s3cret@host")
    provenance.write(tmp_path, taken)
    assert provenance.read(tmp_path) == taken
    assert taken.packages["pytest"] == pytest.__version__ and len(taken.packages) > len(taken.versions) > 3
    assert taken.commit == provenance.commit() and taken.time > 0
    text = (tmp_path / "source.json").read_text() + (tmp_path / "source.diff").read_text()
    assert "s3cret" not in text and "https://***@host/x" in text
    with_diff(monkeypatch, None)
    provenance.write(tmp_path, provenance.snapshot())
    assert not (tmp_path / "source.diff").exists()


def test_a_long_diff_is_cut_and_still_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with_diff(monkeypatch, "a" * (provenance.MOST_DIFF + 5) + "b")
    one = provenance.snapshot()
    assert (
        len(one.diff) < provenance.MOST_DIFF + 100
        and f"the whole diff has {provenance.MOST_DIFF + 6} characters" in one.diff
    )
    with_diff(monkeypatch, "a" * (provenance.MOST_DIFF + 5) + "c")
    assert provenance.changes(one, provenance.snapshot()) == [
        "changed since submission: the uncommitted changes of the source are others"
    ]


def test_changes_are_named() -> None:
    before = provenance.Source("a" * 40, False, "", "", {"torch": "2.1", "peft": "1"}, {}, "", 1.0)
    assert provenance.changes(before, replace(before, time=2.0, command="other", packages={"x": "1"})) == []
    now = replace(before, commit=None, versions={"torch": "2.2", "numpy": "2"})
    assert provenance.changes(before, now) == [
        "changed since submission: the commit is unknown, it was aaaaaaaaaaaa",
        "changed since submission: numpy is 2, it was not installed",
        "changed since submission: peft is not installed, it was 1",
        "changed since submission: torch is 2.2, it was 2.1",
    ]


@pytest.mark.parametrize("content", ["", "[]", '{"unknown": 1}'])
def test_a_damaged_file_is_written_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / "source.json").write_text(content)
    assert provenance.since_submission(tmp_path, "python -m x") == []
    assert json.loads((tmp_path / "source.json").read_text())["command"] == "python -m x"


def test_a_run_says_what_changed_while_it_waited(workplace: Path) -> None:  # noqa: F811
    run_dir = workplace / "one"
    run_dir.mkdir()
    submitted = provenance.snapshot()
    provenance.write(run_dir, replace(submitted, commit="0" * 40))
    assert execute(frozen_config(), run_dir).ok
    notes = read_status(run_dir).notes
    assert len(notes) == 1 and notes[0].startswith("changed since submission: the commit is")
    assert notes[0] in (run_dir / "log.txt").read_text()
    fresh = workplace / "two"
    assert execute(frozen_config(), fresh, command="python -m x").ok
    assert read_status(fresh).notes == [] and provenance.read(fresh).command == "python -m x"  # type: ignore[union-attr]
