"""Tracking against a real ``mlflow server``: whole jobs, servers that die, hang, refuse and come back."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient
from ports import free_port

from elastic_spark.core import events as ev
from elastic_spark.core.metrics import summarise
from elastic_spark.errors import ConfigError
from elastic_spark.tracking import Tracker, find_checkpoint, replay
from elastic_spark.tracking.left import SPOOL

#: The server's own start, which takes long on a busy machine, is nobody's test.
pytestmark = pytest.mark.timeout(119, func_only=True)
MODELS = hasattr(MlflowClient, "create_logged_model")
GOLDEN = Path(__file__).parent / "goldens" / "churn.jsonl"


def wait_until(condition, limit_s=60.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)


class Server:
    """A tracking server of our own, which can be killed and started again on the same port."""

    def __init__(self, folder):
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self):
        store = f"sqlite:///{self.folder / 'server.db'}"
        where = ["--backend-store-uri", store, "--artifacts-destination", str(self.folder / "artifacts")]
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        env = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
        env["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # a scheduler that nobody needs here
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--workers", "1", *where],
                cwd=self.folder,
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(self.answers, 100.0)

    def answers(self):
        assert self.process.poll() is None, (self.folder / "server.log").read_text()[-2000:]
        try:
            urllib.request.urlopen(f"{self.uri}/health", timeout=2.0).close()
        except OSError:
            return False
        return True

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)  # the session that we started: the server and its workers
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    out = Server(tmp_path_factory.mktemp("server"))
    out.start()
    yield out
    out.kill()


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """An empty SQLite store, to be copied: MLflow takes seconds to make one."""
    path = tmp_path_factory.mktemp("database") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


class Proxy:
    """Stands before the server and misbehaves as it is told, for requests whose path holds ``on``."""

    def __init__(self, port):
        self.answer_429 = 0
        self.swallow = 0
        self.hang = threading.Event()
        self.seen = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                batch = "log-batch" in self.path
                outer.seen += batch
                if outer.hang.is_set():
                    time.sleep(600)
                if batch and outer.answer_429:
                    outer.answer_429 -= 1
                    return self.reply(429, b"{}")
                link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection")}
                link.request(self.command, self.path, body, headers)
                answer = link.getresponse()
                data = answer.read()
                link.close()
                if batch and outer.swallow:
                    outer.swallow -= 1
                    return self.reply(504, b"{}")
                return self.reply(answer.status, data)

            def reply(self, status, data):
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = forward

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.block_on_close = False
        self.uri = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def proxy(server):
    out = Proxy(server.port)
    yield out
    out.http.shutdown()
    out.http.server_close()


@pytest.fixture
def black_hole():
    """Takes connections and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """Nothing of MLflow is configured, and nothing is left behind."""
    for name in list(os.environ):
        if name.startswith(("MLFLOW_", "DATABRICKS_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mlflow.tracking.fluent, "_active_experiment_id", None)
    before = mlflow.get_tracking_uri() if mlflow.tracking.is_tracking_uri_set() else None
    yield
    while mlflow.active_run() is not None:
        mlflow.end_run()
    mlflow.set_tracking_uri(before)
    os.environ.pop("MLFLOW_TRACKING_URI", None)


@pytest.fixture
def make(tmp_path, request):
    """Trackers of this test, with what they warned of."""

    def tracker(uri, name=None, spool="spool", **options):
        said = []
        job = name or request.node.name
        options = {"experiment": request.node.name, "run_name": None, "job_id": f"{job}-1"} | options
        out = Tracker(tracking_uri=uri, job_name=job, spool_dir=str(tmp_path / spool), warn=said.append, **options)
        out.said = said
        out.finish = partial(out.finish, timeout_s=90.0)  # for a busy machine; tests of the limit set their own
        return out

    return tracker


def loss(step, value=None):
    return ev.MetricsReported(at=1e9 + step, step=step, values={"loss": step / 2 if value is None else value})


def steps(first, count=1, generation=1):
    times = tuple(1e9 + first + i for i in range(count))
    return ev.StepsCommitted(at=times[-1], generation=generation, first_step=first, times=times, rows=8 * count)


def written(step):
    digest = "sha256:" + f"{step:064x}"
    return ev.CheckpointWritten(
        at=1e9 + step, step=step, uri=f"file:///c/{step}", digest=digest, bytes=10, seconds=0.1, world_size=2
    )


def points(uri, run_id, key):
    found = MlflowClient(uri).get_metric_history(run_id, key)
    return [(item.step, item.value) for item in sorted(found, key=lambda item: (item.step, item.timestamp))]


def run_of(uri, run_id):
    return MlflowClient(uri).get_run(run_id)


def runs_of(uri, experiment):
    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    return client.search_runs([found.experiment_id]) if found else []


def artifacts_of(uri, run_id, folder=""):
    mlflow.set_tracking_uri(uri)  # MLflow 2 finds proxied artifacts by the global URI alone
    out = []
    for item in MlflowClient(uri).list_artifacts(run_id, folder):
        out += artifacts_of(uri, run_id, item.path) if item.is_dir else [item.path]
    return out


def models_of(uri, experiment_id):
    found = MlflowClient(uri).search_logged_models([experiment_id])
    return sorted((int(m.params["global_step"]), str(m.status), m.params["sha256"]) for m in found)


# --- a whole job ------------------------------------------------------------------------------------------------------


def test_a_recorded_job_tells_its_story(server, make, tmp_path):
    with GOLDEN.open() as lines:
        log = list(ev.read_log(lines))
    tracker = make(server.uri)
    run_id = tracker.start({"lr": 0.1, "model": Server, "env": {"API_TOKEN": "hush"}}, {"team": "blue"})
    for event in log:
        tracker.publish(event)
    page = tmp_path / "some-name.html"
    page.write_text("<html>")
    files = {"elastic/events.jsonl": str(GOLDEN), "elastic/report.html": str(page)}
    tracker.finish("FINISHED", summary=summarise(log), artifacts=lambda: files)
    run = run_of(server.uri, run_id)
    assert (run.info.status, tracker.said) == ("FINISHED", [])
    assert run.info.end_time is not None
    assert run.data.params["lr"] == "0.1"
    assert run.data.params["model"].endswith("test_tracking.Server")
    assert run.data.params["env.API_TOKEN"] == "***"
    assert run.data.tags["team"] == "blue"
    assert run.data.tags["elastic.change.count"] == "4"
    assert "pause 0.34 s" in run.data.tags["elastic.change.001"]
    assert "| rows | 77,100 once, 0 twice, 0 never |" in run.data.tags["mlflow.note.content"]
    assert run.data.tags["elastic.verdict"].startswith("FINISHED: rows 77,100 once, 0 twice, 0 never; ")
    assert abs(float(run.data.tags["elastic.heartbeat_unix"]) - time.time()) < 120
    assert run.data.metrics["summary/rows_once"] == 77100
    seen = [step for step, _ in points(server.uri, run_id, "loss")]
    assert seen == sorted(set(seen))
    assert (seen[-1], len(points(server.uri, run_id, "replay/loss"))) == (303, 3)
    assert [value for _, value in points(server.uri, run_id, "elastic/world_size")][:4] == [4, 3, 4, 3]
    found = artifacts_of(server.uri, run_id)
    wanted = ["elastic/changes.json", "elastic/events.jsonl", "elastic/report.html", "logs/w2.txt"]
    assert [path for path in found if path in wanted] == wanted
    table = MlflowClient(server.uri).load_table(tracker.experiment_id, "elastic/changes.json", [run_id])
    assert list(table["pause_s"].round(2)) == [0.34, 0.59, 0.22, 1.36]
    assert run.inputs.dataset_inputs[0].dataset.name == "train"
    assert run.data.tags["elastic.latest_checkpoint_step"] == "303"
    if MODELS:
        assert [(step, status) for step, status, _ in models_of(server.uri, tracker.experiment_id)] == [
            (60, "READY"),
            (197, "READY"),
            (303, "READY"),
        ]
        assert sorted(item.step for item in run.outputs.model_outputs) == [60, 197, 303]
    else:
        assert json.loads(run.data.tags["elastic.checkpoint.0000000060"])["uri"].endswith("60")


def test_limits_of_keys_values_and_numbers(server, make):
    tracker = make(server.uri)
    given = {f"p{i}": i for i in range(150)} | {"long": "x" * 10_000, "a:b*c": 1, "a_b_c": 2, "k" * 300: 3}
    run_id = tracker.start(given, {})
    many = {f"m{i}": float(i) for i in range(2_500)}
    tracker.publish(ev.MetricsReported(at=1e9, step=1, values=many))
    odd = {"nan": float("nan"), "inf": float("inf"), "minus": float("-inf"), "bad:key*": 1.0, "huge": 1e300}
    tracker.publish(ev.MetricsReported(at=1e9, step=1, values=odd))
    tracker.publish(ev.Warned(at=1e9, message="w" * 20_000))
    tracker.finish("FINISHED", summary={}, artifacts=dict)
    run = run_of(server.uri, run_id)
    assert tracker.said == []
    assert sum(key.startswith("m") and key[1:].isdigit() for key in run.data.metrics) == 2_500
    assert run.data.metrics["m2499"] == 2499.0
    assert {"nan", "inf", "minus", "bad_key_", "huge"} <= set(run.data.metrics)
    assert len(run.data.params) == 154
    assert (run.data.params["a_b_c"], run.data.params["a_b_c.2"]) == ("1", "2")
    assert run.data.params["long"].endswith("see config/long.txt")
    assert artifacts_of(server.uri, run_id) == ["config/long.txt"]
    assert run.data.tags["elastic.warning.001"].endswith("(cut)")
    assert run.info.status == "FINISHED"


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_status_is_true_even_if_an_artifact_is_missing(server, make, status):
    tracker = make(server.uri)
    run_id = tracker.start({}, {})
    tracker.publish(ev.JobFinished(at=1e9, status=status, error="ValueError: x"))
    tracker.finish(status, summary={}, artifacts=lambda: {"elastic/x.txt": "/does/not/exist"})
    tracker.finish("FINISHED", summary={}, artifacts=dict)  # the first word counts
    tracker.publish(loss(1))
    run = run_of(server.uri, run_id)
    assert (run.info.status, run.data.tags["elastic.error"]) == (status, "ValueError: x")
    assert run.info.end_time is not None
    assert any("is gone" in text for text in tracker.said)


def test_the_status_is_told_before_there_are_files(server, make):
    tracker, seen = make(server.uri), []
    run_id = tracker.start({}, {})

    def artifacts():
        seen.append(run_of(server.uri, run_id).info.status)
        raise SystemExit(7)

    with pytest.raises(SystemExit):
        tracker.finish("FINISHED", summary=summarise([]), artifacts=artifacts)
    assert seen == ["FINISHED"]
    assert not tracker._thread.is_alive()


def test_the_time_that_files_take_to_be_made_is_not_that_of_mlflow(server, make):
    tracker, begin = make(server.uri), []
    run_id = tracker.start({}, {})

    def artifacts():
        begin.append((tracker._store.deadline, time.monotonic()))
        wait_until(lambda: time.monotonic() > begin[0][1] + 0.3)
        return {"elastic/events.jsonl": str(GOLDEN)}

    tracker.finish("FINISHED", summary={}, artifacts=artifacts)
    assert tracker._store.deadline > begin[0][0] + 0.3
    assert (artifacts_of(server.uri, run_id), tracker.said) == (["elastic/events.jsonl"], [])


def test_a_defect_costs_a_turn_and_not_the_end(make, tmp_path, database):
    tracker = make(f"sqlite:///{shutil.copy(database, tmp_path / 'local.db')}")
    run_id = tracker.start({}, {})
    tracker.publish(ev.MetricsReported(at=1e9, step=1, values=None))
    wait_until(lambda: tracker.said)
    for step in (2, 3):
        tracker.publish(loss(step))
    tracker.publish(ev.MetricsReported(at=1e9, step=1, values=None))
    tracker.finish("FINISHED", summary=summarise([]), artifacts=dict)
    assert points(tracker.uri, run_id, "loss") == [(2, 1.0), (3, 1.5)]
    assert run_of(tracker.uri, run_id).info.status == "FINISHED"
    assert [text[:29] for text in tracker.said] == ["tracking failed, and goes on:"]


def test_the_end_goes_past_what_cannot_be_sent(make, tmp_path, database):
    tracker = make(f"sqlite:///{shutil.copy(database, tmp_path / 'local.db')}")
    run_id = tracker.start({}, {})
    tracker._pending.append({"of no": "kind"})
    wait_until(lambda: any("KeyError" in text for text in tracker.said))
    tracker.publish(loss(1))
    tracker.finish("FAILED", summary=summarise([]), artifacts=dict, timeout_s=20.0)
    assert run_of(tracker.uri, run_id).info.status == "FAILED"
    kept = [json.loads(line) for line in (tmp_path / "spool" / SPOOL).read_text().splitlines()]
    assert [r["step"] for r in kept if r.get("key") == "loss"] == [1]


# --- resume and neighbours --------------------------------------------------------------------------------------------


def test_a_killed_job_goes_on_in_the_same_run(server, make):
    name = "it's a job"
    first = make(server.uri, name=name, experiment="resume")
    run_id = first.start({"num_proc": 3, "lr": 0.1, "same": 1}, {})
    for step in range(1, 58):
        first.publish(loss(step))
    first.publish(steps(1, 57))
    wait_until(lambda: run_of(server.uri, run_id).data.tags.get("elastic.step") == "57")
    first._store.send = lambda records, again: 0  # this driver is dead from here on

    second = make(server.uri, name=name, experiment="resume", run_id=run_id, spool="second")
    assert second.start({"num_proc": 2, "lr": 0.2, "same": 1, "new": second.start}, {}) == run_id
    assert run_of(server.uri, run_id).info.status == "RUNNING"
    for step in range(51, 71):
        second.publish(loss(step))
    second.finish("KILLED", summary={}, artifacts=dict)

    third = make(server.uri, name=name, experiment="resume", run_id=run_id, spool="third")
    third.start({"num_proc": 2}, {})
    assert run_of(server.uri, run_id).info.status == "RUNNING"
    third.finish("FINISHED", summary={}, artifacts=dict)
    run = run_of(server.uri, run_id)
    assert (run.data.params["num_proc"], run.data.params["lr"], run.data.params["same"]) == ("3", "0.1", "1")
    assert "0x" not in run.data.params["new"]
    assert run.data.tags["elastic.param.1.num_proc"] == "2"
    assert run.data.tags["elastic.param.1.lr"] == "0.2"
    assert run.data.tags["elastic.param.2.num_proc"] == "2"
    assert "elastic.param.1.same" not in run.data.tags
    assert run.data.tags["elastic.resumes"] == "2"
    assert [step for step, _ in points(server.uri, run_id, "loss")] == list(range(1, 71))
    assert [step for step, _ in points(server.uri, run_id, "replay/loss")] == list(range(51, 58))
    assert len(runs_of(server.uri, "resume")) == 1
    assert run.info.status == "FINISHED"
    first.finish("KILLED", summary={}, artifacts=dict, timeout_s=1.0)


def test_a_run_that_goes_on_under_another_driver_is_left_alone(server, make):
    first = make(server.uri, spool="first")
    run_id = first.start({"lr": 1}, {})
    first.publish(loss(1))
    second = make(server.uri, spool="second", run_id=run_id)
    second.start({"lr": 1}, {})
    first.leave()
    first.publish(ev.JobFinished(at=1e9, status="FAILED", error="taken over"))
    first.finish("FAILED", summary=summarise([]), artifacts=lambda: {"elastic/events.jsonl": str(GOLDEN)})
    run = run_of(server.uri, run_id)
    assert run.info.status == "RUNNING"
    assert {"elastic.error", "mlflow.note.content"}.isdisjoint(run.data.tags)
    assert artifacts_of(server.uri, run_id) == []
    assert first.said == []
    second.finish("FINISHED", summary={}, artifacts=dict)
    assert run_of(server.uri, run_id).info.status == "FINISHED"


def test_what_a_dead_driver_left_on_disk_is_sent_first(server, make, tmp_path):
    first = make(server.uri)
    run_id = first.start({}, {})
    first._store.send = lambda records, again: 0
    for step in range(1, 11):
        first.publish(loss(step))
    first.publish(steps(1, 10))
    first.finish("KILLED", summary={}, artifacts=dict, timeout_s=2.0)
    assert (tmp_path / "spool" / SPOOL).exists()
    second = make(server.uri, run_id=run_id)
    second.start({}, {})
    second.publish(loss(9))
    second.publish(loss(11))
    wait_until(lambda: len(points(server.uri, run_id, "loss")) == 11)
    assert run_of(server.uri, run_id).info.status == "RUNNING"
    second.finish("FINISHED", summary={}, artifacts=dict)
    assert [step for step, _ in points(server.uri, run_id, "replay/loss")] == [9]
    assert not (tmp_path / "spool" / SPOOL).exists()


def test_records_for_another_run_are_set_aside(server, make, tmp_path):
    first = make(server.uri)
    other = first.start({}, {})
    first._store.send = lambda records, again: 0
    first.publish(loss(1))
    first.finish("FAILED", summary={}, artifacts=dict, timeout_s=2.0)
    second = make(server.uri)
    second.start({}, {})
    second.finish("FINISHED", summary={}, artifacts=dict)
    assert any(other in text for text in second.said)
    assert replay(str(tmp_path / "spool" / other)) == other
    assert points(server.uri, other, "loss") == [(1, 0.5)]
    assert run_of(server.uri, other).info.status == "FAILED"


def test_nested_under_the_users_active_run(server, make):
    mlflow.set_tracking_uri(server.uri)
    mlflow.set_experiment("the user's")
    with mlflow.start_run() as theirs:
        tracker = make(None, experiment=None)
        run_id = tracker.start({"a": 1}, {})
        mlflow.log_metric("theirs", 1.0)
        tracker.finish("FINISHED", summary={}, artifacts=dict)
        assert mlflow.active_run().info.run_id == theirs.info.run_id
        assert run_of(server.uri, theirs.info.run_id).info.status == "RUNNING"
    ours = run_of(server.uri, run_id)
    assert ours.data.tags["mlflow.parentRunId"] == theirs.info.run_id
    assert ours.info.experiment_id == theirs.info.experiment_id
    assert run_of(server.uri, theirs.info.run_id).data.params == {}
    assert mlflow.get_tracking_uri() == server.uri


def test_the_users_own_run_is_attached_to_and_not_ended(server, make):
    mlflow.set_tracking_uri(server.uri)
    mlflow.set_experiment("the user's")
    with mlflow.start_run() as theirs:
        tracker = make(None, experiment=None, run_id=theirs.info.run_id)
        assert tracker.start({"a": 1}, {}) == theirs.info.run_id
        tracker.finish("FINISHED", summary={}, artifacts=dict)
        assert run_of(server.uri, theirs.info.run_id).info.status == "RUNNING"
        assert run_of(server.uri, theirs.info.run_id).data.params == {"a": "1"}


def test_an_active_run_in_another_store_is_left_alone(server, make, database):
    mlflow.set_tracking_uri(f"sqlite:///{database}")
    with mlflow.start_run():
        tracker = make(server.uri)
        run_id = tracker.start({}, {})
        tracker.finish("FINISHED", summary={}, artifacts=dict)
    assert "mlflow.parentRunId" not in run_of(server.uri, run_id).data.tags


# --- servers that go away ---------------------------------------------------------------------------------------------


def test_server_killed_and_back_again(server, make, tmp_path):
    """Nothing waits for it, everything arrives in order, each point once, in one run."""
    tracker = make(server.uri)
    run_id = tracker.start({}, {})
    for step in range(1, 51):
        tracker.publish(loss(step))
    tracker.publish(written(50))
    wait_until(lambda: len(points(server.uri, run_id, "loss")) == 50)
    server.kill()
    begin = time.monotonic()
    for step in range(51, 3_001):
        tracker.publish(loss(step))
    tracker.publish(written(60))
    assert time.monotonic() - begin < 3.0
    wait_until(lambda: (tmp_path / "spool" / SPOOL).exists())
    assert any("is away" in text for text in tracker.said)
    tracker.publish(loss(3_001))
    server.start()
    tracker.publish(written(70))
    tracker.finish("FINISHED", summary={}, artifacts=dict)
    assert points(server.uri, run_id, "loss") == [(step, step / 2) for step in range(1, 3_002)]
    assert run_of(server.uri, run_id).info.status == "FINISHED"
    assert len(runs_of(server.uri, "test_server_killed_and_back_again")) == 1
    assert not (tmp_path / "spool" / SPOOL).exists()
    if MODELS:
        found = models_of(server.uri, tracker.experiment_id)
        assert [(step, status) for step, status, _ in found] == [(50, "READY"), (60, "READY"), (70, "READY")]


def test_where_the_disk_is_full_too_records_wait_in_memory(server, make, tmp_path):
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / SPOOL).symlink_to("/dev/full")
    tracker = make(server.uri)
    run_id = tracker.start({}, {})
    server.kill()
    for step in range(1, 101):
        tracker.publish(loss(step))
    wait_until(lambda: any("records wait in memory" in text for text in tracker.said))
    server.start()
    tracker.finish("FINISHED", summary={}, artifacts=dict)
    assert points(server.uri, run_id, "loss") == [(step, step / 2) for step in range(1, 101)]
    assert run_of(server.uri, run_id).info.status == "FINISHED"


def test_what_neither_mlflow_nor_the_disk_takes_is_said(black_hole, make, tmp_path):
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / SPOOL).symlink_to("/dev/full")
    tracker = make(black_hole)
    tracker.start({}, {})
    tracker.publish(loss(1))
    tracker.finish("KILLED", summary={}, artifacts=dict, timeout_s=3.0)
    assert any("are lost: there is no room for them" in text for text in tracker.said)


def test_a_black_hole_stops_nobody_and_keeps_everything(server, black_hole, make, tmp_path):
    tracker = make(black_hole)
    begin = time.monotonic()
    assert tracker.start({"a": 1}, {"team": "blue"}) == ""
    assert time.monotonic() - begin < 20.0
    begin = time.monotonic()
    for step in range(1, 5_001):
        tracker.publish(loss(step))
    tracker.publish(steps(1, 5_000))
    assert time.monotonic() - begin < 3.0
    begin = time.monotonic()
    files = {"elastic/events.jsonl": str(GOLDEN)}
    tracker.finish("FAILED", summary=summarise([]), artifacts=lambda: files, timeout_s=6.0)
    assert time.monotonic() - begin < 8.0
    assert tracker.run_id == ""
    kept = [json.loads(line) for line in (tmp_path / "spool" / SPOOL).read_text().splitlines()]
    assert [r["step"] for r in kept if r["kind"] == "metric" and r["key"] == "loss"] == list(range(1, 5_001))
    assert [r["status"] for r in kept if r["kind"] == "end"] == ["FAILED"]
    assert any("replay(" in text for text in tracker.said)

    with pytest.raises(TimeoutError, match="is away"):
        replay(str(tmp_path / "spool"), timeout_s=0.1)
    run_id = replay(str(tmp_path / "spool"), tracking_uri=server.uri)
    run = run_of(server.uri, run_id)
    assert (run.info.status, run.data.params) == ("FAILED", {"a": "1"})
    assert run.data.tags["team"] == "blue"
    assert len(points(server.uri, run_id, "loss")) == 5_000
    assert artifacts_of(server.uri, run_id) == ["elastic/events.jsonl"]
    assert replay(str(tmp_path / "spool"), tracking_uri=server.uri) == run_id  # nothing more to send, nothing made
    assert len(runs_of(server.uri, "test_a_black_hole_stops_nobody_and_keeps_everything")) == 1


@pytest.mark.parametrize("begun", [True, False])
def test_a_local_store_that_hangs_at_the_end_keeps_nobody_waiting_and_loses_nothing(make, tmp_path, database, begun):
    """One request may take two minutes there: it is the one under way when the job ends."""
    folder = Path(shutil.copy(database, tmp_path / "local.db"))
    tracker = make(f"sqlite:///{folder}?timeout=100")  # how long SQLite waits for a lock
    other = sqlite3.connect(folder, isolation_level=None)
    if not begun:
        other.execute("BEGIN EXCLUSIVE")
        tracker._store.limit_s, limit_s = 1.0, tracker._store.limit_s
        threading.Timer(0.5, lambda: setattr(tracker._store, "limit_s", limit_s)).start()
    run_id = tracker.start({"a": 1}, {})
    assert bool(run_id) == begun
    if begun:
        other.execute("BEGIN EXCLUSIVE")
    tracker.publish(loss(1))
    limit = time.monotonic() + 30.0
    while not any(thread.name == "elastic-spark-mlflow-call" for thread in threading.enumerate()):
        assert time.monotonic() < limit, "no request is on its way"
        time.sleep(0.01)
    begin = time.monotonic()
    tracker.finish("FINISHED", summary=summarise([]), artifacts=dict, timeout_s=6.0)
    assert time.monotonic() - begin < 30.0, "SQLite would have waited for 100 s"
    tracker._thread.join(30.0)
    assert not tracker._thread.is_alive()
    other.execute("ROLLBACK")
    other.close()
    kept = [json.loads(line) for line in (tmp_path / "spool" / SPOOL).read_text().splitlines()]
    assert [r["step"] for r in kept if r["kind"] == "metric" and r["key"] == "loss"] == [1]
    assert [r["status"] for r in kept if r["kind"] == "end"] == ["FINISHED"]
    assert any("replay(" in text for text in tracker.said)
    run_id = replay(str(tmp_path / "spool"))
    assert run_of(tracker.uri, run_id).info.status == "FINISHED"
    assert points(tracker.uri, run_id, "loss") == [(1, 0.5)]


def test_a_server_that_hangs_in_mid_job_and_then_answers(proxy, make):
    tracker = make(proxy.uri)
    run_id = tracker.start({}, {})
    tracker._store.limit_s = 2.0
    proxy.hang.set()
    for step in range(1, 101):
        tracker.publish(loss(step))
    wait_until(lambda: tracker.said)
    proxy.hang.clear()
    for step in range(101, 201):
        tracker.publish(loss(step))
    tracker.finish("FINISHED", summary={}, artifacts=dict, timeout_s=60.0)
    assert points(proxy.uri, run_id, "loss") == [(step, step / 2) for step in range(1, 201)]
    assert run_of(proxy.uri, run_id).info.status == "FINISHED"


def test_too_many_requests_and_stored_though_504(proxy, make):
    """429 and 504 are answers to ask again; what was stored the first time is there once."""
    tracker = make(proxy.uri)
    run_id = tracker.start({}, {})
    proxy.answer_429, proxy.swallow = 2, 2
    for step in range(1, 101):
        tracker.publish(loss(step))
    tracker.finish("FINISHED", summary={}, artifacts=dict, timeout_s=60.0)
    assert points(proxy.uri, run_id, "loss") == [(step, step / 2) for step in range(1, 101)]
    assert (proxy.answer_429, proxy.swallow) == (0, 0)
    assert len(runs_of(proxy.uri, "test_too_many_requests_and_stored_though_504")) == 1


@pytest.mark.skipif(not MODELS, reason="MLflow 2 has no models to make twice")
def test_a_checkpoint_sent_twice_is_one_model(server, make):
    tracker = make(server.uri)
    run_id = tracker.start({}, {})
    tracker.publish(written(10))
    wait_until(lambda: len(models_of(server.uri, tracker.experiment_id)) == 1)
    record = {"kind": "checkpoint", "step": 10, "uri": "file:///c/10", "digest": "sha256:" + f"{10:064x}"}
    record |= {"bytes": 10, "seconds": 0.1, "world_size": 2}
    assert tracker._store.send([record], again=True) == 1
    tracker.finish("FINISHED", summary={}, artifacts=dict)
    assert len(models_of(server.uri, tracker.experiment_id)) == 1
    assert len(run_of(server.uri, run_id).outputs.model_outputs) == 1


def test_a_run_deleted_meanwhile_is_said_and_hangs_nobody(server, make):
    tracker = make(server.uri)
    run_id = tracker.start({}, {})
    MlflowClient(server.uri).delete_run(run_id)
    tracker.publish(loss(1))
    tracker.finish("FINISHED", summary={}, artifacts=dict)
    assert any("refuses" in text for text in tracker.said)


def test_the_spool_is_bounded_and_says_when_it_cuts(black_hole, make, tmp_path):
    tracker = make(black_hole, spool_limit_bytes=50_000)
    tracker.start({}, {})
    for step in range(1, 5_001):
        tracker.publish(loss(step))
    tracker.finish("KILLED", summary={}, artifacts=dict, timeout_s=3.0)
    kept = (tmp_path / "spool" / SPOOL).read_text().splitlines()
    assert sum(map(len, kept)) < 80_000
    assert [json.loads(line)["kind"] for line in kept][-1] == "end"
    assert any("full" in text for text in tracker.said)


# --- where and whether ------------------------------------------------------------------------------------------------


def test_nothing_configured_is_sqlite_here(make, tmp_path, database):
    shutil.copy(database, tmp_path)
    tracker = make(None, experiment=None)
    run_id = tracker.start({"a": 1}, {})
    tracker.finish("FINISHED", summary={}, artifacts=lambda: {"x.jsonl": str(GOLDEN)})
    assert tracker.uri == f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert (tmp_path / "mlartifacts" / run_id / "artifacts" / "x.jsonl").exists()
    run = run_of(tracker.uri, run_id)
    assert run.info.status == "FINISHED"
    assert MlflowClient(tracker.uri).get_experiment(run.info.experiment_id).name == "elastic_spark"
    assert not mlflow.tracking.is_tracking_uri_set()
    assert "MLFLOW_TRACKING_URI" not in os.environ


def test_the_environment_is_followed(monkeypatch, server, make):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "by environment")
    tracker = make(None, experiment=None)
    run_id = tracker.start({}, {})
    tracker.finish("FINISHED", summary={}, artifacts=dict)
    assert [run.info.run_id for run in runs_of(server.uri, "by environment")] == [run_id]


@pytest.mark.skipif(not MODELS, reason="MLflow 2 has a file store")
@pytest.mark.parametrize("uri", ["file:./mlruns", "./mlruns", "/tmp/mlruns"])
def test_a_file_store_is_refused_with_the_way_out(make, uri, monkeypatch):
    with pytest.raises(ConfigError, match=r"sqlite:///mlflow\.db.*MLFLOW_ALLOW_FILE_STORE"):
        make(uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    make(uri)


@pytest.mark.parametrize(
    ("uri", "options", "words"),
    [
        ("databricks://no-such-profile", {}, "Databricks host and token"),
        ("server", {"run_id": "0" * 32}, "not found"),
    ],
)
def test_what_cannot_be_is_said_at_the_start(server, make, uri, options, words):
    tracker = make(server.uri if uri == "server" else uri, **options)
    with pytest.raises(ConfigError, match=words):
        tracker.start({}, {})
    tracker.finish("FAILED", summary={}, artifacts=dict, timeout_s=5.0)


def test_a_sqlite_file_that_cannot_be_made_is_said_at_once(make):
    with pytest.raises(ConfigError, match="cannot be written"):
        make("sqlite:////does/not/exist/mlflow.db")


def test_deleted_experiment_and_run(server, make):
    tracker = make(server.uri)
    run_id = tracker.start({}, {})
    tracker.finish("FINISHED", summary={}, artifacts=dict)
    MlflowClient(server.uri).delete_run(run_id)
    with pytest.raises(ConfigError, match="deleted"):
        make(server.uri, run_id=run_id).start({}, {})
    MlflowClient(server.uri).delete_experiment(tracker.experiment_id)
    with pytest.raises(ConfigError, match="deleted"):
        make(server.uri).start({}, {})


def test_a_server_that_is_away_is_named_when_a_run_is_looked_for(black_hole):
    for uri in (black_hole, "http://127.0.0.1:9"):
        with pytest.raises(ConfigError, match="Is tracking_uri right"):
            find_checkpoint("0" * 32, tracking_uri=uri)


def test_passwords_are_not_shown(make):
    tracker = make("http://me:hush@127.0.0.1:9")
    assert tracker.start({"uri": "http://me:hush@h/x"}, {}) == ""
    tracker.finish("FAILED", summary={}, artifacts=dict, timeout_s=2.0)
    assert "hush" not in " ".join([*tracker.said, tracker.uri])
    assert "hush" not in (Path("spool") / SPOOL).read_text()
    assert (Path("spool") / "tracking.json").stat().st_mode & 0o077 == 0


def test_nothing_to_replay(tmp_path):
    with pytest.raises(ConfigError, match="nothing was left"):
        replay(str(tmp_path))


def _one_driver(uri, folder, number, results):
    tracker = Tracker(
        tracking_uri=uri,
        experiment="race",
        run_name=None,
        job_name=f"j{number}",
        job_id=str(number),
        spool_dir=f"{folder}/{number}",
    )
    results.put(tracker.start({"number": number}, {}))
    tracker.finish("FINISHED", summary={}, artifacts=dict)


@pytest.mark.parametrize(("fresh", "count"), [(False, 4), (True, 4)])
def test_drivers_that_start_together_make_one_experiment(server, tmp_path, fresh, count):
    uri = f"sqlite:///{tmp_path / 'fresh.db'}" if fresh else server.uri
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mlflow", "elastic_spark.tracking"])
    results = context.Queue()
    drivers = [context.Process(target=_one_driver, args=(uri, tmp_path, n, results)) for n in range(count)]
    for driver in drivers:
        driver.start()
    run_ids = {results.get(timeout=110.0) for _ in drivers}
    for driver in drivers:
        driver.join(60.0)
    assert len(run_ids) == count
    runs = runs_of(uri, "race")
    assert {run.info.run_id for run in runs} == run_ids
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert len([e for e in MlflowClient(uri).search_experiments() if e.name == "race"]) == 1
