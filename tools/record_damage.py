"""python tools/record_damage.py [times=1000] [commands=0] [seed=0] [where=FOLDER] [json=FILE]

Damages the records of small sweeps at random, one thing at a time, and asks whether anybody notices: a finished sweep,
and one of a run that was killed and a run that was stopped. Each damage is judged in this process by what
`python -m grpo_sweeps.verify` finds, by what `status` and the report say, and by the report's tables and the records
that it reads:

    named      verify says so, or the report refuses or leaves the run out and says so
    harmless   nothing is said, and every table and record that the report reads is the same
    silent     nothing is said, and something is another: what must not be
    false      something is said of a change that touches no record (a copy, a touched file, a file of somebody else's)

commands: that many of the same damages, evenly spread, are judged once more by the commands `verify` and `report` in
processes of their own: by what they print, and by every table that the report writes.

Prints a line per silent or false trial, a table by damage and the seed. Exit code 1 where a trial was silent or false.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from fault_trials import ROOT, Trial
from paired import options_of

from grpo_sweeps.report.read.query import ReportError, Sweep, load_sweep
from grpo_sweeps.report.remarks import missing
from grpo_sweeps.report.tables.pooled import by_k, ranks, table1
from grpo_sweeps.sweep.overview import collect
from grpo_sweeps.tracking.glance import Finding
from grpo_sweeps.verify import findings, run_folders

SWEEP = "trial"
LEFT_OUT = {"log.txt", ".lock"}  # no record: nothing is computed from them
FRAMES = ("metrics", "groups", "evals", "completions", "updates")
COLUMNS = ["run", "arm", "R", "seed"]  # of the runs, of what decides where their records count


@dataclass
class Outcome:
    """All trials: how each was judged, by the kind of the damage."""

    verdicts: Counter[tuple[str, str]] = field(default_factory=Counter)
    seen_by_status: int = 0
    silent: list[str] = field(default_factory=list)

    def count(self, verdict: str) -> int:
        return sum(number for (_, found), number in self.verdicts.items() if found == verdict)


def finished_sweep(folder: Path) -> Path:
    """A small sweep that has run to its end; returns the folder of its runs."""
    trial = Trial(folder, 0)
    if not trial.complete():
        raise RuntimeError(f"the sweep does not finish; see {folder / 'out'}")
    return folder / "runs"


def interrupted_sweep(folder: Path, seed: int) -> Path:
    """A run that was killed and one that was stopped, each at a random step; returns the folder of its runs."""
    rng = random.Random(seed)
    before = 0
    for R, number in ((2, signal.SIGKILL), (4, signal.SIGINT)):
        trial = Trial(folder, seed, extra=(f"R={R}",))
        trial.pause(0.03)
        wanted = before + rng.randrange(4, 9)
        process = trial.start()
        while trial.steps() < wanted and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(number)
        trial.wait(process)
        before = trial.steps()
    return folder / "runs"


# --- damages: each takes the folder of the runs and a generator, and says what it did -------------------------------

Damage = Callable[[Path, random.Random], str]


def _files(runs: Path) -> list[Path]:
    found = [path for path in sorted(runs.glob(f"{SWEEP}/*/**/*")) if path.is_file()]
    return [path for path in found if path.name not in LEFT_OUT and ".cache" not in path.parts]


def _replace(path: Path, data: bytes) -> None:
    """Put a new file in the place of one that is linked from elsewhere."""
    path.unlink()
    path.write_bytes(data)


def _choose(runs: Path, rng: random.Random, least: int = 1) -> Path:
    """A file with so many bytes: first a kind of them, so that checkpoints and sources are not most of them."""
    files = [path for path in _files(runs) if path.stat().st_size >= least]
    kinds = sorted({_kind(path, runs) for path in files})
    kind = rng.choice(kinds)
    return rng.choice([path for path in files if _kind(path, runs) == kind])


def _kind(path: Path, runs: Path) -> str:
    parts = path.relative_to(runs).parts[2:]
    return parts[0] if len(parts) == 1 else f"{parts[0]}/{path.suffix}"


def delete_file(runs: Path, rng: random.Random) -> str:
    path = _choose(runs, rng, 0)
    path.unlink()
    return f"{path.relative_to(runs)} deleted"


def delete_folder(runs: Path, rng: random.Random) -> str:
    folder = rng.choice(sorted({path.parent for path in _files(runs) if path.parent.parent.parent != runs}))
    shutil.rmtree(folder)
    return f"{folder.relative_to(runs)} deleted"


def truncate(runs: Path, rng: random.Random) -> str:
    path = _choose(runs, rng)
    size = rng.randrange(path.stat().st_size)
    _replace(path, path.read_bytes()[:size])
    return f"{path.relative_to(runs)} cut to {size} bytes"


def cut_lines(runs: Path, rng: random.Random) -> str:
    path = rng.choice([path for path in _files(runs) if path.suffix == ".jsonl" and path.stat().st_size])
    lines = path.read_bytes().splitlines(keepends=True)
    first = rng.randrange(len(lines))
    last = len(lines) if rng.random() < 0.5 else rng.randrange(first, len(lines)) + 1
    _replace(path, b"".join(lines[:first] + lines[last:]))
    return f"{path.relative_to(runs)} without lines {first} to {last - 1} of {len(lines)}"


def flip_bit(runs: Path, rng: random.Random) -> str:
    path = _choose(runs, rng)
    data = bytearray(path.read_bytes())
    at, bit = rng.randrange(len(data)), rng.randrange(8)
    data[at] ^= 1 << bit
    _replace(path, bytes(data))
    return f"{path.relative_to(runs)}: bit {bit} of byte {at} of {len(data)} flipped"


def edit_number(runs: Path, rng: random.Random) -> str:
    names = (".jsonl", ".json", ".yaml")
    path = rng.choice([path for path in _files(runs) if path.suffix in names and path.stat().st_size])
    data = bytearray(path.read_bytes())
    digits = [i for i, byte in enumerate(data) if chr(byte).isdigit()]
    if not digits:
        return edit_number(runs, rng)
    at = rng.choice(digits)
    data[at] = ord(rng.choice([c for c in "0123456789" if c != chr(data[at])]))
    _replace(path, bytes(data))
    return f"{path.relative_to(runs)}: another digit at byte {at}"


def overwrite(runs: Path, rng: random.Random) -> str:
    path = _choose(runs, rng)
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.randrange(1, 4096))
    data[start:end] = bytes(end - start)
    _replace(path, bytes(data))
    return f"{path.relative_to(runs)}: zeros from byte {start} to {end}"


def double_lines(runs: Path, rng: random.Random) -> str:
    path = rng.choice([path for path in _files(runs) if path.suffix == ".jsonl" and path.stat().st_size])
    lines = path.read_bytes().splitlines(keepends=True)
    at = rng.randrange(len(lines))
    _replace(path, b"".join(lines[: at + 1] + lines[at:]))
    return f"{path.relative_to(runs)}: line {at} twice"


def of_another_run(runs: Path, rng: random.Random) -> str:
    """A file or folder of one run in the place of the other's."""
    one, other = rng.sample(run_folders(runs / SWEEP), 2)
    names = sorted({path.name for path in one.iterdir() if not path.name.startswith(".")} - LEFT_OUT)
    name = rng.choice([name for name in names if (other / name).exists()])
    for place in [one / name]:
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    copy = shutil.copytree if (other / name).is_dir() else shutil.copyfile
    copy(other / name, one / name)
    return f"{(one / name).relative_to(runs)} is that of {other.name}"


def harmless(runs: Path, rng: random.Random) -> str:
    """What people and machines do without meaning harm."""
    path, kind = _choose(runs, rng, 0), rng.choice(["touch", "file", "hidden", "folder", "cache", "copy", "log"])
    run = rng.choice(run_folders(runs / SWEEP))
    if kind == "touch":
        _replace(path, path.read_bytes())
        os.utime(path, (rng.randrange(2**31), rng.randrange(2**31)))
    elif kind in ("file", "hidden"):
        place = rng.choice([run, run / "grams", run / "checkpoints", runs / SWEEP])
        (place / (".hidden" if kind == "hidden" else "notes.txt")).write_bytes(rng.randbytes(50))
    elif kind == "folder":
        (run / rng.choice(["backup", "checkpoints/old"])).mkdir()
    elif kind == "cache":
        shutil.rmtree(run / ".cache", ignore_errors=True)
    elif kind == "copy":
        shutil.copytree(runs, runs.with_name("copied"))
        shutil.rmtree(runs)
        shutil.copytree(runs.with_name("copied"), runs)
        shutil.rmtree(runs.with_name("copied"))
    else:
        with contextlib.suppress(FileNotFoundError):
            (run / "log.txt").unlink()
    return f"harmless: {kind} {path.relative_to(runs)}"


DAMAGES: dict[str, Damage] = {
    "file deleted": delete_file, "folder deleted": delete_folder, "cut": truncate, "lines cut": cut_lines,
    "bit flipped": flip_bit, "digit changed": edit_number, "zeros": overwrite, "line doubled": double_lines,
    "another run's": of_another_run, "harmless": harmless,
}  # fmt: skip

# --- judging --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What is said of the records, and what the report would take from them; `refused`: why it takes nothing."""

    said: list[str]
    tables: dict[str, str]
    noted: list[str]
    refused: str = ""


def look(runs: Path) -> Seen:
    """Verify the sweep and read it as the report does."""
    said = [finding.sentence for folder in run_folders(runs / SWEEP) for finding in findings(folder)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            sweep = load_sweep(SWEEP, runs, keep_parts=False)
            tables = _tables(sweep)
            noted = sorted(missing(sweep))
        except ReportError as error:
            return Seen(said, {}, [], str(error))
    noted += [str(one.message) for one in caught if "damaged and is left out" in str(one.message)]
    return Seen(said, tables, noted)


def look_by_commands(runs: Path) -> Seen:
    """The same by `verify` and `report`, in processes of their own: what they say, and the tables that are written."""
    code, found, complaint = _command("verify", f"sweep={SWEEP}", f"runs_dir={runs}", "json=true")
    if code not in (0, 1) or code != bool(json.loads(found or "[]")):
        raise RuntimeError(f"verify of {runs}: exit code {code}: {found}{complaint}")
    said = [_finding(one) for one in json.loads(found)]
    out = runs.parent / "report"
    shutil.rmtree(out, ignore_errors=True)
    code, told, complaint = _command("report", f"sweep={SWEEP}", f"runs_dir={runs}", f"out={out}")
    if code == 2:
        return Seen(said, {}, [], complaint)
    if code:
        raise RuntimeError(f"the report of {runs}: exit code {code}: {complaint}")
    tables = {path.name: path.read_text() for path in sorted(out.glob("*.csv"))}
    noted = [*json.loads((out / "manifest.json").read_text())["missing"], *complaint.splitlines()]
    return Seen(said, tables, [*noted, *(line for line in told.splitlines() if line.startswith("looks wrong"))])


def _finding(one: dict[str, str]) -> str:
    return Finding(**{key: value for key, value in one.items() if key != "sweep"}).sentence


def _command(name: str, *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    done = subprocess.run([sys.executable, "-m", f"grpo_sweeps.{name}", *words], env=env, capture_output=True,
                          text=True, check=False)  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def _tables(sweep: Sweep) -> dict[str, str]:
    runs = sweep.runs[COLUMNS].sort_values("run").to_csv()
    frames = {name: getattr(sweep, name) for name in FRAMES}
    made = {name: _text(frame) for name, frame in frames.items()}
    return made | {
        "runs": runs,
        "table1": _text(table1(sweep)),
        "ranks": _text(ranks(sweep)),
        "by_k": _text(by_k(sweep)),
    }


def _text(frame: pd.DataFrame) -> str:
    columns = sorted(frame.columns)
    return frame[columns].to_csv(float_format="%.17g")


def verdict(before: Seen, after: Seen, kind: str) -> str:
    """named, harmless, silent or false, see above."""
    new = set(after.said) - set(before.said)
    if kind == "harmless":
        return "false" if new or after.refused or after.tables != before.tables else "harmless"
    if new or after.refused:
        return "named"
    if after.tables == before.tables:
        return "harmless"
    return "named" if set(after.noted) - set(before.noted) and len(after.said) > len(before.said) else "silent"


def trial(reference: Path, before: Seen, seed: int, where: Path, out: Outcome, judge: Callable[[Path], Seen]) -> None:
    """One damage of a copy of the sweep, judged."""
    rng = random.Random(seed)
    kind = rng.choice(sorted(DAMAGES))
    runs = where / "runs"
    shutil.rmtree(where, ignore_errors=True)
    shutil.copytree(reference, runs, copy_function=os.link)
    told = DAMAGES[kind](runs, rng)
    after = judge(runs)
    found = verdict(before, after, kind)
    out.verdicts[kind, found] += 1
    with contextlib.suppress(Exception):
        out.seen_by_status += any(row.lacks or row.damage for row in collect(runs, SWEEP))
    if found in ("silent", "false"):
        differing = [name for name, text in after.tables.items() if before.tables.get(name) != text]
        out.silent.append(f"{found}: seed {seed}, {kind}: {told}; differs: {differing}; says {after.said[:2]}")
        print(out.silent[-1], flush=True)


def trials(
    references: list[Path], numbers: Iterable[int], seed: int, where: Path, judge: Callable[[Path], Seen] = look
) -> Outcome:
    """The damages of these numbers, of the sweeps in turn: a number and a seed are the same damage for every judge."""
    out = Outcome()
    before = [judge(reference) for reference in references]
    for number in numbers:
        which = number % len(references)
        trial(references[which], before[which], seed * 1_000_000 + number, where / "damaged", out, judge)
    return out


def table(out: Outcome) -> str:
    """A Markdown table, a line per kind of damage."""
    verdicts = ("named", "harmless", "silent", "false")
    lines = [f"| damage | trials | {' | '.join(verdicts)} |", "| --- " * 6 + "|"]
    for kind in sorted({kind for kind, _ in out.verdicts}):
        counts = [out.verdicts[kind, found] for found in verdicts]
        lines.append(f"| {kind} | {sum(counts)} | {' | '.join(map(str, counts))} |")
    totals = [out.count(found) for found in verdicts]
    lines.append(f"| all | {sum(totals)} | {' | '.join(map(str, totals))} |")
    return "\n".join([*lines, f"{out.seen_by_status} of them show in `status` at a quick look"])


def main(argv: list[str]) -> int:
    """The command; returns its exit code."""
    options = options_of(argv, {"times": "1000", "commands": "0", "seed": "0", "where": "", "json": ""}, __doc__)
    if isinstance(options, int):
        return options
    where = Path(options["where"] or tempfile.mkdtemp(prefix="damage-")).resolve()
    seed, times, again = int(options["seed"]), int(options["times"]), int(options["commands"])
    if again > times:
        print(f"commands={again}: at most times={times}", file=sys.stderr)
        return 2
    print(f"seed {seed}, in {where}", flush=True)
    references = [finished_sweep(where / "finished"), interrupted_sweep(where / "interrupted", seed)]
    said = [one for reference in references for one in look(reference).said]
    for sentence in said:
        print(f"of the undamaged sweeps: {sentence}")
    outcomes = {"in this process": trials(references, range(times), seed, where)}
    if again:
        numbers = sorted({i * times // again for i in range(again)})
        outcomes["by the commands"] = trials(references, numbers, seed, where, look_by_commands)
    for how, out in outcomes.items():
        print(f"\nJudged {how}:\n\n{table(out)}")
    if options["json"]:
        found = {
            how: {
                "found": {f"{kind}: {judged}": number for (kind, judged), number in out.verdicts.items()},
                "silent": out.silent,
            }
            for how, out in outcomes.items()
        }
        Path(options["json"]).write_text(json.dumps({"seed": seed, **found}, indent=1))
    return 1 if any(out.count("silent") or out.count("false") for out in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
