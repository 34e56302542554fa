"""The command ``elastic-spark``.

Each command only reads its arguments, calls one function of the package and prints. Modules are imported inside the
commands, so that ``hosts``, which Horovod may run every second, starts fast. A command ends with exit code 0, with 1
and one line on stderr for an `ElasticSparkError`, or with 2 for wrong usage. `run` and `resume` tell more apart, see
`_EXIT_CODES`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from elastic_spark.config import JobConfig
from elastic_spark.errors import ConfigError, ElasticSparkError, EnvironmentUnfit, JobCancelled, NotEnoughWorkers


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


#: Horovod's other names of our options.
_ALSO = {
    "num_proc": ["-np"],
    "min_num_proc": ["--min-np"],
    "max_num_proc": ["--max-np"],
    "nics": ["--network-interfaces"],
    "resume": ["--from"],
}

_EXIT_CODES = """\b
Exit codes:
  0  finished
  1  failed, by an error of the function or of the job; `resume` goes on from the last checkpoint
  2  wrong usage, configuration or surroundings: nothing was started, and another try ends the same
  3  not enough workers came in time: another try may do
  4  cancelled: Ctrl-C, SIGTERM, or the SparkContext was stopped"""


def _config_options(command: Callable[..., None]) -> Callable[..., None]:
    """One flag for each field of `JobConfig`: names, types and help have one source."""
    hints = typing.get_type_hints(JobConfig)
    told: dict[str, str] = {}
    for names, words in re.findall(r"^ {8}([a-z_]+(?:, [a-z_]+)*): (.+(?:\n {12}.+)*)", JobConfig.__doc__ or "", re.M):
        told |= dict.fromkeys(names.split(", "), " ".join(words.split()))
    for item in reversed(dataclasses.fields(JobConfig)):
        kinds = [kind for kind in typing.get_args(hints[item.name]) if kind is not type(None)] or [hints[item.name]]
        flag, kind = "--" + item.name.replace("_", "-"), kinds[0]
        flags = [flag, *_ALSO.get(item.name, []), item.name]
        if kind is bool:
            option = click.option(f"{flag}/--no-{flag[2:]}", default=None, help=told.get(item.name))
        elif kind in (int, float, str):
            option = click.option(*flags, type=kind, help=told.get(item.name))
        else:  # nics: names; env: NAME=VALUE
            metavar = "NAME=VALUE" if item.name == "env" else "NAME"
            option = click.option(*flags, multiple=True, metavar=metavar, help=told.get(item.name))
        command = option(command)
    return command


def _job_options(command: Callable[..., None]) -> Callable[..., None]:
    """What `run` and `resume` take."""
    options: list[Callable[[Callable[..., None]], Callable[..., None]]] = [
        click.argument("function", metavar="FUNCTION_OR_FILE"),
        click.option("--master", help="Spark master; default: what spark-submit or the Spark configuration says."),
        click.option("--conf", multiple=True, metavar="NAME=VALUE", help="A setting of Spark. May be repeated."),
        click.option("--data", multiple=True, metavar="NAME=URI", help="A data set as Parquet. May be repeated."),
        click.option("--arg", multiple=True, metavar="NAME=VALUE", help="An argument of the function, as YAML."),
        click.option(
            "--config", "--config-file", "file", type=click.Path(exists=True, dir_okay=False), help="Options as YAML."
        ),
        click.option("--set", "sets", multiple=True, metavar="NAME=VALUE", help="Any option by name, as YAML: a.b=c."),
        click.option("--dry-run", is_flag=True, help="Print the resolved configuration and the spark-submit line."),
        _config_options,
    ]
    for option in reversed(options):
        command = option(command)
    return command


@main.command(epilog=_EXIT_CODES)
@_job_options
def run(**given: Any) -> None:
    """Train a function as an elastic job: module:function, or FILE.py:function.

    Flags are the options of JobConfig. They win over --set, and that over the YAML file. A module that is not installed
    travels to the workers along with the function; what it imports must be there.
    """
    with _exit_codes():
        _run("run", given)


@main.command(epilog=_EXIT_CODES)
@_job_options
def resume(**given: Any) -> None:
    """Go on with a job that was lost, failed or cancelled, from its newest valid checkpoint, or from what --from names.

    As `run`, with --job-name and with the same --checkpoint-uri or --work-dir, or with the id of an MLflow run or model
    as --from. Exit code 2 where no such job is there, or where data, seed, batch or lanes are not the checkpoint's.
    """
    with _exit_codes():
        _run("resume", given)


def _run(command: str, given: dict[str, Any]) -> None:
    from elastic_spark import runner

    flags = {item.name: given[item.name] for item in dataclasses.fields(JobConfig)}
    flags["nics"] = tuple(name for names in flags["nics"] for name in names.split(",")) or None
    flags["env"] = _pairs("--env", flags["env"]) or None
    options = _nested(given["sets"])
    if flags["env"] and isinstance(options.get("env"), dict):
        flags["env"] = {**options["env"], **flags["env"]}
    options.update({name: value for name, value in flags.items() if value is not None})
    settings = JobConfig.resolve(given["file"], **options)  # a wrong option is told before Spark starts
    data, conf = _pairs("--data", given["data"]), _pairs("--conf", given["conf"])
    arguments = {name: _yaml(value) for name, value in _pairs("--arg", given["arg"]).items()}
    function = runner.load_function(given["function"])
    if command == "resume" and settings.resume is None:
        runner.require_unfinished(settings)
    if given["dry_run"]:
        words = [command, given["function"], *_as_arguments(given)]
        click.echo(f"# {runner.submit_line(given['master'], conf, words)}\n{_as_yaml(settings.public())}", nl=False)
        return

    import elastic_spark
    from elastic_spark.report import render_text

    session = runner.session(given["master"], f"elastic_spark {settings.job_name or given['function']}", conf)
    try:
        result = elastic_spark.run(function, kwargs=arguments, data=data or None, config=given["file"], **options)
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


def _pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    for text in given:
        if not text.partition("=")[1] or not text.partition("=")[0]:
            raise click.UsageError(f"{option} {text!r}: expected NAME=VALUE")
    return {text.partition("=")[0]: text.partition("=")[2] for text in given}


def _nested(given: Sequence[str]) -> dict[str, Any]:
    """``a.b=c`` as ``{"a": {"b": "c"}}``; values are read as YAML."""
    options: dict[str, Any] = {}
    for name, value in _pairs("--set", given).items():
        *path, last = name.split(".")
        place = options
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise click.UsageError(f"--set {name}={value}: {part!r} is given as a single value, too")
        place[last] = _yaml(value)
    return options


def _as_arguments(given: Mapping[str, Any]) -> list[str]:
    """The options again, without those that ``spark-submit`` takes itself and with no secret of ``env``."""
    words: list[str] = []
    for name, value in given.items():
        if name in ("function", "master", "conf", "dry_run") or value in (None, ()):
            continue
        flag = "--" + {"sets": "set", "file": "config"}.get(name, name).replace("_", "-")
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, bool):
                words.append(flag if item else f"--no-{flag[2:]}")
            else:
                secret = name == "env" or (name == "sets" and item.startswith("env."))
                words += [flag, f"{item.partition('=')[0]}=HIDDEN" if secret else str(item)]
    return words


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise click.UsageError(f"{text!r} cannot be read as YAML: {error}") from error


def _as_yaml(options: Mapping[str, Any]) -> str:
    import yaml

    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    text: str = yaml.safe_dump(plain, sort_keys=False)
    return text


@main.command()
@click.argument("events", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write the page there.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Write the timeline as a picture there.")
@click.option(
    "--manifest",
    "manifests",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="manifest.json of a data set: recompute the sequence of each finished epoch. Exit code 1 where it differs.",
)
def report(events: Path, html: Path | None, png: Path | None, manifests: tuple[Path, ...]) -> None:
    """Tell the story of a job from its event log EVENTS, finished or not."""
    from elastic_spark.core.audit import check_digests
    from elastic_spark.core.events import DatasetFrozen, read_log
    from elastic_spark.core.manifest import Manifest
    from elastic_spark.core.metrics import summarise
    from elastic_spark.report import render_html, render_png, render_text

    with events.open(encoding="utf-8") as lines:
        log = list(read_log(lines))
    summary = summarise(log)
    click.echo(render_text(summary))
    if html is not None:
        html.write_text(render_html(log, f"elastic_spark: {events.name}"), encoding="utf-8")
    if png is not None:
        render_png(log, png)
    with _exit_codes():
        known = [Manifest.from_json(path.read_text(encoding="utf-8")) for path in manifests]
        frozen = [event for event in log if isinstance(event, DatasetFrozen)]
        checks = check_digests(summary["epochs"], frozen, known)
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
