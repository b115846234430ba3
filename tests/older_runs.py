"""A run's folder as older versions wrote it: no word of which rollouts have the same tokens, cut spectra logged."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from grpo_sweeps.spectra.records import spectral_metrics
from grpo_sweeps.tracking.local import LocalRecord
from grpo_sweeps.tracking.status import RunStatus, write_status
from grpo_sweeps.types import GroupRecord
from tests.unit.test_real_grams import GROUPS, cut_effective_rank, record

STEPS = sorted({g["step"] for g in GROUPS})
LAST = STEPS[-1] + 1  # without a mixed group
DTYPE = "bfloat16"


def groups_of(step: int) -> list[GroupRecord]:
    return [record(g) for g in GROUPS if g["step"] == step]


def right_values(step: int) -> dict[str, float]:
    return spectral_metrics(groups_of(step), dtype=DTYPE)


def logged_values(step: int) -> dict[str, float]:
    """What was logged: the effective rank of the cut spectra."""
    cut = float(np.mean([cut_effective_rank(g) for g in GROUPS if g["step"] == step]))
    return right_values(step) | {"spectral/effective_rank": cut}


def older_run(run: Path, form: str = "parquet", state: str = "finished", **status: Any) -> Path:
    """form: `parquet` for a run that ended, `journal` for one that was killed before a checkpoint."""
    local = LocalRecord(run)
    for step in STEPS:
        local.log_metrics(step, {"reward": 0.125 * step, "step_time": 2.0, **logged_values(step)})
        local.log_groups(groups_of(step))
        local.log_metrics(step, {"eval/accuracy": 0.5})
    local.log_metrics(LAST, {"reward": 0.0, "step_time": 2.0, "spectral/groups": 0.0, "scores/groups": 0.0})
    if form == "parquet":
        local.close()
    forget_same_as(run)
    (run / "config.yaml").write_text(f"R: 8\nseed: 0\nmodel: {{dtype: {DTYPE}}}\n")
    fields = dict(
        identity=run.name, name="R=8 seed=0", sweep=run.parent.name, step=LAST, total=LAST, host="elsewhere", pid=1,
        heartbeat=time.time(), started=1_700_000_000.0, ended=1_700_000_100.0, notes=["a note of its own"],
    )  # fmt: skip
    write_status(run, RunStatus(state, **{**fields, **status}))  # type: ignore[arg-type]
    return run


def forget_same_as(run: Path) -> None:
    """Take the field out of every record of a group."""
    for path in (run / "grams").glob("*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.drop_columns(["same_as"]), path)
    journal = run / "grams" / "journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    for line in lines:
        del line["same_as"]
    if lines:
        journal.write_text("".join(json.dumps(line) + "\n" for line in lines))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, the run's lock aside."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}
