"""The rows of a run's groups, segment by segment; what was measured of a segment is kept in <run>/.cache/.

One file per segment, <segment>.rows.parquet, with a key in its metadata: the segment's name, size and time of change,
the run's seed and dtype, and a digest of everything that makes the rows: the source of the modules that compute them
and numpy's version. A file whose key is another one is made again; a damaged one too. Journals, which a run may still
write, are never cached. Nothing depends on these files: they may be deleted at any time, and a folder that cannot be
written to only means that the next report takes as long as this one.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import platform
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_sweeps.files import write_with
from grpo_sweeps.maths import ustatistics
from grpo_sweeps.paper import EPSILONS
from grpo_sweeps.report.measure import pairs, permutation, rows, spectral
from grpo_sweeps.report.measure.rows import COLUMNS, KEYS, table_rows
from grpo_sweeps.spectra import equal, floor, ranks
from grpo_sweeps.tracking.journal import Journal
from grpo_sweeps.types import GroupRecord

FOLDER = ".cache"
SUFFIX = ".rows.parquet"
KEY = b"grpo_sweeps"
MADE_BY = (ranks, equal, floor, ustatistics, spectral, pairs, permutation, rows)
ATTEMPTS = 20


@dataclass(frozen=True)
class Cached:
    """Rows of `measure.rows`, and whether any of their groups has Grams by layer or parameter."""

    frame: pd.DataFrame
    by_part: bool


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
def code_digest() -> str:
    """The digest of what makes the rows."""
    digest = hashlib.sha256(f"numpy {np.__version__} {platform.machine()} {EPSILONS}".encode())
    for module in MADE_BY:
        digest.update(inspect.getsource(module).encode())
    return digest.hexdigest()


class RowCache:
    """The cached rows of one run with this seed and dtype. Damage and failed writes are counted, never raised."""

    def __init__(self, run_dir: Path, seed: int, dtype: str | None, use: CacheUse) -> None:
        self.folder, self._seed, self._dtype, self._use = run_dir / FOLDER, seed, dtype, use

    def read(self, segment: Path, stat: os.stat_result) -> Cached | None:
        """The rows of a segment that has this size and time of change; None where they have to be made."""
        path = self._path(segment)
        try:
            with open(path, "rb") as file:
                table = pq.read_table(file, page_checksum_verification=True)
            kept = json.loads(table.schema.metadata[KEY])
            matches = kept["key"] == self._key(segment, stat)
            # the schema's own metadata would only be carried along
            found = Cached(table.replace_schema_metadata(None).to_pandas(), bool(kept["by_part"])) if matches else None
            if found is not None and list(found.frame.columns) != list(COLUMNS):
                raise ValueError("other columns")
        except FileNotFoundError:
            return None
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
            with self._use.lock:
                self._use.damaged.append(f"{path}: {' '.join(str(error).split())[:120]}")
            return None
        with self._use.lock:
            self._use.read += found is not None
            self._use.other += found is None
        return found

    def write(self, segment: Path, stat: os.stat_result, made: Cached) -> None:
        """Keep the rows, and drop those of segments that are gone."""
        content = json.dumps({"key": self._key(segment, stat), "by_part": made.by_part})
        table = pa.Table.from_pandas(made.frame, preserve_index=False).replace_schema_metadata({KEY: content})

        def write(file: BinaryIO) -> None:
            pq.write_table(table, file, compression="zstd", use_dictionary=["prompt_id", "rows"],
                           write_page_checksum=True)  # fmt: skip

        try:
            self.folder.mkdir(exist_ok=True)
            write_with(self._path(segment), write)
            for path in self.folder.glob(f"*{SUFFIX}"):
                if not (segment.parent / path.name.replace(SUFFIX, ".parquet")).exists():
                    path.unlink(missing_ok=True)
        except OSError as error:
            with self._use.lock:
                self._use.unwritten.append(f"{self.folder}: {error.strerror or error}")
            return
        with self._use.lock:
            self._use.made += 1

    def _path(self, segment: Path) -> Path:
        return self.folder / f"{segment.stem}{SUFFIX}"

    def _key(self, segment: Path, stat: os.stat_result) -> dict[str, object]:
        return {
            "segment": segment.name, "size": stat.st_size, "changed_ns": stat.st_mtime_ns, "seed": self._seed,
            "dtype": self._dtype, "code": code_digest(),
        }  # fmt: skip


class GroupRows(Journal):
    """The journal of a run's groups, read as rows of numbers (`measure.rows`) instead of records."""

    def __init__(self, run_dir: Path, seed: int, dtype: str | None, cache: RowCache) -> None:
        super().__init__(run_dir / "grams", GroupRecord, KEYS, order=("step", "group"))
        self._seed, self._dtype, self._cache = seed, dtype, cache

    def rows(self) -> Cached:
        """Every group once, sorted, as `Journal.table` gives the records; may be called while a run writes.

        Raises RecordError, one sentence, for a file that is damaged.
        """
        journal = self._measured(self._journal_table())  # first, as in Journal.table
        for attempt in range(ATTEMPTS):
            try:
                found = [self._segment_rows(path) for path in self._segments()]
            except FileNotFoundError:  # a merge took it away while we looked: what it wrote is there by now
                if attempt == ATTEMPTS - 1:
                    raise
                continue
            break
        frames = [part.frame for part in (*found, journal) if len(part.frame)]
        frame = pd.concat(frames, ignore_index=True) if frames else journal.frame
        frame = frame[~frame.duplicated(KEYS, keep="last")].sort_values(self.order, kind="stable", ignore_index=True)
        return Cached(frame, any(part.by_part for part in (*found, journal)))

    def _segment_rows(self, path: Path) -> Cached:
        before = path.stat()
        cached = self._cache.read(path, before)
        if cached is not None:
            return cached
        made = self._measured(self._read_segment(path))
        after = path.stat()
        if (before.st_ino, before.st_size, before.st_mtime_ns) == (after.st_ino, after.st_size, after.st_mtime_ns):
            self._cache.write(path, after, made)
        return made

    def _measured(self, table: pa.Table) -> Cached:
        by_part = any(len(chunk) and chunk.offsets[-1] != chunk.offsets[0] for chunk in table["gram_by"].chunks)
        frame = table_rows(table, self._seed, self._dtype) if table.num_rows else pd.DataFrame(columns=list(COLUMNS))
        return Cached(frame, by_part)
