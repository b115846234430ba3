"""The tables of a whole report: the same from clean and from resumed runs."""

from __future__ import annotations

import pytest

from grpo_sweeps.report.build import build
from grpo_sweeps.tracking.local import LocalRecord, read_evals, read_groups
from tests.unit.report.test_rows import TABLES, cut_anew, load

pytestmark = pytest.mark.integration


def test_resumed_and_clean_runs_give_the_same_tables(write, tmp_path, undrawn):
    for root in ("clean", "resumed"):
        for R in (2, 4):
            write(tmp_path / root, "s", R, 0, steps=12)
    for run in (tmp_path / "resumed" / "s").iterdir():
        rest, evals = [r for r in read_groups(run) if r.step > 4], [e for e in read_evals(run) if e.step > 4]
        cut_anew(run, (2, 7))
        load(run)  # caches segments of which some will go
        record = LocalRecord(run)
        record.truncate_after(4)  # back to the checkpoint of step 4, in the middle of a segment
        record.log_groups(rest[:8])
        record.compact()
        record.log_groups(rest[8:])
        record.log_evals(evals)
        with open(run / "grams" / "journal.jsonl", "a") as file:
            file.write('{"step": 12, "prom')  # killed while it wrote
    tables = {}
    for root in ("clean", "resumed", "resumed"):
        out, _ = build("s", tmp_path / root, tmp_path / "out", ["report"])
        found = {name: (out / name).read_bytes() for name in TABLES}
        assert tables.setdefault("first", found) == found
