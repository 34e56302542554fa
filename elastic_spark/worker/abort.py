"""Break a stuck collective: shut down the sockets of one Gloo mesh, and no others.

When a worker dies, only its neighbours in the running collective see the end of a connection. All others sit in Gloo
until its timeout, 30 s by default. Shutting the mesh down on every survivor makes each of them raise
``HorovodInternalError`` at once.

A socket belongs to the mesh when its own or its peer's (ip, port) was published at the rendezvous of that mesh. That is
exact: while a connection that was accepted on a published port lives, the kernel gives the port to nobody else.
Comparing the open sockets before and after init is not: other threads open connections meanwhile.

Each socket is looked at and shut down through a duplicate of its descriptor. The duplicate keeps meaning the same
connection, even where its owner closes the original in between and the number is used again for something else.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection

_FD_DIRECTORY = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"


def break_mesh(addresses: Collection[tuple[str, int]]) -> int:
    """Shuts down every connection of this process whose local or peer (ip, port) is in ``addresses``.

    Listening sockets and unfinished connects are left alone. Safe from any thread. Returns the number of connections
    shut down, which is 0 where the mesh is gone already.
    """
    wanted = frozenset((_plain(ip), port) for ip, port in addresses)
    if not wanted:
        return 0
    broken = 0
    for name in os.listdir(_FD_DIRECTORY):
        with contextlib.suppress(OSError):  # closed meanwhile by its owner, or by the peer
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                broken += _break_one(int(name), wanted)
    return broken


def _break_one(descriptor: int, wanted: frozenset[tuple[str, int]]) -> bool:
    duplicate = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise
    with connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return False
        peer = connection.getpeername()
        if not {_end(peer), _end(connection.getsockname())} & wanted:
            return False
        connection.shutdown(socket.SHUT_RDWR)
        return True


def _end(name: tuple[str, int]) -> tuple[str, int]:
    return _plain(name[0]), name[1]


def _plain(ip: str) -> str:
    """One spelling for one address: without a zone, and IPv4 as IPv4 on a socket of both kinds."""
    return ip.partition("%")[0].removeprefix("::ffff:")
