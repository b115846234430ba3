"""Copies the local records of a sweep to MLflow. Run again it sends only what is missing.

Before that, spectral values that an older version logged too small are recomputed from the recorded Grams of ended
runs: metrics.jsonl gets further lines, and MLflow a run in the place of the old one, both marked (not with --follow).
Exit code 0: all copied; 1: something could not be (a sentence says what); 2: a bad command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_sweeps import cli
from grpo_sweeps.types import ConfigError


@dataclass(frozen=True)
class Arguments:
    """The command's keys."""

    sweep: str | None = cli.key(None, "the sweep to copy", "NAME", unset="all of them")
    runs_dir: str = cli.key("runs", "where the runs are", "FOLDER")
    uri: str | None = cli.key(
        None,
        "where to; env leaves out what the runs were configured with",
        "URI",
        unset="what the runs were configured with, else MLFLOW_TRACKING_URI, else sqlite:///mlflow.db here",
    )
    experiment: str | None = cli.key(
        None, "the experiment there", "NAME", unset="what the runs were configured with, else grpo_sweeps"
    )
    run: str | None = cli.key(None, "one run of the sweep", "IDENTITY", unset="all of them")
    follow: bool = cli.key(False, "go on copying every few seconds until standard input ends", flag=True)
    init: bool = cli.key(
        False,
        "copy nothing, only make the store and its experiment where they are missing, before many jobs meet there",
        flag=True,
    )


COMMAND = cli.Command(
    "python -m grpo_sweeps.sync",
    Arguments,
    __doc__ or "",
    "{word!r} is not understood; allowed are {allowed}.",
    each="{key}=...",
    empty=False,
)


def check(arguments: Arguments) -> None:
    """Raise ConfigError for a value, or two together, that cannot be meant."""
    for key in ("sweep", "run"):
        name = getattr(arguments, key)
        if name is not None and (name in (".", "..") or Path(name).name != name):
            raise ConfigError(f"{key}={name}: the name of one folder is allowed, not a path.")
    if arguments.run and not arguments.sweep:
        raise ConfigError(f"run={arguments.run} needs sweep=NAME beside it.")
    if arguments.init and (arguments.follow or arguments.sweep):
        raise ConfigError("--init copies nothing: only uri=URI and experiment=NAME are allowed beside it.")


def sweep_folders(arguments: Arguments) -> list[Path]:
    """The sweeps' folders that hold runs. Raises ConfigError when there are none."""
    runs_dir = Path(arguments.runs_dir)
    if not runs_dir.is_dir():
        raise ConfigError(
            f"runs_dir={runs_dir}: there is no such folder; run a sweep first or name the folder of its runs."
        )
    present = sorted(p.name for p in runs_dir.iterdir() if any(p.glob("*/status.json")))
    if arguments.sweep is None:
        if not present:
            raise ConfigError(f"runs_dir={runs_dir}: it holds no runs.")
        return [runs_dir / name for name in present]
    if arguments.sweep not in present and not arguments.follow:  # a follower starts before its first run
        raise ConfigError(
            f"sweep={arguments.sweep}: no runs of it in {runs_dir}; there are {', '.join(present) or 'none'}."
        )
    return [runs_dir / arguments.sweep]


def configured(sweep_dir: Path) -> dict[str, Any]:
    """The `tracking` part of the configuration of the sweep's first run, empty when there is none."""
    from grpo_sweeps.tracking.local import read_config
    from grpo_sweeps.tracking.status import RecordError

    for path in sorted(sweep_dir.glob("*/config.yaml")):
        try:
            tracking = read_config(path.parent).get("tracking")
        except RecordError:
            continue  # the copy of this run names it
        if isinstance(tracking, dict):
            return tracking
    return {}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return cli.run(COMMAND, argv, _copy)


def _copy(arguments: Arguments) -> int:
    check(arguments)
    if arguments.init:
        return _init(arguments)
    return max(_sync(folder, arguments) for folder in sweep_folders(arguments))


def _init(arguments: Arguments) -> int:
    from grpo_sweeps.tracking.mirror import prepare_store
    from grpo_sweeps.tracking.mlflow_store import StoreError, resolve_uri
    from grpo_sweeps.tracking.provenance import redact

    _needs_mlflow()
    uri = resolve_uri(None if arguments.uri == "env" else arguments.uri)
    experiment = arguments.experiment or "grpo_sweeps"
    try:
        prepare_store(uri, experiment)
    except (StoreError, OSError) as error:
        print(redact(str(error)), file=sys.stderr)
        return 1
    print(f"experiment {experiment} is ready -> {redact(uri)}")
    return 0


def _needs_mlflow() -> None:
    from importlib.util import find_spec

    if find_spec("mlflow") is None:
        raise ConfigError("mlflow is not installed here: pip install mlflow, or run sync where it is.")


def _sync(folder: Path, arguments: Arguments) -> int:
    from grpo_sweeps.tracking.mirror import Mirror, follow
    from grpo_sweeps.tracking.mlflow_store import StoreError, resolve_uri
    from grpo_sweeps.tracking.provenance import redact

    tracking = configured(folder)
    wanted = None if arguments.uri == "env" else arguments.uri or tracking.get("uri")
    uri = resolve_uri(None if wanted is None else str(wanted))
    problems = [] if arguments.follow else _correct(folder, arguments.run)
    _needs_mlflow()
    experiment = arguments.experiment or str(tracking.get("experiment") or "grpo_sweeps")
    folder.mkdir(parents=True, exist_ok=True)
    mirror = Mirror(folder, uri, experiment, arguments.run)
    if arguments.follow and sys.stdin is not None:
        return follow(mirror, sys.stdin)
    try:
        copied = mirror.copy(wait=60.0)
    except (StoreError, OSError) as error:
        print(
            f"{folder.name}: {redact(str(error))} The local record is whole; run this again when the store is there.",
            file=sys.stderr,
        )
        return 1
    if copied is None:
        print(
            f"{folder.name}: another process has been copying to {redact(uri)} for a minute; try again.",
            file=sys.stderr,
        )
        return 1
    for problem in mirror.problems:
        print(problem, file=sys.stderr)
    print(
        f"{folder.name}: {copied.runs} runs, {copied.points} points and {copied.artifacts} files new -> {redact(uri)}"
    )
    return 1 if mirror.problems or problems else 0


def _correct(folder: Path, only: str | None) -> list[str]:
    """Recompute what older versions logged; prints what was done and returns what could not be, said as well."""
    from grpo_sweeps.sweep.lock import only_writer
    from grpo_sweeps.tracking.recompute import correct_sweep

    said, problems = correct_sweep(folder, only_writer, only)
    for sentence in said:
        print(sentence)
    for problem in problems:
        print(problem, file=sys.stderr)
    return problems


if __name__ == "__main__":
    sys.exit(main())
