"""What the estimators that divide by a standard deviation have in common."""

from __future__ import annotations


def check_scale(ddof: int, eps: float, count: str) -> None:
    """Raise ValueError for a standard deviation that is not meant; `count` is the letter of what is counted, R or N."""
    if ddof not in (0, 1):
        raise ValueError(f"ddof={ddof}: allowed are 0 (divide by {count}) and 1 (divide by {count} - 1)")
    if not eps >= 0:
        raise ValueError(f"eps={eps}: allowed is a number >= 0")
