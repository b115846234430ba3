"""python tools/verdict_rates.py [sweeps=200] [steps=32] [prompts=8] [seed=0] [runs_dir=DIR] [csv=FILE]

How often each verdict of a report is wrong, where the truth is known. Three kinds of sweeps of R = 2, 4 and 8, of so
many steps of so many prompts in which each problem comes about four times; so many sweeps of each kind, all judged by
the report's own `judge_claims`:

    coin    one sweep of the embedded model at a fixed policy; rewards drawn anew, a fair coin for each rollout
    hash    the same sweep; a hash of problem, text and a salt modulo 2, so that equal texts have equal rewards
    exact   rollouts and rewards drawn from a softmax policy whose sequences are all listed

The sweep of the first two is trained in a folder of its own, or found in runs_dir, and no Gram is measured again. What
is true of them is known by construction (an identity; no change between steps at a fixed policy; no relation of rewards
and scores; for a coin the slope 1), else it is the mean of the decisive value over all redrawings, "mean" in the table.
Rollouts and problems stay, so that intervals, which allow for their draw, miss less than 5% there. Of an exact policy
the truth is the sum over all groups that can be drawn; for C20, whose steps are too many, the mean of 4000 drawn steps.

A verdict is wrong where it says "contradicted" of what is true or "holds" of what is not, with a correction too where
there is nothing to correct; of C4 none is decided whose bounds say nothing; of C6, where nothing changes, both are; of
Shuffled a rejection of a null that is true; of C9 the error that rollouts are not draws of the policy. C10 and C21 are
judged as if the model were the paper's. C8 stands by the other definitions of rank too: for a coin and a hash no truth
of them is known. The columns:

    decided, wrong   verdicts at the level of a report, with the share of wrong ones, its Clopper-Pearson 95% interval
                     and the stated rate: alpha for each R that decides, 5% for all verdicts of a report together
    at 5%            the same, each interval alone at 95%
    misses           decisive 95% intervals that do not hold the true value

Printed are two tables, of whole claims and of decisive intervals; csv has every column.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from drawn_sweeps import (
    SIZES,
    Frozen,
    Population,
    config,
    exact_values,
    filled,
    frozen_runs,
    share_in_words,
    show,
    skeleton,
)
from paired import ROOT, options_of

from grpo_sweeps.paper import ABOUT_TWO, LARGEST_TOP1, MARGIN, TABLE1
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.finding import Claim
from grpo_sweeps.report.claims.printed import c10
from grpo_sweeps.report.claims.ranks import DEFINITIONS
from grpo_sweeps.report.claims.rules import CONTRADICTED, HOLDS, UNDECIDED
from grpo_sweeps.report.claims.sizes import c21
from grpo_sweeps.report.claims.verdicts import judge_claims
from grpo_sweeps.report.read.query import Sweep, load_sweep
from grpo_sweeps.report.tables.pooled import usable_groups

OPTIONS = {"sweeps": "200", "steps": "32", "prompts": "8", "seed": "0", "runs_dir": "", "csv": ""}
JUDGED = ("C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9", "C10", "C20", "C21", "Controls", "Shuffled")
IDENTITIES = ("C2", "C3", "C4", "Controls")
NAME = "frozen"
OFF = "error: not draws of the policy"  # what C9 says where the score-mean null is excluded
REJECTED = (rules.LONGER, rules.SHORTER, f"{rules.LONGER} and {rules.SHORTER.rpartition(': ')[2]}")
DECIDED = (HOLDS, rules.CORRECTED, CONTRADICTED, OFF, *REJECTED)
WHOLE = 0  # stands for the claim as a whole where an R would stand
STEPS_OF_C20 = 4000
TIMES = 4  # that a problem comes in a sweep, about


@dataclass(frozen=True)
class Truth:
    """wrong: the verdicts that would be wrong. value: the truth of the decisive interval, NaN where none is known.
    mean: it is the mean of all redrawings."""

    wrong: frozenset[str]
    value: float = np.nan
    mean: bool = False


def within(value: float, low: float, high: float) -> frozenset[str]:
    """What would be wrong of a claim that a value lies in [low, high]."""
    return frozenset({CONTRADICTED} if low <= value <= high else {HOLDS})


def wrong_of(claim: str, R: int, value: float, other: float = np.nan) -> frozenset[str]:
    """The wrong verdicts where the decisive value is known; other: C10's second, the effective rank."""
    if claim == "C5":  # a correction says that the slope is not 1
        low, high = np.add(rules.IN_PROPORTION, (-rules.SLOPE_MARGIN, rules.SLOPE_MARGIN))
        wrong = within(value, low, high)
        return wrong | ({rules.CORRECTED} if HOLDS in wrong or value == 1.0 else set())
    if claim == "C7":  # any counterexample contradicts; up to a tolerated share of them both verdicts are right
        return frozenset({CONTRADICTED} if value == 0 else {HOLDS} if value > rules.TOLERATED_SHARE else ())
    if claim in ("C8", "C20"):
        return within(value, ABOUT_TWO - MARGIN, ABOUT_TWO + MARGIN)
    if claim == "C10":
        cell = TABLE1[R]
        second = within(other, cell.effective_rank - MARGIN, cell.effective_rank + MARGIN)
        first = within(value, cell.top1_low, cell.top1_high)
        return first | second if first == second else frozenset({HOLDS})
    return frozenset({CONTRADICTED} if value > 0 else {HOLDS})  # C21


def always(R: int) -> dict[tuple[str, int], Truth]:
    """What is true of every sweep at a fixed policy."""
    found = {(claim, R): Truth(frozenset({CONTRADICTED})) for claim in IDENTITIES}
    return found | {
        ("C6", R): Truth(frozenset({HOLDS, CONTRADICTED}), 0.0), ("C9", R): Truth(frozenset({OFF}), 0.0),
    }  # fmt: skip


def whole(truths: Mapping[tuple[str, int], Truth], claim: str) -> frozenset[str]:
    """Of a claim about every R: "holds" is wrong, corrected or not, where it is at one R, other verdicts where they are
    at each."""
    parts = [truth.wrong for (one, _), truth in truths.items() if one == claim]
    wrong = {HOLDS, rules.CORRECTED} if any(HOLDS in part for part in parts) else set()
    at_each = (CONTRADICTED, rules.CORRECTED, *REJECTED)
    wrong |= {verdict for verdict in at_each if parts and all(verdict in part for part in parts)}
    return frozenset(wrong | ({OFF} if claim == "C9" else set()))


def judged(sweep: Sweep, alpha: float | None) -> list[Claim]:
    """The claims of `JUDGED`, C10 and C21 as if the runs were the paper's."""
    level = rules.simultaneous_alpha(len(sweep.cells)) if alpha is None else alpha
    claims = {claim.id: claim for claim in judge_claims(sweep, alpha)}
    ((arm, _), *_) = sweep.cells
    groups = {R: usable_groups(sweep, arm, R) for _, R in sweep.cells}
    claims |= {"C10": c10(arm, groups, level, ()), "C21": c21(arm, groups, level, ())}
    return [claims[name] for name in JUDGED]


def lines_of(sweep: Sweep, number: int) -> list[tuple]:
    """sweep, level, claim, R, verdict, and the decisive interval: mean, low, high."""
    lines = []
    for level, alpha in (("report", None), ("alone", rules.ALPHA)):
        for claim in judged(sweep, alpha):
            verdicts = []
            for f in claim.findings:
                off = f.interval.outside(0.0, 0.0) and f.interval.n >= rules.MIN_GROUPS
                verdicts.append((OFF if off else UNDECIDED) if claim.id == "C9" else f.verdict)
                ends = (f.interval.mean, f.interval.low, f.interval.high) if f.interval.known else (np.nan,) * 3
                lines.append((number, level, claim.id, f.R, verdicts[-1], *ends))
            said = (OFF if OFF in verdicts else UNDECIDED) if claim.id == "C9" else claim.verdict
            lines.append((number, level, claim.id, WHOLE, said, np.nan, np.nan, np.nan))
            if claim.id == "C8":
                lines += [(number, level, *one, np.nan, np.nan, np.nan) for one in other_ranks(claim.remarks)]
    return lines


def other_ranks(remarks: Iterable[str]) -> list[tuple[str, int, str]]:
    """C8's verdicts by other definitions of rank, which stand in sentences: claim, `WHOLE`, verdict."""
    found = []
    for name in DEFINITIONS.values():
        (sentence,) = (one for one in remarks if one.startswith(f"By {name}, by the same rule: "))
        (said,) = (one for one in (HOLDS, CONTRADICTED, UNDECIDED) if f": {one} (" in sentence)
        found.append((f"C8 by {name}", WHOLE, said))
    return found


COLUMNS = ["sweep", "level", "claim", "R", "verdict", "mean", "low", "high"]


def redrawn(runs: list[Frozen], sweep: Sweep, kind: str, sweeps: int, seed: int) -> pd.DataFrame:
    """The verdicts on one frozen sweep with rewards drawn anew; kind: coin or hash."""
    lines = []
    for number in range(sweeps):
        rng = np.random.default_rng([seed, number])
        made = {
            one.run: one.coin(rng) if kind == "coin" else one.hashed(seed * 1_000_003 + number) for one in runs
        }  # fmt: skip
        lines += lines_of(filled(sweep, {run: groups.rows() for run, groups in made.items()}), number)
    return pd.DataFrame(lines, columns=COLUMNS)


def truths_of_redrawn(lines: pd.DataFrame, kind: str) -> dict[tuple[str, int], Truth]:
    """By construction, and by the mean of all redrawings where the decisive value has no other truth."""
    alone = lines[(lines["level"] == "alone") & (lines["R"] != WHOLE)]
    means = alone.groupby(["claim", "R"])["mean"].mean()
    found: dict[tuple[str, int], Truth] = {}
    for R in sorted(alone["R"].unique()):
        found |= always(R) | {("Shuffled", R): Truth(frozenset(REJECTED), 0.5)}
        for claim in ("C5", "C7", "C8", "C10", "C20", "C21"):
            value = float(means.get((claim, R), np.nan))
            if claim == "C5" and kind == "coin" and not np.isnan(value):
                found[claim, R] = Truth(wrong_of(claim, R, 1.0), 1.0)
            elif claim == "C20":  # the least value that the groups' own spectra allow
                wrong = frozenset({HOLDS}) if value > ABOUT_TWO + MARGIN else frozenset()
                found[claim, R] = Truth(wrong, value, True)
            elif not np.isnan(value):
                rank = float(means.get(("C8", R), np.nan))
                found[claim, R] = Truth(wrong_of(claim, R, value, rank), value, True)
    return found


def drawn(population: Population, sweeps: int, steps: int, prompts: int, seed: int, folder: Path) -> pd.DataFrame:
    """The verdicts on sweeps drawn from an exact policy."""
    empty = skeleton(folder, "exact", [config(R, 0, steps, prompts) for R in SIZES])
    names = dict(zip(empty.runs["R"], empty.runs["run"], strict=True))
    lines = []
    for number in range(sweeps):
        rng = np.random.default_rng([seed, number])
        picked = population.problems(steps, prompts, TIMES, rng)
        made = {R: population.draw(picked, R, prompts, rng) for R in SIZES}
        rows = {names[R]: groups.rows() for R, (groups, _) in made.items()}
        metrics = {names[R]: population.metrics(*made[R], stacked=True) for R in SIZES}
        lines += lines_of(filled(empty, rows, metrics), number)
    return pd.DataFrame(lines, columns=COLUMNS)


def stacked_rank(population: Population, R: int, prompts: int, seed: int) -> float:
    """The mean effective rank of a step's groups together, over many drawn steps."""
    rng = np.random.default_rng([seed, R, STEPS_OF_C20])
    groups, rows = population.draw(population.problems(STEPS_OF_C20, prompts, 1, rng), R, prompts, rng)
    return float(population.metrics(groups, rows, stacked=True)["stacked/effective_rank"].mean())


def truths_of_exact(population: Population, steps: int, prompts: int, seed: int) -> dict[tuple[str, int], Truth]:
    """By enumeration; see the module's docstring."""
    exact = {R: exact_values(population, R) for R in SIZES}
    found: dict[tuple[str, int], Truth] = {}
    for R, one in exact.items():
        rank, top1 = one.mean("rank_K"), one.mean("top1_K")
        values = {"C5": one.slope(steps * prompts), "C7": one.mean("full_K"), "C8": rank, "C10": top1}
        values["C20"] = stacked_rank(population, R, prompts, seed)
        if R != LARGEST_TOP1:
            values["C21"] = exact[LARGEST_TOP1].mean("top1_K") - top1
        found |= always(R) | {
            (claim, R): Truth(wrong_of(claim, R, value, rank), value)
            for claim, value in values.items()
            if not np.isnan(value)
        }
        for name, words in DEFINITIONS.items():
            value = one.mean(f"{name}_K")
            found[f"C8 by {words}", R] = Truth(within(value, ABOUT_TWO - MARGIN, ABOUT_TWO + MARGIN), value)
        found["Shuffled", R] = Truth(frozenset())  # rewards and scores are related
    return found


def tabled(kind: str, lines: pd.DataFrame, truths: Mapping[tuple[str, int], Truth], alpha: float) -> pd.DataFrame:
    """One row per claim and R, one for the claim as a whole, and one for all verdicts of a report together."""
    lines = lines.assign(wrong=[
        verdict in (whole(truths, claim) if R == WHOLE else truths.get((claim, R), Truth(frozenset())).wrong)
        for claim, R, verdict in zip(lines["claim"], lines["R"], lines["verdict"], strict=True)
    ])  # fmt: skip
    rows = []
    for (claim, R), part in lines.groupby(["claim", "R"], sort=False):
        truth = truths.get((claim, R), Truth(frozenset()))
        report, alone = (part[part["level"] == level] for level in ("report", "alone"))
        known = alone[alone["mean"].notna()] if not np.isnan(truth.value) else alone.iloc[:0]
        misses = int(((known["low"] > truth.value) | (known["high"] < truth.value)).sum())
        decisive = claim not in IDENTITIES
        base = claim.partition(" by ")[0]
        sizes = sum(one == base for one, _ in truths) if R == WHOLE else 1
        rows.append({
            "kind": kind, "claim": claim, "R": R or "all",
            "truth": "" if np.isnan(truth.value) else f"{truth.value:.3g}{' (mean)' if truth.mean else ''}",
            "sweeps": len(report), "decided": int(report["verdict"].isin(DECIDED).sum()),
            "wrong": int(report["wrong"].sum()), "rate %": share_in_words(int(report["wrong"].sum()), len(report)),
            "stated %": f"{100 * alpha * sizes:.2g}" if decisive else "0",
            "wrong at 5%": int(alone["wrong"].sum()),
            "rate at 5% %": share_in_words(int(alone["wrong"].sum()), len(alone)),
            "misses %": share_in_words(misses, len(known)) if len(known) else "",
        })  # fmt: skip
    any_wrong = lines[lines["level"] == "report"].groupby("sweep")["wrong"].any()
    rows.append({
        "kind": kind, "claim": "any", "R": "all", "truth": "", "sweeps": len(any_wrong), "decided": "",
        "wrong": int(any_wrong.sum()), "rate %": share_in_words(int(any_wrong.sum()), len(any_wrong)),
        "stated %": f"{100 * rules.ALPHA:g}", "wrong at 5%": "", "rate at 5% %": "", "misses %": "",
    })  # fmt: skip
    return pd.DataFrame(rows)


def trained(runs_dir: Path, steps: int, prompts: int, seed: int) -> Sweep:
    """The frozen sweep, trained where it is not in `runs_dir` yet."""
    if not (runs_dir / NAME).is_dir():
        runs_dir.mkdir(parents=True, exist_ok=True)
        words = [
            "-m", f"R={','.join(map(str, SIZES))}", f"seed={seed}", f"sweep={NAME}", f"runs_dir={runs_dir.resolve()}",
            "trainer=fixed_policy", f"trainer.steps={steps}", f"trainer.prompts={prompts}", "trainer.device=cpu",
            f"task.n_train={max(prompts, steps * prompts // TIMES)}", "analysis.groups=all", "analysis.update_every=0",
            "tracking=local",
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-m", "grpo_sweeps.run", *words], cwd=runs_dir, env=environment, check=True)
    return load_sweep(NAME, runs_dir)


def tables(options: Mapping[str, int], runs_dir: Path, say: Callable[[str], None]) -> Iterable[pd.DataFrame]:
    """The table of each kind of sweep."""
    size = options["steps"], options["prompts"], options["seed"]
    alpha = rules.simultaneous_alpha(len(SIZES))
    frozen = trained(runs_dir, *size)
    runs = frozen_runs(frozen)
    for kind in ("coin", "hash"):
        lines = redrawn(runs, frozen, kind, options["sweeps"], options["seed"])
        say(kind)
        yield tabled(kind, lines, truths_of_redrawn(lines, kind), alpha)
    population = Population.made(seed=options["seed"])
    with tempfile.TemporaryDirectory() as folder:
        lines = drawn(population, options["sweeps"], *size, Path(folder))
    say("exact")
    yield tabled("exact", lines, truths_of_exact(population, *size), alpha)


def printed(found: pd.DataFrame) -> list[str]:
    """The two tables as lines of Markdown: verdicts of reports, decisive intervals."""
    kinds = list(found["kind"].unique())
    cells = {(row["kind"], row["claim"], str(row["R"])): row for row in found.to_dict("records")}
    whole_claims = found.loc[found["R"].astype(str) == "all", "claim"].unique()
    lines = [f"| claim | stated % | {' | '.join(f'{kind}: decided | wrong %' for kind in kinds)} |"]
    lines.append("|---" * (2 + 2 * len(kinds)) + "|")
    for claim in whole_claims:
        rows = [cells.get((kind, claim, "all")) for kind in kinds]
        said = [f"{row['decided']} | {row['rate %']}" if row else "\u2013 | \u2013" for row in rows]
        stated = next(str(row["stated %"]) for row in rows if row)
        lines.append(f"| {claim} | {stated} | {' | '.join(said)} |")
    lines += ["", f"| claim | R | {' | '.join(f'{kind}: truth | misses %' for kind in kinds)} |"]
    lines.append("|---" * (2 + 2 * len(kinds)) + "|")
    for claim, R in dict.fromkeys((claim, R) for _, claim, R in cells if R != "all"):
        rows = [cells.get((kind, claim, R), {}) for kind in kinds]
        if any(row.get("misses %") for row in rows):
            said = [f"{row['truth']} | {row['misses %']}" if row.get("misses %") else "\u2013 | \u2013" for row in rows]
            lines.append(f"| {claim} | {R} | {' | '.join(said)} |")
    return lines


def main(argv: list[str]) -> int:
    """The command; returns its exit code."""
    options = options_of(argv, dict(OPTIONS), __doc__)
    if isinstance(options, int):
        return options
    numbers = {key: int(value) for key, value in options.items() if value.isdigit()}
    with tempfile.TemporaryDirectory() as folder:
        say = lambda kind: print(f"{kind}: judged", file=sys.stderr, flush=True)  # noqa: E731
        found = pd.concat(tables(numbers, Path(options["runs_dir"] or folder), say), ignore_index=True)
    return show(found, printed(found), options["csv"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
