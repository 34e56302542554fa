"""Ports for servers that take a number and no socket."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

RANGE, LOWEST = Path("/proc/sys/net/ipv4/ip_local_port_range"), 10_000


def free_port() -> int:
    """One that nobody listens on, from below the range that the system gives to those who ask for any; where there is
    nothing below, from that range."""
    first = int(RANGE.read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(LOWEST, first) if first > LOWEST else 0
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
