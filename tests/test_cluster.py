"""The test cluster itself: real JVMs, killed, frozen, taken away and added, and nothing of it left behind."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import numpy as np
import pytest

from elastic_spark.core.events import GenerationFormed, WorkerSpawned, to_json
from elastic_spark.errors import ConfigError, EnvironmentUnfit
from elastic_spark.testing import StandaloneCluster, keeper
from elastic_spark.testing.archive import ClassArchive
from elastic_spark.testing.cluster import JVM_FLAGS
from elastic_spark.testing.counting import Step, assert_agree, assert_exact, read_steps

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def cluster():
    with StandaloneCluster(workers=2) as cluster:
        yield cluster
    assert cluster.processes() == []
    assert not cluster.directory.exists()


@pytest.fixture(scope="module")
def spark(cluster):
    session = cluster.session()
    cluster.wait_for(lambda: registered(session) == 2, LIMIT_S, "2 registered executors")
    return session


def registered(spark):
    return spark.sparkContext._jsc.sc().getExecutorIds().size()


def java_can_make_one(cluster):
    """Whether a small program of Spark's leaves an archive where the cluster's would lie."""
    env = {**os.environ, **cluster._env()}
    archive = ClassArchive(env, cluster._spark_home, JVM_FLAGS)
    try:
        with tempfile.TemporaryDirectory(dir=archive.conf_dir.parent) as folder:
            made = Path(folder, "small.jsa")
            program = ["org.apache.spark.launcher.Main", "org.apache.spark.deploy.master.Master"]
            options = [f"-XX:ArchiveClassesAtExit={made}", "-cp", f"{cluster._spark_home}/jars/*"]
            subprocess.run([archive._java, *options, *program], env=env, capture_output=True, timeout=60, check=False)
            return made.exists()
    except OSError:
        return False


def test_its_jvms_use_the_archive_of_classes_where_there_is_one(cluster, spark):
    used = "-XX:SharedArchiveFile=" in cluster._jvm_flags
    assert used or not java_can_make_one(cluster), "this Java can, and the cluster did not"
    running = [process for process in cluster.processes() if "org.apache.spark" in process.command]
    for program in ("Master", "Worker", "CoarseGrainedExecutorBackend"):
        found = [process.pid for process in running if f".{program}" in process.command]
        assert found, program
        mapped = ["classes.jsa" in Path(f"/proc/{pid}/maps").read_text() for pid in found]
        assert mapped == [used] * len(found), program


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def listening(pids):
    """Local (address, port) of the listening TCP sockets of these processes."""
    inodes = set()
    for pid in pids:
        for item in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(item))
            except OSError:
                continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                address, _, port = words[1].partition(":")
                found.append((address, int(port, 16)))
    return found


def test_one_executor_on_each_worker(cluster, spark):
    executors = cluster.executors(spark.sparkContext.applicationId)
    assert {executor.worker for executor in executors} == {worker.name for worker in cluster.workers}
    assert {executor.host for executor in executors} == {"127.0.0.1"}
    assert len({executor.pid for executor in executors}) == 2
    assert spark.range(10).count() == 10


def test_listens_on_loopback_only_and_not_on_the_ports_of_others(cluster, spark):
    sockets = listening(process.pid for process in cluster.processes())
    assert len(sockets) >= 3
    assert {address for address, _ in sockets} <= {"0100007F", "0000000000000000FFFF00000100007F"}
    assert not {port for _, port in sockets} & {7077, 8080, 8081, 4040}


def test_processes_tells_daemons_from_the_applications(cluster, spark):
    own = {worker.pid for worker in cluster.workers}
    assert own <= {process.pid for process in cluster.processes()}
    applications = cluster.processes(daemons=False)
    assert not own & {process.pid for process in applications}
    assert {executor.pid for executor in cluster.executors()} <= {process.pid for process in applications}


def test_a_killed_executor_is_gone_and_spark_brings_another(cluster, spark):
    victim = cluster.kill_executor(cluster.executors()[0].id)
    assert victim not in cluster.executors()
    cluster.wait_for(lambda: len(cluster.executors()) == 2, LIMIT_S, "the executor that replaces it")
    with pytest.raises(LookupError, match="executor 4711: 0 match"):
        cluster.kill_executor("4711")


def test_a_frozen_process_stands_still_until_thawed(cluster, spark):
    pid = cluster.executors()[0].pid
    cluster.freeze(pid)
    cluster.wait_for(lambda: state(pid) == "T", LIMIT_S, "the freeze")
    cluster.thaw(pid)
    cluster.wait_for(lambda: state(pid) != "T", LIMIT_S, "the thaw")


def test_a_worker_comes_gets_notice_and_goes_with_everything_that_runs_on_it(cluster, spark):
    worker = cluster.add_worker()
    cluster.wait_for(lambda: registered(spark) == 3, LIMIT_S, "the executor of the new worker")
    (executor,) = (item for item in cluster.executors() if item.worker == worker.name)

    def leave_a_child(_):
        return subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL).pid

    def sleepers():
        return [item for item in cluster.processes() if item.command == "sleep 600"]

    spark.sparkContext.parallelize(range(12), 12).map(leave_a_child).collect()
    cluster.wait_for(lambda: any(item.worker == worker.name for item in sleepers()), LIMIT_S, "a child on the worker")

    backend = spark.sparkContext._jsc.sc().schedulerBackend()
    assert backend.isExecutorActive(executor.id)
    cluster.decommission(worker)
    cluster.wait_for(lambda: not backend.isExecutorActive(executor.id), LIMIT_S, "the notice")

    others = [item for item in sleepers() if item.worker != worker.name]
    cluster.remove_worker(worker)
    assert worker not in cluster.workers
    assert sleepers() == others
    assert all(executor.worker != worker.name for executor in cluster.executors())


def test_spark_submit_runs_a_script_with_its_arguments_conf_and_environment(cluster, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        from pyspark.sql import SparkSession
        spark = SparkSession.builder.getOrCreate()
        print("answer", sys.argv[1], os.environ["ES_TEST"], spark.conf.get("spark.es.test"), flush=True)
        sys.exit(3)
        """)
    )
    with (tmp_path / "out").open("w") as out:
        submitted = cluster.spark_submit(
            script, "one", conf={"spark.es.test": "three"}, env={"ES_TEST": "two"}, stdout=out
        )
        assert submitted.wait(timeout=LIMIT_S) == 3
    assert "answer one two three" in (tmp_path / "out").read_text()


def test_a_submitted_driver_is_told_before_it_is_killed(tmp_path):
    """SIGTERM reaches the Python driver and not only the launcher, so that it can say how its job ended."""
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent(f"""
        import pathlib, signal, sys, time
        folder = pathlib.Path({str(tmp_path)!r})
        def told(*_):
            time.sleep(0.5)  # a farewell takes a while, and is waited for
            (folder / "told").touch()
            sys.exit()
        signal.signal(signal.SIGTERM, told)
        (folder / "ready").touch()
        signal.pause()
        """)
    )
    with StandaloneCluster(workers=0) as cluster:
        cluster.spark_submit(script)
        cluster.wait_for((tmp_path / "ready").exists, LIMIT_S, "the driver")
    assert (tmp_path / "told").exists()


def test_nothing_is_left_when_the_owner_is_killed(tmp_path):
    script = textwrap.dedent("""
        import signal
        from elastic_spark.testing import StandaloneCluster
        cluster = StandaloneCluster(workers=1).start()
        print(cluster._marker, cluster.directory, flush=True)
        signal.pause()
        """)
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        marker, directory = owner.stdout.readline().split()
        assert len(keeper.marked(marker)) == 2
        owner.kill()
        owner.wait()
        StandaloneCluster().wait_for(lambda: not Path(directory).exists(), LIMIT_S, "the keeper's work")
        assert keeper.marked(marker) == {}
        assert bystander.poll() is None
    finally:
        owner.kill()
        bystander.kill()
        bystander.wait()
        owner.stdout.close()


def test_a_daemon_that_does_not_start_is_told_with_its_log(tmp_path):
    cluster = StandaloneCluster(workers=1, env={"JAVA_HOME": str(tmp_path)})
    with pytest.raises(EnvironmentUnfit, match=r"(?s)Spark's master ended with exit code .*Java.*No such file"):
        cluster.start()
    assert cluster.processes() == []
    assert not cluster.directory.exists()


def test_wrong_sizes_are_told_with_their_values():
    with pytest.raises(ConfigError, match="workers=-1 and cores=1"):
        StandaloneCluster(workers=-1)


def test_wait_for_says_what_it_waited_for():
    with pytest.raises(TimeoutError, match="waited 0 s for rain; last seen: 0"):
        StandaloneCluster().wait_for(lambda: 0, 0.01, "rain")


def test_ranks_are_those_of_the_newest_generation(tmp_path):
    def spawned(worker, executor):
        return WorkerSpawned(at=1.0, worker=worker, agent="a1", host="h", executor=executor, pid=7)

    def formed(generation, *members):
        return GenerationFormed(
            at=1.0, generation=generation, members=members, joined=(), lost=(), left=(), cause="", source="w0", step=0
        )

    events = [spawned("w0", "0"), spawned("w1", "1"), formed(1, "w0", "w1"), spawned("w2", "2"), spawned("w3", "2")]
    log = tmp_path / "events.jsonl"
    log.write_text("".join(to_json(event) + "\n" for event in [*events, formed(2, "w1", "w3", "w2")]))
    assert StandaloneCluster().ranks(log) == {"1": 0, "2": 1}


def test_counting_names_lost_and_repeated_rows():
    assert_exact(np.full(5, 2.0), epochs=2)
    with pytest.raises(AssertionError, match=r"1 lost: ids 1 \(0 times\); 1 repeated: ids 3 \(2 times\)"):
        assert_exact([1.0, 0.0, 1.0, 2.0], epochs=1)
    with pytest.raises(AssertionError, match=r"2 not a count: ids 0 \(nan times\), 1 \(1.5 times\)"):
        assert_exact([float("nan"), 1.5], epochs=1)


def test_counting_lines_survive_a_torn_write_and_show_disagreement(tmp_path):
    steps = [Step(n, rank, 2, 40 + rank, 3, 0.75, f"{n}abc") for n in (1, 2) for rank in (0, 1)]
    for step in steps:
        with (tmp_path / f"{step.pid}.steps").open("a") as log:
            log.write(step.to_line())
    with (tmp_path / "40.steps").open("a") as log:
        log.write("step=3 rank=0 si")
    assert read_steps(tmp_path) == steps
    assert_agree(steps)
    with pytest.raises(AssertionError, match=r"step 2: .*rank 0 of 2 \(pid 40\): 2abc, .*rank 9 .*: other"):
        assert_agree([*steps, Step(2, 9, 2, 9, 3, 0.75, "other")])


def test_signals_do_not_reach_the_cluster_through_the_terminal(cluster):
    """Each daemon leads a session of its own: Ctrl-C of the owner ends the cluster in order, not by halves."""
    for worker in cluster.workers:
        assert os.getsid(worker.pid) == worker.pid != os.getsid(0)
        os.kill(worker.pid, signal.SIGCONT)


def test_a_session_of_another_cluster_replaces_the_one_before(cluster, spark):
    """A process has one SparkContext at most: the newest `session` wins, each with a JVM and settings of its own."""
    own = {process.pid for process in cluster.processes()}
    with StandaloneCluster(workers=0) as other:
        session = other.session(**{"spark.es.test": "other"})
        assert session.sparkContext.master == other.master_url
        assert spark.sparkContext._jsc is None
        assert len(own - {process.pid for process in cluster.processes()}) >= 3  # the JVM, and with it the executors
