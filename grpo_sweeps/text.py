"""Text that others wrote on its way to a terminal, a log or a page. Names, errors and completions may hold anything.

`plain` is for one line of a terminal or a log, `visible` for text of several lines, where what would hide or reorder
it must be seen. Formats with characters of their own (HTML, Markdown, CSV, LaTeX) have their functions in `publish`.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from typing import TextIO


def plain(text: str) -> str:
    """The text on one line, without control characters."""
    return "".join(char if char.isprintable() else " " for char in text)


def visible(text: str) -> str:
    """Text whose control and format characters (such as a right-to-left override) are shown by their code point.

    >>> visible("a\\u202eb\\x1b[31m\\n")
    'a[U+202E]b[U+001B][31m\\n'
    """
    if text.isprintable():
        return text
    return "".join(
        c if c in "\n\t" or not unicodedata.category(c).startswith("C") else f"[U+{ord(c):04X}]" for c in text
    )


def natural(text: str) -> list[str | float]:
    """A key that sorts the numbers in a text by their size.

    >>> sorted(["lr=0.0001", "R=16", "lr=1e-05", "R=8"], key=natural)
    ['R=8', 'R=16', 'lr=1e-05', 'lr=0.0001']
    """
    parts = re.split(r"(\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)", text)
    return [float(part) if at % 2 else part for at, part in enumerate(parts)]


def coloured(file: TextIO | None) -> bool:
    """Whether colours may be written: to a terminal that knows them, unless NO_COLOR (no-color.org) says no."""
    terminal = file is not None and file.isatty() and os.environ.get("TERM") != "dumb"
    return terminal and not os.environ.get("NO_COLOR")


def show(text: str, file: TextIO | None = None, red: str = "") -> None:
    """Print one plain line to a person, on the standard output by default. red: the beginning of a line that is red
    where colours may be written."""
    stream, line = sys.stdout if file is None else file, plain(text)
    if red and line.startswith(red) and coloured(stream):
        line = f"\x1b[31m{red}\x1b[0m{line.removeprefix(red)}"
    print(line, file=stream, flush=True)
