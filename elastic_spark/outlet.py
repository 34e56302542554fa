"""A stream that people look at: it may break, or take nothing for hours, and must neither end nor hold up a job."""

from __future__ import annotations

import contextlib
import select
import threading
from collections import deque
from typing import Any

#: Characters that may wait.
MOST_WAITING = 1 << 20
#: Characters written at once: a pipe with room for anything takes 4,096 bytes, and an escape has up to ten.
PIECE = 400
CLOSE_S = 2.0


class Outlet:
    """Writes to a text stream from a thread of its own: `write` neither waits nor raises.

    A stream that breaks is left alone. One that takes nothing, as a stopped terminal or pager, misses what would make
    more than ``most_waiting`` characters wait; how many lines that were is said where they are missing. What the
    stream's encoding lacks is written as an escape. None: nothing is written.
    """

    def __init__(self, stream: Any, most_waiting: int = MOST_WAITING) -> None:
        self._stream, self._most = stream, most_waiting
        self._texts: deque[str] = deque()
        self._waiting = 0  # characters, with those being written
        self._missed = 0  # lines
        self._in_line = False
        self._broken = stream is None
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def isatty(self) -> bool:
        with contextlib.suppress(Exception):
            return bool(self._stream.isatty())
        return False

    def write(self, text: str) -> None:
        with self._changed:
            if self._broken or self._closed or not text:
                return
            if self._waiting and self._waiting + len(text) > self._most:
                self._missed += text.count("\n")
                return
            self._put(self._gap() + text)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="outlet", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Takes no more, and waits until all is written, ``limit_s`` seconds at most. The stream stays open."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._broken or not (self._waiting or self._missed), limit_s)

    def _put(self, text: str) -> None:
        self._texts.append(text)
        self._waiting += len(text)
        self._in_line = not text.endswith("\n")

    def _gap(self) -> str:
        """What is said in the place of lines that are missing; "" where none are."""
        missed, self._missed = self._missed, 0
        begin = "\n" if self._in_line else ""
        return f"{begin}elastic_spark: {missed:,} lines are missing here, the stream took none\n" if missed else ""

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._texts or self._missed or self._closed)
                if not self._texts and self._missed:
                    self._put(self._gap())
                if not self._texts:
                    return
                text = self._texts.popleft()
            try:
                self._show(text)
            except Exception:  # closed, a broken pipe, or whatever a stream of the user's own raises
                self._broken = True
            with self._changed:
                self._waiting -= len(text)
                self._changed.notify_all()
                if self._broken:
                    self._texts.clear()
                    return

    def _show(self, text: str) -> None:
        for begin in range(0, len(text), PIECE):
            piece = text[begin : begin + PIECE]
            self._wait_for_room()
            try:
                self._stream.write(piece)
            except UnicodeEncodeError:
                encoding = getattr(self._stream, "encoding", None) or "ascii"
                self._stream.write(piece.encode(encoding, "backslashreplace").decode(encoding))
            if hasattr(self._stream, "flush"):
                self._stream.flush()

    def _wait_for_room(self) -> None:
        """Outside of the stream: inside, its lock would hold up everyone who prints, and the interpreter's end."""
        try:
            poll = select.poll()
            poll.register(self._stream.fileno(), select.POLLOUT)
        except Exception:  # no file is behind it
            return
        poll.poll()
