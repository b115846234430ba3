"""What is known by layer, kind of parameter and parameter, for each arm and R: of the gradient, and of the updates.

Of the gradient: means over the measured mixed groups of the runs that kept a Gram for each layer or parameter
(`analysis.by`), with 95% intervals clustered by prompt and by seed, cut to what a value can take. What a part's values
are: `measure.parts`.

Of the updates: a run's steps are those that `analysis.update_every` measured and that had a gradient; where all rewards
of every group are equal nothing moves, and that is no small step. Means are over runs, with 95% intervals clustered by
seed; with one seed or two there is none. What a run's record holds of a step: `grpo_sweeps.types.UpdateRecord`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd

from grpo_sweeps.maths.intervals import POSITIVE, SHARE, mean_interval
from grpo_sweeps.publish.formats import number, with_interval
from grpo_sweeps.report.measure.parts import ALL, Part, Parts, order, parts_of, run_parts
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.tables.pooled import with_ends

COLUMNS = [
    "R", "arm", "level", "layer", "kind", "name", "effective_rank", "ci_low", "ci_high", "energy_share",
    "energy_share_low", "energy_share_high", "norm_share",
    *(f"{name}{end}" for name in ("correlation", "cosine") for end in ("", "_low", "_high")), "groups",
    "groups_with_rank", "seeds",
]  # fmt: skip
STEP_METRICS = {
    "changed_share": "update/changed_share",
    "changed_share_float32": "update/changed_share_float32",
    "gradient_hoyer": "gradient/hoyer",
    "update_hoyer": "update/hoyer",
    "relative_norm": "update/relative_norm",
}
PART_VALUES = (
    "energy_share", "effective_rank", "stable_rank", "rank_share", "hoyer", "changed_share", "changed_share_float32",
)  # fmt: skip
RANKS = (1.0, math.inf)  # what the effective and the stable rank of a part's matrices can be
SHOWN_STEPS = 5  # rows per arm and R in the page's table


def layer_table(sweep: Sweep) -> pd.DataFrame:
    """One row per arm, R and part, tidy (layers.csv); empty where no run kept Grams of parts.

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
            rows.append({"R": R, "arm": arm, **part._asdict()} | _row(cell, part, seed_of, R))
    return pd.DataFrame(rows, columns=COLUMNS)


def _row(cell: Iterable[Parts], part: Part, seed_of: dict[str, int], R: int) -> dict[str, object]:
    """Means and intervals of one part over the groups of all runs that have it."""
    having = [p for p in cell if part in p.values]
    values_5N = np.concatenate([p.values[part] for p in having], axis=1)
    prompts = np.concatenate([p.prompts for p in having])
    seeds = np.repeat([seed_of[p.run] for p in having], [len(p.prompts) for p in having])
    ranges = (1.0, float(R)), SHARE, POSITIVE, (-1.0, 1.0), SHARE
    rank, energy, norm, correlation, cosine = (
        mean_interval(values_N, prompts, seeds).within(one) for values_N, one in zip(values_5N, ranges, strict=True)
    )
    return {
        "effective_rank": rank.mean, "ci_low": rank.low, "ci_high": rank.high, "norm_share": norm.mean,
        **with_ends("energy_share", energy), **with_ends("correlation", correlation), **with_ends("cosine", cosine),
        "groups": energy.n, "groups_with_rank": rank.n,
        "seeds": len(np.unique(seeds)),
    }  # fmt: skip


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


def update_steps(sweep: Sweep) -> pd.DataFrame:
    """One row per arm, R and measured step (updates.csv): each metric's mean over runs with its interval."""
    rows = []
    for arm, R in sweep.cells:
        measured = measured_updates(sweep, arm, R)
        for step, part in measured.groupby("step"):
            row: dict[str, object] = {"arm": arm, "R": R, "step": int(str(step)), "runs": len(part)}
            for name, metric in STEP_METRICS.items():
                found = mean_interval(part.reindex(columns=[metric])[metric], part["seed"])
                row |= with_ends(name, found.within(POSITIVE if name == "relative_norm" else SHARE))
            rows.append(row)
    return pd.DataFrame(rows)


def measured_updates(sweep: Sweep, arm: str, R: int) -> pd.DataFrame:
    """The rows of `metrics` of an arm and R whose step was measured and moved the weights."""
    m = sweep.metrics
    if "update/norm" not in m:
        return m.iloc[:0]
    return m[(m["arm"] == arm) & (m["R"] == R) & (m["update/norm"] > 0)]


def update_parts(sweep: Sweep) -> pd.DataFrame:
    """One row per arm, R and part (update_layers.csv), the levels and names as in layers.csv.

    energy_share   of the sum of the squared changes of all weights
    effective_rank, stable_rank, rank_share   means over the part's matrices; rank_share: effective rank over the
                   smaller side
    hoyer, changed_share, changed_share_float32   of the part's weights together
    """
    rows = []
    for arm, R in sweep.cells:
        u = sweep.updates
        cell = u[(u["arm"] == arm) & (u["R"] == R)] if len(u) else u
        if not len(cell) or not (cell["sq_norm"] > 0).any():
            continue
        values = _by_run(cell)
        for part in sorted(set(values.index.get_level_values("part")), key=order):
            found = values.xs(part, level="part")
            row = {"R": R, "arm": arm, **part._asdict()}
            for name in PART_VALUES:
                ends = mean_interval(found[name], found["seed"])
                row |= with_ends(name, ends.within(RANKS if name.endswith("_rank") else SHARE))
            rows.append(row | {"steps": int(found["steps"].max()), "runs": len(found)})
    return pd.DataFrame(rows)


def _by_run(cell: pd.DataFrame) -> pd.DataFrame:
    """PART_VALUES of each run and part, means over the run's measured steps; index run, part."""
    frame = cell.assign(  # a step whose total is 0 moved nothing
        n=[math.prod(shape) for shape in cell["shape"]],
        side=[min(shape, default=0) for shape in cell["shape"]],
        total=cell.groupby(["run", "step"])["sq_norm"].transform("sum"),
    )
    frame = frame[frame["total"] > 0]
    frame["rank_share"] = frame["effective_rank"] / frame["side"]
    names = list(dict.fromkeys(frame["name"]))
    part_of = dict(zip(names, parts_of(names), strict=True))
    levels = {
        "whole": lambda p: Part("whole", ALL, ALL), "layer": lambda p: Part("layer", p.layer, ALL),
        "kind": lambda p: Part("kind", ALL, p.kind), "parameter": lambda p: p,
    }  # fmt: skip
    found = []
    for coarser in levels.values():
        keys = {name: coarser(part) for name, part in part_of.items()}
        found.append(_of_steps(frame.assign(part=[keys[name] for name in frame["name"]])))
    per_step = pd.concat(found, ignore_index=True)
    by_run = per_step.groupby(["run", "part"], sort=False)
    return by_run[list(PART_VALUES)].mean().assign(seed=by_run["seed"].first(), steps=by_run["step"].nunique())


def _of_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per run, step and part: sums over the part's parameters, and what follows from them."""
    groups = frame.groupby(["run", "seed", "step", "part"], sort=False)
    out = groups[["sq_norm", "l1", "n", "changed", "changed_float32"]].sum()
    ranks = groups[["effective_rank", "stable_rank", "rank_share"]].mean()
    total, n = groups["total"].first().to_numpy(float), out["n"].to_numpy(float)
    sq_norm, l1 = out["sq_norm"].to_numpy(float), out["l1"].to_numpy(float)
    moved = sq_norm > 0
    ratio = np.divide(l1, np.sqrt(sq_norm), out=np.full(len(n), np.nan), where=moved)
    root = np.sqrt(n)
    out["energy_share"] = sq_norm / total
    out["hoyer"] = np.divide(root - ratio, root - 1.0, out=np.full(len(n), np.nan), where=n > 1)
    out["changed_share"], out["changed_share_float32"] = out["changed"] / n, out["changed_float32"] / n
    return out.join(ranks).reset_index()


def shown_steps(table: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """The page's table from `update_steps`: a few steps of each arm and R, the first and the last among them."""
    header = ["R", "step", "weights changed", "in float32", "Hoyer: gradient", "Hoyer: update", "relative norm"]
    arms = len(table) > 0 and table["arm"].nunique() > 1
    rows = []
    for (arm, R), part in table.groupby(["arm", "R"], sort=False) if len(table) else ():
        chosen = sorted({round(i) for i in np.linspace(0, len(part) - 1, SHOWN_STEPS)})
        for row in part.iloc[chosen].to_dict("records"):
            names = ("changed_share", "changed_share_float32", "gradient_hoyer", "update_hoyer")
            cells = [with_interval(row[n], row[f"{n}_low"], row[f"{n}_high"], 3) for n in names]
            size = f"{row['relative_norm']:.1e}" if np.isfinite(row["relative_norm"]) else number(None)
            rows.append([*([str(arm)] if arms else []), str(R), str(row["step"]), *cells, size])
    return (["arm", *header] if arms else header), rows
