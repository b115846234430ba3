"""Defaults of the launchers, as dataclasses: `hydra/launcher=basic|submitit_local|submitit_slurm`,
`hydra.launcher.KEY=VALUE`.

No `from __future__ import annotations` here: Hydra's plugin scan executes a module before it is in sys.modules, and
dataclasses looks there to read annotations that are strings.
"""

from dataclasses import dataclass, field, make_dataclass
from inspect import signature
from typing import Any

HOME = "hydra_plugins.grpo_launcher.launchers"


@dataclass
class BasicConf:
    """One run after the other, in this process."""

    _target_: str = f"{HOME}.GrpoBasicLauncher"


@dataclass
class SubmititConf:
    """What both Submitit launchers take."""

    submitit_folder: str = "${runs_dir}/.submitit/%j"
    timeout_min: int = 240
    cpus_per_task: int | None = 4
    gpus_per_node: int | None = 1
    tasks_per_node: int = 1
    mem_gb: float | None = 32
    nodes: int = 1
    name: str = "grpo_sweeps"
    stderr_to_stdout: bool = False
    setup: list[str] | None = None  # shell lines before the run, such as "module load cuda"
    signal_delay_s: int = 120  # seconds before its end at which a job is told to checkpoint
    max_num_timeout: int = 10  # times that a job that ran out of time is queued again
    gpu_mem_gb: float | None = None  # of one GPU of the nodes: a run that will hardly fit is named before it is queued
    python: str | None = None
    max_pickle_size_gb: float | None = None


@dataclass
class LocalConf(SubmititConf):
    """Each run in its own process on this machine."""

    _target_: str = f"{HOME}.GrpoLocalLauncher"
    timeout_min: int = 7 * 24 * 60
    gpus_per_node: int | None = None  # null: one per run where the machine has GPUs
    parallel_jobs: int | None = None  # null: one per GPU; one in all without any GPU


@dataclass
class SlurmConf(SubmititConf):
    """Each run as one job of an array on SLURM, with one GPU. It has every parameter of Submitit's SLURM executor."""

    _target_: str = f"{HOME}.GrpoSlurmLauncher"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    array_parallelism: int = 64  # runs at once
    requeue: bool = True  # --requeue: a preempted job, or one whose node failed, goes back in the queue
    gres: str | None = None
    gpus_per_task: int | None = None
    cpus_per_gpu: int | None = None
    mem_per_gpu: str | None = None
    mem_per_cpu: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    exclusive: Any = None
    dependency: str | None = None
    comment: str | None = None
    wckey: str | None = None
    mail_type: str | None = None
    mail_user: str | None = None
    teardown: list[str] | None = None
    srun_args: list[str] | None = None
    use_srun: bool | None = None
    additional_parameters: Any = None  # any other sbatch flag: {"reservation": "x"}


@dataclass
class SweeperConf:
    """Hydra's basic sweeper; `params` holds the axes of a file in sweeps/."""

    _target_: str = "hydra_plugins.grpo_launcher.sweeper.GrpoSweeper"
    max_batch_size: int | None = None
    params: dict[str, str] | None = None


def store_launchers() -> None:
    """Store the defaults under the launchers' own names. Called after Hydra's plugin scan: see
    hydra_plugins.grpo_launcher.registration."""
    store_config("basic", BasicConf, "hydra/launcher")
    for name, node in (("submitit_local", LocalConf), ("submitit_slurm", SlurmConf)):
        store_config(name, with_local_values(node, name), "hydra/launcher")
    store_config("basic", SweeperConf, "hydra/sweeper")


def with_local_values(node: type, name: str) -> type:
    """The same defaults, overridden by the values of the file local/`name`.yaml, where there is one."""
    defaults = field(default_factory=lambda: ["_self_", {"optional /local@_here_": name}])
    return make_dataclass(node.__name__, [("defaults", list[Any], defaults)], bases=(node,))


def store_config(name: str, node: Any, group: str | None = None) -> None:
    """Store a config for Hydra in place of any that has its name. Hydra 1.3 always replaces, 1.4 must be told to."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance().store
    replace = {"replace": True} if "replace" in signature(store).parameters else {}
    store(group=group, name=name, node=node, provider="grpo_sweeps", **replace)
