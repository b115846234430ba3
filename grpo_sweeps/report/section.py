"""A section of the page that is a table with words: what modules beside the claims hand to the page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """name: its anchor. before, after: paragraphs. files: of the report, linked below the table."""

    name: str
    title: str
    before: tuple[str, ...]
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    after: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
