"""What goes wrong with checkpoints, done for real: rotten bits, torn and mixed files, killed writers, disks full."""

import contextlib
import errno
import hashlib
import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time

import pytest
import torch

from elastic_spark.checkpoint import CheckpointStore, StoredFile, WrittenPart, manifest
from elastic_spark.errors import CheckpointError, CheckpointInvalid, StorageFailed

MEMORY_DISK = "/dev/shm" if os.path.isdir("/dev/shm") else None
KILLS = int(os.environ.get("ES_KILLS", "20"))
FAULTS = 40  # of each of five kinds

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch", "pytest", "elastic_spark.checkpoint"])  # children start at once


@pytest.fixture
def folder():
    """In memory where there is such a disk: kill -9 spares what was written either way."""
    path = tempfile.mkdtemp(dir=MEMORY_DISK)
    yield path
    shutil.rmtree(path)


def save(store, step, token="t", parts=1, size=1000, **fields):
    """Every element of every tensor is the step: a checkpoint mixed from two steps would show."""
    written = [
        store.write_part(
            step, {f"model/{part}": torch.full((size,), step)}, {"step": step}, token=token, part=part, parts=parts
        )
        for part in range(parts)
    ]
    return store.commit(step, token, written, fields=fields)


def assert_whole(tensors, meta, step):
    assert meta["step"] == step
    assert {int(value) for tensor in tensors.values() for value in tensor.unique()} == {step}


# 200 injected faults: each is found, and the checkpoint before is used


@pytest.fixture(scope="module")
def pristine():
    """Two attempts of step 20, of which one is committed, after a good step 10."""
    root = tempfile.mkdtemp(dir=MEMORY_DISK)
    store = CheckpointStore(f"{root}/pristine")
    save(store, 10, parts=2)
    save(store, 15, token="zombie", parts=3, job_id="other")
    for part in range(3):
        tensors = {f"model/{part}": torch.full((1000,), 20)}
        store.write_part(20, tensors, {"step": 20}, token="zombie", part=part, parts=3)
    save(store, 20, parts=3, lanes={"é": [1.5e-7, 2]}, created_unix=1.0)
    yield f"{root}/pristine"
    shutil.rmtree(root)


@pytest.fixture
def damaged(pristine):
    """A copy of it to spoil: (store, directory of the newest)."""
    root = tempfile.mkdtemp(dir=MEMORY_DISK)
    shutil.copytree(pristine, f"{root}/ckpt")
    yield CheckpointStore(f"{root}/ckpt"), f"{root}/ckpt/step-000000000020-t"
    shutil.rmtree(root)


def flip_a_bit(folder, rng):
    files = sorted(os.listdir(folder))
    path = os.path.join(
        folder, rng.choices(files, [os.path.getsize(os.path.join(folder, name)) ** 0.5 for name in files])[0]
    )
    with open(path, "r+b") as file:
        at = rng.randrange(os.path.getsize(path))
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def truncate(folder, rng):
    path = os.path.join(folder, rng.choice(sorted(os.listdir(folder))))
    os.truncate(path, int(os.path.getsize(path) * rng.choice([0, 0.01, 0.5, rng.random()])))


def lose_a_file(folder, rng):
    os.unlink(
        os.path.join(folder, rng.choice([name for name in sorted(os.listdir(folder)) if name != "manifest.json"]))
    )


def mix_in_another(folder, rng):
    """A part of an older step, or of a zombie's attempt at the same step with the same values, or another part."""
    above, part = os.path.dirname(folder), rng.randrange(3)
    name = manifest.state_name(part, 3)
    source = rng.choice(
        [f"{above}/step-000000000015-zombie/{name}", f"{above}/step-000000000020-zombie/{name}", "swap"]
    )
    if source == "swap":
        source = f"{folder}/{manifest.state_name((part + 1) % 3, 3)}"
    shutil.copyfile(source, f"{folder}/{name}")


def wrong_manifest(folder, rng):
    path = os.path.join(folder, "manifest.json")
    with open(path) as file:
        body = json.load(file)
    choice = rng.randrange(7)
    if choice == 0:
        shutil.copyfile(os.path.join(os.path.dirname(folder), "step-000000000010-t", "manifest.json"), path)
        return
    if choice == 1:
        text = rng.choice(["", "{}", "[]", "null", "\0" * 50, "[" * 100_000, '{"digest": 1}'])
    else:
        if choice == 2:
            body["step"] += rng.choice([-10, 1])
        elif choice == 3:
            body["files"][rng.randrange(len(body["files"]))]["sha256"] = hashlib.sha256(rng.randbytes(4)).hexdigest()
        elif choice == 4:
            del body["files"][rng.randrange(len(body["files"]))]
        elif choice == 5:
            body["fields"]["lanes"]["é"][0] = rng.random()
        else:
            del body[rng.choice(sorted(body))]
        text = json.dumps(body, indent=1)
    with open(path, "w") as file:
        file.write(text)


@pytest.mark.parametrize("fault", [flip_a_bit, truncate, lose_a_file, mix_in_another, wrong_manifest])
def test_every_fault_is_found_and_the_good_one_before_is_used(fault, damaged, pristine):
    store, folder = damaged
    for trial in range(FAULTS):
        shutil.rmtree(folder)
        shutil.copytree(f"{pristine}/step-000000000020-t", folder)
        good = store.open(folder)
        fault(folder, random.Random(f"{fault.__name__} {trial}"))
        checkpoint, tensors, meta, rejected = store.load_newest()
        assert checkpoint.name != good.name, f"trial {trial} was not found"
        assert (checkpoint, rejected) == store.newest_valid()
        assert checkpoint.step == 15
        assert_whole(tensors, meta, 15)
        (reason,) = [item.reason for item in rejected if item.finished]
        assert folder in reason, "says which"
        with pytest.raises(CheckpointInvalid):
            store.verify(store.open(good.name))


def test_reasons_say_which_file_and_why(damaged):
    store, folder = damaged
    good = store.open(folder)
    cases = [
        ("state-00001-of-00003.safetensors", b"x", r"state-00001.*has \d+ bytes, the manifest says \d+"),
        ("meta.json", None, "meta.json: is missing"),
        ("meta.json", b'{"step": 21}', "meta.json: SHA-256 is .*its bytes were changed"),
        ("manifest.json", b"", "manifest.json: is empty"),
        ("manifest.json", b'{"step":', "manifest.json: is malformed or torn"),
    ]
    for name, body, why in cases:
        with open(f"{folder}/{name}", "rb") as file:
            before = file.read()
        os.unlink(f"{folder}/{name}")
        if body is not None:
            with open(f"{folder}/{name}", "wb") as file:
                file.write(body)
        with pytest.raises(CheckpointInvalid, match=why):
            store.load(store.open(good.name))
        with open(f"{folder}/{name}", "wb") as file:
            file.write(before)
    shutil.copyfile(
        f"{folder}/../step-000000000020-zombie/state-00000-of-00003.safetensors",
        f"{folder}/state-00000-of-00003.safetensors",
    )
    with pytest.raises(CheckpointInvalid, match=r"of another attempt: it says .*'zombie'"):
        store.load(good)


def test_a_newer_format_is_refused_by_version(damaged):
    store, folder = damaged
    with open(f"{folder}/manifest.json") as file:
        body = json.load(file)
    with open(f"{folder}/manifest.json", "w") as file:
        json.dump(body | {"version": 2}, file, indent=1)
    with pytest.raises(CheckpointInvalid, match="version 2, this release reads version 1"):
        store.open(folder)


# Pickles


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def forge(store, files):
    """A checkpoint of which every size and digest is right: made by somebody who knows the format."""
    folder = f"{store.uri}/step-000000000099-t"
    os.makedirs(folder)
    entries = []
    for name, body in files.items():
        with open(f"{folder}/{name}", "wb") as file:
            file.write(body)
        entries.append(StoredFile(name, len(body), hashlib.sha256(body).hexdigest()))
    part = WrittenPart(99, "t", 0, 1, tuple(entries))
    with open(f"{folder}/manifest.json", "wb") as file:
        file.write(manifest.compose(99, "t", [part], {}))


@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle", "meta", "extra"])
def test_a_crafted_pickle_is_refused_and_runs_no_code(kind, tmp_path):
    store, canary = CheckpointStore(str(tmp_path / "ckpt")), tmp_path / "canary"
    good = save(store, 1)
    bomb = tmp_path / "bomb"
    with open(bomb, "wb") as file:
        if kind in ("zip", "legacy"):
            torch.save({"model": Bomb(str(canary))}, file, _use_new_zipfile_serialization=kind == "zip")
        else:
            pickle.dump(Bomb(str(canary)), file)
    evil = bomb.read_bytes()
    honest = {file.name: open(f"{good.uri}/{file.name}", "rb").read() for file in good.files}  # noqa: SIM115
    files = {"state.safetensors": evil, "meta.json": b"{}"}
    if kind == "meta":
        files = honest | {"meta.json": evil}
    elif kind == "extra":
        files = honest | {"objects.pkl": evil}
    forge(store, files)
    checkpoint, tensors, meta, (rejected,) = store.load_newest()
    assert checkpoint == good
    assert_whole(tensors, meta, 1)
    assert rejected.finished
    expected = "of another attempt" if kind == "meta" else "pickle"
    assert expected in rejected.reason
    assert not canary.exists()


HEADERS = {
    "no JSON": b"{",
    "no object": b"[]",
    "no own metadata": b"{}",
    "hole": {"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}},
    "overlap": {
        "a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]},
    },
    "too long": {"a": {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}},
    "negative": {"a": {"dtype": "U8", "shape": [-8, -1], "data_offsets": [0, 8]}},
    "no numbers": {"a": {"dtype": "U8", "shape": ["8"], "data_offsets": [0, 8]}},
    "huge and empty": {
        "a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
        "b": {"dtype": "U8", "shape": [0, 2**62, 2**62], "data_offsets": [8, 8]},
    },
    "wrong size": {"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 8]}},
    "dtype": {"a": {"dtype": "OBJ", "shape": [8], "data_offsets": [0, 8]}},
    "data after the end": {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}},
}


@pytest.mark.parametrize(
    "case", [*HEADERS, "no such dtype in torch", "alias of nothing", "order of others", "header past the end", "short"]
)
def test_crafted_headers_are_refused_before_anything_is_allocated(case, tmp_path):
    store = CheckpointStore(str(tmp_path))
    extra = {"own": {}, "order": [], "aliases": {}, "raw": {}}
    table = HEADERS.get(case, {"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}})
    if case == "no such dtype in torch":
        extra["raw"] = {"a": ["serialization", [8]]}
    elif case == "alias of nothing":
        extra["aliases"] = {"b": "c"}
    elif case == "order of others":
        extra["order"] = ["b"]
    if isinstance(table, dict):
        table = json.dumps({"__metadata__": {"elastic_spark": json.dumps(extra)}, **table}).encode()
    length = len(table) + (1000 if case == "header past the end" else 0)
    state = length.to_bytes(8, "little") + table + bytes(8)
    forge(store, {"state.safetensors": state[:5] if case == "short" else state, "meta.json": b"{}"})
    with pytest.raises(CheckpointInvalid, match=r"state\.safetensors: "):
        store.load(store.open("step-000000000099-t"))
    assert store.newest_valid()[0] is None


@pytest.mark.parametrize("meta", [b"[]", b"\xff", b"[" * 100_000])
def test_crafted_meta_is_refused(meta, tmp_path):
    store = CheckpointStore(str(tmp_path))
    part = store.write_part(99, {}, {}, token="t")
    os.unlink(tmp_path / "step-000000000099-t" / "meta.json")
    (tmp_path / "step-000000000099-t" / "meta.json").write_bytes(meta)
    forged = StoredFile("meta.json", len(meta), hashlib.sha256(meta).hexdigest())
    checkpoint = store.commit(99, "t", [WrittenPart(99, "t", 0, 1, (part.files[0], forged))], fields={})
    with pytest.raises(CheckpointInvalid, match=r"meta\.json: "):
        store.verify(checkpoint)


# Killed writers, readers meanwhile


def _write_on(uri, connection, size, keep):
    """A job that does nothing but checkpoints; tells each one committed."""
    torch.set_num_threads(1)
    store = CheckpointStore(uri)
    found, _ = store.newest_valid()
    step = found.step if found else 0
    while True:
        step += 1
        save(store, step, token=f"pid{os.getpid()}", parts=2, size=size)
        if keep:
            store.prune(keep, unfinished_age_s=0)
        connection.send(step)


@contextlib.contextmanager
def writer(uri, size, keep=0):
    """(process, its messages); killed at the end."""
    here, there = processes.Pipe(duplex=False)
    process = processes.Process(target=_write_on, args=(uri, there, size, keep), daemon=True)
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        here.close()


def told(messages, last=0):
    """The last step told, until the writer's end closes."""
    with contextlib.suppress(EOFError):
        while True:
            last = messages.recv()
    return last


def test_kill_9_at_any_moment_of_a_write_resumes_from_the_newest_complete(folder):
    uri, rng = f"{folder}/ckpt", random.Random(20)
    store = CheckpointStore(uri)
    cut = 0
    for _ in range(KILLS):
        with writer(uri, size=250_000) as (process, messages):
            assert messages.poll(60)
            last = messages.recv()
            time.sleep(rng.random() * 0.05)  # no waiting for anything: this is the random moment, some writes long
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            last = told(messages, last)
        checkpoint, tensors, meta, rejected = store.load_newest()
        assert checkpoint.step in (last, last + 1), "told is committed; one more may have been"
        assert_whole(tensors, meta, checkpoint.step)
        assert not [item for item in rejected if item.finished], "a cut write is no damage"
        cut += len(rejected)
        store.prune(2, unfinished_age_s=0)
        assert len(store.attempts()) <= 2
    assert cut, "no kill hit a write: the test tests nothing"


def test_a_reader_never_sees_half_a_checkpoint(folder):
    """Polling while another process writes and prunes: always whole, never older than before, never nothing."""
    uri = f"{folder}/ckpt"
    store = CheckpointStore(uri)
    with writer(uri, size=100_000, keep=2) as (_, messages):
        assert messages.poll(60)
        last = messages.recv()
        reads = 0
        while last < 40:
            while messages.poll():
                last = messages.recv()
            checkpoint, tensors, meta, _ = store.load_newest()
            assert checkpoint.step >= last
            assert_whole(tensors, meta, checkpoint.step)
            reads += 1
    assert reads > 3


# Full disks


def _write_to_full_disk(folder, connection, megabytes):
    """Fill a disk of ``megabytes``: a small tmpfs where this process may mount one, else a limit of the file size."""
    store = CheckpointStore(f"{folder}/ckpt")
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], capture_output=True
        ).returncode
        == 0
    )
    try:
        save(store, 1, size=(megabytes << 20) // 8 // 2)  # int64: half of it
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (megabytes << 19, megabytes << 19))
        try:
            save(store, 2, size=(megabytes << 20) // 8)
        except StorageFailed as failure:
            seen = str(failure), getattr(failure.__cause__, "errno", None)
        else:
            seen = "written", None
        left = [name for name in os.listdir(f"{folder}/ckpt") if name.startswith("step-000000000002")]
        step = store.newest_valid()[0].step
        smaller = save(store, 3, size=1000).step, store.newest_valid()[0].step
        connection.send((seen, left, step, smaller, mounted))
    finally:
        if mounted:
            subprocess.run(["umount", folder], check=True)


def test_a_full_disk_costs_the_new_one_and_not_the_old(tmp_path):
    here, there = processes.Pipe(duplex=False)
    process = processes.Process(target=_write_to_full_disk, args=(str(tmp_path), there, 8))
    process.start()
    there.close()
    (message, code), left, step, smaller, mounted = here.recv()
    process.join()
    assert process.exitcode == 0
    assert code == (errno.ENOSPC if mounted else errno.EFBIG)
    assert "Older checkpoints are intact" in message
    assert ("no space left on device" if mounted else "ulimit -f") in message
    assert left == [], "the half-written one gives its space back, and leaves no folder"
    assert step == 1
    assert smaller == (3, 3), "the next one that fits is written"


def _write_under_a_file_limit(folder, connection):
    store = CheckpointStore(f"{folder}/ckpt")
    save(store, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        save(store, 2, size=1_000_000)
    except StorageFailed as failure:
        connection.send((str(failure), store.newest_valid()[0].step))


def test_a_limit_of_file_sizes_is_told(tmp_path):
    here, there = processes.Pipe(duplex=False)
    process = processes.Process(target=_write_under_a_file_limit, args=(str(tmp_path), there))
    process.start()
    there.close()
    message, step = here.recv()
    process.join()
    assert "ulimit -f" in message
    assert step == 1


# Storage that is away


def test_storage_away_is_no_fresh_start(tmp_path):
    """A store that cannot be read must not look like an empty one."""
    (tmp_path / "ckpt").write_text("a file where the directory should be")
    store = CheckpointStore(str(tmp_path / "ckpt"))
    for action in (store.list, store.newest_valid, lambda: store.prune(1), lambda: save(store, 1)):
        with pytest.raises(StorageFailed, match=str(tmp_path)):
            action()


def test_a_manifest_that_cannot_be_read_is_not_taken_for_a_bad_one(tmp_path):
    store = CheckpointStore(str(tmp_path))
    good, newer = save(store, 1), save(store, 2)
    path = f"{newer.uri}/manifest.json"
    os.unlink(path)
    os.symlink("manifest.json", path)  # ELOOP on every read
    checkpoint, rejected = store.newest_valid()
    assert checkpoint == good
    assert [item.uri for item in rejected] == [newer.uri]
    store.discard(1, "t")
    with pytest.raises(StorageFailed, match="could not be read"):
        store.newest_valid()


def test_a_record_of_a_part_that_another_wrote_is_refused(tmp_path):
    store = CheckpointStore(str(tmp_path))
    part = store.write_part(1, {}, {}, token="t")
    with pytest.raises(CheckpointError, match="attempt t"):
        store.commit(1, "mine", [part], fields={})
