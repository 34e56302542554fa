"""elastic_spark: elastic PyTorch training on Spark executors that come and go.

``run`` trains a function, ``ElasticState`` keeps what must survive, ``freeze`` fixes data and its order. What raises is
in `elastic_spark.errors`; what happened is in the event log, see `elastic_spark.core.events`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_spark.api import Result, run
    from elastic_spark.config import JobConfig
    from elastic_spark.driver.freeze import freeze
    from elastic_spark.estimator.stages import ElasticTorchEstimator, ElasticTorchModel
    from elastic_spark.runner import ElasticRunner
    from elastic_spark.sampler import LaneSampler
    from elastic_spark.worker.state import ElasticState

__version__ = "0.1.0"

#: Where each public name lives. Loaded when first used, so that executors import neither MLflow nor the driver's parts,
#: and a driver without torch can still say what is missing.
_HOMES = {
    "ElasticRunner": "elastic_spark.runner",
    "ElasticState": "elastic_spark.worker.state",
    "ElasticTorchEstimator": "elastic_spark.estimator",
    "ElasticTorchModel": "elastic_spark.estimator",
    "JobConfig": "elastic_spark.config",
    "LaneSampler": "elastic_spark.sampler",
    "Result": "elastic_spark.api",
    "freeze": "elastic_spark.driver.freeze",
    "run": "elastic_spark.api",
}

__all__ = [
    "ElasticRunner",
    "ElasticState",
    "ElasticTorchEstimator",
    "ElasticTorchModel",
    "JobConfig",
    "LaneSampler",
    "Result",
    "freeze",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'elastic_spark' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
