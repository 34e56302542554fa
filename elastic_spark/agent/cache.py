"""Where the workers of an executor's machine keep decoded rows, if nobody said where: in Spark's own local directories.

These outlive a worker's process, so the one that takes its place needs not decode the same rows again; and Spark
removes them, so nothing is left behind. Which of them is known by the environment of the task:

* ``SPARK_EXECUTOR_DIRS``, of a standalone worker: one for all executors of an application on it, removed with the
  application. ``LOCAL_DIRS``, of a YARN container: the same on a node.
* ``SPARK_LOCAL_DIRS``: the block manager's, removed with the executor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_VARIABLES = (("SPARK_EXECUTOR_DIRS", os.pathsep), ("LOCAL_DIRS", ","), ("SPARK_LOCAL_DIRS", ","))


def default_cache_dir(environment: Mapping[str, str]) -> str | None:
    """A directory (it need not exist yet) in the first of Spark's local ones that can be written to, or None."""
    for name, separator in _VARIABLES:
        for folder in environment.get(name, "").split(separator):
            if os.path.isabs(folder) and os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
                return os.path.join(folder, "elastic-spark-rows")
    return None
