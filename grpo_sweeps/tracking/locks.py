"""Locks between processes: one writer per run, with a substitute where the file system has no locks; a waiting lock.

They are POSIX record locks (`fcntl.lockf`), which belong to a process: a helper that a reward forks does not get them,
and when the run is killed they are free although the helper lives on. A lock by `flock`, or of an open file (OFD), is
the helper's as well. NFS knows both kinds as record locks and frees them when the client's process has gone. Two things
follow from the kind: within a process it is no bar, so `_HELD` is one; and closing any descriptor of the file frees it,
so a file that this process holds is not opened again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from grpo_sweeps.files import write_text
from grpo_sweeps.tracking.status import RecordError, read_status

LOCK_FILE, OWNER_FILE = ".lock", ".owner"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
SETTLE_S = 2.0  # seconds in which two processes that start at the same time see each other's names

Mine = Callable[[], bool]
_HELD: dict[tuple[int, int], int] = {}  # (device, inode) of a lock's file -> the process that holds it
_GUARD = threading.Lock()  # of _HELD


class NotOurs(Exception):
    """Another process has taken the run's folder: nothing is written into it any more."""


@contextlib.contextmanager
def only_writer(run_dir: Path, settle_s: float | None = None) -> Iterator[Mine | None]:
    """Hold the run while in the context. Yields None when another process holds it, else a function that says whether
    it is still ours.

    With locks the system frees the run when its holder dies, and ours stays ours. Without them the process writes its
    own name into .owner; of two that do so at the same time, the one whose name is there a moment later has the run,
    and each looks again before every write.
    """
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(_held(run_dir / LOCK_FILE))
        except _NoLocks:
            yield _by_name(run_dir, SETTLE_S if settle_s is None else settle_s)
            return
        yield (lambda: True) if held else None


def _by_name(run_dir: Path, settle_s: float) -> Mine | None:
    try:
        status = read_status(run_dir)
    except RecordError:
        status = None
    if status is not None and status.state == "running" and not status.stale():
        return None
    name, path = f"{uuid.uuid4().hex} {os.getpid()}\n", run_dir / OWNER_FILE

    def mine() -> bool:
        try:
            return path.read_text(encoding="utf-8") == name
        except FileNotFoundError:
            return False

    write_text(path, name)
    time.sleep(settle_s)
    return mine if mine() else None


@contextlib.contextmanager
def locked(path: Path, wait: float) -> Iterator[bool]:
    """Hold an exclusive lock on `path` (made when missing); yields False when another process kept it for `wait`
    seconds.

    The system frees the lock when its holder dies. On a file system without locks it yields True: there the user must
    see to it that one process copies at a time.
    """
    deadline = time.monotonic() + wait
    while True:
        with contextlib.ExitStack() as stack:
            try:
                held = stack.enter_context(_held(path))
            except _NoLocks:
                held = True
            if held or time.monotonic() >= deadline:
                yield held
                return
        time.sleep(0.1)


class _NoLocks(Exception):
    """The file system has no locks."""


@contextlib.contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Hold the lock of a file, made when missing, while in the context. Yields False where it is held already, by
    another process or by this one. Raises _NoLocks."""
    with _GUARD:
        descriptor = None if _is_held(path) else _take(path)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            with _GUARD:
                _HELD.pop(_key(os.fstat(descriptor)), None)
                os.close(descriptor)


def _take(path: Path) -> int | None:
    """A descriptor with the lock of a file that this process does not hold; None where another one does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return None
        if error.errno in NO_LOCKS:
            raise _NoLocks from error
        raise
    _HELD[_key(os.fstat(descriptor))] = os.getpid()
    return descriptor


def _is_held(path: Path) -> bool:
    """True when this process holds the lock of the file (and not the one that it was forked from)."""
    try:
        return _HELD.get(_key(path.stat())) == os.getpid()
    except FileNotFoundError:
        return False


def _key(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino
