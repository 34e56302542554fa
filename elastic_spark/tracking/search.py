"""What MLflow knows of checkpoints: from the id of a run or of a model to where the state is."""

from __future__ import annotations

from typing import Any

from elastic_spark.errors import ConfigError
from elastic_spark.tracking import values
from elastic_spark.tracking.place import resolve_uri
from elastic_spark.tracking.store import Store


def find_checkpoint(which: str, *, tracking_uri: str | None = None, timeout_s: float = 30.0) -> dict[str, str]:
    """Of the run, or of the model (``m-...``), with id ``which``: ``uri`` of its checkpoint (of a run: the newest that
    it was told of), ``job_name``, ``job_id`` and ``run_id``.

    Raises:
        ConfigError: MLflow does not answer, knows no such run or model, or it is none that elastic_spark has written.
    """
    store = Store({"uri": resolve_uri(tracking_uri)}, lambda text: None)
    where = f"resume={which!r} at {values.without_password(store.uri)}"

    def search() -> dict[str, str]:
        client: Any = store.client()
        model = client.get_logged_model(which) if which.startswith("m-") else None
        run = client.get_run(model.source_run_id if model else which)
        tags = run.data.tags
        uri = model.params.get("uri") if model else tags.get("elastic.latest_checkpoint")
        if not uri or "elastic.job" not in tags:
            raise ConfigError(f"{where}: no checkpoint of elastic_spark is noted there")
        names = {"job_name": tags["elastic.job"], "job_id": tags.get("elastic.job_id", "")}
        return {"uri": uri, **names, "run_id": run.info.run_id}

    try:
        if store.answers():
            return store.within(timeout_s, search)
        raise TimeoutError("no answer")
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where}: {type(error).__name__}: {error}. Is tracking_uri right?") from error
