"""The whole records of a sweep's groups, read from disk when the first of a run is asked for."""

from __future__ import annotations

import bisect
import operator
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import overload

import pandas as pd

from grpo_sweeps.report.measure.rows import KEYS
from grpo_sweeps.tracking.local import read_groups
from grpo_sweeps.tracking.status import RecordError
from grpo_sweeps.types import GroupRecord


class Records(Sequence[GroupRecord]):
    """Record i belongs to row i of `Sweep.groups`. A report needs few of them, and most sweeps are larger than memory
    once every Gram is an object.

    keep_parts: with the Grams by layer or parameter.
    """

    def __init__(self, keep_parts: bool = True) -> None:
        self._keep_parts = keep_parts
        self._folders: list[Path] = []
        self._keys: list[pd.DataFrame] = []
        self._starts: list[int] = []
        self._length = 0
        self._read: dict[int, list[GroupRecord]] = {}
        self._lock = threading.Lock()

    def add(self, run_dir: Path, keys: pd.DataFrame) -> None:
        """The records of one run follow: those that `keys` (the columns of `rows.KEYS`) names, in its order."""
        self._folders.append(run_dir)
        self._keys.append(keys)
        self._starts.append(self._length)
        self._length += len(keys)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> GroupRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[GroupRecord]: ...
    def __getitem__(self, index: int | slice) -> GroupRecord | list[GroupRecord]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        i = operator.index(index)
        i = i + self._length if i < 0 else i
        if not 0 <= i < self._length:
            raise IndexError(f"group {index}: there are {self._length} groups")
        run = bisect.bisect_right(self._starts, i) - 1
        with self._lock:
            if run not in self._read:
                self._read[run] = self._of_run(run)
        return self._read[run][i - self._starts[run]]

    def _of_run(self, run: int) -> list[GroupRecord]:
        """The run may have gone on since its rows were read: records are found by what names them."""
        found = {(r.step, r.prompt_id, r.group): r for r in read_groups(self._folders[run])}
        try:
            records = [found[key] for key in self._keys[run][KEYS].itertuples(index=False, name=None)]
        except KeyError as error:
            raise RecordError(
                f"{self._folders[run]}: its record of group {error} is gone; load the sweep again."
            ) from error
        return records if self._keep_parts else [replace(record, gram_by={}) for record in records]
