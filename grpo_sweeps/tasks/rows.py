"""Rows of data: lines of JSON from a file, rows of a data set of the hub. What cannot be read is one sentence."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from grpo_sweeps.types import ConfigError, Problem

Row = tuple[str, Mapping[str, Any]]
"""Where a row stands, in words, and its columns."""
T = TypeVar("T")


def from_file(file: Path, allowed: str) -> Iterator[tuple[int, Row]]:
    """The number of each line of a file that is not blank, from 1, and its row. A byte-order mark is passed over.

    Args:
        allowed: what may be given, for the error.

    Raises:
        ConfigError: for a file that cannot be read, and for the first line that is no JSON object.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"task.path={file.parent} cannot be read ({file.name}: {error}); give {allowed}.") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{file} line {number}"
            yield number, (where, _object(line, where, allowed))


def _object(line: str, where: str, allowed: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"task.path: {where} is not JSON ({error}); give {allowed}.") from error
    if not isinstance(row, dict):
        raise ConfigError(f"task.path: {where} is not an object; give {allowed}.")
    return row


def from_hub(dataset: str, config: str | None, split: str, said: str, allowed: str) -> Iterator[tuple[int, Row]]:
    """The number of each row of a split, from 0, and the row, by the `datasets` library, from its cache or the network.

    Args:
        said: the key and value that asked for it, for the error. allowed: what may be given instead.

    Raises:
        ConfigError: where it cannot be loaded.
    """
    try:
        import datasets

        rows = datasets.load_dataset(dataset, config, split=split)
    except Exception as error:  # whatever the library, the network or the cache raises: the remedy is the same
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ConfigError(
            f"{said} is not allowed here because {dataset} could not be loaded ({reason}); give {allowed}."
        ) from error
    return ((index, (f"{dataset} {split} row {index}", row)) for index, row in enumerate(rows))


def first(problems: tuple[Problem, ...], count: int | None, key: str) -> tuple[Problem, ...]:
    """The first `count` problems; None: all. Raises ConfigError where there are fewer, or none at all."""
    if count is None and problems:
        return problems
    if count is None or isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= len(problems):
        raise ConfigError(
            f"task.{key}={'null' if count is None else count} is not allowed: the data holds {len(problems)} problems; "
            "give null for all of them or a whole number from 1 to that."
        )
    return problems[:count]


def shuffled(items: Sequence[T], seed: int | None) -> list[T]:
    """The items in an order that belongs to `seed` and to their number; None: as they are.

    Only random() of random.Random is used: for that alone Python promises the same numbers.
    """
    order = list(items)
    if seed is not None:
        uniform = random.Random(seed).random
        for end in range(len(order) - 1, 0, -1):
            other = int(uniform() * (end + 1))
            order[end], order[other] = order[other], order[end]
    return order


def names_in(rows: Iterable[Mapping[str, Any]]) -> str:
    """The names of columns that rows have, for an error."""
    found: dict[str, None] = {}
    for row in rows:
        found |= dict.fromkeys(row)
    return ", ".join(map(str, found)) or "none"
