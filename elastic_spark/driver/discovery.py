"""Host discovery: the published members, as a file that anybody may read.

One writer, the driver, publishes the members of the job; each change goes out as two files that are made from the
same list in one call and replaced atomically:

* ``PATH``: JSON, ``{"version": n, "members": [{"id": ..., "host": ...}, ...]}``. A member is one slot.
* ``PATH.hosts``: the lines ``host:slots`` that ``horovodrun --host-discovery-script`` wants, sorted, one for each host.

``elastic-spark hosts`` prints the lines from the JSON, the shell script of `write_script` prints the second file (it is
run every second, and needs no Python start-up), and `MemberListDiscovery` gives Horovod's own driver the same dict.
They cannot disagree, because all of them are `merge_slots` of one list.

Readers never fail: a missing file is an empty list (the job has not published yet), a file that cannot be parsed is an
empty list and a warning. Horovod takes a host name for an address family it can resolve to IPv4 only, and a colon for
the separator, so that an IPv6 address cannot be said in this protocol: such a member is left out, with a warning.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shlex
import stat
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

MEMBERS_ENV = "ELASTIC_SPARK_MEMBERS"


@dataclass(frozen=True)
class Member:
    """One slot of the job: its id, which never comes back, and the real name of the host it runs on."""

    id: str
    host: str


@dataclass(frozen=True, order=True)
class HostSlots:
    """A host and the number of workers that may run on it (at least 1)."""

    host: str
    slots: int


def merge_slots(members: Iterable[Member]) -> tuple[list[HostSlots], list[str]]:
    """Count members by host: (hosts sorted by name, warnings about hosts that ``host:slots`` cannot name: left out)."""
    slots: dict[str, int] = {}
    warnings: list[str] = []
    for member in members:
        problem = _host_problem(member.host)
        if problem:
            warnings.append(f"member {member.id} left out: {problem}")
        else:
            slots[member.host] = slots.get(member.host, 0) + 1
    return sorted(HostSlots(host, count) for host, count in slots.items()), warnings


def format_hosts(hosts: Iterable[HostSlots]) -> str:
    """``host:slots`` lines; the empty string for no hosts."""
    return "".join(f"{entry.host}:{entry.slots}\n" for entry in hosts)


def parse_hosts(text: str) -> tuple[list[HostSlots], list[str]]:
    """Read the output of any discovery script: (hosts sorted by name, warnings).

    A bare ``host`` counts one slot. Blank lines and comments (``#``) are skipped silently; a line that is
    neither, a slot count below one and an IPv6 address are skipped with a warning that quotes the line. Several lines
    for one host are added up.
    """
    slots: dict[str, int] = {}
    warnings: list[str] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        host, _, count = line.rpartition(":") if ":" in line else (line, "", "1")
        problem = _host_problem(line if _is_ipv6(line) else host.strip())
        if not problem and not (count.strip().isascii() and count.strip().isdigit()):
            problem = f"{count.strip()!r} is not a number of slots"
        if not problem and int(count) < 1:
            problem = f"{count.strip()} slots"
        if problem:
            warnings.append(f"line {number} skipped, {line!r}: {problem}")
        else:
            slots[host.strip()] = slots.get(host.strip(), 0) + int(count)
    return sorted(HostSlots(host, count) for host, count in slots.items()), warnings


def publish(path: Path, members: Iterable[Member], version: int) -> list[str]:
    """Write the member list ``version`` and its ``.hosts`` lines, each atomically; returns warnings of `merge_slots`.

    Raises:
        OSError: the folder of ``path`` cannot be written.
    """
    listed = sorted(members, key=lambda member: (member.host, member.id))
    hosts, warnings = merge_slots(listed)
    document = {"version": version, "members": [{"id": member.id, "host": member.host} for member in listed]}
    _replace(path, json.dumps(document, indent=1) + "\n")
    _replace(hosts_file(path), format_hosts(hosts))
    return warnings


def hosts_file(path: Path) -> Path:
    """The plain-text companion of the member list at ``path``."""
    return path.with_name(path.name + ".hosts")


def read(path: Path, warn: Callable[[str], object] = lambda message: None) -> list[Member]:
    """The published members; none if there is no file, or, with a call of ``warn``, if it cannot be parsed."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return [Member(str(entry["id"]), str(entry["host"])) for entry in document["members"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        warn(f"{path} is not a member list, taken as empty: {type(error).__name__}: {error}")
        return []


def host_lines(path: Path, warn: Callable[[str], object] = lambda message: None) -> str:
    """The published members as ``host:slots`` lines: what ``elastic-spark hosts`` prints. Never raises."""
    hosts, warnings = merge_slots(read(path, warn))
    for warning in warnings:
        warn(warning)
    return format_hosts(hosts)


def write_script(path: Path, members_path: Path) -> Path:
    """Write an executable ``sh`` script for ``horovodrun --host-discovery-script`` that prints the published hosts.

    It exits 0 and prints nothing while nothing is published. Returns ``path``.
    """
    lines = shlex.quote(str(hosts_file(members_path.absolute())))
    about = "# Prints host:slots for each host of the job; empty while none is published."
    script = f"#!/bin/sh\n{about}\n[ ! -r {lines} ] || exec cat {lines}\n"
    _replace(path, script, executable=True)
    return path


class MemberListDiscovery:
    """The published members for Horovod's own elastic driver.

    It has the one method that ``horovod.runner.elastic.discovery.HostDiscovery`` asks for, and needs no Horovod. While
    the file cannot be parsed it goes on giving what it last read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_good: dict[str, int] = {}

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Host name to number of slots, as Horovod asks for every second."""
        problems: list[str] = []
        hosts, _ = merge_slots(read(self._path, problems.append))
        if not problems:
            self._last_good = {entry.host: entry.slots for entry in hosts}
        return dict(self._last_good)


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text.strip("[]").partition("%")[0]).version == 6
    except ValueError:
        return False


def _host_problem(host: str) -> str:
    """Why ``host`` cannot be named to Horovod; empty if it can."""
    if not host:
        return "no host name"
    if _is_ipv6(host) or ":" in host:
        return f"{host!r}: IPv6 is unsupported in Horovod's host:slots; give the host a name or an IPv4 address"
    if any(character.isspace() or not character.isprintable() or character in "#,[]" for character in host):
        return f"{host!r} is not a host name"
    return ""


def _replace(path: Path, text: str, *, executable: bool = False) -> None:
    """Write ``text`` to ``path`` so that a reader sees the old or the new content and nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        if executable:
            os.chmod(name, stat.S_IRUSR | stat.S_IWUSR | stat.S_IXUSR)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
