"""Entry point: `python -m grpo_sweeps.bench gram model=smollm2_135m R=8 T=128 subjects=all`.

gram: one step with and without the Gram of its rows, beside the other ways to the same numbers: time, memory, error.
growth: how the cost of the Gram grows with R and T, as a figure. error: its exactness on a model of real width.
forms: one weight by every form of its Gram, and which of them the rule of engine/gram/forms.py takes.
shapes: random shapes through every kernel entry against float64: worst error, paths taken, crashes.
Values are key=value, several as key=2,4,8; `python -m grpo_sweeps.bench gram help` lists them. Exit codes: 0, 1 where
`shapes` found a fault, or 2 for a bad command.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

from grpo_sweeps.types import ConfigError

C = TypeVar("C")
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
BENCHMARKS = ("gram", "growth", "error", "forms", "shapes")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words or words[0] not in BENCHMARKS:
            name = words[0] if words else "(nothing)"
            raise ConfigError(f"bench {name}: allowed are {', '.join(BENCHMARKS)}")
        return _run(words[0], words[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(name: str, words: list[str]) -> int:
    benchmark: Any = importlib.import_module(f"grpo_sweeps.benchmarks.{name}")
    if words == ["help"]:
        print("\n".join(f"{key}={_written(field.default)}" for key, field in _keys(benchmark.Options).items()))
        return 0
    options = parse(benchmark.Options, words)
    return benchmark.run(options, f"python -m grpo_sweeps.bench {shlex.join([name, *words])}") or 0


def parse(options: type[C], words: Sequence[str], command: str = "bench") -> C:
    """key=value words -> the dataclass `options`; each value is read as the type of its default.

    Raises:
        ConfigError: for a key that does not exist or a value that cannot be read.
    """
    keys = _keys(options)
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in keys:
            raise ConfigError(f"{command}: {word!r} is not one of {', '.join(f'{name}=' for name in keys)}")
        default = keys[key].default
        try:
            values[keys[key].name] = _read(text, default)
        except ValueError:
            kind = KINDS[type(default[0] if isinstance(default, tuple) else default)]
            several = " or several, with commas," if isinstance(default, tuple) else ""
            raise ConfigError(f"{command}: {key}={text}: {kind}{several} is needed") from None
    return options(**values)


def _keys(options: Any) -> dict[str, Any]:
    """Fields by the word that sets them: `from` is no name in Python, its field is `from_`."""
    return {field.name.rstrip("_"): field for field in fields(options)}


def _read(text: str, default: Any) -> Any:
    if isinstance(default, tuple):
        return tuple(_read(part, default[0]) for part in text.split(","))
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise ValueError(text)
        return text == "true"
    return type(default)(text)


def _written(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


if __name__ == "__main__":
    sys.exit(main())
