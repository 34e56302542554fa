"""Files of lines, whose last one is torn where the process that wrote it died, or the disk was full."""

from __future__ import annotations

import os
from pathlib import Path


def is_torn(path: Path) -> bool:
    """Whether the file ends within a line, so that what is appended must begin one of its own."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
