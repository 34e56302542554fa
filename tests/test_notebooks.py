"""The notebooks, cell by cell as Databricks and Jupyter run them, on one real cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
NAMES = ["01_train_and_watch", "02_kill_an_executor", "03_spark_ml_stage", "04_review_and_resume"]
HEAD, CUT = "# Databricks notebook source\n", "\n# COMMAND ----------\n"
ROWS = 1797  # of scikit-learn's digits

pytestmark = pytest.mark.timeout(240)


def cells(name: str) -> list[str]:
    text = (NOTEBOOKS / f"{name}.py").read_text(encoding="utf-8")
    assert text.startswith(HEAD)
    return [cell.strip("\n") for cell in text.removeprefix(HEAD).split(CUT)]


def execute(cell: str, namespace: dict[str, Any]) -> None:
    if not cell.startswith("# MAGIC"):
        exec(compile(cell, f"<cell {cell[:40]!r}>", "exec"), namespace)


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    """What the first notebook starts where there is no session, ended as it ends it."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    _, start, *_, end = cells(NAMES[0])
    execute(start, namespace)
    yield namespace["spark"]
    cluster = namespace["cluster"]
    execute(end, namespace)
    assert cluster.processes() == []


@pytest.fixture
def run(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a notebook in a namespace and a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def body(name: str) -> dict[str, Any]:
        namespace: dict[str, Any] = {"__name__": "__main__", "spark": spark}
        for cell in cells(name):
            execute(cell, namespace)
        return namespace

    return body


def test_all_of_them_are_here() -> None:
    assert sorted(path.stem for path in NOTEBOOKS.glob("*")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_text_or_code(name: str) -> None:
    """In the form that Databricks writes: a text cell is commented throughout, and starts with its language."""
    for cell in cells(name):
        assert cell.strip(), "an empty cell"
        if "# MAGIC" in cell:
            assert cell.startswith("# MAGIC %md\n")
            assert all(re.match(r"# MAGIC( |$)", line) for line in cell.splitlines())
        else:
            compile(cell, name, "exec")


def test_train_and_watch(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    told = run("01_train_and_watch")
    assert told["accuracy"] > 0.9
    out, err = capsys.readouterr()
    assert f"{12 * ROWS:,} once, 0 twice, 0 never" in out
    assert "live status at http://127.0.0.1:" in err


def test_kill_an_executor(run: Any) -> None:
    told = run("02_kill_an_executor")["result"].summary
    sizes = [(change["from_size"], change["to_size"]) for change in told["changes"]]
    assert sizes[:2] == [(3, 2), (2, 3)]
    assert (told["rows_once"], told["rows_twice"], told["rows_never"]) == (15 * ROWS, 0, 0)
    assert told["steps_lost"] == 0
    assert "Workers over time" in Path("timeline.html").read_text(encoding="utf-8")


def test_the_spark_ml_stage(run: Any) -> None:
    told = run("03_spark_ml_stage")
    assert told["accuracy"] > 0.85
    assert told["before"] == told["after"]


def test_review_and_resume(run: Any) -> None:
    told = run("04_review_and_resume")
    assert told["failed"].info.status == "FAILED"
    assert "a mistake at step 100" in str(told["failed"].data.tags)
    assert told["result"].run_id == told["failed"].info.run_id
    assert told["run"].info.status == "FINISHED"
    assert 0 < told["result"][0]["began_at"] <= 100
    assert told["result"][0]["ended_at"] == 10 * 15
    assert (told["result"].summary["rows_twice"], told["result"].summary["rows_never"]) == (0, 0)
