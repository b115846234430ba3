"""manifest.json: which runs, which code and which command a report was made from."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pandas as pd

from grpo_sweeps.report.read.query import Sweep

PACKAGES = ("grpo_sweeps", "numpy", "pandas", "scipy", "matplotlib", "seaborn")


def public(text: str) -> str:
    """A command as it may be published: a user name and password inside a URL are left out.

    >>> public("tracking.uri=https://me:secret@host/")
    'tracking.uri=https://***@host/'
    """
    return re.sub(r"(?<=://)[^/\s@]+@", "***@", text)


def versions() -> dict[str, str]:
    """Versions of what computed the report."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def manifest(sweep: Sweep, command: Sequence[str], files: Sequence[str], missing: Sequence[str]) -> dict[str, Any]:
    """The content of manifest.json. Times are UTC; no host name, user name or environment is in it."""
    runs = []
    for row in sweep.runs.to_dict("records"):
        run = str(row["run"])
        status = sweep.statuses[run]
        runs.append(
            {
                "identity": run, "name": row["name"], "arm": row["arm"], "R": row["R"], "seed": row["seed"],
                "state": row["state"], "step": row["step"], "total": row["total"], "error": status.error,
                "commit": status.commit, "dirty": status.dirty, "versions": status.versions,
                "command": public(status.command), "started": _time(status.started), "ended": _time(status.ended),
            }
        )  # fmt: skip
    return {
        "sweep": sweep.name, "made": _time(datetime.now(UTC).timestamp()), "command": public(" ".join(command)),
        "versions": versions(), "commits": sorted({str(c) for c in sweep.runs["commit"].dropna()}),
        "arms_differ_in": list(sweep.arms.varies), "follow_R": list(sweep.arms.tied_to_R), "runs": runs,
        "missing": list(missing), "files": sorted(files),
    }  # fmt: skip


def _time(seconds: float | None) -> str | None:
    if seconds is None or pd.isna(seconds):
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
