"""The credit of each token of a trained model's completions; see docs/credit.md.

The value of every prefix from fresh continuations, its share of the variance of the reward along the rollout, and how
much of it uniform credit carries.
Exit codes: 0, or 2 for a bad command.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from grpo_sweeps import cli
from grpo_sweeps.credit.options import CreditOptions
from grpo_sweeps.say import say
from grpo_sweeps.types import ConfigError

COMMAND = cli.named("credit", CreditOptions, __doc__ or "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    asked = ["--help"] if "help" in words else words
    return cli.run(COMMAND, asked, lambda options: _credit(options, words))


def _credit(options: CreditOptions, words: list[str]) -> int:
    from grpo_sweeps.credit.build import build
    from grpo_sweeps.credit.page import quantities
    from grpo_sweeps.publish.formats import with_interval

    try:
        result = build(options, f"python -m grpo_sweeps.credit {shlex.join(words)}".strip(), say)
    except OSError as error:
        raise ConfigError(str(error)) from error
    for _, text, one in quantities(result.shares, options.every):
        print(f"{text}: {with_interval(one.mean, one.low, one.high, 3)}")
    print(result.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
