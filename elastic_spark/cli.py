"""The command ``elastic-spark``.

Each command only reads its arguments, calls one function of the package and prints. Modules are imported inside the
commands, so that ``hosts``, which Horovod may run every second, starts fast. A command ends with exit code 0, with 1
and one line on stderr for an `ElasticSparkError`, or with 2 for wrong usage. `run`, `resume` and `report` tell
more apart, see `_EXIT_CODES`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from elastic_spark.errors import (
    ConfigError,
    DataError,
    ElasticSparkError,
    EnvironmentUnfit,
    JobCancelled,
    NotEnoughWorkers,
)
from elastic_spark.flags import Asked, as_arguments, as_yaml, asked, job_options


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


_EXIT_CODES = """\b
Exit codes:
  0  finished
  1  failed, by an error of the function, of the data or of the job; `resume` goes on from the last checkpoint
  2  wrong usage, configuration or surroundings, seen before the job or in the middle of it: to be changed first
  3  not enough workers came in time: another try may do
  4  cancelled: Ctrl-C, SIGTERM, or the SparkContext was stopped"""


_master = click.option("--master", help="Spark master; default: what spark-submit or the Spark configuration says.")


@main.command(epilog=_EXIT_CODES)
@_master
@job_options
def run(**given: Any) -> None:
    """Train a function as an elastic job: module:function, or FILE.py:function.

    Flags are the options of JobConfig. They win over --set, and that over the YAML file. A module that is not installed
    travels to the workers along with the function; what it imports must be there.
    """
    with _exit_codes():
        _run("run", given)


@main.command(epilog=_EXIT_CODES)
@_master
@job_options
def resume(**given: Any) -> None:
    """Go on with a job that was lost, failed or cancelled, from its newest valid checkpoint, or from what --from names.

    As `run`, with --job-name and with the same --checkpoint-uri or --work-dir, or with the id of an MLflow run or model
    as --from. Exit code 2 where no such job is there, or where data, seed, batch or lanes are not the checkpoint's.
    """
    with _exit_codes():
        _run("resume", given)


@main.command(
    epilog="""\b
Exit codes:
  0  every promise was kept under every blow
  1  one was broken, or the job failed
  2  wrong usage, configuration or surroundings
  3  not enough workers came in time
  4  cancelled
  5  the job ended before all blows had fallen: give it more epochs, or fewer --blows"""
)
@click.option("--blows", type=click.IntRange(min=1), default=5, show_default=True, help="How many faults and joins.")
@click.option("--churn-seed", type=int, default=0, show_default=True, help="Decides which, and when.")
@click.option("--every", type=click.IntRange(min=1), default=20, show_default=True, help="Mean steps between two.")
@click.option("--machines", type=click.IntRange(min=2), default=3, show_default=True, help="Machines to start with.")
@job_options
def chaos(blows: int, churn_seed: int, every: int, machines: int, **given: Any) -> None:
    """Try a function on a Spark cluster on this machine that loses and gains workers, executors and machines.

    The function and its options are as for `run`; tracking is off unless --tracking says otherwise. The cluster is a
    real one, with one core for each machine; it is there for this command alone.
    """
    from elastic_spark.testing.churn import schedule

    with _exit_codes():
        schedule_of_blows = schedule(churn_seed, blows, machines, machines + 1, every)
        options = {"tracking": False, "num_proc": machines, "max_num_proc": machines + 1, "min_num_proc": 1}
        request = asked({**given, "master": None}, options)
        if given["dry_run"]:
            for blow in schedule_of_blows:
                click.echo(f"after {blow.after_steps:>4} steps: {blow.kind}")
            click.echo(as_yaml(request.settings.public()), nl=False)
            return
        _chaos(request, schedule_of_blows, machines)


def _chaos(request: Asked, blows: Sequence[Any], machines: int) -> None:
    import time

    from elastic_spark.report import render_text
    from elastic_spark.testing.chaos import chaos as try_out

    options = {
        **{"job_name": f"chaos-{time.strftime('%Y%m%d-%H%M%S')}", "work_dir": request.settings.work_dir},
        **request.options,
        **{"config": request.file, "kwargs": request.arguments, "data": request.data or None},
    }
    if request.settings.job_name:
        options["job_name"] = request.settings.job_name
    request.settings.make_work_dir(options["job_name"])
    told = try_out(
        request.function, blows, machines, options, conf=request.conf, say=lambda text: click.echo(text, err=True)
    )
    if told.summary:
        click.echo(render_text(told.summary))
    click.echo(f"{told.struck} of {told.due} blows fell")
    for promise, kept in told.promises.items():
        click.echo(f"{'kept  ' if kept else 'BROKEN'}  {promise}")
    if told.error is not None:
        raise told.error
    if not told.held:
        sys.exit(1)
    if told.struck < told.due:
        click.echo("The job ended before all blows had fallen: nothing is shown by that.", err=True)
        sys.exit(5)


def _run(command: str, given: dict[str, Any]) -> None:
    from elastic_spark import runner

    request = asked(given)
    if command == "resume" and request.settings.resume is None:
        runner.require_unfinished(request.settings)
    if given["dry_run"]:
        words = [command, given["function"], *as_arguments(given)]
        line = runner.submit_line(given["master"], request.conf, words)
        click.echo(f"# {line}\n{as_yaml(request.settings.public())}", nl=False)
        return

    import elastic_spark
    from elastic_spark.report import render_text

    request.settings.make_work_dir(request.settings.job_name or "")
    name = request.settings.job_name or given["function"]
    session = runner.session(given["master"], f"elastic_spark {name}", request.conf)
    try:
        result = elastic_spark.run(
            request.function,
            kwargs=request.arguments,
            data=request.data or None,
            config=request.file,
            **request.options,
        )
    finally:
        session.stop()
    for rank, value in enumerate(result):
        click.echo(f"rank {rank}: {value!r}")
    click.echo(render_text(result.summary), nl=False)
    click.echo(f"run {result.run_id or 'not tracked'}, events {result.events_path}")


@contextlib.contextmanager
def _exit_codes() -> Iterator[None]:
    """How a job ended, as an exit code; see `_EXIT_CODES`."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("Cancelled by Ctrl-C", err=True)
        sys.exit(4)
    except ElasticSparkError as error:
        click.echo(f"Error: {error}", err=True)
        codes = {ConfigError: 2, EnvironmentUnfit: 2, NotEnoughWorkers: 3, JobCancelled: 4}
        sys.exit(next((code for kind, code in codes.items() if isinstance(error, kind)), 1))


@main.command()
@click.argument("events", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write the page there.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Write the timeline as a picture there.")
@click.option(
    "--manifest",
    "manifests",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="manifest.json of a data set: recompute the sequence of each finished epoch. Exit code 1 where it differs, or "
    "is not known from this log.",
)
def report(events: Path, html: Path | None, png: Path | None, manifests: tuple[Path, ...]) -> None:
    """Tell the story of a job from its event log EVENTS, finished or not."""
    from elastic_spark.core.audit import check_digests
    from elastic_spark.core.events import DatasetFrozen, is_damaged, read_log
    from elastic_spark.core.manifest import Manifest
    from elastic_spark.core.metrics import summarise
    from elastic_spark.report import render_html, render_png, render_text

    with events.open(encoding="utf-8", errors="replace") as stream:
        lines = list(stream)
    log = list(read_log(lines))
    if not log:
        raise click.UsageError(f"{events} is no event log: a job's is events.jsonl below its work_dir, and in its run")
    try:
        known = [Manifest.from_json(path.read_text(encoding="utf-8")) for path in manifests]
    except (DataError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--manifest: {error}") from error
    try:
        summary = summarise(log)
    except (TypeError, ValueError, OverflowError) as error:  # whole lines, and values that no job writes
        raise click.UsageError(f"{events} cannot be told: {error}") from error
    click.echo(render_text(summary))
    if damaged := sum(map(is_damaged, lines)):
        click.echo(f"{damaged} of {len(lines)} lines could not be read: what they told is missing above", err=True)
    try:
        if html is not None:
            html.write_text(render_html(log, f"elastic_spark: {events.name}"), encoding="utf-8")
        if png is not None:
            with _exit_codes():
                render_png(log, png)
    except OSError as error:
        raise click.UsageError(f"the page cannot be written: {error}") from error
    with _exit_codes():
        frozen = [event for event in log if isinstance(event, DatasetFrozen)]
        checks = check_digests(summary["epochs"], frozen, known, whole=not damaged)
    for words, _ in checks:
        click.echo(words)
    if not all(good for _, good in checks):
        sys.exit(1)


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
    for reason in row["skipped"]:
        click.echo(f"passed over: {reason}", err=True)
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
