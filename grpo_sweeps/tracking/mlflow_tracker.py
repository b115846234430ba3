"""The tracker that copies to MLflow: `tracking=mlflow`. See `tracker` for what a tracker is.

Light: MLflow, and what reads the records (`mlflow_copy`), are imported by the first pass that has something to copy.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_sweeps.config import TrackingConfig
from grpo_sweeps.redaction import redact
from grpo_sweeps.tracking.locks import locked
from grpo_sweeps.tracking.mlflow_place import make_place
from grpo_sweeps.tracking.mlflow_store import (
    RefusedError,
    Store,
    StoreError,
    import_mlflow,
    resolve_uri,
    sqlite_path,
)
from grpo_sweeps.tracking.tracker import Copied, NotInstalled

LOCK_NAME = ".mlflow.lock"


class MLflowTracker:
    """Copies to a server, many jobs at once, or to a database, one process at a time.

    Raises ConfigError for an address that records cannot be copied to, NotInstalled without MLflow.
    """

    name = "MLflow"

    def __init__(self, tracking: TrackingConfig) -> None:
        self.uri, self.experiment = resolve_uri(tracking.uri), tracking.experiment
        if importlib.util.find_spec("mlflow") is None:
            raise NotInstalled("mlflow")
        self.place = redact(self.uri)
        self.shared = self.uri.startswith(("http://", "https://"))  # SQLite has one writer
        self._mirrors: dict[tuple[Path, str | None], Mirror] = {}

    def prepare(self) -> None:
        """Make the store and its experiment where they are missing."""
        prepare_store(self.uri, self.experiment)

    def copy(self, sweep_dir: Path, only: str | None = None, wait: float = 0.0) -> Copied | None:
        """Make one pass over a sweep's runs: a parent run for the sweep, a child for each run."""
        mirror = self._mirrors.setdefault((sweep_dir, only), Mirror(sweep_dir, self.uri, self.experiment, only))
        copied = mirror.copy(wait)
        return None if copied is None else replace(copied, problems=tuple(mirror.problems))

    def complete(self, sweep_dir: Path, only: str | None = None, wait: float = 0.0) -> Copied | None:
        """As `copy`, after comparing all that the store has with the records; a deleted experiment is restored."""
        mirror = Mirror(sweep_dir, self.uri, self.experiment, only, whole=True)
        copied = mirror.copy(wait)
        return None if copied is None else replace(copied, problems=tuple(mirror.problems))

    def beside(self, runs_dir: Path, sweep: str | None = None, prune: bool = False, wait: float = 0.0) -> list[str]:
        """The runs of the experiment that were copied from `runs_dir` and whose folder is no longer there, one
        sentence in all. sweep: of this one, and of those that are no longer there.

        prune: delete them, in MLflow's sense. Raises StoreError when the store cannot be reached or is in use.
        """
        from grpo_sweeps.tracking import mlflow_beside

        with _only_writer(self.uri, wait) as mine:
            if not mine:
                raise StoreError(f"{self.place}: another process has been writing to it for {wait:.0f} s.")
            return mlflow_beside.beside(Store(self.uri, self.experiment), runs_dir, sweep, prune)

    def attach(self, sweep_dir: Path, report: Path, wait: float = 0.0) -> int | None:
        """Make the files of the sweep's report artifacts of its parent run; how many were new. None when another
        process held the place for longer than `wait` seconds.

        Raises StoreError when the store cannot be reached.
        """
        from grpo_sweeps.tracking import mlflow_copy as copying

        with _only_writer(self.uri, wait) as mine, locked(sweep_dir / (LOCK_NAME + ".parent"), wait) as parent:
            if not (mine and parent):
                return None
            return copying.copy_report(Store(self.uri, self.experiment), sweep_dir, report)

    def compare(self, sweep_dir: Path, only: str | None = None) -> list[tuple[str, str]]:
        """(run, sentence) for each run of which something was copied here and whose copy is not as its record.

        Raises StoreError when the store cannot be reached.
        """
        from grpo_sweeps.tracking import mlflow_copy as copying

        runs, _ = copying.read_statuses(sweep_dir, only)
        store, found = None, []
        for folder, status in runs:
            if not (folder / copying.FILE_NAME).exists() or not copying.ended(status):
                continue
            store = store or Store(self.uri, self.experiment)
            if sentence := copying.difference(store, folder, status):
                found.append((status.name or folder.name, sentence))
        return found


class Mirror:
    """Copies one sweep (or one run of it) to one store, pass by pass; remembers what has not changed."""

    def __init__(
        self, sweep_dir: Path, uri: str, experiment: str, only: str | None = None, whole: bool = False
    ) -> None:
        self.sweep_dir, self.uri, self.experiment, self.only, self.whole = sweep_dir, uri, experiment, only, whole
        self._store: Store | None = None
        self._seen: dict[Path, Any] = {}
        self.problems: list[str] = []

    def copy(self, wait: float = 0.0) -> Copied | None:
        """Make one pass. None when another process copies to the same place for longer than `wait` seconds.

        Afterwards `problems` holds a sentence for each run that could not be copied. Raises StoreError when the store
        cannot be reached.
        """
        with contextlib.ExitStack() as locks:
            if not locks.enter_context(_only_writer(self.uri, wait)):
                return None
            if self.only is None and not locks.enter_context(locked(self.sweep_dir / LOCK_NAME, wait)):
                return None
            try:
                return self._copy(wait)
            except StoreError as error:
                if not isinstance(error, RefusedError):
                    self._store = None  # the next pass opens it again, and notices within seconds when nobody is there
                raise

    def _copy(self, wait: float) -> Copied:
        from grpo_sweeps.tracking import mlflow_copy as copying

        total = copying.Copied()
        runs, self.problems = copying.read_statuses(self.sweep_dir, self.only)
        # A run that waits for its first turn has nothing to show; one that was requeued goes on under its id.
        begun = [(f, s) for f, s in runs if s.state != "queued" or _has_metrics(f)]
        looks = {folder: _look(folder, status.stale()) for folder, status in begun}
        todo = [(folder, status) for folder, status in begun if self._seen.get(folder) != looks[folder]]
        if not todo:
            return total
        if self._store is None:
            self._store = Store(self.uri, self.experiment, restore=self.whole)
        make_place(self.sweep_dir.parent)
        parent_lock = self.sweep_dir / (LOCK_NAME + ".parent")  # jobs that mirror one run each share the parent
        statuses = [status for _, status in runs]
        whole = self.whole and self.only is None
        with locked(parent_lock, 30.0):
            parent_id = copying.copy_parent(self._store, self.sweep_dir, statuses, not self._seen, whole)
        for folder, status in todo:
            verify = folder not in self._seen
            self._seen.pop(folder, None)
            try:
                with locked(folder / LOCK_NAME, wait) as mine:
                    if mine:
                        total.add(copying.copy_run(self._store, folder, status, parent_id, verify, self.whole))
                        self._seen[folder] = looks[folder]
            except (RefusedError, OSError, ValueError) as error:
                self.problems.append(f"{folder}: {redact(' '.join(str(error).split()))}")
            except (KeyError, TypeError, AttributeError) as error:  # a damaged file must not stop the other runs
                self.problems.append(f"{folder}: its files are damaged ({redact(repr(error))}).")
        if self.only is not None and statuses[0].state != "running":  # else the parent runs, whatever the others do
            statuses = [status for _, status in copying.read_statuses(self.sweep_dir)[0]]
        with locked(parent_lock, 30.0):
            copying.finish_parent(self._store, self.sweep_dir, statuses)
        return total


def prepare_store(uri: str, experiment: str, wait: float = 60.0) -> None:
    """Make the store and its experiment where they are missing; imports MLflow. Raises StoreError.

    A dozen processes that meet on a new database fail in its migrations: one makes it, under the lock that copying
    takes as well, and the others find it made.
    """
    path = sqlite_path(uri)
    if path is not None:
        import_mlflow(uri)  # before the lock, or the last process waits for the imports of all others
    with _only_writer(uri, wait) as mine:
        if not mine:
            raise StoreError(f"{redact(uri)}: another process has been writing to it for {wait:.0f} s.")
        Store(uri, experiment)


@contextlib.contextmanager
def _only_writer(uri: str, wait: float) -> Iterator[bool]:
    """Hold an SQLite store: one process at a time writes to it, and makes it. Yields False when another one holds it
    for longer than `wait` seconds; a server or another database takes many."""
    path = sqlite_path(uri)
    if path is None:
        yield True
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(path.name + ".lock"), wait) as mine:
        yield mine


def _has_metrics(folder: Path) -> bool:
    try:
        return (folder / "metrics.jsonl").stat().st_size > 0
    except FileNotFoundError:
        return False


def _look(folder: Path, stale: bool) -> tuple[Any, ...]:
    """A value that changes when there is something to copy."""
    sizes: list[tuple[int, int] | None] = []
    for name in ("status.json", "metrics.jsonl", "config.yaml", "log.txt"):
        try:
            stat = (folder / name).stat()
        except FileNotFoundError:
            sizes.append(None)
        else:
            sizes.append((stat.st_size, stat.st_mtime_ns))
    return (stale, *sizes)
