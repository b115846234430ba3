"""Entry point: `python -m grpo_sweeps.credit sweep=NAME [run=IDENTITY] [problems=train|held_out] [prompts=8]
[rollouts=2] [continuations=32] [every=1] [seed=0] [device=auto] [runs_dir=runs] [out=reports/NAME/credit]`.

The credit of each token of a trained model's completions: the value of every prefix from fresh continuations, its share
of the variance of the reward along the rollout, and how much of it uniform credit carries; see docs/credit.md. `run`
may be left out where the sweep has one run. Exit codes: 0, or 2 for a bad command.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from grpo_sweeps.sweep.say import say
from grpo_sweeps.types import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help", "help"} & set(words):
        print(__doc__, end="")
        return 0
    from grpo_sweeps.bench import parse
    from grpo_sweeps.credit.build import CreditOptions as Options
    from grpo_sweeps.credit.build import build
    from grpo_sweeps.credit.page import quantities
    from grpo_sweeps.report.formats import with_interval

    try:
        options = parse(Options, words, "credit")
        result = build(options, f"python -m grpo_sweeps.credit {shlex.join(words)}".strip(), say)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for _, text, one in quantities(result.shares, options.every):
        print(f"{text}: {with_interval(one.mean, one.low, one.high, 3)}")
    print(result.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
