"""The addresses of one Gloo mesh: which of them can be in use, and who may be waiting at one.

Every rank publishes one address for every other rank and listens on all of them. Of the two addresses of a pair Gloo
gives up the higher one, and its owner connects to the lower. So the lower address is an end of the pair's connection
as long as that lives, while the port of the higher is free for anybody. A rank that has passed the barrier behind its
mesh says so; from then on nobody listens in this mesh.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

#: Size in bytes of one published address: a ``sockaddr_storage`` and a sequence number.
ADDRESS_BYTES = 136


@dataclass
class Mesh:
    """What the ranks of one mesh have told. ``published[i]`` holds rank i's addresses, one for every other rank in rank
    order, as they came; ``finished`` the ranks that are through."""

    published: dict[int, bytes] = field(default_factory=dict)
    hostnames: dict[int, bytes] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)

    def listeners(self) -> Iterator[bytes]:
        """The addresses that may be listened on, or be the local end of a connection."""
        for mine, theirs in self._pairs():
            if theirs is None or _order(mine) < _order(theirs):
                yield mine

    def awaited(self) -> Iterator[bytes]:
        """The addresses whose owner may be waiting for the other side to connect."""
        for mine, theirs in self._pairs() if not self.finished else ():
            if theirs is not None and _order(mine) < _order(theirs):
                yield mine

    def complete(self) -> bool:
        """Whether every rank is through."""
        return len(self.finished) == self._size() == len(self.published)

    def _pairs(self) -> Iterator[tuple[bytes, bytes | None]]:
        """Every published address with that of the other side of its pair, where that is known."""
        for rank, body in self.published.items():
            for other in range(self._size()):
                if other != rank:
                    theirs = self.published.get(other)
                    mine = _entry(body, owner=rank, other=other)
                    yield mine, theirs and _entry(theirs, owner=other, other=rank)

    def _size(self) -> int:
        return len(next(iter(self.published.values()), b"")) // ADDRESS_BYTES + 1


def parse_address(entry: bytes) -> tuple[str, int] | None:
    """(ip, port) of a published address, or None where it is none."""
    family = int.from_bytes(entry[:2], sys.byteorder)
    port = int.from_bytes(entry[2:4], "big")
    if port == 0 or family not in (socket.AF_INET, socket.AF_INET6):
        return None
    return socket.inet_ntop(family, _ip(entry)), port


def _entry(body: bytes, *, owner: int, other: int) -> bytes:
    """The address in ``body``, published by rank ``owner``, that is meant for rank ``other``."""
    start = ADDRESS_BYTES * (other if other < owner else other - 1)
    return body[start : start + ADDRESS_BYTES]


def _order(entry: bytes) -> tuple[bytes, int]:
    """Sorts two addresses as Gloo does: by IP, then by the port's two bytes read in the host's order."""
    return _ip(entry), int.from_bytes(entry[2:4], sys.byteorder)


def _ip(entry: bytes) -> bytes:
    return entry[4:8] if int.from_bytes(entry[:2], sys.byteorder) == socket.AF_INET else entry[8:24]
