"""What looks wrong with a sweep's runs, which the report says first: one line per kind and arm."""

from __future__ import annotations

from typing import Any

from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.tracking.symptoms import known, symptoms

GOING_ON = ("running", "queued")
LONGEST = 300  # characters of a failed run's reason


def wrong(sweep: Sweep) -> list[str]:
    """Sentences, each of one kind in one arm, with the runs that it holds for; the first of them gives the numbers.

    Failed runs come first, then what the rules of `symptoms` find in the records. Empty where nothing looks wrong.
    """
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}  # (arm, kind) -> (run's name, sentence) each
    for run in sweep.runs[sweep.runs["state"] == "failed"].itertuples():
        reason = " ".join(str(run.error or "no reason is recorded").split())[:LONGEST]
        sentence = f"failed at step {run.step} of {run.total}: {reason}"
        found.setdefault((str(run.arm), f"failed: {reason}"), []).append((_name(sweep, run), sentence))
    rows = {str(run): part for run, part in sweep.metrics.groupby("run", sort=False)} if len(sweep.metrics) else {}
    for run in sweep.runs.itertuples():
        if run.run in rows:
            course = [known(row) for row in rows[str(run.run)].select_dtypes("number").to_dict("records")]
            for symptom in symptoms(sweep.configs[str(run.run)], course, ended=run.state not in GOING_ON):
                found.setdefault((str(run.arm), symptom.kind), []).append((_name(sweep, run), symptom.sentence))
    several = sweep.runs["arm"].nunique() > 1
    totals = sweep.runs["arm"].value_counts()
    return [_line(arm if several else "", runs, int(totals[arm])) for (arm, _), runs in found.items()]


def _name(sweep: Sweep, run: Any) -> str:
    """What tells the run from the others of its arm; '' where it is the only one of the sweep."""
    return f"R={run.R} seed={run.seed}" if len(sweep.runs) > 1 else ""


def _line(arm: str, runs: list[tuple[str, str]], total: int) -> str:
    """ "estimator=rloo: R=2 seed=0 and 2 more of 3 runs: every reward is 0 ..." """
    (name, sentence), more = runs[0], len(runs) - 1
    others = f" and {more} more of {total} runs (numbers of the first)" if more else ""
    where = f"{f'{arm}: ' if arm else ''}{name}{others}"
    return f"{where}: {sentence}" if where else sentence
