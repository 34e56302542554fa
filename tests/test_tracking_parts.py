"""The parts of tracking that need no MLflow: the spool, keys and values, calls with a limit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_spark.tracking import values
from elastic_spark.tracking.spool import Spool
from elastic_spark.tracking.store import MOST_METRICS, MOST_TAGS, _batches


def metric(n):
    return {"kind": "metric", "n": n}


# --- spool ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["append", "deliver", "crash"]), st.integers(1, 7)), max_size=25))
def test_spool_is_a_queue_that_survives(tmp_path_factory, actions):
    """Against a list: whatever is appended comes out once and in order, over re-opened files."""
    path = tmp_path_factory.mktemp("spool") / "s.jsonl"
    spool, model, number = Spool(path), [], 0
    for action, amount in actions:
        if action == "append":
            fresh = [metric(number + i) for i in range(amount)]
            number += amount
            spool.append(fresh)
            model += fresh
        elif action == "deliver":
            read = spool.read(amount)
            assert [record for record, _ in read] == model[:amount]
            if read:
                spool.delivered(read[-1][1])
                del model[: len(read)]
        else:
            spool = Spool(path)
        assert bool(spool) == bool(model)
    assert [record for record, _ in spool.read(1_000)] == model
    assert path.exists() == bool(model)


def test_a_torn_line_is_passed_over_and_the_next_one_is_whole(tmp_path):
    path = tmp_path / "s.jsonl"
    Spool(path).append([metric(1)])
    with path.open("a") as file:
        file.write('{"kind": "met')
    spool = Spool(path)
    spool.append([metric(2)])
    assert [record["n"] for record, _ in spool.read(10)] == [1, 2]
    only_torn = tmp_path / "t.jsonl"
    only_torn.write_text('{"kind"')
    spool = Spool(only_torn)
    assert spool.read(10) == []
    assert not spool


def test_a_crash_between_delivery_and_its_note_delivers_again(tmp_path):
    spool = Spool(tmp_path / "s.jsonl")
    spool.append([metric(n) for n in range(4)])
    spool.delivered(spool.read(1)[-1][1])
    spool.read(2)  # sent, and then the process dies
    assert [record["n"] for record, _ in Spool(tmp_path / "s.jsonl").read(9)] == [1, 2, 3]
    (tmp_path / "s.jsonl.sent").write_text("nonsense")
    assert len(Spool(tmp_path / "s.jsonl").read(9)) == 4


def test_the_limit_cuts_metrics_first_and_counts_them(tmp_path):
    spool = Spool(tmp_path / "s.jsonl", limit_bytes=300)
    spool.append([metric(n) for n in range(100)])
    assert (spool.cut, len(spool.read(999))) == (88, 12)  # 10 lines of 24 bytes and 2 of 25
    spool.append([{"kind": "end", "status": "FAILED"}])
    assert spool.read(999)[-1][0]["kind"] == "end"
    spool.append([{"kind": "text", "text": "x" * 1_000}])
    assert spool.cut == 89
    assert spool.waiting_bytes <= 450


def test_the_spool_is_for_its_owner_alone(tmp_path):
    Spool(tmp_path / "deep" / "s.jsonl").append([metric(1)])
    assert (tmp_path / "deep" / "s.jsonl").stat().st_mode & 0o077 == 0


FULL_AT_100_BYTES = """
import resource, sys
from elastic_spark.tracking.spool import Spool

spool = Spool(sys.argv[1])
spool.append([{"n": 1}])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
try:
    spool.append({"n": n} for n in range(2, 99))
except OSError as error:
    print(error.strerror)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
spool.append([{"n": 99}])
print([record["n"] for record, _ in spool.read(999)])
"""


def test_what_a_full_disk_took_in_part_is_taken_back(tmp_path):
    command = [sys.executable, "-c", FULL_AT_100_BYTES, str(tmp_path / "s.jsonl")]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["File too large", "[1, 99]"]
    assert len((tmp_path / "s.jsonl").read_bytes().splitlines()) == 2


def test_a_full_disk_takes_nothing_and_counts_nothing(tmp_path):
    (tmp_path / "s.jsonl").symlink_to("/dev/full")
    spool = Spool(tmp_path / "s.jsonl", limit_bytes=30)
    with pytest.raises(OSError, match="No space left"):
        spool.append([metric(n) for n in range(9)])
    assert (bool(spool), spool.cut) == (False, 0)
    (tmp_path / "s.jsonl").unlink()
    spool.append([metric(1), {"kind": "tag"}])
    (tmp_path / "s.jsonl.sent").symlink_to("/dev/full")
    spool.delivered(spool.read(1)[0][1])
    assert [record["kind"] for record, _ in spool.read(9)] == ["tag"]


# --- keys and values --------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=400))
def test_any_text_gives_a_key_that_mlflow_takes(text):
    from mlflow.utils.validation import _validate_metric_name, _validate_param_keys_unique

    found = values.key(text)
    _validate_metric_name(found)
    _validate_param_keys_unique([])
    assert 0 < len(found) <= 250


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("loss", "loss"),
        ("a/b.c-d e", "a/b.c-d e"),
        ("a:b*é", "a_b__"),
        ("../x", "x"),
        ("..", "_"),
        ("a//b/", "a/b"),
        ("..0", "_0"),
        (".", "_"),
    ],
)
def test_keys(name, key):
    assert values.key(name) == key


def test_params_are_the_same_in_every_process():
    class Thing:
        pass

    short, long = values.params({"f": values.key, "o": Thing(), "d": {"x": 1, "y": {"z": None}}, "e": {}, "n": 0.1})
    assert short["f"] == "elastic_spark.tracking.values.key"
    assert "0x" not in short["o"]
    assert (short["d.x"], short["d.y.z"], short["e"], short["n"]) == ("1", "None", "{}", "0.1")
    assert long == {}


def test_secrets_do_not_get_out():
    given_ = {"env": {"AWS_SECRET_ACCESS_KEY": "a", "HF_TOKEN": "b", "Password": "c", "OMP_NUM_THREADS": "1"}}
    short, _ = values.params({**given_, "uri": "s3://user:hush@host/x", "seed": 3, "uris": ["http://u:p@h/"]})
    assert set(short.values()) == {"***", "1", "s3://host/x", "3", "['http://h/']"}


def test_long_params_are_cut_and_kept_whole_elsewhere():
    short, long = values.params({"a/b": "x" * 501, "fits": "x" * 500})
    assert len(short["a/b"]) <= 500
    assert short["a/b"].endswith("see config/a.b.txt")
    assert long == {"config/a.b.txt": "x" * 501}
    assert 4_990 < len(values.tag("y" * 9_000)) <= 5_000


def test_names_that_mlflow_cannot_tell_apart_stay_apart():
    short, _ = values.params({"a:b": 1, "a*b": 2, "a?b": 3})
    assert short == {"a_b": "1", "a_b.2": "2", "a_b.3": "3"}


# --- batches and limits -----------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["metric", "tag", "tag", "text"]), max_size=3_000))
def test_batches_keep_order_and_the_limits_of_one_request(kinds):
    records = [{"kind": kind, "n": n} for n, kind in enumerate(kinds)]
    batches = list(_batches(records))
    assert [record for batch in batches for record in batch] == records
    for batch in batches:
        found = [record["kind"] for record in batch]
        assert found.count("tag") <= MOST_TAGS
        assert len(found) <= MOST_METRICS
        assert found == ["text"] or "text" not in found


def test_nothing_imports_mlflow_before_it_is_needed():
    code = "import sys, elastic_spark.tracking; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=False).returncode == 0
