"""The credit of each token of a trained model's completions; see docs/credit.md.

The value of every prefix from fresh continuations, its share of the variance of the reward along the rollout, and how
much of it uniform credit carries.
Exit codes: 0, or 2 for a bad command.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_sweeps import cli
from grpo_sweeps.cli import say
from grpo_sweeps.text import show
from grpo_sweeps.types import ConfigError


@dataclass(frozen=True)
class CreditOptions:
    """The command's keys."""

    sweep: str = cli.key("", "the sweep of the run", "NAME", required=True)
    run: str = cli.key("", "the run whose checkpoint is taken", "IDENTITY", unset="the sweep's one run")
    problems: str = cli.key("train", "the problems to answer", "train|held_out")
    prompts: int = cli.key(8, "how many of them")
    rollouts: int = cli.key(2, "completions per problem")
    continuations: int = cli.key(32, "continuations per prefix")
    every: int = cli.key(1, "tokens per segment: the values stand at its ends")
    seed: int = cli.key(0, "of problems, completions and continuations")
    device: str = cli.key("auto", "where the model runs", "auto|cpu|cuda|cuda:N", local="trainer.device")
    runs_dir: str = cli.key("runs", "where the runs are", "FOLDER", local="runs_dir")
    out: str = cli.key("", "where the page goes", "FOLDER", unset="reports/SWEEP/credit")


COMMAND = cli.named("credit", CreditOptions, __doc__ or "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return cli.run(COMMAND, words, lambda options: _credit(options, words))


def _credit(options: CreditOptions, words: list[str]) -> int:
    from grpo_sweeps.credit.build import build
    from grpo_sweeps.credit.page import quantities
    from grpo_sweeps.publish.formats import with_interval_of

    try:
        result = build(options, f"python -m grpo_sweeps.credit {shlex.join(words)}".strip(), say)
    except OSError as error:
        raise ConfigError(str(error)) from error
    for _, text, one in quantities(result.shares, options.every):
        show(f"{text}: {with_interval_of(one, 3)}")
    show(str(result.page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
