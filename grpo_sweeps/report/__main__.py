"""python -m grpo_sweeps.report [sweep=NAME] [runs_dir=runs] [out=reports/NAME] [commits=allow]

Tables, figures, claims and a page from the records of a sweep.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from grpo_sweeps.sweep.say import plain, say

USAGE = """usage: python -m grpo_sweeps.report [sweep=NAME] [runs_dir=runs] [out=reports/NAME] [commits=allow]

Makes Table 1, Figures 1-4, the verdicts on the claims and index.html from the records of a sweep; Figure 5, by layer
and kind of parameter, where analysis.by=parameter (or layer) kept what it needs; figures of every definition of rank
by k, of the rank's change over training, and, where analysis.update_every is above 0, of what steps do to the weights.
Also the best group size, the groups of every size in the pools of a fixed policy, and how many prompts an interval
takes.

  sweep=NAME     the sweep to report on (default: the one last written to)
  runs_dir=DIR   where the runs are (default: runs)
  out=DIR        where the report goes (default: reports/NAME)
  commits=allow  report on runs of several commits together (default: one commit; uncommitted changes count as another)

What looks wrong with the runs comes first, on the page and here.
What was measured of a run's Parquet segments is kept in RUN/.cache/ for the next report; it may be deleted.
"""
KEYS = ("sweep", "runs_dir", "out", "commits")


def main(argv: Sequence[str]) -> int:
    """Exit code 0, or 2 after one sentence about what is wrong with the command or the records."""
    if any(a in ("-h", "--help") for a in argv):
        print(USAGE, end="")
        return 0
    options: dict[str, str] = {}
    for argument in argv:
        key, equals, value = argument.partition("=")
        if key not in KEYS or not equals or not value:
            print(f"{argument}: the report takes {', '.join(f'{k}=...' for k in KEYS)} only.", file=sys.stderr)
            return 2
        options[key] = value
    from grpo_sweeps.report.build import build
    from grpo_sweeps.report.claims import error_lines
    from grpo_sweeps.report.query import ReportError

    command = ["python", "-m", "grpo_sweeps.report", *argv]
    choices = options.get("sweep"), options.get("runs_dir", "runs"), options.get("out")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _say
            out, claims = build(*choices, command, options.get("commits"), tell=_looks_wrong)
    except ReportError as error:
        print(error, file=sys.stderr)
        return 2
    for claim in claims:
        print(f"{claim.id} ({claim.arm}): {claim.verdict}")
    for line in error_lines(claims):
        say(line)
    print(Path(out) / "index.html")
    return 0


def _looks_wrong(sentence: str) -> None:
    print(plain(f"looks wrong: {sentence}"))


def _say(message: Warning | str, *_: object, **__: object) -> None:
    """A warning as one line: where in the source it was raised says nothing to who reads the report."""
    say(str(message))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
