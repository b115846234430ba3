"""Copies of a sweep's records that lie beside a report: what makes the report again, and no more.

    published.json    in the sweep's folder: {"format": 1, "sweep": NAME, "taken_out": [...]}

They are read only: no cache is kept in them, no run goes on from them, nothing is recomputed in them.
"""

from __future__ import annotations

import json
from pathlib import Path

from grpo_sweeps.files import write_text
from grpo_sweeps.types import ConfigError

FILE = "published.json"
FORMAT = 1
MOST_COMPLETIONS = 5  # of each run
TAKEN_OUT = (
    "checkpoints", "logs", "the diff of the source", "the list of installed packages", "host, process and job",
    "absolute paths, hosts and secrets in texts", f"all but {MOST_COMPLETIONS} completions per run",
)  # fmt: skip


def mark(sweep_dir: Path) -> None:
    """Say of a sweep's folder that it is a published copy, and what was taken out."""
    content = {"format": FORMAT, "sweep": sweep_dir.name, "taken_out": list(TAKEN_OUT)}
    write_text(sweep_dir / FILE, json.dumps(content, indent=1) + "\n")


def is_published(folder: Path) -> bool:
    """Whether the folder of a sweep, or of one of its runs, is a published copy."""
    return any((place / FILE).is_file() for place in (folder, folder.absolute().parent))


def refuse_published(sweep_dir: Path, reason: str) -> None:
    """Raise ConfigError where the sweep's folder is a published copy, before something is written to it."""
    if is_published(sweep_dir):
        raise ConfigError(
            f"runs_dir={sweep_dir.parent}: the records of {sweep_dir.name} there are a published copy, and {reason}; "
            "give another runs_dir"
        )
