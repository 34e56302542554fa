"""What a job left to be told: its spool, and beside it where that is to go."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from elastic_spark.errors import ConfigError
from elastic_spark.tracking import values
from elastic_spark.tracking.spool import Spool
from elastic_spark.tracking.store import Away, Store

SPOOL, META = "tracking.jsonl", "tracking.json"
#: Records that go to the store in one turn.
MOST_RECORDS = 2_000

_log = logging.getLogger("elastic_spark.tracking")


def replay(spool_dir: str, *, tracking_uri: str | None = None, timeout_s: float = 600.0) -> str:
    """Sends what a finished job left in its ``spool_dir`` to MLflow and returns the run's id.

    Raises:
        ConfigError: nothing there, or MLflow does not take it.
        TimeoutError: not all of it within ``timeout_s`` seconds; the rest stays and can be sent again.
    """
    folder, deadline = Path(spool_dir), time.monotonic() + timeout_s
    try:
        meta = json.loads((folder / META).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} holds no {META}: nothing was left to be sent there") from error
    if tracking_uri:
        meta["uri"] = tracking_uri
    store, spool = Store(meta, _log.warning), Spool(folder / SPOOL)
    while True:
        if not spool:
            return str(store.meta.get("run_id") or "")
        try:
            store.open(running=False)
            write_private(folder / META, json.dumps(store.meta))
            while spool:
                read = spool.read(MOST_RECORDS)
                done = store.send([record for record, _ in read], again=True)
                if done:
                    spool.delivered(read[done - 1][1])
                if done < len(read):
                    raise Away(store.why)
        except Away as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"MLflow at {values.without_password(store.uri)} is away: {error}") from error
            time.sleep(1.0)


def open_spool(folder: Path, run_id: str | None, limit: int, warn: Callable[[str], None]) -> Spool:
    """The spool of this job. What an earlier driver left for this run is sent first; for another, it is set aside."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SPOOL
    try:
        left_for = json.loads((folder / META).read_text()).get("run_id")
    except (OSError, ValueError):
        left_for = None
    if path.exists() and left_for not in (run_id, None):
        aside = folder / str(left_for)
        aside.mkdir(exist_ok=True)
        for name in (SPOOL, f"{SPOOL}.sent", META):
            with contextlib.suppress(FileNotFoundError):
                os.replace(folder / name, aside / name)
        warn(
            f"an earlier job left records for the MLflow run {left_for}: elastic_spark.tracking.replay({str(aside)!r})"
        )
    return Spool(path, limit)


def write_private(path: Path, text: str) -> None:
    """Replaces ``path``, readable by its owner alone: a tracking URI may hold a password."""
    fresh = path.with_name(path.name + ".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(fresh, path)
