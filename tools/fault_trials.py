"""One trial: a small sweep, one fault at a random moment, and the same command until the sweep has finished."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from grpo_sweeps.tracking.status import RunStatus, read_status

ROOT = Path(__file__).resolve().parents[1]
STEPS, SIZES = 12, (2, 4)
SWEEP = (
    "-m", "R=" + ",".join(map(str, SIZES)), "sweep=trial", f"trainer.steps={STEPS}", "trainer.prompts=3",
    "trainer.warmup_steps=2", "trainer.eval_every=4", "trainer.eval_problems=8", "trainer.eval_samples=2",
    "trainer.checkpoint_every=3", "trainer.keep_checkpoints=2", "trainer.device=cpu", "task.n_train=64",
    "task.n_held_out=16", "rollout.max_new_tokens=16", "rollout.batch=8", "analysis.by=layer",
    "analysis.keep_completions_every=2", "reward._target_=fault_reward.slow_strict",
)  # fmt: skip
SLURM = (
    "hydra/launcher=submitit_slurm", "hydra.launcher.gpus_per_node=0", "hydra.launcher.cpus_per_task=1",
    "hydra.launcher.mem_gb=2", "hydra.launcher.timeout_min=10", "hydra.launcher.signal_delay_s=30",
    "hydra.launcher.partition=low",
)  # fmt: skip
ATTEMPTS = 8
LONGEST_S = 400.0  # of one command
# The exact match, slowed by what the file `pause` says: seconds a call, which are no part of the identity.
REWARD = """
import time
from pathlib import Path
from grpo_sweeps.rewards.exact_match import strict

def slow_strict(completion, problem, seed=0):
    time.sleep(float((Path(__file__).parent / "pause").read_text()))
    return strict(completion, problem, seed)
"""
# In the disturbed process: SIGKILL at the n-th touch of a checkpoint's files; a clock that jumps when a file appears.
SITE = """
import os, signal, sys, threading, time

if "FAULT_CHECKPOINT" in os.environ:
    at, delay, seen = int(os.environ["FAULT_CHECKPOINT"]), float(os.environ["FAULT_DELAY"]), [0]

    def hook(event, args):
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"):
            if args and "/checkpoints/" in str(args[0]):
                seen[0] += 1
                if seen[0] == at:
                    if delay:
                        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
                    else:
                        os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)

if "FAULT_CLOCK" in os.environ:
    real, shift, path = time.time, float(os.environ["FAULT_CLOCK"]), os.environ["FAULT_CLOCK_FILE"]
    time.time = lambda: real() + (shift if os.path.exists(path) else 0.0)
"""
TOUCHES = 9  # of a checkpoint's files while one is written


@dataclass
class Trial:
    """The place of one sweep. `rng` is seeded by the trial's own seed, which is printed."""

    folder: Path
    seed: int
    extra: tuple[str, ...] = ()
    slurm: bool = False
    notes: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.folder.mkdir(parents=True, exist_ok=True)
        site = self.folder / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(SITE)
        (self.folder / "fault_reward.py").write_text(REWARD)
        self.pause(0.003)

    @property
    def sweep_dir(self) -> Path:
        return self.folder / "runs" / "trial"

    def pause(self, seconds: float) -> None:
        """How long each call of the reward takes."""
        (self.folder / "pause").write_text(str(seconds))

    def start(self, **environment: str) -> subprocess.Popen[bytes]:
        """The command, in the background; what it prints goes to `out`."""
        tracking = () if any(word.startswith("tracking") for word in self.extra) else ("tracking=local",)
        given = {word.partition("=")[0] for word in self.extra}
        usual = [word for word in (*SWEEP, *(SLURM if self.slurm else ())) if word.partition("=")[0] not in given]
        words = [sys.executable, "-m", "grpo_sweeps.run", *usual, *tracking, *self.extra]
        paths = [str(self.folder / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1",
               "PYTHONDONTWRITEBYTECODE": "1", **environment}  # fmt: skip
        with open(self.folder / "out", "ab") as out:
            return subprocess.Popen(words, cwd=self.folder, env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """The command's exit code; one that takes far too long is killed, and counts as not finished."""
        try:
            code = process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
            self.notes.append(f"killed after {LONGEST_S:.0f} s")
        self.codes.append(code)
        return code

    def complete(self) -> bool:
        """The same command until it says that all has finished."""
        return any(self.wait(self.start()) == 0 for _ in range(ATTEMPTS))

    def steps(self) -> int:
        """Training steps recorded so far, of all runs."""
        found = self.sweep_dir.glob("*/metrics.jsonl")
        return sum(path.read_bytes().count(b'"step_time"') for path in found)

    def moment(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait for the trial's random moment: between two random steps, or while the first run loads (on SLURM: from
        when its job has begun). False where the command has ended before."""
        wanted, delay = self.rng.randrange(STEPS * len(SIZES)), self.rng.random()
        while self.steps() < wanted or (self.slurm and self.running() is None):
            if process.poll() is not None:
                return False
            time.sleep(0.005)
        time.sleep(delay * (3.0 if wanted == 0 else 0.1))
        self.notes.append(f"after step {wanted}")
        return process.poll() is None

    def running(self) -> RunStatus | None:
        """The status of a run that says it runs."""
        for path in sorted(self.sweep_dir.glob("*/status.json")):
            status = read_status(path.parent)
            if status.state == "running":
                return status
        return None


Fault = Callable[[Trial], bool]


def _signalled(number: int) -> Fault:
    def fault(trial: Trial) -> bool:
        process = trial.start()
        if injected := trial.moment(process):
            process.send_signal(number)
        trial.wait(process)
        return injected

    return fault


def truncated(trial: Trial) -> bool:
    """SIGKILL, and the newest checkpoint of each run that has an older one loses its end. (Without an older one the run
    is left alone until redo= is given: nothing is thrown away.)"""
    process = trial.start()
    while trial.steps() < 4 and process.poll() is None:  # until there is a checkpoint
        time.sleep(0.005)
    injected = trial.moment(process)
    process.kill()
    trial.wait(process)
    damaged = False
    for folder in trial.sweep_dir.glob("*/checkpoints"):
        *older, newest = sorted(folder.glob("step_*")) or [None]
        if newest is not None and older:
            damaged = True
            data = (newest / "state.pt").read_bytes()
            (newest / "state.pt").write_bytes(data[: trial.rng.randrange(len(data))])
    return injected and damaged


def in_checkpoint(trial: Trial) -> bool:
    """SIGKILL during the writing of a checkpoint: before or a little after one of its files is touched."""
    saves = STEPS // 3 * len(SIZES)
    at, delay = trial.rng.randrange(1, TOUCHES * saves), trial.rng.choice([0.0, trial.rng.uniform(0, 0.01)])
    code = trial.wait(trial.start(FAULT_CHECKPOINT=str(at), FAULT_DELAY=str(delay)))
    left = len(list(trial.sweep_dir.glob("*/checkpoints/.tmp-*")))
    trial.notes.append(f"touch {at}, {delay * 1000:.1f} ms later" + (", half of one left" if left else ""))
    return code == -signal.SIGKILL


def clock(trial: Trial) -> bool:
    """The clock jumps by up to a day, and the same command is given beside the one that runs."""
    shift = trial.rng.choice([-1, 1]) * trial.rng.uniform(600, 86400)
    process = trial.start(FAULT_CLOCK=str(shift), FAULT_CLOCK_FILE=str(trial.folder / "jumped"))
    injected = trial.moment(process)
    (trial.folder / "jumped").touch()
    trial.wait(trial.start())
    trial.wait(process)
    trial.notes.append(f"by {shift:.0f} s; beside it exit code {trial.codes[0]}")
    return injected


def full_disk(trial: Trial) -> bool:
    """The small file system that the runs lie on is full for a while."""
    process = trial.start()
    injected = trial.moment(process)
    filler = trial.folder / "runs" / "filler"
    try:
        with open(filler, "wb") as file:
            while True:
                os.write(file.fileno(), b"\0" * 65536)
    except OSError:  # full
        time.sleep(trial.rng.uniform(0.2, 2.0))
    filler.unlink()
    trial.wait(process)
    return injected


LOCAL: dict[str, Fault] = {
    "kill": _signalled(signal.SIGKILL), "term": _signalled(signal.SIGTERM), "int": _signalled(signal.SIGINT),
    "usr2": _signalled(signal.SIGUSR2), "truncated": truncated, "checkpoint": in_checkpoint, "clock": clock,
    "disk": full_disk,
}  # fmt: skip


def mounted(folder: Path) -> Iterator[str | None]:
    """A file system of 96 MiB below a trial's folder while the generator waits; yields why not, or None."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        reason = done.stderr.strip() if done.returncode else None
    except FileNotFoundError:
        reason = "there is no mount command"
    yield reason
    if reason is None:
        subprocess.run(["umount", "-l", str(folder)], check=True)
