"""The code behind a run: commit, uncommitted changes, every package's version, the command. Written when the run is
submitted, compared when it starts: a job may wait for days, and what it imports is what stands in the folder then.

    source.json    {"commit", "dirty", "diff_sha256", "versions", "packages", "command", "time"}
    source.diff    the uncommitted changes of tracked files, redacted, at most 1 MiB; none where there are none
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from grpo_sweeps.tracking import provenance
from grpo_sweeps.tracking.atomic import write_text

JSON, DIFF = "source.json", "source.diff"
MOST = 2**20  # characters of the diff that are kept


@dataclass(frozen=True)
class Source:
    """What a process runs from. `diff_sha256` is that of the whole diff, also where `diff` is cut."""

    commit: str | None = None
    dirty: bool | None = None
    diff: str = ""
    diff_sha256: str = ""
    versions: dict[str, str] = field(default_factory=dict)  # of what can change a result
    packages: dict[str, str] = field(default_factory=dict)  # all that is installed
    command: str = ""
    time: float = 0.0


def snapshot(command: str = "") -> Source:
    """The source of this process, now. Needs git only to know commit and diff."""
    diff = provenance.diff() or ""
    digest = hashlib.sha256(diff.encode("utf-8", "surrogateescape")).hexdigest() if diff else ""
    kept = provenance.redact(diff[:MOST])
    if len(diff) > MOST:
        kept += f"\n(cut: the whole diff has {len(diff)} characters)\n"
    return Source(
        provenance.commit(), provenance.dirty(), kept, digest, provenance.versions(), packages(),
        provenance.redact(command), time.time(),
    )  # fmt: skip


@functools.cache
def packages() -> dict[str, str]:
    """Name -> version of every installed package."""
    found = {str(one.metadata["Name"]): one.version for one in importlib.metadata.distributions() if one.metadata}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def write(run_dir: Path, source: Source) -> None:
    """Put source.json and source.diff into the run's folder."""
    content = asdict(source)
    diff = content.pop("diff")
    if diff:
        write_text(run_dir / DIFF, diff.encode("utf-8", "replace").decode("utf-8"))
    else:
        (run_dir / DIFF).unlink(missing_ok=True)
    write_text(run_dir / JSON, json.dumps(content, indent=1) + "\n")


def read(run_dir: Path) -> Source | None:
    """What was written; None where there is nothing, or nothing that can be read."""
    try:
        content = json.loads((run_dir / JSON).read_text(encoding="utf-8"))
        diff = (run_dir / DIFF).read_text(encoding="utf-8", errors="replace") if (run_dir / DIFF).exists() else ""
        return Source(**{**content, "diff": diff})
    except (OSError, ValueError, TypeError):  # missing, damaged, or of another version
        return None


def since_submission(run_dir: Path, command: str = "") -> list[str]:
    """What has changed since the run was submitted, a sentence each; where nothing was written then, it is now."""
    before = read(run_dir)
    now = snapshot(command)
    if before is None:
        write(run_dir, now)
        return []
    return changes(before, now)


def changes(before: Source, now: Source) -> list[str]:
    """How two sources differ, a sentence each, most important first."""
    out = []
    if before.commit != now.commit:
        out.append(f"changed since submission: the commit is {_short(now.commit)}, it was {_short(before.commit)}")
    if before.diff_sha256 != now.diff_sha256:
        out.append("changed since submission: the uncommitted changes of the source are others")
    for name in sorted(before.versions.keys() | now.versions.keys()):
        was, is_ = before.versions.get(name, "not installed"), now.versions.get(name, "not installed")
        if was != is_:
            out.append(f"changed since submission: {name} is {is_}, it was {was}")
    return out


def _short(commit: str | None) -> str:
    return commit[:12] if commit else "unknown"
