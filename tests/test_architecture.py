"""What must not change unnoticed: the public names, what an import drags in, and that the project stands alone."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import elastic_spark

ROOT = Path(__file__).parents[1]

PUBLIC_NAMES = [
    *("ElasticRunner", "ElasticState", "ElasticTorchEstimator", "ElasticTorchModel"),
    *("JobConfig", "LaneSampler", "Result", "freeze", "run"),
]

COMMANDS = ["build-horovod", "chaos", "checkpoints", "doctor", "hosts", "report", "resume", "run"]


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file() and not {".venv", ".git"} & set(path.parts)]


def test_public_names() -> None:
    assert sorted(elastic_spark.__all__) == PUBLIC_NAMES


def test_every_public_name_can_be_imported() -> None:
    for name in PUBLIC_NAMES:
        assert getattr(elastic_spark, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = elastic_spark.nothing_of_this_name


def test_commands() -> None:
    from elastic_spark.cli import main

    assert sorted(main.commands) == COMMANDS


def frozen_names() -> list[str]:
    """What others write down or store: options with their defaults, events with their fields, as lines."""
    from elastic_spark.config import JobConfig
    from elastic_spark.core import events as ev

    def fields(kind: type) -> list[str]:
        return [item.name for item in dataclasses.fields(kind)]

    options = [f"option {item.name} = {item.default!r}" for item in dataclasses.fields(JobConfig)]
    events = [
        f"event {name}: {' '.join(fields(kind))}"
        for name, kind in vars(ev).items()
        if kind in ev.Event._classes.values()
    ]
    return sorted(options + events)


def test_options_and_events_change_on_purpose_only() -> None:
    """Scripts hold the options, logs the events: an old one must still be understood. What is new gets a line here."""
    kept = (ROOT / "tests" / "goldens" / "public.txt").read_text().splitlines()
    now = frozen_names()
    assert [f"+ {line}" for line in now if line not in kept] + [f"- {line}" for line in kept if line not in now] == []


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("elastic_spark", ["torch", "pyspark", "mlflow", "horovod", "pandas"]),
        ("elastic_spark.core.job", ["torch", "pyspark", "mlflow", "horovod", "pandas", "pyarrow"]),
        ("elastic_spark.worker.main", ["mlflow", "pydantic", "click", "pandas", "pyspark"]),
        ("elastic_spark.agent.main", ["mlflow", "pydantic", "click", "pandas", "pyspark", "torch", "horovod"]),
        ("elastic_spark.driver.discovery", ["torch", "pyspark", "mlflow", "horovod", "pandas"]),
        ("elastic_spark.cli", ["torch", "pyspark", "mlflow", "horovod", "pandas"]),
    ],
)
def test_an_import_drags_in_no_more_than_it_must(module: str, forbidden: list[str]) -> None:
    """Checked on the loaded modules, so that what a dependency imports counts too."""
    code = f"import sys, {module}; print([name for name in {forbidden!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr[-1000:]


def test_no_tracked_file_names_a_machine_or_a_registry() -> None:
    # put together from parts, so that this file does not name them either
    never = [r"/wo" + r"rk/", r"/ro" + r"ot/", r"/ho" + r"me/[a-z]", r"py" + r"pi\.org", r"python" + r"hosted\.org"]
    pattern = re.compile("|".join(never))
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in pattern.finditer(text)]
    assert found == []


def test_no_tracked_file_is_large() -> None:
    assert [path.name for path in tracked_files() if path.stat().st_size > 1_000_000] == []


def test_the_messages_in_the_readme_are_ours() -> None:
    """Who looks a message up finds it: each part of it, between the dots for what differs, stands in the source."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = readme.partition("## When something is wrong")[2].partition("\n## ")[0].splitlines()
    quoted = [match[1] for row in rows if (match := re.match(r"\| `([^`]+)`", row))]
    assert len(quoted) > 10
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "elastic_spark").rglob("*.py"))
    parts = [(text, part.strip(" ,:")) for text in quoted for part in re.split(r"'x'|\.\.|:", text)]
    pythons_own = "No module named "
    assert [text for text, part in parts if part not in source and not text.startswith(pythons_own)] == []


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "elastic_spark").rglob("*.py")
        if not path.read_text(encoding="utf-8").lstrip().startswith(('"""', 'r"""'))
    ]
    assert silent == []
