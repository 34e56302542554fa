"""MLflow, spoken with limits: where it is, the run, and the delivery of records.

Works with MLflow 2.13 (no LoggedModel: tags) and 3.x. Nothing here is fluent: no active run is read after `Store` was
made, none is ever set.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from ssl import CERT_NONE, create_default_context
from typing import Any, TypeVar
from urllib.parse import urlparse

from elastic_spark.bounded import Bounded
from elastic_spark.core.records import Record
from elastic_spark.errors import ConfigError
from elastic_spark.tracking import values
from elastic_spark.tracking.place import (
    artifacts_beside,
    context_tags,
    one_at_a_time,
    version,
)

T = TypeVar("T")

#: Limits of one ``log_batch``: 1,000 entities, 100 of them tags or parameters, 1 MB.
MOST_METRICS, MOST_TAGS = 800, 90
#: What MLflow will say again however often it is asked.
_PERMANENT = frozenset(
    {
        "BAD_REQUEST",
        "CUSTOMER_UNAUTHORIZED",
        "ENDPOINT_NOT_FOUND",
        "FEATURE_DISABLED",
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "MALFORMED_REQUEST",
        "NOT_FOUND",
        "NOT_IMPLEMENTED",
        "PERMISSION_DENIED",
        "RESOURCE_ALREADY_EXISTS",
        "RESOURCE_DOES_NOT_EXIST",
        "UNAUTHENTICATED",
    }
)


class Away(Exception):
    """No answer, or one that says to come back later."""


class Refused(Exception):
    """An answer that will not change."""


class Store:
    """The run of one job. All methods are for one thread.

    Every request ends after ``limit_s`` seconds, and at ``deadline``, after which none is begun.
    """

    def __init__(self, meta: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        self.meta = dict(meta)
        self.uri: str = meta["uri"]
        self.remote = urlparse(self.uri).scheme in ("http", "https") or self.uri.startswith("databricks")
        self.limit_s = 15.0 if self.remote else 120.0
        self.run_id: str | None = None
        self.experiment_id = ""
        self.newest_step = 0
        self._warn = warn
        self._bounded = Bounded(name="elastic-spark-mlflow-call")
        self._resumes = 0
        self._artifact_uri = ""
        self._models = True
        self._attempts = 0

    @property
    def deadline(self) -> float:
        """Of the monotonic clock. May be set from another thread, and counts for the request that is under way."""
        return self._bounded.deadline

    @deadline.setter
    def deadline(self, at: float) -> None:
        self._bounded.deadline = at

    # --- is it there --------------------------------------------------------------------------------------------------

    def answers(self) -> bool:
        """Whether an HTTP server says anything at all within 3 s. True for other stores: asking is trying."""
        if urlparse(self.uri).scheme not in ("http", "https"):
            return True
        try:
            self._bounded(self._probe, max(0.0, min(4.0, self.deadline - time.monotonic())))
        except Exception:
            return False
        return True

    def _probe(self) -> None:
        context = (
            create_default_context()
        )  # nothing secret is sent and nothing is believed: the certificate may be anyone's
        context.check_hostname, context.verify_mode = False, CERT_NONE
        opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
        try:
            opener.open(self.uri.rstrip("/") + "/health", timeout=3.0).close()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (502, 503, 504):
                raise

    def within(self, limit_s: float, call: Callable[[], T]) -> T:
        """``call()``, or TimeoutError after so many seconds: what it does then is of no account."""
        return self._bounded(call, limit_s)

    def _ask(self, call: Callable[[], T]) -> T:
        """``call()`` within the limit; its errors as `Away` or `Refused`."""
        limit = min(self.limit_s, self.deadline - time.monotonic())
        if limit <= 0:
            raise Away("no time left")
        try:
            out = self._bounded(call, limit)
        except (Refused, ConfigError):
            raise
        except Exception as error:
            code = getattr(error, "error_code", "")
            self._attempts += 1
            text = f"{type(error).__name__}: {error}"
            most = 50 if code or isinstance(error, OSError) else 5  # a store that says so, or no one knows what
            if code in _PERMANENT or self._attempts >= most:
                self._attempts = 0
                raise Refused(text) from error
            raise Away(text) from error
        self._attempts = 0
        return out

    # --- the run ------------------------------------------------------------------------------------------------------

    def open(self, *, running: bool = True) -> str:
        """Creates the run, or takes up ``meta["run_id"]`` again: as RUNNING, unless it is only to be completed.

        Raises:
            Away: the store does not answer.
            ConfigError: the store answers that this cannot be: no such run, a deleted experiment, no permission.
        """
        try:
            self._ask(lambda: self._resume(running) if self.meta.get("run_id") else self._create())
        except Refused as error:
            raise ConfigError(
                f"MLflow at {values.without_password(self.uri)} does not take this run: {error}. Likely a wrong "
                "tracking_uri, experiment or run_id, or missing credentials; tracking=False goes without MLflow"
            ) from error
        return self.run_id or ""

    def client(self) -> Any:
        """For requests that `_ask` or `within` sends."""
        from mlflow import MlflowClient

        if self.uri.startswith("databricks"):
            from mlflow.utils import databricks_utils

            credentials: Any = databricks_utils.get_databricks_host_creds
            try:
                credentials(self.uri)
            except Exception as error:
                raise Refused(f"no Databricks host and token for {self.uri!r}: {error}") from error
        with one_at_a_time(self.uri if self.run_id is None else ""):
            return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    def _resume(self, running: bool) -> None:
        client, run_id = self.client(), self.meta["run_id"]
        run = client.get_run(run_id)
        if run.info.lifecycle_stage == "deleted":
            raise Refused(f"run {run_id} is deleted; restore it, or leave run_id out")
        held = run.data.tags
        self._resumes = int(held.get("elastic.resumes", "0"))
        if running:
            self._resumes += "elastic.job_id" in held
            client.update_run(run_id, status="RUNNING")
            own = {"elastic.resumes": str(self._resumes)} if self._resumes else {}
            self._tag_now(client, run_id, {**self._own_tags(), **own, **self.meta["tags"]})
        self._opened(run, int(held.get("elastic.step", "0")))

    def _create(self) -> None:
        client = self.client()
        experiment = self._experiment(client)
        token = self.meta.setdefault("token", uuid.uuid4().hex)
        found = client.search_runs([experiment], f"tags.`elastic.token` = '{token}'", max_results=1)
        if found:  # an earlier request had arrived after all
            self._opened(found[0], 0)
            return
        own = {**context_tags(), **self._own_tags(), "elastic.token": token, **self.meta["tags"]}
        if self.meta.get("parent"):
            own["mlflow.parentRunId"] = self.meta["parent"]
        run = client.create_run(
            experiment,
            start_time=self.meta["started_at_ms"],
            tags={values.key(name): values.tag(text) for name, text in own.items()},
            run_name=self.meta.get("run_name"),
        )
        if self.run_id is not None:  # this request was given up, and another one has made the run meanwhile
            client.delete_run(run.info.run_id)
            return
        self._opened(run, 0)

    def _own_tags(self) -> dict[str, str]:
        return {
            "elastic.verdict": "RUNNING",  # the first that a reviewer sees of the run
            "elastic.job": self.meta["job_name"],
            "elastic.job_id": self.meta["job_id"],
            "elastic.heartbeat_unix": str(round(time.time(), 3)),
        }

    def _opened(self, run: Any, newest_step: int) -> None:
        self.experiment_id, self.newest_step = run.info.experiment_id, newest_step
        self._artifact_uri = run.info.artifact_uri or ""
        self.run_id = self.meta["run_id"] = run.info.run_id
        host = urlparse(self.uri).hostname
        elsewhere = self.remote and host not in ("127.0.0.1", "localhost", "::1")
        if elsewhere and urlparse(self._artifact_uri).scheme in ("", "file"):
            self._warn(
                f"the MLflow server keeps artifacts in a directory of its own ({self._artifact_uri}) that this "
                "machine cannot reach: none are sent. Start the server with --artifacts-destination"
            )
            self._artifact_uri = ""

    def _experiment(self, client: Any) -> str:
        """Id of the experiment, made if it is not there; several processes may do so at once."""
        name = self.meta["experiment"]
        if name.startswith("id:"):
            return str(name[3:])
        error: Exception | None = None
        for attempt in range(6):
            found = client.get_experiment_by_name(name)
            if found is not None and found.lifecycle_stage == "deleted":
                raise Refused(f"experiment {name!r} is deleted; restore it, or choose another name")
            if found is not None:
                return str(found.experiment_id)
            try:
                return str(client.create_experiment(name, artifact_location=artifacts_beside(self.uri)))
            except Exception as failed:  # somebody else was faster, or the database is busy with just that
                error = failed
                time.sleep(0.05 * 2**attempt)
        raise error or Refused(f"experiment {name!r} cannot be made")

    # --- delivery -----------------------------------------------------------------------------------------------------

    def send(self, records: Sequence[Record], *, again: bool) -> int:
        """Delivers records in order and returns how many have arrived; fewer than given: the store is away.

        ``again``: some of them may have arrived before, so what is not idempotent is looked for first.
        """
        done = 0
        try:
            for batch in _batches(records):
                if batch[0]["kind"] in ("metric", "tag"):
                    self._send_batch(batch)
                else:
                    self._send_one(batch[0], again)
                done += len(batch)
        except Away as error:
            self.why = str(error)
        return done

    why = ""

    def _send_batch(self, batch: Sequence[Record]) -> None:
        """One ``log_batch``; what is refused is halved until the culprit is alone, and said."""
        try:
            self._ask(lambda: self._log_batch(batch))
        except Refused as error:
            if len(batch) == 1:
                self._warn(f"MLflow refuses {batch[0]['kind']} {batch[0]['key']!r}: {error}")
                return
            self._send_batch(batch[: len(batch) // 2])
            self._send_batch(batch[len(batch) // 2 :])

    def _log_batch(self, batch: Sequence[Record]) -> None:
        from mlflow.entities import Metric, RunTag

        metrics = [
            Metric(values.key(item["key"]), float(item["value"]), item["at_ms"], item["step"])
            for item in batch
            if item["kind"] == "metric"
        ]
        tags = {values.key(item["key"]): values.tag(item["value"]) for item in batch if item["kind"] == "tag"}
        self._log(metrics=metrics, tags=[RunTag(k, v) for k, v in tags.items()])

    def _tag_now(self, client: Any, run_id: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        client.log_batch(run_id, tags=[RunTag(values.key(k), values.tag(v)) for k, v in tags.items()])

    def _send_one(self, record: Record, again: bool) -> None:
        kind = record["kind"]
        try:
            if kind == "params":
                self._send_params(record["values"])
            elif kind == "checkpoint":
                self._send_checkpoint(record, again)
            elif kind == "dataset":
                self._ask(lambda: self._log_dataset(record))
            elif kind == "text":
                self._ask(lambda: self._log_text(record["path"], record["text"]))
            elif kind == "artifact":
                self._send_file(record)
            elif kind == "end":
                self._ask(lambda: self.client().set_terminated(self.run_id, record["status"], record["at_ms"]))
        except Refused as error:
            self._warn(f"MLflow refuses a {kind} record: {error}")

    def _send_params(self, given: Mapping[str, str]) -> None:
        """Parameters are written once. A value that differs from the one written becomes a tag of this resume."""
        from mlflow.entities import Param, RunTag

        held = self._ask(lambda: self.client().get_run(self.run_id).data.params)
        fresh = [Param(name, text) for name, text in given.items() if name not in held]
        for start in range(0, len(fresh), MOST_TAGS):
            part = fresh[start : start + MOST_TAGS]
            try:
                self._ask(partial(self._log, params=part))
            except Refused:  # one of them is refused: the others must not go with it
                for item in part:
                    self._send_param(item)
        changed = {k: v for k, v in given.items() if k in held and held[k] != v}
        tags = [RunTag(values.key(f"elastic.param.{self._resumes}.{k}"), values.tag(v)) for k, v in changed.items()]
        for start in range(0, len(tags), MOST_TAGS):
            some = tags[start : start + MOST_TAGS]
            self._ask(partial(self._log, tags=some))

    def _log(self, **what: Any) -> None:
        self.client().log_batch(self.run_id, **what)

    def _send_param(self, item: Any) -> None:
        try:
            self._ask(partial(self._log, params=[item]))
        except Refused as error:
            self._warn(f"MLflow refuses parameter {item.key!r}: {error}")

    def _send_checkpoint(self, record: Record, again: bool) -> None:
        """A LoggedModel (Models tab), PENDING until it is complete, linked to its step; a tag where there are none."""
        if self._models and _has_models():
            try:
                self._ask(lambda: self._log_model(record, again))
                return
            except Refused as error:
                self._models = False
                self._warn(f"checkpoints are registered as tags only, MLflow's server refuses models: {error}")
        text = json.dumps({name: record[name] for name in ("uri", "digest", "bytes", "world_size")})
        tag = {"kind": "tag", "key": f"elastic.checkpoint.{record['step']:010d}", "value": text}
        self._send_batch([tag])

    def _log_model(self, record: Record, again: bool) -> None:
        from mlflow.entities import LoggedModelOutput

        client: Any = self.client()
        params = {"uri": record["uri"], "sha256": record["digest"], "global_step": str(record["step"])}
        params |= {"world_size": str(record["world_size"]), "bytes": str(record["bytes"])}
        model = self._find_model(client, params) if again else None
        if model is None:
            model = client.create_logged_model(
                self.experiment_id,
                name=f"checkpoint-{record['step']:010d}",
                source_run_id=self.run_id,
                tags={"mlflow.model.isExternal": "true", "elastic.job": self.meta["job_name"]},
                params=params,
                model_type="elastic-checkpoint",
            )
        if str(model.status) != "READY":
            client.finalize_logged_model(model.model_id, "READY")
        outputs = client.get_run(self.run_id).outputs if again else None
        if not any(item.model_id == model.model_id for item in (outputs.model_outputs if outputs else [])):
            client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, step=record["step"])])

    def _find_model(self, client: Any, params: Mapping[str, str]) -> Any:
        text = f"source_run_id = '{self.run_id}' AND params.global_step = '{params['global_step']}'"
        found = client.search_logged_models([self.experiment_id], filter_string=text)
        return next((model for model in found if model.params.get("uri") == params["uri"]), None)

    def _log_dataset(self, record: Record) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=values.key(record["name"]),
            digest=record["digest"].removeprefix("sha256:")[:32],
            source_type="elastic_spark.manifest",
            source=json.dumps(record["source"]),
            profile=json.dumps({"num_rows": record["rows"]}),
        )
        tags = [InputTag("mlflow.data.context", values.key(record["name"]))]
        self.client().log_inputs(self.run_id, [DatasetInput(dataset, tags)])

    def _send_file(self, record: Record) -> None:
        local = Path(record["local"])
        if not local.exists():
            raise Refused(f"{local} is gone")
        self._ask(lambda: self._log_file(record["path"], local))

    def _log_text(self, path: str, text: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder, Path(path).name)
            local.write_text(text)
            self._log_file(path, local)

    def _log_file(self, path: str, local: Path) -> None:
        """Uploads ``local`` as the artifact ``path``, under that name."""
        if not self._artifact_uri:
            raise Refused(f"artifacts cannot be sent: {path}")
        if local.name != Path(path).name:
            with tempfile.TemporaryDirectory() as folder:
                shutil.copyfile(local, Path(folder, Path(path).name))
                self._log_file(path, Path(folder, Path(path).name))
            return
        folder_of = str(Path(path).parent) if Path(path).parent != Path() else None
        if urlparse(self._artifact_uri).scheme == "mlflow-artifacts" and version() < (3, 0):
            # 2.x looks for the proxy at the global tracking URI, which may be the user's and not ours
            from mlflow.store.artifact import http_artifact_repo, mlflow_artifacts_repo

            proxies: Any = mlflow_artifacts_repo.MlflowArtifactsRepository
            http: Any = http_artifact_repo.HttpArtifactRepository
            http(proxies.resolve_uri(self._artifact_uri, self.uri)).log_artifact(str(local), folder_of)
        else:
            self.client().log_artifact(self.run_id, str(local), folder_of)


def _batches(records: Sequence[Record]) -> Iterator[list[Record]]:
    """Runs of metrics and tags as large as one request takes; everything else alone."""
    batch: list[Record] = []
    tags = 0
    for record in records:
        small = record["kind"] in ("metric", "tag")
        tags += record["kind"] == "tag"
        if batch and (not small or len(batch) >= MOST_METRICS or tags > MOST_TAGS):
            yield batch
            batch, tags = [], int(record["kind"] == "tag")
        batch.append(record)
        if not small:
            yield batch
            batch, tags = [], 0
    if batch:
        yield batch


def _has_models() -> bool:
    from mlflow import MlflowClient

    return hasattr(MlflowClient, "create_logged_model")
