"""Where MLflow is: tracking URI, experiment, the user's active run. Reads what the user has set, and sets nothing."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from elastic_spark.errors import ConfigError

DEFAULT_EXPERIMENT = "elastic_spark"


def resolve_uri(given: str | None) -> str:
    """The tracking URI: as given, else what MLflow is set to, else Databricks on Databricks, else a SQLite file here.

    Raises:
        ConfigError: a file store where MLflow has none any more (3.13 and later), or a SQLite file that cannot be made.
    """
    uri = given or _configured_uri() or f"sqlite:///{Path.cwd() / 'mlflow.db'}"
    allowed = os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("true", "1")
    if (
        urlparse(uri).scheme in ("", "file")
        and not uri.startswith("databricks")
        and not allowed
        and version() >= (3, 13)
    ):
        raise ConfigError(
            f"tracking_uri={uri!r} is a file store, which MLflow {'.'.join(map(str, version()))} has no more. "
            "Use a database, for example tracking_uri='sqlite:///mlflow.db', or set MLFLOW_ALLOW_FILE_STORE=true"
        )
    path = sqlite_path(uri)  # MLflow itself would try for minutes
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"tracking_uri={uri!r}: {path} cannot be written; does the directory exist, and is it yours?")
    return uri


def _configured_uri() -> str | None:
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None and hasattr(mlflow, "tracking") and mlflow.tracking.is_tracking_uri_set():
        return str(mlflow.get_tracking_uri())
    if os.environ.get("MLFLOW_TRACKING_URI"):
        return os.environ["MLFLOW_TRACKING_URI"]
    return "databricks" if os.environ.get("DATABRICKS_RUNTIME_VERSION") else None


def resolve_experiment(given: str | None, uri: str, parent_experiment: str | None) -> str:
    """A name or ``id:<id>``: as given, else the parent run's, else what MLflow is set to, else `DEFAULT_EXPERIMENT`."""
    if given:
        return given
    if parent_experiment:
        return f"id:{parent_experiment}"
    if os.environ.get("MLFLOW_EXPERIMENT_NAME"):
        return os.environ["MLFLOW_EXPERIMENT_NAME"]
    number = os.environ.get("MLFLOW_EXPERIMENT_ID")
    if not number and uri == _configured_uri() and ("mlflow" in sys.modules or uri.startswith("databricks")):
        try:
            from mlflow.tracking import fluent

            number = fluent._get_experiment_id()
        except Exception:  # private, and different from version to version: then there is none
            number = None
    return f"id:{number}" if number and number != "0" else DEFAULT_EXPERIMENT


def active_run(uri: str) -> tuple[str, str] | None:
    """``(run id, experiment id)`` of the user's active run, if it lives in the same store.

    That is the one of this thread. Threads that are not the main one, as those in which CrossValidator fits, take the
    newest of any thread where they have none.
    """
    mlflow = sys.modules.get("mlflow")
    if mlflow is None or not hasattr(mlflow, "active_run"):
        return None
    run = mlflow.active_run()
    if run is None and threading.current_thread() is not threading.main_thread():
        run = _active_in_any_thread()
    if run is None or mlflow.get_tracking_uri() != uri:
        return None
    return run.info.run_id, run.info.experiment_id


def _active_in_any_thread() -> Any:
    from mlflow.tracking import fluent

    newest = getattr(fluent, "_get_latest_active_run", None)  # private: where it is not, there is none
    return newest() if newest is not None else None


def sqlite_path(uri: str) -> Path | None:
    """The file of a SQLite tracking URI; None for other stores, and for one in memory."""
    if not uri.startswith("sqlite:///") or ":memory:" in uri:
        return None
    return Path(uri.removeprefix("sqlite:///").split("?")[0]).resolve()


def artifacts_beside(uri: str) -> str | None:
    """Artifact location for a SQLite store: a directory beside the file. Other stores know their own."""
    path = sqlite_path(uri)
    return (path.parent / "mlartifacts").as_uri() if path is not None else None


@contextlib.contextmanager
def one_at_a_time(uri: str) -> Iterator[None]:
    """For a SQLite ``uri``: among the processes of this machine. MLflow makes a fresh database's tables without a lock,
    and two processes that do so at once leave a broken one."""
    if not uri.startswith("sqlite:"):
        yield
        return
    name = f"elastic_spark-{os.getuid()}-{hashlib.sha256(uri.encode()).hexdigest()[:16]}.lock"
    with open(Path(tempfile.gettempdir(), name), "a") as file:
        with contextlib.suppress(OSError):  # no locks on this file system: then none
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def context_tags() -> dict[str, str]:
    """User, source, notebook, git commit: what MLflow itself would note about a run."""
    try:
        from mlflow.tracking.context.registry import resolve_tags

        return dict(resolve_tags())
    except Exception:
        return {}


def version() -> tuple[int, ...]:
    for name in ("mlflow", "mlflow-skinny"):
        try:
            return tuple(int(part) for part in importlib.metadata.version(name).split(".")[:2])
        except (importlib.metadata.PackageNotFoundError, ValueError):
            continue
    raise ConfigError("MLflow is not installed: pip install mlflow, or use tracking=False")
