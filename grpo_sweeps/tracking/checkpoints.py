"""The checkpoints of a run by their manifests, without torch: whose they are, of which step, whether they are whole.

`engine.checkpoint` writes and loads them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from grpo_sweeps.tracking import seal as seals

FOLDER = "checkpoints"
_NAME = re.compile(r"step_(\d{7,})(?:\.(\d+))?")


@dataclass(frozen=True)
class HeldCheckpoint:
    """A checkpoint by its manifest. `fault`: why it cannot be used; empty for one that can."""

    name: str
    step: int
    identity: str
    fault: str = ""


def checkpoints(run_dir: Path, states: bool = False) -> list[HeldCheckpoint]:
    """The checkpoints, newest first, by their manifests; states: against their digests as well."""
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        if (match := _NAME.fullmatch(path.name)) and path.is_dir():
            found.append((int(match[1]), int(match[2] or 0), path))
    return [_checkpoint(path, step, states) for step, _, path in sorted(found, reverse=True)]


def _checkpoint(path: Path, step: int, states: bool) -> HeldCheckpoint:
    name = f"{FOLDER}/{path.name}"
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        size, sha, identity = manifest["size"], manifest["sha256"], str(manifest.get("identity", ""))
        if manifest["step"] != step:
            return HeldCheckpoint(name, step, identity, f"says that it is of step {manifest['step']}")
        if (path / "state.pt").stat().st_size != size:
            return HeldCheckpoint(name, step, identity, "is damaged: its state has another size than it was given")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return HeldCheckpoint(name, step, "", f"is damaged ({type(error).__name__}: {' '.join(str(error).split())})")
    if states and seals.digest(path / "state.pt")[1] != sha:
        return HeldCheckpoint(name, step, identity, "is damaged: its state is not what its manifest describes")
    return HeldCheckpoint(name, step, identity)


def usable(run_dir: Path, identity: str) -> HeldCheckpoint | None:
    """The newest checkpoint that a run can go on from, by manifests alone."""
    for one in checkpoints(run_dir):
        if not one.fault and (not identity or one.identity in ("", identity)):
            return one
    return None
