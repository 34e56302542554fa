"""The frozen description of a data set: which row groups of which files hold its rows, and what its columns are.

A manifest fixes the numbering of the rows. The global id of a row is its position in manifest order: rows of row group
0, then of row group 1, and so on, ``0 .. rows - 1``. Everything else about the order (lanes.py) follows from the row
counts alone, so two drivers that read the same manifest train the same batches.

``digest`` names content, not place: it covers the columns, the row counts and the content of every file (`SourceFile`),
and neither paths nor times. The same data gives the same digest wherever it lies; caches are keyed by it.

JSON is the stored form (`to_json`, `from_json`); each path is written once.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elastic_spark.errors import DataError

#: Version of the JSON form. A reader refuses any other.
FORMAT = 1

#: Item types a column can have, with their sizes in bytes. All are types of numpy and of torch.
ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "float32": 4, "float64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class RowGroup:
    """Row group ``index`` of the Parquet file ``path``: ``rows`` rows, ``bytes`` bytes before compression."""

    path: str
    index: int
    rows: int
    bytes: int


@dataclass(frozen=True)
class Column:
    """A column as the worker sees it.

    ``dtype``: a key of `ITEM_BYTES`. ``width``: 0 for a scalar, n for a list of n items in every row. ``source``: what
    it was converted from, where the value changes its meaning ("timestamp": microseconds since 1970 UTC; "date": days
    since 1970; "decimal"; "string": codes ``0 .. len(vocabulary) - 1`` into ``vocabulary``). ``fill``: what stands for
    a null (a number of ``dtype``, or a string), None where there are no nulls.
    """

    name: str
    dtype: str
    width: int = 0
    source: str = ""
    vocabulary: tuple[str, ...] = ()
    fill: float | int | str | bool | None = None

    @property
    def bytes(self) -> int:
        """Bytes of one row of this column."""
        return ITEM_BYTES[self.dtype] * max(1, self.width)


@dataclass(frozen=True)
class SourceFile:
    """What identifies a file: ``content`` is a hash of it; ``stamp`` (size, time of change or entity tag, as the file
    system gives them) tells whether it may have changed since."""

    path: str
    stamp: str
    content: str


@dataclass(frozen=True)
class Manifest:
    """A frozen data set called ``name``, stored at ``uri``; see the module's text."""

    name: str
    uri: str
    row_groups: tuple[RowGroup, ...]
    columns: tuple[Column, ...]
    digest: str
    rows: int
    files: tuple[SourceFile, ...] = ()

    @functools.cached_property
    def group_rows(self) -> tuple[int, ...]:
        """Rows of each row group: what a `LanePlan` is made from."""
        return tuple(group.rows for group in self.row_groups)

    def column(self, name: str) -> Column:
        """The column called ``name``. Raises DataError that lists the columns there are."""
        for column in self.columns:
            if column.name == name:
                return column
        names = [column.name for column in self.columns]
        raise DataError(f"no column {name!r} in data set {self.name!r}; it has {names}")

    def to_json(self) -> str:
        """The stored form."""
        paths = list(dict.fromkeys(group.path for group in self.row_groups))
        number = {path: i for i, path in enumerate(paths)}
        body = {
            "format": FORMAT,
            "name": self.name,
            "uri": self.uri,
            "digest": self.digest,
            "rows": self.rows,
            "columns": [dataclasses.asdict(column) for column in self.columns],
            "paths": paths,
            "row_groups": [[number[group.path], group.index, group.rows, group.bytes] for group in self.row_groups],
            "files": [[file.path, file.stamp, file.content] for file in self.files],
        }
        return json.dumps(body, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Reads the stored form. Raises DataError where it is torn, of another format, or contradicts itself."""
        try:
            body: dict[str, Any] = json.loads(text)
            if body["format"] != FORMAT:
                raise DataError(f"a manifest of format {body['format']!r}; this version reads format {FORMAT}")
            paths = body["paths"]
            columns = (Column(**{**item, "vocabulary": tuple(item["vocabulary"])}) for item in body["columns"])
            manifest = cls(
                name=body["name"],
                uri=body["uri"],
                row_groups=tuple(RowGroup(paths[path], *rest) for path, *rest in body["row_groups"]),
                columns=tuple(columns),
                digest=body["digest"],
                rows=body["rows"],
                files=tuple(SourceFile(*item) for item in body["files"]),
            )
        except (ValueError, KeyError, TypeError, IndexError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"not a manifest: {type(error).__name__}: {error}") from error
        if manifest.digest != digest_of(manifest.row_groups, manifest.columns, manifest.files):
            raise DataError(f"the manifest of {manifest.name!r} at {manifest.uri} does not match its own digest")
        return manifest

    @classmethod
    def of(
        cls,
        name: str,
        uri: str,
        row_groups: Sequence[RowGroup],
        columns: Sequence[Column],
        files: Sequence[SourceFile] = (),
    ) -> Manifest:
        """A manifest with its digest and row count computed. Raises DataError for no columns or a repeated one."""
        names = [column.name for column in columns]
        if not names or len(set(names)) != len(names):
            raise DataError(f"data set {name!r} needs columns, each named once: {names}")
        return cls(
            name=name,
            uri=uri,
            row_groups=tuple(row_groups),
            columns=tuple(columns),
            digest=digest_of(row_groups, columns, files),
            rows=sum(group.rows for group in row_groups),
            files=tuple(files),
        )


def digest_of(row_groups: Sequence[RowGroup], columns: Sequence[Column], files: Sequence[SourceFile]) -> str:
    """SHA-256, in hex, over columns, row groups and content of files; paths enter as numbers in order of first use."""
    content = {file.path: file.content for file in files}
    number: dict[str, int] = {}
    groups = [(number.setdefault(group.path, len(number)), group.index, group.rows) for group in row_groups]
    body = {
        "columns": [dataclasses.asdict(column) for column in columns],
        "row_groups": groups,
        "files": [content.get(path, "") for path in number],
    }
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
