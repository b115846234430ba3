"""Entry point: python -m grpo_sweeps.cancel sweep=NAME [runs_dir=runs]

Ends what is queued or running of a sweep: its SLURM jobs (scancel) and its processes on this machine (SIGTERM). Every
run stays resumable: the command that started the sweep, given again, goes on from the last checkpoints. Exit code 0,
also where there was nothing to cancel; 1 when something could not be cancelled; 2 for a bad command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_sweeps.types import ConfigError

ALLOWED = "allowed are sweep=NAME and runs_dir=FOLDER"


def main(argv: Sequence[str] | None = None) -> int:
    """Cancel, say what was done, and return the exit code."""
    from grpo_sweeps.sweep.cancel import cancel
    from grpo_sweeps.sweep.say import count, say

    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    try:
        folder = _folder(words)
    except ConfigError as error:
        say(f"error: {error}")
        return 2
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


def _folder(words: Sequence[str]) -> Path:
    """The folder of the sweep that the command names."""
    from grpo_sweeps.sweep.paths import sweep_folder

    options = {"sweep": "", "runs_dir": "runs"}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in options:
            raise ConfigError(f"{word}: not understood; {ALLOWED}")
        options[key] = value
    if not options["sweep"]:
        raise ConfigError(f"sweep: a value is required and none is given; {ALLOWED}")
    return sweep_folder(Path(options["runs_dir"]), options["sweep"])


if __name__ == "__main__":
    sys.exit(main())
