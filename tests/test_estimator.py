"""The Spark ML stage: real fits with real workers on local cores, in pipelines, saved, loaded and compared."""

from __future__ import annotations

import decimal
import functools
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import mlflow
import numpy as np
import pyarrow as pa
import pytest
import torch
from mlflow import MlflowClient
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.ml.linalg import Vectors
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from torch import nn
from torch.nn import functional as tnf

import elastic_spark as es
from elastic_spark.core import events as ev
from elastic_spark.errors import ConfigError, DataError
from elastic_spark.estimator import frames, inference, recipe, training
from elastic_spark.estimator.history import history

pytestmark = pytest.mark.timeout(300)  # on a busy machine


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("PYSPARK_DRIVER_PYTHON", sys.executable)
        session = (
            SparkSession.builder.master("local[3]")
            .config("spark.ui.enabled", "false")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
            .getOrCreate()
        )
        yield session
        session.stop()


@pytest.fixture
def quiet(tmp_path):
    """Options of a job that leaves nothing outside of the test's folder."""
    return {"tracking": False, "verbose": 0, "work_dir": str(tmp_path / "work")}


def line(spark, rows, **columns):
    """y = 2 a - b + 1 with features as a vector."""
    numbers = np.random.default_rng(0).normal(size=(rows, 2)).round(3)
    data = [(i, Vectors.dense(a, b), float(2 * a - b + 1)) for i, (a, b) in enumerate(numbers.tolist())]
    frame = spark.createDataFrame(data, ["id", "features", "label"])
    for name, value in columns.items():
        frame = frame.withColumn(name, value)
    return frame.coalesce(2).cache()


def regression(quiet, **params):
    return es.ElasticTorchEstimator(
        **{
            "model": nn.Sequential(nn.Linear(2, 1)),
            "optimizer": functools.partial(torch.optim.SGD, lr=0.2),
            "loss": nn.MSELoss(),
            "feature_cols": ["features"],
            "label_cols": ["label"],
            "batch_size": 32,
            "num_proc": 2,
            "options": quiet,
            **params,
        }
    )


def weights_of(model):
    return torch.cat([tensor.flatten() for tensor in model.module.state_dict().values()])


def predictions(frame, order="id"):
    return [row["prediction"] for row in frame.orderBy(order).select("prediction").collect()]


# ---- a fit, from a pipeline to another process

ROWS = 300


@pytest.fixture(scope="module")
def fitted(spark, tmp_path_factory):
    """``(fitted pipeline, its data, folder)``: strings, vectors, booleans and numbers to one prediction."""
    folder = tmp_path_factory.mktemp("fitted")
    kind = F.element_at(F.array(F.lit("a"), F.lit("b")), (F.col("id") % 2 + 1).cast("int"))
    line(spark, ROWS, kind=kind, flag=F.col("id") % 3 == 0).write.parquet(str(folder / "rows"))
    frame = spark.read.parquet(str(folder / "rows"))
    estimator = regression(
        {"tracking": False, "verbose": 0, "work_dir": str(folder / "work")},
        model=nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)),
        optimizer=functools.partial(torch.optim.Adam, lr=0.03),
        feature_cols=["all"],
        validation=0.2,
        metrics=[tnf.l1_loss],
        epochs=3,
        store=str(folder / "store"),
        run_id="line",
    )
    stages = [
        StringIndexer(inputCol="kind", outputCol="kind_index"),
        VectorAssembler(inputCols=["features", "kind_index", "flag"], outputCol="all"),
        estimator,
    ]
    return Pipeline(stages=stages).fit(frame), frame, folder


def test_a_fit_in_a_pipeline(fitted):
    model, folder = fitted[0].stages[-1], fitted[2]
    facts = model.facts
    assert facts["rows"] + facts["val_rows"] == ROWS
    assert 20 <= facts["val_rows"] <= 100
    assert facts["summary"]["rows_total"] == 3 * facts["rows"]
    assert (facts["summary"]["rows_twice"], facts["summary"]["rows_never"]) == (0, 0)
    assert [entry["epoch"] for entry in model.history] == [0, 1, 2]
    assert set(model.history[0]) == {"epoch", "loss", "val_loss", "val_l1_loss"}
    assert model.history[2]["loss"] < model.history[0]["loss"]
    assert not any(layer.training for layer in model.module.modules())
    assert list((folder / "store").glob("line-*/job-*.json"))


def test_a_fitted_pipeline_transforms(fitted):
    pipeline, frame, _ = fitted
    scored = pipeline.transform(frame).cache()
    assert scored.columns == [*frame.columns, "kind_index", "all", "prediction"]
    assert scored.count() == ROWS
    assert predictions(scored) == predictions(pipeline.transform(frame)), "dropout is off"
    model = pipeline.stages[-1]
    split = frames.prepare(scored.drop("prediction"), ["all"], ["label"], None, 0.2, 0)
    error = model.transform(split.val).select(F.avg((F.col("prediction") - F.col("label")) ** 2)).first()[0]
    assert error == pytest.approx(min(entry["val_loss"] for entry in model.history), rel=1e-4), "of the best epoch"


def test_a_fitted_pipeline_is_loaded_in_a_new_process(fitted):
    pipeline, frame, folder = fitted
    path = str(folder / "saved")
    pipeline.write().save(path)
    pipeline.write().overwrite().save(path)
    assert not [file for file in Path(path).rglob("*") if file.suffix in (".pkl", ".pickle", ".pt", ".pth")]
    code = f"""
        import json
        from pyspark.ml import PipelineModel
        from pyspark.sql import SparkSession
        builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
        builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
        spark = builder.getOrCreate()
        model = PipelineModel.load({path!r})
        scored = model.transform(spark.read.parquet({str(folder / "rows")!r})).select("id", "prediction").collect()
        print("RESULT", json.dumps([row["prediction"] for row in sorted(scored)]))
        spark.stop()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=200, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))[7:])
    assert found == pytest.approx(predictions(pipeline.transform(frame)), abs=1e-6)
    model, again = pipeline.stages[-1], PipelineModel.load(path).stages[-1]
    assert again.uid == model.uid
    assert torch.equal(weights_of(again), weights_of(model))
    assert again.history == model.history
    assert not again.module.training


def test_cross_validation_is_a_job_and_a_nested_run_for_each_fit(spark, quiet, tmp_path, monkeypatch):
    """Also of a Pipeline, which Spark fits in threads that do not see the active run."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    estimator = regression(quiet, epochs=2, num_proc=1, options={**quiet, "tracking": True, "tracking_uri": uri})
    rates = (1e-4, 0.2)
    grid = (
        ParamGridBuilder()
        .addGrid(estimator.optimizer, [functools.partial(torch.optim.SGD, lr=lr) for lr in rates])
        .build()
    )
    validator = CrossValidator(
        estimator=Pipeline(stages=[estimator]),
        estimatorParamMaps=grid,
        evaluator=RegressionEvaluator(metricName="rmse"),
        numFolds=2,
        seed=1,
        collectSubModels=True,
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)  # set_tracking_uri cannot be taken back
    with mlflow.start_run(run_name="the search") as search:
        fitted = validator.fit(line(spark, 100).select("id", "features", "label"))
    assert fitted.avgMetrics[1] < 0.5 * fitted.avgMetrics[0]
    best = fitted.bestModel.stages[0].facts
    runs = {
        model.stages[0].facts["run_id"]: lr for fold in fitted.subModels for lr, model in zip(rates, fold, strict=True)
    }
    runs[best["run_id"]] = rates[1]
    assert len(runs) == 5
    client = MlflowClient(uri)
    for run_id, lr in runs.items():
        run = client.get_run(run_id)
        assert run.data.tags["mlflow.parentRunId"] == search.info.run_id
        assert run.info.experiment_id == search.info.experiment_id
        assert run.data.params["optimizer"] == f"torch.optim.sgd.SGD(lr={lr})"
    assert client.get_run(search.info.run_id).data.params == {}
    assert best["rows"] == 100
    assert estimator.getOptimizer().keywords == {"lr": 0.2}


# ---- weights, validation, small and odd data


def test_rows_of_weight_zero_are_as_if_not_there(spark, quiet):
    """Whole batches, so that the order of rows does not matter; and weights that are alike change nothing."""
    frame = line(spark, 60, weight=F.when(F.col("id") < 30, 3.0).otherwise(0.0))
    options = {"model": nn.Linear(2, 1), "batch_size": 64, "epochs": 4}
    weighted = regression(quiet, sample_weight_col="weight", **options).fit(frame)
    half = regression(quiet, **options).fit(frame.where("id < 30"))
    assert weighted.facts["summary"]["rows_total"] == 240
    torch.testing.assert_close(weights_of(weighted), weights_of(half), rtol=1e-5, atol=1e-6)
    assert [entry["loss"] for entry in weighted.history] == pytest.approx([entry["loss"] for entry in half.history])


def away(output, label):
    """A loss whose gradient is the same for each row: a row that is trained on moves its own number."""
    return -output + 0 * label


def test_validation_rows_are_never_trained_on(spark, quiet):
    rows = 50
    frame = line(spark, rows, held_out=F.col("id") % 5 == 2)
    counter = nn.Embedding(rows, 1)
    nn.init.zeros_(counter.weight)
    model = regression(
        quiet,
        model=counter,
        loss=away,
        feature_cols="id",
        validation="held_out",
        batch_size=8,
        epochs=2,
        num_proc=3,
        optimizer=functools.partial(torch.optim.SGD, lr=1.0),
    ).fit(frame)
    trained = {i for i, value in enumerate(weights_of(model).tolist()) if value != 0}
    assert trained == {i for i in range(rows) if i % 5 != 2}
    assert (model.facts["rows"], model.facts["val_rows"]) == (40, 10)
    assert model.facts["summary"]["rows_once"] == 80
    moved = torch.stack([weights_of(model)[i] for i in sorted(trained)])
    assert torch.equal(moved, torch.full_like(moved, 1 / 8)), "the first epoch is as good as the second one"


def test_five_rows_train_three_workers(spark, quiet):
    frame = line(spark, 5).repartition(8)
    start = torch.cat([tensor.flatten() for tensor in nn.Linear(2, 1).state_dict().values()])
    module = nn.Sequential(nn.Linear(2, 1))
    module[0].load_state_dict({"weight": start[:2].reshape(1, 2), "bias": start[2:]})
    model = regression(quiet, model=module, num_proc=3, min_num_proc=3).fit(frame)
    assert not torch.equal(weights_of(model), start)
    assert torch.equal(torch.cat([t.flatten() for t in module.state_dict().values()]), start), "a copy is trained"
    assert model.facts["summary"]["rows_total"] == 5
    rows = frame.collect()
    x = torch.from_numpy(np.array([row["features"].toArray() for row in rows], dtype=np.float32))
    y = torch.tensor([row["label"] for row in rows], dtype=torch.float32)
    expected = nn.Linear(2, 1)
    expected.load_state_dict(module[0].state_dict())
    tnf.mse_loss(expected(x).squeeze(1), y).backward()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter -= 0.2 * parameter.grad
    told = torch.cat([tensor.detach().flatten() for tensor in expected.parameters()])
    torch.testing.assert_close(weights_of(model), told, rtol=1e-5, atol=1e-6)


def test_early_stopping_returns_the_best_epoch(spark, quiet):
    """A step that is far too long makes each epoch worse than the one before."""
    model = regression(
        quiet, validation=0.3, epochs=20, patience=2, optimizer=functools.partial(torch.optim.SGD, lr=1.5)
    ).fit(line(spark, 200))
    losses = [entry["val_loss"] for entry in model.history]
    assert len(losses) == losses.index(min(losses)) + 3 < 20


# ---- what is refused before anything starts


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda f: f.where("id < 0"), DataError, "no rows"),
        (lambda f: f.drop("label"), DataError, "no column 'label'"),
        (
            lambda f: f.withColumn("label", F.when(f.id > 2, f.label)),
            DataError,
            "column 'label' has 3 nulls in 20 rows",
        ),
        (lambda f: f.withColumn("features", F.when(f.id > 2, f.features)), DataError, "'features' has 3 nulls"),
        (lambda f: f.withColumn("label", F.lit("x")), DataError, "StringIndexer"),
        (lambda f: f.withColumn("w", F.lit(-1.0)), DataError, "20 weights that are negative"),
        (lambda f: f.withColumn("w", F.lit(0)), DataError, "all weights"),
        (lambda f: f.withColumn("w", F.lit(float("nan"))), DataError, "20 weights"),
        (lambda f: f.withColumn("held_out", F.lit(True)), DataError, "all 20 rows are for validation"),
        (lambda f: f.withColumn("held_out", F.lit(1)), DataError, "must be boolean"),
        (lambda f: f.withColumn("features", F.array("label")), ConfigError, "do not fit"),
    ],
)
def test_data_that_cannot_be_trained_on(spark, quiet, tmp_path, change, error, said):
    frame = line(spark, 20, w=F.lit(1.0), held_out=F.col("id") == 0)
    estimator = regression(quiet, sample_weight_col="w", validation="held_out")
    with pytest.raises(error, match=said):
        estimator.fit(change(frame))
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"patience": 2}, "patience needs validation rows"),
        ({"metrics": [tnf.l1_loss]}, "metrics needs validation rows"),
        ({"model": nn.Linear(3, 1)}, "do not fit"),
        ({"model": nn.Linear(2, 2)}, "do not fit"),
        ({"loss": lambda output, label: (output - label).square().mean(), "sample_weight_col": "id"}, "not their mean"),
        ({"options": {"nonsense": 1}}, "unknown option 'nonsense'"),
        ({"min_num_proc": 3}, "min_num_proc=3 is more than num_proc=2"),
    ],
)
def test_params_that_cannot_work(spark, quiet, tmp_path, params, said):
    with pytest.raises(ConfigError, match=said):
        regression(quiet, **params).fit(line(spark, 20))
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    "params",
    [
        {"epochs": 0}, {"epochs": 1.5}, {"num_proc": -1}, {"validation": 1.0}, {"validation": 0}, {"metrics": {"a": 1}},
        {"feature_cols": []}, {"feature_cols": ["a", "a"]}, {"options": {"num_proc": 2}}, {"loss": "mse"}, {"no": 1},
    ],
)  # fmt: skip
def test_values_that_no_param_has(params):
    with pytest.raises(TypeError):
        es.ElasticTorchEstimator(**params)


# ---- Params


def test_params_follow_sparks_conventions():
    estimator = es.ElasticTorchEstimator(epochs=3, feature_cols=["a", "b"])
    assert estimator.setBatchSize(64) is estimator
    assert (estimator.getEpochs(), estimator.getBatchSize(), estimator.getPredictionCol()) == (3, 64, "prediction")
    assert "epochs: passes over the data" in estimator.explainParams()
    with pytest.raises(TypeError, match="keyword"):
        es.ElasticTorchEstimator(nn.Linear(1, 1))
    assert len(estimator.params) <= 18


def test_a_copy_shares_nothing():
    layer = nn.Linear(2, 1)
    estimator = es.ElasticTorchEstimator(model=layer, feature_cols=["a"], options={"env": {"A": "1"}})
    copied = estimator.copy({estimator.epochs: 7})
    assert (copied.getEpochs(), estimator.getEpochs()) == (7, 1)
    copied.getFeatureCols().append("b")
    copied.getOptions()["env"]["A"] = "2"
    with torch.no_grad():
        copied.getModel().weight.fill_(9.0)
    assert estimator.getFeatureCols() == ["a"]
    assert estimator.getOptions() == {"env": {"A": "1"}}
    assert not (layer.weight == 9.0).any()
    fitted = es.ElasticTorchModel(layer, None, {"widths": {"a": 0}})
    other = fitted.copy({fitted.prediction_col: "p"})
    with torch.no_grad():
        other.module.weight.fill_(9.0)
    assert not (layer.weight == 9.0).any()
    assert (other.getPredictionCol(), fitted.getPredictionCol()) == ("p", "prediction")


def test_an_unfitted_pipeline_keeps_its_params(spark, tmp_path):
    layers = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(8, 2, bias=False))
    layers[0].weight.requires_grad_(False)
    estimator = es.ElasticTorchEstimator(
        model=layers,
        optimizer=functools.partial(torch.optim.Adam, lr=0.01),
        loss=nn.CrossEntropyLoss(label_smoothing=0.1),
        metrics={"error": tnf.l1_loss},
        feature_cols=["a"],
        label_cols=["b"],
        validation=0.25,
        epochs=4,
    )
    Pipeline(stages=[estimator]).write().save(str(tmp_path / "unfitted"))
    again = Pipeline.load(str(tmp_path / "unfitted")).getStages()[0]
    assert again.uid == estimator.uid
    assert (again.getEpochs(), again.getValidation(), again.getFeatureCols()) == (4, 0.25, ["a"])
    assert again.getMetrics() == {"error": tnf.l1_loss}
    assert (again.getOptimizer().func, again.getOptimizer().keywords) == (torch.optim.Adam, {"lr": 0.01})
    assert again.getLoss().label_smoothing == 0.1
    assert repr(again.getModel()) == repr(layers)
    for name, tensor in layers.state_dict().items():
        assert torch.equal(tensor, again.getModel().state_dict()[name])
    assert not again.getModel()[0].weight.requires_grad
    es.ElasticTorchEstimator(epochs=2).save(str(tmp_path / "empty"))
    assert es.ElasticTorchEstimator.load(str(tmp_path / "empty")).getEpochs() == 2


# ---- recipes


class Own(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.layer = nn.Linear(width, 1)

    def forward(self, x):
        return self.layer(x)


def make_own(width=2) -> nn.Module:
    return Own(width)


def make_silently(width=2):
    return Own(width)


@pytest.mark.parametrize(
    "model",
    [Own, functools.partial(Own, width=5), functools.partial(make_own, width=4), make_own, nn.Linear(2, 3),
     nn.Sequential(nn.Embedding(5, 2, padding_idx=0), nn.Sequential(nn.PReLU())), nn.LayerNorm((3, 2)),
     nn.Sequential(nn.Conv2d(1, 2, (3, 1), stride=2), nn.GELU(approximate="tanh"), nn.ModuleList([nn.Identity()]))],
)  # fmt: skip
def test_a_recipe_makes_the_same_module(model):
    described = json.loads(json.dumps(recipe.describe(model, "model")))
    made, expected = recipe.make_restored_module(described), recipe.make_module(model, 0)
    assert repr(made) == repr(expected)
    assert list(made.state_dict()) == list(expected.state_dict())


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Own(), "give the class Own"),
        (nn.Sequential(Own()), "give the class Own"),
        (nn.TransformerEncoderLayer(4, 2), "does not tell how it was made"),
        (lambda: nn.Linear(1, 1), "could not import it"),
        (functools.partial(Own, 3), "name them"),
        (functools.partial(Own, width=torch.ones(1)), "cannot be saved as JSON"),
    ],
)
def test_what_has_no_recipe_says_what_to_give(model, said):
    with pytest.raises(ConfigError, match=said):
        recipe.describe(model, "model")


@pytest.mark.parametrize(
    "body",
    [
        {"call": "os:system", "kwargs": {"command": "exit 3"}},
        {"ref": "test_estimator:make_silently"},
        {"ref": "builtins:breakpoint"},
        {"layers": {"class": "subprocess:Popen", "kwargs": {"args": "true"}}},
        {"ref": "no.such.module:Net"},
    ],
)
def test_loading_calls_nothing_but_makers_of_modules(body):
    body = json.loads(json.dumps(body).replace("test_estimator", __name__))
    with pytest.raises(ConfigError):
        recipe.make_restored_module(body)


# ---- transform


def predictor(module, widths, output_width=0):
    return inference.Predictor(module.eval(), widths, output_width, 2)


def test_rows_with_nulls_have_no_prediction():
    layer = nn.Linear(2, 1)
    column = pa.array([[1, 2], None, [3, None], [5, 6], [0, 0]], pa.list_(pa.float64()))
    out = predictor(layer, {"x": 2})((column,))
    told = layer(torch.tensor([[1.0, 2], [5, 6], [0, 0]])).flatten().tolist()
    assert out.type == pa.float64()
    assert [value.as_py() for value in out] == [pytest.approx(told[0]), None, None, *map(pytest.approx, told[1:])]
    wide = predictor(nn.Linear(2, 3), {"x": 2}, 3)
    assert [None if row is None else len(row) for row in wide((column,)).to_pylist()] == [3, None, None, 3, 3]
    assert wide((column.slice(1, 2),)).to_pylist() == [None, None]
    assert wide((column.slice(0, 0),)).to_pylist() == []
    with pytest.raises(DataError, match="3 items"):
        predictor(layer, {"x": 2})((pa.array([[1.0, 2, 3]]),))
    with pytest.raises(DataError, match="trained on no items"):
        predictor(layer, {"x": 0})((column,))


class Both(nn.Module):
    """Classes of a code and numbers."""

    def __init__(self):
        super().__init__()
        self.codes, self.numbers = nn.Embedding(4, 3), nn.Linear(2, 3)

    def forward(self, code, flag, numbers):
        assert (code.dtype, flag.dtype, numbers.dtype) == (torch.int64, torch.float32, torch.float32)
        return self.codes(code) + self.numbers(numbers) + flag[:, None]


@pytest.mark.parametrize("by_pandas", [False, True])
def test_transform_keeps_everything_else(spark, by_pandas, monkeypatch):
    model = es.ElasticTorchModel(Both().eval(), None, {"widths": {"c": 0, "f": 0, "d": 2}, "output_width": 3})
    model._set(feature_cols=["my.code", "flag", "pair"], batch_size=4)
    numbers = [None if i == 3 else [decimal.Decimal(i) / 4, decimal.Decimal(1)] for i in range(9)]
    data = [(i % 4, i % 2 == 0, numbers[i], None if i < 4 else f"s{i}", Vectors.dense(i)) for i in range(9)]
    schema = "`my.code` smallint, flag boolean, pair array<decimal(6,2)>, text string"
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.types import StructField, StructType, _parse_datatype_string

    fields = [*_parse_datatype_string(schema).fields, StructField("vec", VectorUDT())]
    frame = spark.createDataFrame(data, StructType(fields)).repartition(2)
    if by_pandas:
        monkeypatch.delattr(inference.F, "arrow_udf", raising=False)
    scored = model.transform(frame)
    assert scored.columns == [*frame.columns, "prediction"]
    assert dict(scored.dtypes)["prediction"] == "array<float>"
    before, after = frame.collect(), scored.collect()
    assert [row[:-1] for row in after] == [tuple(row) for row in before], "rows, order and nulls"
    for row in after:
        if row["pair"] is None:
            assert row["prediction"] is None
            continue
        inputs = torch.tensor([row[0]]), torch.tensor([float(row[1])]), torch.tensor([[float(v) for v in row[2]]])
        assert row["prediction"] == pytest.approx(model.module(*inputs)[0].tolist(), abs=1e-6)
    assert model.transform(frame.limit(0)).count() == 0
    with pytest.raises(ConfigError, match="already"):
        model.transform(scored)


def test_vectors_of_both_kinds_and_their_nulls(spark):
    model = es.ElasticTorchModel(nn.Linear(2, 1).eval(), None, {"widths": {"x": 2}, "output_width": 0})
    model.setFeatureCols("x")
    data = [(0, Vectors.dense(1, 2)), (1, None), (2, Vectors.sparse(2, {1: 2.0}))]
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.types import IntegerType, StructField, StructType

    frame = spark.createDataFrame(data, StructType([StructField("id", IntegerType()), StructField("x", VectorUDT())]))
    told = model.module(torch.tensor([[1.0, 2], [0, 2]])).flatten().tolist()
    assert predictions(model.transform(frame)) == [pytest.approx(told[0]), None, pytest.approx(told[1])]


# ---- splits, losses, history


def test_a_split_is_a_property_of_the_row(spark):
    frame = line(spark, 400)
    ways = [frame, frame.repartition(7), frame.orderBy(F.desc("id"))]
    splits = [frames.prepare(way, ["features"], ["id"], None, 0.25, 3) for way in ways]
    assert len({split.fingerprint for split in splits}) == 1
    assert 60 <= splits[0].val_rows <= 140
    held = [{row["id"] for row in split.val.collect()} for split in splits]
    assert held[0] == held[1] == held[2]
    assert held[0].isdisjoint({row["id"] for row in splits[0].train.collect()})
    other = frames.prepare(frame, ["features"], ["id"], None, 0.25, 4)
    assert {row["id"] for row in other.val.collect()} != held[0]
    doubled = frames.prepare(frame.union(frame), ["features"], ["id"], None, 0.25, 3)
    assert {row["id"] for row in doubled.val.collect()} == held[0]


def test_losses_row_by_row():
    output, label = torch.randn(6, 3), torch.randint(0, 3, (6,))
    for loss in (nn.CrossEntropyLoss(), tnf.cross_entropy, functools.partial(tnf.cross_entropy, label_smoothing=0.1)):
        rows = training.unreduced(loss)(output, label)
        assert rows.shape == (6,)
        assert float(rows.mean()) == pytest.approx(float(loss(output, label)))
    columns = {"y": torch.tensor([0.0, 2.0]), "z": torch.tensor([True, False])}
    assert training.label_of(columns, ["y"], training.unreduced(nn.CrossEntropyLoss())).dtype == torch.int64
    assert training.label_of(columns, ["y"], training.unreduced(tnf.cross_entropy)).dtype == torch.int64
    assert training.label_of(columns, ["y"], nn.MSELoss()).dtype == torch.float32
    assert training.label_of(columns, ["y", "z"], nn.MSELoss()).tolist() == [[0, 1], [2, 0]]
    assert training.by_row(torch.ones(2, 3, 4)).shape == (2,)


def test_history_counts_steps_as_they_were_made_last():
    def step(number, epoch, offset, missing=0, **values):
        yield ev.MetricsReported(at=0.0, step=number, values=values)
        told = {"first_step": number, "times": (0.0,), "cursors": {"train": (epoch, offset)}, "missing": missing}
        yield ev.StepsCommitted(at=0.0, generation=1, **told)

    log = [
        *step(1, 0, 0, loss=3.0),
        *step(2, 0, 1, loss=9.0),
        ev.StepsRolledBack(at=0.0, from_step=2, to_step=1, cause="x"),
        *step(2, 0, 1, loss=1.0),
        ev.MetricsReported(at=0.0, step=3, values={"val_loss": 0.5}),
        ev.StepsCommitted(at=0.0, generation=1, first_step=3, times=(0.0,)),
        *step(4, 1, 0, loss=0.25),
        *step(5, 1, 1, loss=7.0, missing=1),
        *step(6, 2, 0, loss=float("inf")),
    ]
    log = list(ev.read_log([ev.to_json(event) for event in log]))
    assert history(log) == [
        {"epoch": 0, "loss": 2.0, "val_loss": 0.5},
        {"epoch": 1, "loss": 0.25},
        {"epoch": 2, "loss": float("inf")},
    ]
