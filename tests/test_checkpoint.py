"""The store does what it says: round trips on every kind of storage, protocol, retention, export, background writes."""

import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid

import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elastic_spark.checkpoint import BackgroundWriter, CheckpointStore, WrittenPart, commands, shares, storage
from elastic_spark.errors import CheckpointError, CheckpointInvalid, ConfigError, StorageFailed

MEMORY_DISK = "/dev/shm" if os.path.isdir("/dev/shm") else None
DTYPES = sorted({item for item in vars(torch).values() if isinstance(item, torch.dtype)}, key=str)
STORABLE = [item for item in DTYPES if not str(item).startswith(("torch.qint", "torch.quint"))]


@pytest.fixture
def folder():
    """In memory where there is such a disk: the suite need not wait for a real one at every fsync."""
    path = tempfile.mkdtemp(dir=MEMORY_DISK)
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["path", "file://", "local://", "memory://"])
def store(request, folder):
    if request.param == "memory://":
        return CheckpointStore(f"memory://{uuid.uuid4().hex}/ckpt")
    return CheckpointStore(f"{request.param.replace('path', '')}{folder}/ckpt")


def bits(tensor):
    """dtype, shape and bytes: equality of tensors of any dtype, NaN included."""
    return tensor.dtype, tuple(tensor.shape), bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def same(left, right):
    return list(left) == list(right) and all(bits(left[name]) == bits(right[name]) for name in left)


def save(store, step, tensors=None, meta=None, token="t", **fields):
    tensors = {"model/w": torch.full((3,), float(step))} if tensors is None else tensors
    part = store.write_part(step, tensors, meta or {}, token=token)
    return store.commit(step, token, [part], fields=fields)


# Round trips


def test_round_trip_and_what_is_said_of_it(store):
    tensors = {"model/0.weight": torch.randn(5, 3), "optimizer/state/0/exp_avg": torch.randn(5, 3)}
    meta = {"epoch": 3, "best": float("inf"), "nested": {"list": [1, None, "ü"]}}
    part = store.write_part(12, tensors, meta, token="a-1")
    assert WrittenPart.from_dict(json.loads(json.dumps(part.to_dict()))) == part
    checkpoint = store.commit(
        12, "a-1", [part], fields={"job_id": "j", "cursor": {"train": [3, 7]}, "created_unix": 5.5}
    )
    assert checkpoint.uri == f"{store.uri}/step-000000000012-a-1"
    assert (checkpoint.step, checkpoint.created_unix, checkpoint.job_id) == (12, 5.5, "j")
    assert checkpoint.fields["cursor"] == {"train": [3, 7]}
    again = CheckpointStore(store.uri)
    assert again.list() == [checkpoint] == [again.open(checkpoint.uri)]
    assert again.newest_valid() == (checkpoint, [])
    loaded, loaded_meta = again.load(checkpoint)
    assert same(loaded, tensors)
    assert loaded_meta == meta
    assert again.load_newest()[0] == checkpoint


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype(dtype):
    store = CheckpointStore(f"memory://{uuid.uuid4().hex}")
    raw = torch.randint(0, 256, (12 * dtype.itemsize,), dtype=torch.uint8)
    raw = raw % 2 if dtype is torch.bool else raw
    full, elements = raw.view(dtype).reshape(3, 4), raw.reshape(3, 4, dtype.itemsize)
    tensors = {"model/full": full, "model/0d": full[1, 2], "model/empty": full[:0], "model/odd": full[:, ::2].T}
    expected = [elements, elements[1, 2], elements[:0], elements[:, ::2].transpose(0, 1)]
    assert not tensors["model/odd"].is_contiguous()
    loaded, _ = store.load(save(store, 1, tensors))
    for (name, tensor), element_bytes in zip(loaded.items(), expected, strict=True):
        assert bits(tensor) == (dtype, tensors[name].shape, bytes(element_bytes.contiguous().numpy()))


def test_shared_tensors_are_stored_once_and_stay_shared(store):
    base = torch.randn(100, 100)
    tensors = {
        "model/head": base,
        "model/other": torch.ones(2),
        "model/tied": base.view(100, 100),
        "model/rows": base[3:5],
        "model/none": torch.empty(0, 4),
        "model/none2": torch.empty(0, 4),
    }
    checkpoint = save(store, 1, tensors)
    assert checkpoint.bytes < 100 * 100 * 4 * 1.2
    loaded, _ = store.load(checkpoint)
    assert same(loaded, tensors)
    assert loaded["model/tied"] is loaded["model/head"]
    assert loaded["model/rows"].untyped_storage().data_ptr() != loaded["model/head"].untyped_storage().data_ptr()
    store.verify(checkpoint)


def test_parameters_and_lazy_views_are_stored_by_value(store):
    tensors = {
        "model/parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "model/conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "model/negative": torch.tensor([1 + 2j]).conj().imag,
        "model/expanded": torch.tensor([7.0]).expand(3, 4),
    }
    loaded, _ = store.load(save(store, 1, tensors))
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor.detach())
        assert not loaded[name].requires_grad


def test_large_tensors_cross_chunks():
    store = CheckpointStore(f"memory://{uuid.uuid4().hex}")
    tensors = {
        f"model/{n}": torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (1, 65_535, 65_537, 9_000_001, 4 << 20)
    }
    tensors |= {f"model/small{n}": torch.full((16_000,), n) for n in range(60)}
    checkpoint = save(store, 1, tensors)
    store.verify(checkpoint)
    assert same(store.load(checkpoint)[0], tensors)


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 4), max_size=3)
tables = st.dictionaries(
    names, st.tuples(shapes, st.sampled_from([torch.float32, torch.int8, torch.complex128])), max_size=6
)


@settings(deadline=None)
@given(tables, st.dictionaries(names, st.none() | st.integers() | st.floats(allow_nan=False) | names, max_size=3))
def test_any_names_shapes_and_meta(table, meta):
    store = CheckpointStore("memory://any")
    token = uuid.uuid4().hex
    tensors = {name: torch.randn(shape).to(dtype) for name, (shape, dtype) in table.items()}
    checkpoint = store.commit(0, token, [store.write_part(0, tensors, meta, token=token)], fields={})
    loaded, loaded_meta = store.load(checkpoint)
    store.discard(0, token)
    assert same(loaded, tensors)
    assert loaded_meta == meta


def test_files_open_in_plain_safetensors(tmp_path):
    tensors = {"model/a": torch.randn(3), "model/b": torch.tensor(True), "model/c": torch.randn(2, 2).bfloat16()}
    checkpoint = save(CheckpointStore(str(tmp_path)), 1, tensors)
    loaded = safetensors.torch.load_file(f"{checkpoint.uri}/state.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_loaded_tensors_outlive_the_file(tmp_path):
    store = CheckpointStore(str(tmp_path))
    checkpoint = save(store, 1, {"model/w": torch.ones(100_000)})
    came = []
    loaded, _ = store.load(checkpoint, moved=lambda: came.append(1))
    assert came
    with open(f"{checkpoint.uri}/state.safetensors", "r+b") as file:
        file.write(bytes(checkpoint.files[0].bytes))
    assert loaded["model/w"].sum() == 100_000


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.eye(3).to_sparse(), "torch.sparse_coo"),
        (torch.empty(3, device="meta"), "meta device"),
        ([1.0], "not a tensor"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(store, tensor, why):
    with pytest.raises(CheckpointError, match=f"model/odd.*{why}"):
        store.write_part(1, {"model/odd": tensor}, {}, token="t")
    assert store.attempts() == []


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_is_refused():
    store = CheckpointStore("memory://quantized")
    with pytest.raises(CheckpointError, match="quantized"):
        store.write_part(1, {"q": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, {}, token="t")


def test_meta_that_is_no_json_is_refused(store):
    with pytest.raises(CheckpointError, match=r"meta must be JSON.*set"):
        store.write_part(1, {}, {"odd": {1}}, token="t")  # type: ignore[dict-item]


# Parts


def test_parts_are_written_apart_and_loaded_together(store):
    tensors = {f"model/{n}": torch.randn(n + 1) for n in range(11)}
    division = shares({name: tensor.nbytes for name, tensor in tensors.items()}, 3)
    written = [
        store.write_part(4, {name: tensors[name] for name in mine}, {"rank": rank}, token="p", part=rank, parts=3)
        for rank, mine in enumerate(division)
    ]
    checkpoint = store.commit(4, "p", written[::-1], fields={})
    loaded, meta = store.load(checkpoint)
    assert same({name: loaded[name] for name in tensors}, tensors)
    assert meta == {"rank": 0, "parts": {"1": {"rank": 1}, "2": {"rank": 2}}}
    store.verify(checkpoint)


@settings(deadline=None)
@given(st.dictionaries(names, st.integers(0, 1000)), st.integers(1, 9))
def test_shares_are_even_and_complete(sizes, parts):
    division = shares(sizes, parts)
    assert sorted(name for mine in division for name in mine) == sorted(sizes)
    filled = [sum(sizes[name] for name in mine) for mine in division]
    assert max(filled) - min(filled) <= max(sizes.values(), default=0)
    assert division == shares(dict(reversed(sizes.items())), parts)


def test_commit_wants_all_parts_of_one_attempt(store):
    first = store.write_part(4, {}, {}, token="p", part=0, parts=2)
    second = store.write_part(4, {}, {}, token="p", part=1, parts=2)
    stranger = store.write_part(4, {}, {}, token="q", part=1, parts=2)
    for parts, why in [
        ([first], "of 2 parts"),
        ([first, first], "of 2 parts"),
        ([first, stranger], "attempt q"),
        ([], "of 1"),
    ]:
        with pytest.raises(CheckpointError, match=why):
            store.commit(4, "p", parts, fields={})
    assert store.list() == []
    assert store.commit(4, "p", [first, second], fields={}).parts == 2


def test_a_tensor_in_two_parts_is_noticed(store):
    parts = [store.write_part(4, {"model/w": torch.ones(1)}, {}, token="p", part=part, parts=2) for part in (0, 1)]
    checkpoint = store.commit(4, "p", parts, fields={})
    with pytest.raises(CheckpointInvalid, match="'model/w' is in two parts"):
        store.load(checkpoint)


@pytest.mark.parametrize("broken", [{}, {"part": 2}, {"part": "0"}, {"files": [{}]}, {"token": "../up"}, {"files": 3}])
def test_a_record_from_the_network_is_checked(store, broken):
    good = store.write_part(4, {}, {}, token="p", part=1, parts=2).to_dict()
    with pytest.raises(CheckpointError):
        WrittenPart.from_dict(good | broken if broken else {})


# Protocol


@pytest.mark.parametrize("token", ["", "..", "a/b", "a b", "-a", "x" * 300, "a\n"])
def test_tokens_that_could_leave_the_directory_are_refused(store, token):
    with pytest.raises(CheckpointError, match="token"):
        store.write_part(1, {}, {}, token=token)


def test_nothing_is_written_twice(store):
    part = store.write_part(1, {"model/w": torch.ones(1)}, {}, token="t")
    with pytest.raises(CheckpointError, match="a token is for one attempt"):
        store.write_part(1, {"model/w": torch.zeros(1)}, {}, token="t")
    checkpoint = store.commit(1, "t", [part], fields={"created_unix": 1})
    assert store.commit(1, "t", [part], fields={"created_unix": 2}) == checkpoint, "a repeated commit changes nothing"
    assert store.load(checkpoint)[0]["model/w"].item() == 1
    other = CheckpointStore(f"memory://{uuid.uuid4().hex}").write_part(1, {"model/w": torch.zeros(1)}, {}, token="t")
    with pytest.raises(CheckpointError, match="committed already"):
        store.commit(1, "t", [other], fields={})


def test_fields_are_strict_json(store):
    checkpoint = save(store, 1, score=float("nan"), lanes={3: (1, 2)})
    assert store.list()[0].fields == checkpoint.fields
    assert checkpoint.fields["lanes"] == {"3": [1, 2]}
    assert checkpoint.score is None
    with pytest.raises(CheckpointError, match="JSON"):
        save(store, 2, odd=object())
    assert [item.step for item in store.list()] == [1]


def test_commit_says_that_the_storage_is_not_shared(store, tmp_path):
    part = CheckpointStore(str(tmp_path / "executor")).write_part(1, {"model/w": torch.ones(1)}, {}, token="t")
    with pytest.raises(StorageFailed, match=r"state.safetensors is not there.*not shared between the driver"):
        store.commit(1, "t", [part], fields={}, visible_timeout_s=0.02)
    assert store.newest_valid() == (None, [])


def test_commit_waits_for_storage_that_shows_files_late(tmp_path):
    store = CheckpointStore(str(tmp_path))
    part = store.write_part(1, {"model/w": torch.ones(1)}, {}, token="t")
    visible = tmp_path / "step-000000000001-t" / "state.safetensors"
    hidden = tmp_path / "hidden"
    visible.rename(hidden)
    timer = threading.Timer(0.1, hidden.rename, [visible])
    timer.start()
    assert store.commit(1, "t", [part], fields={}, visible_timeout_s=60).step == 1
    timer.join()


def test_newest_is_by_step_then_by_time_and_of_the_job_asked_for(store):
    for step, created, job in [(2, 1, "a"), (10, 1, "a"), (10, 2, "a"), (9, 99, "b")]:
        save(store, step, token=f"{job}{created}", created_unix=created, job_id=job)
    assert [(item.step, item.created_unix) for item in store.list()] == [(10, 2), (10, 1), (9, 99), (2, 1)]
    assert store.newest_valid()[0].step == 10
    assert store.newest_valid("b")[0].step == 9
    assert store.newest_valid("c") == (None, [])
    assert [item.step for item in store.list("a")] == [10, 10, 2]


def test_strangers_in_the_directory_are_let_be(tmp_path):
    store = CheckpointStore(str(tmp_path))
    checkpoint = save(store, 1)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-7").mkdir()
    assert store.attempts() == [checkpoint]
    assert store.prune(1, unfinished_age_s=0) == []
    assert (tmp_path / "notes.txt").exists()
    with pytest.raises(CheckpointInvalid, match="no name of a checkpoint"):
        store.open("notes.txt")


def test_an_empty_store_has_nothing(store):
    assert store.newest_valid() == (None, [])
    assert store.load_newest() == (None, {}, {}, [])
    assert store.list() == store.prune(3) == []


def test_an_unknown_kind_of_storage_is_a_config_error():
    with pytest.raises(ConfigError, match="nosuch"):
        CheckpointStore("nosuch://bucket/x").list()


def test_the_store_travels_to_a_worker(store):
    checkpoint = save(store, 1)
    assert pickle.loads(pickle.dumps(store)).list() == [checkpoint]


def test_a_small_file_beside_the_checkpoints_can_be_replaced_whole(store):
    for text in (b"first", b"2"):
        with store._storage.create("job.json") as sink:
            sink.write(memoryview(text))
        with store._storage.open("job.json") as file:
            assert file.read() == text
    with pytest.raises(TypeError), store._storage.create("job.json") as sink:
        sink.write(memoryview(b"half"), "an error of the caller")
    with store._storage.open("job.json") as file:
        assert file.read() == b"2"
    assert store._storage.files("") == {"job.json": 1}
    assert store.attempts() == []


def test_a_large_write_that_fails_leaves_no_file(store):
    """An error of whoever makes the data stays what it is; what was streamed until then is dropped."""
    block = memoryview(bytes(3 << 20))
    with pytest.raises(TypeError), store._storage.create("step/state") as sink:
        _write_blocks(sink, block, block, "no bytes")
    assert store._storage.files("step") == {}
    with store._storage.create("step/state") as sink:
        _write_blocks(sink, block, block)
    assert store._storage.files("step") == {"state": 6 << 20}


def _write_blocks(sink, *blocks):
    for block in blocks:
        sink.write(memoryview(block))


# Retention and commands


def test_prune_keeps_the_newest_the_best_and_leaves_other_jobs_alone(store):
    for step, score in [(1, 0.1), (2, 0.9), (3, float("nan")), (4, 0.8), (5, 0.7)]:
        save(store, step, job_id="a", score=score)
    save(store, 1, token="other", job_id="b")
    gone = store.prune(2, keep_best=1, job_id="a")
    assert gone == [f"{store.uri}/step-{step:012d}-t" for step in (2, 3)]
    assert [(item.step, item.job_id) for item in store.list()] == [(5, "a"), (4, "a"), (1, "b"), (1, "a")] or [
        (item.step, item.score) for item in store.list("a")
    ] == [(5, 0.7), (4, 0.8), (1, 0.1)]
    assert len(store.list("b")) == 1


def test_prune_never_takes_the_newest_valid_one(tmp_path):
    store = CheckpointStore(str(tmp_path))
    for step in (1, 2, 3, 4):
        save(store, step)
    for step in (3, 4):
        os.truncate(tmp_path / f"step-{step:012d}-t" / "state.safetensors", 10)
    assert store.prune(0) == [f"{store.uri}/step-{step:012d}-t" for step in (1, 3, 4)]
    assert store.newest_valid()[0].step == 2


def test_prune_takes_leftovers_only_when_they_are_old(store):
    save(store, 1)
    store.write_part(2, {"model/w": torch.ones(1)}, {}, token="cut")
    assert store.prune(1) == []
    assert store.prune(1, unfinished_age_s=0) == [f"{store.uri}/step-000000000002-cut"]
    assert [item.step for item in store.attempts()] == [1]


def test_commands_give_rows(tmp_path):
    store = CheckpointStore(str(tmp_path))
    for step in (1, 2, 3):
        save(store, step, {"model/0.weight": torch.full((2,), float(step))}, job_id="j", world_size=4)
    store.write_part(4, {}, {}, token="cut")
    os.truncate(tmp_path / "step-000000000003-t" / "meta.json", 0)
    rows = commands.ls(str(tmp_path))
    assert [(row["step"], row["status"]) for row in rows] == [
        (4, "unfinished"),
        (3, "complete"),
        (2, "complete"),
        (1, "complete"),
    ]
    assert (rows[1]["world_size"], rows[1]["job_id"], rows[1]["parts"]) == (4, "j", 1)
    found = commands.verify(str(tmp_path))
    assert [(row["step"], row["status"]) for row in found] == [(3, "invalid"), (2, "valid"), (1, "valid")]
    assert "meta.json: has 0 bytes" in found[0]["reason"]
    assert commands.verify(str(tmp_path), "1")[0]["status"] == "valid"
    assert commands.verify(f"{tmp_path}/step-000000000002-t/")[0]["step"] == 2
    assert commands.ls(f"{tmp_path}/step-000000000002-t") == rows[2:3]
    exported = commands.export(str(tmp_path), str(tmp_path / "out" / "model.pt"))
    assert (exported["step"], exported["tensors"]) == (2, 1)
    unfinished, broken = exported["skipped"]
    assert "step-000000000004" in unfinished
    assert "meta.json: has 0 bytes" in broken
    with pytest.raises(CheckpointInvalid, match="no checkpoint '9'; steps there: 3, 2, 1"):
        commands.export(str(tmp_path), str(tmp_path / "x.pt"), "9")
    with pytest.raises(CheckpointError, match="no object 'ema'; it has model"):
        commands.export(str(tmp_path), str(tmp_path / "x.pt"), object_name="ema")
    with pytest.raises(CheckpointInvalid, match="prune the store"):
        commands.prune(f"{tmp_path}/step-000000000002-t", 1)
    assert commands.prune(str(tmp_path), 1) == [f"{tmp_path}/step-000000000001-t"]
    with pytest.raises(CheckpointInvalid, match="no valid checkpoint"):
        commands.pick(CheckpointStore(str(tmp_path / "empty")), "latest")


PLAIN = """
import sys, torch
state = torch.load(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
model.load_state_dict(state)
assert not [name for name in sys.modules if name.startswith("elastic_spark")]
print(float(model[0].weight.sum()), state["1.running_var"].dtype)
"""


def test_an_export_loads_in_plain_torch_without_this_package(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    store = CheckpointStore(str(tmp_path / "store"))
    tensors = {f"model/module.{name}": tensor for name, tensor in model.state_dict().items()}
    checkpoint = save(store, 5, tensors | {"optimizer/state/0/exp_avg": torch.ones(2, 3)})
    assert store.export(checkpoint, str(tmp_path / "model.pt")) == 7
    run = subprocess.run(
        [sys.executable, "-I", "-c", PLAIN, str(tmp_path / "model.pt")],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    total, dtype = run.stdout.split()
    assert float(total) == pytest.approx(model[0].weight.sum().item())
    assert dtype == "torch.float32"
    with pytest.raises(StorageFailed, match="cannot write"):
        store.export(checkpoint, str(tmp_path / "model.pt" / "below"))


# Mounts that take sequential copies only


def _write_with_audit(root, scratch, connection):
    """In a process of its own: every file system call on the mount, as Python's audit events tell them."""
    storage.SEQUENTIAL_MOUNTS = (f"{root}/",)
    seen = []

    def audit(event, args):
        if event == "open" and str(args[0]).startswith(root) and args[2] & (os.O_WRONLY | os.O_RDWR):
            seen.append((event, os.path.basename(args[0]), args[2] & (os.O_RDWR | os.O_APPEND)))
        elif event in ("os.rename", "os.link", "os.symlink", "os.truncate") and root in f"{args}":
            seen.append((event, str(args), 0))

    sys.addaudithook(audit)
    store = CheckpointStore(f"{root}/main/ckpt", scratch=scratch)
    assert isinstance(store._storage, storage.SequentialStorage)
    checkpoint = save(store, 1, {"model/w": torch.ones(100)})
    store.verify(checkpoint)
    connection.send((seen, os.listdir(scratch)))


def test_a_volume_is_written_front_to_back_without_rename(tmp_path):
    here, there = multiprocessing.get_context("forkserver").Pipe()
    process = multiprocessing.get_context("forkserver").Process(
        target=_write_with_audit, args=(str(tmp_path / "Volumes"), str(tmp_path / "scratch"), there)
    )
    process.start()
    there.close()
    assert here.poll(100)
    seen, scratch = here.recv()
    process.join()
    assert seen == [("open", name, 0) for name in ("state.safetensors", "meta.json", "manifest.json")]
    assert scratch == [], "nothing is left in scratch"


def _write_half(root, scratch, connection):
    """In a process of its own: a part that is never finished."""
    with storage.SequentialStorage(root, scratch).create("a/b") as sink:
        sink.write(memoryview(bytes(1 << 20)))
        connection.send("half")
        signal.pause()


def test_a_writer_killed_in_the_middle_leaves_nothing_in_scratch(tmp_path):
    scratch = tmp_path / "scratch"
    here, there = multiprocessing.get_context("forkserver").Pipe()
    process = multiprocessing.get_context("forkserver").Process(
        target=_write_half, args=(str(tmp_path / "Volumes"), str(scratch), there)
    )
    process.start()
    there.close()
    assert here.poll(100)
    assert here.recv() == "half"
    process.kill()
    process.join()
    assert os.listdir(scratch) == []


def test_volume_paths_are_recognised():
    assert isinstance(storage.open_storage("/Volumes/main/ml/ckpt", None), storage.SequentialStorage)
    assert isinstance(storage.open_storage("file:///dbfs/ckpt", None), storage.SequentialStorage)
    assert not isinstance(storage.open_storage("/tmp/ckpt", None), storage.SequentialStorage)


def test_a_failed_write_leaves_nothing_on_a_volume(tmp_path):
    mount = storage.SequentialStorage(str(tmp_path))
    with mount.create("a/b") as sink:
        sink.write(memoryview(b"x"))
    with pytest.raises(RuntimeError), mount.create("a/c"):
        raise RuntimeError
    assert mount.files("a") == {"b": 1}
    (tmp_path / "a" / "d").mkdir()
    with pytest.raises(StorageFailed, match=r"cannot write .*IsADirectoryError"), mount.create("a/d") as sink:
        sink.write(memoryview(b"x"))


# Background


class Gate:
    """A callback that can be held."""

    def __init__(self):
        self.outcomes = []
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self, outcome):
        self.outcomes.append(outcome)
        self.entered.set()
        assert self.open.wait(60)


def test_one_write_in_flight_and_none_queued(tmp_path):
    store, gate = CheckpointStore(str(tmp_path)), Gate()
    writer = BackgroundWriter(store, gate)
    tensors = {"model/w": torch.ones(10)}
    assert not writer.busy
    assert writer.submit(1, tensors, {"a": 1}, "t")
    assert gate.entered.wait(60)
    assert writer.busy
    assert not writer.submit(2, tensors, {}, "t"), "busy: skipped"
    assert not writer.close(0.01), "the one in flight has not ended"
    gate.open.set()
    assert writer.close(60)
    assert not writer.submit(3, tensors, {}, "t"), "closed"
    (outcome,) = gate.outcomes
    assert (outcome.step, outcome.token, outcome.error, outcome.bytes) == (1, "t", None, outcome.part.bytes)
    assert outcome.seconds > 0
    assert store.commit(1, "t", [outcome.part], fields={}).step == 1


def test_writes_follow_one_another(tmp_path):
    done = threading.Semaphore(0)
    outcomes = []

    def on_done(outcome):
        outcomes.append(outcome)
        done.release()
        raise ValueError("the callback's own bug does not end the writer")

    writer = BackgroundWriter(CheckpointStore(str(tmp_path)), on_done)
    for step in range(1, 4):
        for _ in range(100_000):
            if writer.submit(step, {"model/w": torch.ones(1)}, {}, "t", part=1, parts=2):
                break
            threading.Event().wait(0.001)
        assert done.acquire(timeout=60)
    assert writer.close(60)
    assert [(outcome.step, outcome.part.part) for outcome in outcomes] == [(1, 1), (2, 1), (3, 1)]


def test_a_failed_write_is_told_and_the_next_one_may_work(tmp_path):
    (tmp_path / "file").write_text("no directory")
    gate = Gate()
    gate.open.set()
    writer = BackgroundWriter(CheckpointStore(str(tmp_path / "file" / "below")), gate)
    assert writer.submit(1, {"model/w": torch.ones(1)}, {}, "t")
    assert gate.entered.wait(60)
    assert writer.close(60)
    (outcome,) = gate.outcomes
    assert isinstance(outcome.error, StorageFailed)
    assert (outcome.part, outcome.bytes) == (None, 0)
    assert BackgroundWriter(CheckpointStore(str(tmp_path)), gate).close(0), "never started"


# Against a model in memory


class StoreMachine(RuleBasedStateMachine):
    """Writers that crash at any point, bits that rot, prunes and restarts: the store says what the model says."""

    def __init__(self):
        super().__init__()
        self.root = tempfile.mkdtemp(dir=MEMORY_DISK)
        self.store = CheckpointStore(self.root)
        self.count = 0
        self.attempts = {}  # name -> {"step", "order", "value", "state": unfinished | valid | rotten | unreadable}

    def teardown(self):
        shutil.rmtree(self.root)

    def _write(self, step, parts, last):
        """Parts 0 .. last-1 of an attempt are written whole."""
        self.count += 1
        token = f"t{self.count}"
        written = [
            self.store.write_part(
                step,
                {f"model/{part}": torch.full((5,), self.count)},
                {"n": self.count},
                token=token,
                part=part,
                parts=parts,
            )
            for part in range(last)
        ]
        if written:
            self.attempts[f"step-{step:012d}-{token}"] = {
                "step": step,
                "order": self.count,
                "value": self.count,
                "state": "unfinished",
            }
        return token, written

    def _file(self, data, name, only=None):
        files = sorted(os.listdir(os.path.join(self.root, name)))
        return os.path.join(self.root, name, only or data.draw(st.sampled_from(files)))

    def _spoil(self, name, path):
        self.attempts[name]["state"] = "unreadable" if path.endswith("manifest.json") else "rotten"

    def _intact(self):
        return sorted(name for name, attempt in self.attempts.items() if attempt["state"] == "valid")

    @rule(step=st.integers(0, 5), parts=st.integers(1, 3))
    def write_and_commit(self, step, parts):
        token, written = self._write(step, parts, parts)
        checkpoint = self.store.commit(step, token, written, fields={"created_unix": self.count})
        self.attempts[checkpoint.name]["state"] = "valid"

    @rule(step=st.integers(0, 5), parts=st.integers(1, 3), data=st.data())
    def crash_before_commit(self, step, parts, data):
        token, written = self._write(step, parts, data.draw(st.integers(0, parts)))
        if written and data.draw(st.booleans()):
            path = self._file(data, f"step-{step:012d}-{token}")
            os.truncate(path, data.draw(st.integers(0, os.path.getsize(path))))

    @precondition(lambda self: self._intact())
    @rule(data=st.data())
    def flip_a_bit(self, data):
        name = data.draw(st.sampled_from(self._intact()))
        path = self._file(data, name)
        with open(path, "r+b") as file:
            body = bytearray(file.read())
            body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            file.seek(0)
            file.write(body)
        self._spoil(name, path)

    @precondition(lambda self: self._intact())
    @rule(data=st.data())
    def tear_or_lose_a_file(self, data):
        name = data.draw(st.sampled_from(self._intact()))
        path = self._file(data, name)
        if data.draw(st.booleans()):
            os.truncate(path, data.draw(st.integers(0, os.path.getsize(path) - 1)))
            self._spoil(name, path)
        else:
            os.unlink(path)
            self.attempts[name]["state"] = "unfinished" if path.endswith("manifest.json") else "rotten"

    @rule(keep=st.integers(0, 3), old=st.booleans())
    def prune(self, keep, old):
        listed = self._listed()
        valid = [name for name in listed if self.attempts[name]["state"] == "valid"]
        gone = {name.rpartition("/")[2] for name in self.store.prune(keep, unfinished_age_s=0 if old else 1e6)}
        expected = {name for name in listed[max(keep, 0) :] if name != valid[0]} if valid and len(listed) > 1 else set()
        if old:
            expected |= {name for name, attempt in self.attempts.items() if attempt["state"] == "unfinished"}
        assert gone == expected
        for name in gone:
            del self.attempts[name]

    @rule()
    def driver_restarts(self):
        self.store = CheckpointStore(f"file://{self.root}")

    def _listed(self):
        names = [name for name, attempt in self.attempts.items() if attempt["state"] in ("valid", "rotten")]
        return sorted(names, key=lambda name: (self.attempts[name]["step"], self.attempts[name]["order"]), reverse=True)

    @invariant()
    def agrees_with_the_model(self):
        listed = self._listed()
        assert [checkpoint.name for checkpoint in self.store.list()] == listed
        valid = [name for name in listed if self.attempts[name]["state"] == "valid"]
        checkpoint, tensors, meta, rejected = self.store.load_newest()
        assert self.store.newest_valid() == (checkpoint, rejected)
        if not valid:
            assert checkpoint is None
            return
        assert checkpoint.name == valid[0]
        assert {int(value) for tensor in tensors.values() for value in tensor} == {self.attempts[valid[0]]["value"]}
        assert len(tensors) == checkpoint.parts
        assert meta["n"] == self.attempts[valid[0]]["value"]
        passed_over = {item.uri.rpartition("/")[2] for item in rejected}
        assert passed_over >= set(listed[: listed.index(valid[0])])
        assert all(
            item.finished == (self.attempts[item.uri.rpartition("/")[2]]["state"] != "unfinished") for item in rejected
        )


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
