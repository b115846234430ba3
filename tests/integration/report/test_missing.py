"""The report's command on runs of several commits."""

from __future__ import annotations

import json

import pytest

from grpo_sweeps.report.__main__ import main

pytestmark = pytest.mark.integration


def report(tmp_path, capsys, *more):
    code = main([f"runs_dir={tmp_path}", "sweep=s", f"out={tmp_path / 'out'}", *more])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("second", "named"),
    [
        ({"commit": "f" * 16}, "0123456789ab: 1 run, ffffffffffff: 1 run"),
        ({"dirty": True}, "0123456789ab with uncommitted changes: 1 run; uncommitted changes count as a commit"),
        ({"commit": None, "dirty": None}, "no recorded commit: 1 run"),
    ],
)
def test_several_commits_are_refused_unless_allowed(write, tmp_path, capsys, second, named, undrawn):
    write(tmp_path, "s", 2, 0, steps=2)
    write(tmp_path, "s", 2, 1, steps=2, status=second)
    code, said = report(tmp_path, capsys)
    assert code == 2 and said.count("\n") == 1 and named in said and "commits=allow" in said
    assert not (tmp_path / "out").exists()
    assert report(tmp_path, capsys, "commits=allow")[0] == 0
    assert "different commits" in (tmp_path / "out" / "manifest.json").read_text()
    code, said = report(tmp_path, capsys, "commits=any")
    assert code == 2 and "commits=any: allow is allowed" in said


def test_different_uncommitted_changes_of_one_commit_are_two(write, tmp_path, capsys, undrawn):
    runs = [write(tmp_path, "s", 2, seed, steps=2, status={"dirty": True}) for seed in (0, 1)]
    assert report(tmp_path, capsys)[0] == 0
    for run, digest in zip(runs, ("a" * 64, "b" * 64), strict=True):
        (run / "source.json").write_text(json.dumps({"diff_sha256": digest}))
    code, said = report(tmp_path, capsys)
    assert code == 2 and "changes aaaaaaaa: 1 run" in said and "changes bbbbbbbb: 1 run" in said
