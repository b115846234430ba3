"""Find a run and load it as it was after its last checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import yaml

from grpo_sweeps.config import RunConfig
from grpo_sweeps.engine.policy import resolve_device
from grpo_sweeps.loop.keep import FOLDER, Keeper
from grpo_sweeps.loop.setup import Setup, prepare
from grpo_sweeps.sweep.execute import CONFIG_FILE
from grpo_sweeps.sweep.paths import sweep_folder, sweep_names
from grpo_sweeps.tracking.status import RecordError, RunStatus, read_status
from grpo_sweeps.types import ConfigError


def find_run(runs_dir: Path, sweep: str, run: str) -> tuple[Path, RunStatus]:
    """The folder of a run and its status. `run`: its identity or the first digits of it; may be left out where the
    sweep has one run.

    Raises:
        ConfigError: with the runs to choose from, where it is not one.
    """
    if not sweep:
        raise ConfigError(f"credit: sweep= is needed; choose one of {', '.join(sweep_names(runs_dir)) or '(none)'}")
    folder = sweep_folder(runs_dir, sweep)
    runs = sorted(p.name for p in folder.iterdir() if (p / CONFIG_FILE).is_file() and not p.name.startswith("."))
    found = [name for name in runs if name.startswith(run)]
    if len(found) != 1:
        names = ", ".join(f"{name} ({_name(folder / name)})" for name in runs) or "(none)"
        said = f"credit: run={run}" if run else f"credit: sweep={sweep} has {len(runs)} runs, run= is needed"
        raise ConfigError(f"{said}; choose one of {names}")
    return folder / found[0], _status(folder / found[0])


def load_run(run_dir: Path, status: RunStatus, device: str, note: Callable[[str], None]) -> tuple[Setup, int]:
    """The run with the parameters of its newest whole checkpoint, and the number of updates in it.

    Raises:
        ConfigError: without such a checkpoint, and for what `prepare` refuses.
    """
    if not any((run_dir / FOLDER).glob("step_*")):
        raise _without_checkpoint(run_dir, status)
    config = _config(run_dir)
    try:
        resolve_device(device)
    except ConfigError as error:
        raise ConfigError(f"credit: {str(error).removeprefix('trainer.')}") from None
    config = dataclasses.replace(
        config,
        trainer=dataclasses.replace(config.trainer, device=device),
        analysis=dataclasses.replace(config.analysis, every=0),  # nothing is differentiated
    )
    setup = prepare(config)
    step = Keeper(setup, run_dir, note).resume()
    if not step:
        raise _without_checkpoint(run_dir, status)
    return setup, step


def _without_checkpoint(run_dir: Path, status: RunStatus) -> ConfigError:
    return ConfigError(
        f"credit: run={run_dir.name} ({status.state} at step {status.step}): no whole checkpoint in "
        f"{run_dir / FOLDER}; choose a run that has one"
    )


def _config(run_dir: Path) -> RunConfig:
    path = run_dir / CONFIG_FILE
    try:
        written = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read ({' '.join(str(error).split())})") from error
    if not isinstance(written, dict):
        raise ConfigError(f"{path} holds no configuration")
    return RunConfig.from_mapping(written)


def _status(run_dir: Path) -> RunStatus:
    try:
        return read_status(run_dir)
    except RecordError as error:
        raise ConfigError(f"credit: run={run_dir.name}: {str(error).rstrip('.')}") from error


def _name(run_dir: Path) -> str:
    try:
        return read_status(run_dir).name
    except RecordError:
        return "status cannot be read"
