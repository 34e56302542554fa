"""`elastic-spark chaos`: the schedule by its properties, and one real job under real blows."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from elastic_spark.cli import main
from elastic_spark.core import events as ev
from elastic_spark.errors import ConfigError, NotEnoughWorkers, UserCodeFailed
from elastic_spark.testing.chaos import Outcome, _promises, _Seen, _Victims
from elastic_spark.testing.churn import KINDS, LEAST_MACHINES, schedule

# ---- the schedule

arguments = st.tuples(
    st.integers(), st.integers(0, 60), st.integers(2, 6), st.integers(0, 4), st.integers(1, 200)
)  # seed, blows, machines, room for more, mean steps


@given(arguments)
def test_a_survivor_is_always_left(drawn):
    seed, blows, machines, room, mean = drawn
    made = schedule(seed, blows, machines, machines + room, mean)
    assert len(made) == blows
    for blow in made:
        machines += KINDS[blow.kind]
        assert LEAST_MACHINES <= machines <= drawn[2] + room
        assert max(1, mean // 2) <= max(1, blow.after_steps) <= mean * 1.5 + 1
        assert 0 <= blow.pick < 1


@given(arguments)
def test_the_seed_alone_decides(drawn):
    seed, blows, machines, room, mean = drawn
    assert schedule(seed, blows, machines, machines + room, mean) == schedule(
        seed, blows, machines, machines + room, mean
    )


@given(st.integers(), st.integers(2, 3))
def test_every_kind_comes_within_eight(seed, machines):
    assert {blow.kind for blow in schedule(seed, 8, machines, machines + 1)} == set(KINDS)


def test_seeds_differ():
    assert len({schedule(seed, 6, 3, 4) for seed in range(20)}) == 20


@pytest.mark.parametrize("wrong", [(0, 1, 1, 4, 5), (0, 1, 3, 2, 5), (0, -1, 3, 4, 5), (0, 1, 3, 4, 0)])
def test_what_cannot_be(wrong):
    with pytest.raises(ConfigError, match="at least 2 machines"):
        schedule(*wrong)


# ---- the verdict

SUMMARY = {
    **{"rows_once": 9, "rows_twice": 0, "rows_never": 0, "steps_lost": 0, "status": "FINISHED", "error": ""},
    **{"datasets": {"train": {}}, "changes": []},
}


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, ""),
        ({"status": "FAILED", "error": "why"}, "FAILED why"),
        ({"rows_twice": 2}, "2 twice"),
        ({"rows_never": 1}, "1 never"),
        ({"rows_never": 1, "datasets": {}}, ""),
    ],
)
def test_the_verdict_names_what_was_broken(change, broken):
    said = [promise for promise, kept in _promises([], {**SUMMARY, **change}, _Victims()).items() if not kept]
    assert len(said) == bool(broken)
    assert broken in "".join(said)


def test_a_job_that_left_no_log_has_not_finished():
    promises = _promises([], {**SUMMARY, "status": "RUNNING"}, _Victims(), ConfigError("no such thing"))
    assert [promise for promise, kept in promises.items() if not kept] == [
        "the job finished: ConfigError no such thing"
    ]


@pytest.mark.parametrize(
    ("workers", "executors", "cause", "restored_from", "broken"),
    [
        ({"w1"}, (), "w1 lost: process died", None, "3 were undone"),  # w2 was not struck, and had held them
        ({"w1"}, (), "w1 lost: process died", "uri", "3 were undone"),
        ({"w3"}, (), "w3 lost: process died", "uri", "3 were undone"),  # it had not made a step
        ({"w1", "w2"}, (), "w2 lost: executor lost", None, ""),  # before there was any checkpoint
        ({"w1", "w2"}, (), "w2 lost: executor lost", "uri", ""),
        ({"w1"}, ("e2",), "w2 lost: executor lost", "uri", ""),
        ({"w2"}, ("e1",), "w2 lost: process died", "uri", "3 were undone"),  # w1 was told to go, and is still there
        ((), (), "guard: loss is nan at step 9", "uri", ""),
    ],
)
def test_steps_may_be_undone_where_all_who_held_them_were_struck(workers, executors, cause, restored_from, broken):
    def world(generation, members, cause, restored_from=None):
        gone = {"joined": members, "lost": (), "left": (), "source": members[0], "step": 7}
        return ev.GenerationFormed(
            at=1, generation=generation, members=members, cause=cause, restored_from=restored_from, **gone
        )

    def spawned(worker):
        return ev.WorkerSpawned(at=0, worker=worker, agent="a", host="h", executor=f"e{worker[1:]}", pid=1)

    log = [
        *map(spawned, ("w1", "w2", "w3")),
        world(1, ("w1", "w2"), "start"),
        ev.StepsCommitted(at=2, generation=1, first_step=10, times=(2,)),
        world(2, ("w3",), "joined"),
        ev.GenerationRunning(at=2, generation=2, seconds=1),  # it has not received the state yet
        ev.StepsCommitted(at=2, generation=2, first_step=11, times=(2,), missing=1),  # told by one that is gone
        ev.WorkerLost(at=2, worker="w2", cause="executor lost"),
        ev.StepsRolledBack(at=3, from_step=10, to_step=7, cause=cause),
        world(3, ("w4", "w5"), cause, restored_from),
        world(4, ("w4",), "w5 lost"),
    ]
    said = [
        promise for promise, kept in _promises(log, SUMMARY, _Victims(set(workers), set(executors))).items() if not kept
    ]
    assert len(said) == bool(broken)
    assert broken in "".join(said)


def test_a_world_is_hit_only_while_it_runs():
    def spawned(worker):
        return ev.WorkerSpawned(at=0, worker=worker, agent="a", host="h", executor=worker[1:], pid=int(worker[1:]))

    def seen(log):
        out = _Seen()
        for event in log:
            out.add(event)
        return out

    formed = ev.GenerationFormed(
        at=1, generation=1, members=("w1", "w2"), joined=(), lost=(), left=(), cause="start", source="w1", step=0
    )
    log = [spawned("w1"), spawned("w2"), formed]
    assert seen(log).world == ()
    log += [
        ev.GenerationRunning(at=2, generation=1, seconds=1),
        ev.StepsCommitted(at=3, generation=1, first_step=4, times=(3, 4)),
    ]
    assert [member.worker for member in seen(log).world] == ["w1", "w2"]
    assert (seen(log).commits, seen(log).step) == (2, 5)
    assert [m.worker for m in seen([*log, ev.WorkerDraining(at=5, worker="w1", reason="spot")]).world] == ["w2"]
    assert seen([*log, ev.GenerationEnding(at=5, generation=1, cause="c")]).world == ()


# ---- the command

TRAIN = """
    import os

    def train(ctx, stop):
        import elastic_spark as es
        import horovod.torch as hvd
        import time
        import torch

        model = torch.nn.Linear(1, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        state = es.ElasticState(model=model, optimizer=optimizer)

        @hvd.elastic.run
        def loop(state):
            for batch in ctx.batches("train", state, epochs=10_000):
                optimizer.zero_grad()
                model(batch["x"].float()[:, None]).sum().backward()
                optimizer.step()
                time.sleep(0.02)
                state.commit()
                if hvd.allreduce(torch.tensor(float(os.path.exists(stop))), op=hvd.Sum, name="stop") > 0:
                    return state.step

        return loop(state)
"""


@pytest.mark.timeout(280)
def test_a_job_under_churn(tmp_path: Path) -> None:
    """A machine comes, an executor is killed, another machine gets a spot notice: exit code 0."""
    script, stop = tmp_path / "mine.py", tmp_path / "stop"
    script.write_text(textwrap.dedent(TRAIN))
    pq.write_table(pa.table({"x": [1.0] * 640}), tmp_path / "rows.parquet")
    words = ["chaos", f"{script}:train", "--data", f"train={tmp_path}/rows.parquet", "--arg", f"stop={stop}"]
    words += ["--machines", "2", "--blows", "3", "--churn-seed", str(SEED), "--every", "10", "--verbose", "0"]
    words += ["--status-port", "0", "--global-batch", "16", "--work-dir", str(tmp_path / "work"), "--job-name", "mine"]
    with (tmp_path / "out.txt").open("w") as out:
        command = [sys.executable, "-m", "elastic_spark.cli", *words]
        job = subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True)
        try:
            assert job.stderr is not None
            blows, seen, link = [], [], ""
            for line in job.stderr:
                if "live status at " in line:
                    link = line.split()[-1]
                if line.startswith("blow "):
                    blows.append(line)
                    with urllib.request.urlopen(link.replace("/?", "/metrics?"), timeout=20) as reply:
                        seen.append(int(re.search(r"_steps_committed_total (\d+)", reply.read().decode())[1]))
                    if len(blows) == 3:
                        stop.touch()
            code = job.wait(60)
        finally:
            job.kill()
            job.wait()
    told = (tmp_path / "out.txt").read_text()
    assert code == 0, told + "".join(blows)
    assert "BROKEN" not in told
    assert 0 < seen[0] <= seen[1] <= seen[2], "the live page counts along"
    assert seen[0] < seen[2]
    assert not (tmp_path / "work" / "mine" / "status-link").exists()
    assert "3 of 3 blows fell" in told
    assert "kept    each row once an epoch" in told
    assert "kept    no process was left behind" in told


SEED = next(
    seed
    for seed in range(1000)
    if [blow.kind for blow in schedule(seed, 3, 2, 3)] == ["add machine", "kill executor", "decommission"]
)


def test_what_would_be(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(textwrap.dedent(TRAIN))
    done = CliRunner().invoke(main, ["chaos", f"{script}:train", "--dry-run", "--blows", "4", "-np", "2"])
    assert done.exit_code == 0, done.output
    assert done.stdout.count(" steps: ") == 4
    assert "num_proc: 2\n" in done.stdout
    assert "max_num_proc: 4\n" in done.stdout
    assert "tracking: false\n" in done.stdout
    wrong = CliRunner().invoke(main, ["chaos", f"{script}:nothing"])
    assert wrong.exit_code == 2
    assert "has no function 'nothing'" in wrong.stderr


def outcome(**changes):
    return Outcome(**{"due": 3, "struck": 3, "promises": {"rows": True, "end": True}, **changes})


@pytest.mark.parametrize(
    ("told", "code", "said"),
    [
        (outcome(), 0, "kept    rows"),
        (outcome(promises={"rows": False, "end": True}), 1, "BROKEN  rows"),
        (outcome(struck=2, promises={"rows": False}), 1, "2 of 3 blows fell"),
        (outcome(struck=2), 5, "nothing is shown by that"),
        (outcome(error=UserCodeFailed("boom", "trace"), promises={"end": False}), 1, "boom"),
        (outcome(error=NotEnoughWorkers("few"), struck=0), 3, "few"),
    ],
)
def test_the_exit_code_tells_the_verdict(told, code, said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a real run may come to, each made by hand here."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(TRAIN))
    monkeypatch.setattr("elastic_spark.testing.chaos.chaos", lambda *_, **__: told)
    done = CliRunner().invoke(main, ["chaos", f"{tmp_path}/mine.py:train", "--work-dir", str(tmp_path)])
    assert (done.exit_code, said in done.output) == (code, True), done.output
