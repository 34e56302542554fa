"""The command ``elastic-spark``.

Each command only reads its arguments, calls one function of the package and prints. Modules are imported inside the
commands, so that ``hosts``, which Horovod runs every second, starts fast. A command ends with exit code 0, with 1 and
one line on stderr for an `ElasticSparkError`, or with 2 for wrong usage.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

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
