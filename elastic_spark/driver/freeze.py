"""Freezing: from a DataFrame, or Parquet files that lie somewhere, to a `Manifest`. Before any worker starts.

Existing Parquet is used as it is: footers give exact row counts, and only columns that need it are read (lists for
their length, strings for their vocabulary, others where the file does not count its nulls). A DataFrame is written once
by Spark, as Parquet with even row groups, below ``uri/name/``, and described the same way, except that Spark reads what
the driver would otherwise have to.

It is idempotent. Files of one's own are identified by a hash of their content (remote ones by their entity tag), kept
with a stamp, so that files that did not change are not read again. A DataFrame has no identity that could be trusted:
its plan may stay while its files change, and its rows may come in another order each time. So Spark counts and hashes
its rows, whatever their order, and where an earlier freeze of the same rows lies at ``uri``, that one is used: same
order, same digest, nothing written. An earlier freeze of other rows is left where it is, because a job may be reading
it; only the manifest is replaced. Rows that never came to a manifest, as the freeze failed or was interrupted, are
removed; those of a driver that was killed, by a later freeze of the data set: a file beside them, their name with
``.writing``, tells them from others.

What becomes of the columns: see elastic_spark/parquet.py. Spark ML vectors become float32 lists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

import fsspec

from elastic_spark.core.manifest import Column, Manifest, RowGroup, SourceFile
from elastic_spark.driver.tagged import TaggedJobs
from elastic_spark.errors import ConfigError, DataError, StorageFailed
from elastic_spark.parquet import Facts, Footer, column_of, local_path, read_footer, scan

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame, Row

#: Rows of a row group that Spark writes: a few megabytes for tens of columns.
ROWS_PER_GROUP = 65_536

#: A string column with more distinct values is refused: its vocabulary travels to every worker.
MOST_STRINGS = 100_000

#: Rows that another driver may be writing are let be until nothing of them has changed for so long.
LEFT_AFTER_S = 24 * 3600.0

_WRITING = ".writing"

#: Files read at a time. They wait for storage more than they compute.
_THREADS = 8
#: A file whose footer has not come for so many seconds is given up.
_FOOTER_LIMIT_S = 600.0
_log = logging.getLogger(__name__)

Nulls = str | Mapping[str, Any]
T = TypeVar("T")


def freeze(
    df_or_uri: DataFrame | str | os.PathLike[str],
    uri: str | os.PathLike[str],
    *,
    name: str = "train",
    columns: Sequence[str] | None = None,
    nulls: Nulls = "refuse",
    rows_per_group: int = ROWS_PER_GROUP,
) -> Manifest:
    """Fixes which rows a data set has, in which order they are numbered, and what its columns become.

    Args:
        df_or_uri: a Spark DataFrame; or Parquet that exists: a file or a folder, as a local path or an fsspec URI.
        uri: where ``<name>/manifest.json`` is kept, and what Spark writes. Every worker must be able to read it.
        name: of the data set.
        columns: which to take, and in which order; default: all.
        nulls: ``"refuse"``, or what to put for them by column; nulls in other columns are refused.
        rows_per_group: rows of a row group, where Spark writes them.

    Returns:
        The manifest, also stored at ``uri/name/manifest.json``.

    Raises:
        DataError: no rows, no Parquet files, a missing column, one of a type that does not become a tensor, nulls,
            lists of different lengths, too many different strings: named with column and count.
        ConfigError: options that make no sense.
        StorageFailed: the footer of a file does not come.
    """
    if not (nulls == "refuse" or isinstance(nulls, Mapping)):
        raise ConfigError(f"nulls={nulls!r}: 'refuse', or a value for each column to fill, as in {{'age': 0}}")
    if rows_per_group < 1:
        raise ConfigError(f"rows_per_group={rows_per_group}: must be at least 1")
    fill = nulls if isinstance(nulls, Mapping) else {}
    folder = f"{_absolute(os.fspath(uri))}/{name}"
    if isinstance(df_or_uri, (str, os.PathLike)):
        if not os.fspath(df_or_uri).split("://")[-1].strip("/ "):
            raise DataError(f"data={os.fspath(df_or_uri)!r} names no Parquet files")
        manifest = _freeze_files(_absolute(os.fspath(df_or_uri)), folder, name, columns, fill)
    elif not hasattr(df_or_uri, "schema"):
        kind = type(df_or_uri).__name__
        raise DataError(f"data of type {kind} is neither a Spark DataFrame nor the path or URI of Parquet files")
    else:
        manifest = _freeze_frame(df_or_uri, folder, name, columns, fill, rows_per_group)
    return manifest


def load_manifest(uri: str) -> Manifest | None:
    """The manifest stored in the folder ``uri`` (``<uri given to freeze>/<name>``), None where there is none.

    Raises DataError where there is one that is torn or of another format.
    """
    path = f"{_absolute(uri)}/manifest.json"
    try:
        with fsspec.open(path, "r", encoding="utf-8") as file:
            return Manifest.from_json(file.read())
    except FileNotFoundError:
        return None


# ---- Parquet that exists


def _freeze_files(
    source: str, folder: str, name: str, columns: Sequence[str] | None, fill: Mapping[str, Any]
) -> Manifest:
    paths = _parquet_files(source)
    earlier = _earlier(folder)
    known = {(file.path, file.stamp): file.content for file in earlier.files} if earlier else {}
    footers = list(_each(read_footer, paths, _FOOTER_LIMIT_S))
    skeleton = _columns(name, footers, columns)
    _check_fill(fill, skeleton)
    to_scan = [column for column in skeleton if _needs_scan(column, footers)]
    facts = {column.name: Facts() for column in to_scan}
    if to_scan:
        for part in _each(lambda path: scan(path, to_scan, MOST_STRINGS), paths):
            for column_name, more in part.items():
                facts[column_name].add(more)
    files = list(_each(lambda path: _identify(path, known), paths))
    for column in skeleton:
        if column.name not in facts:
            facts[column.name] = Facts(nulls=sum(footer.nulls[column.name] or 0 for footer in footers))
    settled = [_settle(name, column, facts[column.name], fill) for column in skeleton]
    return _store(name, folder, footers, settled, files, earlier)


def _needs_scan(column: Column, footers: Sequence[Footer]) -> bool:
    unknown = any(footer.nulls[column.name] is None for footer in footers)
    return bool(column.width) or column.source == "string" or unknown


def _parquet_files(source: str) -> list[str]:
    """All Parquet files below ``source``, or itself; hidden ones and those of ``_delta_log`` and the like left out."""
    fs, root = fsspec.core.url_to_fs(source)
    try:
        found = [root] if fs.isfile(root) else fs.find(root)
    except FileNotFoundError:
        found = []
    paths = []
    for path in found:
        inside = path[len(root) :].strip("/").split("/")
        if path == root or (path.endswith((".parquet", ".parq")) and not any(part[:1] in "_." for part in inside)):
            paths.append(path if local_path(source) is not None else fs.unstrip_protocol(path))
    if not paths:
        raise DataError(f"no Parquet files at {source}")
    return sorted(paths)


def _identify(path: str, known: Mapping[tuple[str, str], str]) -> SourceFile:
    """Hash of a file's content, not read again where its stamp is that of an earlier freeze."""
    fs, bare = fsspec.core.url_to_fs(path)
    info = fs.info(bare)
    tag = info.get("ETag") or info.get("etag")
    if tag:
        return SourceFile(path, f"{info['size']}-{tag}", f"etag:{tag}")
    changed = info.get("mtime") or info.get("LastModified") or info.get("created")
    stamp = f"{info['size']}-{changed}"
    content = known.get((path, stamp))
    if content is None:
        with fsspec.open(path, "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
    return SourceFile(path, stamp, content)


# ---- columns


def _columns(name: str, footers: Sequence[Footer], wanted: Sequence[str] | None) -> list[Column]:
    """The columns of all files, alike in each, before widths and vocabularies are known."""
    first = footers[0].fields
    wanted = list(first) if wanted is None else list(wanted)
    _check_names(name, wanted, first)
    columns = [column_of(first[column]) for column in wanted]
    for footer in footers[1:]:
        for column in columns:
            if column.name not in footer.fields:
                raise DataError(f"column {column.name!r} is missing in {footer.path}")
            other = column_of(footer.fields[column.name])
            if other != column:
                raise DataError(
                    f"column {column.name!r} is {first[column.name].type} in {footers[0].path}, and "
                    f"{footer.fields[column.name].type} in {footer.path}"
                )
    return columns


def _check_names(name: str, wanted: Sequence[str], there: Iterable[str]) -> None:
    there = list(there)
    missing = [column for column in wanted if column not in there]
    if missing:
        raise DataError(f"data set {name!r} has no column {', '.join(map(repr, missing))}; it has {there}")
    if not wanted or len(set(wanted)) != len(wanted):
        raise DataError(f"data set {name!r} needs columns, each named once: {list(wanted)}")


def _check_fill(fill: Mapping[str, Any], columns: Sequence[Column]) -> None:
    """Raises ConfigError for a fill of no column, or of the wrong type."""
    by_name = {column.name: column for column in columns}
    for name, value in fill.items():
        column = by_name.get(name)
        if column is None:
            raise ConfigError(f"nulls: no column {name!r} among {list(by_name)}")
        if column.width:
            raise ConfigError(f"nulls: column {name!r} holds lists; fill them before, or freeze the DataFrame")
        if isinstance(value, str) != (column.source == "string") or not isinstance(value, (str, int, float)):
            wanted = "string" if column.source == "string" else "number"
            raise ConfigError(f"nulls: {value!r} for column {name!r}: a {wanted} is needed")


def _settle(name: str, column: Column, facts: Facts, fill: Mapping[str, Any]) -> Column:
    """The column with its width, vocabulary and fill. Raises DataError for what cannot be trained on."""
    where = f"column {column.name!r} of data set {name!r}"
    if facts.nulls and column.name not in fill:
        raise DataError(
            f"{where} has {facts.nulls:,} nulls: drop these rows, or fill them: "
            f"es.freeze(..., nulls={{{column.name!r}: value}})"
        )
    if facts.nulls_inside:
        raise DataError(f"{where} has {facts.nulls_inside:,} nulls inside of lists")
    if column.width:
        if len(facts.lengths) != 1:
            shown = f"{min(facts.lengths)} to {max(facts.lengths)}" if facts.lengths else "no"
            raise DataError(f"{where} has lists of {shown} items: all must have the same length to become a tensor")
        (width,) = facts.lengths
        if not width:
            raise DataError(f"{where} has empty lists only")
        column = dataclasses.replace(column, width=width)
    if facts.nulls:
        column = dataclasses.replace(column, fill=fill[column.name])
    if column.source == "string":
        values = facts.values | ({str(column.fill)} if column.fill is not None else set())
        if len(values) > MOST_STRINGS:
            raise DataError(
                f"{where} has more than {MOST_STRINGS:,} different strings: hash it to a number before, or leave it "
                "out with es.freeze(..., columns=[...])"
            )
        column = dataclasses.replace(column, vocabulary=tuple(sorted(values)))
    return column


# ---- a DataFrame


def _freeze_frame(
    df: DataFrame,
    folder: str,
    name: str,
    columns: Sequence[str] | None,
    fill: Mapping[str, Any],
    rows_per_group: int,
) -> Manifest:
    wanted = list(df.columns) if columns is None else list(columns)
    _check_names(name, wanted, df.columns)
    selected = df.select(*_selection(df, wanted, fill))
    jobs = TaggedJobs(df.sparkSession, "freeze")
    return jobs.run(lambda: _write_frame(selected, folder, name, wanted, rows_per_group, jobs))


def _write_frame(
    selected: DataFrame, folder: str, name: str, wanted: Sequence[str], rows_per_group: int, jobs: TaggedJobs
) -> Manifest:
    _sweep(folder)
    session, earlier = selected.sparkSession, _earlier(folder)
    if earlier is not None and [column.name for column in earlier.columns] == wanted and _exists(earlier):
        kept = {file.content.rpartition("/")[0] for file in earlier.files}
        if kept == {_fingerprint(selected)}:
            return earlier
    data = f"{folder}/rows-{uuid.uuid4().hex[:12]}"
    writer = selected.write.option("parquet.block.row.count.limit", rows_per_group).option("compression", "snappy")
    if int(session.version.partition(".")[0]) < 4:  # its Parquet does not know that limit: a group a file, then
        writer = writer.option("maxRecordsPerFile", rows_per_group)
    _write_text(f"{data}{_WRITING}", "Rows are written beside this file, or their writer was killed.\n")
    try:
        writer.parquet(_for_spark(data))
        written = session.read.parquet(_for_spark(data)).select(*[_quoted(column) for column in wanted])
        footers = [footer for footer in map(read_footer, _parquet_files(data)) if footer.row_groups]
        if not footers:
            raise DataError(f"data set {name!r} has no rows")
        facts, fingerprint = _measure(written, footers)
        settled = [_settle(name, column, facts[column.name], {}) for column in _columns(name, footers, wanted)]
        files = [SourceFile(footer.path, "", f"{fingerprint}/{footer.content}") for footer in footers]
        _remove(f"{data}{_WRITING}")
        return _store(name, folder, footers, settled, files, earlier)
    except BaseException:
        jobs.wait_for_tasks()
        with contextlib.suppress(Exception):  # of the storage: what it has kept is left to `_sweep`
            _remove(data)
            _remove(f"{data}{_WRITING}")
        raise


def _selection(df: DataFrame, wanted: Sequence[str], fill: Mapping[str, Any]) -> list[SparkColumn]:
    """What is written: vectors as float32 arrays, nulls filled. Raises DataError for types that become no tensor."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import functions as F
    from pyspark.sql import types as T
    from pyspark.sql.types import ArrayType, BooleanType, DataType, FloatType, NumericType

    convertible = (T.StringType, T.CharType, T.VarcharType, T.DateType, T.TimestampType, T.TimestampNTZType)
    unknown = [column for column in fill if column not in wanted]
    if unknown:
        raise ConfigError(f"nulls: no column {unknown[0]!r} among {list(wanted)}")
    types: dict[str, DataType] = {item.name: item.dataType for item in df.schema.fields}
    out = []
    for column in wanted:
        value = F.col(_quoted(column))
        kind = types[column]
        if isinstance(kind, VectorUDT):
            kind, value = ArrayType(FloatType()), vector_to_array(value, dtype="float32")
        item = kind.elementType if isinstance(kind, ArrayType) else kind
        if not isinstance(item, (BooleanType, NumericType)) and (item is not kind or not isinstance(kind, convertible)):
            raise DataError(
                f"column {column!r} has type {types[column].simpleString()}, which does not become a tensor; "
                "leave it out with es.freeze(..., columns=[...]), or convert it"
            )
        if column in fill:
            filled = fill[column]
            items = F.array(*map(F.lit, filled)) if isinstance(filled, (list, tuple)) else F.lit(filled)
            value = F.coalesce(value, items.cast(kind))
        out.append(value.alias(column))
    return out


def _fingerprint(df: DataFrame) -> str:
    """Count and hash of the rows of a DataFrame, whatever their order."""
    return _identity_of(df.agg(*_identity(df)).collect()[0])


def _identity(df: DataFrame) -> list[SparkColumn]:
    from pyspark.sql import functions as F

    row = F.xxhash64(*[F.col(_quoted(column)) for column in df.columns])
    return [F.count(F.lit(1)).alias("rows"), F.sum(row.cast("decimal(38,0)")).alias("sum"), F.bit_xor(row).alias("xor")]


def _identity_of(measured: Row) -> str:
    return f"rows:{measured['rows']}:{measured['sum'] or 0}:{measured['xor'] or 0}"


def _measure(written: DataFrame, footers: Sequence[Footer]) -> tuple[dict[str, Facts], str]:
    """Facts of all columns of what Spark wrote, and its fingerprint: by Spark, but for nulls, which footers tell."""
    from pyspark.sql import functions as F

    measures = _identity(written)
    lists = [item.name for item in written.schema.fields if item.dataType.typeName() == "array"]
    for number, column in enumerate(lists):
        value = F.col(_quoted(column))
        measures += [
            F.min(F.when(value.isNotNull(), F.size(value))).alias(f"min{number}"),
            F.max(F.when(value.isNotNull(), F.size(value))).alias(f"max{number}"),
            F.sum(value.isNull().cast("long")).alias(f"nulls{number}"),
            F.sum(F.size(F.filter(value, lambda item: item.isNull())).cast("long")).alias(f"inside{number}"),
        ]
    seen = written.agg(*measures).collect()[0]
    fingerprint = _identity_of(seen)
    facts = {}
    for number, column in enumerate(lists):
        low, high, nulls, inside = (seen[f"{what}{number}"] for what in ("min", "max", "nulls", "inside"))
        facts[column] = Facts(nulls=nulls or 0, nulls_inside=max(0, inside or 0), lengths={low, high} - {None})
    for item in written.schema.fields:
        if item.name not in facts:
            facts[item.name] = Facts(nulls=sum(footer.nulls[item.name] or 0 for footer in footers))
        if item.dataType.typeName() == "string":
            values = written.select(F.col(_quoted(item.name)).alias("value")).dropna().distinct()
            facts[item.name].values = {row["value"] for row in values.limit(MOST_STRINGS + 1).collect()}
    return facts, fingerprint


def _exists(manifest: Manifest) -> bool:
    paths = {group.path for group in manifest.row_groups}
    return all(fsspec.core.url_to_fs(path)[0].exists(path) for path in paths)


# ---- places


def _each(call: Callable[[str], T], paths: Sequence[str], limit_s: float | None = None) -> Iterator[T]:
    """``call(path)`` of each, in their order, some at a time. A read that hangs is left behind by an interrupt.

    Raises:
        StorageFailed: nothing has come of a file for ``limit_s``.
    """
    todo: queue.SimpleQueue[tuple[str, Future[T]]] = queue.SimpleQueue()
    answers: list[Future[T]] = [Future() for _ in paths]
    for item in zip(paths, answers, strict=True):
        todo.put(item)
    over = threading.Event()

    def serve() -> None:
        with contextlib.suppress(queue.Empty):
            while not over.is_set():
                path, answer = todo.get_nowait()
                try:
                    answer.set_result(call(path))
                except BaseException as error:
                    answer.set_exception(error)

    for _ in range(min(_THREADS, len(paths))):
        threading.Thread(target=serve, name="elastic_spark files", daemon=True).start()
    try:
        for path, answer in zip(paths, answers, strict=True):
            if not wait([answer], limit_s).done:
                raise StorageFailed(f"nothing has come of {path} for {limit_s:.0f} s")
            yield answer.result()
    finally:
        over.set()


def _sweep(folder: str) -> None:
    """Removes rows whose writer was killed: never a manifest names them, as their mark goes before it is stored."""
    fs, root = fsspec.core.url_to_fs(folder)
    try:
        fs.invalidate_cache()
        marks = [path for path in fs.ls(root, detail=False) if path.endswith(_WRITING)]
        for mark in marks:
            rows = mark.removesuffix(_WRITING)
            newest = max(fs.modified(path).timestamp() for path in (mark, *fs.find(rows)))
            if time.time() - newest >= LEFT_AFTER_S:
                for path in (rows, mark):
                    with contextlib.suppress(FileNotFoundError):
                        fs.rm(path, recursive=True)
    except FileNotFoundError:
        return
    except Exception as error:  # of the storage: the next freeze tries again
        _log.warning("rows that a killed driver has left below %s cannot be removed: %s", folder, error)


def _remove(uri: str) -> None:
    fs, path = fsspec.core.url_to_fs(uri)
    with contextlib.suppress(FileNotFoundError):
        fs.rm(path, recursive=True)


def _earlier(folder: str) -> Manifest | None:
    """An earlier freeze; one that cannot be read counts as none."""
    try:
        return load_manifest(folder)
    except DataError:
        return None


def _store(
    name: str,
    folder: str,
    footers: Sequence[Footer],
    columns: Sequence[Column],
    files: Sequence[SourceFile],
    earlier: Manifest | None,
) -> Manifest:
    """Makes the manifest and stores it, unless it is stored already."""
    groups = [
        RowGroup(footer.path, index, rows, size)
        for footer in footers
        for index, (rows, size) in enumerate(footer.row_groups)
        if rows
    ]
    manifest = Manifest.of(name, folder, groups, columns, files)
    if not manifest.rows:
        raise DataError(f"data set {name!r} has no rows (0 rows in {len(footers)} files)")
    if manifest == earlier:
        return manifest
    _write_text(f"{folder}/manifest.json", manifest.to_json())
    return manifest


def _write_text(path: str, text: str) -> None:
    """Whole or not at all."""
    local = local_path(path)
    if local is None:
        with fsspec.open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return
    os.makedirs(os.path.dirname(local), exist_ok=True)
    partial = f"{local}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, local)


def _absolute(uri: str) -> str:
    local = local_path(uri)
    return uri.rstrip("/") if local is None else os.path.abspath(local)


def _for_spark(path: str) -> str:
    return path if local_path(path) is None else f"file://{path}"


def _quoted(column: str) -> str:
    """A column's name as Spark reads it, where it may hold dots and the like."""
    return "`" + column.replace("`", "``") + "`"
