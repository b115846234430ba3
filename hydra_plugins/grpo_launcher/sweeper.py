"""Hydra's basic sweeper without its own files and without stopping at the first run that failed."""

from __future__ import annotations

import itertools
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobStatus

MOST_RUNS = 10_000  # per command: more is a typing error, and SLURM would not take it


class GrpoSweeper(BasicSweeper):
    """The product of all axes. The launcher composes and checks every run first, so nothing is validated twice here."""

    def sweep(self, arguments: list[str]) -> Any:
        """Launch batch after batch; raises RunFailed after the last, with the results that are not well."""
        from grpo_sweeps.sweep.launch import RunFailed
        from grpo_sweeps.types import ConfigError

        assert self.hydra_context is not None and self.launcher is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        if self.max_batch_size is not None:
            raise ConfigError(
                f"hydra.sweeper.max_batch_size={self.max_batch_size}: null is allowed, since every run is checked "
                f"before the first one starts; the launcher's array_parallelism limits how many run at once"
            )
        runs = 1
        for override in overrides:
            if override.is_sweep_override() and override.is_discrete_sweep():
                runs *= sum(1 for _ in itertools.islice(override.sweep_string_iterator(), MOST_RUNS + 1))
            if runs > MOST_RUNS:
                raise ConfigError(f"{override.input_line}: at most {MOST_RUNS} runs are allowed in one command")
        for override in overrides:
            if override.is_discrete_sweep() and not any(True for _ in override.sweep_string_iterator()):
                raise ConfigError(
                    f"{override.input_line}: gives no value; an axis needs at least one (a,b,c), "
                    f"and range(start,stop) ends before stop"
                )
        self.overrides = self.split_arguments(overrides, self.max_batch_size)
        returns, first = [], 0
        while not self.is_done():
            batch = self.get_job_batch()
            returns.append(self.launcher.launch(batch, initial_job_idx=first))
            first += len(batch)
        jobs = [job for batch in returns for job in batch]
        failed = [result for job in jobs if job.status == JobStatus.FAILED for result in job._return_value.results]
        if failed:
            raise RunFailed(failed)
        return returns
