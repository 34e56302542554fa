"""The archive of Spark's classes: what it is made for and from, and what is done where it cannot be made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_spark.testing.archive import ClassArchive
from elastic_spark.testing.cluster import JVM_FLAGS
from elastic_spark.testing.session import spark_home


def archive(cache: Path, flags: str = JVM_FLAGS, **env: str) -> ClassArchive:
    return ClassArchive({**os.environ, "XDG_CACHE_HOME": str(cache), **env}, spark_home(), flags)


def test_another_java_spark_or_flag_is_another_archive(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").write_text("")
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "a.jar").write_text("")
    other_spark = ClassArchive({**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, tmp_path, JVM_FLAGS)
    different = [archive(tmp_path), archive(tmp_path, "-X"), archive(tmp_path, JAVA_HOME=str(tmp_path)), other_spark]
    assert len({made.conf_dir for made in different}) == 4
    assert archive(tmp_path).conf_dir == archive(tmp_path).conf_dir
    (tmp_path / "jars" / "a.jar").write_text("changed")
    again = ClassArchive({**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, tmp_path, JVM_FLAGS)
    assert again.conf_dir != other_spark.conf_dir


def test_without_java_or_a_place_there_is_none(tmp_path: Path) -> None:
    assert archive(tmp_path, JAVA_HOME=str(tmp_path)).flags() == ""
    (tmp_path / "file").write_text("")
    assert archive(tmp_path / "file").flags() == ""
    assert archive(Path("relative")).flags() == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_one_that_cannot_be_made_is_not_tried_again(tmp_path: Path) -> None:
    """A Java that ends at once, as one that has no such option."""
    calls = tmp_path / "calls"
    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "java"
    java.write_text(f"#!/bin/sh\necho >> {calls}\nexit 1\n")
    java.chmod(0o755)
    made = archive(tmp_path / "cache", JAVA_HOME=str(tmp_path))
    assert made.flags(make=False) == ""
    assert not calls.exists()
    for _ in range(2):
        assert made.flags() == ""
        assert calls.read_text() == "\n"
    assert (made.conf_dir.parent / "failed").read_bytes()


def test_one_that_took_too_long_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "java"
    java.write_text("#!/bin/sh\nexec sleep 60\n")
    java.chmod(0o755)
    monkeypatch.setattr("elastic_spark.testing.archive.LIMIT_S", 0.2)
    made = archive(tmp_path / "cache", JAVA_HOME=str(tmp_path))
    assert made.flags() == ""
    assert [path.name for path in made.conf_dir.parent.iterdir()] == ["conf"]
