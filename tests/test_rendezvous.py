"""The rendezvous server against clients that speak Horovod's wire protocol byte by byte, well and badly."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import pickle
import resource
import socket
import struct
import time
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_spark.driver import rendezvous as module
from elastic_spark.driver.mesh import ADDRESS_BYTES, Mesh, parse_address
from elastic_spark.driver.rendezvous import Rendezvous

LIMIT = 10.0


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments, **named) -> None:
        async def limited() -> None:
            async with asyncio.timeout(60):
                await test(*arguments, **named)

        asyncio.run(limited())

    return run


def address(port: int, ip: str = "127.0.0.1") -> bytes:
    """A published address as Gloo writes it: sockaddr_storage (128 bytes) and a sequence number."""
    if ":" in ip:
        head = struct.pack("=H", socket.AF_INET6) + struct.pack(">HI", port, 0) + socket.inet_pton(socket.AF_INET6, ip)
    else:
        head = struct.pack("=H", socket.AF_INET) + struct.pack(">H", port) + socket.inet_pton(socket.AF_INET, ip)
    return head.ljust(128, b"\0") + struct.pack("=q", 1)


async def request(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """One request as Horovod's client makes it. Status 0 where the server closed without an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    try:
        async with asyncio.timeout(LIMIT):
            answer = await reader.read()
    finally:
        writer.close()
    if not answer:
        return 0, b""
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(rest)}".encode() in head
    return int(head.split(b" ")[1]), rest


async def ended(reader: asyncio.StreamReader) -> None:
    """Waits until the server has closed, in good order or not, without a word."""
    async with asyncio.timeout(LIMIT):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""


async def parked(rendezvous: Rendezvous, generation: int, *members: str) -> None:
    async with asyncio.timeout(LIMIT):
        while rendezvous.waited_for(generation) != list(members):
            await asyncio.sleep(0.001)


@in_loop
async def test_a_get_is_parked_until_the_put_it_waits_for():
    rendezvous = Rendezvous("127.0.0.1")
    port = await rendezvous.open(7, ["w0", "w1"])
    waiting = [asyncio.create_task(request(port, "GET", "/global/1")) for _ in range(3)]
    await parked(rendezvous, 7, "w1")
    assert await request(port, "PUT", "/global/1", address(4242)) == (200, b"")
    assert [await task for task in waiting] == [(200, address(4242))] * 3
    assert await request(port, "GET", "/global/1") == (200, address(4242))
    assert rendezvous.waited_for(7) == []
    await rendezvous.close_all()


@in_loop
async def test_cancel_answers_every_get_at_once_with_what_is_no_address():
    rendezvous = Rendezvous("127.0.0.1")
    port = await rendezvous.open(1, ["w0", "w1", "w2"])
    assert await request(port, "GET", "/rank_and_size/w2:0") == (200, b"2,3,0,1,2,3")
    await request(port, "PUT", "/global/0", address(4242) + address(4243))
    waiting = asyncio.create_task(request(port, "GET", "/global/2"))
    await parked(rendezvous, 1, "w2")
    rendezvous.cancel(1)
    rendezvous.cancel(1)
    assert await waiting == (200, b"!")
    assert await request(port, "GET", "/global/0") == (200, b"!")
    assert await request(port, "GET", "/cross_0_process_set_hash_ab12/1") == (200, b"!")
    assert (await request(port, "GET", "/rank_and_size/w2:0"))[1].startswith(b"-1,")
    before = rendezvous.addresses(1)
    assert await request(port, "PUT", "/global/2", address(1) + address(2)) == (200, b"")
    assert rendezvous.addresses(1) == before
    await rendezvous.close_all()


@in_loop
async def test_close_sets_free_whoever_waits_and_the_port():
    rendezvous = Rendezvous("127.0.0.1")
    port = await rendezvous.open(1, ["w0", "w1"])
    waiting = asyncio.create_task(request(port, "GET", "/global/0"))
    await parked(rendezvous, 1, "w0")
    rendezvous.close(1)
    rendezvous.close(1)
    assert await waiting == (200, b"!")
    with pytest.raises(ConnectionRefusedError):
        await request(port, "GET", "/global/0")
    assert rendezvous.addresses(1) == []
    rendezvous.cancel(1)
    await rendezvous.close_all()


@in_loop
async def test_the_environment_names_the_server_and_the_place():
    rendezvous = Rendezvous("127.0.0.1")
    ports = [await rendezvous.open(number, ["b", "a"]) for number in (1, 2)]
    assert len(set(ports)) == 2
    zero, one = rendezvous.environment(2)
    assert zero["HOROVOD_HOSTNAME"], one["HOROVOD_HOSTNAME"] == ("b", "a")
    assert one["HOROVOD_RANK"] == one["HOROVOD_CROSS_RANK"] == "1"
    assert one["HOROVOD_SIZE"] == one["HOROVOD_CROSS_SIZE"] == "2"
    assert (one["HOROVOD_LOCAL_RANK"], one["HOROVOD_LOCAL_SIZE"]) == ("0", "1")
    assert one["HOROVOD_GLOO_RENDEZVOUS_PORT"] == str(ports[1])
    with pytest.raises(ValueError, match="open already"):
        await rendezvous.open(2, ["a"])
    for members in ([], ["a", "a"]):
        with pytest.raises(ValueError, match="distinct"):
            await rendezvous.open(3, members)
    await rendezvous.close_all()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/global/3", address(1) * 2),  # no such rank
        ("GET", "/global/3", b""),
        ("PUT", "/global/01", address(1) * 2),  # not how Horovod writes a number
        ("PUT", "/global/-1", address(1) * 2),
        ("PUT", "/other/0", address(1) * 2),  # no such scope
        ("PUT", "/local_w9/0", b""),  # no such member
        ("PUT", "/cross_1/0", address(1) * 2),
        ("PUT", "/global/0", address(1)),  # one address too few, too many, torn
        ("PUT", "/global/0", address(1) * 3),
        ("PUT", "/global/0", address(1) + address(2)[:-1]),
        ("PUT", "/local_w0/0", address(1)),
        ("PUT", "/global/0", address(1) + bytes(ADDRESS_BYTES)),  # not an address
        ("PUT", "/global/0", address(1) + address(0)),
        ("PUT", "/global/rank_0", b"h" * 257),
        ("PUT", "/global_process_set_hash_12/2", address(1)),  # a set of two has no third rank
        ("PUT", "/global_process_set_hash_xyz/0", address(1)),
        ("PUT", "/rank_and_size/w0:0", b""),
        ("GET", "/rank_and_size/w0:1", b""),
        ("GET", "/rank_and_size/w9:0", b""),
        ("PUT", "/worker_addresses/w0:0", pickle.dumps("never loaded")),
        ("DELETE", "/other/0", b""),
    ],
)
@in_loop
async def test_what_no_member_can_say_is_refused_and_leaves_no_trace(method, path, body):
    rendezvous = Rendezvous("127.0.0.1")
    port = await rendezvous.open(1, ["w0", "w1", "w2"])
    status, answer = await request(port, method, path, body)
    assert status in (0, 409)
    assert answer == b""
    assert rendezvous.addresses(1) == []
    await rendezvous.close_all()


@in_loop
async def test_an_address_is_accepted_once():
    rendezvous = Rendezvous("127.0.0.1")
    port = await rendezvous.open(1, ["w0", "w1"])
    assert (await request(port, "PUT", "/global/0", address(5)))[0] == 200
    assert (await request(port, "PUT", "/global/0", address(5)))[0] == 200  # a client that missed the answer
    assert (await request(port, "PUT", "/global/0", address(6)))[0] == 409
    assert (await request(port, "PUT", "/global/1", address(7)))[0] == 200
    for rank in "01":
        assert (await request(port, "DELETE", f"/global/{rank}"))[0] == 200
    assert (await request(port, "PUT", "/global/0", address(8)))[0] == 409
    await rendezvous.close_all()


@in_loop
async def test_a_process_set_can_be_removed_and_added_again():
    rendezvous = Rendezvous("127.0.0.1")
    port = await rendezvous.open(1, ["w0", "w1", "w2"])
    scope = "/global_process_set_hash_1f"
    for first_port in (100, 200):
        for rank in (0, 1):
            assert (await request(port, "PUT", f"{scope}/{rank}", address(first_port + rank)))[0] == 200
            assert (await request(port, "GET", f"{scope}/{rank}"))[1] == address(first_port + rank)
        for rank in (0, 1):
            await request(port, "DELETE", f"{scope}/{rank}")
        assert [found for _, found in rendezvous.addresses(1)] in ([first_port], [first_port + 1])
    await rendezvous.close_all()


@in_loop
async def test_a_missing_hostname_does_not_block():
    rendezvous = Rendezvous("127.0.0.1")
    port = await rendezvous.open(1, ["w0", "w1"])
    assert (await request(port, "GET", "/global/rank_1"))[0] == 200
    await request(port, "PUT", "/global/rank_1", b"node-1")
    assert await request(port, "GET", "/global/rank_1") == (200, b"node-1")
    await rendezvous.close_all()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /global/0 HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET /global/0 HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"PUT /global/0 HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n",
        b"PUT /global/0 HTTP/1.1\r\nContent-Length: 1\r\n\r\nxyz",
        b"POST /global/0 HTTP/1.1\r\n\r\n",
        b"GET /a/b/c HTTP/1.1\r\n\r\n",
        b"GET /\xff/0 HTTP/1.1\r\n\r\n",
        b"GET " + b"/" * 5000,
        b"\x80\x04" + b"x" * 5000,
    ],
)
@in_loop
async def test_garbage_is_closed_and_the_server_goes_on(garbage):
    rendezvous = Rendezvous("127.0.0.1")
    port = await rendezvous.open(1, ["w0"])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(garbage)
    await ended(reader)
    writer.close()
    assert (await request(port, "PUT", "/global/0"))[0] == 200
    await rendezvous.close_all()


@in_loop
async def test_a_client_that_says_nothing_or_half_is_dropped(monkeypatch):
    monkeypatch.setattr(module, "_READ_LIMIT_S", 0.1)
    rendezvous = Rendezvous("127.0.0.1")
    port = await rendezvous.open(1, ["w0", "w1"])
    for said in (b"", b"PUT /global/0 HTTP/1.1\r\nContent-Length: 136\r\n\r\nonly this"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        await ended(reader)
        writer.close()
    waiting = asyncio.create_task(request(port, "GET", "/global/0"))  # but a parked one may wait
    await parked(rendezvous, 1, "w0")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await ended(reader)  # one that came later has been dropped meanwhile
    writer.close()
    assert rendezvous.waited_for(1) == ["w0"]
    rendezvous.cancel(1)
    await waiting
    await rendezvous.close_all()


@in_loop
async def test_a_flood_of_connections_is_bounded_and_passes():
    rendezvous = Rendezvous("127.0.0.1")
    port = await rendezvous.open(1, ["w0", "w1"])
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
    readers = [asyncio.create_task(reader.read()) for reader, _ in opened]
    async with asyncio.timeout(LIMIT):
        while sum(task.done() for task in readers) < 200 - 72:
            await asyncio.sleep(0.01)
    assert len(rendezvous._generations[1].connections) == 72
    for _, writer in opened:
        writer.close()
    await asyncio.gather(*readers, return_exceptions=True)
    async with asyncio.timeout(LIMIT):
        while rendezvous._generations[1].connections:
            await asyncio.sleep(0.01)
    assert (await request(port, "GET", "/rank_and_size/w0:0"))[0] == 200
    await rendezvous.close_all()


@in_loop
async def test_a_waiting_client_that_dies_is_forgotten():
    rendezvous = Rendezvous("127.0.0.1")
    port = await rendezvous.open(1, ["w0", "w1", "w2"])
    waiting = asyncio.create_task(request(port, "GET", "/cross_0/1"))
    await parked(rendezvous, 1, "w1")
    waiting.cancel()
    await parked(rendezvous, 1)
    await rendezvous.close_all()


# ---- which addresses can still be in use


@given(
    st.lists(st.tuples(st.sampled_from(["10.0.0.1", "10.0.0.2", "127.0.0.1"]), st.integers(1, 65535)),
             min_size=6, max_size=6, unique=True)
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_of_a_pair_the_lower_address_in_gloos_order_listens(ends):
    """Three ranks; rank i's address for j is ``table[i, j]``. Gloo compares the IP, then the port in network order
    read as a number of the host."""
    table = dict(zip([(i, j) for i in range(3) for j in range(3) if i != j], ends, strict=True))
    mesh = Mesh()
    for i in range(3):
        mesh.published[i] = b"".join(address(table[i, j][1], table[i, j][0]) for j in range(3) if j != i)

    def gloo(end: tuple[str, int]) -> tuple[bytes, int]:
        return socket.inet_aton(end[0]), socket.htons(end[1])

    expected = {min(table[i, j], table[j, i], key=gloo) for i in range(3) for j in range(i)}
    assert {parse_address(entry) for entry in mesh.listeners()} == expected
    assert {parse_address(entry) for entry in mesh.awaited()} == expected
    mesh.finished.add(2)
    assert {parse_address(entry) for entry in mesh.listeners()} == expected
    assert not list(mesh.awaited())
    assert not mesh.complete()
    mesh.finished |= {0, 1}
    assert mesh.complete()


@in_loop
async def test_addresses_of_both_families_and_of_halves_of_pairs():
    rendezvous = Rendezvous("127.0.0.1")
    port = await rendezvous.open(1, ["w0", "w1"])
    await request(port, "PUT", "/global/0", address(9000))
    await request(port, "PUT", "/cross_0/0", address(9001, "fe80::1"))
    await request(port, "PUT", "/local_w0/0")
    assert rendezvous.addresses(1) == [("127.0.0.1", 9000), ("fe80::1", 9001)]
    await rendezvous.close_all()


@in_loop
async def test_a_listener_whose_peer_died_is_poked_and_nobody_else():
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    for listener in listeners:
        listener.setblocking(False)
    ports = sorted((listener.getsockname()[1] for listener in listeners), key=socket.htons)
    by_port = {listener.getsockname()[1]: listener for listener in listeners}
    rendezvous = Rendezvous("127.0.0.1")
    port = await rendezvous.open(1, ["w0", "w1"])
    await request(port, "PUT", "/global/0", address(ports[0]))  # a mesh that is through: nobody listens there now
    await request(port, "PUT", "/global/1", address(ports[3]))
    await request(port, "DELETE", "/global/0")
    await request(port, "PUT", "/cross_0/0", address(ports[2]))  # rank 1 has the lower address and waits
    await request(port, "PUT", "/cross_0/1", address(ports[1]))
    rendezvous.cancel(1)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(LIMIT):
        accepted, _ = await loop.sock_accept(by_port[ports[1]])
        accepted.setblocking(False)
        assert await loop.sock_recv(accepted, 1) == b""  # the half-close
        accepted.close()
        while rendezvous._pokes:
            await asyncio.sleep(0.001)
    for other in (ports[0], ports[2], ports[3]):
        with pytest.raises(BlockingIOError):
            by_port[other].accept()
    await rendezvous.close_all()
    for listener in listeners:
        listener.close()


@in_loop
async def test_a_poke_that_nobody_answers_ends(monkeypatch):
    """A frozen process accepts in the kernel and never closes."""
    monkeypatch.setattr(module, "_POKE_LIMIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        rendezvous = Rendezvous("127.0.0.1")
        port = await rendezvous.open(1, ["w0", "w1"])
        await request(port, "PUT", "/global/0", address(frozen.getsockname()[1]))
        await request(port, "PUT", "/global/1", address(frozen.getsockname()[1], "127.0.0.2"))
        rendezvous.cancel(1)
        assert rendezvous._pokes
        async with asyncio.timeout(LIMIT):
            while rendezvous._pokes:
                await asyncio.sleep(0.001)
        await rendezvous.close_all()


# ---- parsing

PIECES = st.lists(
    st.one_of(
        st.binary(max_size=20), st.sampled_from([b"GET /a/b HTTP/1.1", b"\r\n", b"\r\n\r\n", b"Content-Length: 3"])
    )
).map(b"".join)


@given(PIECES, st.integers(0, 300))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_request_or_an_error(data, cut):
    def parse(received: bytes) -> object:
        try:
            return module._parse_request(bytearray(received), 100)
        except ValueError:
            return "error"

    if parse(data[:cut]) == "error":
        assert parse(data) == "error"  # more bytes never mend a broken request


@given(st.binary(max_size=200), st.integers(0, 400))
@settings(max_examples=100, deadline=None)
def test_a_request_is_whole_exactly_when_its_last_byte_is_there(body, cut):
    data = b"PUT /global/3 HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    expected = module._Request("PUT", "global", "3", body)
    assert module._parse_request(bytearray(data), 200) == expected
    if cut < len(data):
        assert module._parse_request(bytearray(data[:cut]), 200) is None


@in_loop
async def test_a_request_in_pieces():
    rendezvous = Rendezvous("127.0.0.1")
    port = await rendezvous.open(1, ["w0", "w1"])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for byte in b"PUT /global/0 HTTP/1.1\r\nContent-Length: 136\r\n\r\n" + address(77):
        writer.write(bytes([byte]))
        await writer.drain()
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()
    assert rendezvous.addresses(1) == [("127.0.0.1", 77)]
    await rendezvous.close_all()


@in_loop
async def test_the_number_of_meshes_is_bounded():
    rendezvous = Rendezvous("127.0.0.1")
    port = await rendezvous.open(1, ["w0", "w1"])
    answers = [await request(port, "PUT", f"/global_process_set_hash_{n:x}/rank_0", b"h") for n in range(257)]
    assert [status for status, _ in answers] == [200] * 256 + [409]
    await rendezvous.close_all()


@in_loop
async def test_close_all_ends_silent_clients_and_pokes_under_way():
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        rendezvous = Rendezvous("127.0.0.1")
        port = await rendezvous.open(1, ["w0", "w1"])
        await request(port, "PUT", "/global/0", address(frozen.getsockname()[1]))
        await request(port, "PUT", "/global/1", address(frozen.getsockname()[1], "127.0.0.2"))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET ")
        while not rendezvous._generations[1].connections:
            await asyncio.sleep(0)
        rendezvous.cancel(1)
        accepted, _ = await asyncio.get_running_loop().run_in_executor(None, frozen.accept)
        await rendezvous.close_all()
        await ended(reader)
        assert not rendezvous._pokes
        assert rendezvous.waited_for(1) == []
        writer.close()
        accepted.close()


@in_loop
async def test_the_answers_of_a_large_world_are_whole():
    size = 1000
    rendezvous = Rendezvous("127.0.0.1")
    port = await rendezvous.open(1, [f"w{rank}" for rank in range(size)])
    body = b"".join(address(1 + other) for other in range(size - 1))
    waiting = asyncio.create_task(request(port, "GET", "/global/999"))
    await parked(rendezvous, 1, "w999")
    assert (await request(port, "PUT", "/global/999", body))[0] == 200
    assert await waiting == await request(port, "GET", "/global/999") == (200, body)
    await rendezvous.close_all()


@in_loop
async def test_out_of_descriptors_is_waited_out():
    rendezvous = Rendezvous("127.0.0.1")
    port = await rendezvous.open(1, ["w0"])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    hoard = []
    _reader, writer = await asyncio.open_connection("127.0.0.1", port)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 64, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                hoard.append(os.dup(0))
        os.close(hoard.pop())
        another = socket.socket()  # takes the last one, and is not accepted
        another.setblocking(False)
        await asyncio.get_running_loop().sock_connect(another, ("127.0.0.1", port))
        for _ in range(100):
            await asyncio.sleep(0)
    finally:
        for descriptor in hoard:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    another.close()
    writer.close()
    assert (await request(port, "GET", "/rank_and_size/w0:0"))[0] == 200
    await rendezvous.close_all()


@in_loop
async def test_twenty_four_ranks_meet_within_seconds():
    """All requests that 24 ranks make for one mesh, with the driver's loop shared by server and clients (BR-18)."""
    size = 24
    rendezvous = Rendezvous("127.0.0.1")
    port = await rendezvous.open(1, [f"w{rank}" for rank in range(size)])

    async def rank(own: int) -> None:
        await request(port, "PUT", f"/global/rank_{own}", b"host")
        for other in range(own):
            await request(port, "GET", f"/global/rank_{other}")
        mine = b"".join(address(1000 + own * size + other) for other in range(size) if other != own)
        await request(port, "PUT", f"/global/{own}", mine)
        for other in range(size):
            if other != own:
                for _ in range(2):
                    status, body = await request(port, "GET", f"/global/{other}")
                    assert (status, len(body)) == (200, ADDRESS_BYTES * (size - 1))
        await request(port, "DELETE", f"/global/{own}")

    started = time.perf_counter()
    await asyncio.gather(*(rank(own) for own in range(size)))
    assert time.perf_counter() - started < 30
    assert len(rendezvous.addresses(1)) == size * (size - 1) // 2
    await rendezvous.close_all()
