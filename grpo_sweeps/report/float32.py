"""What a run measured of its training dtype against float32 (`analysis.compare_float32`): a table of its own.

It stands beside the values and changes none: no verdict is widened by it.
"""

from __future__ import annotations

import pandas as pd

from grpo_sweeps.publish.formats import with_interval
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.section import Section

QUANTITIES = ("effective_rank", "participation_ratio", "top1_fraction")
ENDS = ("", "_low", "_high", "_largest")
COLUMNS = ["run", "arm", "R", "seed", "dtype", "groups", "entry", *(f"{q}{end}" for q in QUANTITIES for end in ENDS)]


def float32_table(sweep: Sweep) -> pd.DataFrame:
    """One row per run that compared its dtype with float32: relative differences of the spectra, with intervals."""
    metrics = sweep.metrics
    if "float32/groups" not in metrics:
        return pd.DataFrame(columns=COLUMNS)
    rows = metrics[metrics["float32/groups"].notna()].copy()
    rows["dtype"] = [sweep.dtype(str(run)) for run in rows["run"]]
    named = rows.rename(columns={name: name.removeprefix("float32/") for name in rows.columns})
    return named.reindex(columns=COLUMNS).reset_index(drop=True)


def float32_section(table: pd.DataFrame) -> list[Section]:
    """The table on the page; nothing where no run has measured it."""
    if not len(table):
        return []
    header = ("R", "seed", "dtype", "groups", *(q.replace("_", " ") for q in QUANTITIES), "largest entry")
    rows = []
    for row in table.to_dict("records"):
        percent = {name: 100 * float(row[name]) for name in COLUMNS if name.startswith(QUANTITIES)}
        cells = [with_interval(percent[q], percent[f"{q}_low"], percent[f"{q}_high"]) for q in QUANTITIES]
        start = (str(row["R"]), str(row["seed"]), str(row["dtype"]), f"{row['groups']:.0f}")
        rows.append((*start, *cells, f"{row['entry']:.3f}"))
    worst = 100 * float(table[[f"{q}_largest" for q in QUANTITIES]].max().max())
    before = (
        "The spectra of the same rollouts with the weights in the training dtype and in float32: mean relative "
        "difference over groups in percent, with its 95% interval; the largest of all is "
        f"{worst:.2f}%. The last column is the mean over groups of the largest difference of an entry of K over "
        "sqrt(K_ii K_jj): entries differ by far more than spectra do.",
    )
    after = ("This is a measurement of its own: it changes no value, merges no rows and widens no verdict.",)
    section = Section("float32", "The dtype beside float32", before, header, tuple(rows), after, ("float32.csv",))
    return [section]
