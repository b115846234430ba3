"""Checks that the records of a sweep are whole: every run against what it should hold by its configuration and the
steps that it has done (lines of metrics, groups, Grams, evaluations, completions, updates, checkpoints), every file for
damage, and what was copied to MLflow. Changes nothing; records of older versions are held to what they kept.

Prints a table of what is not so. `check` tries two steps of a command before a sweep, and `dry_run=true` of run shows
what a command would do: neither looks at records.

Exit codes: 0 all is whole; 1 something is missing or damaged; 2 a bad command.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_sweeps import cli
from grpo_sweeps.cli import aligned, count, say
from grpo_sweeps.config import RunConfig
from grpo_sweeps.paths import sweep_folder, sweep_names
from grpo_sweeps.sweep.identity import identity
from grpo_sweeps.text import plain, show
from grpo_sweeps.tracking.glance import Finding
from grpo_sweeps.tracking.published import TAKEN_OUT, is_published

HEADER = ("run", "what", "expected", "found", "in words")
ADVICE = (
    "put back what is missing, or make the runs afresh: the command that made them with redo=failed (redo=all where a "
    "run is not skipped as failed) keeps what is there in .replaced/"
)

ADVICE_PUBLISHED = "these are published records: take the files again from where they were published"


@dataclass(frozen=True)
class Options:
    """The command's keys."""

    sweep: str | None = cli.key(None, "the sweep to verify", "NAME", unset="all of them")
    runs_dir: str = cli.key("runs", "where the runs are", "FOLDER", local="runs_dir")
    run: str | None = cli.key(
        None, "one run, by its identity or the first digits of it", "IDENTITY", unset="all of them"
    )
    copies: bool = cli.key(True, "compare what was copied to MLflow as well", "true|false")
    json: bool = cli.key(False, "the findings as JSON", "true")


COMMAND = cli.named("verify", Options, __doc__ or "")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and return the exit code."""
    return cli.run(COMMAND, argv, _verify)


def _verify(options: Options) -> int:
    runs_dir = Path(options.runs_dir)
    names = sweep_names(runs_dir) if options.sweep is None else [sweep_folder(runs_dir, options.sweep).name]
    folders_of = {name: run_folders(runs_dir / name) for name in names}
    only = None
    if options.run is not None:
        where = f"runs_dir={runs_dir}" if options.sweep is None else f"sweep={options.sweep}"
        only = _named([path for folders in folders_of.values() for path in folders], options.run, where)
    found: dict[str, list[Finding]] = {}
    runs = published = 0
    for name, every in folders_of.items():
        folders = [path for path in every if only in (None, path.name)]
        if only is not None and not folders:
            continue
        runs += len(folders)
        published += len(folders) if is_published(runs_dir / name) else 0
        found[name] = [finding for folder in folders for finding in findings(folder)]
        if options.copies:
            found[name] += copies(runs_dir / name, only)
    if options.json:
        print(json.dumps([{"sweep": name, **asdict(one)} for name in found for one in found[name]], indent=1))
    else:
        _print(found, runs, published)
    return 1 if any(found.values()) else 0


def _named(folders: list[Path], run: str, where: str) -> str:
    """The identity of the run that the words name, in whichever sweeps it is. Raises ConfigError."""
    from grpo_sweeps.sweep.named import named_runs

    return named_runs("verify", folders, run, where)[0].name


def _print(found: dict[str, list[Finding]], runs: int, published: int) -> None:
    for name, own in found.items():
        if not own:
            continue
        damaged = len({one.run for one in own})
        show(f"sweep {name}: {count(len(own), 'finding')} in {count(damaged)}")
        rows = [HEADER, *((one.run, one.what, one.expected, one.found, f"{one.what} {one.text}") for one in own)]
        for line in aligned(rows):
            show(f"  {line}")
    if any(found.values()):
        say(ADVICE_PUBLISHED if published == runs else ADVICE)
    else:
        copies = f" ({count(published)} as published: {', '.join(TAKEN_OUT)} were taken out)" if published else ""
        show(f"{count(runs)} of {count(len(found), 'sweep')}: whole{copies}")


def run_folders(sweep_dir: Path) -> list[Path]:
    """The folders of a sweep in which something of a run lies."""
    some = ("status.json", "config.yaml", "metrics.jsonl", "seal.json", "grams")
    visible = (path for path in sweep_dir.iterdir() if path.is_dir() and not path.name.startswith("."))
    return sorted(path for path in visible if any((path / name).exists() for name in some))


def findings(run_dir: Path) -> list[Finding]:
    """Everything that is wrong with one run's record and checkpoints."""
    from grpo_sweeps.tracking.findings import examine

    try:
        return examine(run_dir, states=True, identity_of=lambda config: identity(RunConfig.from_mapping(config)))
    except OSError as error:
        return [
            Finding(
                run_dir.name, error.filename or "its folder", "readable", "not", f"cannot be read ({error.strerror})"
            )
        ]


def copies(sweep_dir: Path, only: str | None) -> Iterable[Finding]:
    """What differs in the tracker's copy of the runs of which something was copied."""
    from grpo_sweeps.tracking.mirror import configured, settings
    from grpo_sweeps.tracking.tracker import NotInstalled, TrackerError, load

    if not list(sweep_dir.glob("*/mlflow.json")):
        return []
    try:
        tracker = load(settings(configured(sweep_dir), None, None, None))
        compare = getattr(tracker, "compare", None)
        differing = compare(sweep_dir, only) if compare is not None else []
    except (NotInstalled, TrackerError, OSError) as error:
        return [Finding(sweep_dir.name, "the copy", "reachable", "not", f"was not compared: {plain(str(error))}")]
    return [Finding(run, "the copy", "as the record", "differs", text) for run, text in differing]


if __name__ == "__main__":
    sys.exit(main())
