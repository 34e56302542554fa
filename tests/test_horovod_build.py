"""The mended Horovod under real kills: what each mend is for, shown on real processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest
from horovod_ranks import Pool, Rank, Rendezvous, world

from elastic_spark.horovod_mends import MENDS_VERSION


@pytest.fixture
def server() -> Iterator[Rendezvous]:
    rendezvous = Rendezvous()
    yield rendezvous
    rendezvous.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    warm = Pool()
    yield warm
    warm.close()


def init_all(ranks: list[Rank], server: Rendezvous) -> None:
    for number, rank in enumerate(ranks):
        rank.tell("init", env=world(server, number, len(ranks)))
    for number, rank in enumerate(ranks):
        got = rank.answer()
        assert (got.get("rank"), got.get("size")) == (number, len(ranks)), got


def works_alone(rank: Rank) -> None:
    """After a failed init the same process can initialise again, with and without a shutdown between."""
    for shutdown in (False, True):
        if shutdown:
            rank.ask("shutdown")
        assert rank.ask("init", env=world(None, 0, 1))["size"] == 1
        assert rank.ask("allreduce", value=7) == {"value": 7.0}


def test_the_installed_build_is_the_mended_one(pool: Pool) -> None:
    with pool.ranks(1) as (rank,):
        assert rank.mends == MENDS_VERSION


@pytest.mark.parametrize("stage", ["before its address is known", "after its address is known"])
def test_peer_killed_during_init_does_not_end_the_survivor(server: Rendezvous, pool: Pool, stage: str) -> None:
    reached, go_on = threading.Event(), threading.Event()
    with pool.ranks(2) as (survivor, victim):

        def hold(method: str, path: str) -> None:
            if (method, path) == ("PUT", "/global/1"):
                if stage.startswith("before"):
                    del server.values[path]
                reached.set()
                go_on.wait(60)

        server.on_request = hold
        survivor.tell("init", env=world(server, 0, 2, timeout_s=3))
        victim.tell("init", env=world(server, 1, 2, timeout_s=3))
        assert reached.wait(60)
        victim.kill()
        go_on.set()
        got = survivor.answer()
        assert got["error"] == "ValueError", got
        assert got["text"].startswith("Horovod initialization failed: ")
        assert len(got["text"]) > 40, "the reason is in the message"
        assert got["seconds"] < 10, "Gloo's time-out of 3 s, and not five times of it"
        works_alone(survivor)


def test_interrupt_ends_an_init_that_waits_for_a_peer(server: Rendezvous, pool: Pool) -> None:
    waits = threading.Event()
    server.on_request = lambda method, path: waits.set() if (method, path) == ("GET", "/global/1") else None
    with pool.ranks(1) as (lonely,):
        lonely.tell("init", env=world(server, 0, 2, timeout_s=50))
        assert waits.wait(60)
        lonely.tell("interrupt")
        got = lonely.answer()
        assert got["error"] == "ValueError"
        assert "nterrupted" in got["text"]
        assert got["seconds"] < 20
        works_alone(lonely)


def test_all_survivors_learn_of_a_kill_at_once(server: Rendezvous, pool: Pool) -> None:
    """Stock Horovod: only the neighbours of the dead rank do, the others wait for Gloo's time-out of 30 s."""
    second = Rendezvous()
    with closing(second), pool.ranks(4) as ranks:
        init_all(ranks, server)
        for rank in ranks:
            rank.tell("train")
        for rank in ranks:
            assert rank.answer() == {"training": True}
        ranks[1].kill()
        survivors = [ranks[0], ranks[2], ranks[3]]
        for rank in survivors:
            got = rank.answer(limit_s=15)
            assert got["error"] == "HorovodInternalError", got
        for rank in survivors:
            rank.ask("shutdown")
        init_all(survivors, second)
        for number, rank in enumerate(survivors):
            rank.tell("allreduce", value=10**number)
        assert [rank.answer() for rank in survivors] == [{"value": 111.0}] * 3


def test_interrupt_frees_the_peers_of_a_frozen_rank(server: Rendezvous, pool: Pool) -> None:
    with pool.ranks(3) as ranks:
        init_all(ranks, server)
        for rank in ranks:
            rank.tell("train")
        for rank in ranks:
            assert rank.answer() == {"training": True}
        os.kill(ranks[2].process.pid, signal.SIGSTOP)
        for rank in ranks[:2]:
            rank.tell("interrupt")
        for rank in ranks[:2]:
            assert rank.answer(limit_s=15)["error"] == "HorovodInternalError"
        os.kill(ranks[2].process.pid, signal.SIGCONT)
        assert ranks[2].answer(limit_s=15)["error"] == "HorovodInternalError"


def test_resets_leak_no_descriptors(pool: Pool) -> None:
    with pool.ranks(2) as ranks:
        open_files = []
        for _ in range(6):
            server = Rendezvous()
            init_all(ranks, server)
            for rank in ranks:
                rank.tell("allreduce", value=1)
            assert [rank.answer() for rank in ranks] == [{"value": 2.0}] * 2
            for rank in ranks:
                rank.tell("shutdown")
            open_files.append([rank.answer()["descriptors"] for rank in ranks])
            server.close()
        assert open_files[1] == open_files[-1]


def test_who_waits_for_a_late_peer_sleeps(server: Rendezvous, pool: Pool) -> None:
    """Stock Horovod: a whole core, taken from the one that the others wait for."""
    with pool.ranks(2) as (early, late):
        init_all([early, late], server)
        early.tell("allreduce", value=1)
        process = psutil.Process(early.process.pid)
        before = sum(process.cpu_times()[:2])
        threading.Event().wait(1.5)  # what is measured, not waited for
        used = sum(process.cpu_times()[:2]) - before
        late.tell("allreduce", value=2)
        assert [early.answer(), late.answer()] == [{"value": 3.0}] * 2
        assert used < 0.7, "its loop negotiates a thousand times a second, and that is all"
