"""C6 of arXiv 2606.29238, sparsity over training: what the records hold of it."""

from __future__ import annotations

import pandas as pd

from grpo_sweeps.intervals import paired_difference
from grpo_sweeps.report import rules
from grpo_sweeps.report.finding import Claim, Finding, nothing
from grpo_sweeps.report.formats import with_interval

SAYS = "The sparsity of the gradient grows over training."


def c6(arm: str, records: dict[int, pd.DataFrame]) -> Claim:
    findings = tuple(_c6_at(R, g) for R, g in records.items())
    remarks = (
        "The paper does not define sparsity, and one factor a group cannot make a dense score sparse. The share of "
        "all-equal groups, which have no gradient, is one thing it may mean; it is shown, not judged.",
        "Nothing else of that name is in these records. Hoyer sparsity of the gradient and the share of weights that a "
        "step leaves unchanged (in the training precision and in float32) would have to be recorded as runs are made.",
        "First and last third of each run's steps, paired by run; the interval is over runs, clustered by seed, and "
        "with one seed there is none.",
    )
    found = any(f.groups for f in findings)
    return Claim("C6", arm, SAYS, rules.UNDEFINED if found else rules.UNDECIDED, findings, remarks)


def thirds(records: pd.DataFrame) -> pd.DataFrame:
    """One row a run: share of all-equal groups in the first and in the last third of its steps, and the seed."""
    rows = []
    for run, part in records.groupby("run"):
        low, high = int(part["step"].min()), int(part["step"].max()) + 1
        if high - low < 3:
            continue
        width = (high - low) // 3
        equal = ~part["mixed"].astype(bool)
        first, last = equal[part["step"] < low + width], equal[part["step"] >= high - width]
        rows.append((run, part["seed"].iloc[0], float(first.mean()), float(last.mean())))
    return pd.DataFrame(rows, columns=["run", "seed", "first", "last"]).dropna()


def _c6_at(R: int, records: pd.DataFrame) -> Finding:
    shares = thirds(records)
    if not len(shares):
        return nothing(R)
    change = paired_difference(shares["first"], shares["last"], shares["seed"])
    measured = (
        f"all-equal groups {shares['first'].mean():.3f} in the first third, {shares['last'].mean():.3f} in the last; "
        f"change {with_interval(change.mean, change.low, change.high, 3)} over {len(shares)} "
        f"run{'s' if len(shares) > 1 else ''}"
    )
    return Finding(R, len(records), measured, "no change 0", rules.UNDEFINED, change, "grows")
