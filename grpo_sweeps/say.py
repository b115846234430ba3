"""Writes to the person at the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def say(text: str) -> None:
    """Print one plain line, without the control characters that an error message may carry."""
    print(plain(text), file=sys.stderr, flush=True)


def plain(text: str) -> str:
    """The text on one line, without control characters."""
    return "".join(char if char.isprintable() else " " for char in text)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines with straight columns, two spaces between them."""
    cells = [[plain(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))] if cells else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def count(number: int, noun: str = "run") -> str:
    """A number and its noun: "1 run", "3 runs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
