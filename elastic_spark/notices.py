"""Notices that a machine will be taken away: spot reclaim, preemption, maintenance.

A *notice source* is a function without arguments, called every `POLL_S` on the machine that it is about. It returns why
the machine will go, or None. Three are here, for what the clouds tell a machine about itself; any other is named by its
import path, ``package.module:function``.

Formats: AWS EC2, "Spot Instance interruption notices" (IMDSv2); Azure, "Scheduled Events", api-version 2020-07-01;
Google Compute Engine, instance metadata ``preempted`` and ``maintenance-event``.
"""

from __future__ import annotations

import importlib
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

from elastic_spark.errors import ConfigError

Source = Callable[[], str | None]

POLL_S = 2.0
#: Of one request. A machine that is on none of these clouds has nobody at that address.
ANSWER_S = 1.5
METADATA = "http://169.254.169.254"
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def aws(base: str = METADATA) -> str | None:
    """Of an EC2 spot instance: two minutes before it is stopped or terminated."""
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _get(f"{base}/latest/api/token", lifetime, method="PUT")
    text = _get(f"{base}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token or ""})
    if text is None:
        return None
    told = json.loads(text)
    return f"AWS will {told['action']} this spot instance at {told['time']}"


def azure(base: str = METADATA) -> str | None:
    """Of an Azure machine: at least 30 s before it is evicted, minutes before it is redeployed or rebooted."""
    headers = {"Metadata": "true"}
    text = _get(f"{base}/metadata/scheduledevents?api-version=2020-07-01", headers)
    events = json.loads(text)["Events"] if text else []
    ends = [event for event in events if event["EventType"] in ("Preempt", "Terminate", "Redeploy", "Reboot")]
    if not ends:
        return None
    name = _get(f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers) or ""
    for event in ends:
        if name.strip() in event.get("Resources", []):
            return f"Azure: {event['EventType']} not before {event.get('NotBefore') or 'now'}"
    return None


def gcp(base: str = METADATA) -> str | None:
    """Of a Compute Engine machine: 30 s before it is preempted, a minute before maintenance ends it."""
    headers = {"Metadata-Flavor": "Google"}
    path = f"{base}/computeMetadata/v1/instance"
    if (_get(f"{path}/preempted", headers) or "").strip() == "TRUE":
        return "Google Cloud preempts this instance"
    if (_get(f"{path}/maintenance-event", headers) or "").strip() == "TERMINATE_ON_HOST_MAINTENANCE":
        return "Google Cloud ends this instance for maintenance"
    return None


SOURCES: Mapping[str, Source] = {"aws": aws, "azure": azure, "gcp": gcp}
KNOWN = f"must be one of {', '.join(map(repr, SOURCES))}, or 'package.module:function'"


def check(name: str) -> None:
    """Raises ConfigError where ``name`` cannot be that of a source. What it names may be on the executors alone."""
    if name not in SOURCES and not re.fullmatch(r"[\w.]*\w:\w+", name):
        raise ConfigError(f"notices={name!r}: {KNOWN}")


def source(name: str) -> Source:
    """The notice source called ``name``: one of `SOURCES`, or ``package.module:function``.

    Raises:
        ConfigError: there is none of that name, or it cannot be imported here.
    """
    if name in SOURCES:
        return SOURCES[name]
    check(name)
    module, _, function = name.partition(":")
    try:
        found: Source = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"notices={name!r} cannot be imported: {error}") from error
    return found


class Watch:
    """Asks a source until it says that the machine will go.

    Args:
        name: of the source, see `source`.
        on_notice: called once, from a thread, with the reason.
        on_trouble: called once, from a thread, with what a source said that could not be asked. It is asked on.
    """

    def __init__(self, name: str, on_notice: Callable[[str], None], on_trouble: Callable[[str], None]) -> None:
        self._name, self._on_notice, self._on_trouble = name, on_notice, on_trouble
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more. Does not wait for a request that is under way."""
        self._over.set()

    def _serve(self) -> None:
        troubled = False
        while not self._over.is_set():
            try:
                reason = source(self._name)()
            except Exception as error:  # of the source: whatever it is, training goes on without notice
                if not troubled:
                    troubled = True
                    self._on_trouble(f"notices from {self._name!r} cannot be had: {type(error).__name__}: {error}")
                reason = None
            if reason and not self._over.is_set():
                self._on_notice(str(reason))
                return
            self._over.wait(POLL_S)


def _get(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """The answer's text; None where the answer is that there is nothing."""
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with _NO_PROXY.open(request, timeout=ANSWER_S) as answer:
            return str(answer.read(65536).decode())
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return None
            raise
