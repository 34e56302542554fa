"""The command ``elastic-spark``.

Each command only reads its arguments, calls one function of the package and prints. Modules are imported inside the
commands, so that ``hosts``, which Horovod runs every second, starts fast. A command ends with exit code 0, with 1 and
one line on stderr for an `ElasticSparkError`, or with 2 for wrong usage.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

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


# Commands of other modules are registered here: run, checkpoints, report.


if __name__ == "__main__":
    main()
