"""The reader against the plan, on real Parquet files: every row, the right values, under any ownership."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import gc
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic_spark.core.lanes import LanePlan, assign_lanes, choose_lanes
from elastic_spark.core.manifest import Column, Manifest, RowGroup, SourceFile
from elastic_spark.errors import DataError
from elastic_spark.worker import rows as rows_module
from elastic_spark.worker import stalls
from elastic_spark.worker.data import SPARE_ROWS, Batch, LaneReader
from elastic_spark.worker.rows import RowStore, record_type

COLUMNS = [Column("x", "float32", 3), Column("y", "int64"), Column("flag", "bool"), Column("small", "int16")]


def table(first, rows):
    """Rows whose every value follows from the row id."""
    ids = np.arange(first, first + rows)
    x = pa.array((ids[:, None] * 3 + np.arange(3)).astype(np.float32).reshape(-1))
    return pa.table(
        {
            "y": pa.array(ids, type=pa.int64()),
            "unused": pa.array(ids.astype(str)),
            "flag": pa.array(ids % 3 == 0),
            "small": pa.array((ids % 1000).astype(np.int16)),
            "x": pa.FixedSizeListArray.from_arrays(x, 3),
        }
    )


def make(folder, files, columns=COLUMNS, content="1"):
    """Writes one Parquet file for each list of row group sizes in ``files``."""
    groups, first, sources = [], 0, []
    for number, sizes in enumerate(files):
        path = str(folder / f"part-{number:04}.parquet")
        with pq.ParquetWriter(path, table(0, 0).schema) as writer:
            for index, rows in enumerate(sizes):
                writer.write_table(table(first, rows), row_group_size=max(1, rows))
                groups.append(RowGroup(path, index, rows, rows * 8))
                first += rows
        sources.append(SourceFile(path, "", f"{folder}-{content}-{number}"))
    return Manifest.of("train", str(folder), groups, columns, sources)


def plan_of(manifest, world=3, batch=16, seed=1, lanes=None):
    return LanePlan(manifest.group_rows, lanes or choose_lanes(world, batch, manifest.rows), batch, seed)


def check(batch):
    """The values of a batch are those of its row ids."""
    ids = batch.row_ids
    assert batch.rows == len(ids)
    if batch.rows == 0:
        assert batch.weight == 0.0
        assert {len(tensor) for tensor in batch.values()} == {SPARE_ROWS}
        ids = batch["y"]
    assert batch["y"].dtype == torch.int64
    assert torch.equal(batch["y"], ids)
    assert torch.equal(batch["x"], (ids[:, None] * 3 + torch.arange(3)).to(torch.float32))
    assert torch.equal(batch["flag"], ids % 3 == 0)
    assert torch.equal(batch["small"], (ids % 1000).to(torch.int16))
    assert len(batch["y"]) == (batch.rows or SPARE_ROWS)


def read_epoch(manifest, plan, owned, epoch, cache_dir=None, offset=0):
    """The batches of all workers: [worker][step]."""
    out = []
    for lanes in owned:
        reader = LaneReader(manifest, plan, lanes, len(owned), cache_dir=cache_dir)
        out.append(list(reader.batches(epoch, offset)))
        reader.close()
    return out


SHAPES = {
    "tiny": [[1]],
    "one-row files": [[1]] * 23,
    "partitions of 100, 101 and 37": [[100], [101], [37]],
    "one huge row group": [[3000]],
    "empty row groups": [[0, 5], [0], [7, 0, 30]],
    "skewed": [[1, 1, 200], [1], [2, 90]],
}


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.replace(" ", "_"))
def test_every_row_comes_once_with_its_values(tmp_path, shape, cached):
    manifest = make(tmp_path, SHAPES[shape])
    for world, batch in ((3, 101),) if manifest.rows > 500 else ((1, 10), (3, 10), (3, 101), (9, 4)):
        plan = plan_of(manifest, world, batch)
        workers = [f"w{i}" for i in range(world)]
        owned = assign_lanes(plan.lanes, workers, {})
        parts = read_epoch(manifest, plan, owned.values(), 1, str(tmp_path / "cache") if cached else None)
        assert {len(part) for part in parts} == {plan.steps_per_epoch}
        seen = []
        for offset, step in enumerate(zip(*parts, strict=True)):
            for rank, part in enumerate(step):
                check(part)
                expected = [plan.row_ids(1, lane, offset) for lane in owned[workers[rank]]]
                assert part.row_ids.tolist() == [int(id_) for ids in expected for id_ in ids]
                assert (part.epoch, part.offset, part.global_rows) == (1, offset, plan.rows_in_step(offset))
                seen += part.row_ids.tolist()
            assert sum(part.row_hash for part in step) % 2**64 == plan.row_hash(1, offset)
            assert sum(part.weight for part in step) == pytest.approx(world)
        assert sorted(seen) == list(range(manifest.rows))


def test_the_gradient_of_the_mean_is_that_of_the_global_batch_at_any_world(tmp_path):
    """Mean loss times weight, averaged over the workers: the last step has workers with no row."""
    manifest = make(tmp_path, [[53], [20]])
    plan = plan_of(manifest, 9, 24)

    def gradients(world):
        owned = assign_lanes(plan.lanes, [f"w{i}" for i in range(world)], {})
        parts = read_epoch(manifest, plan, owned.values(), 0)
        out = []
        for step in zip(*parts, strict=True):
            total = torch.zeros(3, dtype=torch.float64)
            for batch in step:
                w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
                loss = ((batch["x"].double() @ w - batch["y"]) ** 2).mean() * batch.weight
                total += torch.autograd.grad(loss, w)[0] / world
            out.append(total)
        return torch.stack(out)

    alone = gradients(1)
    for world in (2, 5, 9):
        torch.testing.assert_close(gradients(world), alone, rtol=1e-9, atol=1e-9)


def test_churn_counts_every_row_once(tmp_path):
    """The counting model on real readers: another world every few steps, a roll-back, lost and joining workers."""
    manifest = make(tmp_path, [[40, 3], [61], [1], [200]])
    plan = plan_of(manifest, 5, 16)
    counts = torch.zeros(manifest.rows)
    saved, owned, done = (0, counts.clone()), {}, 0
    worlds = [["a", "b", "c"], ["a", "c"], ["c"], ["d", "e"], ["d", "e", "f", "g", "h"], ["h"]]
    rolled_back = False
    for turn in range(100):
        if done == 2 * plan.steps_per_epoch:
            break
        if turn == 4:
            done, counts = saved[0], saved[1].clone()
            rolled_back = True
        workers = worlds[turn % len(worlds)]
        owned = assign_lanes(plan.lanes, workers, owned)
        epoch, offset = divmod(done, plan.steps_per_epoch)
        readers = [LaneReader(manifest, plan, owned[worker], len(workers)) for worker in workers]
        steps = zip(*(reader.batches(epoch, offset) for reader in readers), strict=True)
        for _, step in zip(range(4), steps, strict=False):
            for batch in step:
                counts[batch.row_ids] += 1
            done += 1
        for reader in readers:
            reader.close()
        if turn == 2:
            saved = (done, counts.clone())
    assert rolled_back
    assert counts.tolist() == [2.0] * manifest.rows


def test_what_lies_ready_is_not_consumed(tmp_path):
    """BR-34: a reader that prefetched is dropped after five batches; others go on from the cursor."""
    manifest = make(tmp_path, [[64]])
    plan = plan_of(manifest, 3, 4)
    with_prefetch = LaneReader(manifest, plan, range(plan.lanes), 1, prefetch=8)
    iterator = with_prefetch.batches(0)
    first = [next(iterator).row_ids.tolist() for _ in range(5)]
    for world in (1, 2, 3):
        owned = assign_lanes(plan.lanes, [f"w{i}" for i in range(world)], {})
        rest = [
            batch.row_ids.tolist() for part in read_epoch(manifest, plan, owned.values(), 0, offset=5) for batch in part
        ]
        assert sorted(id_ for ids in first + rest for id_ in ids) == list(range(64))
    with_prefetch.close()


def test_a_worker_without_lanes_takes_part_with_weight_zero(tmp_path):
    manifest = make(tmp_path, [[10], [2]])
    plan = plan_of(manifest, 1, 5)
    reader = LaneReader(manifest, plan, (), 3)
    batches = list(reader.batches(0))
    assert len(batches) == plan.steps_per_epoch
    for batch in batches:
        check(batch)
        batch["x"].zero_()  # one's own: the next one is not touched
    assert reader.batches(0) is not None
    reader.close()


def test_an_epoch_that_is_over_yields_nothing(tmp_path):
    manifest = make(tmp_path, [[10]])
    plan = plan_of(manifest, 1, 5)
    reader = LaneReader(manifest, plan, range(plan.lanes), 1)
    assert list(reader.batches(0, plan.steps_per_epoch)) == []
    reader.close()


def test_a_batch_is_a_mapping_that_moves_as_one(tmp_path):
    manifest = make(tmp_path, [[10]])
    plan = plan_of(manifest, 1, 5)
    reader = LaneReader(manifest, plan, range(plan.lanes), 1)
    batch = next(iter(reader.batches(0)))
    assert list(batch) == ["x", "y", "flag", "small"]
    assert len(batch) == 4
    assert "rows=5 of 5" in repr(batch)
    with pytest.raises(KeyError, match="no column 'z'"):
        batch["z"]
    moved = batch.to("cpu")
    check(moved)
    assert isinstance(moved, Batch)
    assert (moved.weight, moved.epoch, moved.offset) == (batch.weight, 0, 0)
    reader.close()


def test_batches_outlive_their_reader(tmp_path):
    manifest = make(tmp_path, [[300]])
    plan = plan_of(manifest, 1, 32)
    reader = LaneReader(manifest, plan, range(plan.lanes), 1, cache_dir=str(tmp_path / "cache"))
    batches = list(reader.batches(0))
    reader.close()
    del reader
    gc.collect()
    for batch in batches:
        check(batch)


def test_memory_is_used_again_but_never_while_it_shows(tmp_path, monkeypatch):
    """A hundred batches, of which each seventh is kept, as a tensor of it or as its row ids."""
    monkeypatch.setattr("elastic_spark.worker.data.BLOCK_ROWS", 32)
    manifest = make(tmp_path, [[1600]])
    plan = plan_of(manifest, 1, 16)
    reader = LaneReader(manifest, plan, range(plan.lanes), 1)
    kept, places = [], set()
    for batch in reader.batches(0):
        check(batch)
        places.add(batch["x"].data_ptr())
        if batch.offset % 7 == 0:
            kept.append(
                (batch["y"], batch.row_ids.clone()) if batch.offset % 2 else (batch["y"].clone(), batch.row_ids)
            )
    assert len(places) < 80
    for values, ids in kept:
        assert torch.equal(values, ids)
    reader.close()


def reader_threads():
    return [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith(("elastic-spark-reader", "elastic-spark-fill"))
    ]


def test_threads_end_with_the_iterator_and_with_the_reader(tmp_path):
    manifest = make(tmp_path, [[3000]] * 4)
    plan = plan_of(manifest, 1, 8)
    reader = LaneReader(manifest, plan, range(plan.lanes), 1)
    iterator = reader.batches(0)
    next(iterator)
    assert reader_threads()
    del iterator
    assert not reader_threads()
    first = reader.batches(0)
    next(first)
    second = reader.batches(0, 3)
    assert list(first) == []  # a new iterator ends the one before
    assert next(second).offset == 3
    reader.close()
    assert list(second) == []
    assert not reader_threads()
    with pytest.raises(DataError, match="is closed"):
        reader.batches(0)
    reader.close()
    shared = LaneReader(manifest, plan, range(plan.lanes), 1, cache_dir=str(tmp_path / "cache"))
    next(shared.batches(0))
    del shared
    gc.collect()
    assert not reader_threads()


# ---- faults


def test_a_file_that_is_gone_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "RETRY_WAITS_S", (0.01, 0.01))
    manifest = make(tmp_path, [[10], [10, 5]])
    plan = plan_of(manifest, 1, 5)
    os.unlink(manifest.row_groups[2].path)
    reader = LaneReader(manifest, plan, range(plan.lanes), 1)
    with pytest.raises(DataError, match=r"row group [01] of .*part-0001.parquet cannot be read after 3 tries"):
        list(reader.batches(0))
    reader.close()


def test_a_read_that_fails_once_is_tried_again(tmp_path, monkeypatch):
    """The file comes back while the reader waits between two tries."""
    manifest = make(tmp_path, [[10]])
    path = manifest.row_groups[0].path
    plan = plan_of(manifest, 1, 5)
    os.rename(path, path + ".away")
    tried = threading.Event()
    read = rows_module.read_records

    def watched(*args):
        try:
            yield from read(*args)
        except OSError:
            os.rename(path + ".away", path)
            tried.set()
            raise

    monkeypatch.setattr(rows_module, "read_records", watched)
    reader = LaneReader(manifest, plan, range(plan.lanes), 1)
    for batch in reader.batches(0):
        check(batch)
    assert tried.is_set()
    reader.close()


def test_a_read_that_never_returns_is_told(tmp_path, monkeypatch):
    """Storage that hangs, as a pipe does that nobody writes to."""
    monkeypatch.setattr(rows_module, "RETRY_WAITS_S", ())
    manifest = make(tmp_path, [[10]])
    path = manifest.row_groups[0].path
    os.unlink(path)
    os.mkfifo(path)
    reader = LaneReader(manifest, plan_of(manifest, 1, 5), [0], 1)

    def consume():
        with contextlib.suppress(DataError):
            list(reader.batches(0))

    assert stalls.stalled() == ("", 0.0)
    consumer = threading.Thread(target=consume)
    consumer.start()
    deadline = time.monotonic() + 20
    while stalls.stalled()[1] < 1.0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stalls.stalled()[0] == "the data"
    stalls.moved()
    assert stalls.stalled()[1] < 1.0
    open(path, "wb").close()
    consumer.join(20)
    assert stalls.stalled() == ("", 0.0)
    reader.close()


def test_the_longest_of_several_waits_is_told():
    entered, leave = threading.Event(), threading.Event()

    def wait():
        with stalls.waiting_for("other data"):
            entered.set()
            leave.wait(20)

    with stalls.waiting_for("the data"):
        other = threading.Thread(target=wait)
        other.start()
        entered.wait(20)
        assert stalls.stalled()[0] == "the data"
    assert stalls.stalled()[0] == "other data"
    leave.set()
    other.join(20)
    assert stalls.stalled() == ("", 0.0)


def test_a_torn_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "RETRY_WAITS_S", ())
    manifest = make(tmp_path, [[1000]])
    path = manifest.row_groups[0].path
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) // 2)
    reader = LaneReader(manifest, plan_of(manifest), [0], 1)
    with pytest.raises(DataError, match=r"row group 0 of .*part-0000.parquet"):
        list(reader.batches(0))
    reader.close()


def test_a_file_that_changed_is_refused(tmp_path):
    manifest = make(tmp_path, [[10], [20]])
    for rows in (19, 21):
        pq.write_table(table(0, rows), manifest.row_groups[1].path)
        reader = LaneReader(manifest, plan_of(manifest), [0, 1], 1)
        with pytest.raises(DataError, match=f"{rows} rows, where 20 were frozen"):
            list(reader.batches(0))
        reader.close()


def test_a_plan_of_other_data_is_refused(tmp_path):
    manifest = make(tmp_path, [[10]])
    with pytest.raises(DataError, match="other data"):
        LaneReader(manifest, LanePlan((11,), 1, 4, 0), [0], 1)


def test_a_cache_directory_that_cannot_be_used_is_named(tmp_path):
    manifest = make(tmp_path, [[10]])
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cache directory .*file cannot be used"):
        LaneReader(manifest, plan_of(manifest), [0], 1, cache_dir=str(tmp_path / "file"))


# ---- the cache


def test_the_cache_serves_later_readers_without_the_files(tmp_path):
    manifest = make(tmp_path, [[100], [50, 60]])
    plan = plan_of(manifest, 2, 16)
    cache = str(tmp_path / "cache")
    reader = LaneReader(manifest, plan, [0], 2, cache_dir=cache)
    next(reader.batches(0))
    limit = time.monotonic() + 30  # the rest of the data set is brought in the background
    while RowStore(manifest, cache).missing(range(3)) and time.monotonic() < limit:
        reader_threads()[0].join(1) if reader_threads() else None
    reader.close()
    for group in manifest.row_groups:
        if os.path.exists(group.path):
            os.unlink(group.path)
    for part in read_epoch(manifest, plan, [[lane] for lane in range(plan.lanes)], 3, cache):
        for batch in part:
            check(batch)


def test_other_content_has_a_cache_of_its_own(tmp_path):
    cache = str(tmp_path / "cache")
    for content in ("1", "2"):
        (tmp_path / content).mkdir()
        manifest = make(tmp_path / content, [[30]], content=content)
        read_epoch(manifest, plan_of(manifest), [[0]], 0, cache)
    assert len(os.listdir(cache)) == 2


def test_processes_share_a_cache(tmp_path):
    manifest = make(tmp_path, [[500] * 8])
    code = f"""
import sys
from elastic_spark.core.manifest import Manifest
from elastic_spark.worker.rows import RowStore
store = RowStore(Manifest.from_json({manifest.to_json()!r}), {str(tmp_path / "cache")!r})
print("ready", flush=True)
sys.stdin.readline()
for group in range(8):
    store.load(group)
"""
    pipe = subprocess.PIPE
    children = [subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.communicate("go\n", timeout=60)
        assert child.returncode == 0
    store = RowStore(manifest, str(tmp_path / "cache"))
    assert store.missing(range(8)) == []
    assert store.records.view(store.dtype)["y"][:, 0].tolist() == list(range(4000))
    store.close()


def test_the_cache_makes_room_and_spares_what_is_in_use(tmp_path):
    cache = tmp_path / "cache"
    stores, files = [], []
    limit = 0
    for content in ("1", "2", "3"):
        (tmp_path / content).mkdir()
        manifest = make(tmp_path / content, [[30_000]], content=content)
        size = 4096 + 30_000 * record_type(manifest.columns).itemsize
        limit = limit or size * 9 // 4
        store = RowStore(manifest, str(cache), limit)
        assert store.shared
        store.load(0)
        files.append(next(iter(cache.glob(f"{manifest.digest[:40]}*"))))
        os.utime(files[-1], (len(files), len(files)))
        if content == "1":
            stores.append(store)  # in use
        else:
            store.close()
            del store
    gc.collect()
    assert [file.exists() for file in files] == [True, False, True]
    assert stores[0].records.view(stores[0].dtype)["y"][:, 0].tolist() == list(range(30_000))


def test_processes_that_come_at_once_do_not_promise_the_same_space_twice(tmp_path):
    """Six processes, each with a data set of its own, in a cache that holds three; then all fill what they got."""
    code = """
import sys
from elastic_spark.core.manifest import Manifest
from elastic_spark.worker.rows import RowStore
manifest, cache, limit = Manifest.from_json(sys.stdin.readline()), sys.argv[1], int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
store = RowStore(manifest, cache, limit)
print(int(store.shared), flush=True)
sys.stdin.readline()
store.load(0)
"""
    manifests, children, pipe = [], [], subprocess.PIPE
    for number in range(6):
        (tmp_path / str(number)).mkdir()
        manifests.append(make(tmp_path / str(number), [[5000]], content=str(number)))
    limit = 3 * (4096 + 5000 * record_type(manifests[0].columns).itemsize)
    for manifest in manifests:
        command = [sys.executable, "-c", code, str(tmp_path / "cache"), str(limit)]
        children.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1))
        children[-1].stdin.write(manifest.to_json() + "\n")
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("open\n")
    assert sum(int(child.stdout.readline()) for child in children) == 3
    for child in children:
        child.communicate("load\n", timeout=60)
        assert child.returncode == 0
    files = list((tmp_path / "cache").iterdir())
    assert len(files) == 3
    assert sum(file.stat().st_size for file in files) <= limit
    for number, manifest in enumerate(manifests):  # nobody is left: there is room for each
        store = RowStore(manifest, str(tmp_path / "cache"), limit)
        assert store.shared, number
        store.close()
        del store
        gc.collect()


def test_a_stopped_process_that_holds_the_lock_costs_the_sharing_and_not_the_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rows_module, "LOCK_LIMIT_S", 0.2)
    manifest, cache = make(tmp_path, [[500] * 2]), tmp_path / "cache"
    cache.mkdir()
    code = f"""
import os, signal
from pathlib import Path
from elastic_spark.worker.rows import _locked
with _locked(Path({str(cache)!r})):
    print("locked", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        store = RowStore(manifest, str(cache))
        assert not store.shared
        store.load(1)
        assert store.records.view(store.dtype)["y"][500:, 0].tolist() == list(range(500, 1000))
        assert f"has held the lock of {cache} for 0.2 s" in capsys.readouterr().out
        store.close()
    finally:
        holder.kill()
        holder.wait()
    store = RowStore(manifest, str(cache))
    assert store.shared
    store.close()


def test_rows_in_memory_stay_for_the_next_reader(tmp_path):
    """A resize closes a reader and opens another: what it read needs not be read again."""
    manifest = make(tmp_path, [[100], [50, 60]])
    plan = plan_of(manifest, 2, 16)
    read_epoch(manifest, plan, [range(plan.lanes)], 0)
    for group in manifest.row_groups:
        if os.path.exists(group.path):
            os.unlink(group.path)
    for part in read_epoch(manifest, plan, [[0, 5], [2], [3]], 1):
        for batch in part:
            check(batch)


def test_a_reader_that_another_thread_iterates_can_be_closed(tmp_path):
    """The consumer is inside of ``next``, which waits for a row group that cannot be read."""
    manifest = make(tmp_path, [[100]])
    plan = plan_of(manifest, 1, 16)
    os.unlink(manifest.row_groups[0].path)
    waits, seen = threading.Event(), []

    def consume():
        waits.set()
        with contextlib.suppress(DataError):  # closed before it began
            seen.extend(reader.batches(0))

    reader = LaneReader(manifest, plan, [0], 1)
    consumer = threading.Thread(target=consume)
    consumer.start()
    waits.wait(30)
    reader.close()
    consumer.join(30)
    assert not consumer.is_alive()
    assert seen == []


@pytest.mark.parametrize("directory", [True, False])
def test_data_larger_than_the_cache_is_read_all_the_same(tmp_path, monkeypatch, directory):
    """Each worker then keeps its own lanes only, and lets go of the last epoch's row groups."""
    manifest = make(tmp_path, [[4000] * 8])
    plan = plan_of(manifest, 4, 64, lanes=8)
    cache = str(tmp_path / "cache") if directory else None
    limit = 32_000 * record_type(manifest.columns).itemsize * 5 // 8
    monkeypatch.setattr(rows_module, "KEEP_BYTES", limit)
    reader = LaneReader(manifest, plan, [0, 5], 4, cache_dir=cache, cache_bytes=limit if directory else None)
    for epoch in range(4):
        for batch in reader.batches(epoch):
            check(batch)
    reader.close()
    if directory:
        assert os.listdir(cache) == []
        greedy = LaneReader(manifest, plan, range(8), 1, cache_dir=cache, cache_bytes=limit)
        with pytest.raises(DataError, match="the cache may hold"):
            list(greedy.batches(0))


# ---- types


def test_every_type_becomes_the_promised_tensor(tmp_path):
    stamp = datetime.datetime(2026, 11, 29, 20, 15, 1, 5, tzinfo=datetime.UTC)
    columns = {
        "u8": (pa.array([1, 255], pa.uint8()), Column("u8", "uint8"), [1, 255]),
        "u16": (pa.array([1, 65535], pa.uint16()), Column("u16", "int32"), [1, 65535]),
        "u64": (pa.array([1, 2**40], pa.uint64()), Column("u64", "int64"), [1, 2**40]),
        "i8": (pa.array([-1, 2], pa.int8()), Column("i8", "int8"), [-1, 2]),
        "f16": (pa.array(np.array([0.5, 2], np.float16)), Column("f16", "float16"), [0.5, 2]),
        "f64": (pa.array([0.1, None]), Column("f64", "float64", fill=7.0), [0.1, 7]),
        "dec": (
            pa.array([decimal.Decimal("1.25"), decimal.Decimal("-2")]),
            Column("dec", "float64", source="decimal"),
            [1.25, -2],
        ),
        "day": (pa.array([datetime.date(1970, 1, 2), None]), Column("day", "int32", source="date", fill=0), [1, 0]),
        "ns": (
            pa.array([stamp, stamp], pa.timestamp("ns", "UTC")),
            Column("ns", "int64", source="timestamp"),
            [int(stamp.timestamp()) * 10**6 + 5] * 2,
        ),
        "s": (pa.array(["b", None]), Column("s", "int32", source="string", vocabulary=("a", "b"), fill="a"), [1, 0]),
        "ds": (
            pa.array(["b", "a"]).dictionary_encode(),
            Column("ds", "int32", source="string", vocabulary=("a", "b")),
            [1, 0],
        ),
        "l": (pa.array([[1, 2], [3, 4]], pa.list_(pa.int32())), Column("l", "int32", 2), [[1, 2], [3, 4]]),
        "ll": (pa.array([[True], [False]], pa.large_list(pa.bool_())), Column("ll", "bool", 1), [[True], [False]]),
    }
    path = str(tmp_path / "types.parquet")
    pq.write_table(pa.table({name: array for name, (array, _, _) in columns.items()}), path)
    manifest = Manifest.of(
        "types", path, [RowGroup(f"file://{path}", 0, 2, 0)], [column for _, column, _ in columns.values()]
    )
    plan = LanePlan(manifest.group_rows, 1, 2, 0, shuffle=False)
    reader = LaneReader(manifest, plan, [0], 1)
    batch = next(reader.batches(0))
    for name, (_, column, expected) in columns.items():
        assert batch[name].tolist() == expected, name
        assert batch[name].dtype == getattr(torch, column.dtype)
    reader.close()


@pytest.mark.parametrize(
    ("array", "column", "message"),
    [
        (pa.array([1, None, None]), Column("c", "int64"), r"'c' has 2 nulls"),
        (pa.array([[1.0], [2.0, 3.0], [4.0]]), Column("c", "float64", 1), r"'c' has lists of 1 to 2 items, not of 1"),
        (pa.array([[1.0], None, [4.0]]), Column("c", "float64", 1), r"'c' has 1 nulls in place of lists"),
        (pa.array([[1.0], [None], [4.0]]), Column("c", "float64", 1), r"'c' has 1 nulls inside of lists"),
        (pa.array(["a", "x", "y"]), Column("c", "int32", source="string", vocabulary=("a",)), r"has 2 values .*'x'"),
        (pa.array([2**63], pa.uint64()), Column("c", "int64"), r"'c': .*out of bounds|'c': .*not in range"),
    ],
)  # fmt: skip
def test_values_that_are_not_as_promised_are_refused(tmp_path, array, column, message):
    path = str(tmp_path / "bad.parquet")
    pq.write_table(pa.table({"c": array}), path)
    manifest = Manifest.of("bad", path, [RowGroup(path, 0, len(array), 0)], [column])
    reader = LaneReader(manifest, LanePlan(manifest.group_rows, 1, 2, 0), [0], 1)
    with pytest.raises(DataError, match=message) as caught:
        list(reader.batches(0))
    assert "row group 0 of" in str(caught.value)
    reader.close()


def test_remote_files_are_read_through_fsspec(tmp_path):
    import fsspec

    manifest = make(tmp_path, [[40], [7]])
    memory = fsspec.filesystem("memory")
    groups = []
    for group in manifest.row_groups:
        target = f"/reader-test/{os.path.basename(group.path)}"
        with open(group.path, "rb") as source:
            memory.pipe(target, source.read())
        groups.append(RowGroup(f"memory:/{target}", group.index, group.rows, group.bytes))
    remote = Manifest.of("train", "memory://reader-test", groups, COLUMNS)
    for part in read_epoch(remote, plan_of(remote), [[0, 1], [2]], 0):
        for batch in part:
            check(batch)


def test_the_reader_imports_neither_pandas_nor_spark_nor_mlflow(tmp_path):
    columns = [*COLUMNS, Column("unused", "int32", source="string", vocabulary=tuple(map(str, range(40))))]
    manifest = make(tmp_path, [[40]], columns)
    code = f"""
import sys
from elastic_spark.core.manifest import Manifest
from elastic_spark.core.lanes import LanePlan
from elastic_spark.worker.data import LaneReader
manifest = Manifest.from_json({manifest.to_json()!r})
reader = LaneReader(manifest, LanePlan(manifest.group_rows, 4, 8, 0), range(4), 1)
assert sum(batch.rows for batch in reader.batches(0)) == 40
bad = {{"pandas", "pyspark", "mlflow", "pydantic", "click"}} & set(sys.modules)
assert not bad, bad
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
