"""A run that a command's words name, and its configuration as it was frozen: what `credit`, `export` and `diff` begin
with."""

from __future__ import annotations

from pathlib import Path

from grpo_sweeps.config import RunConfig
from grpo_sweeps.paths import sweep_folder, sweep_names
from grpo_sweeps.redaction import holds_hidden
from grpo_sweeps.tracking.local import CONFIG as CONFIG_FILE
from grpo_sweeps.tracking.local import read_config
from grpo_sweeps.tracking.status import RecordError, RunStatus, read_status
from grpo_sweeps.types import ConfigError

MOST_NAMED = 20  # runs that a refusal lists


def find_run(command: str, runs_dir: Path, sweep: str, run: str) -> tuple[Path, RunStatus]:
    """The folder of a run and its status.

    Args:
        command: whose sentence a refusal is.
        sweep: where to look; "" for every sweep of `runs_dir`.
        run: its identity or the first digits of it, or its folder; "" where there is one run.

    Raises:
        ConfigError: where not exactly one run fits; it names the runs to choose from.
    """
    if "/" in run or (Path(run) / CONFIG_FILE).is_file():
        folder = Path(run).expanduser()
        if not (folder / CONFIG_FILE).is_file():
            raise ConfigError(
                f"{command}: run={run}: holds no {CONFIG_FILE}; an identity or the folder of a run is needed"
            )
        return folder, _status(command, folder)
    folders = [sweep_folder(runs_dir, sweep)] if sweep else [runs_dir / name for name in sweep_names(runs_dir)]
    runs = [path for folder in folders for path in sorted(folder.iterdir()) if _is_run(path)]
    found = [path for path in runs if path.name.startswith(run)]
    if len(found) != 1:
        where = f"sweep={sweep}" if sweep else f"runs_dir={runs_dir}"
        said = f"run={run}" if run else f"{where} has {len(runs)} runs, run= is needed"
        several = found if run and len(found) > 1 else runs
        shown = [f"{path.name} ({'' if sweep else f'{path.parent.name}: '}{_name(path)})" for path in several]
        more = f" and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else ""
        raise ConfigError(f"{command}: {said}; choose one of {', '.join(shown[:MOST_NAMED]) or '(none)'}{more}")
    return found[0], _status(command, found[0])


def frozen_config(command: str, run_dir: Path) -> RunConfig:
    """The run's configuration. Raises ConfigError where it cannot be read or lacks a secret that was given."""
    path = run_dir / CONFIG_FILE
    try:
        written = read_config(run_dir)
    except RecordError as error:
        raise ConfigError(str(error).rstrip(".")) from error
    if not written:
        raise ConfigError(f"{path} holds no configuration")
    if lost := [key for key, value in written.items() if key != "tracking" and holds_hidden(value)]:
        raise ConfigError(
            f"{path}: {lost[0]} was given a secret, which is stored nowhere: {command} cannot make the run again"
        )
    return RunConfig.from_mapping(written)


def _is_run(path: Path) -> bool:
    return (path / CONFIG_FILE).is_file() and not path.name.startswith(".")


def _status(command: str, run_dir: Path) -> RunStatus:
    try:
        return read_status(run_dir)
    except RecordError as error:
        raise ConfigError(f"{command}: run={run_dir.name}: {str(error).rstrip('.')}") from error


def _name(run_dir: Path) -> str:
    try:
        return read_status(run_dir).name
    except RecordError:
        return "status cannot be read"
