"""The rows of a run's groups, segment by segment; what was measured of a segment is kept in <run>/.cache/.

One file per segment, <segment>.rows.parquet (see `kept`), with a key: the segment's name, size and time of change, the
run's seed and dtype, and a digest of everything that makes the rows. Journals, which a run may still write, are never
cached.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa

from grpo_sweeps.maths import ustatistics
from grpo_sweeps.paper import EPSILONS
from grpo_sweeps.report.measure import pairs, permutation, rows, spectral
from grpo_sweeps.report.measure.rows import COLUMNS, KEYS, table_rows
from grpo_sweeps.report.read.kept import CacheUse, Kept, code_of
from grpo_sweeps.spectra import equal, floor, ranks
from grpo_sweeps.tracking.journal import Journal
from grpo_sweeps.types import GroupRecord

SUFFIX = ".rows.parquet"
MADE_BY = (ranks, equal, floor, ustatistics, spectral, pairs, permutation, rows)
ATTEMPTS = 20


@dataclass(frozen=True)
class Cached:
    """Rows of `measure.rows`, and whether any of their groups has Grams by layer or parameter."""

    frame: pd.DataFrame
    by_part: bool


@functools.cache
def code_digest() -> str:
    """The digest of what makes the rows."""
    return code_of(MADE_BY, EPSILONS)


class RowCache:
    """The cached rows of one run with this seed and dtype."""

    def __init__(self, run_dir: Path, seed: int, dtype: str | None, use: CacheUse) -> None:
        self._kept, self._seed, self._dtype = Kept(run_dir, use), seed, dtype

    def read(self, segment: Path, stat: os.stat_result) -> Cached | None:
        """The rows of a segment that has this size and time of change; None where they have to be made."""
        found = self._kept.read(_name(segment), self._key(segment, stat), COLUMNS, changes=False)
        return Cached(found[0].to_pandas(), bool(found[1]["by_part"])) if found else None

    def lacks(self, segment: Path, stat: os.stat_result) -> bool:
        """Whether the rows of a segment have to be made, and would be kept."""
        return not self._kept.off and not self._kept.has(_name(segment), self._key(segment, stat))

    def write(self, segment: Path, stat: os.stat_result, made: Cached) -> None:
        """Keep the rows, and drop those of segments that are gone."""
        table = pa.Table.from_pandas(made.frame, preserve_index=False)
        if self._kept.write(_name(segment), self._key(segment, stat), table, by_part=made.by_part):
            for path in self._kept.folder.glob(f"*{SUFFIX}"):
                if not (segment.parent / path.name.replace(SUFFIX, ".parquet")).exists():
                    path.unlink(missing_ok=True)

    def _key(self, segment: Path, stat: os.stat_result) -> dict[str, object]:
        return {
            "segment": segment.name, "size": stat.st_size, "changed_ns": stat.st_mtime_ns, "seed": self._seed,
            "dtype": self._dtype, "code": code_digest(),
        }  # fmt: skip


def _name(segment: Path) -> str:
    return f"{segment.stem}{SUFFIX}"


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

    def bytes_to_measure(self) -> int:
        """Bytes of the segments whose rows have to be made; 0 where the run cannot be looked at."""
        try:
            sizes = [(path, path.stat()) for path in self._segments()]
            return sum(stat.st_size for path, stat in sizes if self._cache.lacks(path, stat))
        except (OSError, ValueError):
            return 0  # who reads it says why

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
