"""Locks between processes: one writer per run, with a substitute where the file system has no locks; a waiting lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
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
    with open(run_dir / LOCK_FILE, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            yield _by_name(run_dir, SETTLE_S if settle_s is None else settle_s)
            return
        yield lambda: True


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
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + wait
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    yield False
                    return
                time.sleep(0.1)
                continue
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            break
        yield True
    finally:
        os.close(descriptor)
