"""`ElasticTorchEstimator` and `ElasticTorchModel`: elastic training as a stage of a Spark ML Pipeline.

::

    estimator = es.ElasticTorchEstimator(
        model=nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)),
        optimizer=functools.partial(torch.optim.Adam, lr=1e-3),
        loss=nn.BCEWithLogitsLoss(),
        feature_cols=["features"], label_cols=["label"], batch_size=1024, epochs=5, validation=0.1,
        num_proc=4, min_num_proc=1, store="/Volumes/main/ml/store",
    )
    model = Pipeline(stages=[assembler, estimator]).fit(train_df)
    model.transform(test_df)                                    # with a column "prediction"

Params are named as in Horovod's ``TorchEstimator``. What differs: ``batch_size`` is that of the whole step, over all
workers; the optimizer is made on the workers, by a factory; whatever else a job can be told is in ``options``.
"""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from pyspark import keyword_only
from pyspark.ml import Estimator, Model
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from elastic_spark.driver.spark import require_context
from elastic_spark.errors import ConfigError
from elastic_spark.estimator import frames, recipe, saving, training

_P = TypeVar("_P", bound=type)

#: Params whose values are code: saved as recipes, not as JSON.
CODE = ("model", "optimizer", "loss", "metrics")

_RENAMED = {
    "batch_size": "global_batch",
    "store": "checkpoint_uri",
    "run_id": "job_name",
    "num_proc": "num_proc",
    "min_num_proc": "min_num_proc",
    "max_num_proc": "max_num_proc",
}


def _whole(value: Any) -> int:
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise TypeError(f"must be a whole number of at least 1, not {value!r}")
    return int(value)


def _columns(value: Any) -> list[str]:
    names: list[str] = TypeConverters.toListString([value] if isinstance(value, str) else value)
    if not names or len(set(names)) != len(names):
        raise TypeError(f"must name columns, each once, not {names}")
    return names


def _validation(value: Any) -> float | str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not 0 < float(value) < 1:
        raise TypeError(f"must be a fraction between 0 and 1, or the name of a boolean column, not {value!r}")
    return float(value)


def _metrics(value: Any) -> dict[str, Callable[..., Any]]:
    named = dict(value) if isinstance(value, Mapping) else {getattr(f, "__name__", type(f).__name__): f for f in value}
    if not all(isinstance(name, str) and callable(function) for name, function in named.items()):
        raise TypeError(f"must be functions of (output, label), in a list or by name, not {value!r}")
    return named


def _code(value: Any) -> Any:
    if not callable(value):
        raise TypeError(f"must be callable, not {value!r}")
    return value


def _options(value: Any) -> dict[str, Any]:
    taken = sorted({*_RENAMED.values(), "data"} & set(value))
    if taken:
        raise TypeError(f"{taken[0]!r} has a Param of its own")
    return dict(value)


def _param(name: str, text: str, converter: Callable[[Any], Any]) -> Param[Any]:
    return Param(Params._dummy(), name, text, typeConverter=converter)


class _HasFeatures(Params):
    """What estimator and model share."""

    feature_cols = _param("feature_cols", "columns for the model, each a tensor of its own", _columns)
    prediction_col = _param("prediction_col", "column that transform adds", TypeConverters.toString)
    batch_size = _param("batch_size", "rows of a step, over all workers; in transform rows at a time", _whole)


class _HasFit(_HasFeatures):
    """What a fit can be told."""

    model = _param("model", "torch.nn.Module: an instance, its class, or a factory without arguments", _code)
    optimizer = _param("optimizer", "called with the parameters, gives a torch optimizer", _code)
    loss = _param("loss", "loss(output, label): a torch loss, or a function; a value for each row, or the mean", _code)
    metrics = _param("metrics", "metric(output, label) by name, on the validation rows", _metrics)
    label_cols = _param("label_cols", "columns of labels; several are put side by side", _columns)
    sample_weight_col = _param("sample_weight_col", "column with the weight of a row", TypeConverters.toString)
    validation = _param("validation", "fraction of the rows, or name of a boolean column", _validation)
    epochs = _param("epochs", "passes over the data", _whole)
    patience = _param("patience", "ends after so many epochs without a lower validation loss", _whole)
    num_proc = _param("num_proc", "workers; default: the slots of the cluster", _whole)
    min_num_proc = _param("min_num_proc", "with fewer the job waits", _whole)
    max_num_proc = _param("max_num_proc", "never more", _whole)
    store = _param("store", "shared folder or URI for checkpoints", TypeConverters.toString)
    run_id = _param("run_id", "name of the job: a fit that was lost goes on when made again", TypeConverters.toString)
    options = _param("options", "further options of elastic_spark.JobConfig", _options)


def _accessors(stage: _P) -> _P:
    """Gives a stage ``setX`` and ``getX`` for each Param, in Spark's spelling, where it has none."""
    for name in [name for name in dir(stage) if isinstance(getattr(stage, name), Param)]:
        title = "".join(part.capitalize() for part in name.split("_"))
        text = getattr(stage, name).doc

        def setter(self: Any, value: Any, *, name: str = name) -> Any:
            return self._set(**{name: value})

        def getter(self: Any, *, name: str = name) -> Any:
            return self.getOrDefault(getattr(self, name))

        for kind, function in (("set", setter), ("get", getter)):
            function.__name__, function.__doc__ = kind + title, f"{kind.capitalize()} `{name}`: {text}."
            function.__qualname__ = f"{stage.__name__}.{kind}{title}"
            if not hasattr(stage, kind + title):
                setattr(stage, kind + title, function)
    return stage


@_accessors
class ElasticTorchEstimator(Estimator["ElasticTorchModel"], _HasFit, MLWritable, MLReadable["ElasticTorchEstimator"]):
    """Trains a torch module on a DataFrame, with workers that may come and go.

    Params, in the constructor or by ``setX``:
        model: a ``torch.nn.Module``; or what makes one without arguments, as a class or a ``functools.partial`` does.
            Called with one tensor for each feature column, in order: [n] for numbers, [n, width] for vectors and
            arrays; whole numbers as int64, all else (booleans, decimals too) as float32. Gives [n], [n, 1] or [n, k].
            It is not changed: the fit trains a copy.
        optimizer: makes an optimizer of the parameters: ``functools.partial(torch.optim.Adam, lr=1e-3)``.
        loss: ``loss(output, label)``. Losses of torch are taken row by row, whatever their ``reduction``. Labels are
            float32; class numbers, int64, for cross entropy and the like. An output of [n, 1] is handed over as [n].
        metrics: by name, ``metric(output, label)``, as the loss. Figures that are no means over rows do not fit here.
        feature_cols, label_cols: columns of numbers, booleans, decimals, arrays or vectors.
        sample_weight_col: a batch's loss becomes sum(w * loss) / sum(w); not negative.
        validation: a fraction, of which rows are chosen by a hash of their content, or a boolean column. With it the
            weights with the lowest validation loss are returned; without, the last ones.
        batch_size, epochs, patience: see their docs; default 256, 1, none.
        num_proc, min_num_proc, max_num_proc: as in ``horovod.spark.run_elastic``.
        store: for checkpoints and the frozen data; must be shared where executors are on other machines.
        run_id: name of the job. A fit of the same data and Params that was lost goes on where it was.
        prediction_col: default "prediction".
        options: further options of `elastic_spark.JobConfig`, as ``{"experiment": "flights", "seed": 1}``.

    A fit computes the DataFrame several times: ``cache()`` it where that is dear. Each fit is a tracking run of its
    own, nested under the active run if there is one; CrossValidator fits several times. Batch norm needs shares of at
    least two rows: batches well above the workers.

    Saving (``write``): without pickle, see elastic_spark/estimator/recipe.py. Code is saved as its import path, so it
    must be importable where it is loaded; a model may also be an instance built of torch's own layers.
    """

    @keyword_only
    def __init__(self, **params: Any) -> None:
        """Params by keyword; see the class."""
        super().__init__()
        self._setDefault(prediction_col="prediction", batch_size=256, epochs=1, options={})
        self.setParams(**params)

    @keyword_only
    def setParams(self, **params: Any) -> ElasticTorchEstimator:  # noqa: N802 (Spark's name)
        """Set several Params by keyword."""
        unknown = [name for name in params if not self.hasParam(name)]
        if unknown:
            raise TypeError(f"no Param {unknown[0]!r}; there are {[param.name for param in self.params]}")
        return self._set(**params)

    def copy(self, extra: Any = None) -> ElasticTorchEstimator:
        """A copy that shares no Param value with this one."""
        copied = super().copy(extra)
        copied._paramMap = {param: copy.deepcopy(value) for param, value in copied._paramMap.items()}
        return copied

    def write(self) -> MLWriter:
        return saving.Writer(self, saving.estimator_body)

    @classmethod
    def read(cls) -> MLReader[ElasticTorchEstimator]:
        return saving.Reader(cls, saving.restore_estimator)

    def _optional(self, name: str) -> Any:
        param = self.getParam(name)
        return self.getOrDefault(param) if self.isDefined(param) else None

    def _task(self, module: torch.nn.Module, validates: bool) -> training.FitTask:
        loss = self.getOrDefault(self.loss)
        metrics = self._optional("metrics") or {}
        return training.FitTask(
            module=module,
            optimizer=self.getOrDefault(self.optimizer),
            loss=training.unreduced(loss),
            metrics={name: training.unreduced(metric) for name, metric in metrics.items()},
            features=tuple(self.getOrDefault(self.feature_cols)),
            labels=tuple(self.getOrDefault(self.label_cols)),
            weight=self._optional("sample_weight_col"),
            epochs=self.getOrDefault(self.epochs),
            patience=self._optional("patience"),
            validates=validates,
        )

    def _check(self) -> None:
        required = ("model", "optimizer", "loss", "feature_cols", "label_cols")
        missing = [name for name in required if not self.isDefined(self.getParam(name))]
        if missing:
            raise ConfigError(f"ElasticTorchEstimator needs {', '.join(missing)}")
        needs = [name for name in ("metrics", "patience") if self._optional(name)]
        if needs and self._optional("validation") is None:
            raise ConfigError(f"{needs[0]} needs validation rows: set validation to a fraction or a boolean column")

    def _fit(self, dataset: DataFrame) -> ElasticTorchModel:
        self._check()
        require_context(dataset.sparkSession)
        options = dict(self.getOrDefault(self.options))
        options.update({job: self._optional(name) for name, job in _RENAMED.items() if name != "run_id"})
        seed = options.get("seed") or 0
        data = frames.prepare(
            dataset,
            self.getOrDefault(self.feature_cols),
            self.getOrDefault(self.label_cols),
            self._optional("sample_weight_col"),
            self._optional("validation"),
            seed,
        )
        if self._optional("validation") is not None and data.val is None:
            warnings.warn(f"no row of {data.rows:,} is for validation: the fit goes on without", stacklevel=3)
        module = recipe.make_module(self.getOrDefault(self.model), seed)
        task = self._task(module, data.val is not None)
        output_width = training.try_out(task, data.sample)
        described = _describe_or_warn(self.getOrDefault(self.model))
        sets = {"train": data.train} if data.val is None else {"train": data.train, "val": data.val}
        if self.isDefined(self.run_id):
            options["job_name"] = f"{self.getOrDefault(self.run_id)}-{self._identity(data.fingerprint, module)}"
        if self.isDefined(self.store) and "data_uri" not in options:
            options["data_uri"] = f"{self.getOrDefault(self.store).rstrip('/')}/data"
        options["params"] = {**self._told(), **(options.get("params") or {})}
        facts = {"widths": data.widths, "output_width": output_width, "rows": data.rows, "val_rows": data.val_rows}
        return self._copyValues(_trained(task, sets, options, described, facts))

    def _told(self) -> dict[str, Any]:
        """The Params of the fit, for the tracking run: what tells the runs of a CrossValidator apart."""
        names = ("model", "optimizer", "loss", "epochs", "patience", "validation", "feature_cols", "label_cols")
        values = {name: self._optional(name) for name in names}
        return {name: _shown(value) if name in CODE else value for name, value in values.items() if value is not None}

    def _identity(self, fingerprint: str, module: torch.nn.Module) -> str:
        """Of data and Params: fits that differ in these, as those of a CrossValidator do, are different jobs."""
        plain = {param.name: value for param, value in self.extractParamMap().items() if param.name not in CODE}
        text = json.dumps([fingerprint, plain, repr(module), _shown(self.getOrDefault(self.optimizer))], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


@_accessors
class ElasticTorchModel(Model, _HasFeatures, MLWritable, MLReadable["ElasticTorchModel"]):
    """A trained module as a Transformer: adds ``prediction_col``, a double, or an array of float for [n, k].

    Columns, order and rows stay as they are; a row with a null in a feature has a null prediction.

    Attributes:
        module: the trained ``torch.nn.Module``, in eval mode, on the CPU.
        facts: ``run_id`` (tracking), ``events_path``, ``rows``, ``val_rows``, ``widths`` by feature, ``output_width``,
            ``history`` by epoch, and the job's ``summary``.
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        described: dict[str, Any] | None = None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        """Made by ``fit`` and by ``load``. ``described``: the recipe of ``module``, None where it has none."""
        super().__init__()
        self._setDefault(prediction_col="prediction", batch_size=256)
        self.module, self.described, self.facts = module, described, facts or {}

    @property
    def history(self) -> list[dict[str, Any]]:
        """``{"epoch", "loss"}`` of each epoch, with ``"val_loss"`` and ``"val_<metric>"`` where validated."""
        return list(self.facts.get("history", []))

    def copy(self, extra: Any = None) -> ElasticTorchModel:
        """A copy that shares neither Param values nor weights with this one."""
        copied = super().copy(extra)
        copied._paramMap = {param: copy.deepcopy(value) for param, value in copied._paramMap.items()}
        copied.module, copied.facts = copy.deepcopy(self.module), copy.deepcopy(self.facts)
        return copied

    def write(self) -> MLWriter:
        return saving.Writer(self, saving.model_body)

    @classmethod
    def read(cls) -> MLReader[ElasticTorchModel]:
        return saving.Reader(cls, saving.restore_model)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        from elastic_spark.estimator.inference import Predictor, prediction_udf

        name = self.getOrDefault(self.prediction_col)
        if name in dataset.columns:
            raise ConfigError(f"the DataFrame has a column {name!r} already: choose another prediction_col")
        assert self.module is not None
        names = self.getOrDefault(self.feature_cols)
        widths = dict(zip(names, self.facts["widths"].values(), strict=True))
        batch = self.getOrDefault(self.batch_size)
        predict = prediction_udf(Predictor(self.module.eval(), widths, self.facts["output_width"], batch))
        return dataset.select(F.col("*"), predict(*[frames.numeric(dataset, column) for column in names]).alias(name))


def _trained(
    task: training.FitTask,
    sets: dict[str, DataFrame],
    options: dict[str, Any],
    described: dict[str, Any] | None,
    facts: dict[str, Any],
) -> ElasticTorchModel:
    """Run the job, and put the weights that it returns into a module."""
    import safetensors.torch

    from elastic_spark.api import run
    from elastic_spark.core.events import read_log
    from elastic_spark.estimator.history import history

    result = run(training.train, args=(task,), data=sets, **options)
    task.module.load_state_dict(safetensors.torch.load(result[0]))
    with open(result.events_path, encoding="utf-8") as lines:
        facts["history"] = history(read_log(lines))
    if not all(bool(tensor.isfinite().all()) for tensor in task.module.state_dict().values()):
        warnings.warn("the trained weights are not finite: is the learning rate too high?", stacklevel=4)
    facts.update(run_id=result.run_id, events_path=result.events_path, summary=result.summary)
    return ElasticTorchModel(task.module.eval(), described, facts)


def _describe_or_warn(model: Any) -> dict[str, Any] | None:
    """Said before hours of training, not after: this model will not be saved."""
    try:
        described = recipe.describe(model, "model")
        if "layers" not in described:
            recipe.require_module_factory(model)
    except ConfigError as error:
        warnings.warn(f"the fitted model can be used, but not saved: {error}", stacklevel=4)
        return None
    return described


def _shown(value: Any) -> str:
    """Code by name and arguments: the same text in each process."""
    arguments = ", ".join(f"{name}={item!r}" for name, item in getattr(value, "keywords", {}).items())
    plain = getattr(value, "func", value)
    return f"{getattr(plain, '__module__', '')}.{getattr(plain, '__qualname__', type(plain).__name__)}({arguments})"
