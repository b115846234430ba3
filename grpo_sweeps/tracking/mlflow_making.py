"""Makes an SQLite store of MLflow so that it is there whole or not at all: aside, then renamed into place.

MLflow's migrations take seconds and are not atomic: one that is killed, or that meets a full disk, leaves a file that
no later start can use. A file left so by an earlier version is recognised by what it holds (nothing) and put aside.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from pathlib import Path

from grpo_sweeps.files import TEMPORARY_PREFIX, fsync_directory
from grpo_sweeps.text import show

SETTLED_S = 2.0  # seconds without a change after which nobody is making a store
JOURNALS = ("-journal", "-wal", "-shm")
MIGRATED = frozenset(["alembic_version", "workspaces"])  # tables that MLflow's migrations fill by themselves
OURS = frozenset(["experiments", "runs"])  # those that tell a store of MLflow from another database


def make(path: Path) -> None:
    """Make the store at `path` where there is none, with MLflow, which is imported; put a half-made one aside first.

    Raises what SQLite, MLflow and the file system raise. `path` is then as before.
    """
    if path.exists() and path.stat().st_size:
        if not half_made(path):
            return
        put_aside(path)
    aside = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{os.getpid()}")
    _remove(aside)  # of a process that had this number before
    try:
        _migrate(aside)
        _into_place(aside, path)
    finally:
        _remove(aside)
    fsync_directory(path.parent)


def half_made(path: Path) -> bool:
    """True for a store of MLflow whose making was cut short: no experiment, no run, no other row, and nobody is at it.

    A store in use always has its default experiment.
    """
    while holds_nothing(path):
        still = time.time() - path.stat().st_mtime
        if not 0 <= still < SETTLED_S:
            return True
        time.sleep(min(0.2, SETTLED_S - still))  # another program may be in the middle of making it
    return False


def holds_nothing(path: Path) -> bool:
    """True for an SQLite file with tables of MLflow's (of its first migrations at least) and no row of anybody's."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=1.0)) as store:
            tables = {name for (name,) in store.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            tables = {name for name in tables if not name.startswith("sqlite_")}
            if "alembic_version" not in tables and not tables >= OURS:
                return False
            return not any(
                store.execute(f'SELECT 1 FROM "{name}" LIMIT 1').fetchone() is not None for name in tables - MIGRATED
            )
    except sqlite3.Error:
        return False  # locked, unreadable or no database: MLflow says which


def put_aside(path: Path) -> None:
    """Rename a half-made store, with its journals, to the first free name FILE.half-made-N; says so in one line."""
    number = 1
    while (aside := path.with_name(f"{path.name}.half-made-{number}")).exists():
        number += 1
    for ending in JOURNALS:  # first: a journal beside a new file of the same name would be played back into it
        if (journal := path.with_name(path.name + ending)).exists():
            journal.replace(path.with_name(aside.name + ending))
    path.replace(aside)
    show(f"{path} was left half made and holds no run: it is now {aside.name}, and a new store is made.")


def _migrate(path: Path) -> None:
    from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    # The place of the default experiment's artifacts, as MLflow would have it; the project's own are placed elsewhere.
    SqlAlchemyStore(f"sqlite:///{path.absolute()}", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH).engine.dispose()


def _into_place(aside: Path, path: Path) -> None:
    """Rename; of two processes that make the same store, on a file system without locks, the first one's stays."""
    if path.exists() and not path.stat().st_size:
        path.unlink()
    try:
        os.link(aside, path)
    except FileExistsError:
        return
    except OSError:  # a file system without links
        os.replace(aside, path)


def _remove(path: Path) -> None:
    for ending in ("", *JOURNALS):
        path.with_name(path.name + ending).unlink(missing_ok=True)
