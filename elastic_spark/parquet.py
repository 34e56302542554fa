"""Parquet and Arrow: the only module that knows pyarrow. Files to footers, columns to numpy arrays.

Used on the driver to describe files, and on workers to read row groups. Imports neither pandas nor Spark.

What becomes of a column (`column_of`):

========================================  ==================  ==============================================
Arrow type                                dtype               meaning
========================================  ==================  ==============================================
bool, (u)int8, int16 .. int64, float      the same
uint16, uint32, uint64                    int32, int64        the same value; what does not fit is an error
decimal                                   float64             rounded to the nearest
date                                      int32               days since 1970-01-01
timestamp                                 int64               microseconds since 1970-01-01 UTC, cut
string, dictionary of strings             int32               code: index into the column's vocabulary
list of any of the first two              that, with a width  all lists of the same length
========================================  ==================  ==============================================
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from elastic_spark.core.manifest import Column
from elastic_spark.errors import DataError

#: Rows, and bytes of rows, decoded at a time, so that one huge row group never lies in memory as a whole.
ROWS_AT_ONCE, BYTES_AT_ONCE = 1 << 18, 1 << 26

#: What reading can raise for reasons that may pass: a lost connection, a busy store.
READ_ERRORS = (OSError, pa.ArrowException)

_PLAIN = {
    pa.bool_(): "bool", pa.uint8(): "uint8", pa.int8(): "int8", pa.int16(): "int16", pa.int32(): "int32",
    pa.int64(): "int64", pa.float16(): "float16", pa.float32(): "float32", pa.float64(): "float64",
    pa.uint16(): "int32", pa.uint32(): "int64", pa.uint64(): "int64",
}  # fmt: skip


def local_path(path: str) -> str | None:
    """The path on this machine that a path or ``file:`` URI names, None for any other URI."""
    if path.startswith("file:"):
        return path.removeprefix("file:").removeprefix("//")
    return None if "://" in path else path


@contextlib.contextmanager
def open_parquet(path: str, metadata: pq.FileMetaData | None = None) -> Iterator[pq.ParquetFile]:
    """The Parquet file at a local path or fsspec URI; ``metadata`` saves reading the footer again."""
    local = local_path(path)
    with contextlib.ExitStack() as stack:
        source: Any = local
        if local is None:
            source = stack.enter_context(fsspec.open(path, "rb"))
        file = pq.ParquetFile(
            source, metadata=metadata, memory_map=local is not None, coerce_int96_timestamp_unit="us", pre_buffer=False
        )
        yield stack.enter_context(file)


def column_of(field: pa.Field) -> Column:
    """The column that a field of a schema becomes, of yet unknown width (lists, -1) and vocabulary (strings).

    Raises DataError naming the column and its type where there is no such column.
    """
    kind = field.type
    if kind in _PLAIN:
        return Column(field.name, _PLAIN[kind])
    if pa.types.is_fixed_size_list(kind) and kind.value_type in _PLAIN and kind.list_size:
        return Column(field.name, _PLAIN[kind.value_type], kind.list_size)
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and kind.value_type in _PLAIN:
        return Column(field.name, _PLAIN[kind.value_type], -1)
    if pa.types.is_decimal(kind):
        return Column(field.name, "float64", source="decimal")
    if pa.types.is_date(kind):
        return Column(field.name, "int32", source="date")
    if pa.types.is_timestamp(kind):
        return Column(field.name, "int64", source="timestamp")
    text = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_string(text) or pa.types.is_large_string(text):
        return Column(field.name, "int32", source="string")
    raise DataError(
        f"column {field.name!r} has type {kind}, which does not become a tensor; leave it out with "
        "es.freeze(..., columns=[...]), or convert it (a Spark ML vector in Parquet: freeze the DataFrame, or use "
        "pyspark.ml.functions.vector_to_array)"
    )


@dataclass(frozen=True)
class Footer:
    """What the footer of a Parquet file says. ``row_groups``: (rows, bytes before compression) of each. ``nulls``: by
    column, None where the file does not tell. ``content``: a hash of the footer, which holds the sizes, places and
    least and greatest values of all column chunks."""

    path: str
    row_groups: tuple[tuple[int, int], ...]
    fields: dict[str, pa.Field]
    nulls: dict[str, int | None]
    content: str


def read_footer(path: str) -> Footer:
    """Reads the footer of the file at a local path or fsspec URI. Raises DataError naming it where that fails."""
    try:
        with open_parquet(path) as file:
            metadata: pq.FileMetaData = file.metadata
            groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
            fields = {item.name: item for item in file.schema_arrow}
        with fsspec.open(path, "rb") as raw:
            raw.seek(-(metadata.serialized_size + 8), 2)
            content = hashlib.sha256(raw.read()).hexdigest()
    except READ_ERRORS as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
    leaves = {metadata.schema.column(i).path: i for i in range(metadata.num_columns)}
    return Footer(
        path=path,
        row_groups=tuple((group.num_rows, group.total_byte_size) for group in groups),
        fields=fields,
        nulls={name: _null_count(groups, leaves.get(name)) for name in fields},
        content=content,
    )


def _null_count(groups: Sequence[pq.RowGroupMetaData], leaf: int | None) -> int | None:
    """Nulls of a column by the statistics of its chunks, None where one has none, or for a nested column."""
    total = 0
    for group in groups if leaf is not None else ():
        statistics = group.column(leaf).statistics
        if statistics is None or not statistics.has_null_count:
            return None
        total += statistics.null_count
    return total if leaf is not None else None


@dataclass
class Facts:
    """What only the values of a column tell. ``lengths``: those of its lists; ``values``: its distinct strings."""

    nulls: int = 0
    nulls_inside: int = 0
    lengths: set[int] = field(default_factory=set)
    values: set[str] = field(default_factory=set)

    def add(self, other: Facts) -> None:
        """Takes in the facts of other rows of the same column."""
        self.nulls += other.nulls
        self.nulls_inside += other.nulls_inside
        self.lengths |= other.lengths
        self.values |= other.values


def scan(path: str, columns: Sequence[Column], most_values: int) -> dict[str, Facts]:
    """Reads columns of a file for their `Facts`; stops collecting strings where they are more than ``most_values``.

    Raises DataError naming the file where it cannot be read.
    """
    facts = {column.name: Facts() for column in columns}
    try:
        with open_parquet(path) as file:
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=list(facts), use_threads=False):
                for column in columns:
                    facts[column.name].add(_facts(batch.column(column.name), column))
                    if len(facts[column.name].values) > most_values:
                        return facts
    except READ_ERRORS as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return facts


def _facts(array: pa.Array, column: Column) -> Facts:
    facts = Facts(nulls=array.null_count)
    if column.width:
        lengths = pc.list_value_length(array)
        facts.lengths = {int(n) for n in pc.unique(lengths.drop_null()).to_pylist()}
        facts.nulls_inside = array.flatten().null_count
    if column.source == "string":
        facts.values = set(pc.unique(array.drop_null()).to_pylist())
    return facts


def read_records(path: str, index: int, columns: Sequence[Column], dtype: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
    """The rows of one row group as records of ``dtype``, a structured type with a field for each column; in parts.

    Raises DataError for values that are not what the columns promise, and `READ_ERRORS` for what cannot be read.
    """
    names = [column.name for column in columns]
    rows = max(1, min(ROWS_AT_ONCE, BYTES_AT_ONCE // dtype.itemsize))
    with open_parquet(path) as file:
        for batch in file.iter_batches(rows, row_groups=[index], columns=names, use_threads=False):
            records = np.zeros(batch.num_rows, dtype=dtype)
            for column in columns:
                records[column.name] = to_numpy(batch.column(column.name), column)
            yield records


def to_numpy(array: pa.Array, column: Column) -> npt.NDArray[Any]:
    """An Arrow array as numpy array [n] of the column's dtype, or [n, width]. No Python loop over rows.

    Raises DataError, naming column and count, for nulls without a fill, lists of another length, unknown strings, and
    numbers that do not fit.
    """
    try:
        return _lists(array, column) if column.width else _scalars(array, column)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"column {column.name!r}: {error}") from error


def _scalars(array: pa.Array, column: Column) -> npt.NDArray[Any]:
    nulls, fill = array.null_count, column.fill
    if nulls and fill is None:
        raise DataError(f"column {column.name!r} has {nulls} nulls")
    missing = _items(array.is_null(), "bool") if nulls else None
    if column.source == "string":
        if nulls:
            fill = column.vocabulary.index(str(fill))
        array = _codes(array, column)
    elif column.source == "timestamp":
        array = array.cast(pa.timestamp("us", tz=array.type.tz), safe=False).cast(pa.int64())
    elif column.source == "date":
        array = array.cast(pa.date32()).cast(pa.int32())
    values = _items(array, column.dtype)
    if missing is not None:
        values = np.where(missing, np.array(fill, dtype=column.dtype), values)
    return values


def _codes(array: pa.Array, column: Column) -> pa.Array:
    """Strings as indices into the vocabulary, nulls as nulls."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    array = array.cast(pa.large_string())
    codes = pc.index_in(array, value_set=_strings(column.vocabulary))
    unknown = codes.null_count - array.null_count
    if unknown:
        first = array.filter(pc.and_(pc.is_null(codes), pc.is_valid(array)))[0].as_py()
        raise DataError(
            f"column {column.name!r} has {unknown} values that are not in its vocabulary, such as {first!r}: "
            "the file changed after it was frozen"
        )
    return codes


@functools.lru_cache(maxsize=64)
def _strings(values: tuple[str, ...]) -> pa.Array:
    """An Arrow array of strings, made without ``pa.array``, which imports pandas."""
    encoded = [value.encode() for value in values]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return pa.LargeStringArray.from_buffers(len(values), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded)))


def _lists(array: pa.Array, column: Column) -> npt.NDArray[Any]:
    if array.null_count:
        raise DataError(f"column {column.name!r} has {array.null_count} nulls in place of lists")
    if not pa.types.is_fixed_size_list(array.type):
        lengths = pc.min_max(pc.list_value_length(array)).as_py()
        if len(array) and (lengths["min"] != column.width or lengths["max"] != column.width):
            raise DataError(
                f"column {column.name!r} has lists of {lengths['min']} to {lengths['max']} items, not of {column.width}"
            )
    items = array.flatten()
    if items.null_count:
        raise DataError(f"column {column.name!r} has {items.null_count} nulls inside of lists")
    return _items(items, column.dtype).reshape(len(array), column.width)


def _items(array: pa.Array, dtype: str) -> npt.NDArray[Any]:
    """The items of an array of numbers or booleans; what stands in place of nulls is undefined.

    Straight from its buffer: ``to_numpy`` imports pandas.
    """
    if dtype == "bool":
        return _items(array, "uint8").view(np.bool_)
    wanted = pa.from_numpy_dtype(np.dtype(dtype))
    if array.type != wanted:
        array = array.cast(wanted)
    if not len(array):
        return np.empty(0, dtype=dtype)
    size = np.dtype(dtype).itemsize
    return np.frombuffer(array.buffers()[1], dtype=dtype, count=len(array), offset=array.offset * size)
