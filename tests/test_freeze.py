"""Freezing DataFrames and Parquet: exact counts, the same digest for the same data, bad data named before it hurts."""

from __future__ import annotations

import datetime
import decimal
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from elastic_spark.core.lanes import LanePlan
from elastic_spark.core.manifest import Column
from elastic_spark.driver import freeze as freeze_module
from elastic_spark.driver.freeze import freeze, load_manifest
from elastic_spark.errors import ConfigError, DataError, StorageFailed
from elastic_spark.interrupts import Interrupts
from elastic_spark.worker.data import LaneReader


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    yield session
    session.stop()


def read(manifest):
    """All rows as {column: tensor}, in manifest order."""
    plan = LanePlan(manifest.group_rows, 1, 1000, 0, shuffle=False)
    reader = LaneReader(manifest, plan, [0], 1)
    batches = list(reader.batches(0))
    reader.close()
    return {column.name: torch.cat([batch[column.name] for batch in batches]) for column in manifest.columns}


# ---- storage that hangs

HANGS = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been started with the signal ignored
from elastic_spark import freeze
from elastic_spark.driver import freeze as module
read = module.read_footer
module.read_footer = lambda path: (print("begins", flush=True), read(path))
freeze(*sys.argv[1:])
"""


def test_ctrl_c_ends_a_freeze_whose_storage_hangs(tmp_path):
    (tmp_path / "in").mkdir()
    os.mkfifo(tmp_path / "in" / "a.parquet")  # nobody writes to it, so whoever opens it waits
    command = [sys.executable, "-c", HANGS, str(tmp_path / "in"), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "begins\n"
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
            assert said.rstrip().endswith("KeyboardInterrupt")
        finally:
            process.kill()


def test_a_file_that_hangs_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(freeze_module, "_FOOTER_LIMIT_S", 0.3)
    (tmp_path / "in").mkdir()
    os.mkfifo(tmp_path / "in" / "a.parquet")
    with pytest.raises(StorageFailed, match=r"nothing has come of .*a\.parquet"):
        freeze(tmp_path / "in", tmp_path / "out")
    open(tmp_path / "in" / "a.parquet", "wb").close()  # the thread that was left behind ends


# ---- DataFrames


def test_a_frame_of_all_types(spark, tmp_path):
    stamp = datetime.datetime(2026, 11, 29, 20, 15, 1, 5)
    rows = [
        (i, float(i) / 2, i % 2 == 0, decimal.Decimal(i) / 4, "ab"[i % 2], stamp, datetime.date(1970, 1, 1 + i),
         [i, i + 1], Vectors.dense([i, 2.0]) if i % 2 else Vectors.sparse(2, {1: 3.0}))
        for i in range(10)
    ]  # fmt: skip
    names = ["id", "f", "flag", "dec", "s", "at", "day", "list", "vec"]
    frame = spark.createDataFrame(rows, names).withColumn("dotted.name", F.col("id").cast("short"))
    manifest = freeze(frame, str(tmp_path), rows_per_group=3)
    assert manifest.columns == (
        Column("id", "int64"),
        Column("f", "float64"),
        Column("flag", "bool"),
        Column("dec", "float64", source="decimal"),
        Column("s", "int32", source="string", vocabulary=("a", "b")),
        Column("at", "int64", source="timestamp"),
        Column("day", "int32", source="date"),
        Column("list", "int64", 2),
        Column("vec", "float32", 2),
        Column("dotted.name", "int16"),
    )
    assert manifest.rows == 10
    assert max(manifest.group_rows) <= 3
    data = read(manifest)
    order = data["id"]
    assert sorted(order.tolist()) == list(range(10))
    assert torch.equal(data["f"], order / 2)
    assert torch.equal(data["flag"], order % 2 == 0)
    assert torch.equal(data["dec"], order.double() / 4)
    assert torch.equal(data["s"], (order % 2).int())
    assert set(data["at"].tolist()) == {int(stamp.replace(tzinfo=datetime.UTC).timestamp()) * 10**6 + 5}
    assert torch.equal(data["day"], order.int())
    assert torch.equal(data["list"], torch.stack([order, order + 1], 1))
    odd = order % 2 == 1
    assert torch.equal(data["vec"][odd], torch.stack([order[odd], torch.full_like(order[odd], 2)], 1).float())
    assert data["vec"][~odd].unique(dim=0).tolist() == [[0.0, 3.0]]
    assert torch.equal(data["dotted.name"], order.short())


def test_the_same_rows_are_not_written_twice(spark, tmp_path):
    frame = spark.range(0, 1000, 1, 3).withColumn("x", F.rand(7).cast("float"))
    first = freeze(frame, str(tmp_path), columns=["x", "id"])
    written = sorted(os.listdir(tmp_path / "train"))
    assert freeze(frame, str(tmp_path), columns=["x", "id"]) == first
    # The same rows in another order: the frozen order stays.
    assert freeze(frame.orderBy(F.desc("x")), str(tmp_path), columns=["x", "id"]) == first
    assert load_manifest(str(tmp_path / "train")) == first
    assert sorted(os.listdir(tmp_path / "train")) == written
    # The same rows elsewhere have the same digest.
    assert freeze(frame, str(tmp_path / "other"), columns=["x", "id"]).digest == first.digest
    # One changed value, or other columns: other data.
    changed = frame.withColumn("x", F.when(F.col("id") == 5, F.col("x") / 2).otherwise(F.col("x")))
    second = freeze(changed, str(tmp_path), columns=["x", "id"])
    assert second.digest != first.digest
    assert read(first)["id"].sort()[0].tolist() == list(range(1000))  # what a running job reads stays
    assert freeze(changed, str(tmp_path), columns=["id"]).digest not in (first.digest, second.digest)


def test_skewed_and_empty_partitions(spark, tmp_path):
    """BR-21: all rows in 1 of 8 partitions; 7 of 8 empty; 5 rows in 40 partitions."""
    for name, frame in (
        ("one", spark.range(0, 300, 1, 1).repartition(8, F.lit(1))),
        ("few", spark.range(0, 5, 1, 40)),
        ("mixed", spark.range(0, 1, 1, 1).union(spark.range(1, 11, 1, 1)).union(spark.range(11, 1011, 1, 1))),
    ):
        manifest = freeze(frame, str(tmp_path), name=name)
        assert manifest.rows == frame.count()
        assert sorted(read(manifest)["id"].tolist()) == list(range(manifest.rows))
        assert all(manifest.group_rows)


def test_nulls_are_filled_as_told(spark, tmp_path):
    frame = spark.createDataFrame(
        [(1, None, None, None), (2, 2.5, "x", [1.0, 2.0])], "id int, f double, s string, l array<float>"
    )
    manifest = freeze(frame, str(tmp_path), nulls={"f": -1, "s": "none", "l": [0, 0]})
    data = read(manifest)
    order = data["id"].argsort()
    assert data["f"][order].tolist() == [-1, 2.5]
    assert manifest.column("s").vocabulary == ("none", "x")
    assert data["s"][order].tolist() == [0, 1]
    assert data["l"][order].tolist() == [[0, 0], [1, 2]]


@pytest.mark.parametrize(
    ("schema", "rows", "message"),
    [
        ("id int", [], "data set 'train' has no rows"),
        ("id int, y double", [(1, None), (2, None), (3, 1.0)], "column 'y' of data set 'train' has 2 nulls"),
        ("id int, l array<int>", [(1, [1]), (2, [1, 2])], "column 'l' .* lists of 1 to 2 items"),
        ("id int, l array<int>", [(1, [1]), (2, None)], "column 'l' .* has 1 nulls"),
        ("id int, l array<int>", [(1, [1, None]), (2, [1, 2])], "column 'l' .* has 1 nulls inside of lists"),
        ("id int, l array<int>", [(1, [])], "column 'l' .* has empty lists only"),
        ("id int, s string", [(1, "a"), (2, None)], "column 's' .* has 1 nulls"),
        ("m map<string,int>", [({"a": 1},)], "column 'm' has type map<string,int>"),
        ("l array<string>", [(["a"],)], "column 'l' has type array<string>"),
        ("b binary", [(b"a",)], "column 'b' has type binary"),
    ],
)
def test_bad_frames_are_refused_with_column_and_count(spark, tmp_path, schema, rows, message):
    with pytest.raises(DataError, match=message):
        freeze(spark.createDataFrame(rows, schema), str(tmp_path))
    left = list((tmp_path / "train").iterdir()) if (tmp_path / "train").exists() else []
    assert left == []


def test_missing_columns_and_senseless_options(spark, tmp_path):
    frame = spark.range(3)
    with pytest.raises(DataError, match=r"no column 'y'; it has \['id'\]"):
        freeze(frame, str(tmp_path), columns=["id", "y"])
    for columns in ([], ["id", "id"]):
        with pytest.raises(DataError, match="each named once"):
            freeze(frame, str(tmp_path), columns=columns)
    with pytest.raises(ConfigError, match="no column 'z'"):
        freeze(frame, str(tmp_path), nulls={"z": 1})
    with pytest.raises(ConfigError, match="'refuse'"):
        freeze(frame, str(tmp_path), nulls="drop")
    with pytest.raises(ConfigError, match="rows_per_group=0"):
        freeze(frame, str(tmp_path), rows_per_group=0)


def test_too_many_strings_are_refused(spark, tmp_path, monkeypatch):
    monkeypatch.setattr("elastic_spark.driver.freeze.MOST_STRINGS", 10)
    frame = spark.range(11).select(F.col("id").cast("string").alias("s"))
    with pytest.raises(DataError, match=r"column 's' .* more than 10 different strings"):
        freeze(frame, str(tmp_path / "frame"))
    frame.write.parquet(str(tmp_path / "files"))
    with pytest.raises(DataError, match=r"column 's' .* more than 10 different strings"):
        freeze(str(tmp_path / "files"), str(tmp_path / "out"))


def test_what_spark_wrote_is_used_as_it_is(spark, tmp_path):
    spark.range(0, 100, 1, 4).withColumn("l", F.array("id", "id")).write.parquet(str(tmp_path / "in"))
    manifest = freeze(tmp_path / "in", tmp_path / "out")
    assert {os.path.dirname(group.path) for group in manifest.row_groups} == {str(tmp_path / "in")}
    assert manifest.column("l") == Column("l", "int64", 2)
    assert sorted(read(manifest)["id"].tolist()) == list(range(100))


# ---- Parquet that exists


LIMIT_S = 60.0


def wait_for(condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {LIMIT_S} s for {what}"
        time.sleep(0.02)
    return value


def begun(folder):
    """What Spark writes there."""
    return list(folder.glob("rows-*/_temporary/**/*.parquet"))


def slow(session):
    """A frame that takes an hour to compute. Its first rows come at once, so that Spark has something to write."""

    def rows(_):
        import time

        for i in range(200_000):
            time.sleep(0.02 if i >= 20_000 else 0)
            yield (i, 0)

    return session.createDataFrame(session.sparkContext.parallelize([0, 1], 2).mapPartitions(rows), "id long, x long")


def runs(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def freeze_slowly(folder):
    """The main program of a driver that will be killed."""
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    freeze(slow(builder.getOrCreate()), folder)


def test_an_interrupted_freeze_ends_its_own_jobs_and_leaves_no_rows(spark, tmp_path):
    context, done, ended = spark.sparkContext, tmp_path / "done", []

    def another():
        def wait(_, path=str(done)):
            import os
            import time

            while not os.path.exists(path):
                time.sleep(0.02)

        context.parallelize([1], 1).map(wait).collect()
        ended.append("well")

    def interrupt():
        wait_for(lambda: begun(tmp_path / "train"), "the write")
        os.kill(os.getpid(), signal.SIGINT)

    context.setJobGroup("mine", "of the notebook")
    context.addJobTag("my-tag")
    threads = [threading.Thread(target=another), threading.Thread(target=interrupt)]
    try:
        threads[0].start()
        others = wait_for(context.statusTracker().getActiveJobsIds, "the other job")
        threads[1].start()
        with pytest.raises(KeyboardInterrupt), Interrupts():
            freeze(slow(spark), str(tmp_path))
        assert context.statusTracker().getActiveJobsIds() == others
        assert os.listdir(tmp_path / "train") == []
        assert (context.getLocalProperty("spark.jobGroup.id"), set(context.getJobTags())) == ("mine", {"my-tag"})
    finally:
        done.touch()
        for thread in threads:
            if thread.ident is not None:
                thread.join(LIMIT_S)
        context.clearJobTags()
        context.setLocalProperty("spark.jobGroup.id", None)
    assert ended == ["well"]
    assert freeze(spark.range(5), str(tmp_path)).rows == 5


def test_a_freeze_that_fails_in_spark_leaves_no_rows(spark, tmp_path):
    fail = F.udf(lambda i: i // (i - 7), "long")
    with pytest.raises(Exception, match="ZeroDivisionError"):
        freeze(spark.range(10).select(fail("id").alias("id")), str(tmp_path))
    assert os.listdir(tmp_path / "train") == []


def test_rows_of_a_killed_driver_go_after_a_day_and_no_others(spark, tmp_path):
    folder, day = tmp_path / "train", 24 * 3600
    earlier = freeze(spark.range(3), str(tmp_path))
    program = "import sys; import test_freeze; test_freeze.freeze_slowly(sys.argv[1])"
    with open(tmp_path / "out", "wb") as out:
        driver = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            cwd=Path(__file__).parent,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        wait_for(lambda: begun(folder) or driver.poll() is not None, "the write of another driver")
        assert driver.poll() is None, (tmp_path / "out").read_text()
        now = freeze(spark.range(4), str(tmp_path))
        assert begun(folder), "what it writes now stays"
    finally:
        family = psutil.Process(driver.pid).children(recursive=True)
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    wait_for(lambda: not any(map(runs, family)), "the end of its JVM")
    (mark,) = folder.glob("*.writing")
    of_killed = [mark, mark.with_suffix("")]
    others = sorted(path for path in folder.iterdir() if path not in of_killed)
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - 2 * day,) * 2)
    newest = begun(folder)[0]
    os.utime(newest, (time.time() - day / 2,) * 2)
    assert freeze(spark.range(4), str(tmp_path)) == now
    assert sorted(folder.iterdir()) == sorted(others + of_killed), "half a day ago it was still written"
    os.utime(newest, (time.time() - 2 * day,) * 2)
    assert freeze(spark.range(4), str(tmp_path)) == now
    assert sorted(folder.iterdir()) == others
    assert sorted(read(earlier)["id"].tolist()) == [0, 1, 2]


def write(path, columns, row_group_size=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)


def test_files_are_numbered_by_path_and_row_group(tmp_path):
    write(tmp_path / "in/b.parquet", {"id": range(10, 17)}, row_group_size=3)
    write(tmp_path / "in/a.parquet", {"id": range(10)})
    write(tmp_path / "in/_temporary/c.parquet", {"id": range(5)})
    write(tmp_path / "in/.hidden.parquet", {"id": range(5)})
    (tmp_path / "in/_SUCCESS").write_text("")
    manifest = freeze(str(tmp_path / "in"), str(tmp_path / "out"))
    assert manifest.group_rows == (10, 3, 3, 1)
    assert read(manifest)["id"].tolist() == list(range(17))
    assert freeze(tmp_path / "in/a.parquet", tmp_path / "out", name="one").group_rows == (10,)
    relative = os.path.relpath(tmp_path / "in")
    assert freeze(relative, f"file://{tmp_path}/out") == manifest


def test_the_digest_of_files_is_that_of_their_content(tmp_path):
    for folder in ("one", "two"):
        write(tmp_path / folder / "a.parquet", {"y": np.zeros(1000, np.int64), "s": ["a", "b"] * 500})
    first = freeze(tmp_path / "one", tmp_path / "out")
    stored = (tmp_path / "out/train/manifest.json").stat()
    assert freeze(tmp_path / "one", tmp_path / "out") == first
    assert (tmp_path / "out/train/manifest.json").stat() == stored
    assert freeze(tmp_path / "two", tmp_path / "other").digest == first.digest
    # A changed label inside the range of the others, in a file of the same size.
    write(tmp_path / "two/a.parquet", {"y": np.zeros(1000, np.int64), "s": ["b", "a"] * 500})
    assert os.path.getsize(tmp_path / "two/a.parquet") == os.path.getsize(tmp_path / "one/a.parquet")
    assert freeze(tmp_path / "two", tmp_path / "other").digest != first.digest


def test_files_that_did_not_change_are_not_read_again(tmp_path, monkeypatch):
    write(tmp_path / "in/a.parquet", {"y": [1, 2]})
    first = freeze(tmp_path / "in", tmp_path / "out")

    def fail(*_):
        raise AssertionError("read again")

    monkeypatch.setattr("elastic_spark.driver.freeze.hashlib.file_digest", fail)
    assert freeze(tmp_path / "in", tmp_path / "out") == first


def test_nulls_in_files_are_counted_and_filled(tmp_path):
    write(tmp_path / "in/a.parquet", {"y": [1.5, None, 3.0], "s": ["a", None, None]})
    write(tmp_path / "in/b.parquet", {"y": [None, 2.0], "s": ["c", "a"]})
    with pytest.raises(DataError, match=r"column 'y' .* has 2 nulls: .*nulls=\{'y': value\}"):
        freeze(tmp_path / "in", tmp_path / "out")
    with pytest.raises(DataError, match=r"column 's' .* has 2 nulls"):
        freeze(tmp_path / "in", tmp_path / "out", nulls={"y": 0})
    manifest = freeze(tmp_path / "in", tmp_path / "out", nulls={"y": 0.5, "s": "b"})
    data = read(manifest)
    assert data["y"].tolist() == [1.5, 0.5, 3.0, 0.5, 2.0]
    assert manifest.column("s").vocabulary == ("a", "b", "c")
    assert data["s"].tolist() == [0, 1, 1, 2, 0]


def test_nulls_are_counted_where_the_file_does_not(tmp_path):
    pq.write_table(pa.table({"y": [1.5, None, 3.0]}), tmp_path / "a.parquet", write_statistics=False)
    with pytest.raises(DataError, match=r"column 'y' .* has 1 nulls"):
        freeze(tmp_path / "a.parquet", tmp_path / "out")


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        ({"z": 1}, "no column 'z'"),
        ({"y": "a"}, "a number is needed"),
        ({"s": 1}, "a string is needed"),
        ({"l": 1}, "holds lists"),
        ({"y": [1]}, "a number is needed"),
    ],
)
def test_senseless_fills_are_refused(tmp_path, fill, message):
    write(tmp_path / "a.parquet", {"y": [1.5], "s": ["a"], "l": [[1, 2]]})
    with pytest.raises(ConfigError, match=message):
        freeze(tmp_path / "a.parquet", tmp_path / "out", nulls=fill)


def test_files_that_do_not_fit_together_are_named(tmp_path):
    write(tmp_path / "in/a.parquet", {"y": [1], "x": [1]})
    write(tmp_path / "in/b.parquet", {"y": [1.5], "x": [2]})
    with pytest.raises(DataError, match=r"'y' is int64 in .*a.parquet, and double in .*b.parquet"):
        freeze(tmp_path / "in", tmp_path / "out")
    assert freeze(tmp_path / "in", tmp_path / "out", columns=["x"]).rows == 2
    write(tmp_path / "in/b.parquet", {"x": [2]})
    with pytest.raises(DataError, match=r"'y' is missing in .*b.parquet"):
        freeze(tmp_path / "in", tmp_path / "out")


def test_ragged_lists_in_files_are_named(tmp_path):
    write(tmp_path / "in/a.parquet", {"l": [[1, 2], [3, 4]]})
    write(tmp_path / "in/b.parquet", {"l": [[1, 2, 3]]})
    with pytest.raises(DataError, match=r"column 'l' .* has lists of 2 to 3 items"):
        freeze(tmp_path / "in", tmp_path / "out")


def test_no_files_no_rows_and_no_parquet_are_named(tmp_path):
    for nothing in ("", "s3://", "file:///"):
        with pytest.raises(DataError, match="names no Parquet files"):
            freeze(nothing, tmp_path / "out")
    for other in (None, 3, [1]):
        with pytest.raises(DataError, match="neither a Spark DataFrame nor"):
            freeze(other, tmp_path / "out")
    for missing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(DataError, match="no Parquet files at"):
            freeze(missing, tmp_path / "out")
    write(tmp_path / "in/a.parquet", {"y": pa.array([], pa.int64())})
    with pytest.raises(DataError, match="no rows"):
        freeze(tmp_path / "in", tmp_path / "out")
    (tmp_path / "in/b.parquet").write_text("this is text")
    with pytest.raises(DataError, match=r"b\.parquet cannot be read as Parquet"):
        freeze(tmp_path / "in", tmp_path / "out")


def test_types_that_become_no_tensor_are_named(tmp_path):
    write(tmp_path / "a.parquet", {"b": [b"x"], "y": [1], "t": [{"a": 1}]})
    with pytest.raises(DataError, match="column 'b' has type binary"):
        freeze(tmp_path / "a.parquet", tmp_path / "out")
    with pytest.raises(DataError, match=r"column 't' has type struct<a: int64>"):
        freeze(tmp_path / "a.parquet", tmp_path / "out", columns=["y", "t"])
    assert freeze(tmp_path / "a.parquet", tmp_path / "out", columns=["y"]).rows == 1


def test_remote_files_and_manifests_go_through_fsspec(tmp_path):
    import fsspec

    write(tmp_path / "a.parquet", {"y": range(7), "l": [[1, 2]] * 7})
    memory = fsspec.filesystem("memory")
    memory.pipe("/freeze-test/in/a.parquet", (tmp_path / "a.parquet").read_bytes())
    manifest = freeze("memory://freeze-test/in", "memory://freeze-test/out")
    assert load_manifest("memory://freeze-test/out/train") == manifest
    assert read(manifest)["y"].tolist() == list(range(7))
    assert freeze("memory://freeze-test/in", "memory://freeze-test/out") == manifest


def test_a_torn_manifest_is_replaced_and_a_missing_one_is_none(tmp_path):
    write(tmp_path / "a.parquet", {"y": range(7)})
    assert load_manifest(str(tmp_path / "out/train")) is None
    first = freeze(tmp_path / "a.parquet", tmp_path / "out")
    stored = tmp_path / "out/train/manifest.json"
    stored.write_text(stored.read_text()[:-9])
    with pytest.raises(DataError, match="not a manifest"):
        load_manifest(str(tmp_path / "out/train"))
    assert freeze(tmp_path / "a.parquet", tmp_path / "out") == first
    assert load_manifest(str(tmp_path / "out/train")) == first
