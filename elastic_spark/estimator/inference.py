"""What each executor of a transform runs: Arrow columns in, predictions out.

Only the feature columns travel to Python; all other columns stay in Spark untouched. A row with a null in a feature, or
inside of one, gets a null as prediction. Rows are put to the model in batches of a fixed size within each of Spark's
own batches, in eval mode, so the same rows give the same predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyspark.sql import functions as F
from pyspark.sql import types as T

from elastic_spark.errors import DataError
from elastic_spark.estimator.training import output_of


@dataclass(frozen=True)
class Predictor:
    """A module with what it needs to know about columns.

    ``widths``: the features in order, with 0 for a scalar and n for lists of n items. ``output_width``: the same for
    the prediction, as float64 and float32.
    """

    module: torch.nn.Module
    widths: Mapping[str, int]
    output_width: int
    batch_size: int

    def __call__(self, columns: tuple[pa.Array, ...]) -> pa.Array:
        """Predictions for the rows of some columns, in the order of ``widths``: as many, null where a feature is."""
        rows = len(columns[0])
        whole = np.ones(rows, dtype=bool)
        for column in columns:
            whole &= _whole(column)
        kept = [column.filter(pa.array(whole)) for column in columns]
        inputs = {
            name: _tensor(name, width, column) for (name, width), column in zip(self.widths.items(), kept, strict=True)
        }
        outputs = self._run(inputs, int(whole.sum()))
        places = np.where(whole, np.cumsum(whole) - 1, 0)
        return _arrow(outputs, self.output_width).take(pa.array(places, mask=~whole))

    def _run(self, inputs: Mapping[str, torch.Tensor], rows: int) -> np.ndarray[Any, Any]:
        shape = (rows, self.output_width) if self.output_width else (rows,)
        outputs = np.empty(shape, dtype=np.float32 if self.output_width else np.float64)
        with torch.inference_mode():
            for start in range(0, rows, self.batch_size):
                part = {name: tensor[start : start + self.batch_size] for name, tensor in inputs.items()}
                output = output_of(self.module, part, list(self.widths)).flatten(1 if self.output_width else 0)
                outputs[start : start + self.batch_size] = output.numpy()
        return outputs


def prediction_udf(predictor: Predictor) -> Callable[..., Any]:
    """A Spark function of the feature columns. pyarrow arrays alone where Spark can (4.1), else by way of pandas."""
    kind = T.ArrayType(T.FloatType()) if predictor.output_width else T.DoubleType()
    payload = cloudpickle.dumps(predictor)
    if not hasattr(F, "arrow_udf"):
        return _pandas_udf(payload, list(predictor.widths.values()), kind)

    def predict(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        load = cloudpickle.loads(payload)
        for columns in batches:
            yield load(columns if isinstance(columns, tuple) else (columns,))

    return F.arrow_udf(predict, kind)  # type: ignore[no-any-return]


def _pandas_udf(payload: bytes, widths: list[int], kind: T.DataType) -> Callable[..., Any]:
    import pandas as pd

    def predict(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.Series]:
        load = cloudpickle.loads(payload)
        for series in batches:
            columns = series if isinstance(series, tuple) else (series,)
            yield load(tuple(pa.Array.from_pandas(column) for column in columns)).to_pandas()

    # As objects, where Spark looks for them: as text they could not be resolved, because pandas is imported here alone.
    predict.__annotations__ = {"batches": Iterator[tuple[pd.Series, ...]], "return": Iterator[pd.Series]}
    return F.pandas_udf(predict, kind)  # type: ignore[attr-defined, no-any-return]


def _whole(column: pa.Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows hold no null, neither as a whole nor inside: bool[n]."""
    there = np.asarray(column.is_valid())
    if _is_list(column) and column.flatten().null_count:
        owners = np.asarray(pc.list_parent_indices(column))
        there = there.copy()
        there[owners[np.asarray(column.flatten().is_null())]] = False
    return there


def _tensor(name: str, width: int, column: pa.Array) -> torch.Tensor:
    """A column without nulls: [n], or [n, width]. Where all were null pandas has kept no type."""
    if not len(column):
        return torch.empty((0, width) if width else (0,))
    if _is_list(column) != bool(width):
        raise DataError(f"feature {name!r} is {column.type}; the model was trained on {width or 'no'} items in a row")
    if not width:
        return torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())
    lengths = np.asarray(pc.list_value_length(column))
    if (lengths != width).any():
        wrong = int(lengths[lengths != width][0])
        raise DataError(f"feature {name!r} has {wrong} items in a row; the model was trained on {width}")
    return torch.from_numpy(column.flatten().to_numpy(zero_copy_only=False).copy()).reshape(-1, width)


def _arrow(outputs: np.ndarray[Any, Any], width: int) -> pa.Array:
    if not len(outputs):
        return pa.nulls(1, pa.list_(pa.float32()) if width else pa.float64())
    if not width:
        return pa.array(outputs)
    offsets = np.arange(0, outputs.size + 1, width, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(outputs.reshape(-1)))


def _is_list(column: pa.Array) -> bool:
    return bool(pa.types.is_list(column.type) or pa.types.is_large_list(column.type))
