"""The records of a sweep as they are published beside its report: what makes the report again, and no more.

    <out>/records/<sweep>/<identity>/    config.yaml, status.json, source.json, model.json, metrics.jsonl, grams/,
                                         evals/, updates/, a few completions/, seal.json

Checkpoints and logs stay behind, and so do hosts, processes, jobs, absolute paths and secrets. `runs_dir=<out>/records`
reads the copy like any other folder of runs. Only whole records of runs that have ended are published, since the copy's
seal is of the copy.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from grpo_sweeps.files import TEMPORARY_PREFIX, write_text
from grpo_sweeps.redaction import mapping_without_places, without_places
from grpo_sweeps.report.build import report_folder
from grpo_sweeps.report.page import best_group
from grpo_sweeps.report.read.arms import find_arms
from grpo_sweeps.report.read.query import ReportError, find_sweep
from grpo_sweeps.text import count
from grpo_sweeps.tracking import model, provenance, seal
from grpo_sweeps.tracking.findings import examine
from grpo_sweeps.tracking.glance import in_words
from grpo_sweeps.tracking.journal import JOURNAL
from grpo_sweeps.tracking.lines import METRICS
from grpo_sweeps.tracking.local import CONFIG, journals, read_completions, read_config, read_status, write_status
from grpo_sweeps.tracking.published import MOST_COMPLETIONS, is_published, mark
from grpo_sweeps.tracking.status import FILE_NAME as STATUS
from grpo_sweeps.tracking.status import RecordError, RunStatus
from grpo_sweeps.types import Completion

FOLDER = "records"
MOST_BYTES = 30 * 10**6  # of a report's records: what a repository carries without a thought
NAMED = 3  # of the largest parts, where there is more
WHOLE = ("grams", "evals", "updates")  # folders that are copied as they are


@dataclass(frozen=True)
class _Run:
    """A run as it is read for its copy."""

    path: Path
    config: dict[str, Any]
    status: RunStatus


def publish_records(
    name: str | None, runs_dir: Path, out: str | None, progress: Callable[[str], None] = lambda sentence: None
) -> tuple[str, Path]:
    """Copy a sweep's records (the newest one's where `name` is None) below the folder of its report.

    A copy that is there already is replaced. Returns the sweep's name and the copy's folder of runs.

    Raises:
        ReportError: one sentence, where there is no such sweep, a run has not ended or its record is not whole, arms
            are told apart by absolute paths alone, the copy would be too large, or `out` cannot be written to.
    """
    path = find_sweep(name, runs_dir)
    folder = report_folder(out, path.name) / FOLDER
    _refuse_places(path, folder / path.name)
    runs = [_read(run_dir) for run_dir in _run_dirs(path)]
    configs = [mapping_without_places(run.config) for run in runs]
    _refuse_fewer_arms([run.config for run in runs], configs)
    _refuse_size(path.name, runs)
    hosts = sorted({run.status.host for run in runs if run.status.host} | {provenance.host()})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{TEMPORARY_PREFIX}{path.name}-", dir=folder) as aside:
            copy = Path(aside) / path.name
            copy.mkdir()
            mark(copy)
            for done, (run, config) in enumerate(zip(runs, configs, strict=True), start=1):
                _copy(run, config, copy / run.path.name, hosts)
                progress(f"the records of {done} of {count(len(runs))} are copied")
            if (folder / path.name).exists():
                shutil.rmtree(folder / path.name)
            copy.rename(folder / path.name)
    except OSError as error:
        raise ReportError(f"out={folder.parent}: cannot be written to ({error.strerror}).") from error
    return path.name, folder


def _refuse_places(path: Path, target: Path) -> None:
    """Neither is a copy published again, nor is anything but a copy replaced."""
    if is_published(path):
        raise ReportError(f"records=true: {path} holds published records; make the report from them without records=.")
    if target.exists() and not is_published(target):
        raise ReportError(f"records=true: {target} is there and holds no published records; move it, or give out=DIR.")


def _run_dirs(path: Path) -> list[Path]:
    found = (p for p in path.iterdir() if not p.name.startswith("."))
    return sorted(p for p in found if any((p / name).is_file() for name in (CONFIG, STATUS)))


def _read(run_dir: Path) -> _Run:
    """A run that has ended and whose record is whole. Raises ReportError."""
    try:
        status, config = read_status(run_dir), read_config(run_dir)
        findings = examine(run_dir)
    except (OSError, RecordError) as error:
        raise ReportError(f"records=true: a run cannot be published ({error}).") from error
    if status.state == "queued" or (status.state == "running" and not status.stale()):
        raise ReportError(
            f"records=true: {status.name or run_dir.name} is {status.state}; publish a sweep whose runs have ended."
        )
    if findings or not config:
        reason = in_words(findings) if findings else f"{CONFIG} is gone"
        raise ReportError(
            f"records=true: the record of {status.name or run_dir.name} ({run_dir.name}) is not whole: {reason}; only "
            "whole records are published."
        )
    return _Run(run_dir, config, status)


def _refuse_fewer_arms(configs: Sequence[Mapping[str, Any]], published: Sequence[Mapping[str, Any]]) -> None:
    """Arms that only an absolute path tells apart would be one without it."""
    before, after = find_arms(configs), find_arms(published)
    if len(set(after.labels)) < len(set(before.labels)):
        keys = ", ".join(key for key in before.varies if key not in after.varies)
        raise ReportError(
            f"records=true: arms of this sweep differ in absolute paths alone ({keys}), which are not published; run "
            "it with relative ones."
        )


def _refuse_size(sweep: str, runs: Sequence[_Run]) -> None:
    """Raise ReportError, with the largest parts, where a copy would be larger than `MOST_BYTES`."""
    sizes = {f"{run.status.name or run.path.name}: {part}": size for run in runs for part, size in _sizes(run.path)}
    total = sum(sizes.values())
    if total > MOST_BYTES:
        largest = sorted(sizes, key=lambda part: -sizes[part])[:NAMED]
        named = ", ".join(f"{part} {sizes[part] / 1e6:.1f} MB" for part in largest)
        raise ReportError(
            f"records=true: the records of {sweep} take {total / 1e6:.1f} MB, at most {MOST_BYTES / 1e6:.0f} MB are "
            f"published (the largest: {named}); Grams by layer or parameter (analysis.by) take the most: keep them in "
            "a sweep of few steps."
        )


def _sizes(run_dir: Path) -> list[tuple[str, int]]:
    """Bytes of each part of a run that is copied as it is."""
    found = [(f"{folder}/", sum(path.stat().st_size for path in _files(run_dir / folder))) for folder in WHOLE]
    metrics = run_dir / METRICS
    return [*found, (METRICS, metrics.stat().st_size if metrics.exists() else 0)]


def _files(folder: Path) -> list[Path]:
    """The segments and the journal of a folder of records, where there is something in them."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if not p.name.startswith(".") and p.is_file() and p.stat().st_size)


def _copy(run: _Run, config: Mapping[str, Any], to: Path, hosts: Sequence[str]) -> None:
    """One run's folder, sealed as it is then."""
    to.mkdir()
    for name in (CONFIG, model.FILE, METRICS):
        if (run.path / name).exists():
            shutil.copyfile(run.path / name, to / name)
    if config != run.config:
        write_text(to / CONFIG, yaml.safe_dump(dict(config), sort_keys=False))
    write_status(to, _status(run.status, hosts))
    if source := provenance.read(run.path, with_diff=False):
        command = without_places(source.command, hosts)
        provenance.write(to, replace(source, diff="", packages={}, command=command))
    for folder in WHOLE:
        if files := _files(run.path / folder):
            (to / folder).mkdir()
            for path in files:
                shutil.copyfile(path, to / folder / path.name)
    _completions(run, to)
    before = seal.read(run.path) or seal.Seal()
    keeps = tuple(replace(one, completions=0) for one in before.keeps)
    names = seal.names(to)
    seal.write(to, seal.Seal(run.path.name, 0, keeps, {name: seal.digest(to / name) for name in names}))


def _status(status: RunStatus, hosts: Sequence[str]) -> RunStatus:
    """The status without a machine, a process and a job."""
    return replace(
        status, state="interrupted" if status.state == "running" else status.state, host="", pid=0, pid_started=None,
        job_id=None, job_token=None, traceback=None, name=without_places(status.name, hosts),
        command=without_places(status.command, hosts),
        error=None if status.error is None else without_places(status.error, hosts),
        notes=[without_places(note, hosts) for note in status.notes],
    )  # fmt: skip


def _completions(run: _Run, to: Path) -> None:
    """A few completions of one group, those that the report shows among them."""
    kept = _chosen(read_completions(run.path), int(run.config["seed"]))
    if not kept:
        return
    journal = journals(to)[1]
    journal.run = run.path.name
    journal.append(kept)
    journal.compact()
    journal.close()
    (journal.folder / JOURNAL).unlink()


def _chosen(found: Sequence[Completion], seed: int) -> list[Completion]:
    """At most `MOST_COMPLETIONS` of the group that the report would show of this run alone, in the record's order: its
    best and its worst, then those of the largest advantages."""
    if not found:
        return []
    frame = pd.DataFrame([asdict(one) for one in found]).assign(run="", seed=seed)
    ordered = best_group(frame)[0]
    first = dict.fromkeys([ordered.index[0], ordered.index[-1]])
    rest = ordered["advantage"].abs().sort_values(ascending=False, kind="stable").index
    return [found[row] for row in sorted([*first, *(row for row in rest if row not in first)][:MOST_COMPLETIONS])]
