"""Text that others wrote on its way to a terminal, a log or a page. Names, errors and completions may hold anything.

`plain` is for one line of a terminal or a log, `visible` for text of several lines, where what would hide or reorder
it must be seen. Formats with characters of their own (HTML, Markdown, CSV, LaTeX) have their functions in `publish`.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TextIO

ALIKE = 0.7  # of a word and the one that was meant, from 0 to 1


def plain(text: str) -> str:
    """The text on one line, without control characters."""
    return "".join(char if char.isprintable() else " " for char in text)


def count(number: int, noun: str = "run") -> str:
    """A number and its noun.

    >>> count(1), count(3), count(0, "finding")
    ('1 run', '3 runs', '0 findings')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def in_a_row(words: Sequence[str], last: str = " and ") -> str:
    """All of one or more words, with `last` before the last one.

    >>> in_a_row(["a"]), in_a_row(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return last.join(part for part in (", ".join(words[:-1]), words[-1]) if part)


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


def nearest(word: str, words: Iterable[str]) -> str:
    """The one of the words that looks like a word that is none of them; "" where none does.

    >>> nearest("rlo", ["grpo", "rloo"]), nearest("GRPO", ["grpo", "rloo"]), nearest("x", ["grpo", "rloo"])
    ('rloo', 'grpo', '')
    """
    lower = {one.lower(): one for one in words if one != word}
    return "".join(lower[near] for near in difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=ALIKE))


def did_you_mean(sentence: str, word: str, words: Iterable[str], mark: str = "") -> str:
    """A sentence about a word that is not known, with the known one that looks like it, where there is one."""
    near = nearest(word, words)
    return f"{sentence.rstrip('.')}; did you mean {near}{mark}?" if near else sentence


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
