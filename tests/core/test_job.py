"""The decisions of a job, by example: short scripts of inputs at given times. Every turn is checked by `job_model`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from job_model import Script, of, one

from elastic_spark.core import events as ev
from elastic_spark.core import job as core
from elastic_spark.core.policy import Probation

# ------------------------------------------------------------------------------------------------------- the start


def test_the_world_forms_as_soon_as_the_wanted_workers_are_ready() -> None:
    run = Script(num_proc=3)
    run.hosts(3)
    one(run(core.Ready("w0"), 0.5), ev.WorkerReady, worker="w0", seconds=0.5)
    assert of(run.ready("w1"), core.Form) == []
    assert run.job.generation == 0
    form = one(run.ready("w2"), core.Form, generation=1, members=("w0", "w1", "w2"), cause="start")
    assert (form.joined, form.lost, form.left, form.step, form.restore) == (form.members, (), (), -1, True)
    assert run.stages() == {"w0": "called", "w1": "called", "w2": "called"}
    assert of(run.initialise("w0", "w1"), ev.GenerationRunning) == []
    run.now += 0.25
    one(run.initialise("w2"), ev.GenerationRunning, generation=1, seconds=0.25)


def test_an_agent_that_registers_twice_gets_one_worker() -> None:
    run = Script()
    one(run.agent(0), core.Spawn, agent="a0", worker="w0")
    assert run.agent(0) == []


def test_fewer_than_wanted_start_when_nobody_comes_for_settle_s() -> None:
    run = Script(num_proc=3, settle_s=3.0)
    run.hosts(2)
    run.ready("w0")
    assert of(run.wait(4.0, "*"), core.Form) == [], "w1 is still about to come"
    run.ready("w1")
    assert of(run.wait(2.8, "*"), core.Form) == []
    one(run.wait(0.4, "*"), core.Form, members=("w0", "w1"))


def test_a_worker_that_keeps_failing_does_not_hold_up_the_start() -> None:
    run = Script(num_proc=2, settle_s=1.0)
    run.hosts(2)
    run.ready("w0")
    run.down("w1", code=1)
    assert of(run.wait(4.0, "*"), core.Form) == [], "one more time"
    one(run.down("w2", code=1), core.Form, members=("w0",))


def test_an_agent_that_comes_renews_the_wait_for_others_even_where_its_workers_fail() -> None:
    run = Script(num_proc=2, settle_s=3.0)
    run.hosts(1)
    run.ready("w0")
    run.wait(2.5, "*")
    run.agent(1)
    run.down("w1", code=1)
    run.wait(0.5, "*")
    run.down("w2", code=1)
    assert of(run.wait(2.0, "*"), core.Form) == []
    one(run.wait(1.0, "*"), core.Form, members=("w0",))


def test_an_agent_that_goes_between_two_workers() -> None:
    run = Script(num_proc=2, settle_s=1.0)
    run.hosts(2)
    run.ready("w0")
    run.down("w1", code=1)
    assert of(run(core.AgentDown("a1", "gone")), ev.WorkerLost) == []
    one(run.wait(1.2, "*"), core.Form, members=("w0",))


def test_too_few_at_start_timeout_ends_the_job_with_the_numbers() -> None:
    run = Script(num_proc=4, min_num_proc=3, start_timeout=20.0)
    run.hosts(2)
    run.ready("w0", "w1")
    run.wait(19.9, "*")
    assert run.ended is None
    run.wait(0.3, "*")
    assert (run.ended.status, run.ended.kind) == ("FAILED", "NotEnoughWorkers")
    for words in ("asked for 4", "min_num_proc=3", "got 2", "start_timeout=20 s", "2 executors' slots"):
        assert words in run.ended.error


def test_enough_for_the_minimum_at_start_timeout_start() -> None:
    run = Script(num_proc=3, min_num_proc=1, start_timeout=2.0, settle_s=60.0)
    run.hosts(1)
    run.ready("w0")
    one(run.wait(2.3, "*"), core.Form, members=("w0",))


def test_more_than_max_num_proc_stay_spares() -> None:
    run = Script(num_proc=2, max_num_proc=2)
    run.hosts(3)
    run(core.Ready("w2"))
    run(core.Ready("w1"), 0.05)
    run(core.Ready("w0"), 0.05)
    assert run.job.members == ("w2", "w1"), "the longest waiting first"
    run.initialise()
    assert of(run.wait(2.0, "*"), core.Notify) == []


# --------------------------------------------------------------------------------------------------------- losses


def test_a_loss_breaks_the_generation_and_the_survivors_go_on() -> None:
    run = Script(num_proc=3).running()
    effects = run.down("w1", tail="Segmentation fault")
    one(effects, ev.WorkerLost, worker="w1", cause="process died", exit_code=-9, tail="Segmentation fault")
    one(effects, ev.GenerationEnding, generation=1, cause="w1 lost: process died")
    one(effects, core.BreakGeneration, generation=1, workers=("w0", "w2"))
    one(effects, core.Kill, worker="w1", agent="a1")
    one(effects, core.Spawn, agent="a1", worker="w3")
    assert of(run.ask("w0", step=10), core.Form) == []
    form = one(run.ask("w2", step=11), core.Form, generation=2, members=("w2", "w0"), lost=("w1",), joined=())
    assert (form.step, form.restore, form.cause) == (11, False, "w1 lost: process died")
    one(run.initialise(), ev.GenerationRunning, generation=2)


def test_a_spare_is_promoted_in_the_same_reset() -> None:
    run = Script(num_proc=2, max_num_proc=2)
    run.hosts(3)
    run.ready("w0", "w1", "w2")
    run.initialise()
    run.down("w0")
    one(run.ask("w1"), core.Form, members=("w1", "w2"), joined=("w2",), lost=("w0",))


def test_a_second_loss_right_after_the_first_breaks_again_and_is_part_of_the_same_reset() -> None:
    run = Script(num_proc=4).running()
    run.down("w0")
    run.ask("w1")
    one(run.down("w2"), core.BreakGeneration, workers=("w3",))
    one(run.ask("w3"), core.Form, members=("w1", "w3"), lost=("w0", "w2"))
    assert run.job.resets == 1


def test_a_loss_while_the_others_already_ask_forms_at_once() -> None:
    run = Script(num_proc=3).running()
    one(run.ask("w0", "w1"), ev.GenerationEnding, cause="collective failed")
    form = one(run.down("w2"), core.Form, members=("w0", "w1"), lost=("w2",))
    assert form.cause == "w2 lost: process died", "what the failed collectives came from"


def test_a_loss_while_initialising() -> None:
    run = Script(num_proc=3)
    run.hosts(3)
    run.ready("w0", "w1", "w2")
    run.initialise("w0")
    one(run.down("w1"), core.BreakGeneration, generation=1, workers=("w0", "w2"))
    assert of(run.initialise("w2"), ev.GenerationRunning) == [], "too late: the generation is ending"
    run.ask("w2", reason="init failed", step=-1)
    one(run.ask("w0", step=-1), core.Form, generation=2, members=("w0", "w2"), step=-1, restore=True)


def test_a_newcomer_lost_before_its_first_step() -> None:
    run = Script(num_proc=2, max_num_proc=3).running()
    run.agent(2)
    run.ready("w2")
    run.wait(0.5, "*")
    one(run.ask(reason="reset"), core.Form, joined=("w2",), cause="joined")
    run.initialise("w0")
    run.down("w2")
    run.ask("w1", reason="init failed")
    one(run.ask("w0"), core.Form, generation=3, members=("w0", "w1"), lost=("w2",), joined=())


def test_an_executor_takes_its_workers_along_and_they_are_fenced() -> None:
    run = Script(num_proc=3).running()
    effects = run(core.AgentDown("a1", "its connection ended"))
    one(effects, ev.AgentLost, agent="a1", cause="its connection ended")
    one(effects, ev.WorkerLost, worker="w1", cause="executor lost")
    one(effects, core.Kill, worker="w1", agent="a1")
    assert of(effects, core.Spawn) == []
    assert run(core.AgentDown("a1", "its connection ended")) == []
    run(core.Asked("w0", 1, 9, "reset"))
    run(core.Asked("w2", 1, 9, "reset"))
    assert (run.job.members, run.job.last_error) == (("w0", "w2"), "")


def test_all_lost_start_again_from_a_checkpoint_when_newcomers_are_ready() -> None:
    run = Script(num_proc=3, settle_s=2.0).running()
    for number in range(3):
        run(core.AgentDown(f"a{number}", "its connection ended"))
    for number in range(3, 6):
        run.agent(number)
    assert of(run.ready("w3", "w4"), core.Form) == []
    form = one(run.ready("w5"), core.Form, generation=2, members=("w3", "w4", "w5"), lost=("w0", "w1", "w2"))
    assert (form.restore, form.step) == (True, -1)


def all_processes_die(run: Script) -> None:
    for worker in run.job.members:
        run.down(worker)


def test_all_processes_lost_the_newest_snapshot_in_memory_is_brought_back() -> None:
    run = Script(num_proc=3).running()
    all_processes_die(run)
    run(core.Ready("w3", 7, 1))
    run(core.Ready("w4", 9, 1))
    form = one(run(core.Ready("w5", 8, 1)), core.Form, members=("w4", "w5", "w3"), found=9)
    assert (form.restore, form.step) == (True, -1)


def test_what_comes_from_memory_is_waited_for_but_not_for_ever() -> None:
    run = Script(num_proc=2, max_num_proc=2, settle_s=0.1, memory_s=2.0).running()
    run(core.Tick(5), core.TICK_S)
    for number in (2, 3):
        run.agent(number)
    run.ready("w2", "w3")
    assert of(run.down("w0"), core.Form) == []
    assert of(run.down("w1"), core.Form) == []  # two are ready, and two who may have found something are starting
    assert of(run(core.Ready("w4", 5, 1)), core.Form) == []
    one(run(core.Ready("w5", 6, 1)), core.Form, members=("w5", "w4"), found=6)
    run.initialise()
    all_processes_die(run)
    one(run.wait(2.2, "*"), core.Form, members=("w2", "w3"), found=-1)


def test_a_newcomer_left_alone_without_the_state_waits_for_what_the_others_left_in_memory() -> None:
    run = Script(num_proc=2, settle_s=0.1).running()
    run.down("w1")
    run.ask("w0", step=5)
    run.initialise()
    run.ready("w2")
    run.wait(0.5, "*")
    run.ask("w0", step=8, reason="reset")
    run.down("w0")
    assert of(run.ask("w2", step=-1), core.Form) == []
    one(run(core.Ready("w3", 8, 2)), core.Form, members=("w3", "w2"), joined=("w3",), step=-1, found=8, restore=True)


def test_memory_is_waited_for_in_a_world_that_came_from_memory_too() -> None:
    """The one that brought the state back is lost before the other one has received it."""
    run = Script(num_proc=2, settle_s=0.1).running()
    run(core.Tick(9), core.TICK_S)
    all_processes_die(run)
    run(core.Ready("w2", 9, 1))
    one(run.ready("w3"), core.Form, members=("w2", "w3"), found=9)
    run.initialise()
    run.down("w2")
    assert of(run.ask("w3", step=-1), core.Form) == []
    one(run(core.Ready("w4", 9, 1)), core.Form, members=("w4", "w3"), found=9)


def test_memory_is_waited_for_on_an_agent_whose_workers_keep_failing() -> None:
    run = Script(num_proc=1, max_num_proc=1, settle_s=0.1, spawn_limit=5).running()
    run(core.Tick(9), core.TICK_S)
    run.agent(1)
    run.ready("w1")
    run.down("w0")
    for number in (2, 3, 4):
        assert of(run.down(f"w{number}", "did not start"), core.Form) == []
        run.wait(2.0, "*")
    one(run(core.Ready("w5", 9, 1)), core.Form, members=("w5",), found=9)


def test_memory_on_a_suspect_host_counts() -> None:
    run = Script(num_proc=2, max_num_proc=2).running()
    run(core.Tick(9), core.TICK_S)
    run.agent(2)
    run.ready("w2")
    run.job = replace(run.job, probation=Probation({"host0": (9.0, run.now)}))
    all_processes_die(run)
    run.ready("w4")
    one(run(core.Ready("w3", 9, 1)), core.Form, members=("w3", "w2"), found=9)


def test_what_those_who_have_returned_hold_is_waited_for_when_rank_0_is_lost() -> None:
    """Their agents' memory has the end. The next worker of rank 0's agent finds less, and comes first."""
    run = Script(num_proc=1, max_num_proc=2, settle_s=0.2).running()
    run.agent(1)
    run.ready("w1")
    run.wait(0.5, "*")
    run.ask(step=20, reason="reset")
    run.initialise()
    run(core.Tick(40), core.TICK_S)
    run(core.Finished("w1"))
    run.down("w0")
    assert of(run(core.Ready("w2", 30, 2)), core.Form) == []
    one(run(core.Ready("w3", 40, 2)), core.Form, members=("w3", "w2"), found=40)


def test_where_the_newest_step_is_found_others_are_waited_for_no_longer_than_usual() -> None:
    run = Script(num_proc=2, settle_s=1.0).running()
    run(core.Tick(9), core.TICK_S)
    run.agent(2)
    run.agent(3)
    run.ready("w2", "w3")
    all_processes_die(run)
    assert of(run(core.Ready("w4", 9, 1)), core.Form) == []
    one(run.wait(1.1, "*"), core.Form, members=("w4", "w2"), found=9)


def test_after_steps_were_undone_the_newest_step_is_the_one_that_is_held_now() -> None:
    run = Script(num_proc=2, settle_s=1.0).running()
    run(core.Tick(9), core.TICK_S)
    run(core.Tick(3), core.TICK_S)  # after a roll-back
    run.agent(2)
    run.agent(3)
    run.ready("w2", "w3")
    all_processes_die(run)
    assert of(run(core.Ready("w4", 3, 1)), core.Form) == []
    one(run.wait(1.1, "*"), core.Form, members=("w4", "w2"), found=3)


def test_the_wait_for_memory_begins_with_the_last_loss_and_ends_with_elastic_timeout() -> None:
    """The only holder is lost long after its world began to end."""
    run = Script(num_proc=2, max_num_proc=2, elastic_timeout=5.0, settle_s=0.1).running()
    run(core.Tick(9), core.TICK_S)
    run.down("w1")
    run.ready("w2")
    run.wait(4.5, "*")
    run.down("w0")
    run.agent(2)
    run.ready("w4")
    assert of(run.wait(4.0, "*"), core.Form) == []
    one(run.wait(1.2, "*"), core.Form, members=("w2", "w4"), found=-1)


def test_who_alone_holds_the_state_is_told() -> None:
    run = Script(num_proc=2, max_num_proc=3).running()
    run.down("w1")
    one(run.ask("w0", step=9), core.Form, members=("w0",), sole_holder=False)
    run.initialise()
    run.ready("w2")
    run.agent(2)
    run.ready("w3")
    run.wait(0.5, "*")
    one(run.ask(step=12, reason="reset"), core.Form, members=("w0", "w2", "w3"), sole_holder=True)
    run.initialise("w0", "w2")
    run.down("w3")
    run.ask("w0", step=12)
    one(run.ask("w2", step=-1), core.Form, members=("w0", "w2"), joined=(), sole_holder=True)
    run.initialise()
    run.ready("w4")
    run.wait(0.5, "*")
    one(run.ask(step=15, reason="reset"), core.Form, members=("w0", "w2", "w4"), sole_holder=False)


def test_memory_is_not_waited_for_where_the_guard_goes_back_or_no_step_was_ever_told() -> None:
    run = Script(num_proc=2, settle_s=0.1, guard="rollback").running()
    run.down("w0")
    one(run.ask("w1", step=-1), core.Form, members=("w1",), step=-1)  # a function that tells no step
    run.initialise()
    run(core.Tick(9), core.TICK_S)
    run(core.Alarmed(run.job.generation, 5, "loss is nan"))
    run.agent(2)
    run.ready("w2", "w3")
    one(run.down("w1"), core.Form, members=("w2", "w3"), before=5)  # its successor, on its agent, is starting


def test_what_a_survivor_holds_is_preferred_to_memory() -> None:
    run = Script(num_proc=2).running()
    run.down("w1")
    run.ask("w0", step=5)
    run.initialise()
    run(core.Ready("w2", 9, 1))
    run.wait(0.5, "*")
    one(run.ask("w0", step=6, reason="reset"), core.Form, members=("w0", "w2"), step=6, found=-1, restore=False)


def test_what_is_left_of_an_undone_story_is_not_brought_back() -> None:
    """The first world's snapshot of step 9 comes late: the job has begun anew from a checkpoint meanwhile."""
    run = Script(num_proc=1, max_num_proc=1, settle_s=0.5, memory_s=0.5).running()
    run(core.Tick(9), core.TICK_S)
    run.agent(1)
    run.ready("w1")
    run.down("w0")
    one(run.wait(1.0, "*"), core.Form, members=("w1",), found=-1, restore=True)
    run.initialise()
    run(core.Ready("w2", 9, 1))
    run.down("w1")
    one(run.wait(0.7, "*"), core.Form, generation=3, members=("w2",), found=-1)


def test_what_was_brought_back_once_may_be_brought_back_again() -> None:
    run = Script(num_proc=1).running()
    run.down("w0")
    one(run(core.Ready("w1", 9, 1)), core.Form, found=9)
    run.down("w1")
    one(run(core.Ready("w2", 9, 1)), core.Form, generation=3, found=9)


def test_everybody_waits_in_a_collective_and_nobody_is_left_to_come() -> None:
    run = Script(num_proc=2, stall_after_s=10.0).running()
    for _ in range(4):
        run(core.Heard("w0", "in a collective", 10.5))
        run(core.Heard("w1", "evaluating", 0.0))
        run(core.Heard("w0"))  # by its agent, which knows of no collectives
        assert of(run(core.Tick(), core.TICK_S), ev.GenerationEnding) == []
    run(core.Finished("w1"))
    ending = one(run(core.Tick(), core.TICK_S), ev.GenerationEnding)
    assert ending.cause == "w0 wait in collectives for 10 s, and nobody is left to come"


def test_all_lost_and_nobody_comes() -> None:
    run = Script(num_proc=2, elastic_timeout=10.0).running()
    run(core.AgentDown("a0", "gone"))
    run(core.AgentDown("a1", "gone"))
    run.wait(9.5, "*")
    assert run.ended is None
    run.wait(1.0, "*")
    assert run.ended.kind == "NotEnoughWorkers"
    assert "elastic_timeout=10 s" in run.ended.error


def test_below_the_minimum_waits_and_goes_on_when_refilled() -> None:
    run = Script(num_proc=3, min_num_proc=3).running()
    run.down("w0")
    assert of(run.ask(), core.Form) == []
    (warned,) = of(run.wait(6.0, "*"), ev.Warned)
    assert warned.message == (
        "w1, w2 wait for more workers (num_proc=3, min_num_proc=3; 0 are ready, 1 are starting) for 5 s "
        "(w0 lost: process died)"
    )
    one(run.ready("w3"), core.Form, members=("w1", "w2", "w3"), joined=("w3",), lost=("w0",))


def test_below_the_minimum_for_elastic_timeout_ends_the_job_and_gives_the_last_words() -> None:
    run = Script(num_proc=2, min_num_proc=2, elastic_timeout=8.0).running()
    run.down("w0", tail="MemoryError")
    run.ask()
    run.wait(7.8, "*")
    assert run.ended is None
    run.wait(0.5, "*")
    assert run.ended.kind == "NotEnoughWorkers"
    assert "got 1 within elastic_timeout=8 s" in run.ended.error
    assert run.ended.error.endswith("MemoryError")


def test_exit_code_0_without_returning_is_a_lost_worker() -> None:
    run = Script(num_proc=2).running()
    effects = run.down("w1", "exited without returning", code=0)
    one(effects, ev.WorkerLost, cause="exited without returning", exit_code=0)
    one(run.ask(), core.Form, members=("w0",), lost=("w1",))


def test_a_process_that_dies_again_and_again_costs_its_agent_the_slot() -> None:
    run = Script(num_proc=2, max_num_proc=2, spawn_limit=2).running()
    for failure in range(2):
        effects = run.down(run.job.agents["a1"].worker)
        one(effects, core.Spawn, agent="a1")
        if failure == 0:
            run.ask()
            run.initialise()
        run.ready(run.job.agents["a1"].worker)
    one(run.down(run.job.agents["a1"].worker), core.Release, agent="a1", reason="its worker failed 3 times in a row")
    assert "a1" not in run.job.agents


def test_a_world_that_runs_forgets_the_failures_of_its_agents() -> None:
    run = Script(num_proc=2, max_num_proc=2).running()
    run.down("w1")
    run.ready("w2")
    run.ask()
    assert run.job.agents["a1"].failures == 1
    run.initialise()
    assert run.job.agents["a1"].failures == 0


# ------------------------------------------------------------------------------------------------ joins and drains


def test_joins_are_gathered_and_announced_until_acted_on() -> None:
    run = Script(num_proc=2, max_num_proc=4, join_delay_s=0.3, notify_every_s=0.15).running()
    run.agent(2)
    run.agent(3)
    run.ready("w2")
    assert of(run.wait(0.2, "*"), core.Notify) == []
    run.ready("w3")
    assert of(run.wait(0.2, "*"), core.Notify) == []
    effects = run.wait(1.0, "*")
    assert 4 <= len(of(effects, core.Notify)) <= 6
    assert of(effects, core.BreakGeneration) == []
    run.ask("w0", step=12, reason="reset")
    form = one(run.ask("w1", step=12, reason="reset"), core.Form, members=("w0", "w1", "w2", "w3"), cause="joined")
    assert (form.joined, form.lost, form.restore, form.step) == (("w2", "w3"), (), False, 12)
    assert run.job.resets == 0


def test_a_spare_that_flaps_does_not_hold_up_a_join() -> None:
    run = Script(num_proc=2, max_num_proc=3, join_delay_s=0.3).running()
    run.agent(2)
    run.agent(3)
    run.ready("w2")
    run.wait(0.2, "*")
    run.ready("w3")
    assert len(of(run.wait(0.2, "*"), core.Notify)) == 1


def test_who_was_notified_and_does_not_ask_is_broken_after_a_while() -> None:
    run = Script(num_proc=2, max_num_proc=3, break_after_s=0.5).running()
    run.agent(2)
    run.ready("w2")
    run.wait(0.5, "*")
    run.ask("w0", reason="reset")
    assert of(run.wait(0.4, "*"), core.BreakGeneration) == []
    one(run.wait(0.4, "*"), core.BreakGeneration, workers=("w1",))
    assert of(run.wait(3.0, "*"), core.BreakGeneration) == []


def test_a_loss_while_a_join_is_under_way_is_not_delayed_by_it() -> None:
    run = Script(num_proc=3, max_num_proc=4).running()
    run.agent(3)
    run.ready("w3")
    run.wait(0.4, "*")
    run.ask("w0", reason="reset")
    one(run.down("w1"), core.BreakGeneration, workers=("w2",))
    one(run.ask("w2"), core.Form, members=("w0", "w2", "w3"), joined=("w3",), lost=("w1",))


def test_a_join_while_losing_is_taken_in_by_the_same_reset() -> None:
    run = Script(num_proc=3).running()
    run.down("w1")
    run.ask("w0")
    run.ready("w3")
    one(run.ask("w2"), core.Form, members=("w0", "w2", "w3"), joined=("w3",), lost=("w1",))


def test_a_newcomer_that_goes_before_the_members_ask_costs_a_reset_and_no_more() -> None:
    run = Script(num_proc=2, max_num_proc=3).running()
    run.agent(2)
    for _ in range(5):
        run.ready(run.job.agents["a2"].worker)
        run.wait(0.5, "*")
        run(core.AgentDown("a2", "gone"))
        one(run.ask(step=-1, reason="reset"), core.Form, members=("w0", "w1"), cause="reset")
        run.initialise()
        run.agent(2)
    assert run.ended is None


def test_uneven_speed_forms_the_same_world_anew_once() -> None:
    run = Script(num_proc=2).running()
    assert of(run(core.Unbalanced(run.job.generation - 1)), core.Notify) == [], "of a world that is over"
    one(run(core.Unbalanced(run.job.generation)), core.Notify, workers=("w0", "w1"))
    assert len(of(run.wait(0.2, "*"), core.Notify)) == 1, "repeated until it is acted on"
    run.ask("w0", reason="reset")
    form = one(run.ask("w1", reason="reset"), core.Form, members=("w0", "w1"), cause="uneven speed")
    assert (form.joined, form.lost, form.left) == ((), (), ())
    run.initialise()
    assert of(run.wait(5.0, "*"), core.Notify) == []


def test_a_loss_on_the_way_to_other_owners_is_said_as_such() -> None:
    run = Script(num_proc=3).running()
    run(core.Unbalanced(run.job.generation))
    run.ask("w0", reason="reset")
    run.down("w1")
    one(run.ask("w2", reason="collective failed"), core.Form, members=("w0", "w2"), cause="w1 lost: process died")


def test_a_draining_member_leaves_in_good_order_and_its_slot_is_freed() -> None:
    run = Script(num_proc=3).running()
    effects = run(core.Draining("e2", "decommissioned"))
    one(effects, ev.WorkerDraining, worker="w2", reason="decommissioned")
    one(effects, core.Notify, workers=("w0", "w1", "w2"))
    assert run(core.Draining("e2", "decommissioned")) == []
    run.ask("w0", "w1", reason="reset")
    effects = run.ask("w2", reason="reset")
    one(effects, core.Form, members=("w0", "w1"), left=("w2",), lost=(), cause="draining")
    one(effects, core.Dismiss, worker="w2", reason="draining")
    one(effects, core.Release, agent="a2", reason="draining")
    one(effects, ev.WorkerLeft, worker="w2", reason="draining")
    assert (run.job.resets, run.job.probation.scores) == (0, {})


def test_a_drain_without_spare_capacity_waits_for_a_replacement() -> None:
    run = Script(num_proc=2, min_num_proc=2).running()
    run(core.Draining("e1", "decommissioned"))
    assert of(run.wait(3.0, "*"), core.Notify) == []
    run.agent(2)
    one(run.ready("w2"), core.Notify)
    one(run.ask(reason="reset"), core.Form, members=("w0", "w2"), joined=("w2",), left=("w1",))


def test_a_draining_member_that_is_lost_first_is_no_failure_of_its_host() -> None:
    run = Script(num_proc=2, min_num_proc=2).running()
    run(core.Draining("e1", "decommissioned"))
    run(core.AgentDown("a1", "its connection ended"))
    assert run.job.probation.scores == {}


def test_a_process_that_dies_on_a_draining_executor_is_not_started_again() -> None:
    run = Script(num_proc=2, min_num_proc=2).running()
    run(core.Draining("e1", "decommissioned"))
    effects = run.down("w1")
    one(effects, core.Release, agent="a1", reason="draining")
    assert of(effects, core.Spawn) == []


def test_workers_that_are_no_members_leave_a_draining_executor_at_once() -> None:
    run = Script(num_proc=1, max_num_proc=1)
    for number in range(4):
        run.agent(number, executor="e1" if number else "e0")
    run.ready("w0", "w1")
    run.down("w3", code=1)
    effects = run(core.Draining("e1", "decommissioned"))
    assert [e.worker for e in of(effects, core.Dismiss)] == ["w1", "w2"]
    assert [e.agent for e in of(effects, core.Release)] == ["a1", "a2", "a3"]
    one(run.agent(9, executor="e1"), core.Release, agent="a9", reason="draining")


def test_all_draining_with_newcomers_hand_over_through_one_of_them() -> None:
    run = Script(num_proc=2, min_num_proc=2, max_num_proc=2).running(executor="e0")
    run.agent(2)
    run.agent(3)
    run.ready("w2", "w3")
    one(run(core.Draining("e0", "decommissioned")), core.Notify)
    one(run.ask(reason="reset"), core.Form, members=("w0", "w2"), joined=("w2",), left=("w1",), restore=False)
    one(run.initialise(), core.Notify)
    one(run.ask(reason="reset"), core.Form, members=("w2", "w3"), joined=("w3",), left=("w0",), restore=False)
    run.initialise()
    assert of(run.wait(1.0, "*"), core.Notify) == []


def test_all_draining_without_newcomers_stay_and_save() -> None:
    run = Script(num_proc=2).running(executor="e0")
    effects = run(core.Draining("e0", "spot notice"))
    one(effects, core.SaveNow, worker="w0")
    later = run.wait(2.0, "*")
    assert of(later, core.SaveNow) == of(later, core.Notify) == []


def test_what_is_left_saves_when_only_draining_members_are_left() -> None:
    run = Script(num_proc=3, min_num_proc=2)
    for number, executor in enumerate(("e0", "e1", "e1")):
        run.agent(number, executor=executor)
    run.ready("w0", "w1", "w2")
    run.initialise()
    assert of(run(core.Draining("e1", "spot notice")), core.SaveNow) == []
    run(core.AgentDown("a0", "gone"))
    run.ask()
    one(run.initialise(), core.SaveNow, worker="w1")


def test_a_draining_member_that_alone_holds_the_newest_step_stays_for_one_more_world() -> None:
    run = Script(num_proc=3).running()
    run(core.Draining("e2", "decommissioned"))
    run.down("w0")
    run.ask("w1", step=10)
    form = one(run.ask("w2", step=11), core.Form, members=("w2", "w1"), left=(), step=11)
    assert not form.restore
    one(run.initialise(), core.Notify)
    one(run.ask(step=12, reason="reset"), core.Form, members=("w1",), left=("w2",))


# ---------------------------------------------------------------------------------------------------- silence


def test_a_member_that_falls_silent_alone_is_frozen_and_killed() -> None:
    run = Script(num_proc=3, frozen_after_s=4.0).running()
    assert of(run.wait(3.9, "w0", "w1"), ev.WorkerLost) == []
    effects = run.wait(0.5, "w0", "w1")
    assert one(effects, ev.WorkerLost, worker="w2", cause="frozen").detail.startswith("not heard for 4.")
    one(effects, core.Kill, worker="w2", agent="a2")
    one(effects, core.BreakGeneration, workers=("w0", "w1"))


def test_when_all_fall_silent_nobody_is_to_blame_for_a_long_time() -> None:
    run = Script(num_proc=2, frozen_after_s=4.0, silent_all_after_s=20.0).running()
    assert of(run.wait(19.0), ev.WorkerLost) == []
    assert len(of(run.wait(2.0), ev.WorkerLost)) == 2


def test_a_busy_worker_whose_interpreter_is_held_is_heard_through_its_agent() -> None:
    run = Script(num_proc=2).running()
    for _ in range(100):
        run(core.Heard("w1"))  # from the agent: the process uses processor time
        run.wait(0.1, "w0")
    assert run.job.workers["w1"].where == "starting", "what it does is told by itself alone"
    assert run.job.generation == 1


def test_a_worker_that_is_warming_is_not_judged_by_silence() -> None:
    run = Script(num_proc=2, max_num_proc=3).running()
    run.agent(2)
    assert of(run.wait(10.0, "w0", "w1"), ev.WorkerLost) == []


def test_a_finished_worker_that_freezes_is_killed_so_that_nobody_waits_for_it() -> None:
    run = Script(num_proc=2).running()
    run(core.Finished("w1"))
    effects = run.wait(10.0, "w0")
    one(effects, core.Kill, worker="w1", agent="a1")
    assert of(effects, ev.WorkerLost) == of(effects, ev.GenerationEnding) == []
    one(run.ask("w0"), core.Form, members=("w0",))
    run.ready("w2")


def test_a_pause_of_the_driver_is_nobodys_silence_and_runs_into_no_limit() -> None:
    run = Script(num_proc=3, min_num_proc=3, elastic_timeout=10.0).running()
    run.down("w0")
    run.ask()
    run.wait(1.0, "*")
    run.now += 600.0
    assert run(core.Heard("w1")) == [], "what came during the pause is read first"
    assert run(core.Tick()) == []
    assert run.job.paused == pytest.approx(599.0, abs=0.2)
    run.wait(7.0, "*")
    assert run.ended is None
    run.wait(2.0, "*")
    assert run.ended.kind == "NotEnoughWorkers"


def test_limits_are_reached_even_where_every_tick_is_late() -> None:
    run = Script(num_proc=2, start_timeout=10.0)
    for _ in range(30):
        run(core.Tick(), 2.5)
    assert run.ended.kind == "NotEnoughWorkers"


def test_a_silent_agent_is_lost_with_its_worker_while_others_are_heard() -> None:
    run = Script(num_proc=2, frozen_after_s=4.0).running()
    effects: list[core.Effect] = []
    for _ in range(85):
        run(core.AgentHeard("a0"))
        effects += run.wait(0.1, "w0", "w1", agents=False)
    one(effects, core.Release, agent="a1", reason="silent")
    one(effects, ev.AgentLost, agent="a1")
    one(effects, ev.WorkerLost, worker="w1", cause="executor lost")
    one(effects, core.Kill, worker="w1")


def test_when_all_agents_are_silent_they_are_given_time() -> None:
    run = Script(num_proc=2, silent_all_after_s=20.0).running()
    assert of(run.wait(19.0, "*", agents=False), ev.AgentLost) == []
    assert len(of(run.wait(2.0, "*", agents=False), ev.AgentLost)) == 2


# ------------------------------------------------------------------------------------------------- time limits


def test_a_worker_that_does_not_become_ready() -> None:
    run = Script(num_proc=2, max_num_proc=2, warm_timeout_s=10.0).running()
    run.agent(2)
    effects = run.wait(10.3, "*")
    one(effects, ev.WorkerLost, worker="w2", cause="did not start")
    one(effects, core.Kill, worker="w2", agent="a2")


def test_an_init_that_takes_too_long_is_broken_and_then_lost() -> None:
    run = Script(num_proc=3, init_timeout_s=5.0)
    run.hosts(3)
    run.ready("w0", "w1", "w2")
    run.initialise("w0", "w1")
    effects = run.wait(5.7, "*")
    one(effects, ev.GenerationEnding, cause="w2 did not initialise within 5 s")
    one(effects, core.BreakGeneration, workers=("w0", "w1", "w2"))
    run.ask("w0", "w1")
    effects = run.wait(5.0, "*")
    one(effects, ev.WorkerLost, worker="w2", cause="did not reset")
    one(effects, core.Form, members=("w0", "w1"), lost=("w2",))


def test_a_survivor_that_never_asks_is_lost_after_elastic_timeout_and_watched_until_then() -> None:
    run = Script(num_proc=3, elastic_timeout=12.0).running()
    run.down("w0")
    run.ask("w1")
    effects = run.wait(11.5, "*")
    warned = of(effects, ev.Warned)
    assert len(warned) == 2
    assert "w1 wait for w2 (in the training function) for 5 s (w0 lost: process died)" in warned[0].message
    effects = run.wait(1.0, "*")
    lost = one(effects, ev.WorkerLost, worker="w2", cause="did not reset")
    assert "in the training function" in lost.detail
    one(effects, core.Form, members=("w1",), lost=("w0", "w2"))


def test_who_waits_for_storage_that_never_answers_is_told_and_lost_after_elastic_timeout() -> None:
    """Its heart beats, and it is in no collective: without this its peers would wait for it for ever."""
    run = Script(num_proc=2, elastic_timeout=100.0).running()
    effects = []
    for second in range(1, 102):
        run(core.Heard("w0", "in a collective", 1.0 * second, 0.0))
        run(core.Heard("w1"))  # by its agent, which knows nothing of it
        run(core.Heard("w1", f"nothing has come of the data for {second} s", 0.0, 1.0 * second))
        effects += run.wait(1.0)
    warned = of(effects, ev.Warned)
    assert len(warned) == 3, "less and less often"
    assert warned[0].message == "w1: nothing has come of the data for 20 s"
    one(effects, ev.WorkerLost, worker="w1", cause="storage stalled", detail="nothing has come of the data for 101 s")
    assert run.ended is None


def test_who_is_waited_for_in_a_collective_is_told_and_may_take_its_time() -> None:
    run = Script(num_proc=3, elastic_timeout=100.0).running()
    effects = []
    for second in range(1, 300):
        for name in ("w0", "w2"):
            run(core.Heard(name, "in a collective", 1.0 * second, 0.0))
        run(core.Heard("w1", "in the training function, step 5", 0.0, 0.0))
        effects += run.wait(1.0)
    warned = of(effects, ev.Warned)
    assert warned[0].message == "w0, w2 wait in a collective for w1 (in the training function, step 5) for 60 s"
    assert len(warned) == 3, "less and less often"
    assert of(effects, ev.WorkerLost) == []


def test_storage_that_answers_nobody_ends_the_job_as_what_it_is() -> None:
    run = Script(num_proc=1, max_num_proc=1, elastic_timeout=90.0, spawn_limit=100).running()
    for _ in range(7):
        run.wait(90.0, "*")
        run(core.Heard(run.job.members[0], "nothing has come of the data for 91 s", 0.0, 91.0))
        run.wait(0.2, "*")
        run.ready(*[name for name, stage in run.stages().items() if stage == "warming"])
        if run.ended is None:
            run.initialise()
    assert run.ended.kind == "StorageFailed"
    assert "storage stalled" in run.ended.error


def test_while_all_are_gone_the_watch_says_what_is_waited_for() -> None:
    run = Script(num_proc=1).running()
    run(core.AgentDown("a0", "gone"))
    warned = of(run.wait(29.0), ev.Warned)
    assert [round(fact.at - run.now + 29.0) for fact in warned] == [5, 10, 20], "less and less often"
    assert warned[0].message.startswith("all wait for more workers (num_proc=1, min_num_proc=1; 0 are ready")


def test_a_start_that_takes_long_is_told() -> None:
    run = Script(num_proc=3, min_num_proc=2, start_timeout=100.0)
    run.hosts(2)
    run.ready("w0")
    warned = of(run.wait(50.0, "*"), ev.Warned)
    assert [round(fact.at - run.started) for fact in warned] == [20, 40]
    assert warned[0].message == (
        "all wait for more workers (num_proc=3, min_num_proc=2; 1 are ready, 1 are starting) for 20 s"
    )


# ------------------------------------------------------------------------------------------------ how it ends


def test_the_job_has_finished_when_all_have() -> None:
    run = Script(num_proc=3).running()
    assert run(core.Finished("w0")) == []
    run(core.Finished("w2"))
    effects = run(core.Finished("w1"))
    one(effects, core.End, ended=core.Ended("FINISHED"))
    assert run(core.Finished("w1")) == run(core.Tick()) == []


def test_rank_0_has_finished_and_another_is_lost_at_the_end() -> None:
    run = Script(num_proc=3).running()
    run(core.Finished("w0"))
    one(run.down("w1"), core.BreakGeneration, workers=("w2",))
    effects = run.ask("w2")
    one(effects, core.Dismiss, worker="w2", reason="done")
    one(effects, ev.WorkerLeft, worker="w2", reason="done")
    assert run.ended == core.Ended("FINISHED")


def test_what_a_finished_worker_returned_stays_when_its_process_or_executor_ends() -> None:
    run = Script(num_proc=2).running()
    run(core.Finished("w0"))
    effects = run.down("w0")
    assert of(effects, ev.WorkerLost) == []
    one(effects, core.Spawn, agent="a0", worker="w2")
    assert run.down("w0") == []
    assert of(run(core.AgentDown("a0", "gone")), ev.WorkerLost) != []
    assert run.job.ending is None
    run(core.Finished("w1"))
    assert run.ended == core.Ended("FINISHED")


def test_rank_0_lost_while_the_others_are_done_they_are_replaced_and_the_job_goes_on() -> None:
    run = Script(num_proc=4, min_num_proc=3).running()
    run.agent(9, executor="e9")
    run(core.Draining("e2", "decommissioned"))
    for worker in ("w1", "w2", "w3"):
        run(core.Finished(worker))
    run(core.AgentDown("a3", "gone"))
    effects = run.down("w0")
    assert [e.worker for e in of(effects, core.Dismiss)] == ["w1", "w2"]
    assert {e.reason for e in of(effects, ev.WorkerLeft)} == {"not needed"}
    assert [e.agent for e in of(effects, core.Spawn)] == ["a0", "a1"]
    one(effects, core.Release, agent="a2", reason="draining")
    run.ready("w4", "w5", "w6")
    one(run.wait(3.5, "*"), core.Form, generation=2, members=("w4", "w5", "w6"), restore=True)


def test_rank_0_asks_while_the_others_are_done_they_are_replaced_although_too_few_are_left() -> None:
    run = Script(num_proc=2, min_num_proc=2).running()
    run(core.Finished("w1"))
    effects = run.ask("w0")
    one(effects, core.Dismiss, worker="w1", reason="not needed")
    one(effects, core.Spawn, agent="a1", worker="w2")
    one(run.ready("w2"), core.Form, members=("w0", "w2"), joined=("w2",), restore=False)


def test_nobody_joins_or_leaves_while_the_world_is_finishing() -> None:
    run = Script(num_proc=2, max_num_proc=3).running()
    run.agent(2)
    run.ready("w2")
    run(core.Finished("w1"))
    assert of(run.wait(2.0, "*"), core.Notify) == []


def test_who_still_waits_in_a_collective_after_rank_0_has_finished_is_cut_off() -> None:
    run = Script(num_proc=2, elastic_timeout=6.0).running()
    run(core.Finished("w0"))
    assert of(run.wait(5.8, "*"), core.BreakGeneration) == []
    one(run.wait(1.0, "*"), core.BreakGeneration, workers=("w1",))
    run.ask("w1")
    assert run.ended == core.Ended("FINISHED")


def test_cancelling_is_killed_and_another_fault_is_failed() -> None:
    run = Script().running()
    run(core.Fault("JobCancelled", "interrupted by Ctrl-C"))
    assert run.ended == core.Ended("KILLED", "interrupted by Ctrl-C", "JobCancelled")
    run = Script()
    run(core.Fault("EnvironmentUnfit", "Spark failed"))
    assert run.ended == core.Ended("FAILED", "Spark failed", "EnvironmentUnfit")


KILLED = core.Ended("KILLED", "terminated by SIGTERM", "JobCancelled")


def test_a_job_that_is_cancelled_ends_as_soon_as_what_it_holds_is_safe() -> None:
    run = Script(num_proc=2).running()
    run(core.Tick(9, 4), core.TICK_S)
    assert of(run(core.Cancel(KILLED.error)), core.SaveNow) == []  # more may be committed than was told
    one(run(core.Tick(11, 4), core.TICK_S), core.SaveNow, worker="w0")
    run(core.Tick(12, 10), core.TICK_S)
    assert run.ended is None
    run(core.Tick(12, 13), core.TICK_S)
    assert run.ended is None, "that step has not been told of yet"
    run(core.Tick(13, 13), core.TICK_S)
    assert run.ended == KILLED


def test_a_job_that_is_cancelled_waits_for_no_checkpoint_that_cannot_come() -> None:
    for committed, durable in ((0, -1), (9, 9)):
        run = Script(num_proc=2).running()
        run(core.Tick(committed, durable), core.TICK_S)
        run(core.Cancel(KILLED.error))
        assert of(run(core.Tick(), core.TICK_S), core.SaveNow) == []
        assert run.ended == KILLED
    run = Script(num_proc=2).running()
    run(core.Tick(9, -1), core.TICK_S)
    run(core.AgentDown("a0", "gone"))
    run(core.AgentDown("a1", "gone"))
    run(core.Cancel(KILLED.error))
    assert run.ended == KILLED


def test_a_job_that_is_cancelled_while_its_world_changes_is_saved_by_the_next_one() -> None:
    for cancel_first in (True, False):
        run = Script(num_proc=2).running()
        run(core.Tick(9, -1), core.TICK_S)
        if cancel_first:
            run(core.Cancel(KILLED.error))
            one(run(core.Tick(), core.TICK_S), core.SaveNow, worker="w0")
        run.down("w0")
        if not cancel_first:
            run(core.Cancel(KILLED.error))
            assert of(run(core.Tick(), core.TICK_S), core.SaveNow) == []
        run.ask("w1", step=9)
        one(run(core.Initialised("w1", 2)), core.SaveNow, worker="w1")
        assert run.ended is None
        run(core.Tick(9, 9), core.TICK_S)
        assert run.ended == KILLED


def test_a_job_that_is_cancelled_takes_nobody_in() -> None:
    run = Script(num_proc=2, max_num_proc=3).running()
    run(core.Tick(9, -1), core.TICK_S)
    run(core.Cancel(KILLED.error))
    run.agent(2)
    run.ready("w2")
    assert of(run.wait(2.0, "*"), core.Notify) == []


def test_a_job_that_is_cancelled_waits_five_seconds_or_until_it_is_asked_again_or_all_are_lost() -> None:
    def cancelled() -> Script:
        run = Script(num_proc=2).running()
        run(core.Tick(9, -1), core.TICK_S)
        run(core.Cancel(KILLED.error))
        one(run(core.Tick(), core.TICK_S), core.SaveNow)
        return run

    run = cancelled()
    run.wait(4.8, "*")
    assert run.ended is None
    run.wait(0.3, "*")
    assert run.ended == KILLED
    run = cancelled()
    run(core.Cancel("interrupted by Ctrl-C"))
    assert run.ended == core.Ended("KILLED", "interrupted by Ctrl-C", "JobCancelled")
    run = cancelled()
    run(core.AgentDown("a0", "gone"))
    run(core.AgentDown("a1", "gone"))
    run(core.Tick(), core.TICK_S)
    assert run.ended == KILLED


# ------------------------------------------------------------------------------------------------ limits on resets


def test_reset_limit_is_exact() -> None:
    run = Script(num_proc=2, max_num_proc=2, reset_limit=2).running()
    for step in (10, 20):
        run.down(run.job.members[1])
        run.ready(run.job.agents["a1"].worker)
        run.ask(step=step)
        run.initialise()
    run(core.Finished(run.job.members[0]))
    assert run.ended is None
    run.down(run.job.members[1])
    assert run.ended == core.Ended("FINISHED"), "two resets and success"


def test_the_reset_after_the_limit_names_it() -> None:
    run = Script(num_proc=2, max_num_proc=2, reset_limit=2).running()
    for step in (10, 20, 30):
        run.down(run.job.members[1])
        run.ready(run.job.agents["a1"].worker)
        run.ask(step=step)
        run.initialise()
    assert run.ended.kind == "ResetLimitReached"
    assert "reset 3 times" in run.ended.error
    assert "reset_limit=2" in run.ended.error


def test_joins_and_drains_do_not_count_as_resets() -> None:
    run = Script(num_proc=2, max_num_proc=3, reset_limit=0).running()
    run.agent(2)
    run.ready("w2")
    run.ask(reason="reset")
    run.initialise()
    run(core.Draining("e1", "decommissioned"))
    run.ask(step=20, reason="reset")
    assert run.job.members == ("w0", "w2")
    assert run.ended is None


def test_collectives_that_fail_three_times_at_the_same_step_without_a_loss_are_the_users() -> None:
    run = Script(num_proc=2).running()
    for _ in range(3):
        assert run.ended is None
        run.ask(step=7)
        run.initialise()
    assert run.ended is None, "the first failure came after new steps"
    run.ask(step=7)
    assert run.ended.kind == "UserCodeFailed"
    assert "3 times in a row at step 7" in run.ended.error
    assert "w1: closed" in run.ended.error


def test_a_new_step_or_a_change_of_the_world_interrupts_the_row() -> None:
    run = Script(num_proc=2, max_num_proc=2).running()
    for step in (7, 7, 7, 8, 8, 8):
        run.ask(step=step)
        run.initialise()
    run.down("w1")
    run.ask(step=8)
    assert run.job.idle_resets == 2
    assert run.ended is None


def test_a_function_that_tells_no_step_and_fails_soon_each_time_is_not_tried_for_ever() -> None:
    run = Script(num_proc=2).running()
    for _ in range(3):
        run.wait(5.0, "*")
        run.ask(step=-1)
        run.initialise()
    assert "3 times in a row at step -1" in run.ended.error


def test_one_that_tells_its_step_makes_none_by_running_long() -> None:
    run = Script(num_proc=2).running()
    for _ in range(4):
        run.wait(core.PROGRESS_S + 1.0, "*")
        run.ask(step=0)
        run.initialise()
    assert "3 times in a row at step 0" in run.ended.error


def test_a_function_that_tells_no_step_makes_progress_by_running_long() -> None:
    run = Script(num_proc=2).running()
    for _ in range(4):
        run.wait(core.PROGRESS_S + 1.0, "*")
        run.ask(step=-1)
        run.initialise()
    assert run.ended is None


def test_an_init_that_fails_again_and_again_is_not_the_users_fault() -> None:
    run = Script(num_proc=2)
    run.hosts(2)
    run.ready("w0", "w1")
    for _ in range(5):
        run.ask(step=-1, reason="init failed")
    assert run.ended is None, "a Horovod that is not mended may echo one fault so often"
    run.wait(core.UNFORMED_S, "*")
    run.ask(step=-1, reason="init failed")
    assert run.ended.kind == "EnvironmentUnfit"
    assert "Horovod could not be initialised 6 times in a row" in run.ended.error
    assert "nics" in run.ended.error


def test_a_world_that_did_not_form_says_nothing_of_collectives() -> None:
    run = Script(num_proc=2).running()
    run.ask(step=7)
    for _ in range(3):
        run.ask(step=7, reason="init failed")
    run.initialise()
    run.ask(step=7)
    assert (run.ended, run.job.idle_resets, run.job.unformed) == (None, 1, 0)


def test_while_a_checkpoint_is_read_nobody_is_late() -> None:
    """To verify a large one takes longer than Horovod's init may."""
    run = Script(num_proc=2)
    run.hosts(2)
    run.ready("w0", "w1")
    for _ in range(200):
        run(core.Reading(1))
        assert of(run.wait(1.0, "*"), core.BreakGeneration) == []
    run(core.Reading(0))
    assert [worker.stage for worker in run.job.workers.values()] == [core.Stage.CALLED] * 2
    one(run.wait(run.options.init_timeout_s + 1.0, "*"), core.BreakGeneration, generation=1)


def test_processes_that_die_world_after_world_without_a_new_step_end_the_job() -> None:
    run = Script(num_proc=2, max_num_proc=2, spawn_limit=100).running(host="host0")
    for _ in range(7):
        run.down(run.job.members[1], code=-11, tail="Segmentation fault in kernel")
        run.ready(run.job.agents["a1"].worker)
        run.ask(step=7)
        run.initialise()
    assert run.ended.kind == "UserCodeFailed"
    assert "workers died in 6 worlds in a row without a step after 7" in run.ended.error
    assert "Segmentation fault in kernel" in run.ended.error


def test_a_checkpoint_that_no_worker_can_read_ends_the_job_as_what_it_is() -> None:
    run = Script(num_proc=2, max_num_proc=2, spawn_limit=100).running()
    while run.ended is None:
        first = run.job.members[0]
        run(core.WorkerDown(first, "checkpoint unreadable", "is missing", tail="step-000000000030-t: is missing"))
        run.ask(step=-1)
        run.wait(40.0, "*")
        if run.ended is None:
            run.ready(*[name for name, stage in run.stages().items() if stage == "warming"])
            run.initialise()
    assert run.ended.kind == "StorageFailed"
    assert "step-000000000030-t: is missing" in run.ended.error


def test_worlds_that_die_whole_and_get_further_each_time_do_not() -> None:
    """Fuzz seeds 245 to 249: nobody survived who could tell of the new steps, but the ledger knew of them."""
    run = Script(num_proc=2, max_num_proc=2, spawn_limit=100).running(host="host0")
    for world in range(12):
        run(core.Tick(10 * world))
        for member in run.job.members:
            run.down(member, code=-9)
        run.ready(*[run.job.agents[name].worker for name in run.job.agents])
        run.initialise()
    assert run.ended is None
    for _ in range(core.BARREN_LIMIT - 1):
        assert run.ended is None
        run(core.Tick(110))
        for member in run.job.members:
            run.down(member, code=-9)
        if run.ended is None:
            run.ready(*[run.job.agents[name].worker for name in run.job.agents])
            run.initialise()
    assert "6 worlds in a row without a step after 110" in run.ended.error


def test_twelve_kills_with_steps_in_between_do_not() -> None:
    run = Script(num_proc=2, max_num_proc=2).running()
    for kill in range(12):
        run.down(run.job.members[kill % 2])
        run.ready(*[name for name, stage in run.stages().items() if stage == "warming"])
        run.ask(step=kill)
        run.initialise()
    assert run.ended is None


def test_executors_that_die_are_never_the_users_fault() -> None:
    run = Script(num_proc=2, max_num_proc=2).running()
    for number in range(12):
        run(core.AgentDown(run.job.workers[run.job.members[1]].agent, "its connection ended"))
        run.agent(10 + number)
        run.ready(run.job.agents[f"a{10 + number}"].worker)
        run.ask(step=7)
        run.initialise()
    assert run.ended is None


# ------------------------------------------------------------------------------------------------ the user's errors


def error(run: Script, worker: str, step: int = 3, at: float = 0.0, text: str = "ValueError: boom-42") -> None:
    run(core.UserError(worker, step, run.now + at, text, f"Traceback of {worker}\n{text}"))


def test_the_earliest_error_by_time_is_the_root_cause() -> None:
    run = Script(num_proc=3).running()
    error(run, "w2", at=0.2, text="RuntimeError: another failed")
    run.wait(0.3, "*")
    assert run.ended is None
    error(run, "w1", at=-0.3)
    run.wait(0.3, "*")
    assert (run.ended.status, run.ended.kind) == ("FAILED", "UserCodeFailed")
    assert "rank 1, worker w1, step 3: ValueError: boom-42" in run.ended.error
    assert run.ended.traceback == "Traceback of w1\nValueError: boom-42"
    assert run.job.probation.scores == {}, "no host is blamed"
    assert [fact.worker for fact in run.facts if isinstance(fact, ev.UserFailed)] == ["w2", "w1"]


def test_an_error_while_loading_the_function_ends_the_job_too() -> None:
    run = Script(num_proc=2)
    run.hosts(1)
    error(run, "w0", step=-1, text="ModuleNotFoundError: mine")
    run.wait(0.6)
    assert "rank -1, worker w0, step -1: ModuleNotFoundError: mine" in run.ended.error


def test_nothing_else_is_decided_while_an_error_waits_for_its_verdict() -> None:
    run = Script(num_proc=2).running()
    error(run, "w1")
    run.down("w1", code=1)
    run(core.Finished("w0"))
    assert run.ended is None
    run.wait(0.6, "*")
    assert run.ended.kind == "UserCodeFailed"


def test_an_error_is_survived_as_often_as_configured() -> None:
    run = Script(num_proc=2, user_error_retries=1).running()
    error(run, "w1")
    effects = run.wait(0.6, "*")
    one(effects, ev.WorkerLost, worker="w1", cause="user error")
    assert run.job.probation.scores == {}
    run.ready("w2")
    run.ask(step=3)
    run.initialise()
    error(run, "w2", step=5, text="ValueError: another")
    run.wait(0.6, "*")
    assert "ValueError: another" in run.ended.error


def test_the_same_error_at_the_same_step_is_not_tried_again() -> None:
    run = Script(num_proc=2, user_error_retries=5).running()
    error(run, "w1")
    run.down("w1", code=1)
    run.wait(0.6, "*")
    run.ready("w2")
    run.ask(step=3)
    run.initialise()
    error(run, "w2")
    run.wait(0.6, "*")
    assert "ValueError: boom-42" in run.ended.error
    assert len(run.job.forgiven) == 1


def test_the_error_says_itself_what_the_job_ends_with() -> None:
    run = Script(num_proc=2).running()
    run(core.UserError("w1", 3, run.now, "StateDiverged: w differs", "Traceback", kind="StateDiverged"))
    run.wait(0.6, "*")
    assert run.ended.kind == "StateDiverged"


def test_a_worker_that_connects_is_heard() -> None:
    run = Script().running()
    assert run(core.WorkerUp("w1"), 0.5) == []
    assert run.job.workers["w1"].heard == run.now


def test_errors_are_timed_right_from_time_0() -> None:
    run = Script(num_proc=1)
    run.now = 0.0
    run.job = core.start(run.options, 0.0)
    run.hosts(1)
    error(run, "w0")
    run.wait(0.3)
    error(run, "w0")
    run.wait(0.3)
    assert run.ended is not None


# ------------------------------------------------------------------------------------- processes that never get ready


def test_workers_that_die_before_they_are_ready_end_a_job_that_has_no_others() -> None:
    run = Script(num_proc=2, spawn_limit=100)
    run.hosts(2)
    for death in range(core.STILLBORN_LIMIT):
        assert run.ended is None
        run.wait(4.0 if death else 0.0)
        warming = [name for name, stage in run.stages().items() if stage == "warming"]
        run.down(warming[0], code=1, tail="ImportError: libcuda.so.1")
    assert run.ended.kind == "EnvironmentUnfit"
    assert "6 workers in a row" in run.ended.error
    assert "ImportError: libcuda.so.1" in run.ended.error


def test_the_first_that_dies_is_started_again_at_once() -> None:
    run = Script(num_proc=2)
    run.hosts(1)
    run.down("w0", code=1)
    assert of(run.wait(0.2), core.Spawn) == []
    one(run.wait(0.2), core.Spawn, agent="a0", worker="w1")


def test_a_machine_that_cannot_host_does_not_end_a_job_that_runs_elsewhere() -> None:
    run = Script(num_proc=1, max_num_proc=2, spawn_limit=100).running()
    run.agent(1)
    deaths = []
    for _ in range(1800):
        worker = run.job.agents["a1"].worker
        if worker is not None:
            run.down(worker, code=1)
            deaths.append(run.now)
        run.wait(0.1, "*")
    assert run.ended is None
    assert 8 <= len(deaths) <= 12, "it is tried less and less often"


def test_the_loss_of_all_begins_the_count_anew() -> None:
    run = Script(num_proc=1, max_num_proc=2, spawn_limit=100).running()
    run.agent(1)
    for _ in range(core.STILLBORN_LIMIT + 1):
        run.down(run.job.agents["a1"].worker, code=1)
        run.wait(20.0, "*")
    run(core.AgentDown("a0", "gone"))
    assert run.ended is None


# ------------------------------------------------------------------------------------------------------- probation


def test_a_host_that_fails_repeatedly_waits_while_another_does_better() -> None:
    run = Script(num_proc=2, max_num_proc=2).running()
    for step in (10, 20, 30):
        run.down(run.job.agents["a1"].worker)
        run.ask("w0", step=step)
        run.ready(run.job.agents["a1"].worker)
        run.initialise("w0")
        if step < 30:
            run.wait(0.5, "*")
            run.ask(step=step + 5, reason="reset")
            run.initialise()
    assert of(run.wait(10.0, "*"), core.Notify) == []
    assert of(run.wait(6.0, "*"), core.Notify) != []


def test_it_waits_also_where_a_trusted_newcomer_fills_the_gap() -> None:
    run = Script(num_proc=3, min_num_proc=3, max_num_proc=4).running()
    run.job = replace(run.job, probation=Probation({"host9": (4.0, run.now)}))
    run.agent(9, host="host9")
    run.agent(8, host="host8")
    run.ready("w3", "w4")
    run.down("w0")
    one(run.ask(), core.Form, members=("w1", "w2", "w4"), joined=("w4",))


def test_it_is_taken_at_once_where_it_is_needed() -> None:
    run = Script(num_proc=2, min_num_proc=2).running()
    for step in (10, 20, 30, 40):
        run.down(run.job.agents["a1"].worker)
        run.ask("w0", step=step)
        run.ready(run.job.agents["a1"].worker)
        run.initialise()
    assert run.job.generation == 5


def test_a_plain_function_whose_collective_failed_does_not_blame_its_host() -> None:
    run = Script(num_proc=2).running()
    run.down("w1", "collective failed")
    assert run.job.probation.scores == {}


# ------------------------------------------------------------------------------------------------------- the guard


def alarm(run: Script, since: int = 7) -> list[core.Effect]:
    return run(core.Alarmed(run.job.generation, since, f"loss is nan at step {since}"))


def test_an_alarm_is_a_warning_by_default() -> None:
    run = Script(num_proc=2).running()
    before = run.job
    assert alarm(run) == []
    assert run.job == before


def test_an_alarm_stops_the_job_where_that_is_the_policy() -> None:
    run = Script(num_proc=2, guard="stop").running()
    alarm(run)
    assert (run.ended.status, run.ended.kind) == ("FAILED", "GuardStopped")
    assert "loss is nan at step 7" in run.ended.error


def test_a_roll_back_is_a_change_of_the_world_that_starts_from_before_the_alarm() -> None:
    run = Script(num_proc=2, guard="rollback").running()
    one(alarm(run), core.Notify, workers=("w0", "w1"))
    assert alarm(run, 9) == alarm(run, 5) == [], "the way back is under way"
    run.ask("w0", step=20, reason="reset")
    form = one(run.ask("w1", step=20, reason="reset"), core.Form, members=("w0", "w1"), joined=(), lost=())
    assert (form.before, form.restore, form.step) == (5, True, -1)
    assert form.cause == "guard: loss is nan at step 7"
    run.initialise()
    assert run(core.Alarmed(1, 21, "late")) == []
    assert run.job.suspect_from is None, "what comes late from the world that was left is settled"
    run.down("w1")
    assert one(run.ask(step=6), core.Form, restore=False, step=6).before is None


def test_roll_backs_are_counted_and_then_the_job_stops() -> None:
    run = Script(num_proc=1, guard="rollback", guard_rollbacks=2).running()
    for _ in range(2):
        alarm(run)
        run.ask(step=9, reason="reset")
        run.initialise()
    assert run.ended is None
    alarm(run)
    assert run.ended.kind == "GuardStopped"
    assert "rolled back 2 times already (guard_rollbacks)" in run.ended.error


def test_all_are_lost_on_the_way_back() -> None:
    run = Script(num_proc=1, guard="rollback").running()
    alarm(run)
    run.down("w0")
    form = one(run.ready("w1"), core.Form, members=("w1",))
    assert (form.before, form.restore) == (7, True)


def test_a_function_that_returns_before_the_job_went_back_has_not_finished_well() -> None:
    run = Script(num_proc=1, guard="rollback").running()
    alarm(run)
    run(core.Finished("w0"))
    assert run.ended.kind == "GuardStopped"
    assert "returned before the job went back" in run.ended.error


# --------------------------------------------------------------------------------- what must not change anything


@pytest.mark.parametrize(
    "late",
    [
        core.AgentDown("a9", "gone"),
        core.AgentHeard("a9"),
        core.WorkerUp("w9"),
        core.Ready("w9"),
        core.Heard("w9", "somewhere"),
        core.Initialised("w9", 2),
        core.Asked("w9", 2, 7, "reset"),
        core.WorkerDown("w9", "process died", "", -9, "tail"),
        core.Finished("w9"),
        core.UserError("w9", 3, 1.0, "ValueError", "Traceback"),
        core.Finished("w1"),
        core.Ready("w1"),
        core.Asked("w1", 1, 99, "reset"),
        core.WorkerDown("w1", "process died", "", -9, "tail"),
        core.UserError("w1", 3, 1.0, "ValueError", "Traceback"),
    ],
)
def test_unknown_and_late_inputs_change_nothing(late: core.Input) -> None:
    run = Script(num_proc=3).running()
    run.down("w1")
    run.ask()
    run.initialise()
    before = run.job
    assert run(late) == []
    assert run.job == before


def test_stale_inputs_of_living_workers_are_signs_of_life_and_no_more() -> None:
    run = Script(num_proc=2).running()
    run.ask(step=4)
    before = run.job
    assert run(core.Asked("w0", 1, 9, "reset", ""), 0.05) == []
    assert run(core.Initialised("w1", 1)) == []
    run.initialise()
    assert run(core.Initialised("w0", 2)) == run(core.Ready("w0")) == run(core.WorkerUp("w0")) == []
    run.agent(5)
    assert run(core.Asked("w2", 2, 9, "reset")) == run(core.Initialised("w2", 2)) == run(core.Finished("w2")) == []
    assert run.job.workers["w0"].heard > before.workers["w0"].heard
    assert {name: stage for name, stage in run.stages().items() if name != "w2"} == {"w0": "running", "w1": "running"}
