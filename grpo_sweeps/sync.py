"""python -m grpo_sweeps.sync [sweep=NAME] [runs_dir=runs] [uri=URI] [experiment=NAME] [run=IDENTITY] [--follow]
python -m grpo_sweeps.sync --init [uri=URI] [experiment=NAME]

Copies the local records of a sweep (of all sweeps, when none is named) to MLflow. Run again it sends only what is
missing. tracker: mlflow, or the dotted path of a tracker of your own; by default the one that the runs were configured
with, else mlflow. uri: where to; by default what the runs were configured with, else MLFLOW_TRACKING_URI, else
sqlite:///mlflow.db here (uri=env leaves out what the runs were configured with). Before that, spectral values that an
older version logged too small are recomputed from the recorded Grams of ended runs: metrics.jsonl gets further lines,
and MLflow a run in the place of the old one, both marked (not with --follow). --follow: go on copying every few
seconds until standard input ends. --init: copy nothing, only make the store and its experiment where they are missing,
once before many jobs meet there. Exit code 0: all copied; 1: something could not be (a sentence says what); 2: a bad
command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from grpo_sweeps.types import ConfigError


@dataclass
class Arguments:
    """The command's keys."""

    sweep: str | None = None
    runs_dir: str = "runs"
    tracker: str | None = None
    uri: str | None = None
    experiment: str | None = None
    run: str | None = None
    follow: bool = False
    init: bool = False


FLAGS = ("follow", "init")


def parse(argv: Sequence[str]) -> Arguments:
    """key=value words, --follow and --init. Raises ConfigError for anything else."""
    arguments = Arguments()
    keys = [f.name for f in fields(Arguments) if f.name not in FLAGS]
    for word in argv:
        key, equals, value = word.partition("=")
        if word in {f"--{flag}" for flag in FLAGS}:
            setattr(arguments, word.removeprefix("--"), True)
        elif not equals or key not in keys or not value:
            raise ConfigError(
                f"{word!r} is not understood; allowed are {', '.join(k + '=...' for k in keys)}, --follow and --init."
            )
        else:
            setattr(arguments, key, value)
    for key in ("sweep", "run"):
        name = getattr(arguments, key)
        if name is not None and (name in (".", "..") or Path(name).name != name):
            raise ConfigError(f"{key}={name}: the name of one folder is allowed, not a path.")
    if arguments.run and not arguments.sweep:
        raise ConfigError(f"run={arguments.run} needs sweep=NAME beside it.")
    if arguments.init and (arguments.follow or arguments.sweep):
        raise ConfigError("--init copies nothing: only uri=URI and experiment=NAME are allowed beside it.")
    return arguments


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


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    from grpo_sweeps.tracking import mirror

    try:
        arguments = parse(words)
        named = (arguments.tracker, arguments.uri, arguments.experiment)
        if arguments.init:
            return mirror.prepare(mirror.settings({}, *named))
        folders = sweep_folders(arguments)
        return max(
            mirror.sync(folder, mirror.settings(mirror.configured(folder), *named), arguments.run, arguments.follow)
            for folder in folders
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
