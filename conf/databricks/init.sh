#!/bin/bash
# Cluster init script: elastic_spark, and Horovod built against the runtime's own torch, on every node of the cluster.
#
# Put it beside the wheel of elastic_spark into a volume, as cluster.json and databricks.yml name them. The first node
# ever builds Horovod (minutes) and leaves its wheel in ELASTIC_SPARK_WHEEL_CACHE; later ones install that. The runtime's
# Horovod (15.4 ML has one, later ones have none) is replaced: it lacks the mends that `elastic-spark doctor` names.
set -euo pipefail
python=/databricks/python/bin/python
package=${ELASTIC_SPARK_PACKAGE:?set it in spark_env_vars: the wheel of elastic_spark}

# The runtime's own versions of torch, pyspark, pandas and the rest stay as they are.
"$python" -m pip freeze --exclude horovod | grep -E '^[A-Za-z0-9._-]+==' >/tmp/elastic-spark-constraints.txt
PIP_CONSTRAINT=/tmp/elastic-spark-constraints.txt "$python" -m pip install --quiet "$package"

# A volume cannot be written by two nodes at once to the same file: build here, then copy what is new.
cache=${ELASTIC_SPARK_WHEEL_CACHE:-}
local_cache=/local_disk0/elastic-spark-wheels
mkdir -p "$local_cache"
if [ -n "$cache" ] && [ -d "$cache" ]; then
    cp -r "$cache/." "$local_cache/"
fi
ELASTIC_SPARK_WHEEL_CACHE=$local_cache "$python" -m elastic_spark.cli build-horovod
if [ -n "$cache" ]; then
    cp -rn "$local_cache/." "$cache/" || echo "elastic_spark: the wheel cache $cache cannot be written; it is only slower" >&2
fi
"$python" -m elastic_spark.cli doctor || echo "elastic_spark: see above what is unfit" >&2
