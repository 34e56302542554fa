"""The files in conf/ say what Spark and the job's configuration understand."""

from __future__ import annotations

from pathlib import Path

import pyspark

from elastic_spark.config import JobConfig

CONF = Path(__file__).parent.parent / "conf"


def test_the_job_file_is_a_valid_configuration() -> None:
    config = JobConfig.resolve(CONF / "job.yaml")
    assert (config.num_proc, config.max_num_proc, config.job_name) == (4, 8, "flights")


def test_the_spark_file_names_keys_that_spark_knows() -> None:
    """Every key stands, as it is spelt here, in the constants of Spark's own jars."""
    lines = [line.split(None, 1) for line in (CONF / "spark-defaults.conf").read_text().splitlines()]
    keys = {parts[0] for parts in lines if parts and not parts[0].startswith("#")}
    assert keys
    jars = Path(pyspark.__file__).parent / "jars"
    unknown = (
        keys - _constants(next(jars.glob("spark-core_*.jar"))) - _constants(next(jars.glob("spark-launcher_*.jar")))
    )
    assert not unknown


def _constants(jar: Path) -> set[str]:
    """Strings that begin with ``spark.`` in the class files of a jar."""
    import re
    import zipfile

    found: set[str] = set()
    with zipfile.ZipFile(jar) as archive:
        for name in archive.namelist():
            if name.startswith("org/apache/spark/") and name.endswith(".class"):
                data = archive.read(name)
                found.update(match.decode() for match in re.findall(rb"spark\.[A-Za-z.]+", data))
    return found
