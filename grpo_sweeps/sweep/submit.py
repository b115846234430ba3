"""Start the due runs of a plan through Submitit and wait for them: on SLURM as one array, or as processes of this
machine.

The wait reads the runs' own status files first and Submitit's view of the jobs second: sacct may be missing or
minutes late.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_sweeps.sweep.execute import RunResult, result_of
from grpo_sweeps.sweep.job import RunJob
from grpo_sweeps.sweep.launch import Plan, PlannedRun, to_server
from grpo_sweeps.sweep.ledger import status_or_none
from grpo_sweeps.sweep.say import say
from grpo_sweeps.tracking.status import RunStatus, write_status
from grpo_sweeps.types import ConfigError

POLL_S = 2.0  # between looks at the status files of jobs on SLURM
POLL_LOCAL_S = 0.2
# What Submitit calls the same on every executor; all other parameters go to one executor under its name's prefix.
SHARED = (
    "timeout_min",
    "cpus_per_task",
    "gpus_per_node",
    "tasks_per_node",
    "mem_gb",
    "nodes",
    "name",
    "stderr_to_stdout",
)
INIT = ("max_num_timeout", "python", "max_pickle_size_gb")
OURS = ("submitit_folder", "parallel_jobs")


def check_slurm(params: Mapping[str, Any]) -> None:
    """What must hold before anything is submitted. Raises ConfigError."""
    _check_tasks(params)
    missing = [tool for tool in ("sbatch", "srun") if shutil.which(tool) is None]
    if missing:
        raise ConfigError(
            f"hydra/launcher=submitit_slurm: {' and '.join(missing)} not found on this machine; launch from a "
            f"login node of the "
            "cluster, or choose hydra/launcher=basic or submitit_local"
        )


def check_local(params: Mapping[str, Any]) -> None:
    """What must hold before anything is started. Raises ConfigError."""
    _check_tasks(params)
    gpu_slots(params)


def gpu_slots(params: Mapping[str, Any]) -> list[list[int]]:
    """The GPUs of each run that is carried out at the same time: one list a run, empty lists without GPUs.

    `gpus_per_node` null: one GPU a run where there are some. `parallel_jobs` null: as many runs as there are GPUs for.
    """
    wanted, parallel = params.get("gpus_per_node"), params.get("parallel_jobs")
    if parallel is not None and parallel < 1:
        raise ConfigError(f"hydra.launcher.parallel_jobs={parallel}: a number of at least 1 is needed, or null")
    gpus = [] if wanted == 0 else visible_gpus()
    per_run = int(wanted) if wanted is not None else min(1, len(gpus))
    if per_run > len(gpus):
        raise ConfigError(
            f"hydra.launcher.gpus_per_node={per_run}: this machine shows {len(gpus)} GPUs, at most so many are allowed"
        )
    if not per_run:
        return [[] for _ in range(parallel or 1)]
    slots = [gpus[start : start + per_run] for start in range(0, len(gpus) - per_run + 1, per_run)]
    return slots[:parallel]


def start_slurm(plan: Plan, params: Mapping[str, Any], poll_s: float = POLL_S) -> list[RunResult]:
    """Submit the due runs as one array and wait. Ctrl-C ends the wait and leaves the jobs to SLURM."""
    import submitit

    try:
        with submitit.helpers.clean_env():  # inside an allocation the jobs must not take its SLURM_* for theirs
            job_copies = to_server(plan.due[0].config)
            jobs = _slurm_executor(params).map_array(RunJob(job_copies), *zip(*_arguments(plan), strict=True))
    except Exception as error:
        for run in plan.due:
            _end(run, "failed", f"not submitted: {_first_line(error)}")
        raise ConfigError(f"hydra/launcher=submitit_slurm: the submission was refused: {_first_line(error)}") from error
    waiting = dict(zip(plan.due, jobs, strict=True))
    for run, job in waiting.items():
        _note_job(run, job.job_id)
    ids = sorted({job.job_id.split("_")[0] for job in jobs})
    sweep, runs_dir = plan.due[0].config.sweep, plan.due[0].config.runs_dir
    say(
        f"submitted {len(jobs)} runs as job {', '.join(ids)}; see python -m grpo_sweeps.status sweep={sweep} "
        f"runs_dir={runs_dir}"
    )
    try:
        return _wait(waiting, poll_s)
    except KeyboardInterrupt:
        say(f"no longer waiting: the jobs go on; end them with scancel {' '.join(ids)}")
        raise


def start_local(plan: Plan, params: Mapping[str, Any], poll_s: float = POLL_LOCAL_S) -> list[RunResult]:
    """Start the due runs as processes here, as many at once as `gpu_slots` says. Ctrl-C ends those that run."""
    free = gpu_slots(params)
    queue, results = list(plan.due), list[RunResult]()
    active: dict[PlannedRun, tuple[Any, list[int]]] = {}
    arguments = dict(zip(plan.due, _arguments(plan), strict=True))
    try:
        while queue or active:
            while queue and free:
                run, own = queue.pop(0), free.pop(0)
                job = _local_executor(params, own).submit(RunJob(), *arguments[run])
                active[run] = (job, own)
            for run, (job, own) in list(active.items()):
                if job.done():  # the process has gone, so its GPU is free; how it ended is in the run's folder
                    results.append(_result_of_job(run, job))
                    free.append(own)
                    del active[run]
            time.sleep(poll_s)
    except BaseException:
        for run, (job, _) in active.items():
            job.cancel(check=False)
            _end(run, "interrupted", "cancelled with the launching process")
        say(f"interrupted: {len(active)} runs cancelled, {len(queue)} not started")
        raise
    return results


def visible_gpus() -> list[int]:
    """Indexes of the GPUs that this process may use, without importing torch."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None and all(item.strip().isdigit() for item in named.split(",")):
        return [int(item) for item in named.split(",")]
    if named == "" or shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return list(range(len(named.split(",")) if named else count))


def _slurm_executor(params: Mapping[str, Any]) -> Any:
    """Submitit's SLURM executor with every parameter that is set."""
    import submitit

    logging.getLogger("submitit").propagate = False  # it has a handler of its own: say things once
    init = {f"slurm_{key}": params[key] for key in INIT if params.get(key) is not None}
    executor = submitit.AutoExecutor(folder=params["submitit_folder"], cluster="slurm", **init)
    rest = {key: value for key, value in params.items() if key not in (*INIT, *OURS) and value is not None}
    executor.update_parameters(**{key if key in SHARED else f"slurm_{key}": value for key, value in rest.items()})
    return executor


def _local_executor(params: Mapping[str, Any], gpus: list[int]) -> Any:
    """Submitit's executor for one process on this machine that sees `gpus` alone."""
    import submitit

    init = {key: params[key] for key in INIT if params.get(key) is not None}
    executor = submitit.LocalExecutor(folder=params["submitit_folder"], **init)
    known = ("timeout_min", "signal_delay_s", "stderr_to_stdout", "setup")
    chosen = {key: params[key] for key in known if params.get(key) is not None}
    executor.update_parameters(gpus_per_node=len(gpus), visible_gpus=gpus, **chosen)
    return executor


def _arguments(plan: Plan) -> list[tuple[Any, ...]]:
    """RunJob's arguments for each due run: everything that the job needs is frozen here."""
    import_paths = [str(Path(path or ".").resolve()) for path in sys.path if path == "" or Path(path) == Path.cwd()]
    return [(run.frozen, str(run.run_dir.resolve()), run.name, plan.command, import_paths) for run in plan.due]


def _wait(waiting: dict[PlannedRun, Any], poll_s: float) -> list[RunResult]:
    results: list[RunResult] = []
    while waiting:
        for run, job in list(waiting.items()):
            status = status_or_none(run.run_dir)
            killed = status is not None and status.stale()
            if result_of(run.run_dir) is not None or killed or job.done():
                results.append(_result_of_job(run, job))
                del waiting[run]
        if waiting:
            time.sleep(poll_s)
    return results


def _result_of_job(run: PlannedRun, job: Any) -> RunResult:
    """The run's own account of its end; where the job was killed without a word, that is written down for it."""
    result, error = result_of(run.run_dir), ""
    if result is None:
        state = str(job.state)
        error = f"job {job.job_id} ended without a word (state {state}); its output: {job.paths.stderr}"
        _end(run, "interrupted", error)
        result = result_of(run.run_dir)
    return result or RunResult(run.identity, run.name, "interrupted", str(run.run_dir), error=error)


def _end(run: PlannedRun, state: Any, error: str) -> None:
    before = status_or_none(run.run_dir) or RunStatus(state="queued", identity=run.identity, name=run.name)
    _write(run, replace(before, state=state, error=error, ended=time.time()))


def _write(run: PlannedRun, status: RunStatus) -> None:
    """Where the status cannot be written (a full disk), the other runs are still waited for."""
    try:
        write_status(run.run_dir, status)
    except OSError as error:
        say(f"{run.name}: its status could not be written ({error})")


def _note_job(run: PlannedRun, job_id: str) -> None:
    """Put the job's number beside a run that still waits; a run that has started has written it itself."""
    status = status_or_none(run.run_dir)
    if status and status.state == "queued":
        _write(run, replace(status, job_id=job_id))


def _check_tasks(params: Mapping[str, Any]) -> None:
    for key in ("nodes", "tasks_per_node"):
        if params.get(key) not in (None, 1):
            raise ConfigError(f"hydra.launcher.{key}={params[key]}: a run is one process on one node, so 1 is allowed")


def _first_line(error: BaseException) -> str:
    lines: Sequence[str] = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
