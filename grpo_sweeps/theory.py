"""Runs the claims of arXiv 2606.29238 (C...) and of 2603.01162 (U...) on small policies of which every sequence is
listed, and writes a table, figures and a page. Exit codes: 0, or 2 for a bad command.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_sweeps import cli
from grpo_sweeps.redaction import redact
from grpo_sweeps.text import show
from grpo_sweeps.types import ConfigError


@dataclass(frozen=True)
class TheoryOptions:
    """The command's keys."""

    policies: int = cli.key(2, "how many policies, with seeds from `seed` on", least=1)
    prompts: int = cli.key(4, "prompts per policy", least=2)
    seed: int = cli.key(0, "of policies and draws", least=0, most=cli.MOST_SEED)
    draws: int = cli.key(20_000, "draws per Monte Carlo check", least=1000)
    steps: int = cli.key(200, "drawn steps per point of the figures", least=10)
    out: str = cli.key("reports/theory", "where tables, figures and page go", "FOLDER")


COMMAND = cli.named("theory", TheoryOptions, __doc__ or "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return cli.run(COMMAND, words, lambda options: _theory(options, words))


def _theory(options: TheoryOptions, words: list[str]) -> int:
    from grpo_sweeps.science.build import build

    try:
        claims = build(options, redact(f"python -m grpo_sweeps.theory {shlex.join(words)}".strip()))
    except OSError as error:
        raise ConfigError(str(error)) from error
    for claim in claims:
        show(f"{claim.id:4} {claim.judgement}")
    show(f"{options.out}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
