"""Shared by all tests, because this suite runs on small and busy machines: Hypothesis without a deadline, and the JVMs
of drivers with what those of a test cluster have: the quick compiler, one thread for their garbage, and the archive of
Spark's classes, once a cluster has made it."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from elastic_spark.testing.archive import ClassArchive
from elastic_spark.testing.cluster import JVM_FLAGS
from elastic_spark.testing.session import spark_home

settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("suite")

for name in ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS"):
    os.environ.setdefault(name, JVM_FLAGS)


@pytest.fixture(scope="module", autouse=True)
def quick_drivers() -> Iterator[None]:
    archive = ClassArchive(os.environ, spark_home(), JVM_FLAGS)
    flags = archive.flags(make=False)
    with pytest.MonkeyPatch.context() as patch:
        if flags and os.environ["SPARK_SUBMIT_OPTS"] == JVM_FLAGS:
            patch.setenv("SPARK_SUBMIT_OPTS", f"{JVM_FLAGS} {flags}")
            patch.setenv("SPARK_CONF_DIR", str(archive.conf_dir))
        yield
