"""Shared by all tests, because this suite runs on small and busy machines: Hypothesis without a deadline, and the JVMs
of drivers with the quick compiler and one thread for their garbage, as those of a test cluster have."""

import os

from hypothesis import HealthCheck, settings

from elastic_spark.testing.cluster import JVM_FLAGS

settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("suite")

for name in ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS"):
    os.environ.setdefault(name, JVM_FLAGS)
