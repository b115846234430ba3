"""Entry point: `python -m grpo_sweeps.bench gram model=smollm2_135m R=8 T=128`, `python -m grpo_sweeps.bench ghost`.

gram: forward and backward with and without the Gram of the rows, interleaved, and the peak memory of each.
ghost: where the ghost form of a linear layer becomes dearer than the block form (the cost rule of
engine/gram/linear.py). Values are key=value; `python -m grpo_sweeps.bench gram help` lists them. Exit codes: 0, or 2
for a bad command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

from grpo_sweeps.types import ConfigError

C = TypeVar("C")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words or words[0] not in ("gram", "ghost"):
            raise ConfigError(f"bench {words[0] if words else '(nothing)'}: allowed are gram and ghost")
        return _run(words[0], words[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(name: str, words: list[str]) -> int:
    if name == "gram":
        from grpo_sweeps.benchmarks import gram as benchmark
    else:
        from grpo_sweeps.benchmarks import ghost as benchmark  # type: ignore[no-redef]
    if words == ["help"]:
        print("\n".join(f"{f.name}={f.default}" for f in fields(benchmark.Options)))
        return 0
    benchmark.run(parse(benchmark.Options, words))
    return 0


def parse(options: type[C], words: Sequence[str]) -> C:
    """key=value words -> the dataclass `options`; each value is read as the type of its default.

    Raises:
        ConfigError: for a key that does not exist or a value that cannot be read.
    """
    defaults: dict[str, Any] = {field.name: field.default for field in fields(options)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in defaults:
            raise ConfigError(f"bench: {word!r} is not one of {', '.join(f'{name}=' for name in defaults)}")
        try:
            values[key] = _read(text, defaults[key])
        except ValueError:
            raise ConfigError(f"bench: {key}={text}: a {type(defaults[key]).__name__} is needed") from None
    return options(**values)


def _read(text: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise ValueError(text)
        return text == "true"
    return type(default)(text)


if __name__ == "__main__":
    sys.exit(main())
