"""Tests on a real SLURM: the node of tools/slurm_node.sh, found and not started here.

    tools/slurm_node.sh start && eval "$(tools/slurm_node.sh env)" && pytest tests/slurm

Several workers share the node, so each test has its own folder and asks for little. What a test leaves in the queue is
cancelled. No other cluster is ever used: the node must call itself `scratch`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = "scratch"
# Stands in for training: a line a step, as many as are missing; waits while the file `hold` is in the workplace.
LOOP = """
import json, sys, time, types

def train(config, run_dir, watch=None, name=""):
    path, hold = run_dir / "metrics.jsonl", run_dir.parents[2] / "hold"
    first = len(path.read_text().splitlines()) if path.exists() else 0
    if config.seed == 1:
        raise RuntimeError("boom")
    for step in range(first, config.trainer.steps):
        while hold.exists() and step > 0:
            time.sleep(0.1)
            if watch.stop():
                from grpo_sweeps.loop.watch import Stopped
                raise Stopped
        with open(path, "a") as file:
            file.write(json.dumps({"step": step, "time": time.time(), "reward": 0.5, "step_time": 0.1,
                                   "R": config.R}) + "\\n")
        watch.step(step + 1, config.trainer.steps, {"reward": 0.5})

sys.modules["grpo_sweeps.loop.train"] = types.SimpleNamespace(train=train)
"""
SWEEP = (
    "tracking=local", "trainer.steps=3", "estimator._target_=plain_functions.estimator",
    "hydra/launcher=submitit_slurm", "hydra.launcher.mem_gb=2", "hydra.launcher.cpus_per_task=1",
    "hydra.launcher.gpus_per_node=0", "hydra.launcher.timeout_min=5", "hydra.launcher.signal_delay_s=10",
)  # fmt: skip


def sweep_words(words: Sequence[str]) -> list[str]:
    """The words of a sweep, those given in place of the usual ones of the same key."""
    given = {word.partition("=")[0] for word in words}
    return [*(word for word in SWEEP if word.partition("=")[0] not in given), *words]


def missing_node() -> str | None:
    """Why there is no node of the tests' own; None where it answers."""
    conf = Path(os.environ.get("SLURM_CONF", "/etc/slurm/slurm.conf"))
    if not conf.is_file():
        return f"no SLURM of the tests' own ({conf} does not exist; tools/slurm_node.sh start, and SLURM_CONF)"
    if shutil.which("sinfo") is None:
        return "no SLURM of the tests' own (sinfo is not installed)"
    name = re.search(r"^ClusterName\s*=\s*(\S+)", conf.read_text(encoding="utf-8"), re.M | re.I)
    if name is None or name.group(1) != CLUSTER:
        return f"{conf} is of another cluster than the tests' own: nothing is submitted there"
    try:
        done = subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return f"the SLURM of {conf} does not answer within 30 s"
    if done.returncode or not re.search("idle|mixed|allocated|completing", done.stdout):
        return f"the SLURM of {conf} has no node that is up: {(done.stderr or done.stdout).strip()}"
    return None


@pytest.fixture(scope="session")
def slurm_node() -> None:
    """Skip, with the reason, where the node is not there."""
    if reason := missing_node():
        pytest.skip(reason)


@dataclass
class Workplace:
    """A folder in which sweeps are started as a user starts them: by commands."""

    path: Path
    environment: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def command(self, module: str, *words: str) -> list[str]:
        return [sys.executable, "-m", f"grpo_sweeps.{module}", *words]

    def call(self, module: str, *words: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
        """A command to its end."""
        return subprocess.run(
            self.command(module, *words), cwd=self.path, env=self.environment, capture_output=True, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip

    def sweep(self, *words: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
        """A sweep of the stand-in on SLURM, to its end."""
        return self.call("run", "-m", *sweep_words(words), timeout=timeout)

    def start_sweep(self, *words: str) -> subprocess.Popen[str]:
        """The same in the background."""
        process = subprocess.Popen(
            self.command("run", "-m", *sweep_words(words)), cwd=self.path, env=self.environment, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.started.append(process)
        return process

    def statuses(self, sweep: str = "adhoc") -> dict[str, Any]:
        """name -> what status.json holds."""
        found = [json.loads(path.read_text()) for path in (self.path / "runs" / sweep).glob("*/status.json")]
        return {one["name"].split(" estimator")[0]: one for one in found}

    def submitted(self) -> int:
        """How many jobs have been submitted from here, ever."""
        return len(list((self.path / "runs" / ".submitit").glob("*/*_submitted.pkl")))

    def hold(self) -> None:
        """Let runs stop after their first step, until `release`."""
        (self.path / "hold").touch()

    def release(self) -> None:
        (self.path / "hold").unlink(missing_ok=True)

    def until(self, what: Callable[[], Any], seconds: float = 90) -> Any:
        """What `what` gives once it is true; a failure when the time is up."""
        deadline = time.monotonic() + seconds
        while not (value := what()):
            assert time.monotonic() < deadline, f"not within {seconds} s; {self.statuses()}"
            time.sleep(0.2)
        return value

    def all_are(self, state: str, sweep: str = "adhoc") -> bool:
        return {one["state"] for one in self.statuses(sweep).values()} == {state}

    def job_ids(self) -> list[str]:
        found = (self.path / "runs").glob("*/.jobs")
        return [line.split()[0] for path in found for line in path.read_text().splitlines()]


@pytest.fixture
def workplace(slurm_node: None, tmp_path: Path) -> Iterator[Workplace]:
    """An empty working directory; jobs submitted from it train the stand-in."""
    (tmp_path / "plain_functions.py").write_text("def estimator(rewards_GR):\n    return rewards_GR\n")
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(LOOP)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    place = Workplace(tmp_path, environment)
    yield place
    for process in place.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()
    if ids := place.job_ids():
        subprocess.run(["scancel", *ids], timeout=60, check=False, capture_output=True)
