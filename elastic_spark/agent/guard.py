"""Ends a process group when this process ends, however it ends.

A shell waits for the end of a pipe whose other end only this process holds, and then kills the group with SIGKILL: that
reaches stopped processes too, needs no cooperation of theirs, and takes their children along, which a signal on parent
death would not.
"""

from __future__ import annotations

import subprocess


class Guard:
    """Of the process group ``group``, for as long as it is not closed."""

    def __init__(self, group: int) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", f"cat >/dev/null; kill -s KILL -- -{group} 2>/dev/null"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """The group has ended, or is somebody else's care."""
        self._shell.kill()
        self._shell.wait()
        assert self._shell.stdin is not None
        self._shell.stdin.close()
