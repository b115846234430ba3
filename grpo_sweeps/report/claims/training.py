"""C6 of arXiv 2606.29238, sparsity over training: what the records hold of it."""

from __future__ import annotations

import pandas as pd

from grpo_sweeps.maths.intervals import Interval, paired_difference
from grpo_sweeps.publish.formats import with_interval
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.finding import Claim, Finding, nothing
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.updates import measured_updates

SAYS = "The sparsity of the gradient grows over training."
READINGS = {
    "update/changed_share": "weights that a step changes",
    "update/changed_share_float32": "in float32",
    "gradient/hoyer": "Hoyer sparsity of the gradient",
    "update/hoyer": "of the update",
}
NOT_RECORDED = (
    "Nothing else of that name is in these records: with analysis.update_every above 0 a run keeps the Hoyer sparsity "
    "of the gradient and the share of weights that a step changes, in the training precision and in float32."
)
RECORDED = (
    "Beside it the share of weights that a step changes, in the training precision and in the optimiser's float32, and "
    "the Hoyer sparsity (0: all entries of one size, 1: one alone is not 0) of the step's whole gradient before "
    "clipping and of the change of the weights. One can rise while another falls. Steps without a "
    "gradient move nothing and take no part in these."
)


def c6(arm: str, records: dict[int, pd.DataFrame], sweep: Sweep) -> Claim:
    """`records`: all groups by R."""
    findings = tuple(_c6_at(R, g, measured_updates(sweep, arm, R)) for R, g in records.items())
    measured = any(len(measured_updates(sweep, arm, R)) for R in records)
    remarks = (
        "The paper does not define sparsity, and one factor a group cannot make a dense score sparse. The share of "
        "all-equal groups, which have no gradient, is one thing it may mean; it is shown, not judged.",
        RECORDED if measured else NOT_RECORDED,
        "First and last third of each run's steps, paired by run; the interval is over runs, clustered by seed, and "
        "with one seed there is none.",
    )
    found = any(f.groups for f in findings)
    return Claim("C6", arm, SAYS, rules.UNDEFINED if found else rules.UNDECIDED, findings, remarks)


def thirds(records: pd.DataFrame, column: str) -> pd.DataFrame:
    """One row a run: mean of a column over the first and over the last third of its steps, and the seed."""
    rows = []
    for run, part in records.groupby("run"):
        low, high = int(part["step"].min()), int(part["step"].max()) + 1
        if high - low < 3:
            continue
        width = (high - low) // 3
        values = part[column].astype(float)
        first, last = values[part["step"] < low + width], values[part["step"] >= high - width]
        rows.append((run, part["seed"].iloc[0], float(first.mean()), float(last.mean())))
    return pd.DataFrame(rows, columns=["run", "seed", "first", "last"]).dropna()


def _c6_at(R: int, records: pd.DataFrame, metrics: pd.DataFrame) -> Finding:
    shares = thirds(records.copy().assign(equal=~records["mixed"].astype(bool)), "equal")
    if not len(shares):
        return nothing(R)
    change, measured = _words(shares, "all-equal groups")
    runs = f"{len(shares)} run{'s' if len(shares) > 1 else ''}"
    for name, words in READINGS.items():
        found = thirds(metrics, name) if name in metrics else shares.iloc[:0]
        if len(found):
            measured += f"; {_words(found, words)[1]}"
    return Finding(R, len(records), f"{measured} ({runs})", "no change 0", rules.UNDEFINED, change, "grows")


def _words(ends: pd.DataFrame, what: str) -> tuple[Interval, str]:
    change = paired_difference(ends["first"], ends["last"], ends["seed"])
    return change, (
        f"{what} {ends['first'].mean():.3f} in the first third, {ends['last'].mean():.3f} in the last, change "
        f"{with_interval(change.mean, change.low, change.high, 3)}"
    )
