"""Records <-> Arrow columns and JSON lines, derived from the dataclass itself.

A field added to a record in `types.py` is stored without a change here; a file written before it was added is read with
the field's default. Square arrays (Grams) are stored flat as float64 and come back bit for bit: in Parquet as they are,
in a JSON line as base64 of their little-endian bytes. NaN and infinities in a JSON line are strings (see
`lines`), since JSON has no such numbers.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, fields
from math import isqrt
from typing import Any

import numpy as np
import pyarrow as pa

from grpo_sweeps.tracking.lines import number_from_json, number_to_json

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
            raise TypeError(f"{record_type.__name__}: no stored form for {', '.join(unknown)}; add one to columns.py.")
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
        """A JSON object as a row that Arrow takes. Raises KeyError when a field without a default is missing."""
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

    def conform(self, table: pa.Table) -> pa.Table:
        """A stored table in today's schema: later fields filled with their default, unknown columns left out."""
        columns = []
        for f in self.fields:
            kind = self.schema.field(f.name).type
            if f.name in table.column_names:
                columns.append(table[f.name].cast(kind))
            else:
                default = _stored_default(f)
                value = list(default.items()) if isinstance(default, dict) else default
                columns.append(pa.chunked_array([pa.array([value] * table.num_rows, type=kind)]))
        return pa.Table.from_arrays(columns, schema=self.schema)

    def decode(self, table: pa.Table) -> dict[str, list[Any]]:
        """Column by column, the values as the record holds them (tuples, R x R arrays, dicts of them)."""
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
    """Lists are cut from their flat values by offset: Arrow's own to_pylist is ten times slower on Grams."""
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
