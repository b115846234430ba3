"""The folder of a report: what an earlier report left there and this one does not have is removed, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_sweeps.files import REPORT_MANIFEST
from grpo_sweeps.publish.page import with_manifest, write


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_figure_that_is_no_longer_drawn_goes_with_the_report_that_had_it(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    write(folder, with_manifest({"index.html": b"1", "fig3.png": b"1"}, {}))
    (folder / "README.md").write_text("mine")
    (folder / "records").mkdir()
    write(folder, with_manifest({"index.html": b"2"}, {}))
    assert names(folder) == {"index.html", REPORT_MANIFEST, "README.md", "records"}
    assert (folder / "index.html").read_bytes() == b"2"


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[]",
        b"{",
        b'{"files": 3}',
        b'{"files": [3]}',
        b"\xff",
        json.dumps({"files": ["../mine", "records", "."]}).encode(),
    ],
)
def test_a_manifest_of_something_else_removes_nothing(tmp_path: Path, manifest: bytes) -> None:
    folder = tmp_path / "report"
    (folder / "records").mkdir(parents=True)
    (tmp_path / "mine").write_text("mine")
    (folder / "fig3.png").write_bytes(b"1")
    (folder / REPORT_MANIFEST).write_bytes(manifest)
    write(folder, with_manifest({"index.html": b"2"}, {}))
    assert names(folder) == {"index.html", REPORT_MANIFEST, "fig3.png", "records"} and (tmp_path / "mine").exists()
