"""A flight check. It takes the same words as `python -m grpo_sweeps.run` (see its --help for groups, choices and
sweeps) but makes only two steps, of the heaviest run of a sweep: load, sample, verify the Gram, measure, update, stop
with a checkpoint, resume from it. Everything is written to a temporary folder that is removed afterwards.

Prints one page: seconds and tokens/s by part, memory, reward at the start, cut completions, groups, effective rank, the
expected time of the run and of the sweep, room on the disk, and what looks wrong. `dry_run=true` of grpo_sweeps.run
plans, check tries.

Exit codes: 0 nothing looks wrong; 1 something does, or the run failed (the page says in which part); 2 a bad command or
configuration (one sentence); 130 after Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from grpo_sweeps import cli


@cli.piped
def main(argv: Sequence[str] | None = None) -> int:
    """Run the check and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    usage = "[-m] [GROUP=CHOICE] [KEY=VALUE] ... [+sweeps=NAME]"
    if cli.page_or_version(cli.parser_of("python -m grpo_sweeps.check", usage, __doc__ or "")[0], words):
        return 0
    from grpo_sweeps import run
    from grpo_sweeps.sweep.flight import fly

    return run.main(words, fly)


if __name__ == "__main__":
    sys.exit(main())
