"""The store on a real S3-compatible server (moto's, in a process of its own): what happens on the wire is S3's API."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ports import free_port

from elastic_spark.checkpoint import Checkpoint, CheckpointStore, commands
from elastic_spark.driver.jobfile import JobFile
from elastic_spark.errors import StorageFailed

#: Above s3fs's part size, so that the file goes up as a multipart upload.
LARGE = 14 << 20

WRITE = """
import sys, torch
from elastic_spark.checkpoint import CheckpointStore

store = CheckpointStore(sys.argv[1])
create = store._storage.create

def told(path):
    print("begins", path, flush=True)
    return create(path)

store._storage.create = told
step = 100
while True:
    step += 1
    part = store.write_part(step, {"model/w": torch.full((int(sys.argv[2]) // 4,), float(step))}, {}, token="t")
    store.commit(step, "t", [part], fields={"job_id": "job"})
    print("done", step, flush=True)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address. Credentials and address reach s3fs as a user's would: by the environment."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    log = (tmp_path_factory.mktemp("s3") / "server.txt").open("wb")
    code = "from moto.server import main; main()"
    process = subprocess.Popen([sys.executable, "-c", code, "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log)
    patch = pytest.MonkeyPatch()
    try:
        deadline = time.monotonic() + 60.0
        while not _answers(address):
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server did not start in time"
            time.sleep(0.05)
        for name, value in {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": address,
        }.items():
            patch.setenv(name, value)
        yield address
    finally:
        patch.undo()
        process.kill()
        process.wait()
        log.close()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture
def store(server: str) -> CheckpointStore:
    import s3fs

    bucket = f"bucket-{uuid.uuid4().hex}"
    s3fs.S3FileSystem().mkdir(bucket)
    return CheckpointStore(f"s3://{bucket}/some/folder")


def save(store: CheckpointStore, step: int, size: int = 4000, **fields: Any) -> Checkpoint:
    part = store.write_part(step, tensors(step, size), {"step": step}, token="t")
    return store.commit(step, "t", [part], fields={"job_id": "job", **fields})


def tensors(step: int, size: int = 4000) -> dict[str, torch.Tensor]:
    return {"model/w": torch.full((size // 4,), float(step)), "model/n": torch.arange(5) + step}


def raw(store: CheckpointStore, path: str) -> bytes:
    import s3fs

    data: bytes = s3fs.S3FileSystem().cat_file(f"{store.uri}/{path}")
    return data


@pytest.mark.parametrize("size", [4000, LARGE], ids=["one-request", "multipart"])
def test_write_verify_and_load(store: CheckpointStore, size: int) -> None:
    checkpoint = save(store, 3, size)
    assert store.list() == [checkpoint]
    store.verify(checkpoint)
    loaded, meta = store.load(checkpoint)
    assert meta == {"step": 3}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors(3, size).items())
    assert checkpoint.uri.startswith("s3://")
    assert commands.pick(*_located(checkpoint.uri))[0] == checkpoint


def _located(uri: str) -> tuple[CheckpointStore, str]:
    store, name = commands.locate(uri)
    assert name is not None
    return store, name


def test_the_newest_that_verifies_is_resumed_from(store: CheckpointStore) -> None:
    import s3fs

    good, bad = save(store, 1), save(store, 2)
    body = bytearray(raw(store, f"{bad.name}/state.safetensors"))
    body[-1] ^= 1
    s3fs.S3FileSystem().pipe_file(f"{bad.uri}/state.safetensors", bytes(body))
    unfinished = store.write_part(3, tensors(3), {}, token="t")
    found, rejected = store.newest_valid("job")
    assert found == good
    assert [item.finished for item in rejected] == [False, True]
    assert "SHA-256" in rejected[1].reason
    store.commit(3, "t", [unfinished], fields={"job_id": "job"})
    newest, _ = store.newest_valid("job")
    assert newest is not None
    assert newest.step == 3


def test_prune_and_discard(store: CheckpointStore) -> None:
    for step in range(1, 6):
        save(store, step)
    store.write_part(6, tensors(6), {}, token="t")
    gone = store.prune(2)
    assert [item.step for item in store.list()] == [5, 4]
    assert len(gone) == 3
    assert len(store.attempts()) == 3, "an unfinished attempt may have a living writer"
    assert store.prune(2, unfinished_age_s=0.0) == [f"{store.uri}/step-000000000006-t"]
    store.discard(5, "t")
    assert [item.step for item in store.attempts() if isinstance(item, Checkpoint)] == [4]


@pytest.mark.parametrize("moment", ["state", "manifest"])
def test_a_writer_killed_in_the_middle_leaves_no_checkpoint(store: CheckpointStore, moment: str) -> None:
    """Killed at the first and at the last file of a large attempt; the one before is what a resume gets."""
    command = [sys.executable, "-c", WRITE, store.uri, str(LARGE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if line.startswith("begins step-000000000102") and f"/{moment}" in line:
                break
        writer.send_signal(signal.SIGKILL)
    found, rejected = store.newest_valid("job")
    assert found is not None
    assert found.step in ((101,) if moment != "manifest" else (101, 102)), "a manifest is one request: it may be there"
    assert all(not item.finished for item in rejected)
    loaded, _ = store.load(found)
    assert float(loaded["model/w"][0]) == found.step


def test_a_write_that_fails_leaves_nothing_and_is_told(store: CheckpointStore) -> None:
    def chunks() -> Iterator[memoryview]:
        yield memoryview(bytes(LARGE))
        raise RuntimeError("the snapshot went away")

    with pytest.raises(RuntimeError, match="went away"):
        store._write("step-000000000001-t/state.safetensors", chunks())
    assert store._storage.files("step-000000000001-t") == {}
    import s3fs

    bucket = store.uri.removeprefix("s3://").partition("/")[0]
    uploads = s3fs.S3FileSystem().call_s3("list_multipart_uploads", Bucket=bucket)
    assert uploads.get("Uploads", []) == [], "no parts are left that somebody would have to pay for"


def test_a_job_is_held_through_s3_too(store: CheckpointStore) -> None:
    first = JobFile(store.uri, lambda why: None)
    record, resumed = first.claim()
    first.release("FAILED")
    second = JobFile(store.uri, lambda why: None)
    again, resumed = second.claim()
    second.release("FAILED")
    assert (again.job_id, resumed) == (record.job_id, True)


def test_a_bucket_that_is_not_there_is_named_and_not_made(server: str) -> None:
    import s3fs

    with pytest.raises(StorageFailed, match=r"cannot write s3://no-such-bucket/x/.*bucket does not exist"):
        save(CheckpointStore("s3://no-such-bucket/x"), 1)
    assert not s3fs.S3FileSystem().exists("no-such-bucket")


def test_a_server_that_is_away_is_a_storage_failure(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(StorageFailed, match="cannot list s3://some/where"):
            CheckpointStore("s3://some/where").newest_valid()
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
