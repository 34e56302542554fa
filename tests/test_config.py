"""The configuration: every rule, every type, one precedence, and what reaches the log."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from elastic_spark.config import JobConfig
from elastic_spark.core.job import Options
from elastic_spark.errors import ConfigError


def refused(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        JobConfig.resolve(**options)
    return str(caught.value)


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# ----------------------------------------------------------------------------------------------- where values come from


def test_defaults_then_the_file_then_keywords(tmp_path: Path) -> None:
    path = file(tmp_path, "num_proc: 4\nglobal_batch: 64\nexperiment: flüge\n")
    config = JobConfig.resolve(path, num_proc=2, experiment=None)
    assert (config.num_proc, config.global_batch, config.experiment) == (2, 64, "flüge")
    assert dataclasses.replace(config, num_proc=None, global_batch=256, experiment=None) == JobConfig()


@pytest.mark.parametrize("text", ["", "# nothing\n", "num_proc:\nspares: null\n"])
def test_what_says_nothing_changes_nothing(tmp_path: Path, text: str) -> None:
    assert JobConfig.resolve(str(file(tmp_path, text))) == JobConfig.resolve() == JobConfig()


@pytest.mark.parametrize("text", ["- num_proc\n", "42\n", "[]\n", "false\n"])
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(ConfigError, match=re.escape(f"{path} is not a mapping of options")):
        JobConfig.resolve(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.yaml", tmp_path, file(tmp_path, "a: [1\n")):
        with pytest.raises(ConfigError, match=re.escape(f"cannot read the configuration {path}")):
            JobConfig.resolve(path)
    path.write_bytes(b"experiment: \xff\n")
    with pytest.raises(ConfigError, match="cannot read"):
        JobConfig.resolve(path)


def test_an_unknown_option_is_named_and_so_is_the_one_that_was_meant(tmp_path: Path) -> None:
    said = refused(min_num_procs=2)
    assert said.startswith("unknown option 'min_num_procs' (did you mean 'min_num_proc'?); known are: ")
    assert all(item.name in said for item in dataclasses.fields(JobConfig))
    assert refused(zzz=1).startswith("unknown option 'zzz'; known are: ")
    with pytest.raises(ConfigError, match="unknown option 7"):
        JobConfig.resolve(file(tmp_path, "7: 8\nnum_proc: 2\n"))


def test_an_unknown_option_is_told_even_where_it_says_nothing_else() -> None:
    assert JobConfig.resolve(nothing=None) == JobConfig(), "as the arguments of run that were not given"


# ------------------------------------------------------------------------------------------------------------ types


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("start_timeout", 30, 30.0),
        ("num_proc", 3, 3),
        ("shuffle", False, False),
        ("work_dir", Path("a/b"), "a/b"),
        ("checkpoint_uri", Path("a"), "a"),
        ("nics", ["eth1", "eth0"], ("eth1", "eth0")),
        ("nics", {"eth1", "eth0"}, ("eth0", "eth1")),
        ("nics", ("lo",), ("lo",)),
        ("env", {"A": "x", "OMP_NUM_THREADS": 4, "F": 0.5}, {"A": "x", "OMP_NUM_THREADS": "4", "F": "0.5"}),
    ],
)
def test_values_are_taken_as_the_type_of_the_option(name: str, given: Any, taken: Any) -> None:
    value = getattr(JobConfig.resolve(**{name: given}), name)
    assert (value, type(value)) == (taken, type(taken))


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("num_proc", "3", "int | None"),
        ("num_proc", 3.0, "int | None"),
        ("num_proc", True, "int | None"),
        ("spares", True, "int"),
        ("start_timeout", True, "float"),
        ("start_timeout", "600", "float"),
        ("shuffle", 1, "bool"),
        ("tracking", "no", "bool"),
        ("experiment", 5, "str | None"),
        ("work_dir", False, "str"),
        ("nics", "eth0", "tuple"),
        ("env", ["A=x"], "Mapping"),
    ],
)
def test_a_wrong_type_is_named_with_what_was_expected(name: str, given: Any, expected: str) -> None:
    said = refused(**{name: given})
    assert said.startswith(f"{name}={given!r}: expected ")
    assert expected in said


@pytest.mark.parametrize("env", [{"A": True}, {"A": None}, {"A": ["x"]}, {1: "x"}])
def test_what_cannot_be_an_environment_variable(env: dict[Any, Any]) -> None:
    assert "cannot be an environment variable" in refused(env=env)


# ------------------------------------------------------------------------------------------------------------ rules


@pytest.mark.parametrize(
    "name", ["num_proc", "min_num_proc", "max_num_proc", "global_batch", "lanes", "keep_checkpoints"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_counts_are_at_least_1(name: str, value: int) -> None:
    assert refused(**{name: value}) == f"{name}={value}: must be at least 1"


@pytest.mark.parametrize("name", ["spares", "reset_limit", "user_error_retries"])
def test_some_may_be_0_and_none_is_negative(name: str) -> None:
    assert getattr(JobConfig.resolve(**{name: 0}), name) == 0
    assert refused(**{name: -1}) == f"{name}=-1: must not be negative"


@pytest.mark.parametrize("name", ["start_timeout", "elastic_timeout", "frozen_after_s", "rpo_target_s", "ckpt_budget"])
@pytest.mark.parametrize("value", [0, -1.5, float("nan")])
def test_times_and_shares_are_positive(name: str, value: float) -> None:
    assert refused(**{name: value}) == f"{name}={float(value)}: must be positive"


def test_a_worker_is_not_frozen_before_it_could_have_been_heard() -> None:
    assert JobConfig.resolve(frozen_after_s=1).frozen_after_s == 1.0
    assert "frozen_after_s=0.4: signs of life come every 0.5 s, so it must be at least 1.0" in refused(
        frozen_after_s=0.4
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_num_proc": 4, "num_proc": 3}, "min_num_proc=4 is more than num_proc=3"),
        ({"num_proc": 4, "max_num_proc": 3}, "num_proc=4 is more than max_num_proc=3"),
        ({"min_num_proc": 4, "max_num_proc": 3}, "min_num_proc=4 is more than max_num_proc=3"),
        ({"lanes": 300, "global_batch": 256}, "lanes=300 is more than global_batch=256"),
        ({"lanes": 257}, "lanes=257 is more than global_batch=256"),
    ],
)
def test_values_that_exclude_one_another_are_both_named(options: dict[str, int], said: str) -> None:
    assert refused(**options) == said


def test_equal_bounds_are_fine() -> None:
    JobConfig.resolve(min_num_proc=3, num_proc=3, max_num_proc=3, lanes=256)


@pytest.mark.parametrize("name", ["", "../other", "a/b", ".hidden", "a\n", "x" * 122])
def test_a_job_name_that_is_no_name_of_a_folder(name: str) -> None:
    assert refused(job_name=name).startswith(f"job_name={name!r}: it names a folder")


def test_job_names() -> None:
    for name in ("flights", "Flights 2.1-b_c", "x" * 121):
        assert JobConfig.resolve(job_name=name).job_name == name


def test_a_wrong_option_in_the_file_is_as_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="min_num_proc=4 is more than num_proc=3"):
        JobConfig.resolve(file(tmp_path, "min_num_proc: 4\n"), num_proc=3)


# ---------------------------------------------------------------------------------------------- what is made of it


@pytest.mark.parametrize(
    ("options", "slots", "workers"),
    [
        ({}, 4, (4, 1, 4)),
        ({}, 0, (1, 1, 1)),
        ({"num_proc": 2}, 8, (2, 1, 2)),
        ({"num_proc": 2, "max_num_proc": 6}, 8, (2, 1, 6)),
        ({"max_num_proc": 3}, 8, (3, 1, 3)),
        ({"max_num_proc": 3}, 2, (2, 1, 3)),
        ({"min_num_proc": 3}, 2, (3, 3, 3)),
        ({"min_num_proc": 2, "max_num_proc": 6}, 4, (4, 2, 6)),
    ],
)
def test_numbers_of_workers_are_filled_in(options: dict[str, int], slots: int, workers: tuple[int, ...]) -> None:
    config = JobConfig.resolve(**options).with_workers(slots)
    assert (config.num_proc, config.min_num_proc, config.max_num_proc) == workers
    config._check()


def test_the_core_gets_its_part() -> None:
    config = JobConfig.resolve(
        num_proc=2,
        min_num_proc=1,
        max_num_proc=3,
        start_timeout=11,
        elastic_timeout=12,
        reset_limit=4,
        user_error_retries=5,
        frozen_after_s=6,
    )
    assert config.job_options() == Options(
        num_proc=2,
        min_num_proc=1,
        max_num_proc=3,
        start_timeout=11.0,
        elastic_timeout=12.0,
        reset_limit=4,
        user_error_retries=5,
        frozen_after_s=6.0,
    )


def test_nothing_secret_is_public() -> None:
    config = JobConfig.resolve(
        env={"TOKEN": "s3cret", "A": "s3cret"},
        tracking_uri="postgresql://me:s3cret@db/mlflow",
        checkpoint_uri="s3://key:s3cret@bucket/a@b",
        data_uri="/plain/path",
    )
    public = config.public()
    assert "s3cret" not in repr(public)
    assert public["env"] == ["A", "TOKEN"]
    assert public["tracking_uri"] == "postgresql://***@db/mlflow"
    assert public["checkpoint_uri"] == "s3://***@bucket/a@b"
    assert public["data_uri"] == "/plain/path"
    assert JobConfig().public()["env"] == []
    assert public.keys() == {item.name for item in dataclasses.fields(JobConfig)}
