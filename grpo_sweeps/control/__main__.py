"""A supervised control: the spectra of three kinds of R rows from the same problems, before any training. Takes the
words of `python -m grpo_sweeps.run` that choose the model, the task, R and the sampling, and two keys of its own.

one prompt   R completions of one problem: a group, as it is trained on
one each     one completion of each of R problems
solutions    the reference solutions of the same R problems, as supervised training has them

Each with weight 1 per row. Nothing is trained and no run is written.
Exit codes: 0, or 2 for a bad command, or a task whose problems have no solutions.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_sweeps import cli
from grpo_sweeps.text import show
from grpo_sweeps.types import ConfigError


@dataclass(frozen=True)
class Options:
    """The command's own keys."""

    groups: int = cli.key(16, "groups of each kind; each takes R problems", least=2)
    out: str = cli.key("", "where the page goes", "FOLDER", unset="reports/control_MODEL")


COMMAND = cli.named("control", Options, __doc__ or "")
TABLE = "control.csv"
OWN = tuple(f"{key}=" for key in ("groups", "out"))


@cli.piped
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if cli.page_or_version(COMMAND.parser(), words):
        return 0
    try:
        options = COMMAND.parse([word for word in words if word.startswith(OWN)])
        _check(options, words)
    except ConfigError as error:
        cli.say(f"error: {error}")
        return 2
    from grpo_sweeps import run

    def carry_out(plan: Any, *_: Any, **__: Any) -> list[Any]:
        if len(plan.runs) > 1:
            raise ConfigError(f"control: {len(plan.runs)} runs are composed; give words that compose one (R=8)")
        _control(options, plan.runs[0].config, words)
        return []

    return run.main([word for word in words if not word.startswith(OWN)], carry_out)


def _check(options: Options, words: Sequence[str]) -> None:
    """Raise ConfigError for words of `run` that mean nothing here, and for a folder that holds something else."""
    for word in words:
        if word in ("-m", "--multirun") or word.startswith(("dry_run=", "wait=", "redo=")):
            raise ConfigError(f"control: {word} is of no use here, where no run is made; leave it out")
    if options.out and not (Path(options.out) / TABLE).is_file():  # an earlier control is written anew
        cli.new_folder(options.out)


def _control(options: Options, config: Any, words: Sequence[str]) -> None:
    from grpo_sweeps.control.measure import measured
    from grpo_sweeps.control.page import write_page
    from grpo_sweeps.publish.formats import with_interval

    frame = measured(config, options.groups, cli.say)
    command = f"python -m grpo_sweeps.control {shlex.join(words)}".strip()
    try:
        page, table = write_page(frame, config, options.out, command)
    except OSError as error:
        raise ConfigError(f"control: out={options.out}: cannot be written to ({error.strerror})") from error
    for row in table[table["quantity"] == "effective_rank"].to_dict("records"):
        show(f"effective rank, {row['kind']}: {with_interval(row['mean'], row['low'], row['high'])}")
    show(str(page))


if __name__ == "__main__":
    sys.exit(main())
