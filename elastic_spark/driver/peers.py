"""The driver's side of the channel: who is connected under which name, and what a message of theirs means.

A peer is an agent (``a0``, ``a1``, ... in the order of registration) or a worker, which says its own name. What is only
news becomes an `Input` of `elastic_spark.core.job` here; what carries something to be kept is left to the controller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elastic_spark.core import job as core
from elastic_spark.core.ledger import Report
from elastic_spark.transport import Connection, Message


class Peers:
    """The connections of one job. A name that is not connected takes a message without a word: it is on its way out,
    and its end is an event of its own."""

    def __init__(self) -> None:
        self.agents: dict[str, Connection] = {}
        self.workers: dict[str, Connection] = {}
        self._names: dict[Connection, str] = {}
        self._registered = 0

    def add_agent(self, connection: Connection) -> str:
        name = f"a{self._registered}"
        self._registered += 1
        self.agents[name] = connection
        self._names[connection] = name
        return name

    def add_worker(self, name: str, connection: Connection) -> None:
        self.workers[name] = connection
        self._names[connection] = name

    def agent(self, connection: Connection) -> str | None:
        """The agent at the other end, if it is one that still counts."""
        name = self._names.get(connection, "")
        return name if self.agents.get(name) is connection else None

    def worker(self, connection: Connection) -> str | None:
        """The worker at the other end, if it is one that still counts."""
        name = self._names.get(connection, "")
        return name if self.workers.get(name) is connection else None

    def forget(self, connection: Connection) -> None:
        """It has ended, or nothing that comes from it counts any more."""
        name = self._names.pop(connection, "")
        for peers in (self.agents, self.workers):
            if peers.get(name) is connection:
                del peers[name]

    def tell_agent(self, name: str, message: Message) -> None:
        _tell(self.agents, name, message)

    def tell_worker(self, name: str, message: Message) -> None:
        _tell(self.workers, name, message)

    def release(self, agent: str, reason: str) -> None:
        """The agent's last message; it closes the connection itself, when its workers have ended."""
        connection = self.agents.get(agent)
        if connection is not None:
            self.forget(connection)
            connection.send({"type": "stop", "reason": reason})

    def fence(self, worker: str, reason: str) -> None:
        """The worker's last message. Its connection is closed from this side, so nothing it says counts any more."""
        connection = self.workers.get(worker)
        if connection is not None:
            self.forget(connection)
            refuse(connection, reason)

    def dismiss_all(self, reason: str) -> None:
        for connection in (*self.workers.values(), *self.agents.values()):
            connection.send({"type": "stop", "reason": reason})


def refuse(connection: Connection, reason: str) -> None:
    connection.send({"type": "stop", "reason": reason})
    connection.close()


def agent_news(agent: str, message: Message) -> list[core.Input]:
    """What an agent's heartbeat, or its word that a worker process has ended, is to the core."""
    if message["type"] == "heartbeat":
        return [core.AgentHeard(agent), *(core.Heard(worker) for worker in message["busy"])]
    if message["type"] == "exited":
        code = message["code"]
        cause = "exited without returning" if code == 0 else "process died"
        detail = "exit code unknown" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        return [core.WorkerDown(message["worker"], cause, detail, code, message["tail"])]
    return []


def worker_news(worker: str, message: Message) -> core.Input | None:
    """What a worker's message is to the core, where it is only news."""
    match message["type"]:
        case "heartbeat":
            return core.Heard(worker, message["where"], message["waits"], message["stalled"])
        case "ready":
            return core.Ready(worker, message["step"], message["generation"])
        case "asked":
            return core.Asked(worker, message["generation"], message["step"], message["reason"], message["error"])
        case "initialised":
            return core.Initialised(worker, message["generation"])
        case "user_error":
            said = {name: message[name] for name in ("step", "at", "error", "traceback", "kind")}
            return core.UserError(worker, **said)
        case "gives_up":
            return core.WorkerDown(worker, message["cause"], message["error"], tail=message["error"])
    return None


def assignments(
    generation: int,
    members: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    lanes: Mapping[str, Mapping[str, Sequence[int]]],
    common: Mapping[str, Any],
) -> Iterator[tuple[str, Message]]:
    """What each member is told of its place: its rank, Horovod's ``environment`` for it, its own lanes of each data
    set, and what is ``common`` to all."""
    for rank, (worker, environment) in enumerate(zip(members, environments, strict=True)):
        body = {"lanes": {name: owned[worker] for name, owned in lanes.items()}, **common}
        place = {"generation": generation, "rank": rank, "size": len(members), "env": environment}
        yield worker, {"type": "assignment", **place, "body": body}


def reports(items: list[dict[str, Any]]) -> list[Report]:
    """The steps that a worker reports, as the ledger takes them."""
    return [
        Report(**{**item, "cursors": {name: (int(e), int(o)) for name, (e, o) in item["cursors"].items()}})
        for item in items
    ]


def _tell(peers: Mapping[str, Connection], name: str, message: Message) -> None:
    connection = peers.get(name)
    if connection is not None:
        connection.send(message)
