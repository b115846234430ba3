"""Makes Table 1, Figures 1-4, the verdicts on the claims and index.html from the records of a sweep.

Figure 5, by layer and kind of parameter, where analysis.by=parameter (or layer) kept what it needs; figures of every
definition of rank by k, of the rank's change over training, and, where analysis.update_every is above 0, of what steps
do to the weights. Also the best group size, the groups of every size in the pools of a fixed policy, and how many
prompts an interval takes.

Several sweeps become one report: their arms side by side, paired where the problems are the same, and what differs
between their configurations.

What looks wrong with the runs comes first, on the page and here.
What was made of a run's files is kept in RUN/.cache/ for the next report; it may be deleted.

records=true copies what makes the report again into records/ beside it, without checkpoints, hosts and places, and
makes the report from that copy; runs_dir=OUT/records makes it again, without a GPU.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_sweeps import cli
from grpo_sweeps.cli import say
from grpo_sweeps.text import show
from grpo_sweeps.types import ConfigError


@dataclass(frozen=True)
class Options:
    """The command's keys."""

    sweep: str | None = cli.key(
        None, "the sweep to report on, or several, with commas, side by side", "NAME", unset="the one last written to"
    )
    where: str | None = cli.key(
        None, "only the runs with these values in their configuration", "KEY=VALUE[,...]", unset="all of them"
    )
    runs_dir: str = cli.key("runs", "where the runs are", "DIR", local="runs_dir")
    out: str | None = cli.key(None, "where the report goes", "DIR", unset="reports/NAME")
    commits: str | None = cli.key(
        None,
        "report on runs of several commits together",
        "allow",
        unset="one commit; uncommitted changes count as another",
    )
    records: bool = cli.key(False, "publish the records beside the report, at most 30 MB", "true")


COMMAND = cli.Command(
    "python -m grpo_sweeps.report",
    Options,
    __doc__ or "",
    "{word}: the report takes {allowed} only.",
    each="{key}=...",
    last=", ",
    empty=False,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 after one sentence about what is wrong with the command or the records."""
    words = list(sys.argv[1:] if argv is None else argv)
    return cli.run(COMMAND, words, lambda options: _report(options, words))


def _report(options: Options, words: list[str]) -> int:
    from grpo_sweeps.report.build import build
    from grpo_sweeps.report.claims.verdicts import error_lines
    from grpo_sweeps.report.read.query import ReportError
    from grpo_sweeps.report.records import publish_records

    command = ["python", "-m", "grpo_sweeps.report", *words]
    sweep, runs_dir, progress = options.sweep, Path(options.runs_dir), cli.Progress()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _say
            if options.records:
                _refuse_parts(options)
                sweep, runs_dir = publish_records(sweep, runs_dir, options.out, progress)
            out, claims = build(
                sweep, runs_dir, options.out, command, options.commits, _looks_wrong, progress, options.where
            )
    except ReportError as error:
        raise ConfigError(str(error)) from error
    for claim in claims:
        show(f"{claim.id} ({claim.arm}): {claim.verdict}")
    for line in error_lines(claims):
        say(line)
    show(str(Path(out) / "index.html"))
    return 0


def _refuse_parts(options: Options) -> None:
    """Records are published of one whole sweep. Raises ConfigError."""
    if options.where:
        raise ConfigError(f"where={options.where}: records=true publishes the whole sweep; leave one of both out")
    if options.sweep and "," in options.sweep:
        raise ConfigError(
            f"sweep={options.sweep}: records=true takes one sweep; publish each with the same out=DIR, and report on "
            "them together by runs_dir=DIR/records"
        )


def _looks_wrong(sentence: str) -> None:
    show(f"looks wrong: {sentence}")


def _say(message: Warning | str, *_: object, **__: object) -> None:
    """A warning as one line: where in the source it was raised says nothing to who reads the report."""
    say(str(message))


if __name__ == "__main__":
    sys.exit(main())
