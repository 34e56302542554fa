"""Stages as files, by Spark's conventions and without pickle.

    <path>/metadata/             one line of JSON, as Spark ML writes it: class, uid, Params; "recipes" for code (see
                                 recipe.py), and "facts" of a fitted model
    <path>/model.safetensors     weights of the model; of an estimator where its model is an instance

Files travel through Hadoop's file systems, as all of Spark's do, so any path that Spark knows will do.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWriter
from pyspark.sql import SparkSession

from elastic_spark.driver.spark import require_context
from elastic_spark.errors import ConfigError, StorageFailed
from elastic_spark.estimator import recipe

_S = TypeVar("_S", bound=MLReadable[Any])
_WEIGHTS = "model.safetensors"


class Writer(MLWriter):
    """Writes a stage. ``body`` gives what to write of it: ``(extra metadata, module or None)``."""

    def __init__(self, stage: Any, body: Callable[[Any], tuple[dict[str, Any], torch.nn.Module | None]]) -> None:
        super().__init__()
        self._stage, self._body = stage, body

    def saveImpl(self, path: str) -> None:  # noqa: N802 (Spark's name)
        extra, module = self._body(self._stage)
        spark = require_context(self.sparkSession)
        skipped = extra.get("recipes", {})
        params = {param.name: value for param, value in self._stage._paramMap.items() if param.name not in skipped}
        DefaultParamsWriter.saveMetadata(self._stage, path, spark.sparkContext, extraMetadata=extra, paramMap=params)
        if module is not None:
            with tempfile.TemporaryDirectory() as folder:
                local = Path(folder, _WEIGHTS)
                weights = {name: tensor.contiguous().clone() for name, tensor in module.state_dict().items()}
                safetensors.torch.save_file(weights, local)
                _copy(spark, f"{path.rstrip('/')}/{_WEIGHTS}", local, upload=True)


class Reader(MLReader[_S]):
    """Reads a stage of ``cls``. ``restore`` completes it from the metadata and, where called, the weights."""

    def __init__(self, cls: type[_S], restore: Callable[[Any, dict[str, Any], Callable[[], Any]], None]) -> None:
        super().__init__()
        self._cls, self._restore = cls, restore

    def load(self, path: str) -> _S:
        spark = require_context(self.sparkSession)
        metadata = DefaultParamsReader.loadMetadata(
            path, spark.sparkContext, f"{self._cls.__module__}.{self._cls.__name__}"
        )
        stage: Any = self._cls()
        stage._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(stage, metadata)

        def weights() -> dict[str, torch.Tensor]:
            with tempfile.TemporaryDirectory() as folder:
                local = Path(folder, _WEIGHTS)
                _copy(spark, f"{path.rstrip('/')}/{_WEIGHTS}", local, upload=False)
                return safetensors.torch.load(local.read_bytes())

        self._restore(stage, metadata, weights)
        loaded: _S = stage
        return loaded


def estimator_body(stage: Any) -> tuple[dict[str, Any], torch.nn.Module | None]:
    """Params that are code as recipes; the weights of a model that is an instance."""
    recipes: dict[str, Any] = {}
    for name in ("model", "optimizer", "loss"):
        if stage.isSet(stage.getParam(name)):
            recipes[name] = recipe.describe(stage.getOrDefault(name), name)
    if stage.isSet(stage.metrics):
        metrics = stage.getOrDefault(stage.metrics)
        recipes["metrics"] = {name: recipe.describe(metric, f"metric {name}") for name, metric in metrics.items()}
    model = stage.getOrDefault("model") if "model" in recipes else None
    return {"recipes": recipes}, model if isinstance(model, torch.nn.Module) else None


def restore_estimator(stage: Any, metadata: dict[str, Any], weights: Callable[[], Any]) -> None:
    recipes = metadata["recipes"]
    for name in ("model", "optimizer", "loss"):
        if name in recipes:
            stage._set(**{name: recipe.restore(recipes[name], name)})
    if "metrics" in recipes:
        stage._set(metrics={name: recipe.restore(body, name) for name, body in recipes["metrics"].items()})
    if "layers" in recipes.get("model", {}):
        stage.getOrDefault(stage.model).load_state_dict(weights())


def model_body(stage: Any) -> tuple[dict[str, Any], torch.nn.Module | None]:
    if stage.module is None:
        raise ConfigError("this ElasticTorchModel was not made by a fit: there is nothing to save")
    if stage.described is None:
        recipe.describe(stage.module, "model")
        raise ConfigError("model: how it was made is not known, so it cannot be saved")
    facts = json.loads(json.dumps(stage.facts, default=str))
    return {"recipes": {"model": stage.described}, "facts": facts}, stage.module


def restore_model(stage: Any, metadata: dict[str, Any], weights: Callable[[], Any]) -> None:
    stage.described, stage.facts = metadata["recipes"]["model"], metadata["facts"]
    stage.module = recipe.make_restored_module(stage.described)
    stage.module.load_state_dict(weights())
    stage.module.eval()


def _copy(spark: SparkSession, remote: str, local: Path, *, upload: bool) -> None:
    """Between a path of Spark's and a local file. Raises StorageFailed."""
    from py4j.protocol import Py4JJavaError

    jvm: Any = spark.sparkContext._jvm
    there, here = jvm.org.apache.hadoop.fs.Path(remote), jvm.org.apache.hadoop.fs.Path(local.as_uri())
    try:
        files = there.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())
        if upload:
            files.copyFromLocalFile(False, True, here, there)
        else:
            files.copyToLocalFile(False, there, here, True)
    except Py4JJavaError as error:
        raise StorageFailed(f"{'writing' if upload else 'reading'} {remote}: {error.java_exception}") from error
