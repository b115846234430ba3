"""Starts the due runs of a plan through Submitit, as arrays on SLURM or processes of this machine, and waits for them.

The wait goes by the runs' own status files first, SLURM's queue second, Submitit's view (sacct) last. A run has ended
when it says so and its job is not coming back. It waits for a job that the queue still knows whatever the status says,
because the job may have been killed and put back in the queue; a run whose status says nothing about an end and whose
job the queue has forgotten has died without a word, and this process writes that down.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_sweeps.cli import count, say
from grpo_sweeps.config import shown
from grpo_sweeps.config.checks import NAME
from grpo_sweeps.sweep.execute import RunResult, result_of
from grpo_sweeps.sweep.job import GRACE_S, RunJob
from grpo_sweeps.sweep.jobs import Submission, comment, new_token, note_jobs, told
from grpo_sweeps.sweep.launch import interruptible
from grpo_sweeps.sweep.ledger import QUEUE, status_or_none
from grpo_sweeps.sweep.opening import Opening
from grpo_sweeps.sweep.plan import Plan, PlannedRun
from grpo_sweeps.sweep.preflight import check_nodes
from grpo_sweeps.sweep.queue import Answer, Queue, cluster_config, cluster_name, main_id
from grpo_sweeps.tracking.status import RunStatus, write_status
from grpo_sweeps.tracking.tracker import load, shared
from grpo_sweeps.types import ConfigError

POLL_S = 2.0  # seconds between looks at the status files of jobs on SLURM
POLL_LOCAL_S = 0.2
GONE_S = 10.0  # seconds before a forgotten job counts as gone: its last status may still be on its way over the network
TAIL_LINES, TAIL_BYTES, TAIL_CHARS = 3, 4096, 300
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
OURS = ("submitit_folder", "parallel_jobs", "requeue", "gpu_mem_gb")
MAX_ARRAY = 1000  # SLURM's own default, where it cannot be asked
# These say where SLURM is; `submitit.helpers.clean_env` removes them with the launching allocation's variables.
WHERE_SLURM_IS = ("SLURM_CONF", "SLURM_CLUSTERS")
ONE_TASK = "a run is one process on one node, so 1 is allowed"
TASKS = re.compile(r"--(ntasks(?:-per-\w+)?|nodes)(?:[= ](.*))?|-([nN])[= ]?(.*)")
# Values that SLURM would accept with another meaning: no limit, all of a node's memory. Bounds only; `preflight`
# compares with what the nodes can give.
ABOVE_ZERO = ("timeout_min", "mem_gb", "gpu_mem_gb")  # 0 is "no limit" or "all" to SLURM
LEAST_GB = 0.001
AT_LEAST_ONE = ("cpus_per_task", "array_parallelism", "parallel_jobs")
NOT_NEGATIVE = ("gpus_per_node", "gpus_per_task", "max_num_timeout", "signal_delay_s")


def check_slurm(params: Mapping[str, Any]) -> None:
    """Raise ConfigError unless jobs can be submitted with these parameters."""
    check_values(params)
    _check_tasks(params)
    missing = [tool for tool in ("sbatch", "srun") if shutil.which(tool) is None]
    if missing:
        raise ConfigError(
            f"hydra/launcher=submitit_slurm: {' and '.join(missing)} not found on this machine; launch from a "
            f"login node of the "
            "cluster, or choose hydra/launcher=basic or submitit_local"
        )
    if note := check_nodes(params):
        say(note)


def check_local(params: Mapping[str, Any]) -> None:
    """Raise ConfigError unless processes can be started with these parameters."""
    check_values(params)
    _check_tasks(params)
    gpu_slots(params)


def check_values(params: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first value out of bounds; null is always allowed."""
    for key in (*ABOVE_ZERO, *AT_LEAST_ONE, *NOT_NEGATIVE):
        value = params.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            _fail(key, value, "a number is needed, or null")
        if key in ABOVE_ZERO and value < (LEAST_GB if key.endswith("_gb") else 1):
            _fail(key, value, f"at least {LEAST_GB if key.endswith('_gb') else 1} is needed, or null")
        if key in AT_LEAST_ONE and value < 1:
            _fail(key, value, "at least 1 is needed, or null")
        if key in NOT_NEGATIVE and value < 0:
            _fail(key, value, "at least 0 is needed, or null")
    extra = params.get("additional_parameters")
    if extra is not None and not isinstance(extra, Mapping):
        _fail("additional_parameters", extra, "flags with their values are needed, such as {qos:high}")
    name = params.get("name")
    if name is not None and not NAME.fullmatch(str(name)):
        _fail("name", name, "letters, digits, '.', '_' and '-' are allowed")
    minutes, delay = params.get("timeout_min"), params.get("signal_delay_s")
    if minutes is not None and delay is not None and delay >= minutes * 60:
        _fail(
            "signal_delay_s", delay, f"the signal would come before the job's start; less than the {minutes:g} minutes "
            "of timeout_min are allowed",
        )  # fmt: skip


def _fail(key: str, value: object, allowed: str) -> None:
    raise ConfigError(f"hydra.launcher.{key}={shown(value)}: {allowed}")


def gpu_slots(params: Mapping[str, Any]) -> list[list[int]]:
    """The GPUs of the runs that go on at the same time: one list per run, empty lists without GPUs.

    `gpus_per_node` null: one GPU per run where there are some. `parallel_jobs` null: as many runs as the GPUs serve.
    """
    wanted, parallel = params.get("gpus_per_node"), params.get("parallel_jobs")
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


def start_slurm(plan: Plan, opening: Opening, params: Mapping[str, Any], poll_s: float = POLL_S) -> list[RunResult]:
    """Submit the due runs as one array (as few as SLURM allows) and wait. Ctrl-C ends the wait and leaves the jobs."""
    token, cluster = new_token(), cluster_name()
    waiting, left, refusal = _submit(plan, params, token)
    if not waiting:
        raise ConfigError(f"hydra/launcher=submitit_slurm: the submission was refused: {refusal}")
    note_jobs(plan.folder, [job.job_id for job in waiting.values()], token, cluster)
    for run, job in waiting.items():
        _note_job(run, job.job_id, token)
    opening.put_back(left)
    opening.submitted()
    config = plan.due[0].config
    where = f"sweep={config.sweep}" + (f" runs_dir={config.runs_dir}" if config.runs_dir != "runs" else "")
    ids = sorted({main_id(job.job_id) for job in waiting.values()}, key=int)
    say(f"submitted {count(len(waiting))} as job {', '.join(ids)}; see python -m grpo_sweeps.status {where}")
    if left:
        say(f"not submitted: {count(len(left))}: {refusal}")
    results = [
        RunResult(run.identity, run.name, "not submitted", str(run.run_dir), error=f"not submitted: {refusal}")
        for run in left
    ]
    if not plan.wait:
        tracker = load(config.tracking)
        by_hand = f"; python -m grpo_sweeps.sync {where} copies their records to {tracker.name}" if tracker else ""
        say(f"not waiting: the jobs go on{'' if tracker and tracker.shared else by_hand}")
        return results
    try:
        with interruptible():  # `kill` of this command as well
            return results + wait(waiting, poll_s, token)
    except KeyboardInterrupt:
        say(f"no longer waiting: the jobs go on; end them with python -m grpo_sweeps.cancel {where}")
        raise


def _submit(plan: Plan, params: Mapping[str, Any], token: str) -> tuple[dict[PlannedRun, Any], list[PlannedRun], str]:
    """The submitted runs with their jobs, the runs that were not submitted, and why not. token: for the comments."""
    size = max_array()
    runs, arguments = list(plan.due), _arguments(plan)
    starts = range(0, len(runs), size)
    if len(starts) > 1:  # SLURM throttles each array, and the limit is the sweep's
        params = {**params, "array_parallelism": max(1, int(params.get("array_parallelism") or 1) // len(starts))}
    jobs: list[Any] = []
    for start in starts:
        try:
            with _away_from_here():
                executor = _slurm_executor(params, token)
                job = RunJob(shared(plan.due[0].config.tracking), _grace(params), token)
                jobs += executor.map_array(job, *zip(*arguments[start : start + size], strict=True))
        except Exception as error:  # whatever Submitit and sbatch refuse becomes one sentence
            return dict(zip(runs, jobs, strict=False)), runs[len(jobs) :], _last_line(error)
    return dict(zip(runs, jobs, strict=True)), [], ""


def _grace(params: Mapping[str, Any]) -> float:
    """Seconds in which a job that hears Submitit's signal may finish its step: the other half is for the checkpoint."""
    return float(params.get("signal_delay_s") or 2 * GRACE_S) / 2


@contextlib.contextmanager
def _away_from_here() -> Iterator[None]:
    """A context without the variables of the allocation that this command may run in, which its jobs must not take for
    theirs, but with those that say where SLURM is."""
    import submitit

    kept = {name: os.environ[name] for name in WHERE_SLURM_IS if name in os.environ}
    with submitit.helpers.clean_env():
        os.environ.update(kept)
        yield


def max_array() -> int:
    """The largest number of tasks of an array on this cluster."""
    found = cluster_config("MaxArraySize")
    return max(1, int(found)) if found.isdigit() else MAX_ARRAY


def start_local(
    plan: Plan, opening: Opening, params: Mapping[str, Any], poll_s: float = POLL_LOCAL_S
) -> list[RunResult]:
    """Start the due runs as processes here, as many at once as `gpu_slots` says. Ctrl-C ends those that run."""
    opening.submitted()  # each run's status names this process
    free = gpu_slots(params)
    queue, results = list(plan.due), list[RunResult]()
    active: dict[PlannedRun, tuple[Any, list[int]]] = {}
    arguments = dict(zip(plan.due, _arguments(plan), strict=True))
    try:
        with interruptible():
            while queue or active:
                while queue and free:
                    run, own = queue.pop(0), free.pop(0)
                    job = _local_executor(params, own).submit(RunJob(grace_s=_grace(params)), *arguments[run])
                    active[run] = (job, own)
                for run, (job, own) in list(active.items()):
                    if job.done():  # the process has gone, so its GPU is free; how it ended is in the run's folder
                        results.append(result_of_job(run, job))
                        free.append(own)
                        del active[run]
                time.sleep(poll_s)
    except BaseException:
        for run, (job, _) in active.items():
            job.cancel(check=False)
            end(run, "interrupted", "cancelled with the launching process")
        say(f"interrupted: {count(len(active))} cancelled, {len(queue)} not started")
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


def _slurm_executor(params: Mapping[str, Any], token: str = "") -> Any:
    """Submitit's SLURM executor with every parameter that is set, and the token in the jobs' comment."""
    import submitit

    logging.getLogger("submitit").setLevel(logging.ERROR)  # it warns at each look that there is no sacct
    init = {f"slurm_{key}": params[key] for key in INIT if params.get(key) is not None}
    executor = submitit.AutoExecutor(folder=params["submitit_folder"], cluster="slurm", **init)
    rest = {key: value for key, value in params.items() if key not in (*INIT, *OURS) and value is not None}
    flags = _additional(params)
    own = flags.pop("comment", rest.pop("comment", None))  # the flag would win
    rest |= {"additional_parameters": flags, "comment": comment(token, own)}
    executor.update_parameters(**{key if key in SHARED else f"slurm_{key}": value for key, value in rest.items()})
    return executor


def _additional(params: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of sbatch without a key of their own. Jobs may be queued again after a preemption or a node's failure,
    whatever the cluster's default, unless requeue=false or a flag of the user says otherwise."""
    own = dict(params.get("additional_parameters") or {})
    named = {key.replace("_", "-") for key in own} & {"requeue", "no-requeue"}
    if named or params.get("requeue") is None:
        return own
    return {"requeue" if params["requeue"] else "no-requeue": True, **own}


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
    """RunJob's arguments for each due run, with everything that the job needs frozen in them."""
    import_paths = [str(Path(path or ".").resolve()) for path in sys.path if path == "" or Path(path) == Path.cwd()]
    return [(run.frozen, str(run.run_dir.resolve()), run.name, plan.command, import_paths) for run in plan.due]


def _note_job(run: PlannedRun, job_id: str, token: str) -> None:
    """Write the job's id and token into the status of a run that still waits; one that has started has done so
    itself."""
    status = status_or_none(run.run_dir)
    if status and status.state == "queued":
        write(run, replace(status, job_id=job_id, job_token=token))


def _check_tasks(params: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key or flag that asks for more than one process on one node per run."""
    for key in ("nodes", "tasks_per_node"):
        if params.get(key) not in (None, 1):
            raise ConfigError(f"hydra.launcher.{key}={params[key]}: {ONE_TASK}")
    for flag, value in dict(params.get("additional_parameters") or {}).items():
        dashes = "-" if len(flag) == 1 else "--"
        _check_flag("additional_parameters", f"{dashes}{flag.replace('_', '-')}={value}")
    words = [str(word) for word in params.get("srun_args") or []]
    for word, following in zip(words, [*words[1:], ""], strict=False):
        bare = word in ("-n", "-N") or (word.startswith("--") and "=" not in word)
        _check_flag("srun_args", f"{word} {following}" if bare else word)


def _check_flag(key: str, flag: str) -> None:
    found = TASKS.fullmatch(flag)
    value = next((group for group in (found.group(2), found.group(4)) if group is not None), "") if found else "1"
    if value.strip() != "1":
        raise ConfigError(f"hydra.launcher.{key}: {flag}: {ONE_TASK}")


def _last_line(error: BaseException) -> str:
    lines: Sequence[str] = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def wait(
    waiting: Mapping[PlannedRun, Any],
    poll_s: float,
    token: str,
    queue: Queue | None = None,
    gone_s: float | None = None,
) -> list[RunResult]:
    """Wait until every run has ended and return one result per run.

    waiting: the Submitit job of each run; token: of the submission.
    """
    submitted = time.time()
    left, results = dict(waiting), list[RunResult]()
    gone: dict[str, float] = {}  # job -> when the queue was first found to have forgotten it
    queue, said = queue or QUEUE, set[str]()
    gone_s = min(GONE_S, 5 * poll_s) if gone_s is None else gone_s
    while left:
        found = queue.ask([job.job_id for job in left.values()])
        answers = {job_id: told(one, Submission(job_id, token, time=submitted)) for job_id, one in found.items()}
        said = _say_news(_why_it_takes(answers), said)
        for run, job in list(left.items()):
            if _has_ended(run, job, answers[job.job_id], gone, gone_s):
                results.append(result_of_job(run, job))
                del left[run]
        if left:
            time.sleep(poll_s)
    return results


def _why_it_takes(answers: Mapping[str, Answer]) -> set[str]:
    """A sentence where the queue does not answer, and one per reason for which jobs do not start by themselves."""
    silent = next((f"still waiting: {one.text()}" for one in answers.values() if one.kind == "unknown"), "")
    stuck: dict[str, list[str]] = {}
    for job_id, one in answers.items():
        if one.stuck:
            stuck.setdefault(one.stuck, []).append(job_id)
    found = {f"still waiting: job {_some(ids)} {why}" for why, ids in stuck.items()}
    return found | {silent} if silent else found


def _some(job_ids: Sequence[str], most: int = 3) -> str:
    more = len(job_ids) - most
    return ", ".join(job_ids[:most]) + (f" and {more} more" if more > 0 else "")


def _say_news(sentences: set[str], said: set[str]) -> set[str]:
    """Say what was not so at the last look; returns what is so now."""
    for sentence in sorted(sentences - said):
        say(sentence)
    return sentences


def _has_ended(run: PlannedRun, job: Any, answer: Answer, gone: dict[str, float], gone_s: float) -> bool:
    result = result_of(run.run_dir)
    if result is not None and result.state in ("finished", "failed"):
        return True
    if answer.kind == "absent":  # no queue to ask: a status that is over, a silent process or Submitit's own view
        status = status_or_none(run.run_dir)
        return result is not None or (status is not None and status.stale()) or bool(job.done())
    if answer.alive:
        gone.pop(job.job_id, None)
        return False
    since = gone.setdefault(job.job_id, time.monotonic())
    return result is not None or time.monotonic() - since >= gone_s


def result_of_job(run: PlannedRun, job: Any) -> RunResult:
    """The run's own result; where its job was killed without a word, writes that down first."""
    result, error = result_of(run.run_dir), ""
    if result is None:
        status = status_or_none(run.run_dir)
        if status is not None and _is_anothers(status, job):  # to which the job has left it
            return RunResult(run.identity, run.name, "running", str(run.run_dir), status.step, status.total)
        error = _silent_end(job)
        end(run, "interrupted", error)
        result = result_of(run.run_dir)
    return result or RunResult(run.identity, run.name, "interrupted", str(run.run_dir), error=error)


def _is_anothers(status: RunStatus, job: Any) -> bool:
    """True when another process than this job runs the run."""
    return status.state == "running" and status.job_id != job.job_id and not status.stale()


def _silent_end(job: Any) -> str:
    """Why a job may have ended without a word: its state where SLURM tells it, and what it printed last."""
    state = str(job.state).upper()
    known = f" (state {state})" if state != "UNKNOWN" else ""
    path = Path(job.paths.stderr)
    words = last_words(path)
    said = f"; its last words: {words}" if words else ""
    return f"job {job.job_id} ended without a word{known}{said}; its output: {path}"


def last_words(path: Path) -> str:
    """The last lines of a job's error output as one line; "" where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-TAIL_LINES:])[-TAIL_CHARS:]


def end(run: PlannedRun, state: Any, error: str) -> None:
    """Write the end of a run that could not write it itself into its status."""
    before = status_or_none(run.run_dir) or RunStatus(state="queued", identity=run.identity, name=run.name)
    write(run, replace(before, state=state, error=error, ended=time.time()))


def write(run: PlannedRun, status: RunStatus) -> None:
    """Write a status; where that fails (a full disk), the wait for the other runs goes on."""
    try:
        write_status(run.run_dir, status)
    except OSError as error:
        say(f"{run.name}: its status could not be written ({error})")
