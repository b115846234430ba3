"""The rows of a run's groups, segment by segment: what was measured of a segment once is taken from the cache."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa

from grpo_sweeps.report.measure.rows import COLUMNS, KEYS, table_rows
from grpo_sweeps.report.read.cache import Cached, RowCache
from grpo_sweeps.tracking.journal import Journal
from grpo_sweeps.types import GroupRecord

ATTEMPTS = 20


class GroupRows(Journal):
    """The journal of a run's groups, read as rows of numbers (`report.rows`) instead of records."""

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
