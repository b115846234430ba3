"""Tables computed from a run's files and kept in <run>/.cache/, with a key that says of which files and by which code.

A table whose key is another one is made again; a damaged one too. Nothing depends on these files: they may be deleted
at any time, and a folder that cannot be written to only means that the next report takes as long as this one. Beside
published records nothing is kept.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import platform
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_sweeps.files import write_with
from grpo_sweeps.tracking.published import is_published

FOLDER = ".cache"
LARGE = 2**16  # bytes: what is made of smaller files is made as fast as it is read
KEY = b"grpo_sweeps"
Key = Mapping[str, Any]


@dataclass
class CacheUse:
    """What became of the cache in one reading of a sweep; its runs are read by several threads."""

    read: int = 0
    made: int = 0
    other: int = 0  # files made by other code, or of a segment that has changed
    damaged: list[str] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def note(self) -> str | None:
        """One line about what could not be used or kept; None when all went well."""
        parts = []
        if self.damaged:
            parts.append(f"{len(self.damaged)} damaged and made again ({self.damaged[0]})")
        if self.other:
            parts.append(f"{self.other} made by other code or of another segment, made again")
        if self.unwritten:
            parts.append(f"{len(self.unwritten)} not written, so the next report measures again ({self.unwritten[0]})")
        return f"Cached spectra: {'; '.join(parts)}." if parts else None


@functools.cache
def code_of(modules: tuple[ModuleType, ...], *more: Hashable) -> str:
    """A digest of the modules' sources, of numpy's version and of what else makes a table."""
    digest = hashlib.sha256(f"numpy {np.__version__} {platform.machine()} {more}".encode())
    for module in modules:
        digest.update(inspect.getsource(module).encode())
    return digest.hexdigest()


def signature(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Name, size and time of change of each file, sorted by path; those that are not there are left out."""
    found = []
    for path in sorted(paths):
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue
        found.append((f"{path.parent.name}/{path.name}", stat.st_size, stat.st_mtime_ns))
    return found


def worth_keeping(files: list[tuple[str, int, int]], now: list[tuple[str, int, int]]) -> bool:
    """Whether what was made of files should be kept: they are large, and after it was made still as they were before.

    files, now: their `signature` before and after.
    """
    return files == now and sum(size for _, size, _ in files) >= LARGE


class Kept:
    """The kept tables of one run. Damage and failed writes are counted in `use`, never raised."""

    def __init__(self, run_dir: Path, use: CacheUse | None = None) -> None:
        self.folder, self.use = run_dir / FOLDER, use or CacheUse()
        self.off = is_published(run_dir)

    def read(
        self, name: str, key: Key, columns: Sequence[str] | None = None, changes: bool = True
    ) -> tuple[pa.Table, dict[str, Any]] | None:
        """The table of this name and key, and what was written with it; None where it has to be made.

        columns: those that it must have. changes: its files are written to while a run lives, so that another key is
        nothing to speak of.
        """
        if self.off:
            return None
        path = self.folder / name
        try:
            with open(path, "rb") as file:
                table = pq.read_table(file, page_checksum_verification=True)
            kept = json.loads(table.schema.metadata[KEY])
            matches = kept.pop("key") == _plain(key)
            if matches and columns is not None and table.column_names != list(columns):
                raise ValueError("other columns")
        except FileNotFoundError:
            return None
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
            with self.use.lock:
                self.use.damaged.append(f"{path}: {' '.join(str(error).split())[:120]}")
            return None
        with self.use.lock:
            self.use.read += matches
            self.use.other += not matches and not changes
        # the schema's own metadata would only be carried along
        return (table.replace_schema_metadata(None), kept) if matches else None

    def has(self, name: str, key: Key) -> bool:
        """Whether there is a table of this name and key, by its head alone: `read` may still find it damaged."""
        try:
            metadata = pq.read_schema(self.folder / name).metadata
            return bool(json.loads(metadata[KEY])["key"] == _plain(key))
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
            return False

    def write(self, name: str, key: Key, table: pa.Table, **more: Any) -> bool:
        """Keep a table and what JSON holds beside it; True where that could be done."""
        if self.off:
            return False
        table = table.replace_schema_metadata({KEY: json.dumps({"key": _plain(key), **more})})
        text = [column.name for column in table.schema if pa.types.is_string(column.type)]

        def write(file: BinaryIO) -> None:
            pq.write_table(table, file, compression="zstd", use_dictionary=text, write_page_checksum=True)

        try:
            self.folder.mkdir(exist_ok=True)
            write_with(self.folder / name, write)
        except OSError as error:
            with self.use.lock:
                self.use.unwritten.append(f"{self.folder}: {error.strerror or error}")
            return False
        with self.use.lock:
            self.use.made += 1
        return True


def _plain(key: Key) -> Any:
    """The key as JSON gives it back."""
    return json.loads(json.dumps(key))


def files_below(run_dir: Path) -> list[Path]:
    """Every file of a run but those of the cache."""
    found: list[Path] = []
    for place, folders, names in os.walk(run_dir):
        folders[:] = [name for name in folders if name != FOLDER]
        found += [Path(place) / name for name in names]
    return found
