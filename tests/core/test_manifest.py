"""Manifests: stored and read back, a digest of the content and of nothing else."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_spark.core.manifest import ITEM_BYTES, Column, Manifest, RowGroup, SourceFile
from elastic_spark.errors import DataError

names = st.text(min_size=1, max_size=8)
columns = st.lists(
    st.builds(
        Column,
        name=names,
        dtype=st.sampled_from(sorted(ITEM_BYTES)),
        width=st.integers(0, 9),
        source=st.sampled_from(["", "string", "timestamp"]),
        vocabulary=st.lists(names, max_size=3).map(tuple),
        fill=st.one_of(st.none(), st.integers(-5, 5), st.floats(allow_nan=False), names, st.booleans()),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda column: column.name,
)
row_groups = st.lists(
    st.builds(
        RowGroup,
        path=st.sampled_from(["/data/a.parquet", "/data/b.parquet", "s3://x/ü.parquet"]),
        index=st.integers(0, 3),
        rows=st.integers(0, 2**40),
        bytes=st.integers(0, 2**50),
    ),
    max_size=6,
)
FILES = [SourceFile("/data/a.parquet", "12-5", "aa"), SourceFile("/data/b.parquet", "13-5", "bb")]


@settings(deadline=None)
@given(columns, row_groups)
def test_a_manifest_is_read_back_as_it_was(columns, row_groups):
    manifest = Manifest.of("train", "/data", row_groups, columns, FILES)
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.rows == sum(group.rows for group in row_groups)
    assert manifest.group_rows == tuple(group.rows for group in row_groups)


def moved(manifest, folder):
    groups = [dataclasses.replace(group, path=folder + group.path) for group in manifest.row_groups]
    files = [dataclasses.replace(file, path=folder + file.path, stamp="other") for file in manifest.files]
    return Manifest.of("other name", folder, groups, manifest.columns, files)


def test_the_digest_covers_content_and_not_place():
    groups = [RowGroup("/data/a.parquet", 0, 10, 400), RowGroup("/data/b.parquet", 0, 5, 200)]
    columns = [Column("x", "float32", 4), Column("y", "int64")]
    manifest = Manifest.of("train", "/data", groups, columns, FILES)
    assert moved(manifest, "/elsewhere").digest == manifest.digest
    others = [
        Manifest.of("train", "/data", groups[::-1], columns, FILES),
        Manifest.of("train", "/data", groups[:1], columns, FILES),
        Manifest.of("train", "/data", groups, columns[::-1], FILES),
        Manifest.of("train", "/data", groups, columns, [FILES[0], SourceFile("/data/b.parquet", "13-5", "other")]),
        Manifest.of("train", "/data", groups, [Column("x", "float32", 4), Column("y", "int64", fill=0)], FILES),
    ]
    assert len({manifest.digest, *(other.digest for other in others)}) == 6


def test_columns_are_found_by_name_and_have_a_size():
    manifest = Manifest.of("train", "/data", [], [Column("x", "float32", 4), Column("y", "bool")])
    assert manifest.column("y").bytes == 1
    with pytest.raises(DataError, match=r"no column 'z' .* \['x', 'y'\]"):
        manifest.column("z")


def test_columns_are_needed_and_named_once():
    for columns in ([], [Column("x", "bool"), Column("x", "int8")]):
        with pytest.raises(DataError, match="each named once"):
            Manifest.of("train", "/data", [], columns)


def test_torn_foreign_and_changed_manifests_are_refused():
    text = Manifest.of("train", "/data", [RowGroup("/a", 0, 3, 9)], [Column("x", "bool")]).to_json()
    body = json.loads(text)
    for torn in (text[:-3], "[]", "{}", json.dumps({**body, "row_groups": [[7, 0, 3, 9]]})):
        with pytest.raises(DataError, match="not a manifest"):
            Manifest.from_json(torn)
    with pytest.raises(DataError, match="format 99"):
        Manifest.from_json(json.dumps({**body, "format": 99}))
    with pytest.raises(DataError, match="own digest"):
        Manifest.from_json(json.dumps({**body, "row_groups": [[0, 0, 4, 9]]}))
