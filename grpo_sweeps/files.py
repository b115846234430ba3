"""Replaces files so that each is the old or the new one, never half of each: write aside, fsync, rename."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

TEMPORARY_PREFIX = ".tmp-"
REPORT_MANIFEST = "manifest.json"  # of a folder with a report: what it reports on, and its files


def files_of_report(folder: Path, sweep: str | None = None) -> list[str]:
    """The files of the report in a folder, by name: those that its manifest lists and that are there; none where the
    folder holds no report, or not that of the sweep that is named."""
    try:
        manifest = json.loads((folder / REPORT_MANIFEST).read_bytes())
        if sweep is not None and manifest["sweep"] != sweep:
            return []
        return [name for name in manifest["files"] if Path(name).name == name and (folder / name).is_file()]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def fsync_directory(directory: Path) -> None:
    """Make a rename in `directory` survive a power cut; does nothing where the file system cannot sync a folder."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def write_with(path: Path, write: Callable[[BinaryIO], object], private: bool = False) -> None:
    """Call `write(file)` on a temporary file beside `path`, then put it in place of `path` in one step.

    private: its owner alone may read it (mode 600); others may as the umask allows.

    When `write` raises, `path` is untouched and the temporary file is removed.
    """
    path = Path(path)
    descriptor, name = tempfile.mkstemp(prefix=f"{TEMPORARY_PREFIX}{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if not private:
            os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_bytes(path: Path, data: bytes, private: bool = False) -> None:
    """Replace the content of `path` atomically; private: see `write_with`."""
    write_with(path, lambda file: file.write(data), private)


def write_text(path: Path, text: str, private: bool = False) -> None:
    """Replace the content of `path` atomically, as UTF-8; private: see `write_with`."""
    write_bytes(path, text.encode("utf-8"), private)


def _read_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


_UMASK = _read_umask()  # once, at import: reading it sets it, which no thread should do


def _umask() -> int:
    """The umask. mkstemp makes files of mode 600; colleagues should read the records as the umask allows."""
    return _UMASK
