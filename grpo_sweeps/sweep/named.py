"""A run that a command's words name, and its configuration as it was frozen: what `credit`, `export` and `diff` begin
with. Every command that takes run= tells by `named_runs` a run that is not there from several that fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_sweeps.config import RunConfig
from grpo_sweeps.paths import sweep_folder, sweep_names
from grpo_sweeps.redaction import holds_hidden
from grpo_sweeps.text import nearest
from grpo_sweeps.tracking.local import CONFIG as CONFIG_FILE
from grpo_sweeps.tracking.local import read_config
from grpo_sweeps.tracking.status import RecordError, RunStatus, read_status
from grpo_sweeps.types import ConfigError

MOST_NAMED = 12  # runs that a refusal lists


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
    where = f"sweep={sweep}" if sweep else f"runs_dir={runs_dir}"
    if not run and len(runs) != 1:
        raise ConfigError(f"{command}: {where} has {len(runs)} runs, run= is needed; choose one of {_listed(runs)}")
    found = named_runs(command, runs, run, where)
    if len(found) > 1:
        raise ConfigError(f"{command}: run={run}: several sweeps have it; add sweep=NAME to choose of {_listed(found)}")
    return found[0], _status(command, found[0])


def named_runs(command: str, runs: Sequence[Path], run: str, where: str) -> list[Path]:
    """The folders, among those of `runs`, of the run that `run` names by its identity or the first digits of it: more
    than one where several sweeps have it.

    Raises:
        ConfigError: where there is no such run, with those that there are in `where` and the one that may have been
            meant; and where runs of several identities begin with these digits, with those.
    """
    exact = [path for path in runs if path.name == run]
    found = exact or [path for path in runs if path.name.startswith(run)]
    if not found:
        alike = {path.name[: len(run)]: path.name for path in runs} | {_name(path): path.name for path in runs}
        meant = alike.get(run) or alike.get(nearest(run, alike))
        hint = f"; did you mean {meant}?" if meant else ""
        raise ConfigError(f"{command}: run={run}: no such run in {where}; there are {_listed(runs)}{hint}")
    if len({path.name for path in found}) > 1:
        raise ConfigError(
            f"{command}: run={run}: {len(found)} runs begin with it, and more of the identity is needed; choose one of "
            f"{_listed(found)}"
        )
    return found


def _listed(runs: Sequence[Path]) -> str:
    """Runs by identity, sweep (where there are several) and name, at most `MOST_NAMED`."""
    several = len({path.parent for path in runs}) > 1
    shown = [f"{path.name} ({f'{path.parent.name}: ' if several else ''}{_name(path)})" for path in runs[:MOST_NAMED]]
    more = f" and {len(runs) - MOST_NAMED} more" if len(runs) > MOST_NAMED else ""
    return f"{', '.join(shown) or '(none)'}{more}"


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
