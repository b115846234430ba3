"""Faults of a SLURM node (tools/slurm_node.sh starts one), and a tracking server that dies."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from fault_trials import Fault, Trial


def _on_job(*words: str) -> Fault:
    """A SLURM command about the job that runs, at the trial's moment."""

    def fault(trial: Trial) -> bool:
        process = trial.start()
        status = trial.running() if trial.moment(process) else None
        done = None
        if status is not None and status.job_id:
            done = subprocess.run([*words, status.job_id], capture_output=True, text=True, check=False)
        trial.wait(process)
        return done is not None and done.returncode == 0

    return fault


def killed(trial: Trial) -> bool:
    """SIGKILL to the run's own process, as when memory runs out: SLURM's own commands end a job with a warning."""
    process = trial.start()
    status = trial.running() if trial.moment(process) else None
    if status is not None:
        os.kill(status.pid, signal.SIGKILL)  # the node is this machine
    trial.wait(process)
    return status is not None


def preemption(trial: Trial) -> bool:
    """A job of a higher partition takes the whole node for a moment."""
    process = trial.start()
    injected = trial.moment(process) and trial.running() is not None
    words = ["sbatch", "-p", "high", "-c", "2", "--mem=100", "-o", "/dev/null", "--wrap", "sleep 1"]
    subprocess.run(words, check=True, capture_output=True, cwd=trial.folder)
    trial.wait(process)
    return injected


def time_limit(trial: Trial) -> bool:
    """The runs take longer than their minute: SLURM signals, and the job is queued again."""
    trial.extra = (*trial.extra, "hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=20")
    trial.pause(trial.rng.uniform(0.4, 0.8))
    process = trial.start()
    trial.wait(process)
    logs = [path.read_text(errors="replace") for path in trial.sweep_dir.glob("*/log.txt")]
    times = sum(text.count("stopped after step") + text.count("stopped by a signal") for text in logs)
    trial.notes.append(f"{times} times")
    return times > 0


SLURM_FAULTS: dict[str, Fault] = {
    "slurm_usr2": _on_job("scancel", "--signal=USR2"), "slurm_scancel": _on_job("scancel"),
    "slurm_kill": killed, "slurm_requeue": _on_job("scontrol", "requeue"),
    "slurm_preemption": preemption, "slurm_time": time_limit,
}  # fmt: skip


class Server:
    """An `mlflow server` with SQLite in `folder`, killed and started at will."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when it answers."""
        words = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        words += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        words += ["--artifacts-destination", str(self.folder / "served")]
        env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(words, cwd=self.folder, env=env, stdout=log, stderr=log,
                                            start_new_session=True)  # fmt: skip
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.1)
        raise RuntimeError(f"the server does not start; see {self.folder / 'server.log'}")

    def kill(self) -> None:
        """SIGKILL to it and its workers."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


def dead_server(trial: Trial) -> bool:
    """The tracking server is killed at the trial's moment and comes back some time later, maybe after the end. Then
    `sync`, twice: the first completes the copy, the second changes nothing."""
    server = Server(trial.folder / "server")
    server.start()
    trial.extra = ("tracking=mlflow", f"tracking.uri={server.uri}")
    try:
        process = trial.start()
        injected = trial.moment(process)
        server.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(trial.rng.uniform(0, 10))
        server.start()
        trial.wait(process)
        words = [sys.executable, "-m", "grpo_sweeps.sync", "sweep=trial", f"uri={server.uri}"]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        for _ in range(2):
            done = subprocess.run(words, cwd=trial.folder, env=env, capture_output=True, text=True, check=False)
        trial.notes.append(_in_mlflow(trial, server.uri))
        if done.returncode or " 0 points and 0 files new" not in done.stdout:
            trial.notes.append(f"WRONG: the second sync: {(done.stdout + done.stderr).strip()}")
        return injected
    finally:
        server.kill()


def _in_mlflow(trial: Trial, uri: str) -> str:
    """How the points of the server compare with those of the local records."""
    from grpo_sweeps.tracking.local import read_metrics
    from grpo_sweeps.tracking.mlflow_store import Store

    store = Store(uri, "grpo_sweeps")
    lost = doubled = points = 0
    for run in store.client.search_runs([store.experiment_id], "tags.`grpo_sweeps.kind` = 'run'"):
        frame = read_metrics(trial.sweep_dir / run.data.tags["identity"]).set_index("step").drop(columns="time")
        here = {(str(name), step) for name in frame for step in frame.index[frame[name].notna()]}
        there = store.history(run.info.run_id)
        points += len(here)
        lost += len(here - there.keys())
        doubled += sum(len(values) - 1 for values in there.values()) + len(there.keys() - here)
    wrong = "WRONG: " if lost or doubled or not points else ""
    return f"{wrong}MLflow has {points - lost} of {points} points, {doubled} doubled"
