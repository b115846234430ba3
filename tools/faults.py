"""python tools/faults.py [faults=kill,term,...] [times=10] [seed=0] [where=FOLDER] [json=FILE] [reports=all|last|none]

Runs a small sweep again and again, each time with one fault at a random moment, gives the same command until the sweep
has finished, and compares what is there with an undisturbed sweep. Prints a line a trial with its seed, and one table:
how often injected, runs finished, records lost and doubled, steps that were run again, the largest difference of any
recorded number and of the report's tables (0 on a CPU).

faults: any of kill term int usr2 truncated checkpoint clock disk server, and on the node of tools/slurm_node.sh
slurm_usr2 slurm_scancel slurm_kill slurm_requeue slurm_preemption slurm_time; local (all of the first kind) and slurm
(of the second) stand for all of them. Exit code 1 when anything was lost, doubled, different or unfinished.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from fault_check import Difference, compare_sweeps, compare_tables, finished
from fault_slurm import SLURM_FAULTS, dead_server
from fault_trials import LOCAL, ROOT, SIZES, Fault, Trial, mounted
from paired import options_of

KINDS: dict[str, Fault] = {**LOCAL, "server": dead_server, **SLURM_FAULTS}
GROUPS = {"local": [*LOCAL, "server"], "slurm": [*SLURM_FAULTS]}


@dataclass
class Outcome:
    """All trials of one fault."""

    fault: str
    trials: int = 0
    injected: int = 0
    runs: int = 0
    finished: int = 0
    records: int = 0
    lost: int = 0
    doubled: int = 0
    repeated: int = 0
    difference: float = 0.0
    tables: float = 0.0
    compared: int = 0  # tables
    wrong: int = 0
    skipped: str = ""

    @property
    def good(self) -> bool:
        whole = self.finished == self.runs and not (self.lost or self.doubled or self.wrong)
        return whole and self.difference == 0 and self.tables == 0


def main(argv: list[str]) -> int:
    """The command; returns its exit code."""
    known = {"faults": "local", "times": "10", "seed": "0", "where": "", "json": "", "reports": "all"}
    options = options_of(argv, known, __doc__)
    if isinstance(options, int):
        return options
    names = [kind for name in options["faults"].split(",") for kind in GROUPS.get(name, [name])]
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        print(f"faults={','.join(unknown)}: choose of {', '.join(KINDS)}", file=sys.stderr)
        return 2
    where = Path(options["where"] or tempfile.mkdtemp(prefix="faults-")).resolve()
    print(f"trials are in {where}", flush=True)
    reference = Trial(where / "reference", 0)
    if not reference.complete() or finished(reference.sweep_dir, len(SIZES)) != len(SIZES):
        print(f"the undisturbed sweep does not finish; see {reference.folder / 'out'}", file=sys.stderr)
        return 1
    if options["reports"] != "none":
        report(reference)
    outcomes = [_trials(name, where, int(options["times"]), int(options["seed"]), options["reports"]) for name in names]
    print(table(outcomes))
    if options["json"]:
        Path(options["json"]).write_text(json.dumps([asdict(one) for one in outcomes], indent=1) + "\n")
    return 0 if all(one.good for one in outcomes) else 1


def _trials(name: str, where: Path, times: int, seed: int, reports: str) -> Outcome:
    out = Outcome(name)
    for number in range(times):
        trial = Trial(
            where / f"{name}-{number}",
            (seed * 100 + list(KINDS).index(name)) * 1000 + number,
            slurm=name in SLURM_FAULTS,
        )
        mount = mounted(trial.folder / "runs") if name == "disk" else None
        if mount is not None and (reason := next(mount)):
            out.skipped = f"no small file system can be mounted: {reason}"
            return out
        try:
            _one(out, trial, where, reports == "all" or (reports == "last" and number == times - 1))
        finally:
            if mount is not None:
                next(mount, None)
    return out


def _one(out: Outcome, trial: Trial, where: Path, with_report: bool) -> None:
    """One trial, added to the outcome, with a line about it; what went well is removed."""
    before = (out.lost, out.doubled, out.wrong, out.finished - out.runs, out.difference, out.tables)
    injected = KINDS[out.fault](trial)
    done = trial.complete()
    ended = finished(trial.sweep_dir, len(SIZES)) if done else 0
    found = compare_sweeps(trial.sweep_dir, where / "reference" / "runs" / "trial")
    out.trials, out.injected, out.runs = out.trials + 1, out.injected + injected, out.runs + len(SIZES)
    out.finished += ended
    _add(out, found)
    out.wrong += sum(note.startswith("WRONG") for note in trial.notes)
    if with_report:
        out.tables = max(out.tables, report(trial, where / "reference" / "report"))
        out.compared += 1
    word = f"{'' if injected else 'not '}injected, exit codes {trial.codes}"
    print(f"{out.fault:<17} seed {trial.seed:<5} {word}, {ended} finished, {found.lost} lost, "
          f"{found.doubled} doubled, {found.repeated} steps run again, difference {found.largest:g}  "
          f"({'; '.join(trial.notes)})", flush=True)  # fmt: skip
    if before == (out.lost, out.doubled, out.wrong, out.finished - out.runs, out.difference, out.tables):
        shutil.rmtree(trial.folder, ignore_errors=True)  # a mount stays until its trial is over


def _add(out: Outcome, found: Difference) -> None:
    for name in ("records", "lost", "doubled", "repeated"):
        setattr(out, name, getattr(out, name) + getattr(found, name))
    out.difference = max(out.difference, found.largest)
    out.wrong += found.unequal


def report(trial: Trial, reference: Path | None = None) -> float:
    """Write the trial's report; how far its tables are from the reference's."""
    words = [sys.executable, "-m", "grpo_sweeps.report", "sweep=trial", "out=report"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    done = subprocess.run(words, cwd=trial.folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"the report of {trial.folder} failed: {(done.stdout + done.stderr).strip()[-300:]}", file=sys.stderr)
        return float("inf")
    return 0.0 if reference is None else compare_tables(trial.folder / "report", reference)


def _cells(one: Outcome) -> tuple[str, ...]:
    if one.skipped:
        return (one.fault, f"skipped: {one.skipped}", *[""] * 8)
    counts = (one.records, one.lost, one.doubled, one.repeated)
    return (
        one.fault, str(one.trials), str(one.injected), f"{one.finished} of {one.runs}", *map(str, counts),
        f"{one.difference:g}", f"{one.tables:g} ({one.compared})",
    )  # fmt: skip


def table(outcomes: list[Outcome]) -> str:
    """A Markdown table, a line a fault."""
    head = ("fault", "trials", "injected", "runs finished", "records", "lost", "doubled", "steps run again",
            "largest difference", "in the tables (compared)")  # fmt: skip
    rows = [_cells(one) for one in outcomes]
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    wrong = [f"{one.fault}: {one.wrong} wrong, see the lines above" for one in outcomes if one.wrong]
    return "\n".join(["", *lines, *wrong])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
