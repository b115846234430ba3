"""Which code made the runs of a sweep. Numbers of different code are not averaged without a word."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from grpo_sweeps.report.read.query import ReportError, Sweep
from grpo_sweeps.tracking import provenance as source

ALLOW = "allow"


def codes(sweep: Sweep) -> dict[str, int]:
    """{what made them, in words: number of runs}, of the runs that have started.

    Uncommitted changes count as a commit of their own, and others than the same changes as another one where the run
    kept their digest. So do runs that do not say which commit made them, beside runs that do.
    """
    started = sweep.runs[~sweep.runs["run"].isin(sweep.waiting)]
    found = Counter(
        _code(None if row["commit"] is None or row["commit"] != row["commit"] else str(row["commit"]),
              row["dirty"] is True or row["dirty"] == 1, Path(str(row["path"])))
        for row in started.to_dict("records")
    )  # fmt: skip
    return dict(sorted(found.items()))


def _code(commit: str | None, dirty: bool, run_dir: Path) -> str:
    name = commit[:12] if commit else "no recorded commit"
    if not dirty:
        return name
    kept = source.read(run_dir)
    changes = f" {kept.diff_sha256[:8]}" if kept is not None and kept.diff_sha256 else ""
    return f"{name} with uncommitted changes{changes}"


def check_commits(sweep: Sweep, commits: str | None) -> None:
    """Raise ReportError, one sentence, where several commits made the sweep's runs and `commits` is not "allow"."""
    if commits not in (None, ALLOW):
        raise ReportError(f"commits={commits}: {ALLOW} is allowed, to report on runs of several commits together.")
    found = codes(sweep)
    if len(found) < 2 or commits == ALLOW:
        return
    listed = ", ".join(f"{code}: {n} run{'s' if n > 1 else ''}" for code, n in found.items())
    dirty = any("uncommitted" in code for code in found)
    note = "; uncommitted changes count as a commit of their own" if dirty else ""
    raise ReportError(
        f"sweep={sweep.name}: its runs were made by different commits ({listed}{note}); run the older ones again "
        f"(redo=stale), or add commits={ALLOW} to report on all of them together."
    )
