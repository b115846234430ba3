"""What the person at the terminal is told."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """One plain line to the person, without the control characters that an error message may carry."""
    print("".join(char if char.isprintable() else " " for char in text), file=sys.stderr, flush=True)
