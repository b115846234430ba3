"""What each estimator would have given on a run's groups (`measure.alternatives`), kept beside a run of many groups."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grpo_sweeps.estimators.declared import DISTINCT, FROM_GRAM
from grpo_sweeps.maths import ustatistics
from grpo_sweeps.report.measure import alternatives as measure
from grpo_sweeps.report.measure import rows
from grpo_sweeps.report.measure.alternatives import QUANTITIES, Alternative, StepGroups
from grpo_sweeps.report.read.kept import Kept, code_of, signature, worth_keeping
from grpo_sweeps.spectra import equal, floor, ranks
from grpo_sweeps.tracking.local import record_tables
from grpo_sweeps.types import Array

FILE = "estimators.parquet"
FUNCTIONS = tuple(sys.modules[name] for name in sorted({one.function.__module__ for one in (*DISTINCT, *FROM_GRAM)}))
MADE_BY = (measure, rows, ustatistics, ranks, equal, floor, sys.modules[DISTINCT[0].__module__], *FUNCTIONS)


@dataclass(frozen=True)
class RunValues:
    """What one run says: of its N groups prompt and use, of each alternative its values by quantity (None where it
    refuses the rewards) and its factor. The Grams are gone: a sweep's are larger than memory."""

    seed: int
    prompt_N: NDArray[np.object_]
    usable_N: NDArray[np.bool_]
    values: dict[str, dict[str, Array] | None]
    factors: dict[str, float]


def run_values(run_dir: Path, seed: int, R: int, dtype: str | None) -> RunValues:
    """The values of a run of group size R; dtype: of its model. Raises RecordError where its groups cannot be read."""
    kept, files = Kept(run_dir), _files(run_dir)
    key = {"files": files, "R": R, "dtype": dtype, "code": code_of(MADE_BY)}
    if found := kept.read(FILE, key):
        return _from_table(seed, *found)
    made = _made(run_dir, seed, R, dtype)
    if worth_keeping(files, _files(run_dir)):
        table, beside = _to_table(made)
        kept.write(FILE, key, table, **beside)
    return made


def _files(run_dir: Path) -> list[tuple[str, int, int]]:
    return signature((run_dir / "grams").glob("*"))


def _made(run_dir: Path, seed: int, R: int, dtype: str | None) -> RunValues:
    groups = measure.step_groups(record_tables(str(run_dir))["grams"]().drop_columns(["gram_by"]), R, dtype)
    every = measure.alternatives()
    values = {one.name: _values(one, groups) for one in every}
    factors = {one.name: measure.mean_factor(one, groups) for one in every}
    return RunValues(seed, groups.prompt_N, groups.usable_N, values, factors)


def _values(one: Alternative, groups: StepGroups) -> dict[str, Array] | None:
    try:
        return measure.values_of(one, groups)
    except ValueError:
        return None


def _to_table(run: RunValues) -> tuple[pa.Table, dict[str, Any]]:
    """What `_from_table` reads: a column per alternative and quantity; factors and refusals beside it."""
    columns: dict[str, Any] = {"prompt": pa.array(run.prompt_N.tolist()), "usable": run.usable_N}
    for name, values in run.values.items():
        columns |= {f"{quantity} of {name}": pa.array(value) for quantity, value in (values or {}).items()}
    return pa.table(columns), {"factors": run.factors, "refused": [n for n, v in run.values.items() if v is None]}


def _from_table(seed: int, table: pa.Table, beside: Mapping[str, Any]) -> RunValues:
    def of(name: str) -> dict[str, Array] | None:
        if name in beside["refused"]:
            return None
        return {quantity: table[f"{quantity} of {name}"].to_numpy() for quantity in QUANTITIES}

    prompts = np.array(table["prompt"].to_pylist(), dtype=object)
    values = {name: of(name) for name in beside["factors"]}
    return RunValues(seed, prompts, table["usable"].to_numpy(), values, dict(beside["factors"]))
