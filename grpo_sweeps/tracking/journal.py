"""Append-only JSON lines, and a journal of them that is compacted into Parquet segments.

A kill at any moment leaves: a torn last line (left out by the reader, cut off by the next writer), or rows both in a
segment and in the journal (a crash between the two halves of `compact`), which the reader drops by key. Lines are
flushed to the operating system, so they survive the death of the process; segments are fsynced, so they survive a
power cut.

The stored form of a record is derived from its dataclass (`Columns`). A field added to a record in `types.py` is stored
without a change here; a file written before it was added is read with the field's default. Square arrays (Grams) are
stored flat as float64 and come back bit for bit: in Parquet as they are, in a JSON line as base64 of their
little-endian bytes. NaN and infinities in a JSON line are strings (see `lines`), since JSON has no such numbers.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, fields
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo_sweeps.files import write_bytes, write_with
from grpo_sweeps.tracking.lines import number_from_json, number_to_json, parsed, with_checksum
from grpo_sweeps.tracking.seal import SEGMENT
from grpo_sweeps.tracking.status import RecordError

JOURNAL = "journal.jsonl"
MERGE_AT = 16  # segments: one file costs a reader about a millisecond, and a sweep has hundreds of run folders
OF_RUN = "run"  # a line's key, and a key of a segment's metadata: the identity of the run whose record it is
BATCH = 256  # rows of a segment that `scan` holds at a time

_FLOATS = pa.list_(pa.float64())
_ARROW: dict[str, pa.DataType] = {
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "str": pa.string(),
    "RowKind": pa.string(),
    "tuple[float, ...]": _FLOATS,
    "tuple[int, ...]": pa.list_(pa.int64()),
    "tuple[bool, ...]": pa.list_(pa.bool_()),
    "tuple[str, ...]": pa.list_(pa.string()),
    "np.ndarray | None": _FLOATS,
    "dict[str, np.ndarray]": pa.map_(pa.string(), _FLOATS),
}
_CAST: dict[str, Callable[[Any], Any]] = {
    "int": int, "float": float, "bool": bool, "str": str, "RowKind": str,
    "tuple[float, ...]": lambda v: tuple(map(float, v)),
    "tuple[int, ...]": lambda v: tuple(map(int, v)),
    "tuple[bool, ...]": lambda v: tuple(map(bool, v)),
    "tuple[str, ...]": lambda v: tuple(map(str, v)),
}  # fmt: skip


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file of JSON lines, in order; none when there is no file.

    A last line without its newline that does not parse is a write cut short and is silently left out. A damaged line
    elsewhere is left out with a warning that names it.
    """
    return [content for _, content in _told(path)]


def _told(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """`parsed_lines`, with a warning for each damaged line."""
    found, faults = parsed_lines(path)
    for fault in faults:
        warnings.warn(fault, stacklevel=3)
    return found


def parsed_lines(path: Path) -> tuple[list[tuple[bytes, dict[str, Any]]], list[str]]:
    """Each line that can be read, as bytes and parsed; and a sentence for each damaged one."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], []
    out, faults = [], []
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            content = parsed(line)
            if not isinstance(content, dict):
                raise ValueError("not a JSON object")
            out.append((line, content))
        except ValueError as error:
            if number < len(lines):
                faults.append(f"{path}, line {number} is damaged and is left out: {error}.")
    return out, faults


class LineFile:
    """Appends JSON objects to a file, flushed at each call. Opening it cuts a torn last line off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = self._open()

    def _open(self) -> BinaryIO:
        _mend_tail(self.path)
        return open(self.path, "ab")  # held open for the life of the run

    def append(self, objects: Iterable[dict[str, Any]]) -> None:
        """Append one line per object, in one write."""
        lines = [json.dumps(o, allow_nan=False, separators=(",", ":")).encode("utf-8") for o in objects]
        if lines:
            self._file.write(b"".join(with_checksum(line) + b"\n" for line in lines))
            self._file.flush()

    def clear(self) -> None:
        """Forget every line."""
        self._file.truncate(0)

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrite the file, atomically, with the wanted lines only; these stay byte for byte."""
        lines = [line for line, content in _told(self.path) if wanted(content)]
        self._file.close()
        write_bytes(self.path, b"".join(line + b"\n" for line in lines))
        self._file = self._open()

    def sync(self) -> None:
        """Sync what was appended to the disk itself."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _mend_tail(path: Path) -> None:
    """End the file in a whole line: give a complete last line its newline, cut an incomplete one off."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        data = file.read()
        if not data or data.endswith(b"\n"):
            return
        start = data.rfind(b"\n") + 1
        try:
            json.loads(data[start:])  # a JSON object is never the beginning of another: what parses is whole
            file.write(b"\n")
        except ValueError:
            file.truncate(start)


def _square(array: Any, name: str) -> np.ndarray:
    """Any square array (a torch tensor on the CPU too) as a float64 matrix."""
    matrix = np.ascontiguousarray(array, dtype="<f8")
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"{name}: a square matrix is stored here, not one of shape {matrix.shape}.")
    return matrix


def _flat_to_square(flat: np.ndarray) -> np.ndarray:
    side = isqrt(flat.size)
    return flat.reshape(side, side).copy()  # a copy: a slice would keep the whole segment in memory


def _to_base64(array: Any, name: str) -> str:
    return base64.b64encode(_square(array, name).tobytes()).decode("ascii")


def _from_base64(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype="<f8").astype(np.float64)


class Columns:
    """The stored form of one record type: `Columns(GroupRecord).to_json(record)` and back."""

    def __init__(self, record_type: type) -> None:
        self.record_type = record_type
        self.fields: tuple[Field[Any], ...] = fields(record_type)
        unknown = [f"{f.name}: {f.type}" for f in self.fields if str(f.type) not in _ARROW]
        if unknown:
            raise TypeError(f"{record_type.__name__}: no stored form for {', '.join(unknown)}; add one to journal.py.")
        self.schema = pa.schema([pa.field(f.name, _ARROW[str(f.type)]) for f in self.fields])

    def to_json(self, record: Any) -> dict[str, Any]:
        """One record as a JSON object. Raises ValueError for an array that is not square."""
        out: dict[str, Any] = {}
        for f in self.fields:
            value, kind = getattr(record, f.name), str(f.type)
            if kind == "np.ndarray | None":
                out[f.name] = None if value is None else _to_base64(value, f.name)
            elif kind == "dict[str, np.ndarray]":
                out[f.name] = {str(k): _to_base64(v, f"{f.name}[{k}]") for k, v in value.items()}
            else:
                value = _CAST[kind](value)
                if kind == "float":
                    value = number_to_json(value)
                elif kind == "tuple[float, ...]":
                    value = [number_to_json(x) for x in value]
                out[f.name] = value
        return out

    def json_to_row(self, line: dict[str, Any]) -> dict[str, Any]:
        """A JSON object as a row for Arrow. Raises KeyError when a field without a default is missing."""
        row: dict[str, Any] = {}
        for f in self.fields:
            kind = str(f.type)
            value = line[f.name] if f.name in line else _stored_default(f)
            if kind == "np.ndarray | None" and isinstance(value, str):
                value = _from_base64(value)
            elif kind == "dict[str, np.ndarray]":
                value = [(k, _from_base64(v)) for k, v in value.items()]
            elif kind == "float":
                value = number_from_json(value)
            elif kind == "tuple[float, ...]":
                value = [number_from_json(x) for x in value]
            row[f.name] = value
        return row

    def table(self, rows: Sequence[dict[str, Any]]) -> pa.Table:
        """Rows of `json_to_row` as an Arrow table of this schema."""
        return pa.Table.from_pylist(list(rows), schema=self.schema)

    def conform(self, table: pa.Table, names: Sequence[str] | None = None) -> pa.Table:
        """A stored table in today's schema: later fields filled with their default, unknown columns left out.

        names: the columns that are wanted; None: all.
        """
        columns, wanted = [], [f for f in self.fields if names is None or f.name in names]
        for f in wanted:
            kind = self.schema.field(f.name).type
            if f.name in table.column_names:
                columns.append(table[f.name].cast(kind))
            else:
                default = _stored_default(f)
                value = list(default.items()) if isinstance(default, dict) else default
                columns.append(pa.chunked_array([pa.array([value] * table.num_rows, type=kind)]))
        return pa.Table.from_arrays(columns, schema=pa.schema([self.schema.field(f.name) for f in wanted]))

    def decode(self, table: pa.Table) -> dict[str, list[Any]]:
        """The values of each column as the record holds them (tuples, R x R arrays, dicts of them)."""
        names = set(table.column_names)
        return {f.name: _decode(table[f.name].combine_chunks(), str(f.type)) for f in self.fields if f.name in names}

    def records(self, table: pa.Table) -> list[Any]:
        """The table's rows as records."""
        columns = self.decode(table)
        names = [f.name for f in self.fields]
        return [
            self.record_type(**dict(zip(names, values, strict=True)))
            for values in zip(*(columns[name] for name in names), strict=True)
        ]


def _stored_default(f: Field[Any]) -> Any:
    if f.default is not MISSING:
        return f.default
    if f.default_factory is not MISSING:
        return f.default_factory()
    raise KeyError(f.name)


def _decode(column: pa.Array, kind: str) -> list[Any]:
    """The values of one column. Lists are cut from flat values by offset: to_pylist is ten times slower on Grams."""
    if isinstance(column, pa.ChunkedArray):  # an empty table
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], type=column.type)
    if kind.startswith("tuple"):
        values = column.values.to_pylist()
        return [tuple(values[a:b]) for a, b in _spans(column.offsets)]
    if kind == "np.ndarray | None":
        flat = column.values.to_numpy(zero_copy_only=False)
        valid = column.is_valid().to_pylist()
        return [
            _flat_to_square(flat[a:b]) if ok else None for (a, b), ok in zip(_spans(column.offsets), valid, strict=True)
        ]
    if kind == "dict[str, np.ndarray]":
        names = column.keys.to_pylist()
        matrices = _decode(column.items, "np.ndarray | None")
        return [dict(zip(names[a:b], matrices[a:b], strict=True)) for a, b in _spans(column.offsets)]
    return column.to_pylist()


def _spans(offsets: pa.Array) -> Iterable[tuple[int, int]]:
    numbers = offsets.to_pylist()
    return itertools.pairwise(numbers)


class Journal:
    """Records of one type in one folder: `journal.jsonl` now, `segment-<n>_steps-<first>-<last>.parquet` later.

    key: the fields that name a record; of two with the same key the one written last is read.
    order: the fields by which readers get the records sorted.
    """

    def __init__(self, folder: Path, record_type: type, key: Sequence[str], order: Sequence[str]) -> None:
        self.folder = folder
        self.columns = Columns(record_type)
        self.key, self.order = list(key), list(order)
        self.run = ""  # the identity that records are written with, where there is one
        self._lines: LineFile | None = None

    def _open(self) -> LineFile:
        if self._lines is None:
            self._lines = LineFile(self.folder / JOURNAL)
        return self._lines

    def append(self, records: Sequence[Any]) -> None:
        """Write records to the journal, flushed."""
        if records:
            whose = {OF_RUN: self.run} if self.run else {}
            self._open().append([{**self.columns.to_json(record), **whose} for record in records])

    def compact(self, merge: bool = False) -> None:
        """Move the journal into a segment; merge all segments into one when asked or when there are many.

        The segment is in place before the journal is emptied, and a merged one before its parts go: in between a record
        is there twice and read once.
        """
        journal = self._journal_table()
        if journal.num_rows:
            self._write_segment(self._unique(journal))
            self._open().clear()
        parts = self._segments()
        if len(parts) >= (2 if merge else MERGE_AT):
            merged = self._unique(self._concat([self._read_segment(p) for p in parts]))
            self._write_segment(merged)
            for part in parts:
                part.unlink()

    def truncate_after(self, step: int) -> None:
        """Drop the records of later steps. Interrupted half-way, it can be repeated."""
        for path in self._segments():
            number, first, last = _numbers(path)
            if last <= step:
                continue
            if first <= step:
                table = self._read_segment(path)
                self._write_segment(table.filter(pc.less_equal(table["step"], step)), number)
            path.unlink()
        if (self.folder / JOURNAL).exists():
            self._open().keep(lambda line: line["step"] <= step)

    def holding(self, step: int) -> list[Path]:
        """The files that hold records of this step or a later one."""
        found = [path for path in self._segments() if _numbers(path)[2] >= step]
        path = self.folder / JOURNAL
        return found + ([path] if any(line.get("step", 0) >= step for line in read_lines(path)) else [])

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def table(self) -> pa.Table:
        """Every record once, sorted. May be called while another process writes, compacts or merges.

        Raises RecordError, one sentence, for a file that is damaged.
        """
        for attempt in range(20):
            journal = self._journal_table()  # first, since what a compaction takes out of it is then found in a segment
            try:
                parts = [self._read_segment(path) for path in self._segments()]
            except FileNotFoundError:  # a merge removed it meanwhile: what the merge wrote is there by now
                if attempt == 19:
                    raise
                continue
            return self._sorted(self._unique(self._concat([*parts, journal])))
        raise AssertionError("unreachable")

    def read(self) -> list[Any]:
        """Every record once, sorted."""
        return self.columns.records(self.table())

    def read_undamaged(self) -> tuple[list[Any], list[str]]:
        """As `read` without the damaged files, and a sentence for each of these. Nobody may write meanwhile."""
        tables, faults = [], []
        readers: list[Callable[[], pa.Table]] = [partial(self._read_segment, path) for path in self._segments()]
        for reader in [*readers, self._journal_table]:
            try:
                tables.append(reader())
            except RecordError as error:
                faults.append(str(error))
        return self.columns.records(self._sorted(self._unique(self._concat(tables)))), faults

    def segments(self) -> list[Path]:
        """The segments that are there, oldest first."""
        return self._segments()

    def scan(self, path: Path, names: Sequence[str], whole: bool = True) -> Iterator[pa.Table]:
        """The named columns of a segment, some rows at a time; whole: every page of it is read and checked.

        Raises RecordError, one sentence, where it is damaged, FileNotFoundError where a merge took it away.
        """
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                stored = [name for name in file.schema_arrow.names if whole or name in names]
                for batch in file.iter_batches(BATCH, columns=stored):
                    yield self.columns.conform(pa.Table.from_batches([batch]), names)
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise _damaged(path, error) from error

    def of_runs(self) -> dict[Path, set[str]]:
        """The files that say whose records they hold, and whose that is. Damaged ones say nothing."""
        found = {}
        for path in self._segments():
            with contextlib.suppress(pa.ArrowException, OSError, ValueError):
                whose = (pq.read_schema(path).metadata or {}).get(OF_RUN.encode())
                found[path] = {whose.decode("utf-8", "replace")} if whose else set()
        lines = read_lines(self.folder / JOURNAL)
        return found | {self.folder / JOURNAL: {str(line[OF_RUN]) for line in lines if line.get(OF_RUN)}}

    def in_journal(self) -> pa.Table:
        """The records that are in no segment yet. Raises RecordError."""
        return self._journal_table()

    def lacks(self, name: str) -> bool:
        """True when any record has an empty list in the field `name` or is older than the field. Reads no other
        column of the segments and passes over damaged files."""
        for path in self._segments():
            try:
                if name not in pq.read_schema(path).names:
                    return True
                lengths = pc.list_value_length(pq.read_table(path, columns=[name])[name])
            except (pa.ArrowException, OSError):
                continue
            if pc.any(pc.equal(lengths, 0)).as_py():
                return True
        return any(not line.get(name) for line in read_lines(self.folder / JOURNAL))

    def _journal_table(self) -> pa.Table:
        path = self.folder / JOURNAL
        lines = read_lines(path)
        try:
            return self.columns.table([self.columns.json_to_row(line) for line in lines])
        except (pa.ArrowException, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(path, error) from error

    def _segments(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted((p for p in self.folder.iterdir() if SEGMENT.fullmatch(p.name)), key=_numbers)

    def _read_segment(self, path: Path) -> pa.Table:
        try:
            with open(path, "rb") as file:
                return self.columns.conform(pq.read_table(file, page_checksum_verification=True))
        except FileNotFoundError:
            raise  # merged away meanwhile
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise _damaged(path, error) from error

    def _write_segment(self, table: pa.Table, number: int | None = None) -> None:
        if number is None:
            number = max((_numbers(p)[0] for p in self._segments()), default=-1) + 1
        steps = table["step"].to_numpy()
        table = table.replace_schema_metadata({OF_RUN: self.run} if self.run else None)
        path = self.folder / f"segment-{number:05d}_steps-{steps.min():07d}-{steps.max():07d}.parquet"
        write_with(path, lambda file: pq.write_table(table, file, compression="zstd", write_page_checksum=True))

    def _concat(self, tables: Sequence[pa.Table]) -> pa.Table:
        return pa.concat_tables(tables) if tables else self.columns.schema.empty_table()

    def _unique(self, table: pa.Table) -> pa.Table:
        keys = table.select(self.key).to_pandas()
        again = keys.duplicated(keep="last").to_numpy()
        return table.filter(pa.array(~again)) if again.any() else table

    def _sorted(self, table: pa.Table) -> pa.Table:
        frame = table.select(self.order).to_pandas()
        rows = frame.sort_values(self.order, kind="stable").index.to_numpy()
        return table if np.array_equal(rows, np.arange(len(rows))) else table.take(pa.array(rows))


def _damaged(path: Path, error: Exception) -> RecordError:
    return RecordError(f"{path} is damaged: {' '.join(str(error).split())[:200]}")


def _numbers(path: Path) -> tuple[int, int, int]:
    match = SEGMENT.fullmatch(path.name)
    assert match is not None
    number, first, last = map(int, match.groups())
    return number, first, last
