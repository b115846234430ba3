"""The dtype's table of the report: the runs' own numbers, in a section of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd

from grpo_sweeps.report.tables.logged import (
    COMPARED,
    ENDS,
    FLOAT32_COLUMNS,
    float32_by_k,
    float32_section,
    float32_table,
)

RUN = {"run": "a", "arm": "all", "R": 8, "seed": 0}


def sweep_of(rows: list[dict[str, object]]) -> SimpleNamespace:
    return SimpleNamespace(metrics=pd.DataFrame(rows), dtype=lambda run: {"a": "bfloat16"}[run])


def test_one_row_per_run_that_compared() -> None:
    values = {f"float32/{q}{end}": 0.01 * i for i, q in enumerate(COMPARED) for end in ENDS}
    compared = {**RUN, "step": 0, "float32/groups": 16.0, "float32/entry": 0.039, **values}
    table = float32_table(sweep_of([compared, {**RUN, "step": 1}]))
    assert list(table.columns) == FLOAT32_COLUMNS and len(table) == 1
    assert table.loc[0, "participation_ratio_high"] == 0.01 and table.loc[0, "dtype"] == "bfloat16"
    (section,) = float32_section(table, float32_by_k(sweep_of([compared])))
    shown = ("0.00 [0.00, 0.00]", "1.00 [1.00, 1.00]", "2.00 [2.00, 2.00]")
    assert section.rows == (("8", "0", "bfloat16", "16", *shown, "0.039"),)
    assert "largest of all is 2.00%" in section.before[0] and section.files == ("float32.csv",)


def test_nothing_without_such_a_run() -> None:
    table = float32_table(sweep_of([{**RUN, "step": 0}]))
    assert len(table) == 0 and float32_section(table, float32_by_k(sweep_of([{**RUN, "step": 0}]))) == []


def test_one_row_per_k_that_occurs() -> None:
    values = {"float32/k3/groups": 4.0, "float32/k3/value": 7.25, "float32/k3/effective_rank": -0.001}
    compared = {**RUN, "float32/groups": 5.0, "float32/k1/groups": 1.0, "float32/k3/effective_rank_largest": 0.02}
    table = float32_by_k(sweep_of([{**compared, **values, "step": 0}, {**RUN, "step": 1}]))
    assert list(table["k"]) == [1, 3] and table.loc[1, "effective_rank_largest"] == 0.02
    assert (table["dtype"] == "bfloat16").all() and list(table["groups"]) == [1.0, 4.0]
    section = float32_section(float32_table(sweep_of([{**compared, **values, "step": 0}])), table)[1]
    assert section.rows[1] == ("8", "0", "3", "4", "7.250", "-0.100%", "2.000%")
    assert section.files == ("float32_by_k.csv",)
