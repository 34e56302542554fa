"""Horovod's rendezvous: where the members of one generation find each other's sockets.

Horovod's native init builds several full meshes of TCP connections (Gloo). In each, called a *scope*, every rank
publishes the addresses it listens on, one for every other rank, and reads those of all others from an HTTP store.
This is that store, written for worlds that change:

* **A port for each generation.** A worker of an older world cannot meet one of a newer world by accident.
* **A GET of an address that is not there yet is parked** and answered by the PUT it waits for: no polling.
* **Cancelling is active.** Once a member of a forming generation is lost, every GET of an address, parked or to come,
  is answered with one byte. That is no address, so Horovod's client throws at once. A stock Horovod that waits as the
  *listening* side of a pair whose other end died (for five times the Gloo timeout) is *poked*: its listener is
  connected to and half-closed.
* **It knows which addresses can still be in use** (`elastic_spark.driver.mesh`), so that neither a poke nor an abort
  ever meets a port that the kernel has handed to somebody else.

Security: Horovod's clients cannot authenticate themselves, so whoever reaches the port can speak. What they can do is
bounded: only scopes and ranks of the generation's members exist, an address is accepted once and only in the exact
size and form, nothing is unpickled or interpreted beyond that, and heads, bodies, waiting times and connections have
limits. A forged address can still break a forming generation. Let ``host`` be an interface that only the cluster sees.

One `Rendezvous` lives in one event loop and is called from that loop's thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_spark.driver.mesh import ADDRESS_BYTES, Mesh, parse_address

_NO_ADDRESS = b"!"
_REMOVED = b"-1,-1,-1,-1,-1,-1"
_MAX_HEAD_BYTES = 4096
_MAX_HOSTNAME_BYTES = 256
_MAX_SCOPES = 256
_READ_LIMIT_S = 5.0
_POKE_LIMIT_S = 1.0
_BACKLOG = 1024
_RECEIVE_BYTES = 65536
_SURE_TO_FIT_BYTES = 4096
_ACCEPTS_A_TURN = 64
_ACCEPT_RETRY_S = 0.1
_CONNECTIONS = 64
_CONNECTIONS_A_MEMBER = 4

_PROCESS_SET = re.compile(r"(.+)_process_set_hash_[0-9a-f]{1,16}")
_KEY = re.compile(r"(rank_)?(0|[1-9][0-9]{0,5})")


@dataclass(frozen=True)
class _Request:
    method: str
    scope: str
    key: str
    body: bytes


class _Generation:
    def __init__(self, number: int, members: Sequence[str], listener: socket.socket) -> None:
        self.number = number
        self.members = tuple(members)
        self.largest_body = max(_MAX_HOSTNAME_BYTES, ADDRESS_BYTES * len(members))
        self.cancelled = False
        self.meshes: dict[str, Mesh] = {}
        self.parked: dict[tuple[str, int], list[_Connection]] = {}
        self.connections: set[_Connection] = set()
        self.port: int = listener.getsockname()[1]
        self._listener = listener

    # ---- connections

    def listen(self) -> None:
        if self._listener.fileno() >= 0:  # not closed meanwhile
            self._listener.setblocking(False)
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                accepted, _name = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # out of descriptors: the listener stays readable, so look away for a moment
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener.fileno())
                loop.call_later(_ACCEPT_RETRY_S, self.listen)
                return
            if len(self.connections) >= _CONNECTIONS + _CONNECTIONS_A_MEMBER * len(self.members):
                accepted.close()
                continue
            accepted.setblocking(False)
            _Connection(self, accepted)

    def close(self) -> None:
        self.cancel()
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        for connection in list(self.connections):
            connection.close()

    # ---- what may be said

    def size_of(self, scope: str) -> int | None:
        """The number of ranks in ``scope``, the most it can be for a process set, or None where it does not exist."""
        match = _PROCESS_SET.fullmatch(scope)
        base = match.group(1) if match else scope
        if base in ("global", "cross_0"):
            return len(self.members)
        if base.startswith("local_") and base.removeprefix("local_") in self.members:
            return 1
        return None

    def accepts(self, scope: str, rank: int, body: bytes) -> bool:
        """Whether ``body`` can be the addresses of ``rank`` in ``scope``."""
        size = self.size_of(scope)
        if size is None or len(body) % ADDRESS_BYTES:
            return False
        named = len(body) // ADDRESS_BYTES + 1
        known = self.meshes.get(scope)
        if known is not None and any(len(other) != len(body) for other in known.published.values()):
            return False
        fits = named == size if "_process_set_hash_" not in scope else named <= size
        entries = (body[start : start + ADDRESS_BYTES] for start in range(0, len(body), ADDRESS_BYTES))
        return fits and rank < named and all(parse_address(entry) is not None for entry in entries)

    # ---- requests

    def handle(self, connection: _Connection, request: _Request) -> None:
        if request.scope == "rank_and_size":
            self._rank_and_size(connection, request)
            return
        match = _KEY.fullmatch(request.key)
        size = self.size_of(request.scope)
        if match is None or size is None or int(match.group(2)) >= size:
            connection.refuse()
            return
        rank, is_hostname = int(match.group(2)), match.group(1) is not None
        if request.method == "PUT":
            self._put(connection, request.scope, rank, request.body, is_hostname)
        elif request.method == "GET":
            self._get(connection, request.scope, rank, is_hostname)
        else:
            self._delete(connection, request.scope, rank)

    def _rank_and_size(self, connection: _Connection, request: _Request) -> None:
        worker, _, local_rank = request.key.rpartition(":")
        if request.method != "GET" or worker not in self.members or local_rank != "0":
            connection.refuse()
            return
        size, rank = len(self.members), self.members.index(worker)
        connection.reply(_REMOVED if self.cancelled else b"%d,%d,0,1,%d,%d" % (rank, size, rank, size))

    def _put(self, connection: _Connection, name: str, rank: int, body: bytes, is_hostname: bool) -> None:
        if self.cancelled:
            connection.reply()  # a refusal would be retried for 1.5 s; the GET that follows throws at once
            return
        scope = self.meshes.get(name, Mesh())
        if scope.complete() and "_process_set_hash_" in name:  # it was removed and is being added again
            scope = Mesh()
        if name not in self.meshes and len(self.meshes) >= _MAX_SCOPES:
            connection.refuse()
            return
        kept = scope.hostnames if is_hostname else scope.published
        allowed = len(body) <= _MAX_HOSTNAME_BYTES if is_hostname else self.accepts(name, rank, body)
        if not allowed or kept.get(rank, body) != body:
            connection.refuse()
            return
        self.meshes[name] = scope
        kept[rank] = body
        connection.reply()
        if not is_hostname:
            for waiting in self.parked.pop((name, rank), ()):
                waiting.reply(body)

    def _get(self, connection: _Connection, name: str, rank: int, is_hostname: bool) -> None:
        scope = self.meshes.get(name, Mesh())
        known = (scope.hostnames if is_hostname else scope.published).get(rank)
        if is_hostname:
            connection.reply(known or b"-")  # Horovod counts equal names of lower ranks; it does not wait for them
        elif self.cancelled:
            connection.reply(_NO_ADDRESS)
        elif known is not None:
            connection.reply(known)
        else:
            connection.parked_at = (name, rank)
            self.parked.setdefault((name, rank), []).append(connection)

    def _delete(self, connection: _Connection, name: str, rank: int) -> None:
        scope = self.meshes.get(name)
        if scope is not None and rank in scope.published:
            scope.finished.add(rank)
        connection.reply()

    def unpark(self, connection: _Connection) -> None:
        waiting = self.parked.get(connection.parked_at, []) if connection.parked_at is not None else []
        if connection in waiting:
            waiting.remove(connection)
            if not waiting and connection.parked_at is not None:
                del self.parked[connection.parked_at]

    def cancel(self) -> None:
        self.cancelled = True
        parked = [connection for waiting in self.parked.values() for connection in waiting]
        self.parked.clear()
        for connection in parked:
            connection.reply(_NO_ADDRESS)


class _Connection:
    """One request of one client, its answer, and the end.

    A world of 16 makes 2,700 of them, so they use the loop only to wait: mostly the request has come with the
    connection, and is answered before the next one is accepted.
    """

    def __init__(self, generation: _Generation, accepted: socket.socket) -> None:
        self.parked_at: tuple[str, int] | None = None
        self._generation = generation
        self._socket = accepted
        self._received = bytearray()
        self._limit: asyncio.TimerHandle | None = None
        generation.connections.add(self)
        self._read()
        if self in generation.connections:
            loop = asyncio.get_running_loop()
            loop.add_reader(accepted.fileno(), self._read)
            if self.parked_at is None:
                self._limit = loop.call_later(_READ_LIMIT_S, self.close)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
            if not data or self.parked_at is not None:  # it went away, or says more than one request
                raise ConnectionError
            self._received += data
            request = _parse_request(self._received, self._generation.largest_body)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self.close()
            return
        if request is not None:
            if self._limit is not None:
                self._limit.cancel()
            self._generation.handle(self, request)

    def reply(self, body: bytes = b"") -> None:
        self._answer(b"200 OK", body)

    def refuse(self) -> None:
        self._answer(b"409 Conflict", b"")

    def close(self) -> None:
        if self in self._generation.connections:
            self._generation.connections.remove(self)
            self._generation.unpark(self)
            if self._limit is not None:
                self._limit.cancel()
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()

    def _answer(self, status: bytes, body: bytes) -> None:
        """Answers in one go. The largest answer, 136 bytes for each member, has to fit the connection's buffer."""
        answer = b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)
        with contextlib.suppress(OSError):
            if len(answer) > _SURE_TO_FIT_BYTES:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(answer))
            self._socket.send(answer)
        self.close()


class Rendezvous:
    """The rendezvous servers of a job, one for each open generation, all on ``host`` (an IPv4 address or its name)."""

    def __init__(self, host: str) -> None:
        self._host, self._address = host, ""
        self._generations: dict[int, _Generation] = {}
        self._pokes: set[asyncio.Task[None]] = set()

    async def open(self, generation: int, members: Sequence[str]) -> int:
        """Starts the server of ``generation`` and returns its port. ``members[r]`` is the worker id with rank r.

        Raises:
            ValueError: no members, a member twice, or a generation that is open already.
            OSError: no port can be bound on the host.
        """
        if not members or len(set(members)) != len(members):
            raise ValueError(f"members of generation {generation} must be distinct and at least one: {list(members)}")
        if generation in self._generations:
            raise ValueError(f"generation {generation} is open already")
        if not self._address:  # once: a name server may be slow, or away, when the next world is to meet
            self._address = socket.gethostbyname(self._host)
        opened = _Generation(generation, members, socket.create_server((self._address, 0), backlog=_BACKLOG))
        self._generations[generation] = opened
        opened.listen()
        return opened.port

    def environment(self, generation: int) -> list[dict[str, str]]:
        """The variables that Horovod reads at init, by rank.

        A member is one Horovod host with one slot: local rank 0 of 1, and the cross rank is the rank.
        """
        opened = self._generations[generation]
        size = str(len(opened.members))
        return [
            {
                "HOROVOD_RANK": str(rank),
                "HOROVOD_SIZE": size,
                "HOROVOD_LOCAL_RANK": "0",
                "HOROVOD_LOCAL_SIZE": "1",
                "HOROVOD_CROSS_RANK": str(rank),
                "HOROVOD_CROSS_SIZE": size,
                "HOROVOD_HOSTNAME": worker,
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": self._host,
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(opened.port),
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                "HOROVOD_ELASTIC": "1",
            }
            for rank, worker in enumerate(opened.members)
        ]

    def cancel(self, generation: int) -> None:
        """Makes the init of every member of ``generation`` fail at once. Without effect on a member that is through it.

        On a stock Horovod a failing init ends the process with SIGABRT.
        """
        opened = self._generations.get(generation)
        if opened is None or opened.cancelled:
            return
        opened.cancel()
        awaited = {parse_address(entry) for scope in opened.meshes.values() for entry in scope.awaited()}
        for address in awaited:
            if address is not None:
                task = asyncio.get_running_loop().create_task(_poke(address))
                self._pokes.add(task)
                task.add_done_callback(self._pokes.discard)

    def addresses(self, generation: int) -> list[tuple[str, int]]:
        """Every published (ip, port) that can be an end of a mesh connection of ``generation``, sorted."""
        opened = self._generations.get(generation)
        scopes = opened.meshes.values() if opened is not None else ()
        found = {parse_address(entry) for scope in scopes for entry in scope.listeners()}
        return sorted(address for address in found if address is not None)

    def waited_for(self, generation: int) -> list[str]:
        """The members whose addresses others wait for right now: those that hold up the init of ``generation``."""
        opened = self._generations.get(generation)
        if opened is None:
            return []
        ranks = {rank for scope, rank in opened.parked if opened.size_of(scope) == len(opened.members)}
        return [opened.members[rank] for rank in sorted(ranks)]

    def close(self, generation: int) -> None:
        """Stops the server of ``generation``. Whoever still waits there is answered as after `cancel`."""
        opened = self._generations.pop(generation, None)
        if opened is None:
            return
        opened.close()

    async def close_all(self) -> None:
        """Stops all servers and waits until nothing of them is left."""
        for generation in list(self._generations):
            self.close(generation)
        pokes = list(self._pokes)
        for poke in pokes:
            poke.cancel()
        await asyncio.gather(*pokes, return_exceptions=True)


async def _poke(address: tuple[str, int]) -> None:
    """Connects, sends the end of the stream, and waits for the other side to close."""
    with contextlib.suppress(OSError):
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as poking:
            poking.setblocking(False)
            async with asyncio.timeout(_POKE_LIMIT_S):
                loop = asyncio.get_running_loop()
                await loop.sock_connect(poking, address)
                poking.shutdown(socket.SHUT_WR)
                while await loop.sock_recv(poking, 4096):
                    pass


def _parse_request(received: bytearray, max_body: int) -> _Request | None:
    """The request, or None where more must come. ValueError where it can never become one."""
    end = received.find(b"\r\n\r\n", 0, _MAX_HEAD_BYTES)
    if end < 0:
        if len(received) >= _MAX_HEAD_BYTES:
            raise ValueError("head too long")
        return None
    lines = received[:end].decode("ascii").split("\r\n")
    method, path, version = lines[0].split(" ")
    root, scope, key = path.split("/")
    headers = dict(line.lower().split(":", 1) for line in lines[1:])
    length = int(headers.get("content-length", "0"))
    if root or method not in ("GET", "PUT", "DELETE") or not version.startswith("HTTP/1."):
        raise ValueError("not a request that Horovod makes")
    body = bytes(received[end + 4 :])
    if not len(body) <= length <= max_body:
        raise ValueError("body too long")
    return _Request(method, scope, key, body) if len(body) == length else None
