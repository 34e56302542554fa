"""Notices of the clouds, from servers that answer as their documentation says; and sources of one's own."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from elastic_spark import notices
from elastic_spark.config import JobConfig
from elastic_spark.errors import ConfigError


class Metadata(http.server.BaseHTTPRequestHandler):
    """Answers ``server.answers[(method, path)]``: a text, or a function of the headers; 404 for what is not there."""

    def do_GET(self) -> None:
        answer = self.server.answers.get((self.command, self.path))
        text = answer(self.headers) if callable(answer) else answer
        self.send_response(200 if text is not None else 404)
        self.end_headers()
        self.wfile.write((text or "").encode())

    do_PUT = do_GET

    def log_message(self, *_words: object) -> None:
        pass


@pytest.fixture
def cloud() -> Iterator[http.server.ThreadingHTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        server.answers = {}
        server.base = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_aws_with_a_token(cloud):
    action = ("GET", "/latest/meta-data/spot/instance-action")
    told = json.dumps({"action": "terminate", "time": "2026-11-30T08:22:00Z"})
    asked = []

    def token(headers):
        asked.append(headers["X-aws-ec2-metadata-token-ttl-seconds"])
        return "the token"

    cloud.answers["PUT", "/latest/api/token"] = token
    assert notices.aws(cloud.base) is None
    cloud.answers[action] = lambda headers: told if headers["X-aws-ec2-metadata-token"] == "the token" else None
    assert notices.aws(cloud.base) == "AWS will terminate this spot instance at 2026-11-30T08:22:00Z"
    assert asked == ["60", "60"]


def test_azure_speaks_of_all_machines_of_a_set(cloud):
    def told(kind, resources):
        event = {"EventType": kind, "Resources": resources, "NotBefore": "Mon, 30 Nov 2026 08:22:00 GMT"}
        text = json.dumps({"DocumentIncarnation": 2, "Events": [event]})
        return lambda headers: text if headers["Metadata"] == "true" else None

    events = ("GET", "/metadata/scheduledevents?api-version=2020-07-01")
    name = ("GET", "/metadata/instance/compute/name?api-version=2021-02-01&format=text")
    cloud.answers[name] = "spark_7"
    cloud.answers[events] = json.dumps({"DocumentIncarnation": 1, "Events": []})
    assert notices.azure(cloud.base) is None
    cloud.answers[events] = told("Preempt", ["spark_3"])
    assert notices.azure(cloud.base) is None
    cloud.answers[events] = told("Freeze", ["spark_7"])
    assert notices.azure(cloud.base) is None
    cloud.answers[events] = told("Preempt", ["spark_3", "spark_7"])
    assert notices.azure(cloud.base) == "Azure: Preempt not before Mon, 30 Nov 2026 08:22:00 GMT"


def test_gcp_preemption_and_maintenance(cloud):
    preempted = ("GET", "/computeMetadata/v1/instance/preempted")
    maintenance = ("GET", "/computeMetadata/v1/instance/maintenance-event")
    cloud.answers = {preempted: "FALSE", maintenance: "MIGRATE_ON_HOST_MAINTENANCE"}
    assert notices.gcp(cloud.base) is None
    cloud.answers[maintenance] = "TERMINATE_ON_HOST_MAINTENANCE"
    assert notices.gcp(cloud.base) == "Google Cloud ends this instance for maintenance"
    cloud.answers[preempted] = lambda headers: "TRUE" if headers["Metadata-Flavor"] == "Google" else None
    assert notices.gcp(cloud.base) == "Google Cloud preempts this instance"


answers: list[str | Exception | None] = []


def mine() -> str | None:
    answer = answers.pop(0)
    if isinstance(answer, Exception):
        raise answer
    return answer


def test_a_source_of_ones_own_is_asked_until_it_says_so_and_may_fail_meanwhile(monkeypatch):
    monkeypatch.setattr(notices, "POLL_S", 0.01)
    answers[:] = [None, OSError("no route"), OSError("no route"), None, "it goes", "never asked"]
    told, troubles, done = [], [], threading.Event()

    def on_notice(reason):
        told.append(reason)
        done.set()

    watch = notices.Watch(f"{__name__}:mine", on_notice, troubles.append)
    assert done.wait(10.0)
    watch.close()
    assert told == ["it goes"]
    assert answers == ["never asked"]
    assert troubles == [f"notices from '{__name__}:mine' cannot be had: OSError: no route"]


def test_a_source_that_cannot_be_is_named():
    with pytest.raises(ConfigError, match=r"'aws', 'azure', 'gcp', or 'package.module:function'"):
        JobConfig.resolve(notices="amazon")
    for name in (":", "module:", ":function", "a:b:c"):
        with pytest.raises(ConfigError, match="must be one of"):
            JobConfig.resolve(notices=name)
    with pytest.raises(ConfigError, match="cannot be imported"):
        notices.source("no.such.module:look")
    assert notices.source("gcp") is notices.gcp
    assert JobConfig.resolve(notices="no.such.module:look").notices == "no.such.module:look"
