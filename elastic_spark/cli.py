"""The command ``elastic-spark``.

Each command only reads its arguments, calls one function of the package and prints. Modules are imported inside the
commands, so that ``hosts``, which Horovod may run every second, starts fast. A command ends with exit code 0, with 1
and one line on stderr for an `ElasticSparkError`, or with 2 for wrong usage.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from elastic_spark.config import JobConfig
from elastic_spark.errors import ElasticSparkError


class _Commands(click.Group):
    """Our own errors are a line for the user, not a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ElasticSparkError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="elastic_spark")
def main() -> None:
    """Elastic PyTorch training on Spark executors that come and go."""


@main.command()
def doctor() -> None:
    """Check Python, Java, torch, Horovod's build, Spark, MLflow; say what to do. Exit code 1 if something is unfit."""
    from elastic_spark.doctor import examine

    findings = examine()
    for finding in findings:
        click.echo(finding.line())
    if any(finding.ok is False for finding in findings):
        sys.exit(1)


@main.command("build-horovod")
@click.option("--stock", is_flag=True, help="Without the mends.")
@click.option("--rebuild", is_flag=True, help="Build even if a wheel is in the cache.")
def build_horovod(stock: bool, rebuild: bool) -> None:
    """Build Horovod against the installed torch and install it."""
    from elastic_spark.build_horovod import ensure_horovod

    click.echo(ensure_horovod(stock=stock, rebuild=rebuild))


@main.command()
@click.option(
    "--members", "members_path", type=click.Path(path_type=Path), help="Member list; default: $ELASTIC_SPARK_MEMBERS."
)
@click.option(
    "--script",
    type=click.Path(path_type=Path),
    help="Write a discovery script for horovodrun there, print nothing.",
)
def hosts(members_path: Path | None, script: Path | None) -> None:
    """Print the hosts of the job as host:slots; nothing while no member is published."""
    from elastic_spark.driver.discovery import MEMBERS_ENV, host_lines, write_script

    if members_path is None:
        named = os.environ.get(MEMBERS_ENV)
        if not named:
            raise click.UsageError(f"name the member list with --members or ${MEMBERS_ENV}")
        members_path = Path(named)
    if script is not None:
        write_script(script, members_path)
        return
    click.echo(host_lines(members_path, lambda warning: click.echo(f"warning: {warning}", err=True)), nl=False)


def _config_options(command: Callable[..., None]) -> Callable[..., None]:
    """One flag for each field of `JobConfig`: names, types and help have one source."""
    hints = typing.get_type_hints(JobConfig)
    told: dict[str, str] = {}
    for names, words in re.findall(r"^ {8}([a-z_]+(?:, [a-z_]+)*): (.+(?:\n {12}.+)*)", JobConfig.__doc__ or "", re.M):
        told |= dict.fromkeys(names.split(", "), " ".join(words.split()))
    for item in reversed(dataclasses.fields(JobConfig)):
        kinds = [kind for kind in typing.get_args(hints[item.name]) if kind is not type(None)] or [hints[item.name]]
        flag, kind = "--" + item.name.replace("_", "-"), kinds[0]
        if kind is bool:
            option = click.option(f"{flag}/--no-{flag[2:]}", default=None, help=told.get(item.name))
        elif kind in (int, float, str):
            option = click.option(flag, type=kind, help=told.get(item.name))
        else:  # nics: names; env: NAME=VALUE
            metavar = "NAME=VALUE" if item.name == "env" else "NAME"
            option = click.option(flag, multiple=True, metavar=metavar, help=told.get(item.name))
        command = option(command)
    return command


def _pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    for text in given:
        if "=" not in text:
            raise click.UsageError(f"{option} {text!r}: expected NAME=VALUE")
    return {text.partition("=")[0]: text.partition("=")[2] for text in given}


@main.command()
@click.argument("function", metavar="FILE.py:FUNCTION")
@click.option("--master", help="Spark master; default: what spark-submit or the Spark configuration says.")
@click.option("--data", multiple=True, metavar="NAME=URI", help="A data set as Parquet. May be repeated.")
@click.option("--config", "config_file", type=click.Path(exists=True, dir_okay=False), help="Options as YAML.")
@_config_options
def run(function: str, master: str | None, data: Sequence[str], config_file: str | None, **options: Any) -> None:
    """Train FUNCTION of FILE.py as an elastic job. Flags are the options of JobConfig; they win over the YAML file."""
    path, colon, name = function.rpartition(":")
    if not colon or not Path(path).is_file():
        raise click.UsageError(f"{function!r}: expected an existing FILE.py, a colon and the name of a function in it")
    options["nics"] = options["nics"] or None
    options["env"] = _pairs("--env", options["env"]) or None
    JobConfig.resolve(config_file, **options)  # a wrong option is told before Spark starts
    data_sets = _pairs("--data", data)
    trained = _load_function(Path(path), name)
    if (master or "").startswith("local"):  # else Spark takes the first python3 on the PATH
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

    from pyspark.sql import SparkSession

    import elastic_spark

    builder = SparkSession.builder.appName(f"elastic_spark {name}")
    session = (builder.master(master) if master else builder).getOrCreate()
    try:
        result = elastic_spark.run(trained, data=data_sets or None, config=config_file, **options)
    finally:
        session.stop()
    for rank, value in enumerate(result):
        click.echo(f"rank {rank}: {value!r}")
    click.echo(f"run {result.run_id or 'not tracked'}, events {result.events_path}")


def _load_function(path: Path, name: str) -> Callable[..., Any]:
    """The function, to be pickled by value: executors have no copy of the file."""
    import importlib.util

    import cloudpickle

    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise click.UsageError(f"{path} has no function {name!r}")
    return typing.cast("Callable[..., Any]", found)


@main.command()
@click.argument("events", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write the page there.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Write the timeline as a picture there.")
def report(events: Path, html: Path | None, png: Path | None) -> None:
    """Tell the story of a job from its event log EVENTS, finished or not."""
    from elastic_spark.core.events import read_log
    from elastic_spark.core.metrics import summarise
    from elastic_spark.report import render_html, render_png, render_text

    with events.open(encoding="utf-8") as lines:
        log = list(read_log(lines))
    click.echo(render_text(summarise(log)))
    if html is not None:
        html.write_text(render_html(log, f"elastic_spark: {events.name}"), encoding="utf-8")
    if png is not None:
        render_png(log, png)


@main.group()
def checkpoints() -> None:
    """Look at, verify, export and prune the checkpoints under a URI."""


_uri = click.argument("uri")
_job = click.option("--job-id", help="Only checkpoints of this job.")
_which = click.option("--which", default="latest", show_default=True, help="latest, a step, or a checkpoint's name.")


@checkpoints.command()
@_uri
@_job
def ls(uri: str, job_id: str | None) -> None:
    """List the checkpoints of URI, newest first, without reading their tensors."""
    from elastic_spark.checkpoint import commands

    for row in commands.ls(uri, job_id=job_id):
        click.echo(_checkpoint_line(row))


@checkpoints.command()
@_uri
@click.option("--which", default="all", show_default=True, help="all, latest, a step, or a checkpoint's name.")
@_job
def verify(uri: str, which: str, job_id: str | None) -> None:
    """Read every byte of the checkpoints of URI. Exit code 1 if one is invalid, or if there is none."""
    from elastic_spark.checkpoint import commands

    rows = commands.verify(uri, which, job_id=job_id)
    for row in rows:
        click.echo(_checkpoint_line(row))
    if not rows or any(row["status"] != "valid" for row in rows):
        sys.exit(1)


@checkpoints.command()
@_uri
@click.argument("path", type=click.Path(dir_okay=False))
@_which
@click.option("--object", "object_name", default="model", show_default=True, help="Which object of the state.")
@_job
def export(uri: str, path: str, which: str, object_name: str, job_id: str | None) -> None:
    """Write an object of a checkpoint of URI as a plain state_dict to PATH."""
    from elastic_spark.checkpoint import commands

    row = commands.export(uri, path, which, object_name=object_name, job_id=job_id)
    click.echo(f"{row['tensors']} tensors of {row['object']!r} at step {row['step']} -> {row['path']}")


@checkpoints.command()
@_uri
@click.option("--keep", type=click.IntRange(min=1), required=True, help="How many of the newest to keep.")
@click.option("--keep-best", type=click.IntRange(min=0), default=0, show_default=True, help="And so many of the best.")
@_job
def prune(uri: str, keep: int, keep_best: int, job_id: str | None) -> None:
    """Delete older checkpoints of URI, never the newest valid one; print what went."""
    from elastic_spark.checkpoint import commands

    for gone in commands.prune(uri, keep, keep_best=keep_best, job_id=job_id):
        click.echo(gone)


def _checkpoint_line(row: Mapping[str, Any]) -> str:
    size = f"{row['bytes'] / 2**20:10.1f} MiB" if row.get("bytes") is not None else " " * 14
    return f"{row['status']:<10} step {row['step']:>9} {size}  {row['name']}  {row['reason']}".rstrip()


if __name__ == "__main__":
    main()
