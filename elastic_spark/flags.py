"""The options of a job as flags of a command, and back: one flag for each field of `JobConfig`, from its own docstring.

Precedence, lowest first: the YAML file of ``--config``, ``--set a.b=c``, the flags.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from elastic_spark.config import JobConfig

#: Horovod's other names of our options.
_ALSO = {
    "num_proc": ["-np"],
    "min_num_proc": ["--min-np"],
    "max_num_proc": ["--max-np"],
    "nics": ["--network-interfaces"],
    "resume": ["--from"],
}


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
        else:  # nics: names; env, params: NAME=VALUE
            metavar = "NAME" if typing.get_origin(kind) is tuple else "NAME=VALUE"
            option = click.option(*flags, multiple=True, metavar=metavar, help=told.get(item.name))
        command = option(command)
    return command


def job_options(command: Callable[..., None]) -> Callable[..., None]:
    """What `run`, `resume` and `chaos` take."""
    options: list[Callable[[Callable[..., None]], Callable[..., None]]] = [
        click.argument("function", metavar="FILE.py:FUNCTION"),
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


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the words on the command line mean."""

    function: Callable[..., Any]
    settings: JobConfig
    options: dict[str, Any]
    file: str | None
    data: dict[str, str]
    conf: dict[str, str]
    arguments: dict[str, Any]


def asked(given: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Asked:
    """``defaults`` hold for options that neither the YAML file nor --set nor a flag gives. ConfigError as `resolve`."""
    from elastic_spark import runner

    flags = {item.name: given[item.name] for item in dataclasses.fields(JobConfig)}
    flags["nics"] = tuple(name for names in flags["nics"] for name in names.split(",")) or None
    options = _nested(given["sets"])
    for name in ("env", "params"):
        flags[name] = _pairs(f"--{name}", flags[name]) or None
        if flags[name] and isinstance(options.get(name), dict):
            flags[name] = {**options[name], **flags[name]}
    options.update({name: value for name, value in flags.items() if value is not None})
    if defaults:
        settings, plain = JobConfig.resolve(given["file"], **options), JobConfig()
        options = {
            name: value for name, value in defaults.items() if getattr(settings, name) == getattr(plain, name)
        } | options
    settings = JobConfig.resolve(given["file"], **options)  # a wrong option is told before Spark starts
    return Asked(
        function=runner.load_function(given["function"]),
        settings=settings,
        options=options,
        file=given["file"],
        data=_pairs("--data", given["data"]),
        conf=_pairs("--conf", given["conf"]),
        arguments={name: _yaml(value) for name, value in _pairs("--arg", given["arg"]).items()},
    )


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


def as_arguments(given: Mapping[str, Any]) -> list[str]:
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


def as_yaml(options: Mapping[str, Any]) -> str:
    import yaml

    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    text: str = yaml.safe_dump(plain, sort_keys=False)
    return text
