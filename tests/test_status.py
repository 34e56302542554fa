"""The live page: what it serves, to whom, and that it is in nobody's way."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from elastic_spark import status
from elastic_spark.core import events as ev
from elastic_spark.status import Serving, StatusPage

GOLDEN = Path(__file__).parent / "goldens" / "churn.jsonl"


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Serving]:
    log = tmp_path / "events.jsonl"
    log.write_bytes(GOLDEN.read_bytes())
    running = Serving(log, "flights <1>")
    yield running
    running.close()


def get(
    page: Serving | StatusPage, path: str = "/", token: str | None = None, **headers: str
) -> tuple[int, str, dict[str, str]]:
    base, _, own = page.url.partition("/?token=")
    link = f"{base}{path}?token={own if token is None else token}"
    try:
        with urllib.request.urlopen(urllib.request.Request(link, headers=headers), timeout=10) as reply:
            return reply.status, reply.read().decode(), dict(reply.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), dict(error.headers)


def test_the_page_tells_the_story(page: Serving) -> None:
    code, text, headers = get(page)
    assert code == 200
    assert "<h1>flights &lt;1&gt;</h1>" in text
    assert "77,100 once, 0 twice, 0 never" in text
    nonce = re.search(r'<script nonce="([\w-]+)">', text)
    assert nonce
    assert f"script-src 'nonce-{nonce[1]}'" in headers["Content-Security-Policy"]
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "w2 on 10.0.0.3" in get(page, "/story")[1]
    assert get(page, "/nothing")[0] == 404


def test_metrics(page: Serving) -> None:
    code, text, headers = get(page, "/metrics")
    assert code == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert 'elastic_spark_info{job="' in text
    token = page.url.rpartition("=")[2]
    assert get(page, "/metrics", token="", Authorization=f"Bearer {token}")[:2] == (code, text)


@pytest.mark.parametrize("path", ["/", "/story", "/metrics", "/nothing"])
def test_nothing_without_the_token(page: Serving, path: str) -> None:
    for token in ("", "x", page.url.rpartition("=")[2][:-1], "é"):
        assert get(page, path, token=urllib.request.quote(token))[0] == 403
    assert get(page, path, token="", Authorization="Bearer ")[0] == 403


def test_it_listens_on_loopback_only_and_says_nothing(page: Serving, capfd: pytest.CaptureFixture[str]) -> None:
    assert urlsplit(page.url).hostname == "127.0.0.1"
    get(page, token="wrong")
    with socket.create_connection(("127.0.0.1", urlsplit(page.url).port or 0)) as client:
        client.sendall(b"\x00\xff not http\r\n\r\n")
        client.recv(100)
    assert capfd.readouterr() == ("", "")


def test_it_follows_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "PERIOD_S", 0.0)
    monkeypatch.setattr(status, "SHARE", 1e9)
    log = tmp_path / "events.jsonl"
    page = Serving(log, "job")
    try:
        assert "The log is empty." in get(page)[1]
        line = ev.to_json(ev.StepsCommitted(at=1.0, generation=1, first_step=1, times=(1.0, 2.0), rows=8))
        log.write_text(line[:30])
        assert "elastic_spark_step " not in get(page, "/metrics")[1]
        log.write_text(line + "\n" + line[:10])
        assert "elastic_spark_step 2\n" in get(page, "/metrics")[1]
        assert ">2</td>" in get(page, "/story")[1]
    finally:
        page.close()


def test_a_page_that_is_asked_for_again_and_again_is_made_once(page: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    render = status.render_story
    monkeypatch.setattr(status, "PERIOD_S", 1000.0)
    monkeypatch.setattr(status, "render_story", lambda *given: made.append(1) or render(*given))
    assert len({get(page, "/story")[1] for _ in range(20)}) == 1
    assert len(made) == 1


def test_clients_that_hang_take_no_more_than_their_share(page: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those past the limit are turned away at once, and those that say nothing are gone after a while."""
    monkeypatch.setattr(status._Handler, "timeout", 0.5)
    others = set(threading.enumerate())
    place = ("127.0.0.1", urlsplit(page.url).port or 0)
    clients = [socket.create_connection(place, timeout=10) for _ in range(30)]
    try:
        assert all(client.recv(10) == b"" for client in clients), "closed by the server, without an answer"
    finally:
        for client in clients:
            client.close()
    serving = {thread for thread in threading.enumerate() if "process_request_thread" in thread.name}
    for thread in serving - others:
        thread.join(10)
    assert get(page)[0] == 200


def test_a_page_that_fails_says_so_and_the_rest_goes_on(page: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise ValueError("why")

    monkeypatch.setattr(status, "render_story", fail)
    assert get(page)[:2] == (500, "ValueError: why\n")
    assert get(page, "/metrics")[0] == 200


def test_it_is_gone_when_closed(page: Serving) -> None:
    page.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", urlsplit(page.url).port or 0), timeout=5)
    assert not [thread for thread in threading.enumerate() if thread.name == "elastic_spark status"]


# ---- its process


def test_it_has_a_process_of_its_own(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    page = StatusPage(log, "flights")
    try:
        assert page.pid != os.getpid()
        assert "The log is empty." in get(page)[1]
        log.write_bytes(GOLDEN.read_bytes())
        assert 'elastic_spark_info{job="flights"' in get(page, "/metrics")[1]
        with open(f"/proc/{page.pid}/cmdline", "rb") as command:
            assert page.url.rpartition("=")[2].encode() not in command.read(), "a command line can be read by everybody"
    finally:
        page.close()
    assert not os.path.exists(f"/proc/{page.pid}")


def living(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_it_ends_with_the_driver(tmp_path: Path) -> None:
    """kill -9 of the driver leaves nothing behind."""
    code = f"""
import sys, time
from pathlib import Path
from elastic_spark.status import StatusPage
page = StatusPage(Path({str(tmp_path / "log")!r}), "job")
print(page.pid, flush=True)
sys.stdin.read()
"""
    driver = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        driver.kill()
    deadline = time.monotonic() + 20
    while living(pid):
        assert time.monotonic() < deadline, "it outlived its driver"
        time.sleep(0.05)


def test_a_port_that_is_taken(page: Serving, tmp_path: Path) -> None:
    taken = urlsplit(page.url).port or 0
    for kind in (Serving, StatusPage):
        with pytest.raises(OSError, match="in use"):
            kind(tmp_path / "log", "job", port=taken)
