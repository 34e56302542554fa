"""Streams that people look at: closed, broken, of a small alphabet, or not read by anybody."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import termios
import threading
import time
from contextlib import closing

import pytest

from elastic_spark.api import _Output
from elastic_spark.outlet import Outlet

MISSING = re.compile(r"elastic_spark: ([\d,]+) lines are missing here")


def taken(lines):
    """What was written, and how many lines were said to be missing; each gap is where it is said to be."""
    at, missing = 0, 0
    for line in lines:
        if (gap := MISSING.match(line)) is not None:
            missing += (count := int(gap[1].replace(",", "")))
            at += count
        elif line.strip():
            assert line == f"[w1] {at}"
            at += 1
    return at, missing


def read_to_end(number):
    text = b""
    while True:
        try:
            part = os.read(number, 1 << 16)
        except OSError:  # how a terminal ends
            return text.decode()
        if not part:
            return text.decode()
        text += part


def test_what_is_written_is_there_when_it_is_closed():
    stream = io.StringIO()
    with closing(Outlet(stream)) as outlet:
        _Output(outlet, False).lines("w1", tuple(str(number) for number in range(5_000)))
    assert stream.getvalue() == "".join(f"[w1] {number}\n" for number in range(5_000))
    outlet.write("too late\n")
    assert stream.getvalue().endswith("[w1] 4999\n")


class Broken:
    """As some of the users' own are."""

    def write(self, text):
        raise RuntimeError("no")


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


def broken_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "wb", buffering=0)


@pytest.mark.parametrize("make", [closed, broken_pipe, Broken, lambda: None])
def test_a_stream_that_breaks_is_left_alone(make):
    stream = make()
    if isinstance(stream, io.FileIO):
        stream = io.TextIOWrapper(stream, write_through=True)
    begin = time.monotonic()
    with closing(Outlet(stream)) as outlet:
        assert not outlet.isatty()
        for _ in range(100):
            _Output(outlet, True).lines("w1", ("a line", "another"))
    assert time.monotonic() - begin < 1.5
    if isinstance(stream, io.TextIOWrapper):
        stream.detach().close()


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "caf\\xe9 \\u20ac"), ("latin-1", "café \\u20ac")])
def test_what_the_encoding_lacks_is_written_as_an_escape(encoding, shown):
    raw = io.BytesIO()
    with closing(Outlet(io.TextIOWrapper(raw, encoding=encoding))) as outlet:
        outlet.write("café €\n")
        outlet.write("and on\n")
    assert raw.getvalue().decode(encoding) == f"{shown}\nand on\n"


def test_a_pipe_that_nobody_reads_holds_nobody_up_and_the_gap_is_said():
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    outlet = Outlet(stream, most_waiting=10_000)
    output = _Output(outlet, False)
    slowest = 0.0
    for number in range(20_000):
        begin = time.monotonic()
        output.lines("w1", (str(number),))
        slowest = max(slowest, time.monotonic() - begin)
    assert slowest < 1.0
    begin = time.monotonic()
    outlet.close(limit_s=0.2)
    assert time.monotonic() - begin < 1.0
    stream.flush()  # nothing waits in the stream itself, and its lock is free
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(read_to_end(reader)))
    thread.start()
    outlet.close(limit_s=30.0)
    stream.close()
    thread.join()
    os.close(reader)
    total, missing = taken(found[0].splitlines())
    assert total == 20_000
    assert 5_000 < missing < 20_000


def test_a_stopped_terminal():
    leader, follower = pty.openpty()
    stream = os.fdopen(follower, "w")
    outlet = Outlet(stream, most_waiting=1_000)
    assert outlet.isatty()
    termios.tcflow(follower, termios.TCOOFF)  # Ctrl-S
    output = _Output(outlet, False)
    output.lines("w1", tuple(str(number) for number in range(500)))
    output.lines("w1", tuple(str(number) for number in range(500, 1_000)))
    termios.tcflow(follower, termios.TCOON)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(read_to_end(leader)))
    thread.start()
    outlet.close(limit_s=30.0)
    stream.close()
    thread.join()
    os.close(leader)
    total, missing = taken(found[0].splitlines())
    assert total == 1_000
    assert missing > 500


def test_a_process_whose_stderr_nobody_reads_ends_well():
    script = "import sys; from elastic_spark.outlet import Outlet; outlet = Outlet(sys.stderr)\n"
    script += "for number in range(100_000): outlet.write(f'{number}\\n')\n"
    script += "outlet.close(0.5); print('done', flush=True)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout.read() == b"done\n"
        assert process.wait(timeout=60.0) == 0
