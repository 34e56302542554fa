"""Try your own training function against churn: a real Spark cluster on this machine, made to be broken.

`StandaloneCluster` gives and takes executors, `elastic_spark.testing.counting` tells whether each row was trained once.
"""

from elastic_spark.testing.cluster import Executor, Process, StandaloneCluster, Worker

__all__ = ["Executor", "Process", "StandaloneCluster", "Worker"]
