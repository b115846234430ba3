"""One Gram, many estimators: what each would have given on the same groups (estimators.csv and its section).

Means over the groups of an arm and R with 95% intervals clustered by prompt and by seed; what a group's values are:
`measure.alternatives`. The groups were drawn by the policy that the arm trained, with the arm's own estimator: the
table compares gradients on them, not trainings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grpo_sweeps.estimators import DECLARATIONS
from grpo_sweeps.maths.intervals import Clusters, mean_over
from grpo_sweeps.publish.formats import markdown, markdown_text, number, three_digits, with_interval
from grpo_sweeps.publish.page import Section
from grpo_sweeps.report.measure.alternatives import (
    NOT_HERE,
    QUANTITIES,
    alternatives,
    why_no_factor,
    why_no_variance,
)
from grpo_sweeps.report.measure.spectral import range_of
from grpo_sweeps.report.read.alternatives import RunValues, run_values
from grpo_sweeps.report.read.query import Sweep, processors
from grpo_sweeps.report.tables.pooled import with_ends
from grpo_sweeps.text import count
from grpo_sweeps.tracking.status import RecordError
from grpo_sweeps.types import Array

NAME = "estimators"
COLUMNS = [
    "arm", "R", "estimator", "advantages", "trained_with", "same_as", "source", "groups", "prompts",
    *(f"{name}{end}" for name in QUANTITIES for end in ("", "_low", "_high")), "variance_groups", "factor",
    "no_variance", "no_factor",
]  # fmt: skip
ADVANTAGES = {
    "none": "the reward, no baseline", "group mean": "group mean, no std", "std": "group mean over std",
    "group mean by length": "group mean by length, no std", "step mean and std": "step mean over the step's std",
    "std of the step": "group mean over the step's std", "Beta density": "group mean over a Beta density",
}  # fmt: skip
"""What is subtracted and by what is divided, for readers; other kinds say it themselves."""
CHOSEN = "the groups were chosen by their rewards (objective.resample)"
UNSUITED = "its rewards are not from 0 to 1"
WORDS = (
    "The Gram K of a group's scores and its rewards say what any estimator that only changes the weights would have "
    "given on that group: g = sum of w psi over its R rollouts, w = A/R, or A/(R length) where the loss divides by the "
    "length. The groups are those of the runs, whatever they were trained with.",
    "Effective rank of diag(w) K diag(w), norm of g and its cosine with the group mean's: means over the mixed groups "
    "whose scores were measured. Variance: the trace of the covariance of g for one prompt, from U-statistics, groups "
    "of equal rewards counted as the zeros they are. Bias factor: c in E g = c grad J. Norm and variance are in each "
    "estimator's own unit; cosine and rank know no scale.",
)
NOTES = (
    "CISPO (arXiv 2506.13585) and GMPO (arXiv 2507.20673) are objectives of their own from the second update of a "
    "batch on; at the first their ratios are 1, and their gradients are these, up to one factor for the step.",
    "score_norm takes each baseline from the other rollouts' norms; salt is our reading of arXiv 2606.05800, with rank "
    "1 and strength 1; bnpo is the Beta-normalised advantage of arXiv 2506.02864, not TRL's loss of that name.",
)


def estimator_table(sweep: Sweep, progress: Callable[[str], None] = lambda sentence: None) -> pd.DataFrame:
    """One row per arm, R and estimator, tidy; none for an arm and R without a mixed group with a Gram of scores.

    progress: is given how far it is."""
    rows: list[dict[str, object]] = []
    for arm, R in sweep.cells:
        runs = list(_values_of_runs(sweep, arm, R, progress)) if R > 1 else []
        if any(run.usable_N.any() for run in runs):
            rows += _rows(sweep, arm, R, runs)
    return pd.DataFrame(rows, columns=COLUMNS)


def _values_of_runs(sweep: Sweep, arm: str, R: int, progress: Callable[[str], None]) -> Iterator[RunValues]:
    """Of each run of an arm and R that has records, one at a time."""
    runs = sweep.runs[(sweep.runs["arm"] == arm) & (sweep.runs["R"] == R)]
    runs = runs[runs["run"].isin(sweep.groups["run"].unique() if len(sweep.groups) else [])]

    def of(row: Any) -> RunValues | str:
        try:
            return run_values(Path(str(row.path)), int(row.seed), R, sweep.dtype(str(row.run)))
        except RecordError as error:
            return f"The table of estimators is without run {row.run} ({row.name}): {error}"

    with ThreadPoolExecutor(max_workers=processors()) as pool:  # numpy leaves the interpreter to others while it works
        for done, found in enumerate(pool.map(of, runs.itertuples(index=False)), start=1):
            progress(f"estimators of {done} of {count(len(runs))} of R={R}")
            if isinstance(found, str):
                sweep.notes.append(found)
            else:
                yield found


def _rows(sweep: Sweep, arm: str, R: int, runs: list[RunValues]) -> list[dict[str, object]]:
    of_arm = sweep.runs[(sweep.runs["arm"] == arm) & (sweep.runs["R"] == R)]
    trained = {_trained(str(r.estimator), str(r.aggregation)) for r in of_arm.itertuples(index=False)}
    chosen = any(_resampled(sweep.configs[str(run)]) for run in of_arm["run"])
    prompts = np.concatenate([run.prompt_N for run in runs])
    by = Clusters(pd.factorize(prompts)[0], np.repeat([run.seed for run in runs], [len(run.prompt_N) for run in runs]))
    usable = np.concatenate([run.usable_N for run in runs])
    common = {"arm": arm, "R": R, "groups": int(usable.sum()), "prompts": len(set(prompts[usable]))}
    rows: list[dict[str, object]] = []
    for one in alternatives():
        row: dict[str, object] = common | {
            "estimator": one.name, "advantages": ADVANTAGES.get(one.declared.kind, one.declared.kind),
            "trained_with": (one.declared.name, one.by_length) in trained,
            "same_as": ", ".join(one.same), "source": one.declared.source, "no_factor": why_no_factor(one),
            "factor": float(np.mean([run.factors[one.name] for run in runs])),
        }  # fmt: skip
        found = [run.values[one.name] for run in runs]
        rows.append(row | _pooled(found, by, CHOSEN if chosen else why_no_variance(one, R), R))
    empty = dict.fromkeys((f"{name}{end}" for name in QUANTITIES for end in ("", "_low", "_high")), math.nan)
    for name, why in NOT_HERE.items():
        rows.append(
            common | empty | {
                "estimator": name, "advantages": "", "trained_with": False, "same_as": "", "source": "",
                "variance_groups": 0, "factor": math.nan, "no_variance": why, "no_factor": why,
            }
        )  # fmt: skip
    return rows


def _pooled(found: list[dict[str, Array] | None], by: Clusters, no_variance: str, R: int) -> dict[str, object]:
    """The means of one row from each run's values; none, and why, where the estimator refuses the rewards of one."""
    parts = [part for part in found if part is not None]
    no_variance = no_variance if len(parts) == len(found) else UNSUITED
    pooled: dict[str, object] = {"no_variance": no_variance}
    count = 0
    for name in QUANTITIES:
        each = np.full(len(by), np.nan)
        if len(parts) == len(found) and not (name == "variance" and no_variance):
            each = np.concatenate([part[name] for part in parts])
        count = int(np.isfinite(each).sum()) if name == "variance" else count
        ends = mean_over(each, by).within((-1.0, 1.0) if name == "cosine" else range_of(name, R))
        pooled |= with_ends(name, ends)
    return pooled | {"variance_groups": count}


def _trained(path: str, aggregation: str) -> tuple[str, bool]:
    """The estimator whose advantages a run had, by name, and whether its loss divided them by lengths."""
    name = path.rpartition(".")[2]
    known = DECLARATIONS.get(name)
    return (known.advantages_of or name if known else name), aggregation == "length"


def _resampled(config: Mapping[str, Any]) -> bool:
    objective = config.get("objective")
    return isinstance(objective, Mapping) and bool(objective.get("resample"))


def shown(table: pd.DataFrame) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """The table as people read it: header, text cells, and what the letters in empty cells mean. Several arms are
    named."""
    header = ("R", "estimator", "effective rank", "norm", "cosine", "variance", "bias factor",
              "the same here")  # fmt: skip
    arms = len(table) > 0 and table["arm"].nunique() > 1
    reasons = [why for why in dict.fromkeys(table[["no_variance", "no_factor"]].to_numpy().ravel().tolist()) if why]
    letter = dict(zip(reasons, "abcdefgh", strict=False)) | {"": ""}
    rows = []
    for row in table.to_dict("records"):
        rank, norm, cosine, variance = (
            (row[name], row[f"{name}_low"], row[f"{name}_high"]) for name in QUANTITIES
        )  # fmt: skip
        cells = (
            str(row["R"]), _named(row),
            with_interval(*rank), three_digits(*norm), with_interval(*cosine, digits=3),
            f"{three_digits(*variance)} {letter[row['no_variance']]}".strip(),
            f"{number(row['factor'], 3)} {letter[row['no_factor']]}".strip(), row["same_as"] or "–",
        )  # fmt: skip
        rows.append((str(row["arm"]), *cells) if arms else cells)
    meanings = tuple(f"{letter[why]}: {why}." for why in reasons)
    return (("arm", *header) if arms else header), tuple(rows), meanings


def _named(row: Mapping[Any, Any]) -> str:
    """An estimator's name, what its advantages are, and whether the arm was trained with it."""
    own = f": {row['advantages']}" if row["advantages"] else ""
    return f"{row['estimator']}{own}{' (trained with)' if row['trained_with'] else ''}"


def estimator_section(table: pd.DataFrame) -> list[Section]:
    """The section of the page; none where no group has the Gram of its scores."""
    if not len(table):
        return []
    header, rows, meanings = shown(table)
    after = (" ".join(meanings), *NOTES)
    return [Section(NAME, "One Gram, many estimators", WORDS, header, rows, after, (f"{NAME}.csv", f"{NAME}.md"))]


def estimator_markdown(table: pd.DataFrame, weights: str = "") -> str:
    """estimators.md. weights: a sentence on where the model's weights came from."""
    header, rows, meanings = shown(table)
    words = [" ".join(meanings), *WORDS, *NOTES, *([weights] if weights else [])]
    return markdown(header, rows) + "\n" + "\n\n".join(map(markdown_text, words)) + "\n"
