"""The launchers: each composes all runs, hands them to `grpo_sweeps.sweep.launch`, and gives Hydra a result for each.

They import the rest of this project when they launch, since Hydra imports this file with any application.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import LocalLauncher, SlurmLauncher


def _launch(
    launcher: Any, job_overrides: Sequence[Sequence[str]], start: Any, here: bool = False, on_nodes: bool = False
) -> list[JobReturn]:
    """Compose and plan every run before the first one starts; a result for each job, in the order of the jobs.

    here: the runs are in this process.
    on_nodes: the runs are on other machines, so with a tracker that is shared each copies its own record.
    """
    from grpo_sweeps.config import LaunchConfig, RunConfig, choices_of
    from grpo_sweeps.sweep.command import command_of
    from grpo_sweeps.sweep.launch import RunFailed, is_bad, launch, plan
    from grpo_sweeps.tracking.tracker import shared
    from hydra_plugins.grpo_launcher.composition import Composer

    setup_globals()
    composer = Composer(launcher.hydra_context.config_loader, launcher.config)
    asked = LaunchConfig.from_composed(composer.compose(job_overrides[0]))
    configs, choices = [], []
    for overrides in job_overrides:  # the next composition may change this one
        composed = composer.compose(overrides)
        configs.append(RunConfig.from_composed(composed))
        choices.append(choices_of(composed.hydra.runtime.choices))
    params = getattr(launcher, "params", {})
    command = command_of(launcher.config.hydra)
    planned = plan(configs, asked, job_overrides, command, here, on_nodes, params.get("gpu_mem_gb"), choices)
    jobs_copy = on_nodes and shared(planned.runs[0].config.tracking)
    carry_out = _another_end(launcher) or launch
    results = {result.identity: result for result in carry_out(planned, start, jobs_copy, params)}
    returns = []
    for overrides, key in zip(job_overrides, planned.identities, strict=True):
        job = JobReturn(overrides=list(overrides), task_name="run")
        bad = is_bad(results[key])
        job.return_value = RunFailed([results[key]]) if bad else results[key]
        job.status = JobStatus.FAILED if bad else JobStatus.COMPLETED
        returns.append(job)
    return returns


def _another_end(launcher: Any) -> Any:
    """What the application does with the planned runs instead of starting them (see grpo_sweeps.run); or None."""
    return getattr(launcher.task_function, "carry_out", None)


class GrpoBasicLauncher(BasicLauncher):
    """`hydra/launcher=basic`: one run after the other, in this process."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from grpo_sweeps.sweep.launch import run_here

        return _launch(self, job_overrides, run_here, here=True)


class GrpoLocalLauncher(LocalLauncher):
    """`hydra/launcher=submitit_local`: each run in its own process on this machine."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from grpo_sweeps.sweep.submit import check_local, start_local

        if not _another_end(self):
            check_local(self.params)
        return _launch(self, job_overrides, lambda planned, opening: start_local(planned, opening, self.params))


class GrpoSlurmLauncher(SlurmLauncher):
    """`hydra/launcher=submitit_slurm`: each run as one job of an array on SLURM."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from grpo_sweeps.sweep.submit import check_slurm, start_slurm

        if not _another_end(self):
            check_slurm(self.params)
        return _launch(
            self, job_overrides, lambda planned, opening: start_slurm(planned, opening, self.params), on_nodes=True
        )
