"""Where decoded rows are kept by default."""

from __future__ import annotations

import os
from pathlib import Path

from elastic_spark.agent.cache import default_cache_dir


def test_sparks_own_directories_in_order_of_how_long_they_live(tmp_path: Path) -> None:
    for name in ("app", "yarn", "blocks"):
        (tmp_path / name).mkdir()
    gone, blocks = str(tmp_path / "gone"), f"{tmp_path / 'blocks'},{tmp_path / 'gone'}"
    whole = {
        "SPARK_EXECUTOR_DIRS": os.pathsep.join([gone, str(tmp_path / "app")]),
        "LOCAL_DIRS": f"{gone},{tmp_path / 'yarn'}",
        "SPARK_LOCAL_DIRS": blocks,
    }
    assert default_cache_dir(whole) == str(tmp_path / "app" / "elastic-spark-rows")
    del whole["SPARK_EXECUTOR_DIRS"]
    assert default_cache_dir(whole) == str(tmp_path / "yarn" / "elastic-spark-rows")
    assert default_cache_dir({"SPARK_LOCAL_DIRS": blocks}) == str(tmp_path / "blocks" / "elastic-spark-rows")
    for useless in ({}, {"SPARK_LOCAL_DIRS": ""}, {"LOCAL_DIRS": "relative"}, {"SPARK_EXECUTOR_DIRS": gone}):
        assert default_cache_dir(useless) is None
