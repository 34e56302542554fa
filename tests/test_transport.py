"""The channel over real sockets: what it carries, what it refuses. The raw ends are written from its docstring."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_spark import transport
from elastic_spark.errors import ProtocolError
from elastic_spark.transport import Channel, Connection, Server

KEY = bytes(range(32))
WRONG = bytes(32)
LIMIT_S = 20.0


class Driver:
    """A server in an event loop of its own thread; what its callbacks are given is kept in queues."""

    def __init__(self, key: bytes = KEY, **options: Any) -> None:
        self.opened: queue.Queue[Connection] = queue.Queue()
        self.received: queue.Queue[tuple[Connection, dict[str, Any], bytes]] = queue.Queue()
        self.closed: queue.Queue[Connection] = queue.Queue()
        self.defects: queue.Queue[BaseException] = queue.Queue()
        self.answer: Callable[[Connection, dict[str, Any], bytes], None] = lambda *_: None
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda _loop, context: self.defects.put(context["exception"]))
        self.server = Server(
            "127.0.0.1",
            key,
            opened=self.opened.put,
            received=self._received,
            closed=self.closed.put,
            **options,
        )
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.address = self.do(self.server.start())

    def _received(self, connection: Connection, message: dict[str, Any], blob: bytes) -> None:
        self.received.put((connection, message, blob))
        self.answer(connection, message, blob)

    def do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(LIMIT_S)

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        async def work() -> None:
            function(*arguments)

        self.do(work())

    def send(self, connection: Connection, message: dict[str, Any], blob: bytes = b"") -> None:
        self.call(connection.send, message, blob)

    def next(self) -> tuple[dict[str, Any], bytes]:
        _, message, blob = self.received.get(timeout=LIMIT_S)
        return message, blob

    def refuses(self, count: int = 1) -> None:
        """Wait until so many have been refused; none was opened."""
        until(lambda: self.server.refused == count)
        assert self.opened.empty()

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.do(self.server.stop())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(LIMIT_S)
            self.loop.close()


def until(holds: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.002)


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.stop()
    assert list(driver.defects.queue) == []


@pytest.fixture
def channel(driver: Driver) -> Iterator[Channel]:
    channel = Channel.connect(driver.address, KEY, {"role": "agent"})
    yield channel
    channel.close()


# --------------------------------------------------------------------------------------------------- raw ends


def mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


def take(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def frame(session: bytes, direction: bytes, count: int, text: bytes, blob: bytes = b"") -> bytes:
    lengths = struct.pack(">II", len(text), len(blob))
    return lengths + mac(session, direction, count.to_bytes(8, "big"), lengths, text, blob) + text + blob


def is_ended(sock: socket.socket) -> bool:
    """The other side ends the connection, in good order or not."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


class RawPeer:
    """A peer that has the key and can send anything."""

    def __init__(self, address: tuple[str, int], key: bytes = KEY, hello: bytes = b'{"role": "agent"}') -> None:
        self.sock = socket.create_connection(address, timeout=LIMIT_S)
        assert take(self.sock, 16) == b"elastic_spark/1\n"
        theirs, ours = take(self.sock, 32), os.urandom(32)
        self.sent = ours + len(hello).to_bytes(2, "big") + hello + mac(key, b"peer", theirs, ours, hello)
        self.sock.sendall(self.sent)
        self.proof, self.expected = take(self.sock, 32), mac(key, b"driver", theirs, ours)
        self.session = mac(key, b"session", theirs, ours)

    def frame(self, count: int, message: dict[str, Any], blob: bytes = b"") -> bytes:
        return frame(self.session, b"p", count, json.dumps(message).encode(), blob)


class RawDriver:
    """Accepts one connection, makes the handshake with its key, and leaves the rest to the test."""

    def __init__(self, key: bytes = KEY, magic: bytes = b"elastic_spark/1\n") -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.key, self.magic = key, magic
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        self.sock, _ = self.listener.accept()
        ours = os.urandom(32)
        self.sock.sendall(self.magic + ours)
        with contextlib.suppress(EOFError, ConnectionError):
            theirs = take(self.sock, 32)
            take(self.sock, int.from_bytes(take(self.sock, 2), "big") + 32)
            self.sock.sendall(mac(self.key, b"driver", ours, theirs))
            self.session = mac(self.key, b"session", ours, theirs)
            self.ready.set()

    def frame(self, count: int, message: dict[str, Any], blob: bytes = b"") -> bytes:
        return frame(self.session, b"d", count, json.dumps(message).encode(), blob)

    def close(self) -> None:
        self.listener.close()
        self.thread.join(LIMIT_S)
        self.sock.close()


@pytest.fixture
def raw_driver() -> Iterator[tuple[RawDriver, Channel]]:
    raw = RawDriver()
    channel = Channel.connect(raw.address, KEY, {})
    assert raw.ready.wait(LIMIT_S)
    yield raw, channel
    channel.close()
    raw.close()


# ------------------------------------------------------------------------------------------------ what it carries


def test_messages_and_blobs_both_ways(driver: Driver, channel: Channel) -> None:
    connection = driver.opened.get(timeout=LIMIT_S)
    assert connection.hello == {"role": "agent"}
    assert connection.local == driver.address
    assert connection.peer[0] == channel.local_host == "127.0.0.1"
    channel.send({"type": "ready", "text": "ä\u2028", "numbers": [1, 2.5, None]}, b"\0blob")
    assert driver.next() == ({"type": "ready", "text": "ä\u2028", "numbers": [1, 2.5, None]}, b"\0blob")
    driver.send(connection, {"type": "stop"}, b"bye")
    assert channel.receive(LIMIT_S) == ({"type": "stop"}, b"bye")
    assert channel.fileno() > 0


def test_nothing_came_within_the_limit(channel: Channel) -> None:
    assert channel.receive(0.0) is None
    begun = time.monotonic()
    assert channel.receive(0.05) is None
    assert 0.04 <= time.monotonic() - begun < 5.0


def test_blobs_of_64_mb_both_ways(driver: Driver, channel: Channel) -> None:
    blob = os.urandom(1 << 20) * 64
    connection = driver.opened.get(timeout=LIMIT_S)
    channel.send({"n": 1}, blob)
    channel.send({"n": 2})
    message, back = driver.next()
    assert (message, back == blob) == ({"n": 1}, True)
    assert driver.next() == ({"n": 2}, b"")
    driver.send(connection, {"n": 3}, blob)
    frame = channel.receive(LIMIT_S)
    assert frame is not None
    assert (frame[0], frame[1] == blob) == ({"n": 3}, True)


def test_many_threads_send_at_once(driver: Driver, channel: Channel) -> None:
    def work(thread: int) -> None:
        for n in range(100):
            channel.send({"thread": thread, "n": n}, bytes([thread]) * (n * 50))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    seen: dict[int, list[int]] = {number: [] for number in range(8)}
    for _ in range(800):
        message, blob = driver.next()
        assert blob == bytes([message["thread"]]) * (message["n"] * 50)
        seen[message["thread"]].append(message["n"])
    for thread in threads:
        thread.join(LIMIT_S)
    assert seen == {number: list(range(100)) for number in range(8)}


def test_200_connections_at_once(driver: Driver) -> None:
    driver.answer = lambda connection, message, _blob: connection.send({"back": message["n"]})
    channels: list[Channel | None] = [None] * 200

    def work(first: int) -> None:
        for n in range(first, 200, 20):
            channels[n] = Channel.connect(driver.address, KEY, {"n": n})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(driver.opened.get(timeout=LIMIT_S).hello["n"] for _ in range(200)) == list(range(200))
    for n, channel in enumerate(channels):
        channel.send({"n": n})
    for n, channel in enumerate(channels):
        assert channel.receive(LIMIT_S) == ({"back": n}, b"")
        channel.close()
    for _ in range(200):
        driver.closed.get(timeout=LIMIT_S)
    until(lambda: not driver.server._tasks)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(st.tuples(st.dictionaries(st.text(), JSON, max_size=4), st.binary(max_size=300)), max_size=5))
def test_any_message_arrives_as_it_was_sent(driver: Driver, channel: Channel, frames: list[Any]) -> None:
    for message, blob in frames:
        channel.send(message, blob)
    assert [driver.next() for _ in frames] == frames


def test_a_frame_that_comes_in_drops(raw_driver: tuple[RawDriver, Channel]) -> None:
    raw, channel = raw_driver
    sent = raw.frame(1, {"n": 1}, b"blob") + raw.frame(2, {"n": 2})
    for byte in sent[:-1]:
        raw.sock.sendall(bytes([byte]))
    assert channel.receive(LIMIT_S) == ({"n": 1}, b"blob")
    assert channel.receive(0.05) is None
    raw.sock.sendall(sent[-1:])
    assert channel.receive(LIMIT_S) == ({"n": 2}, b"")


# ------------------------------------------------------------------------------------------------- the handshake


def test_the_handshake_is_the_one_of_the_docstring(driver: Driver) -> None:
    peer = RawPeer(driver.address)
    assert peer.proof == peer.expected
    peer.sock.sendall(peer.frame(1, {"n": 1}))
    assert driver.next() == ({"n": 1}, b"")
    peer.sock.close()


def test_a_peer_with_the_wrong_key_is_refused(driver: Driver) -> None:
    with pytest.raises(ProtocolError, match="closed the connection during the handshake"):
        Channel.connect(driver.address, WRONG, {"role": "agent"})
    driver.refuses()


def test_a_driver_with_the_wrong_key_is_refused() -> None:
    raw = RawDriver(WRONG)
    with pytest.raises(ProtocolError, match="does not have the key of this job"):
        Channel.connect(raw.address, KEY, {})
    raw.close()


def test_something_else_at_the_address_is_refused() -> None:
    raw = RawDriver(magic=b"SSH-2.0-OpenSSH_")
    with pytest.raises(ProtocolError, match="is not an elastic_spark driver of this version"):
        Channel.connect(raw.address, KEY, {})
    raw.close()


def test_nobody_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = unused.getsockname()
    with pytest.raises(ProtocolError, match=f"no driver at 127.0.0.1:{address[1]}"):
        Channel.connect(address, KEY, {})


@pytest.mark.parametrize("drips", [False, True])
def test_a_driver_that_takes_its_time_is_given_up_within_the_limit(drips: bool) -> None:
    over = threading.Event()

    def serve(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(OSError):
            while drips and not over.wait(0.05):
                sock.sendall(b"e")
            over.wait(LIMIT_S)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        begun = time.monotonic()
        with pytest.raises(ProtocolError):
            Channel.connect(listener.getsockname(), KEY, {}, limit_s=0.4)
        assert time.monotonic() - begun < 5.0
        over.set()
        thread.join(LIMIT_S)


def test_a_recorded_handshake_is_worthless(driver: Driver) -> None:
    recorded = RawPeer(driver.address)
    driver.opened.get(timeout=LIMIT_S)
    with socket.create_connection(driver.address, timeout=LIMIT_S) as sock:
        take(sock, 48)
        sock.sendall(recorded.sent)
        assert is_ended(sock)
    driver.refuses()
    recorded.sock.close()


@pytest.mark.parametrize("hello", [b"[1]", b"not json", b"\xff", b""])
def test_a_hello_that_is_no_object_is_refused_although_it_has_the_key(driver: Driver, hello: bytes) -> None:
    peer = RawPeer(driver.address, hello=hello)
    assert is_ended(peer.sock)
    driver.refuses()
    peer.sock.close()


def test_a_hello_over_the_limit(driver: Driver) -> None:
    with pytest.raises(ProtocolError, match="over the limit of 8192"):
        Channel.connect(driver.address, KEY, {"text": "x" * transport.MAX_HELLO})
    with socket.create_connection(driver.address, timeout=LIMIT_S) as sock:
        sock.sendall(bytes(32) + (transport.MAX_HELLO + 1).to_bytes(2, "big"))
        assert is_ended(sock)
    driver.refuses()


def test_who_dawdles_in_the_handshake_is_dropped_within_the_limit() -> None:
    driver = Driver(handshake_limit_s=0.5)
    silent = socket.create_connection(driver.address, timeout=LIMIT_S)
    dripping = socket.create_connection(driver.address, timeout=0.05)
    begun = time.monotonic()
    take(dripping, 48)
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - begun < LIMIT_S:
            dripping.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                if not dripping.recv(1):
                    break
    assert 0.3 < time.monotonic() - begun < 10.0
    assert is_ended(silent)
    driver.refuses(2)
    for sock in (silent, dripping):
        sock.close()
    driver.stop()


def test_the_key_is_never_on_the_wire(driver: Driver) -> None:
    wire = bytearray()

    def forward(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                wire.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def proxy(listener: socket.socket) -> None:
        inner, _ = listener.accept()
        outer = socket.create_connection(driver.address)
        back = threading.Thread(target=forward, args=(outer, inner))
        back.start()
        forward(inner, outer)
        back.join(LIMIT_S)
        inner.close()
        outer.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=proxy, args=(listener,))
        thread.start()
        channel = Channel.connect(listener.getsockname(), KEY, {"role": "agent"})
        connection = driver.opened.get(timeout=LIMIT_S)
        channel.send({"n": 1}, b"blob")
        driver.next()
        driver.send(connection, {"n": 2})
        assert channel.receive(LIMIT_S) == ({"n": 2}, b"")
        channel.close()
        thread.join(LIMIT_S)
    assert len(wire) > 200
    assert KEY not in wire
    assert KEY.hex().encode() not in wire


# --------------------------------------------------------------------------------------------- what it refuses


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


#: A frame is 8 bytes of lengths, 32 of MAC, then the JSON, then the blob. Each gets (first, second) -> what is sent.
BAD = {
    "tampered length": lambda one, two: flip(one, 3),
    "tampered blob length": lambda one, two: flip(one, 7),
    "tampered mac": lambda one, two: flip(one, 20),
    "tampered text": lambda one, two: flip(one, 42),
    "tampered blob": lambda one, two: flip(one, len(one) - 1),
    "reordered": lambda one, two: two + one,
    "over the limit of JSON": lambda one, two: struct.pack(">II", transport.MAX_JSON + 1, 0),
    "over the limit of blobs": lambda one, two: struct.pack(">II", 2, transport.MAX_BLOB + 1),
    "truncated": lambda one, two: one[:-1],
    "garbage": lambda one, two: bytes(range(256)),
}


@pytest.mark.parametrize("how", BAD)
def test_the_driver_ends_a_connection_on_which_comes(driver: Driver, how: str) -> None:
    peer = RawPeer(driver.address)
    connection = driver.opened.get(timeout=LIMIT_S)
    peer.sock.sendall(BAD[how](peer.frame(1, {"n": 1}, b"blob"), peer.frame(2, {"n": 2}, b"blob")))
    peer.sock.shutdown(socket.SHUT_WR)
    assert driver.closed.get(timeout=LIMIT_S) is connection
    assert is_ended(peer.sock)
    assert driver.received.empty()
    peer.sock.close()


@pytest.mark.parametrize("how", BAD)
def test_the_peer_ends_a_connection_on_which_comes(raw_driver: tuple[RawDriver, Channel], how: str) -> None:
    raw, channel = raw_driver
    raw.sock.sendall(BAD[how](raw.frame(1, {"n": 1}, b"blob"), raw.frame(2, {"n": 2}, b"blob")))
    raw.sock.shutdown(socket.SHUT_WR)
    with pytest.raises(ProtocolError):
        channel.receive(LIMIT_S)


def test_a_replayed_frame_counts_once_on_either_side(driver: Driver, raw_driver: tuple[RawDriver, Channel]) -> None:
    peer = RawPeer(driver.address)
    connection = driver.opened.get(timeout=LIMIT_S)
    peer.sock.sendall(peer.frame(1, {"n": 1}) * 2)
    assert driver.closed.get(timeout=LIMIT_S) is connection
    assert driver.next() == ({"n": 1}, b"")
    assert driver.received.empty()
    peer.sock.close()
    raw, channel = raw_driver
    raw.sock.sendall(raw.frame(1, {"n": 1}) * 2)
    assert channel.receive(LIMIT_S) == ({"n": 1}, b"")
    with pytest.raises(ProtocolError, match="does not authenticate"):
        channel.receive(LIMIT_S)


def test_a_frame_of_the_driver_sent_back_to_it_is_refused(driver: Driver) -> None:
    peer = RawPeer(driver.address)
    connection = driver.opened.get(timeout=LIMIT_S)
    driver.send(connection, {"n": 1})
    peer.sock.sendall(take(peer.sock, 40 + len(b'{"n":1}')))
    assert driver.closed.get(timeout=LIMIT_S) is connection
    assert driver.received.empty()
    peer.sock.close()


@pytest.mark.parametrize("text", [b"[1]", b"not json", b"\xff\xff", b"", b"[" * 200_000])
def test_a_message_that_is_no_object_ends_the_connection_although_it_authenticates(driver: Driver, text: bytes) -> None:
    peer = RawPeer(driver.address)
    connection = driver.opened.get(timeout=LIMIT_S)
    peer.sock.sendall(frame(peer.session, b"p", 1, text))
    assert driver.closed.get(timeout=LIMIT_S) is connection
    peer.sock.close()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(max_size=400))
def test_garbage_instead_of_a_handshake_disturbs_nobody(driver: Driver, channel: Channel, garbage: bytes) -> None:
    with socket.create_connection(driver.address, timeout=LIMIT_S) as sock:
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)
        assert is_ended(sock)
    channel.send({"n": 1})
    assert driver.next() == ({"n": 1}, b"")


def test_a_message_over_the_limit_is_not_sent_and_the_next_one_is(
    driver: Driver, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = driver.opened.get(timeout=LIMIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(transport, "MAX_JSON", 100)
        patch.setattr(transport, "MAX_BLOB", 100)
        with pytest.raises(ProtocolError, match="over the limit"):
            channel.send({"text": "x" * 100})
        with pytest.raises(ProtocolError, match="over the limit"):
            channel.send({}, bytes(101))
        with pytest.raises(ProtocolError, match="over the limit"):
            driver.send(connection, {}, bytes(101))
        channel.send({"n": 1})
        assert driver.next() == ({"n": 1}, b"")


# ------------------------------------------------------------------------------------------------------- the end


def test_the_end_of_a_peer_is_told_once(driver: Driver, channel: Channel) -> None:
    connection = driver.opened.get(timeout=LIMIT_S)
    channel.close()
    assert driver.closed.get(timeout=LIMIT_S) is connection
    driver.send(connection, {"n": 1})
    until(lambda: not driver.server._tasks)
    assert driver.closed.empty()


def test_the_end_of_the_driver_is_an_error_of_every_later_call(driver: Driver, channel: Channel) -> None:
    connection = driver.opened.get(timeout=LIMIT_S)
    driver.send(connection, {"type": "stop"})
    driver.call(connection.close)
    assert channel.receive(LIMIT_S) == ({"type": "stop"}, b""), "its last words arrive"
    for _ in range(2):
        with pytest.raises(ProtocolError, match="the driver closed the connection"):
            channel.receive(LIMIT_S)

    def send_until_it_fails() -> None:
        while True:
            channel.send({"n": 1})

    for _ in range(2):
        with pytest.raises(ProtocolError, match="the connection to the driver ended"):
            send_until_it_fails()
    assert driver.closed.get(timeout=LIMIT_S) is connection


def test_a_closed_channel_receives_nothing(driver: Driver, channel: Channel) -> None:
    channel.close()
    with pytest.raises(ProtocolError, match="the connection to the driver ended"):
        channel.receive(1.0)


def test_a_driver_that_takes_nothing_is_an_error_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "UNACKNOWLEDGED_LIMIT_MS", 300)
    raw = RawDriver()
    channel = Channel.connect(raw.address, KEY, {})
    assert raw.ready.wait(LIMIT_S)
    with pytest.raises(ProtocolError, match="the connection to the driver ended"):
        channel.send({}, bytes(64 << 20))
    with pytest.raises(ProtocolError, match="the connection to the driver ended"):
        channel.send({})
    channel.close()
    raw.close()


def test_a_driver_that_is_slow_but_takes_something_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is on standstill, not on the whole of a large message."""
    monkeypatch.setattr(transport, "UNACKNOWLEDGED_LIMIT_MS", 2000)
    raw = RawDriver()
    channel = Channel.connect(raw.address, KEY, {})
    assert raw.ready.wait(LIMIT_S)
    taken = bytearray()
    pace = threading.Event()

    def read() -> None:
        while len(taken) < (24 << 20):
            pace.wait(0.1)
            taken.extend(raw.sock.recv(1 << 20))

    reader = threading.Thread(target=read)
    reader.start()
    channel.send({}, bytes(24 << 20))
    reader.join(60.0)
    assert not reader.is_alive()
    channel.close()
    raw.close()


def test_stop_leaves_nothing_open() -> None:
    driver = Driver()
    channels = [Channel.connect(driver.address, KEY, {"n": n}) for n in range(20)]
    connections = [driver.opened.get(timeout=LIMIT_S) for _ in channels]
    handshaking = socket.create_connection(driver.address, timeout=LIMIT_S)
    take(handshaking, 48)
    deaf = next(c for c in connections if c.hello["n"] == 0)
    driver.send(deaf, {}, bytes(64 << 20))  # more than the kernel's buffers hold
    for connection in connections:
        if connection is not deaf:
            driver.send(connection, {"type": "stop"})
    begun = time.monotonic()
    driver.do(driver.server.stop())
    assert time.monotonic() - begun < 10.0
    for channel in channels[1:]:
        assert channel.receive(LIMIT_S) == ({"type": "stop"}, b"")
        with pytest.raises(ProtocolError):
            channel.receive(LIMIT_S)
    assert is_ended(handshaking)
    assert not driver.server._tasks
    assert len(driver.closed.queue) == 20
    port = driver.address[1]
    until(lambda: not [c for c in psutil.Process().net_connections("tcp") if c.laddr.port == port])
    with pytest.raises(OSError, match=r".+"):
        socket.create_connection(driver.address, timeout=LIMIT_S)
    handshaking.close()
    for channel in channels:
        channel.close()
    driver.stop()


def test_a_server_that_never_started_stops() -> None:
    async def stop() -> None:
        await Server("127.0.0.1", KEY, opened=print, received=print, closed=print).stop()

    asyncio.run(stop())


def test_what_a_callback_raises_goes_to_the_loop_and_ends_that_connection_alone(driver: Driver) -> None:
    def answer(connection: Connection, message: dict[str, Any], _blob: bytes) -> None:
        if message["n"] == 13:
            raise ValueError("a defect of the driver")
        connection.send({"back": message["n"]})

    driver.answer = answer
    one, two = (Channel.connect(driver.address, KEY, {}) for _ in range(2))
    one.send({"n": 13})
    assert str(driver.defects.get(timeout=LIMIT_S)) == "a defect of the driver"
    driver.closed.get(timeout=LIMIT_S)
    with pytest.raises(ProtocolError):
        one.receive(LIMIT_S)
    two.send({"n": 1})
    assert two.receive(LIMIT_S) == ({"back": 1}, b"")
    one.close()
    two.close()
