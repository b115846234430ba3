"""What the measurement costs, and how exact it is, on this machine.

Values are key=value, several as key=2,4,8; `bench NAME --help` says what a benchmark takes, `bench NAME help` prints
its defaults as words. Exit codes: 0, 1 where `shapes` found a fault, or 2 for a bad command.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from grpo_sweeps import cli
from grpo_sweeps.benchmarks.options import OPTIONS
from grpo_sweeps.cli import say
from grpo_sweeps.text import show

C = TypeVar("C")
PROGRAM = "python -m grpo_sweeps.bench"


@cli.piped
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in OPTIONS:
        return _bench(words[0], words[1:])
    benchmarks = cli.table([(name, options.__doc__ or "") for name, options in OPTIONS.items()])
    parser, _ = cli.parser_of(PROGRAM, "NAME [KEY=VALUE] ...", __doc__ or "", benchmarks, "benchmarks")
    if cli.page_or_version(parser, words[:1]):
        return 0
    say(f"error: bench {words[0] if words else '(nothing)'}: allowed are {', '.join(OPTIONS)}")
    return 2


def _bench(name: str, words: list[str]) -> int:
    command: cli.Command[Any] = _command(OPTIONS[name], name)
    if words == ["help"]:
        for key in command.keys:
            show(f"{key.typed}={cli.written(key.default)}")
        return 0

    def work(options: Any) -> int:
        benchmark: Any = importlib.import_module(f"grpo_sweeps.benchmarks.{name}")
        return benchmark.run(options, f"{PROGRAM} {shlex.join([name, *words])}") or 0

    return cli.run(command, words, work)


def parse(options: type[C], words: Sequence[str]) -> C:
    """The options that the words give a benchmark. Raises ConfigError for a word that it does not take."""
    return _command(options).parse(words)


def _command(options: type[C], name: str = "") -> cli.Command[C]:
    return cli.named("bench", options, options.__doc__ or "", f"{PROGRAM} {name}".strip())


if __name__ == "__main__":
    sys.exit(main())
