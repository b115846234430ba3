"""Copies the local records of a sweep to MLflow. What is there already is compared with them: only what is missing or
differs is sent, and runs there that have no record here any more are named.

Before that, spectral values that an older version logged too small are recomputed from the recorded Grams of ended
runs: metrics.jsonl gets further lines, and MLflow a run that replaces the old one, both marked (not with --follow).
Exit code 0: all copied; 1: something could not be (a sentence says what); 2: a bad command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_sweeps import cli, machine
from grpo_sweeps.text import did_you_mean
from grpo_sweeps.tracking.published import refuse_published
from grpo_sweeps.types import ConfigError


@dataclass(frozen=True)
class Arguments:
    """The command's keys."""

    sweep: str | None = cli.key(None, "the sweep to copy", "NAME", unset="all of them")
    runs_dir: str = cli.key("runs", "where the runs are", "FOLDER", local="runs_dir")
    tracker: str | None = cli.key(
        None,
        "mlflow, or the dotted path of a tracker of your own",
        "NAME",
        unset="what the runs were configured with, else mlflow",
    )
    uri: str | None = cli.key(
        None,
        "where to; env leaves out what the runs were configured with",
        "URI",
        unset="what the runs were configured with, else MLFLOW_TRACKING_URI, else sqlite:///mlflow.db here",
    )
    experiment: str | None = cli.key(
        None, "the experiment there", "NAME", unset="what the runs were configured with, else grpo_sweeps"
    )
    reports: str = cli.key(
        "reports", "where the reports are; the files of a sweep's own become artifacts of its parent run", "FOLDER"
    )
    run: str | None = cli.key(
        None, "one run of the sweep, by its identity or the first digits of it", "IDENTITY", unset="all of them"
    )
    prune: bool = cli.key(
        False, "delete there (restorably) the runs that were copied from folders that are no longer in runs_dir"
    )
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
    """Raise ConfigError for values that make no sense, alone or together."""
    for key in ("sweep", "run"):
        name = getattr(arguments, key)
        if name is not None and (name in (".", "..") or Path(name).name != name):
            raise ConfigError(f"{key}={name}: the name of one folder is allowed, not a path.")
    if arguments.reports != "reports" and not Path(arguments.reports).is_dir():
        raise ConfigError(f"reports={arguments.reports}: there is no such folder.")
    if arguments.run and not arguments.sweep:
        raise ConfigError(f"run={arguments.run} needs sweep=NAME beside it.")
    if arguments.prune and (arguments.run or arguments.follow or arguments.init):
        raise ConfigError(
            "prune=true goes with a copy of whole sweeps: run=, --follow and --init are not allowed beside it."
        )
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
        if not present and not arguments.prune:
            raise ConfigError(f"runs_dir={runs_dir}: it holds no runs.")
        return [runs_dir / name for name in present]
    if arguments.sweep not in present and arguments.prune:
        return []  # all that is left of it may be in MLflow
    if arguments.sweep not in present and not arguments.follow:  # a follower starts before its first run
        sentence = f"sweep={arguments.sweep}: no runs of it in {runs_dir}; there are {', '.join(present) or 'none'}."
        raise ConfigError(did_you_mean(sentence, arguments.sweep, present))
    return [runs_dir / arguments.sweep]


def one_run(arguments: Arguments, folder: Path) -> str | None:
    """The identity of the run that is copied alone, None for all of the sweep; a follower may start before its run.

    Raises ConfigError where there is no such run, or several fit.
    """
    if not arguments.run or arguments.follow:
        return arguments.run
    from grpo_sweeps.sweep.named import named_runs

    runs = sorted(path.parent for path in folder.glob("*/status.json"))
    return named_runs("sync", runs, arguments.run, f"sweep={folder.name}")[0].name


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return cli.run(COMMAND, argv, _copy)


def _copy(arguments: Arguments) -> int:
    from grpo_sweeps.tracking import mirror

    check(arguments)
    named = (arguments.tracker, arguments.uri, arguments.experiment)
    if arguments.init:
        return mirror.prepare(mirror.settings(machine.value("tracking") or {}, *named))
    folders = sweep_folders(arguments)
    only = one_run(arguments, folders[0]) if arguments.run else None
    for folder in folders:
        refuse_published(folder, "sync would note in them what it has copied")
    goals = {folder: mirror.settings(mirror.configured(folder), *named) for folder in folders}
    reports = Path(arguments.reports)
    codes = [
        mirror.sync(folder, goal, only, arguments.follow, None if only else reports / folder.name)
        for folder, goal in goals.items()
    ]
    if arguments.run or arguments.follow:
        return max(codes)
    if any(codes):  # what was not copied would look as if it were gone
        if arguments.prune:
            cli.say("prune=true: nothing is deleted while a run cannot be copied.")
        return max(codes)
    stores = list(goals.values()) or [mirror.settings(machine.value("tracking") or {}, *named)]
    places = {(goal.kind, goal.uri, goal.experiment): goal for goal in stores}
    runs_dir = Path(arguments.runs_dir)
    return max(mirror.look_beside(runs_dir, goal, arguments.sweep, arguments.prune) for goal in places.values())


if __name__ == "__main__":
    sys.exit(main())
