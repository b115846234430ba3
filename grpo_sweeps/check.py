"""usage: python -m grpo_sweeps.check [-m] [GROUP=CHOICE] [KEY=VALUE] ... [+sweeps=NAME]

A flight check: the same words as `python -m grpo_sweeps.run` (see its --help for groups, choices and sweeps), but
instead of the runs two steps of one of them, of a sweep its heaviest: load, sample, verify the Gram, measure, update,
stop with a checkpoint, resume from it. Everything is written to a temporary folder that is removed afterwards.

Prints one page: seconds and tokens/s by part, memory, reward at the start, cut completions, groups, effective rank, the
expected time of the run and of the sweep, and what looks wrong. `dry_run=true` of grpo_sweeps.run plans, check tries.

Exit codes: 0 nothing looks wrong; 1 something does, or the run failed (the page says in which part); 2 a bad command or
configuration (one sentence); 130 after Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Make the check and return its exit code."""
    from grpo_sweeps import run
    from grpo_sweeps.sweep.flight import fly

    words = list(sys.argv[1:] if argv is None else argv)
    if any(word in ("-h", "--help") for word in words):
        print((__doc__ or "").strip())
        return 0
    return run.main(words, fly)


if __name__ == "__main__":
    sys.exit(main())
