"""A worker's life: load, report ready, be given a place, run the user's function, hand over its value.

Started by the agent as ``python -m elastic_spark.worker.main``. Standard input carries one line of JSON (addresses,
key, options) and then the pickled function; so nothing secret is on a command line or in the environment.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

import cloudpickle
import psutil

from elastic_spark.core.lanes import LanePlan
from elastic_spark.core.manifest import Manifest
from elastic_spark.errors import EnvironmentUnfit, StateDiverged, UserCodeFailed
from elastic_spark.transport import Channel
from elastic_spark.worker.session import CannotLoad, WorkerSession, bind


def main() -> int:
    """Returns the exit code: 0 after handing over a value or leaving when told, 1 otherwise."""
    config = json.loads(sys.stdin.buffer.readline())
    payload = sys.stdin.buffer.read()
    key = bytes.fromhex(config.pop("key"))
    hello = {"role": "worker", "worker": config["worker"], "pid": os.getpid()}
    channel = Channel.connect((config["address"][0], config["address"][1]), key, hello)
    session = WorkerSession(channel, config)
    bind(session)
    os.environ.setdefault("HOROVOD_GLOO_IFACE", _interface(channel.local_host, config.get("nics")))
    from elastic_spark.worker import collective  # imports torch and Horovod: what being warm means

    try:
        collective.install(session)
    except ImportError as error:
        session.open()
        return _user_error(session, _unfit(error))
    session.open()
    try:
        function, arguments, keywords = cloudpickle.loads(payload)
        call = _call(session, function, arguments, keywords)
        warm_up()
    except BaseException as error:
        return _user_error(session, error)
    session.ready()
    return _run(session, call)


def _run(session: WorkerSession, call: Any) -> int:
    import horovod.torch as hvd
    from horovod.common.exceptions import HorovodInternalError

    from elastic_spark.worker.collective import Leave

    try:
        hvd.init()
        value = call()
    except Leave as leave:
        print(f"elastic_spark: leaving: {leave.reason}", flush=True)
        session.close()
        return 0
    except HorovodInternalError as error:
        session.gives_up("collective failed", str(error))
        return 1
    except CannotLoad as error:
        session.gives_up("checkpoint unreadable", str(error))
        return 1
    except BaseException as error:  # sys.exit() in the function is a fault of the function, too
        return _user_error(session, error)
    try:
        result = cloudpickle.dumps(value)
    except Exception as error:
        return _user_error(session, TypeError(f"the value that the function returned cannot be sent: {error}"))
    session.finish(result)
    session.wait_to_go()
    session.close()
    return 0


def _call(session: WorkerSession, function: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The call of the user's function, with ``ctx`` where it is wanted."""
    if not _wants_context(function):
        return lambda: function(*arguments, **keywords)
    from elastic_spark.worker.context import Context

    datasets = {
        name: (Manifest.from_json(json.dumps(body["manifest"])), LanePlan(tuple(body["groups"]), **body["plan"]))
        for name, body in session.config["datasets"].items()
    }
    context = Context(session, datasets)
    context.read_ahead()
    return lambda: function(context, *arguments, **keywords)


def _unfit(error: ImportError) -> EnvironmentUnfit:
    """What to do about a Horovod that is missing, or was built without torch or for another one."""
    from elastic_spark.build_horovod import BUILD_COMMAND

    unfit = EnvironmentUnfit(
        f"worker without usable Horovod on {socket.gethostname()} ({sys.executable}): {error}. "
        f"Build it there against the installed torch: {BUILD_COMMAND}"
    )
    unfit.__cause__ = error
    return unfit


def _wants_context(function: Any) -> bool:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return bool(names) and names[0] == "ctx"


def _interface(address: str, nics: list[str] | None) -> str:
    """The network interface for Gloo: the one given that this machine has, else the one that reaches the driver."""
    present: dict[str, list[Any]] = psutil.net_if_addrs()
    for name in nics or ():
        if name in present:
            return name
    for name, entries in present.items():
        if any(entry.address == address for entry in entries):
            return name
    return "lo"


def warm_up() -> None:
    """Pay for torch's first optimizer and backward pass now, not when others wait."""
    import torch

    from elastic_spark.worker import dynamo

    dynamo.import_when_used()
    threads = os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(int(threads) if threads else 1)
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    optimizer = torch.optim.SGD([weight], lr=0.0, momentum=0.9)
    torch.nn.functional.cross_entropy(weight, torch.zeros(4, dtype=torch.long)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _told(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message cannot be shown)"


def _advise(error: BaseException) -> None:
    """Adds to a known error what it comes from here."""
    if str(error).startswith("Expected more than 1 value per channel when training"):
        error.add_note(
            "elastic_spark: this worker's share of the global batch is a single row, of which batch norm cannot take a "
            "variance. Raise global_batch, use fewer workers, or a norm that does not look across rows (LayerNorm, "
            "GroupNorm). The last batch of an epoch holds what is left of its rows, so it may be the one."
        )
    from elastic_spark.worker import collective

    if failed := collective.last_collective_error():
        error.add_note(
            f"elastic_spark: before this a collective had failed ({failed}), and the function went on. If it caught "
            "that HorovodInternalError: it is for @hvd.elastic.run, which brings the state back and goes on."
        )


def _user_error(session: WorkerSession, error: BaseException) -> int:
    at = time.time()
    with contextlib.suppress(Exception):
        _advise(error)
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)
    kind = StateDiverged if isinstance(error, StateDiverged) else UserCodeFailed
    session.fail(kind.__name__, f"{type(error).__name__}: {_told(error)}", text, at)
    session.wait_to_go()
    return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Horovod's and Gloo's threads have no part in a good end, and could hold it up
