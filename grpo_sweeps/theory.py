"""Entry point: `python -m grpo_sweeps.theory [policies=2] [prompts=4] [seed=0] [draws=20000]
[steps=200] [out=reports/theory]`.

Runs the claims of arXiv 2606.29238 (C1 to C15) and of 2603.01162 (U1) on small policies of which every sequence is
listed, and writes a table, figures and a page. Exit codes: 0, or 2 for a bad command.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from grpo_sweeps.types import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help", "help"} & set(words):
        print(__doc__, end="")
        return 0
    from grpo_sweeps.bench import parse
    from grpo_sweeps.science.build import TheoryOptions as Options
    from grpo_sweeps.science.build import build

    try:
        options = parse(Options, words, "theory")
        for key, least in (("policies", 1), ("prompts", 2), ("draws", 1000), ("steps", 10)):
            if getattr(options, key) < least:
                raise ConfigError(f"theory: {key}={getattr(options, key)}: {least} or more is needed")
        claims = build(options, f"python -m grpo_sweeps.theory {shlex.join(words)}".strip())
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for claim in claims:
        print(f"{claim.id:4} {claim.judgement}")
    print(f"{options.out}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
