"""The authenticated channel between driver, agents and workers.

One TCP connection for each agent and each worker, opened by them, served by the driver's event loop. Nothing that
arrives is parsed before it is authenticated, and nothing is ever unpickled here: a message is a JSON object and,
optionally, a blob of bytes whose meaning is the receiver's business.

Handshake (both sides prove that they have the job's key; nonces make a recorded one worthless)::

    driver -> peer   MAGIC, nonce_d (32)
    peer -> driver   nonce_p (32), length (2), hello (JSON), HMAC(key, "peer" nonce_d nonce_p hello)
    driver -> peer   HMAC(key, "driver" nonce_d nonce_p)

Frames, in both directions, with ``k = HMAC(key, "session" nonce_d nonce_p)`` and a counter for each direction, so that
a frame can be neither replayed, reordered nor reflected::

    length of JSON (4)  length of blob (4)  HMAC(k, direction counter lengths JSON blob) (32)  JSON  blob

All HMACs are SHA-256. The channel authenticates and does not encrypt; it binds to the one interface it is given.

A connection that breaks these rules ends, and that is all that happens: its end is an ordinary event on both sides.
What the callbacks raise is a defect of the driver, and goes to the event loop's exception handler.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from elastic_spark.errors import ProtocolError

MAGIC = b"elastic_spark/1\n"
MAX_HELLO = 8 << 10
MAX_JSON = 16 << 20
MAX_BLOB = 2 << 30
HANDSHAKE_LIMIT_S = 20.0
#: Connections that have ended get so long to send their last words before they are cut off.
FLUSH_LIMIT_S = 1.0
#: A connection whose data is not acknowledged for so long is dead (the kernel closes it). As long as Spark waits for a
#: driver that stands still.
UNACKNOWLEDGED_LIMIT_MS = 120_000

_LENGTHS = struct.Struct(">II")
_MAC_SIZE = 32
_NONCE_SIZE = 32

Message = dict[str, Any]
Address = tuple[str, int]


def _mac(key: bytes, *parts: bytes) -> bytes:
    code = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        code.update(part)
    return code.digest()


class _Sealer:
    """Makes and opens the frames of one direction."""

    def __init__(self, key: bytes, direction: bytes) -> None:
        self._key, self._direction, self._count = key, direction, 0

    def _next(self, lengths: bytes, text: bytes, blob: bytes) -> bytes:
        self._count += 1
        return _mac(self._key, self._direction, self._count.to_bytes(8, "big"), lengths, text, blob)

    def seal(self, message: Mapping[str, Any], blob: bytes) -> bytes:
        text = json.dumps(message, separators=(",", ":")).encode()
        if len(text) > MAX_JSON or len(blob) > MAX_BLOB:
            raise ProtocolError(f"message of {len(text)} + {len(blob)} bytes is over the limit of the channel")
        lengths = _LENGTHS.pack(len(text), len(blob))
        return b"".join((lengths, self._next(lengths, text, blob), text, blob))

    def open(self, lengths: bytes, mac: bytes, text: bytes, blob: bytes) -> Message:
        if not hmac.compare_digest(mac, self._next(lengths, text, blob)):
            raise ProtocolError("a frame that does not authenticate")
        return _parse(text)


def _parse(text: bytes) -> Message:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message that is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError("a message that is not an object")
    return message


def _body_sizes(lengths: bytes) -> tuple[int, int]:
    text, blob = _LENGTHS.unpack(lengths)
    if text > MAX_JSON or blob > MAX_BLOB:
        raise ProtocolError(f"a frame of {text} + {blob} bytes is over the limit of the channel")
    return text, blob


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_LIMIT_MS)


# ---------------------------------------------------------------------------------------------- driver side


class Connection:
    """The driver's end of one authenticated connection. Lives in the event loop's thread."""

    def __init__(self, hello: Message, peer: Address, local: Address, writer: asyncio.StreamWriter, key: bytes) -> None:
        self.hello, self.peer, self.local = hello, peer, local
        self._writer = writer
        self._sealer = _Sealer(key, b"d")

    def send(self, message: Mapping[str, Any], blob: bytes = b"") -> None:
        """Queue a message; never blocks, and a closed connection is not an error (its end is reported elsewhere)."""
        if not self._writer.is_closing():
            self._writer.write(self._sealer.seal(message, blob))

    def close(self) -> None:
        self._writer.close()


class Server:
    """Accepts authenticated connections and hands what they say to three callbacks, all in the event loop's thread.

    Args:
        host: address of the interface to bind to.
        key: the job's key.
        opened: called with each new `Connection`, whose ``hello`` the peer sent.
        received: called with ``(connection, message, blob)``.
        closed: called once when an opened connection has ended, for whatever reason.
        handshake_limit_s: a connection that has not proved itself by then is dropped.
    """

    def __init__(
        self,
        host: str,
        key: bytes,
        *,
        opened: Callable[[Connection], None],
        received: Callable[[Connection, Message, bytes], None],
        closed: Callable[[Connection], None],
        handshake_limit_s: float = HANDSHAKE_LIMIT_S,
    ) -> None:
        self._host, self._key, self._handshake_limit_s = host, key, handshake_limit_s
        self._opened, self._received, self._closed = opened, received, closed
        self._server: asyncio.Server | None = None
        self._tasks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self.refused = 0

    async def start(self) -> Address:
        """Bind to a free port and return the address."""
        self._server = await asyncio.start_server(self._serve, self._host, 0, backlog=512)
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def stop(self) -> None:
        """End all connections, after a moment for what was sent last. Nothing is left open."""
        if self._server is not None:
            self._server.close()
        tasks = dict(self._tasks)
        for writer in tasks.values():
            writer.close()  # ends the reading too, once all is sent
        if tasks:
            await asyncio.wait(tasks, timeout=FLUSH_LIMIT_S)
            for writer in tasks.values():
                writer.transport.abort()
            await asyncio.wait(tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = writer
        try:
            await self._converse(reader, writer)
        except ProtocolError:
            pass  # the end of this connection, told by `closed` where it had been opened
        except Exception as error:
            context = {"message": "a callback of the channel failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
        try:
            writer.close()
            await writer.wait_closed()
        except OSError:
            pass  # it had ended already
        finally:
            del self._tasks[task]

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            _tune(writer.get_extra_info("socket"))
            connection, opener = await asyncio.wait_for(self._handshake(reader, writer), self._handshake_limit_s)
        except (OSError, EOFError, ProtocolError) as error:  # TimeoutError is an OSError
            self.refused += 1
            raise ProtocolError(f"refused: {error}") from error
        self._opened(connection)
        try:
            while True:
                self._received(connection, *await _read_frame(reader, opener))
        finally:
            self._closed(connection)

    async def _handshake(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[Connection, _Sealer]:
        ours = os.urandom(_NONCE_SIZE)
        writer.write(MAGIC + ours)
        theirs = await reader.readexactly(_NONCE_SIZE)
        size = int.from_bytes(await reader.readexactly(2), "big")
        if size > MAX_HELLO:
            raise ProtocolError("a hello over the limit")
        hello = await reader.readexactly(size)
        proof = await reader.readexactly(_MAC_SIZE)
        if not hmac.compare_digest(proof, _mac(self._key, b"peer", ours, theirs, hello)):
            raise ProtocolError("a peer without the job's key")
        writer.write(_mac(self._key, b"driver", ours, theirs))
        session = _mac(self._key, b"session", ours, theirs)
        peer, local = writer.get_extra_info("peername")[:2], writer.get_extra_info("sockname")[:2]
        return Connection(_parse(hello), peer, local, writer, session), _Sealer(session, b"p")


async def _read_frame(reader: asyncio.StreamReader, opener: _Sealer) -> tuple[Message, bytes]:
    try:
        lengths = await reader.readexactly(_LENGTHS.size)
        text_size, blob_size = _body_sizes(lengths)
        mac = await reader.readexactly(_MAC_SIZE)
        text = await reader.readexactly(text_size)
        blob = await reader.readexactly(blob_size)
    except (OSError, EOFError) as error:
        raise ProtocolError(f"the connection ended: {error}") from error
    return opener.open(lengths, mac, text, blob), blob


# ------------------------------------------------------------------------------------- agent and worker side


class Channel:
    """The peer's end: blocking, with time limits. `send` may be called from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket, session: bytes) -> None:
        self._sock = sock
        self._sealer, self._opener = _Sealer(session, b"p"), _Sealer(session, b"d")
        self._sending = threading.Lock()
        self._torn: OSError | None = None
        self._buffer = bytearray()

    @classmethod
    def connect(cls, address: Address, key: bytes, hello: Mapping[str, Any], *, limit_s: float = 20.0) -> Channel:
        """Connect and authenticate.

        Raises:
            ProtocolError: the driver cannot be reached, or does not have the key.
        """
        text, deadline = json.dumps(hello).encode(), time.monotonic() + limit_s
        if len(text) > MAX_HELLO:
            raise ProtocolError(f"a hello of {len(text)} bytes is over the limit of {MAX_HELLO}")
        try:
            sock = socket.create_connection((address[0], address[1]), timeout=limit_s)
        except OSError as error:
            raise ProtocolError(f"no driver at {address[0]}:{address[1]}: {error}") from error
        try:
            _tune(sock)
            if _exactly(sock, len(MAGIC), deadline) != MAGIC:
                raise ProtocolError(f"{address[0]}:{address[1]} is not an elastic_spark driver of this version")
            theirs, ours = _exactly(sock, _NONCE_SIZE, deadline), os.urandom(_NONCE_SIZE)
            sock.sendall(ours + len(text).to_bytes(2, "big") + text + _mac(key, b"peer", theirs, ours, text))
            if not hmac.compare_digest(_exactly(sock, _MAC_SIZE, deadline), _mac(key, b"driver", theirs, ours)):
                raise ProtocolError(f"{address[0]}:{address[1]} does not have the key of this job")
        except ProtocolError:
            sock.close()
            raise
        except OSError as error:
            sock.close()
            raise ProtocolError(f"handshake with {address[0]}:{address[1]} failed: {error}") from error
        sock.settimeout(UNACKNOWLEDGED_LIMIT_MS / 1000)
        return cls(sock, _mac(key, b"session", theirs, ours))

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def local_host(self) -> str:
        """The address of this machine as the driver's network sees it."""
        return str(self._sock.getsockname()[0])

    def send(self, message: Mapping[str, Any], blob: bytes = b"") -> None:
        """Send one message.

        Raises:
            ProtocolError: the message is over the limit; or the connection has ended, or took nothing for two minutes.
        """
        with self._sending:
            if self._torn is not None:
                raise ProtocolError(f"the connection to the driver ended: {self._torn}")
            rest = memoryview(self._sealer.seal(message, blob))
            try:
                while rest:
                    rest = rest[self._sock.send(rest) :]
            except OSError as error:
                self._torn = error  # perhaps in the middle of a frame: nothing can follow it
                raise ProtocolError(f"the connection to the driver ended: {error}") from error

    def receive(self, limit_s: float) -> tuple[Message, bytes] | None:
        """The next message, or None when none came within ``limit_s`` seconds.

        Raises:
            ProtocolError: the connection has ended or what came does not authenticate.
        """
        deadline = time.monotonic() + limit_s
        while True:
            frame = self._take()
            if frame is not None:
                return frame
            try:
                ready, _, _ = select.select([self._sock], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    return None
                data = self._sock.recv(1 << 18)
            except (OSError, ValueError) as error:
                raise ProtocolError(f"the connection to the driver ended: {error}") from error
            if not data:
                raise ProtocolError("the driver closed the connection")
            self._buffer += data

    def _take(self) -> tuple[Message, bytes] | None:
        head = _LENGTHS.size + _MAC_SIZE
        if len(self._buffer) < head:
            return None
        lengths = bytes(self._buffer[: _LENGTHS.size])
        text_size, blob_size = _body_sizes(lengths)
        end = head + text_size + blob_size
        if len(self._buffer) < end:
            return None
        mac = bytes(self._buffer[_LENGTHS.size : head])
        text = bytes(self._buffer[head : head + text_size])
        blob = bytes(self._buffer[head + text_size : end])
        del self._buffer[:end]
        return self._opener.open(lengths, mac, text, blob), blob

    def close(self) -> None:
        self._sock.close()


def _exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        part = sock.recv(size - len(data))
        if not part:
            raise ProtocolError("the other side closed the connection during the handshake (is the key of this job?)")
        data += part
    return bytes(data)
