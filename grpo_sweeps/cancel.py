"""Ends the queued and running runs of a sweep: its SLURM jobs (scancel) and its processes on this machine (SIGTERM).

Every run stays resumable: the command that started the sweep, given again, goes on from the last checkpoints. Exit code
0, also when there was nothing to cancel; 1 when something could not be cancelled; 2 for a bad command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_sweeps import cli
from grpo_sweeps.types import ConfigError


@dataclass(frozen=True)
class Options:
    """The command's keys."""

    sweep: str = cli.key("", "the sweep to end", "NAME", required=True)
    runs_dir: str = cli.key("runs", "where the runs are", "FOLDER", local="runs_dir")


COMMAND = cli.Command(
    "python -m grpo_sweeps.cancel", Options, __doc__ or "", "{word}: not understood; allowed are {allowed}"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Cancel, say what was done, and return the exit code."""
    return cli.run(COMMAND, argv, _cancel)


def _cancel(options: Options) -> int:
    from grpo_sweeps.cli import count, say
    from grpo_sweeps.paths import sweep_folder
    from grpo_sweeps.sweep.cancel import cancel

    if not options.sweep:
        raise ConfigError(f"sweep: a value is required and none is given; allowed are {COMMAND.allowed}")
    folder = sweep_folder(Path(options.runs_dir), options.sweep)
    done = cancel(folder)
    ended = len(done.jobs) + len(done.processes)
    for name in (*done.jobs, *done.processes):
        say(f"  cancelled  {name}")
    for problem in done.problems:
        say(f"  {problem}")
    if ended:
        say(f"sweep {folder.name}: {count(ended)} cancelled; the same command as before goes on from their checkpoints")
    elif not done.problems:
        say(f"sweep {folder.name}: nothing of it is queued or running")
    return 1 if done.problems else 0


if __name__ == "__main__":
    sys.exit(main())
