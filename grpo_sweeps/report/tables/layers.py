"""Effective rank and share of gradient energy of each layer, kind of parameter and parameter, for each arm and R.

Means over the measured mixed groups of the runs that kept a Gram for each layer or parameter (`analysis.by`), with 95%
intervals clustered by prompt and by seed, as every other mean of the report. What a part's values are: `report.parts`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from grpo_sweeps.maths.intervals import Interval, mean_interval
from grpo_sweeps.report.measure.parts import Parts, run_parts
from grpo_sweeps.report.part_names import Part, order
from grpo_sweeps.report.read.query import Sweep

COLUMNS = [
    "R", "arm", "level", "layer", "kind", "name", "effective_rank", "ci_low", "ci_high", "energy_share",
    "energy_share_low", "energy_share_high", "norm_share", "groups", "groups_with_rank", "seeds",
]  # fmt: skip


def layer_table(sweep: Sweep) -> pd.DataFrame:
    """One row an arm, R and part, tidy (layers.csv); empty where no run kept Grams of parts.

    level: whole (all parameters, of the same groups, to compare with), layer, kind, parameter. ci_low and ci_high
    belong to the effective rank. `groups` are behind the shares; a part whose gradient is zero in a group (LoRA's A at
    the first step) has share 0 there and no rank, so that `groups_with_rank` may be fewer.
    """
    kept = sweep_parts(sweep)
    cell_of = {str(r.run): (str(r.arm), int(str(r.R))) for r in sweep.runs.itertuples(index=False)}
    seed_of = {str(r.run): int(str(r.seed)) for r in sweep.runs.itertuples(index=False)}
    rows = []
    for arm, R in sweep.cells:
        cell = [p for p in kept if cell_of[p.run] == (arm, R)]
        for part in sorted({part for p in cell for part in p.values}, key=order):
            rows.append({"R": R, "arm": arm, **part._asdict()} | _row(cell, part, seed_of))
    return pd.DataFrame(rows, columns=COLUMNS)


def _row(cell: Iterable[Parts], part: Part, seed_of: dict[str, int]) -> dict[str, object]:
    """Means and intervals of one part over the groups of all runs that have it."""
    having = [p for p in cell if part in p.values]
    values_3N = np.concatenate([p.values[part] for p in having], axis=1)
    prompts = np.concatenate([p.prompts for p in having])
    seeds = np.repeat([seed_of[p.run] for p in having], [len(p.prompts) for p in having])
    rank, energy, norm = (mean_interval(values_N, prompts, seeds) for values_N in values_3N)
    return {
        "effective_rank": rank.mean, "ci_low": rank.low, "ci_high": rank.high, "norm_share": norm.mean,
        **_share(energy), "groups": energy.n, "groups_with_rank": rank.n, "seeds": len(np.unique(seeds)),
    }  # fmt: skip


def _share(energy: Interval) -> dict[str, float]:
    return {"energy_share": energy.mean, "energy_share_low": energy.low, "energy_share_high": energy.high}


def sweep_parts(sweep: Sweep) -> list[Parts]:
    """The parts of all runs: as they were measured while reading, or else from the records."""
    if sweep.parts is not None:
        return sweep.parts
    found = []
    groups = sweep.groups[sweep.groups["run"].isin(sweep.by_part)]
    for run, index in groups.groupby("run").groups.items() if len(groups) else ():
        found += run_parts(str(run), sweep.kept_by(str(run)), [sweep.records[i] for i in index], sweep.dtype(str(run)))
    return found


def layer_remarks(sweep: Sweep) -> list[str]:
    """Sentences on what the per-layer picture lacks; none where no run kept Grams of parts: it was not asked for."""
    have: dict[str, set[str]] = {}
    for parts in sweep_parts(sweep):
        have.setdefault(parts.run, set()).add(parts.by)
    if not have:
        return []
    names = {str(r.run): str(r.name) for r in sweep.runs.itertuples(index=False)}
    without = [name for run, name in names.items() if run not in have]
    layers = [name for run, name in names.items() if have.get(run) == {"layer"}]
    found = []
    if without:
        found.append(f"Figure 5 is without {', '.join(without)}: no Grams of layers or parameters there.")
    if layers and len(layers) < len(have):
        found.append(
            f"Figure 5 shows {', '.join(layers)} by depth only: analysis.by=layer keeps no kinds of parameter."
        )
    return found
