"""python tools/quiet_faults.py [faults=reward,data,...|all] [times=10] [seed=0] [where=FOLDER] [json=FILE]

What changes or vanishes quietly: each trial takes a small sweep that has finished or that was killed on its way, does
one thing to it (an edited reward, another data set, a deleted record, a lock kept by a helper, a ruined MLflow store),
gives the same command again, and says whether that was noticed, and what was lost, doubled or made false. What is said
of a harmless change (comments, line ends, another copy of the checkout, a wheel) counts as false. Prints a line a trial
with its seed, and one table. Exit code 1 where anything was lost, doubled or false, or a fault was not noticed.

Commands are forks of this process, which has loaded the libraries: a trial takes seconds.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: F401  # loaded once for all forks
import transformers  # noqa: F401
from fault_check import Difference, compare
from fault_trials import ROOT, mounted
from paired import options_of

from grpo_sweeps import run as run_entry
from grpo_sweeps import sync as sync_entry
from grpo_sweeps import verify as verify_entry
from grpo_sweeps.models import tiny_path
from grpo_sweeps.report.read.query import ReportError, load_sweep
from grpo_sweeps.report.remarks import NO_COMMIT, UNCOMMITTED, check_commits, missing
from grpo_sweeps.report.tables.pooled import table1
from grpo_sweeps.tracking.lines import parse_lines
from grpo_sweeps.tracking.mlflow_store import LARGEST
from grpo_sweeps.tracking.status import read_status

ENTRIES = {"run": run_entry.main, "sync": sync_entry.main, "verify": verify_entry.main}
STEPS, LONGEST_S = 6, 240.0
WORDS = (
    "-m", "R=2,4", "sweep=trial", f"trainer.steps={STEPS}", "trainer.prompts=2", "trainer.eval_every=3",
    "trainer.eval_problems=4", "trainer.eval_samples=1", "trainer.checkpoint_every=2", "trainer.keep_checkpoints=2",
    "trainer.device=cpu", "task=gsm8k", "task.path=data", "task.prompt='{question}'", "rollout.max_new_tokens=8",
    "analysis.keep_completions_every=2", "reward=custom", "estimator=custom", "estimator._target_=own.advantages",
    "model.path=model",
)  # fmt: skip
OWN = """
import os, signal, subprocess, sys, tempfile, time
from pathlib import Path

from own_words import MODULUS

HERE = Path(__file__).parent


def advantages(rewards):
    return rewards - rewards.mean(1)[:, None]


def reward(completion, problem, seed):
    time.sleep(float((HERE / "pause").read_text()))
    return float(sum(map(ord, completion)) % MODULUS == 0)


def forking(completion, problem, seed):
    if not (HERE / "forked").exists():
        (HERE / "forked").touch()
        if os.fork() == 0:  # a helper that lives on, with all that it was left
            (HERE / "helper").write_text(str(os.getpid()))
            time.sleep(120)
            os._exit(0)
    return reward(completion, problem, seed)


def moving(completion, problem, seed):
    os.chdir(tempfile.gettempdir())
    return reward(completion, problem, seed)


def clearing(completion, problem, seed):
    signal.alarm(0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return reward(completion, problem, seed)


def hanging(completion, problem, seed):
    if (HERE / "hang").exists():
        subprocess.Popen(["sleep", "300"])
        time.sleep(300)
    return reward(completion, problem, seed)
"""


@dataclass
class Seen:
    """What came of one trial. `noticed` is None where there is nothing to notice, because nothing may be lost."""

    noticed: bool | None
    lost: int = 0
    doubled: int = 0
    false: int = 0
    note: str = ""


@dataclass
class Place:
    """The folder of one trial, with the user's own files in it."""

    folder: Path
    seed: int
    rng: random.Random = field(init=False)
    before: Callable[[Place], None] | None = None  # called in each command's process

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.folder.mkdir(parents=True)
        (self.folder / "own.py").write_text(OWN)
        (self.folder / "own_words.py").write_text("MODULUS = 2\n")
        self.data("old")
        shutil.copytree(tiny_path(), self.folder / "model")
        self.pause(0.0)

    @property
    def sweep_dir(self) -> Path:
        return self.folder / "runs" / "trial"

    @property
    def runs(self) -> list[Path]:
        return sorted(path.parent for path in self.sweep_dir.glob("[!.]*/config.yaml"))

    def any_run(self) -> Path:
        return self.rng.choice(self.runs)

    def pause(self, seconds: float) -> None:
        """How long each call of the reward takes."""
        (self.folder / "pause").write_text(str(seconds))

    def data(self, word: str) -> None:
        (self.folder / "data").mkdir(exist_ok=True)
        for split in ("train", "test"):
            lines = [json.dumps({"question": f"{word} {split} {i}?", "answer": f"#### {i}"}) for i in range(40)]
            (self.folder / "data" / f"{split}.jsonl").write_text("\n".join(lines))

    def take(self, base: Place) -> None:
        """The records of another place."""
        shutil.copytree(base.folder / "runs", self.folder / "runs")

    def start(self, *words: str, entry: str = "run") -> int:
        """A command in the background, as a fork; its process id."""
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.setsid()
                with open(self.folder / "out", "ab") as out:
                    os.dup2(out.fileno(), 1)
                    os.dup2(out.fileno(), 2)
                sys.stdout, sys.stderr = io.TextIOWrapper(io.FileIO(1, "w")), io.TextIOWrapper(io.FileIO(2, "w"))
                sys.stdout.reconfigure(write_through=True)
                sys.stderr.reconfigure(write_through=True)
                os.chdir(self.folder)
                sys.dont_write_bytecode = True  # an edit within a second that keeps the size would not be seen
                sys.path.insert(0, str(self.folder))
                os.environ["PYTHONPATH"] = os.pathsep.join([str(self.folder), str(ROOT)])
                if self.before is not None:
                    self.before(self)
                code = ENTRIES[entry](list(words))
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 70
            finally:
                os._exit(code)
        return child

    def wait(self, child: int) -> int:
        deadline = time.monotonic() + LONGEST_S
        while time.monotonic() < deadline:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return 124

    def command(self, *words: str, entry: str = "run") -> tuple[int, str]:
        """Exit code and what it printed."""
        out = self.folder / "out"
        before = out.stat().st_size if out.exists() else 0
        code = self.wait(self.start(*words, entry=entry))
        return code, out.read_bytes()[before:].decode(errors="replace")

    def sweep(self, *more: str, function: str = "reward", tracking: str = "local") -> tuple[str, ...]:
        """The command's words; those of `more` in place of others of their key."""
        given = {word.partition("=")[0] for word in more}
        words = (*WORDS, f"reward._target_=own.{function}", f"tracking={tracking}")
        return (*(word for word in words if word.partition("=")[0] not in given), *more)

    def steps(self) -> int:
        found = self.sweep_dir.glob("[!.]*/metrics.jsonl")
        return sum(path.read_bytes().count(b'"step_time"') for path in found)

    def until(self, child: int, steps: int) -> bool:
        """Wait for so many steps of all runs together; False where the command ended before."""
        while self.steps() < steps:
            if os.waitpid(child, os.WNOHANG)[0]:
                return False
            time.sleep(0.002)
        time.sleep(self.rng.uniform(0, 0.05))
        return True

    def killed(self, *words: str, signum: int = signal.SIGKILL, steps: int | None = None) -> int:
        """Start the command and end it by a signal at a random moment; its exit code."""
        self.pause(0.004)
        child = self.start(*words)
        if not self.until(child, self.rng.randrange(1, 2 * STEPS - 2) if steps is None else steps):
            raise RuntimeError(f"{self.folder}: the command ended before the fault")
        os.kill(child, signum)
        code = self.wait(child)
        self.pause(0.0)
        return code

    def records(self) -> dict[str, bytes]:
        """Every file of the records."""
        kinds = ("metrics.jsonl", "grams/*", "evals/*", "completions/*", "updates/*", "checkpoints/*/*")
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for run in self.runs for kind in kinds for path in run.glob(kind) if path.is_file()
        }  # fmt: skip

    def against(self, reference: Place) -> Difference:
        """What is lost, doubled or different, run by run of the same R."""
        total, found = Difference(), {_R(run): run for run in self.runs}
        for twin in reference.runs:
            total.add(compare(found.get(_R(twin), self.folder / "none"), twin))
        return total

    def table(self) -> str:
        """Table 1 as the report's function gives it."""
        return table1(load_sweep("trial", self.folder / "runs")).drop(columns="commit", errors="ignore").to_csv()


def _R(run: Path) -> int:
    text = (run / "config.yaml").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("R:")).split()[1])


@dataclass
class Bases:
    """What trials start from: a finished sweep, and the folder for those that are killed."""

    where: Path
    finished: Place

    def interrupted(self, place: Place) -> None:
        """Begin the sweep in the place itself and kill it after a random step behind the checkpoint of a run: a run
        without one begins anew, and nothing is mixed."""
        place.killed(*place.sweep(), steps=place.rng.choice([4, 5, 9]))

    def either(self, place: Place) -> str:
        if place.rng.random() < 0.5:
            self.interrupted(place)
            return "interrupted"
        place.take(self.finished)
        return "finished"


Kind = Callable[[Place, Bases], Seen]


def _whole(place: Place, bases: Bases, noticed: bool | None, note: str, bad: int = 0) -> Seen:
    found = place.against(bases.finished)
    return Seen(noticed, found.lost, found.doubled, bad + found.unequal + (found.largest > 0), note)


def changed(path: str, edit: Callable[[Place, Path], None]) -> Kind:
    """Something that makes a run changes: refused with exit code 2, nothing of the record touched; put back, all is as
    if nothing had been."""

    def kind(place: Place, bases: Bases) -> Seen:
        state = bases.either(place)
        more = ("trainer.steps=8",) if state == "finished" and place.rng.random() < 0.5 else ()
        before, file = place.records(), place.folder / path
        kept = file.read_bytes()
        edit(place, file)
        code, said = place.command(*place.sweep(*more))
        noticed = code == 2 and "stale" in said and "redo=stale" in said
        touched = place.records() != before
        file.write_bytes(kept)
        code, _ = place.command(*place.sweep())
        return _whole(place, bases, noticed, f"{state}{' and more steps' if more else ''}", touched + (code != 0))

    return kind


def _replaced(old: str, new: str) -> Callable[[Place, Path], None]:
    def edit(place: Place, file: Path) -> None:
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    return edit


def _flipped(place: Place, file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[place.rng.randrange(len(data) // 2, len(data))] ^= 1 << place.rng.randrange(8)
    file.write_bytes(data)


def _other_data(place: Place, file: Path) -> None:
    file.write_text(file.read_text().replace("old", place.rng.choice(["new", "odd", "Old"])))


def copied(place: Place, bases: Bases) -> Seen:
    """A run's folder is copied: left out by name, and the table is the same."""
    place.take(bases.finished)
    name = place.rng.choice(["copy", f"{place.rng.randrange(16**12):012x}"])
    shutil.copytree(place.any_run(), place.sweep_dir / name)
    sweep = load_sweep("trial", place.folder / "runs")
    noticed = any(name in note and "a copied or renamed folder is no run" in note for note in sweep.notes)
    code, _ = place.command("sweep=trial", entry="verify")
    return Seen(noticed and code == 1, false=int(place.table() != bases.finished.table()), note=name)


def record_gone(place: Place, bases: Bases) -> Seen:
    """A file or folder of a record is deleted, cut or another's: said by verify and by the same command, which throws
    nothing away."""
    state = bases.either(place)
    run = next(run for run in sorted(place.runs, key=lambda _: place.rng.random()) if (run / "metrics.jsonl").exists())
    kind = place.rng.choice(["delete", "cut", "folder", "checkpoints"])
    if kind in ("delete", "cut"):
        files = [run / "metrics.jsonl", *(run / "grams").glob("segment*"), *(run / "evals").glob("segment*")]
        file = place.rng.choice([file for file in files if file.exists() and file.stat().st_size > 100])
        data = file.read_bytes()
        file.unlink() if kind == "delete" else file.write_bytes(data[: place.rng.randrange(len(data) // 2)])
        what = f"{kind} {file.name}"
    elif kind == "folder":
        folder = place.rng.choice([one for one in ("grams", "evals") if (run / one).is_dir()])
        shutil.rmtree(run / folder)
        what = f"delete {folder}/"
    else:
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        what = "delete checkpoints/"
    before = place.records()
    verified, said = place.command("sweep=trial", entry="verify")
    told, lines = place.command(*place.sweep(*(("trainer.steps=8",) if kind == "checkpoints" else ())))
    kept = before.items() <= place.records().items() or all(
        name in place.records() for name in before if run.name in name
    )
    begun = read_status(run).step > 0
    named, told_so = f"R={_R(run)} seed=0" in said and verified == 1, told != 0 and run.name in lines
    # Checkpoints of a finished run are lacking only where it shall go on.
    noticed = not begun or (told_so and (named or (kind == "checkpoints" and state == "finished")))
    return Seen(noticed, lost=0 if kept else 1, note=f"{state}, {what}, verify {verified}, run {told}")


def damaged_segment(place: Place, bases: Bases) -> Seen:
    """A Parquet segment of an interrupted sweep is damaged: a run refuses before it trains on; of one that had finished
    verify says it."""
    bases.interrupted(place)
    segments = [file for run in place.runs for file in run.glob("*/segment-*.parquet")]
    if not segments:
        return Seen(None, note="no segment yet")
    file = place.rng.choice(segments)
    data = bytearray(file.read_bytes())
    at = place.rng.randrange(4, len(data) - 16)
    for i in range(at, at + 16):
        data[i] ^= 0xFF
    file.write_bytes(data)
    code, said = place.command(*place.sweep())
    verified, told = place.command("sweep=trial", entry="verify")
    if code == 0 and verified == 1 and file.name in told:
        return Seen(True, note=f"{file.parent.name}, byte {at}, of a finished run")
    if code == 0:  # bytes that say nothing: a page's name, a statistic
        return _whole(place, bases, None, f"{file.parent.name}, byte {at}: harmless")
    own = [line for line in said.splitlines() if file.parent.parent.name in line]
    return Seen(bool(own), note=f"{file.parent.name}, byte {at}")


def status_gone(place: Place, bases: Bases) -> Seen:
    """A status is lost or cut: recovered from the records, and the sweep ends as if nothing had been."""
    state = bases.either(place)
    file = place.any_run() / "status.json"
    if place.rng.random() < 0.5:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: place.rng.randrange(40)])
    code, _ = place.command(*place.sweep())
    return _whole(place, bases, None, f"{state}, exit code {code}", code != 0)


def forked(place: Place, bases: Bases) -> Seen:
    """A reward forks a helper, the run is killed: the same command goes on."""
    words = place.sweep(function="forking")
    try:
        place.killed(*words)
        code, _ = place.command(*words)
    finally:
        helper = place.folder / "helper"
        if helper.exists():
            os.kill(int(helper.read_text()), signal.SIGKILL)
    return _whole(place, bases, None, f"exit code {code}", code != 0)


def moved(place: Place, bases: Bases) -> Seen:
    """A reward changes the working directory: one place holds the record, also after a kill."""
    words = place.sweep(function="moving")
    if place.rng.random() < 0.5:
        place.killed(*words)
    code, _ = place.command(*words)
    return _whole(place, bases, None, f"exit code {code}", code != 0)


def alarm_cleared(place: Place, bases: Bases) -> Seen:
    """A reward clears the process's alarms, and the run is told to end: it does so in time, with a checkpoint."""
    words = place.sweep(function="clearing")
    began = time.monotonic()
    place.killed(*words, signum=place.rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR2]))
    took = time.monotonic() - began
    code, _ = place.command(*words)
    return _whole(place, bases, None, f"ended in {took:.1f} s, then exit code {code}", code != 0)


def hung(place: Place, bases: Bases) -> Seen:
    """A reward hangs, with a helper of its own: the run fails with a sentence, leaves no process, and runs again."""
    words = place.sweep("reward_timeout=1", function="hanging")
    place.pause(0.004)
    child = place.start(*words)
    place.until(child, place.rng.randrange(1, STEPS))
    (place.folder / "hang").touch()
    began, code = time.monotonic(), place.wait(child)
    took = time.monotonic() - began
    (place.folder / "hang").unlink()
    text = (place.folder / "out").read_text(errors="replace")
    time.sleep(0.3)
    left = len(_processes_in(place.folder))
    place.pause(0.0)
    again, _ = place.command(*words, "redo=failed")
    noticed = code == 1 and "did not return within 1 s" in text
    return _whole(
        place, bases, noticed, f"after {took:.1f} s, {left} processes left, then {again}", left + (again != 0)
    )


def _processes_in(folder: Path) -> list[int]:
    """Processes whose working directory is the trial's."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            if Path(os.readlink(process / "cwd")) == folder and (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


def diverged(place: Place, bases: Bases) -> Seen:
    """A learning rate that ends in weights of 1e29: named."""
    lr = 10.0 ** place.rng.uniform(4, 32)
    code, _ = place.command(*place.sweep(f"trainer.lr={lr:.3g}", "analysis.update_every=0"))
    ends = [read_status(run) for run in place.runs]
    told = all("has diverged" in f"{one.error} {' '.join(one.notes)}" for one in ends)
    return Seen(told, note=f"lr={lr:.2g}, exit code {code}")


SMALL = "small"  # the folder of a file system that is soon full


def _stored(place: Place, uri: str = "sqlite:///mlflow.db") -> Seen:
    """MLflow against the records after a sync: points that are lost, there twice or of another value, parameters and
    states that differ, runs too many. Read by a process of its own."""
    code, said = place.command(f"uri={uri}", "experiment=grpo_sweeps", "prune=true", entry="sync")
    told, counts = place.command(uri, entry="stored")
    if told:
        return Seen(None, false=1, note=f"sync {code}: {counts[-300:]}")
    lost, doubled, false = json.loads(counts.strip().splitlines()[-1])
    return Seen(None, lost, doubled, false + (code != 0), f"sync {code}{': ' + said[-150:] if code else ''}")


def stored(words: list[str]) -> int:
    """Print what MLflow has too little, twice and wrong, as a JSON list of three numbers."""
    import mlflow
    import yaml

    from grpo_sweeps.config.choices import choice_names
    from grpo_sweeps.tracking import provenance
    from grpo_sweeps.tracking.mlflow_copy import flatten

    client = mlflow.MlflowClient(words[0])
    experiment = client.get_experiment_by_name("grpo_sweeps")
    found = client.search_runs([experiment.experiment_id]) if experiment else []
    children = {run.data.tags["identity"]: run for run in found if run.data.tags["grpo_sweeps.kind"] == "run"}
    folders = {path.parent.name: path.parent for path in Path("runs").glob("[!.]*/[!.]*/status.json")}
    sweeps = {folder.parent.name for folder in folders.values()}
    lost = doubled = 0
    false = abs(len(found) - len(folders) - len(sweeps)) + len(children.keys() ^ folders.keys())
    for name, folder in folders.items():
        here, run = _points_recorded(folder), children.get(name)
        if run is None:
            lost += len(here)
            continue
        points = [point for key in run.data.metrics for point in client.get_metric_history(run.info.run_id, key)]
        there = {(point.key, point.step): repr(point.value) for point in points}
        lost += len(here.keys() - there.keys())
        doubled += len(points) - len(there)
        false += len(there.keys() - here.keys()) + sum(there[at] != here[at] for at in here.keys() & there.keys())
        config = yaml.safe_load((folder / "config.yaml").read_text())
        source = provenance.read(folder, with_diff=False)
        own = flatten(config) | flatten(choice_names(config, source.choices if source else {}))
        false += run.data.params != {key: value[:6000] for key, value in own.items()}
        false += run.info.status != "FINISHED"
    print(json.dumps([lost, doubled, false]))
    return 0


def _points_recorded(run_dir: Path) -> dict[tuple[str, int], str]:
    """{(metric, step): value} of a record's lines; MLflow knows no infinity, and keeps the largest number for it."""
    lines, _ = parse_lines((run_dir / "metrics.jsonl").read_bytes().splitlines())
    values = {(key, line["step"]): float(v) for line in lines for key, v in line.items() if key not in ("step", "time")}
    return {at: repr(math.copysign(LARGEST, v) if math.isinf(v) else v) for at, v in values.items()}


ENTRIES["stored"] = stored


def _kill_all(place: Place) -> None:
    """SIGKILL for every process of the trial, the one that copies too."""
    for process in _processes_in(place.folder):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def mlflow_killed(place: Place, bases: Bases) -> Seen:
    """All processes are killed within the first seconds of a new store: it is whole in the end."""
    child = place.start(*place.sweep(tracking="mlflow"))
    delay = place.rng.uniform(0.5, 9.0)
    time.sleep(delay)
    size = (place.folder / "mlflow.db").stat().st_size if (place.folder / "mlflow.db").exists() else 0
    _kill_all(place)
    place.wait(child)
    place.command(*place.sweep(tracking="mlflow"))
    seen = _stored(place)
    seen.note = f"after {delay:.1f} s, the store of {size / 1e3:.0f} kB; {seen.note}"
    return seen


def mlflow_disk(place: Place, bases: Bases) -> Seen:
    """The disk of a new store is full in its first seconds: it is whole in the end."""
    left, uri = place.rng.randrange(0, 800_000), f"sqlite:///{SMALL}/mlflow.db"
    mount = mounted(place.folder / SMALL)
    if reason := next(mount):
        return Seen(None, note=f"skipped: {reason}")
    try:
        filler = place.folder / SMALL / "filler"
        filler.write_bytes(bytes(96 * 2**20 - 65536 - left))
        place.command(*place.sweep(f"tracking.uri={uri}", tracking="mlflow"))
        filler.unlink()
        seen = _stored(place, uri)
    finally:
        next(mount, None)
    seen.note = f"{left / 1e3:.0f} kB were left; {seen.note}"
    return seen


def mlflow_changed(place: Place, bases: Bases) -> Seen:
    """Points are lost or changed, a run is deleted there or here, or the sweep is renamed: a sync makes them equal."""
    place.command(*place.sweep(tracking="mlflow"))
    what = place.rng.choice(["points lost", "value changed", "parameter lost", "run deleted here", "sweep renamed"])
    with closing(sqlite3.connect(place.folder / "mlflow.db")) as database, database:
        run = place.rng.choice([row[0] for row in database.execute(
            "SELECT run_uuid FROM tags WHERE key = 'grpo_sweeps.kind' AND value = 'run'")])  # fmt: skip
        if what == "points lost":
            database.execute("DELETE FROM metrics WHERE run_uuid = ? AND step = ?", (run, place.rng.randrange(STEPS)))
        elif what == "value changed":
            database.execute("UPDATE metrics SET value = 9 WHERE run_uuid = ? AND key = 'reward' AND step = 1", (run,))
        elif what == "parameter lost":
            database.execute("DELETE FROM params WHERE run_uuid = ? AND key = 'trainer.lr'", (run,))
    if what == "run deleted here":
        shutil.rmtree(place.any_run())
    elif what == "sweep renamed":
        place.sweep_dir.rename(place.sweep_dir.with_name("renamed"))
    seen = _stored(place)
    seen.note = f"{what}; {seen.note}"
    return seen


def package_changed(place: Place, bases: Bases) -> Seen:
    """The package's own code is another: an unfinished run is refused, a finished one skipped with a line; a comment is
    nothing."""
    state, package = bases.either(place), _checkout(place)
    words, before = place.sweep(), place.records()
    comment = package / "grpo_sweeps" / "loop" / "train.py"
    comment.write_text(f"# {place.rng.random()}\n{comment.read_text()}")
    quiet = _by_another(place, package, *words, "dry_run=true")
    file = package / "grpo_sweeps" / "estimators" / place.rng.choice(["group.py", "batch.py", "aggregation.py"])
    file.write_text(f"{file.read_text()}\n\nANOTHER = {place.rng.random()}\n")
    code, said = _by_another(place, package, *words)
    noticed = "other code of the package" in said and code == (0 if state == "finished" else 1)
    alarm = "other code" in quiet[1]
    touched = not before.items() <= place.records().items()  # a run that had not begun is begun by the other code
    code, _ = place.command(*words)
    return _whole(place, bases, noticed, f"{state}, {file.name}", alarm + touched + (code != 0))


def _checkout(place: Place) -> Path:
    """A copy of what a checkout holds of the package."""
    package = place.folder / "package"
    for name in ("grpo_sweeps", "hydra_plugins", "conf", "sweeps"):
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__", "local"))
    (package / "README.md").write_text("As it was.\n")
    return package


def _each(files: Iterable[Path], edit: Callable[[bytes], bytes]) -> None:
    for file in files:
        file.write_bytes(edit(file.read_bytes()))


def _later(files: Iterable[Path]) -> None:
    for file in files:
        os.utime(file, (2e9, 2e9))


def _commented(data: bytes) -> bytes:
    return b"# A comment.\n" + data + b"\n\n# Another.\n"


def _other_line_ends(data: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n")


def _git(package: Path, *words: str) -> None:
    named = ("-c", "user.name=x", "-c", "user.email=x@x", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *named, *words], cwd=package, check=True, capture_output=True)


def _committed(package: Path) -> None:
    """A commit of its own, and then an edited README: the same code of another commit with uncommitted changes."""
    _git(package, "init")
    _git(package, "add", ".")
    _git(package, "commit", "-m", "x")
    (package / "README.md").write_text("Edited.\n")


def _others(package: Path) -> None:
    """A checkout that is another user's: git tells nothing of it."""
    _committed(package)
    for path in (package, *package.rglob("*")):
        os.chown(path, 65534, 65534)


def _wheel(package: Path) -> None:
    """What a wheel of this checkout holds, in place of the copy."""
    shutil.rmtree(package)
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*words, "--wheel-dir", folder, str(ROOT)], check=True)
        (built,) = Path(folder).glob("*.whl")
        zipfile.ZipFile(built).extractall(package)


def _code_of(package: Path) -> list[Path]:
    return [path for path in package.rglob("*.py") if "benchmarks" not in path.parts]


OWN_CHANGES: dict[str, Callable[[Place], object]] = {
    "own files touched": lambda p: _later(path for path in p.folder.rglob("*") if "runs" not in path.parts),
    "own comments": lambda p: _each(p.folder.glob("own*.py"), _commented),
    "own line ends": lambda p: _each(p.folder.glob("own*.py"), _other_line_ends),
    "own docstrings": lambda p: _each(p.folder.glob("own*.py"), lambda data: b'"""Says something."""\n' + data),
    "line ends of the data": lambda p: _each((p.folder / "data").glob("*"), _other_line_ends),
    "a file beside": lambda p: [(p.folder / place / "notes.txt").write_text("x") for place in ("model", "data", ".")],
}
PACKAGE_CHANGES: dict[str, Callable[[Path], object]] = {
    "a copy elsewhere": lambda package: None,
    "touched": lambda package: _later(package.rglob("*")),
    "comments": lambda package: _each(_code_of(package), lambda data: data + b"\n# Another.\n"),
    "line ends": lambda package: _each(_code_of(package), _other_line_ends),
    "another commit, README edited": _committed,
    "another user's": _others,
    "a wheel": _wheel,
}


def harmless(place: Place, bases: Bases) -> Seen:
    """A change that no result depends on: the same command says what it says without the change and ends as it would,
    and the report has no remark about it."""
    if place.rng.random() < 0.25:
        bases.interrupted(place)
        state, more = "interrupted", ("dry_run=true",)
    else:
        place.take(bases.finished)
        state, more = "finished", ()
    what = place.rng.choice([*OWN_CHANGES, *PACKAGE_CHANGES])
    words = place.sweep()
    first = place.command(*words, *more)
    if what in OWN_CHANGES:
        OWN_CHANGES[what](place)
        again = place.command(*words, *more)
        code = place.command(*words)[0] if more else again[0]
    else:
        package = _checkout(place)
        PACKAGE_CHANGES[what](package)
        again = _by_another(place, package, *words, *more)
        code = _by_another(place, package, *words)[0] if more else again[0]
    new = sorted(set(again[1].splitlines()) - set(first[1].splitlines()))
    new += sorted(_remarks(place) - _remarks(bases.finished))
    note = f"{state}, {what}{': ' if new else ''}{'; '.join(new)[:300]}"
    return _whole(place, bases, None, note, bool(new) + (again[0] != first[0]) + (code != 0))


def _remarks(place: Place) -> set[str]:
    """What the runs' notes and the report say of the runs besides their numbers, but for where git knows them from."""
    notes = {note for run in place.runs for note in read_status(run).notes}
    sweep = load_sweep("trial", place.folder / "runs", keep_parts=False)
    try:
        check_commits(sweep, None)
    except ReportError as error:
        return {*notes, str(error)}
    return {*notes, *sweep.notes, *missing(sweep)} - {NO_COMMIT, UNCOMMITTED}


def at_once(place: Place, bases: Bases) -> Seen:
    """Twelve of the same command at once, one of them killed: every run is made once."""
    place.pause(0.002)
    children = [place.start(*place.sweep()) for _ in range(12)]
    time.sleep(place.rng.uniform(0.2, 3.0))
    os.kill(place.rng.choice(children), signal.SIGKILL)
    codes = sorted(place.wait(child) for child in children)
    place.pause(0.0)
    code, _ = place.command(*place.sweep())
    return _whole(place, bases, None, f"exit codes {codes}, then {code}", code != 0)


def late_renames(place: Place, bases: Bases) -> Seen:
    """Every rename takes a while, as on a network file system, while the same command comes again and again and the
    first is killed."""

    def late(place_of: Place) -> None:
        for name in ("rename", "replace"):
            real = getattr(os, name)

            def slow(*args: object, real: Callable[..., None] = real, **named: object) -> None:
                time.sleep(place_of.rng.uniform(0, 0.05))
                real(*args, **named)

            setattr(os, name, slow)

    place.before = late
    place.pause(0.002)
    first = place.start(*place.sweep())
    place.until(first, place.rng.randrange(1, STEPS))
    second, _ = place.command(*place.sweep())
    os.kill(first, signal.SIGKILL)
    place.wait(first)
    place.pause(0.0)
    code, _ = place.command(*place.sweep())
    return _whole(place, bases, None, f"beside it {second}, then {code}", code != 0)


def _by_another(place: Place, package: Path, *words: str) -> tuple[int, str]:
    """The command in an interpreter of its own, with another copy of the package."""
    env = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{place.folder}"}
    done = subprocess.run([sys.executable, "-m", "grpo_sweeps.run", *words], cwd=place.folder, env=env,
                          capture_output=True, text=True, check=False, timeout=LONGEST_S)  # fmt: skip
    return done.returncode, done.stdout + done.stderr


KINDS: dict[str, Kind] = {
    "reward": changed("own_words.py", _replaced("2", "3")),
    "estimator": changed("own.py", _replaced("rewards.mean(1)", "0.5 * rewards.mean(1)")),
    "training data": changed("data/train.jsonl", _other_data),
    "held-out data": changed("data/test.jsonl", _other_data),
    "weights": changed("model/model.safetensors", _flipped),
    "copied run": copied, "record gone": record_gone, "segment damaged": damaged_segment, "status gone": status_gone,
    "forked helper": forked, "working directory": moved, "alarm cleared": alarm_cleared, "reward hangs": hung,
    "divergence": diverged, "package code": package_changed, "MLflow killed": mlflow_killed,
    "MLflow's disk": mlflow_disk, "MLflow changed": mlflow_changed,
    "twelve at once": at_once, "late renames": late_renames, "harmless": harmless,
}  # fmt: skip


def main(argv: list[str]) -> int:
    """The command; returns its exit code."""
    options = options_of(argv, {"faults": "all", "times": "10", "seed": "0", "where": "", "json": ""}, __doc__)
    if isinstance(options, int):
        return options
    names = list(KINDS) if options["faults"] == "all" else options["faults"].split(",")
    if set(names) - set(KINDS):
        print(f"faults={options['faults']}: choose of {', '.join(KINDS)}", file=sys.stderr)
        return 2
    where = Path(options["where"] or tempfile.mkdtemp(prefix="quiet-")).resolve()
    finished = Place(where / "finished", 0)
    code, said = finished.command(*finished.sweep())
    if code:
        print(f"the undisturbed sweep does not finish:\n{said[-2000:]}", file=sys.stderr)
        return 1
    bases = Bases(where, finished)
    found = {name: _trials(name, bases, int(options["times"]), int(options["seed"])) for name in names}
    print(table(found))
    if options["json"]:
        content = {name: [asdict(one) for one in seen] for name, seen in found.items()}
        Path(options["json"]).write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(_good(one) for seen in found.values() for one in seen) else 1


def _trials(name: str, bases: Bases, times: int, seed: int) -> list[Seen]:
    out = []
    for number in range(times):
        own = (seed * 100 + list(KINDS).index(name)) * 1000 + number
        place = Place(bases.where / f"{name.replace(' ', '_')}-{number}", own)
        try:
            one = KINDS[name](place, bases)
        except Exception as error:  # of this tool or of a reader of the package: the trial counts as false
            traceback.print_exc()
            one = Seen(False, false=1, note=f"{type(error).__name__}: {error}")
        out.append(one)
        print(f"{name:<18} seed {own:<6} noticed {one.noticed}, {one.lost} lost, {one.doubled} doubled, {one.false} "
              f"false  ({one.note})", flush=True)  # fmt: skip
        if _good(one):
            shutil.rmtree(place.folder, ignore_errors=True)
    return out


def _good(one: Seen) -> bool:
    return one.noticed is not False and not (one.lost or one.doubled or one.false)


def table(found: dict[str, list[Seen]]) -> str:
    """A Markdown table, a line a fault."""
    head = ("fault", "trials", "noticed", "lost", "doubled", "false")
    rows = [head, tuple("---" for _ in head)]
    for name, seen in found.items():
        told = [one.noticed for one in seen if one.noticed is not None]
        noticed = f"{sum(told)} of {len(told)}" if told else "nothing to notice"
        rows.append((name, str(len(seen)), noticed, *(str(sum(getattr(one, k) for one in seen)) for k in head[3:])))
    return "\n".join(["", *("| " + " | ".join(row) + " |" for row in rows)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
