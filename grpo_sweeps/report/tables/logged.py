"""What runs log by step, for each arm and R: how training went, and the dtype beside float32.

How training went: reward, length, entropy, cut share, silent groups, gradient norm. A run's value in a window of steps
is the mean over the window's steps; the table has the mean over runs, with its 95% interval clustered by seed (none
with one seed or two), cut to what the quantity can take. Silent groups have equal rewards, so that under a group
baseline they teach nothing: all right where these are 1 or more, all wrong where they are 0 or less, and equal
otherwise between the two. They are counted from the groups' records, and taken from the logged shares of a step that
has none.

The dtype beside float32 (`analysis.compare_float32`) is a table of its own: it changes no value and widens no verdict.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from grpo_sweeps.maths.intervals import ANY, POSITIVE, SHARE, mean_interval
from grpo_sweeps.publish.formats import with_interval
from grpo_sweeps.publish.page import Section
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.tables.pooled import with_ends

METRICS = {
    "reward": "reward",
    "mean_length": "completions/mean_length",
    "entropy": "entropy",
    "cut_share": "completions/clipped_ratio",
    "grad_norm": "grad_norm",
    "snr": "gradient/snr",
    "noise_scale": "gradient/noise_scale",
}
SILENT = ("all_right", "all_wrong", "equal_otherwise")
LOGGED_SILENT = ("groups/all_right", "groups/all_wrong", "frac_reward_zero_std")  # the last: of all three together
RANGES = {"mean_length": POSITIVE, "entropy": POSITIVE, "cut_share": SHARE, "grad_norm": POSITIVE}
RANGES |= dict.fromkeys(SILENT, SHARE)
"""What a value can take; a reward, and estimates that are unbiased, can be any number."""
VALUES = (*METRICS, *SILENT)
WINDOWS = 50  # at most, of equal width
COMPARED = ("effective_rank", "participation_ratio", "top1_fraction")
ENDS = ("", "_low", "_high", "_largest")
BY_K = ("groups", "value", "effective_rank", "effective_rank_largest")  # what a run logs by k
FLOAT32_COLUMNS = [
    "run",
    "arm",
    "R",
    "seed",
    "dtype",
    "groups",
    "entry",
    *(f"{q}{end}" for q in COMPARED for end in ENDS),
]


def curve_table(sweep: Sweep) -> pd.DataFrame:
    """One row per arm, R and window of steps (curves.csv).

    step is the mean of the window's steps, first_step and last_step its ends; runs counts the runs with a step in it.
    Each of `VALUES` has its `_low` and `_high`; NaN where no run has it.
    """
    rows: list[dict[str, object]] = []
    for arm, R in sweep.cells:
        steps = training_steps(sweep, arm, R)
        if not len(steps):
            continue
        width = int(np.ceil((steps["step"].max() + 1) / WINDOWS))
        for _, part in steps.groupby(steps["step"] // width):
            runs = part.groupby("run")[list(VALUES)].mean()
            seeds = part.groupby("run")["seed"].first()
            row: dict[str, object] = {
                "arm": arm, "R": R, "step": part["step"].mean(), "first_step": int(part["step"].min()),
                "last_step": int(part["step"].max()), "runs": len(runs),
            }  # fmt: skip
            for name in VALUES:
                row |= with_ends(name, mean_interval(runs[name], seeds).within(RANGES.get(name, ANY)))
            rows.append(row)
    ends = [f"{name}{end}" for name in VALUES for end in ("", "_low", "_high")]
    return pd.DataFrame(rows, columns=["arm", "R", "step", "first_step", "last_step", "runs", *ends])


def training_steps(sweep: Sweep, arm: str, R: int) -> pd.DataFrame:
    """run, seed, step and `VALUES` of each step of an arm and R, as recorded; what is not a finite number is NaN."""
    m, g = (frame[(frame["arm"] == arm) & (frame["R"] == R)] for frame in (sweep.metrics, sweep.groups))
    keys = ["run", "seed", "step"]
    logged = m.reindex(columns=[*keys, *METRICS.values()]).set_axis([*keys, *METRICS], axis=1)
    logged = logged[logged[list(METRICS)].notna().any(axis=1)]  # an evaluation after the last step is none of training
    silent, reward = ~g["mixed"].astype(bool), g["reward_mean"].astype(float)
    right, wrong = silent & (reward >= 1), silent & (reward <= 0)
    kinds = dict(zip(SILENT, (right, wrong, silent & ~right & ~wrong), strict=True))
    shares = g[keys].assign(**{name: kind.astype(float) for name, kind in kinds.items()}).groupby(keys).mean()
    steps = logged.merge(shares.reset_index(), on=keys, how="outer").sort_values(keys)
    steps = steps.merge(_logged_silent(m, keys), on=keys, how="left")
    for name in SILENT:
        steps[name] = steps[name].astype(float).fillna(steps[f"{name}_logged"])
    values = steps[list(VALUES)].astype(float)
    return steps[keys].assign(**values.where(np.isfinite(values)))


def _logged_silent(metrics: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """keys and `SILENT` with the ending _logged: the shares as runs log them, of all silent groups and of two kinds."""
    logged = metrics.reindex(columns=[*keys, *LOGGED_SILENT])
    right, wrong, every = (logged[name].astype(float) for name in LOGGED_SILENT)
    otherwise = (every - right - wrong).round(9).clip(lower=0.0)  # a difference of rounded shares may lie around 0
    columns = dict(zip(SILENT, (right, wrong, otherwise), strict=True))
    return logged[keys].assign(**{f"{name}_logged": column for name, column in columns.items()})


def float32_table(sweep: Sweep) -> pd.DataFrame:
    """One row per run that compared its dtype with float32: relative differences of the spectra, with intervals."""
    metrics = sweep.metrics
    if "float32/groups" not in metrics:
        return pd.DataFrame(columns=FLOAT32_COLUMNS)
    rows = metrics[metrics["float32/groups"].notna()].copy()
    rows["dtype"] = [sweep.dtype(str(run)) for run in rows["run"]]
    named = rows.rename(columns={name: name.removeprefix("float32/") for name in rows.columns})
    return named.reindex(columns=FLOAT32_COLUMNS).reset_index(drop=True)


def float32_by_k(sweep: Sweep) -> pd.DataFrame:
    """One row per run that compared its dtype with float32 and number k of right rollouts."""
    metrics, rows = sweep.metrics, []
    if "float32/groups" in metrics:
        for row in metrics[metrics["float32/groups"].notna()].to_dict("records"):
            head = {key: row[key] for key in ("run", "arm", "R", "seed")} | {"dtype": sweep.dtype(str(row["run"]))}
            for k in range(int(row["R"]) + 1):
                found = {name: row.get(f"float32/k{k}/{name}", float("nan")) for name in BY_K}
                if found["groups"] == found["groups"]:
                    rows.append(head | {"k": k, **found})
    return pd.DataFrame(rows, columns=["run", "arm", "R", "seed", "dtype", "k", *BY_K])


def float32_section(table: pd.DataFrame, by_k: pd.DataFrame) -> list[Section]:
    """The tables on the page; nothing where no run has measured them."""
    if not len(table):
        return []
    header = ("R", "seed", "dtype", "groups", *(q.replace("_", " ") for q in COMPARED), "largest entry")
    rows = []
    for row in table.to_dict("records"):
        percent = {name: 100 * float(row[name]) for name in FLOAT32_COLUMNS if name.startswith(COMPARED)}
        cells = [with_interval(percent[q], percent[f"{q}_low"], percent[f"{q}_high"]) for q in COMPARED]
        start = (str(row["R"]), str(row["seed"]), str(row["dtype"]), f"{row['groups']:.0f}")
        rows.append((*start, *cells, f"{row['entry']:.3f}"))
    worst = 100 * float(table[[f"{q}_largest" for q in COMPARED]].max().max())
    before = (
        "The spectra of the same rollouts with the weights in the training dtype and in float32: mean relative "
        "difference over groups in percent, with its 95% interval; the largest of all is "
        f"{worst:.2f}%. The last column is the mean over groups of the largest difference of an entry of K over "
        "sqrt(K_ii K_jj): entries differ by far more than spectra do.",
    )
    after = ("This is a measurement of its own: it changes no value, merges no rows and widens no verdict.",)
    section = Section("float32", "The dtype beside float32", before, header, tuple(rows), after, ("float32.csv",))
    return [section, *_float32_by_k_section(by_k)]


def _float32_by_k_section(table: pd.DataFrame) -> list[Section]:
    if not len(table):
        return []
    header = ("R", "seed", "k", "groups", "effective rank in float32", "difference", "largest difference")
    rows = [
        (str(row["R"]), str(row["seed"]), str(row["k"]), f"{row['groups']:.0f}", f"{row['value']:.3f}",
         f"{100 * row['effective_rank']:.3f}%", f"{100 * row['effective_rank_largest']:.3f}%")
        for row in table.to_dict("records")
    ]  # fmt: skip
    before = (
        "The effective rank of the same groups by the number k of right rollouts: its mean in float32, and by how much "
        "the training dtype's differs, on average and at most.",
    )
    return [
        Section("float32-by-k", "The dtype by k", before, header, tuple(rows), files=("float32_by_k.csv",)),
    ]
