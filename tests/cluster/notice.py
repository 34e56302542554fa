"""A notice source for tests: a file in the executor's working directory."""

from __future__ import annotations

from pathlib import Path


def in_working_directory() -> str | None:
    notice = Path("notice")
    return notice.read_text() if notice.exists() else None
