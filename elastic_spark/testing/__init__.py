"""Try your own training function against churn: a real Spark cluster on this machine, made to be broken."""

from elastic_spark.testing.cluster import Executor, Process, StandaloneCluster, Worker

__all__ = ["Executor", "Process", "StandaloneCluster", "Worker"]
