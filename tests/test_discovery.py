"""Host discovery: what is printed, to whom, while the list is rewritten; and a real horovodrun that follows it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from elastic_spark.cli import main
from elastic_spark.driver.discovery import (
    HostSlots,
    Member,
    MemberListDiscovery,
    format_hosts,
    host_lines,
    hosts_file,
    parse_hosts,
    publish,
    read,
    write_script,
)


def members(*hosts: str) -> list[Member]:
    return [Member(f"w{number}", host) for number, host in enumerate(hosts)]


def run_script(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(script)], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("hosts", "printed"),
    [
        ([], ""),
        (["a"], "a:1\n"),
        (["b", "a", "b", "10.0.0.7"], "10.0.0.7:1\na:1\nb:2\n"),
    ],
)
def test_all_readers_see_the_same(tmp_path: Path, hosts: list[str], printed: str) -> None:
    path = tmp_path / "members.json"
    script = write_script(tmp_path / "discover.sh", path)
    assert run_script(script).stdout == "", "nothing is published yet"
    assert run_script(script).returncode == 0
    assert publish(path, members(*hosts), version=1) == []
    assert host_lines(path) == printed
    assert hosts_file(path).read_text() == printed
    assert run_script(script).stdout == printed
    assert format_hosts(parse_hosts(printed)[0]) == printed
    slots = {line.split(":")[0]: int(line.split(":")[1]) for line in printed.splitlines()}
    assert MemberListDiscovery(path).find_available_hosts_and_slots() == slots
    cli = CliRunner().invoke(main, ["hosts", "--members", str(path)])
    assert (cli.exit_code, cli.stdout) == (0, printed)


def test_output_does_not_depend_on_the_order_of_members(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    publish(path, members("b", "a", "c"), version=1)
    first = path.read_bytes()
    publish(path, reversed(members("b", "a", "c")), version=1)
    assert path.read_bytes() == first


def test_ipv6_member_is_named_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    (warning,) = publish(path, members("a", "fe80::1"), version=1)
    assert "w1" in warning
    assert "fe80::1" in warning
    assert "unsupported" in warning
    cli = CliRunner().invoke(main, ["hosts", "--members", str(path)])
    assert (cli.exit_code, cli.stdout) == (0, "a:1\n")
    assert "fe80::1" in cli.stderr


def test_missing_list_is_empty_output(tmp_path: Path) -> None:
    cli = CliRunner().invoke(main, ["hosts"], env={"ELASTIC_SPARK_MEMBERS": str(tmp_path / "none.json")})
    assert (cli.exit_code, cli.output) == (0, "")
    assert MemberListDiscovery(tmp_path / "none.json").find_available_hosts_and_slots() == {}
    usage = CliRunner().invoke(main, ["hosts"], env={"ELASTIC_SPARK_MEMBERS": None})
    assert usage.exit_code == 2
    assert "ELASTIC_SPARK_MEMBERS" in usage.stderr


@pytest.mark.parametrize("content", ["", "{", '{"members": 3}', '{"members": [{"id": 1}]}', "[]", "\x00\xff"])
def test_damaged_list_is_a_warning_and_the_driver_keeps_the_last_good_one(tmp_path: Path, content: str) -> None:
    path = tmp_path / "members.json"
    publish(path, members("a", "a"), version=1)
    discovery = MemberListDiscovery(path)
    assert discovery.find_available_hosts_and_slots() == {"a": 2}
    path.write_bytes(content.encode("latin-1"))
    assert discovery.find_available_hosts_and_slots() == {"a": 2}
    cli = CliRunner().invoke(main, ["hosts", "--members", str(path)])
    assert (cli.exit_code, cli.stdout) == (0, "")
    assert "warning" in cli.stderr
    assert "Traceback" not in cli.output
    publish(path, members("b"), version=2)
    assert discovery.find_available_hosts_and_slots() == {"b": 1}


@pytest.mark.parametrize(
    ("text", "hosts", "warned"),
    [
        ("", [], 0),
        ("h1:2\nh1:3\n", [HostSlots("h1", 5)], 0),
        ("h1:0\nh2:-1\nh3:1\n", [HostSlots("h3", 1)], 2),
        ("# text\n\nh1:2  # two\n", [HostSlots("h1", 2)], 0),
        ("h1:\nh2:x\nh3:4\nh 4:1\n:3\n", [HostSlots("h3", 4)], 4),
        ("fe80::1:2\n[fe80::1]:2\nfe80::1\nh1\n", [HostSlots("h1", 1)], 3),
        ("10.0.0.1:2\r\nb:1", [HostSlots("10.0.0.1", 2), HostSlots("b", 1)], 0),
        ("h1:²\n", [], 1),
    ],
)
def test_foreign_output(text: str, hosts: list[HostSlots], warned: int) -> None:
    got, warnings = parse_hosts(text)
    assert got == hosts
    assert len(warnings) == warned
    for warning in warnings:
        assert warning.startswith("line ")


@given(st.text(alphabet="ab1:.#[] -\n\t\x00é", max_size=60))
def test_no_text_is_too_odd(text: str) -> None:
    hosts, warnings = parse_hosts(text)
    assert all(entry.slots >= 1 and entry.host for entry in hosts)
    assert len({entry.host for entry in hosts}) == len(hosts)
    meaningful = [line for line in text.splitlines() if line.partition("#")[0].strip()]
    assert len(hosts) + len(warnings) <= len(meaningful)
    assert parse_hosts(format_hosts(hosts)) == (hosts, [])


def test_fifty_readers_never_see_half_a_list(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    script = write_script(tmp_path / "discover.sh", path)
    lists = [members(*(f"host-{number}" for number in range(count))) for count in (1, 40, 200)]
    valid = {"".join(f"{entry.host}:1\n" for entry in sorted(one, key=lambda entry: entry.host)) for one in lists}
    publish(path, lists[0], version=0)
    done = threading.Event()

    def rewrite() -> None:
        version = 0
        while not done.is_set():
            version += 1
            publish(path, lists[version % 3], version)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        readers = [
            subprocess.Popen([str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(50)
        ]
        problems: list[str] = []
        for _ in range(50):
            assert host_lines(path, problems.append) in valid
        for reader in readers:
            out, err = reader.communicate(timeout=60)
            assert (reader.returncode, err) == (0, "")
            assert out in valid
    finally:
        done.set()
        writer.join()
    assert problems == []
    assert sorted(file.name for file in tmp_path.iterdir()) == ["discover.sh", "members.json", "members.json.hosts"]


def test_read_gives_back_what_was_published(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "members.json"
    publish(path, members("b", "a"), version=3)
    assert read(path) == [Member("w1", "a"), Member("w0", "b")]


WORKER = """
    import os, sys
    import torch
    import horovod.torch as hvd

    hvd.init()
    model = torch.nn.Linear(2, 1)
    state = hvd.elastic.TorchState(model=model, step=0)
    stop, log = sys.argv[1:]

    @hvd.elastic.run
    def train(state):
        while True:
            # the same decision on every rank: rank 0 looks, all are told
            over = hvd.broadcast_object(os.path.exists(stop), root_rank=0)
            if over:
                return
            total = int(hvd.allreduce(torch.ones(1), op=hvd.Sum)[0])
            if hvd.rank() == 0:
                with open(log, "a") as out:
                    out.write(f"{hvd.size()} {total}\\n")
            state.step += 1
            state.commit()

    train(state)
"""


def test_horovodrun_follows_our_script(tmp_path: Path) -> None:
    """One worker, then two, then one again: a real ``horovodrun``, on names that all mean this machine."""
    path, log, stop = tmp_path / "members.json", tmp_path / "log", tmp_path / "stop"
    script = write_script(tmp_path / "discover.sh", path)
    worker = tmp_path / "worker.py"
    worker.write_text(textwrap.dedent(WORKER))
    publish(path, members("localhost"), version=1)
    horovodrun = Path(sys.executable).with_name("horovodrun")
    command = [
        str(horovodrun), "-np", "1", "--min-np", "1", "--max-np", "2", "--host-discovery-script", str(script),
        "--network-interfaces", "lo", "--elastic-timeout", "60", sys.executable, str(worker), str(stop), str(log),
    ]  # fmt: skip
    output = tmp_path / "output"
    with output.open("w") as out:
        run = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:

        def last() -> str:
            lines = log.read_text().splitlines() if log.exists() else []
            return lines[-1] if lines else ""

        limit = time.monotonic() + 100

        def wait_for(what: Callable[[], bool]) -> None:
            while not what():
                assert run.poll() is None, output.read_text()[-3000:]
                assert time.monotonic() < limit, f"last {last()!r}: {output.read_text()[-3000:]}"
                time.sleep(0.05)

        wait_for(lambda: last() == "1 1")
        publish(path, members("localhost", "127.0.0.1"), version=2)
        wait_for(lambda: last() == "2 2")
        publish(path, members("localhost"), version=3)
        wait_for(lambda: last() == "1 1")
        stop.touch()
        assert run.wait(timeout=50) == 0, output.read_text()[-3000:]
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(timeout=30)
