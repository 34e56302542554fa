"""The Spark ML stage: an Estimator whose ``fit`` is an elastic job, and a Model whose ``transform`` runs on executors.

    stages     ElasticTorchEstimator, ElasticTorchModel and their Params: what a user sees
    frames     what becomes of a DataFrame: columns, checks, the split into training and validation rows
    training   what each worker of a fit runs; imports no Spark
    inference  what each executor of a transform runs
    recipe     modules, losses and optimizers as JSON, instead of a pickle
    saving     stages as files

The two classes are loaded when first used, because workers import this package for ``training`` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_spark.estimator.stages import ElasticTorchEstimator, ElasticTorchModel

__all__ = ["ElasticTorchEstimator", "ElasticTorchModel"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from elastic_spark.estimator import stages

    return getattr(stages, name)
