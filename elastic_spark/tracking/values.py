"""Keys and values as MLflow takes them: lengths, characters, no secrets, no memory addresses. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any

#: The tightest limits among MLflow 2.13, 3.x and Databricks.
KEY_LENGTH, PARAM_LENGTH, TAG_LENGTH = 250, 500, 5000

_SECRET = re.compile(r"(?i)secret|token|passw|credential|api_?key|access_?key|private_?key|authorization")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PASSWORD = re.compile(r"(?<=://)[^/@]*@")


def key(name: str) -> str:
    """A key of letters, digits and ``_-. /``, a normal relative path, at most 250 characters."""
    plain = re.sub(r"[^\w\-. /]", "_", str(name), flags=re.ASCII)[:KEY_LENGTH]
    plain = posixpath.normpath(plain.strip("/ ") or "_")
    plain = re.sub(r"^(\.\.|\.$)", "_", re.sub(r"^(\.\./)+", "", plain))
    return plain.rstrip("/ ")


def tag(value: object) -> str:
    """The text of a tag, cut with a mark where it is too long."""
    text = str(value)
    return text if len(text) <= TAG_LENGTH else text[: TAG_LENGTH - 12] + " ... (cut)"


def params(given: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Parameters as ``key -> text``, and the full texts of those that had to be cut, by artifact path.

    Nested mappings become dotted keys; functions and classes their qualified names; objects their repr without memory
    addresses, so that the same configuration gives the same text in each process. Values of keys that sound secret
    are masked.
    """
    short: dict[str, str] = {}
    long: dict[str, str] = {}
    for name, value in _flat("", given):
        unique, number = key(name), 1
        while unique in short:  # two names that MLflow cannot tell apart
            number += 1
            unique = f"{key(name)[: KEY_LENGTH - 4]}.{number}"
        text = "***" if _SECRET.search(name) else _text(value)
        if len(text) > PARAM_LENGTH:
            path = f"config/{unique.replace('/', '.')}.txt"
            long[path] = text
            text = f"{text[: PARAM_LENGTH - len(path) - 12]} ... see {path}"
        short[unique] = text
    return short, long


def without_password(uri: str) -> str:
    """A URI that may be shown: user and password are left out."""
    return _PASSWORD.sub("", uri)


def _flat(prefix: str, value: Mapping[str, Any]) -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for name, item in value.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        out += _flat(path, item) if isinstance(item, Mapping) and item else [(path, item)]
    return out


def _text(value: object) -> str:
    if isinstance(value, str):
        return without_password(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    return without_password(_ADDRESS.sub("", repr(value)))
