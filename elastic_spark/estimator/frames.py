"""What becomes of a DataFrame: numeric columns, checks before anything starts, training and validation rows.

*The split.* A fraction is taken by a hash of a row's features, labels and weight, so it is a property of the row: the
same whatever the partitions and however often Spark computes the DataFrame again, and equal rows fall on one side, so
that none of them is trained on and validated with. The share is therefore near the fraction, not exactly it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from elastic_spark.errors import DataError

_HASH_PARTS = 1 << 20


@dataclass(frozen=True)
class Prepared:
    """``val`` is None where there is nothing to validate with; ``sample``: the columns of two rows, as tensors;
    ``widths``: items of each feature, 0 for a scalar; ``fingerprint``: of all rows, whatever their order."""

    train: DataFrame
    val: DataFrame | None
    rows: int
    val_rows: int
    sample: dict[str, torch.Tensor]
    widths: dict[str, int]
    fingerprint: str


def numeric(dataset: DataFrame, name: str) -> Column:
    """A column as numbers or arrays of numbers: vectors as arrays of float, decimals as double; nulls stay null.

    Raises DataError where there is no such column, or where it does not hold numbers.
    """
    kinds = {field.name: field.dataType for field in dataset.schema.fields}
    if name not in kinds:
        raise DataError(f"there is no column {name!r}; there are {dataset.columns}")
    column, kind = F.col(quoted(name)), kinds[name]
    if isinstance(kind, VectorUDT):
        return F.when(column.isNotNull(), vector_to_array(column, dtype="float32"))
    item = kind.elementType if isinstance(kind, T.ArrayType) else kind
    if not isinstance(item, (T.NumericType, T.BooleanType)):
        advice = "; a StringIndexer makes numbers of strings" if isinstance(kind, T.StringType) else ""
        raise DataError(f"column {name!r} has type {kind.simpleString()}, which does not hold numbers{advice}")
    if isinstance(item, T.DecimalType):
        return column.cast(T.ArrayType(T.DoubleType()) if isinstance(kind, T.ArrayType) else T.DoubleType())
    return column


def prepare(
    dataset: DataFrame,
    features: Sequence[str],
    labels: Sequence[str],
    weight: str | None,
    validation: float | str | None,
    seed: int,
) -> Prepared:
    """One pass of Spark over the data: counts, checks and a sample.

    Raises DataError: a column that is missing or holds no numbers, nulls, weights that cannot weigh, no rows.
    """
    used = list(dict.fromkeys([*features, *labels, *([weight] if weight else [])]))
    columns = {name: numeric(dataset, name) for name in used}
    if weight:
        if "array" in dataset.select(columns[weight].alias("w")).dtypes[0][1]:
            raise DataError(f"column {weight!r} of weights holds lists, not numbers")
        columns[weight] = columns[weight].cast("double")
    held_out = _held_out(dataset, list(columns.values()), validation, seed)
    marked = dataset.select(*[column.alias(name) for name, column in columns.items()], held_out.alias(_mark(used)))
    rows, val_rows, fingerprint = _measure(marked, used, weight, validation)
    train, mark = marked, F.col(_mark(used))
    if validation is not None:
        train = marked.where(~mark)
    sample = train.drop(_mark(used)).head(2)
    tensors = {name: _tensor([row[name] for row in sample] * (2 // len(sample))) for name in used}
    return Prepared(
        train=train.drop(_mark(used)),
        val=marked.where(mark).drop(_mark(used)) if val_rows else None,
        rows=rows,
        val_rows=val_rows,
        sample=tensors,
        widths={name: tensors[name].shape[1] if tensors[name].dim() > 1 else 0 for name in features},
        fingerprint=fingerprint,
    )


def quoted(name: str) -> str:
    """A column's name as Spark reads it, where it may hold dots and the like."""
    return "`" + name.replace("`", "``") + "`"


def _mark(used: Sequence[str]) -> str:
    """A name for the column that tells validation rows, which no other column has."""
    return "_".join(["held_out", *used])


def _held_out(dataset: DataFrame, columns: Sequence[Column], validation: float | str | None, seed: int) -> Column:
    """Whether a row is for validation."""
    if validation is None:
        return F.lit(False)
    if isinstance(validation, str):
        kinds = dict(dataset.dtypes)
        if kinds.get(validation) != "boolean":
            seen = f"has type {kinds[validation]}" if validation in kinds else "is not there"
            raise DataError(f"validation: the column {validation!r} must be boolean, but it {seen}")
        return F.col(quoted(validation))
    part = F.pmod(F.xxhash64(F.lit(seed), *columns), F.lit(_HASH_PARTS))
    return part < int(validation * _HASH_PARTS)


def _measure(
    marked: DataFrame, used: Sequence[str], weight: str | None, validation: float | str | None
) -> tuple[int, int, str]:
    """Training rows, validation rows, and a hash of all rows. Raises DataError for what cannot be trained on."""
    mark = F.col(_mark(used))
    named = [F.col(quoted(name)) for name in used]
    measures = [F.count(F.lit(1)).alias("rows"), F.sum(mark.cast("long")).alias("held_out")]
    measures += [F.sum(mark.isNull().cast("long")).alias("unmarked"), F.bit_xor(F.xxhash64(*named)).alias("xor")]
    measures += [F.sum(column.isNull().cast("long")).alias(f"nulls{i}") for i, column in enumerate(named)]
    if weight:
        value = F.col(quoted(weight))
        useless = F.isnan(value) | (value < 0) | (value == float("inf"))
        measures.append(F.sum(useless.cast("long")).alias("useless"))
        measures.append(F.sum(F.when(~mark, value)).alias("weight"))
    seen = marked.agg(*measures).collect()[0]
    rows = seen["rows"]
    if not rows:
        raise DataError("the DataFrame has no rows")
    nulls = {name: seen[f"nulls{i}"] for i, name in enumerate(used)}
    if isinstance(validation, str):
        nulls[validation] = seen["unmarked"]
    for name, count in nulls.items():
        if count:
            raise DataError(
                f"column {name!r} has {count:,} nulls in {rows:,} rows: drop these rows, or fill them "
                "(pyspark.ml.feature.Imputer)"
            )
    if weight and seen["useless"]:
        raise DataError(f"column {weight!r} has {seen['useless']:,} weights that are negative, infinite or NaN")
    if rows == seen["held_out"]:
        raise DataError(f"all {rows:,} rows are for validation ({validation!r}), so none is left to train on")
    if weight and not seen["weight"]:
        raise DataError(f"all weights in column {weight!r} are zero: no row would be trained on")
    return rows - seen["held_out"], seen["held_out"], f"{rows}:{seen['held_out']}:{seen['xor']}"


def _tensor(values: list[object]) -> torch.Tensor:
    try:
        array = np.asarray(values)
        return torch.from_numpy(array)
    except (ValueError, TypeError) as error:
        raise DataError(f"a column holds lists of different lengths or with nulls inside: {error}") from error
