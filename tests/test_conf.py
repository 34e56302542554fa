"""The files in conf/ say what Spark, the job's configuration and the shell understand."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_spark.cli import main
from elastic_spark.config import JobConfig

CONF = Path(__file__).parent.parent / "conf"
SPARK_FILES = ["standalone.conf", "yarn.conf", "kubernetes.conf"]
#: Objects that register Spark's configuration keys when they are loaded.
REGISTRIES = [
    *("org.apache.spark.internal.config.package$", "org.apache.spark.internal.config.Python$"),
    *("org.apache.spark.deploy.k8s.Config$", "org.apache.spark.deploy.yarn.config.package$"),
]
#: Keys that end in a name of the user's choice: Spark registers none of them.
FREE = re.compile(
    r"spark\.(executorEnv|yarn\.appMasterEnv|kubernetes\.(driver|executor)\.node\.selector|kubernetes\.driverEnv)\.[\w-]+"
)
#: What each cluster needs, whatever runs it.
EVERYWHERE = {
    "spark.task.cpus": "1",
    "spark.decommission.enabled": "true",
    "spark.speculation": "false",
    "spark.excludeOnFailure.enabled": "false",
    "spark.driver.extraJavaOptions": "-XX:+ExitOnOutOfMemoryError",
}


def settings(name: str) -> dict[str, str]:
    lines = [line.strip() for line in (CONF / name).read_text().splitlines()]
    return dict(line.split(None, 1) for line in lines if line and not line.startswith("#"))


def cluster() -> dict[str, Any]:
    body: dict[str, Any] = json.loads((CONF / "databricks" / "cluster.json").read_text())
    return body


@pytest.fixture(scope="module")
def refused() -> Iterator[Callable[[dict[str, str]], list[str]]]:
    """What Spark's own registry of keys says against settings: unknown keys, and values of another type."""
    from py4j.protocol import Py4JJavaError, get_return_value
    from pyspark.java_gateway import launch_gateway

    # Once this process has had a session, pyspark looks the errors of every JVM up in that session's.
    plain = pytest.MonkeyPatch()
    plain.setattr("py4j.java_gateway.get_return_value", get_return_value)
    gateway = launch_gateway()
    try:
        jvm = gateway.jvm
        for name in REGISTRIES:
            jvm.java.lang.Class.forName(name)

        def check(given: dict[str, str]) -> list[str]:
            wrong = []
            for key, value in given.items():
                entry = jvm.org.apache.spark.internal.config.ConfigEntry.findEntry(key)
                if entry is None:
                    wrong += [] if FREE.fullmatch(key) else [f"{key} is unknown"]
                    continue
                try:
                    jvm.org.apache.spark.SparkConf(False).set(key, value).get(entry)
                except Py4JJavaError as error:
                    wrong.append(f"{key}={value}: {error.java_exception.getMessage()}")
                except ValueError:  # Spark took it, and py4j cannot: the decimal number that spark.task.cpus is now
                    assert value.isdigit()
            return wrong

        yield check
    finally:
        plain.undo()
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(timeout=20)


def test_the_job_file_is_a_valid_configuration() -> None:
    config = JobConfig.resolve(CONF / "job.yaml")
    assert (config.num_proc, config.max_num_proc, config.job_name) == (4, 8, "flights")


@pytest.mark.parametrize("name", SPARK_FILES)
def test_spark_knows_every_key_and_takes_every_value(name: str, refused: Any) -> None:
    given = settings(name)
    assert len(given) > 10
    assert refused(given) == []
    assert EVERYWHERE.items() <= given.items()


def test_spark_knows_the_keys_for_databricks(refused: Any) -> None:
    assert cluster()["spark_conf"] == EVERYWHERE
    assert refused(cluster()["spark_conf"]) == []


def test_the_check_itself_finds_what_is_wrong(refused: Any) -> None:
    wrong = refused({"spark.speculations": "true", "spark.decommission.enabled": "perhaps", "spark.executorEnv.A": "1"})
    assert wrong[0] == "spark.speculations is unknown"
    assert wrong[1].startswith("spark.decommission.enabled=perhaps: ")
    assert len(wrong) == 2


@pytest.mark.parametrize("name", [*SPARK_FILES, "job.yaml"])
def test_each_value_has_its_reason(name: str) -> None:
    """A comment above it, or behind it, or a group's heading in job.yaml."""
    lines = (CONF / name).read_text().splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        if name != "job.yaml" and line and not line.startswith("#"):
            assert above.startswith("#"), line
    assert lines[0].startswith("#")


def test_sizes_fit_together() -> None:
    job = JobConfig.resolve(CONF / "job.yaml")
    for name in SPARK_FILES:
        most = int(settings(name)["spark.dynamicAllocation.maxExecutors"])
        assert most >= (job.max_num_proc or 0)


def test_the_pod_template_is_one(refused: Any) -> None:
    pod = yaml.safe_load((CONF / "kubernetes-executor.yaml").read_text())
    assert (pod["apiVersion"], pod["kind"]) == ("v1", "Pod")
    named = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]} == named
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    assert int(settings("kubernetes.conf")["spark.executor.decommission.forceKillTimeout"].rstrip("s")) < grace


def test_the_bundle_has_the_same_cluster_and_names_files_that_are_there() -> None:
    folder = CONF / "databricks"
    text = (folder / "databricks.yml").read_text()
    volume = yaml.safe_load(text)["variables"]["volume"]["default"]
    job = yaml.safe_load(text.replace("${var.volume}", volume))["resources"]["jobs"]["train"]
    ours = job["job_clusters"][0]["new_cluster"]
    apart = ("cluster_name", "autotermination_minutes")  # a job's cluster has its own name, and ends with it
    assert ours == {name: value for name, value in cluster().items() if name not in apart}
    for task in job["tasks"]:
        assert (folder / task["spark_python_task"]["python_file"]).resolve().is_file()
        assert task["job_cluster_key"] == job["job_clusters"][0]["job_cluster_key"]


def test_every_option_of_the_cluster_is_explained() -> None:
    told = (CONF / "README.md").read_text()
    body = cluster()
    inner = [name for group in ("aws_attributes", "autoscale", "spark_env_vars") for name in body[group]]
    assert [name for name in [*body, *inner] if f"`{name}`" not in told] == []


def test_the_init_script_is_sound() -> None:
    script = CONF / "databricks" / "init.sh"
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    text = script.read_text()
    assert "set -euo pipefail" in text
    used = re.findall(r"-m elastic_spark\.cli ([a-z-]+)", text)
    assert used == ["build-horovod", "doctor"]
    assert set(used) <= set(main.commands)
    assert set(re.findall(r"\bELASTIC_SPARK_[A-Z_]+", text)) == set(cluster()["spark_env_vars"])
