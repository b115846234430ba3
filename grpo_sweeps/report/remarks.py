"""What a reader must know of a sweep's runs, in sentences.

wrong           what looks wrong with them, which the report says first: one line per kind and arm
missing         what is not there: cells without runs, unequal seeds, runs that failed or diverged
check_commits   which code made them: numbers of different code are not averaged without a word
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from grpo_sweeps.report.claims.rules import MIN_GROUPS
from grpo_sweeps.report.read.kept import Kept, code_of, files_below, signature, worth_keeping
from grpo_sweeps.report.read.query import ReportError, Sweep, processors
from grpo_sweeps.report.tables.layers import layer_remarks
from grpo_sweeps.report.tables.pooled import usable_groups
from grpo_sweeps.text import count
from grpo_sweeps.tracking import expected, findings, glance, holdings, journal, lines, local, seal
from grpo_sweeps.tracking import provenance as source
from grpo_sweeps.tracking.digests import of_package
from grpo_sweeps.tracking.findings import examine
from grpo_sweeps.tracking.glance import Finding, in_words
from grpo_sweeps.tracking.made_by import MadeBy, mixed
from grpo_sweeps.tracking.status import RecordError, another, read_status
from grpo_sweeps.tracking.symptoms import symptoms

GOING_ON = ("running", "queued")
LONGEST = 300  # characters of a failed run's reason
EXAMINED = "whole.parquet"
EXAMINED_BY = (findings, holdings, expected, glance, seal, journal, lines, local)
CHECKED_METRICS = ("loss", "grad_norm", "reward", "entropy")
ALLOW = "allow"
# What is so of the place that a run was made in, and says nothing about its code.
NO_COMMIT = "No run says which commit made it."
UNCOMMITTED = "Some runs were made from a working tree with uncommitted changes."


def wrong(sweep: Sweep) -> list[str]:
    """Sentences, each of one kind in one arm, with the runs that it holds for; the first of them gives the numbers.

    Failed runs come first, then what the rules of `symptoms` find in the records. Empty where nothing looks wrong.
    """
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}  # (arm, kind) -> (run's name, sentence) each
    for run in sweep.runs[sweep.runs["state"] == "failed"].itertuples():
        reason = " ".join(str(run.error or "no reason is recorded").split())[:LONGEST]
        sentence = f"failed at step {run.step} of {run.total}: {reason}"
        found.setdefault((str(run.arm), f"failed: {reason}"), []).append((_name(sweep, run), sentence))
    numbers = sweep.metrics.select_dtypes("number")
    names, values = [str(name) for name in numbers], numbers.to_numpy(float, na_value=np.nan)
    places = sweep.metrics.groupby("run", sort=False).indices if len(sweep.metrics) else {}
    for run in sweep.runs.itertuples():
        if run.run in places:
            course = _course(names, values[places[str(run.run)]])
            for symptom in symptoms(sweep.configs[str(run.run)], course, ended=run.state not in GOING_ON):
                found.setdefault((str(run.arm), symptom.kind), []).append((_name(sweep, run), symptom.sentence))
    several = sweep.runs["arm"].nunique() > 1
    totals = sweep.runs["arm"].value_counts()
    return [_line(arm if several else "", runs, int(totals[arm])) for (arm, _), runs in found.items()]


def _course(names: list[str], values_TM: np.ndarray) -> Iterator[dict[str, float]]:
    """`symptoms.known` of each of T steps, given M metrics as one array: a row of pandas costs many times as much."""
    for row in values_TM.tolist():
        yield {name: value for name, value in zip(names, row, strict=True) if value == value}


def _name(sweep: Sweep, run: Any) -> str:
    """What tells the run from the others of its arm; '' where it is the only one of the sweep."""
    return f"R={run.R} seed={run.seed}" if len(sweep.runs) > 1 else ""


def _line(arm: str, runs: list[tuple[str, str]], total: int) -> str:
    """ "estimator=rloo: R=2 seed=0 and 2 more of 3 runs: every reward is 0 ..." """
    (name, sentence), more = runs[0], len(runs) - 1
    others = f" and {more} more of {total} runs (numbers of the first)" if more else ""
    where = f"{f'{arm}: ' if arm else ''}{name}{others}"
    return f"{where}: {sentence}" if where else sentence


def missing(sweep: Sweep) -> list[str]:
    """Sentences, each about one thing; empty when nothing is missing."""
    found = [
        *sweep.notes,
        *_records(sweep),
        *_cells(sweep),
        *_asked_for(sweep),
        *_seeds(sweep),
        *_waiting(sweep),
        *_states(sweep),
    ]
    found += [*_diverged(sweep), *_commits(sweep)]
    found += [*_steps(sweep), *_groups(sweep), *_older(sweep), *_evaluation(sweep), *layer_remarks(sweep)]
    if sweep.arms.tied_to_R:
        found.append(f"These settings change with R: {', '.join(sweep.arms.tied_to_R)}.")
    return found


def _records(sweep: Sweep) -> list[str]:
    """What the records of runs should hold and do not, one sentence per run, which `verify` lists in full."""
    every = [] if sweep.where else [path for one in sweep.paths for path in one.glob("[!.]*/status.json")]
    known = {str(run): Path(str(path)) for run, path in zip(sweep.runs["run"], sweep.runs["path"], strict=True)}
    every = [path for path in every if known.get(path.parent.name, path.parent) == path.parent]  # in two sweeps: once
    folders = sorted(path.parent for path in every if not _is_copy(path.parent))
    folders += [Path(str(path)) for path in sweep.runs["path"] if Path(str(path)) not in folders]
    with ThreadPoolExecutor(max_workers=processors()) as pool:
        found = dict(zip(folders, pool.map(_examined, folders), strict=True))
    return [
        f"The record of {findings[0].run} ({folder.name}) is not whole: {in_words(findings)} "
        f"(python -m grpo_sweeps.verify sweep={folder.parent.name} says all)."
        for folder, findings in found.items()
        if findings
    ]


def _examined(run_dir: Path) -> list[Finding]:
    """`examine`, which is not asked again about a finished run that it found whole and of which no file has changed."""
    files = signature(files_below(run_dir))
    key, kept = {"files": files, "code": code_of(EXAMINED_BY)}, Kept(run_dir)
    if kept.read(EXAMINED, key) is not None:
        return []
    found = examine(run_dir)
    if not found and _ended(run_dir) and worth_keeping(files, signature(files_below(run_dir))):
        kept.write(EXAMINED, key, pa.table({}))
    return found


def _ended(run_dir: Path) -> bool:
    try:
        return read_status(run_dir).state == "finished"
    except RecordError:
        return False


def _is_copy(run_dir: Path) -> bool:
    """Whether the report leaves the folder out as another run's record, and has said so."""
    try:
        return bool(another(run_dir, read_status(run_dir)))
    except RecordError:
        return False


def _where(sweep: Sweep, arm: str, R: int) -> str:
    return f"R = {R}" if sweep.runs["arm"].nunique() < 2 else f"{arm}, R = {R}"


def _cells(sweep: Sweep) -> list[str]:
    have = set(sweep.cells)
    arms, Rs = sweep.arm_names, sorted({R for _, R in have})
    found = [f"No run for {arm}." for arm in sweep.arms.absent]
    return found + [f"No run for {_where(sweep, a, R)}." for a in arms for R in Rs if (a, R) not in have]


def _asked_for(sweep: Sweep) -> list[str]:
    """Values of R and seed that a run's own command names and no run has; nothing where the runs were chosen."""
    found: list[str] = []
    if sweep.where is not None:
        return found
    for key in ("R", "seed"):
        named = [re.search(rf"\b{key}=(\d+)", name) for name in sweep.waiting.values()]
        waiting = {int(match[1]) for match in named if match}
        asked = {value for command in sweep.runs["command"].dropna().unique() for value in _listed(str(command), key)}
        lacking = sorted(asked - waiting - {int(value) for value in sweep.runs[key]})
        if lacking:
            found.append(f"No run for {key} = {', '.join(map(str, lacking))}, though the command asked for it.")
    return found


def _listed(command: str, key: str) -> set[int]:
    """The whole numbers that a command gives an axis: `R=2,4,8` or `seed=range(0,3)`; none where it does not."""
    try:
        words = shlex.split(command)
    except ValueError:  # a quotation that does not end: what a person typed into status.json
        return set()
    given = [word.removeprefix(f"{key}=") for word in words if word.startswith(f"{key}=")]
    value = "".join(given[-1:])
    if re.fullmatch(r"\d{1,9}(,\d{1,9})*", value):
        return {int(number) for number in value.split(",")}
    ends = re.fullmatch(r"range\((\d{1,4}),\s*(\d{1,4})\)", value)
    return set(range(int(ends[1]), int(ends[2]))) if ends else set()


def _waiting(sweep: Sweep) -> list[str]:
    """Runs that were submitted and have not begun, by name."""
    names = [name if name == run else f"{name} ({run})" for run, name in sweep.waiting.items()]
    return [f"Nothing is recorded yet of {len(names)} of the runs: {', '.join(names)}."] if names else []


def _seeds(sweep: Sweep) -> list[str]:
    runs = sweep.runs
    seeds = {(a, R): set(runs[(runs["arm"] == a) & (runs["R"] == R)]["seed"]) for a, R in sweep.cells}
    union = sorted(set().union(*seeds.values()))
    found = []
    for (arm, R), have in seeds.items():
        lacking = [str(s) for s in union if s not in have]
        if lacking:
            found.append(f"{_where(sweep, arm, R)} has no run with seed {', '.join(lacking)}.")
    if len(union) == 1:
        found.append("One seed: the intervals cover the draw of prompts, not the differences between training runs.")
    if len(union) == 2:
        found.append(
            "Two seeds: a mean over runs has no interval, since two values do not tell how far runs differ; one over "
            "prompts and seeds is wide where the two differ, and cut to what the quantity can take."
        )
    return found


def _states(sweep: Sweep) -> list[str]:
    found = []
    for run in sweep.runs.itertuples():
        if run.state != "finished" and run.run not in sweep.waiting:
            error = sweep.statuses[str(run.run)].error
            reason = f": {' '.join(error.split())[:300]}" if error else ""
            found.append(f"Run {run.run} ({run.name}) is {run.state} at step {run.step} of {run.total}{reason}.")
    return found


def _diverged(sweep: Sweep) -> list[str]:
    """Runs in whose training steps a number that is always logged became NaN or infinite."""
    m = sweep.metrics
    names = [n for n in CHECKED_METRICS if n in m]
    if not names:
        return []
    found = []
    for run, part in m.groupby("run"):
        trained = part[part[names].notna().any(axis=1) & part.get("reward", part[names[0]]).notna()]
        used = [n for n in names if part[n].notna().any()]
        values = trained[used].to_numpy(dtype=float)
        bad = ~np.isfinite(values)
        if bad.any():
            step = int(trained["step"].to_numpy()[bad.any(axis=1)][0])
            which = ", ".join(n for n, b in zip(used, bad.any(axis=0), strict=True) if b)
            found.append(f"Run {run} diverged: {which} is not a finite number from step {step}.")
    return found


def _commits(sweep: Sweep) -> list[str]:
    made_by = codes(sweep)
    found = [f"The runs were made by different commits: {', '.join(made_by)}."] if len(made_by) > 1 else []
    found += [f"{sentence}." for sentence in _mixed(sweep)]
    found += _since(sweep)
    if not sweep.runs["commit"].notna().any():
        found.append(NO_COMMIT)
    if sweep.runs["dirty"].eq(True).any():
        found.append(UNCOMMITTED)
    return found


def _made(sweep: Sweep) -> dict[str, MadeBy]:
    """What made each run that has started and says it, by identity."""
    started = sweep.runs[~sweep.runs["run"].isin(sweep.waiting)]
    found = {str(row["run"]): source.read_made_by(Path(str(row["path"]))) for row in started.to_dict("records")}
    return {run: made_by for run, made_by in found.items() if made_by.known}


def _mixed(sweep: Sweep) -> list[str]:
    return mixed((run, sweep.configs[run], made_by) for run, made_by in _made(sweep).items())


def _since(sweep: Sweep) -> list[str]:
    """Runs that the package's code of today would not have made, and runs that do not say what made them."""
    made = _made(sweep)
    if not made:
        return []
    now, found = of_package(made_by.code for made_by in made.values()).syntax, []
    older = [run for run, made_by in made.items() if now and made_by.package != now]
    if older:
        names = ", ".join(sorted({f"commit {_commit(sweep, run)}, code {made[run].package[:7]}" for run in older}))
        here = f"commit {(source.commit() or 'unknown')[:7]}, code {now[:7]}"
        found.append(f"Other code of the package than today's made {_some(older, sweep)}: {names}; now {here}.")
    started = [str(run) for run in sweep.runs["run"] if run not in sweep.waiting]
    if unknown := [run for run in started if run not in made or made[run].since]:
        found.append(f"Not known: which code, functions, data and weights made {_some(unknown, sweep)}, or began them.")
    return found


def _some(runs: list[str], sweep: Sweep) -> str:
    return f"{len(runs)} of {count(len(sweep.runs))} ({', '.join(runs[:3])}{', ...' if len(runs) > 3 else ''})"


def _commit(sweep: Sweep, run: str) -> str:
    return (sweep.statuses[run].commit or "unknown")[:7]


def _steps(sweep: Sweep) -> list[str]:
    if "trainer.steps" in sweep.arms.tied_to_R:
        return []
    totals = sorted({int(t) for t in sweep.runs["total"] if t})
    spent = sum(status.ended_by is not None for status in sweep.statuses.values())
    why = f"; a budget (trainer.tokens) ended {spent} of {count(len(sweep.statuses))}" if spent else ""
    return [f"The runs differ in their number of steps: {', '.join(map(str, totals))}{why}."] if len(totals) > 1 else []


def _groups(sweep: Sweep) -> list[str]:
    found = []
    for arm, R in sweep.cells:
        n = len(usable_groups(sweep, arm, R))
        if n < MIN_GROUPS:
            found.append(f"{_where(sweep, arm, R)} has {n} measured mixed groups, fewer than {MIN_GROUPS}.")
    if len(sweep.groups) and (sweep.groups["rows"] == "loss").any():
        found.append("Some Grams are of the rows of the loss: what needs the scores is left out for them.")
    return found


def _older(sweep: Sweep) -> list[str]:
    """What stands in for what records made before `same_as` do not say."""
    older = sweep.groups[sweep.groups["older"].astype(bool)] if len(sweep.groups) else sweep.groups
    if not len(older):
        return []
    used = ", ".join(f"{precision:.2g}" for precision in sorted(older["precision"].unique()))
    count = f"{len(older)} of {int(sweep.groups['measured'].astype(bool).sum())}"
    return [
        f"{count} measured groups were recorded before records said which rollouts have the same tokens: their rows "
        "count as equal texts at a cosine of 1 - 1e-9 or more and equal norms, which misses those that rounding set "
        "apart. Their recorded floor compares the training dtype with a wider one and is not used: how exactly K is "
        "the Gram of the gradients that were applied is taken from the tolerance of the run's own check "
        f"({used})."
    ]


def _evaluation(sweep: Sweep) -> list[str]:
    evaluated = set(sweep.evals["run"])
    done = evaluated | set(sweep.waiting)
    lacking = [str(r.name) for r in sweep.runs.itertuples(index=False) if r.run not in done]
    return [f"Not evaluated: {', '.join(lacking)}."] if lacking else []


def codes(sweep: Sweep) -> dict[str, int]:
    """{what made them, in words: number of runs}, of the runs that have started.

    The digest of the package's code tells them apart where a run kept it, so that commits which change nothing of it
    are one. Without it uncommitted changes count as a commit of their own, and others than the same changes as another
    one where the run kept their digest. So do runs that do not say which commit made them, beside runs that do.
    """
    started = sweep.runs[~sweep.runs["run"].isin(sweep.waiting)]
    made = _made(sweep)
    names = {
        str(row["run"]): _code(
            None if row["commit"] is None or row["commit"] != row["commit"] else str(row["commit"]),
            row["dirty"] is True or row["dirty"] == 1,
            Path(str(row["path"])),
        )
        for row in started.to_dict("records")
    }
    known = {names[run]: made_by.package for run, made_by in made.items()}  # of a run without a digest its name decides
    found = Counter[str]()
    words: dict[str, set[str]] = {}
    for run, name in names.items():
        key = made[run].package if run in made else known.get(name, name)
        found[key] += 1
        words.setdefault(key, set()).add(name)
    listed = {key: " = ".join(sorted(names)) for key, names in words.items()}
    twice = {name for name, times in Counter(listed.values()).items() if times > 1}
    named = {f"{listed[key]}, code {key[:7]}" if listed[key] in twice else listed[key]: n for key, n in found.items()}
    return dict(sorted(named.items()))


def _code(commit: str | None, dirty: bool, run_dir: Path) -> str:
    name = commit[:12] if commit else "no recorded commit"
    if not dirty:
        return name
    kept = source.read(run_dir)
    changes = f" {kept.diff_sha256[:8]}" if kept is not None and kept.diff_sha256 else ""
    return f"{name} with uncommitted changes{changes}"


def check_commits(sweep: Sweep, commits: str | None) -> None:
    """Raise ReportError, one sentence, where several commits made the sweep's runs and `commits` is not "allow"."""
    if commits not in (None, ALLOW):
        raise ReportError(f"commits={commits}: {ALLOW} is allowed, to report on runs of several commits together.")
    if commits == ALLOW:
        return
    if several := _mixed(sweep):
        raise ReportError(
            f"{sweep.words}: {several[0]}; run the older ones again (redo=stale), or add commits={ALLOW} to "
            f"report on all of them together."
        )
    found = codes(sweep)
    if len(found) < 2:
        return
    listed = ", ".join(f"{code}: {count(n)}" for code, n in found.items())
    dirty = any("uncommitted" in code for code in found)
    note = "; uncommitted changes count as a commit of their own" if dirty else ""
    raise ReportError(
        f"{sweep.words}: its runs were made by different commits ({listed}{note}); run the older ones again "
        f"(redo=stale), or add commits={ALLOW} to report on all of them together."
    )
