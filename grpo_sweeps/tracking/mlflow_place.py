"""Which folder of runs a copy in MLflow was made from: an id kept in that folder, and its path.

Both are tags of every run there. Only together do they say that a run is this folder's: two machines may have the same
path, and a folder that was copied has the same id.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from pathlib import Path

from grpo_sweeps.files import write_text
from grpo_sweeps.tracking.locks import locked

FILE = ".mlflow.json"  # in the folder of runs: {"place": id}
PLACE, RUNS_DIR = "grpo_sweeps.place", "grpo_sweeps.runs_dir"


@dataclass(frozen=True)
class Place:
    """A folder of runs: its id (32 hexadecimal digits) and its absolute path."""

    id: str
    path: str

    def tags(self) -> dict[str, str]:
        """The tags that say it."""
        return {PLACE: self.id, RUNS_DIR: self.path}

    def made(self, tags: dict[str, str]) -> bool:
        """True where a run's tags say that it was copied from this folder."""
        return all(tags.get(key) == value for key, value in self.tags().items())


def read_place(runs_dir: Path) -> Place | None:
    """The place that a folder of runs is; None where it has no id that can be read."""
    try:
        found = json.loads((runs_dir / FILE).read_text(encoding="utf-8"))["place"]
        return Place(uuid.UUID(found).hex, str(runs_dir.resolve()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def make_place(runs_dir: Path) -> Place | None:
    """As `read_place`; makes the id where there is none. None where the folder cannot be written to."""
    if found := read_place(runs_dir):
        return found
    try:
        with locked(runs_dir / ".mlflow.lock", 30.0):
            if read_place(runs_dir) is None:
                write_text(runs_dir / FILE, json.dumps({"place": uuid.uuid4().hex}) + "\n")
    except OSError:
        return None  # nothing depends on it but `prune=true`, which then finds nothing
    return read_place(runs_dir)
