"""The ledger of committed steps: by example, and against a model that keeps every report it was ever given."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from elastic_spark.core import events as ev
from elastic_spark.core.ledger import Ledger, Report

BATCH = 8
EPOCH = 5


def report(step: int, rows: int = BATCH, at: float | None = None, **values: float) -> Report:
    """Step s takes offset s - 1 of an endless row of epochs of EPOCH batches."""
    epoch, offset = divmod(step - 1, EPOCH)
    return Report(step, float(step) if at is None else at, rows, {"train": (epoch, offset)}, values)


def world(*members: str, committed: int = 0) -> Ledger:
    ledger = Ledger(committed)
    assert ledger.begin(1, members, committed, "start", 0.0) == []
    return ledger


def test_a_step_is_committed_when_all_members_have_reported_it() -> None:
    ledger = world("w0", "w1")
    ledger.report("w0", 1, [report(1, at=1.5, loss=1.0), report(2)])
    assert ledger.complete(2.0) == []
    ledger.report("w1", 1, [report(1, rows=4, at=1.2, loss=3.0, extra=5.0)])
    metrics, steps = ledger.complete(2.0)
    assert metrics == ev.MetricsReported(at=2.0, step=1, values={"loss": 2.0, "extra": 5.0})
    assert steps == ev.StepsCommitted(
        at=2.0, generation=1, first_step=1, times=(1.2,), cursors={"train": (0, 0)}, rows=12, missing=0
    )
    assert ledger.committed == 1
    assert ledger.complete(3.0) == []


def test_one_fact_never_spans_two_epochs() -> None:
    ledger = world("w0")
    ledger.report("w0", 1, [report(step) for step in range(1, 8)])
    first, second = ledger.complete(9.0)
    assert (first.first_step, len(first.times), first.cursors) == (1, 5, {"train": (0, 0)})
    assert (second.first_step, len(second.times), second.cursors) == (6, 2, {"train": (1, 0)})


def test_nor_does_it_mix_steps_that_some_ranks_did_not_live_to_report() -> None:
    ledger = world("w0", "w1")
    ledger.report("w0", 1, [report(1), report(2)])
    ledger.report("w1", 1, [report(1)])
    first, second = ledger.begin(2, ["w0"], 2, "w1 lost", 3.0)
    assert (first.first_step, first.missing, second.first_step, second.missing) == (1, 0, 2, 1)


def test_strangers_and_other_generations_are_passed_over() -> None:
    ledger = world("w0")
    ledger.report("w9", 1, [report(1)])
    ledger.report("w0", 0, [report(1)])
    ledger.report("w0", 2, [report(1)])
    assert ledger.close(1.0) == []


def test_a_report_of_a_step_that_is_committed_already_adds_nothing() -> None:
    ledger = world("w0", "w1")
    ledger.report("w0", 1, [report(1)])
    ledger.complete(1.0, frozenset({"w1"}))
    ledger.report("w1", 1, [report(1)])
    assert ledger.close(2.0) == []


def test_finished_and_lost_members_are_not_waited_for() -> None:
    ledger = world("w0", "w1")
    ledger.report("w0", 1, [report(1)])
    assert ledger.complete(1.0, frozenset({"w0", "w1"})) == [], "nobody is left to say so"
    (steps,) = ledger.complete(1.0, frozenset({"w1"}))
    assert (steps.rows, steps.missing) == (BATCH, 1)


def test_what_only_a_lost_rank_had_reached_never_was_committed() -> None:
    ledger = world("w0", "w1")
    ledger.report("w1", 1, [report(1), report(2)])
    ledger.report("w0", 1, [report(1)])
    ledger.complete(1.0)
    assert ledger.begin(2, ["w0"], 1, "w1 lost", 2.0) == []
    ledger.report("w0", 2, [report(2)])
    (steps,) = ledger.complete(3.0)
    assert (steps.generation, steps.first_step) == (2, 2)


def test_a_survivor_ahead_of_the_others_commits_for_all() -> None:
    ledger = world("w0", "w1", "w2")
    ledger.report("w0", 1, [report(1)])
    (steps,) = ledger.begin(2, ["w0", "w1"], 1, "w2 lost", 2.0)
    assert (steps.first_step, steps.missing, ledger.committed) == (1, 2, 1)


def test_a_generation_that_starts_lower_is_a_roll_back() -> None:
    ledger = world("w0", committed=10)
    ledger.report("w0", 1, [report(11), report(12)])
    ledger.complete(1.0)
    assert ledger.begin(2, ["w1"], 11, "all lost", 2.0) == [
        ev.StepsRolledBack(at=2.0, from_step=12, to_step=11, cause="all lost")
    ]
    assert ledger.committed == 11


def test_a_checkpoint_ahead_of_all_reports_is_said() -> None:
    ledger = world("w0")
    ledger.report("w0", 1, [report(1)])
    steps, warned = ledger.begin(2, ["w1"], 3, "all lost", 2.0)
    assert steps.first_step == 1
    assert (warned.where, warned.message.split(",")[0]) == ("generation 2", "steps 2 to 3")
    ledger.report("w1", 2, [report(4)])
    assert ledger.complete(3.0)[0].first_step == 4


def test_a_generation_that_comes_late_is_passed_over() -> None:
    ledger = world("w0")
    ledger.begin(3, ["w2"], 0, "all lost", 1.0)
    assert ledger.begin(2, ["w1"], 0, "all lost", 1.0) == []
    assert ledger.begin(3, ["w1"], 0, "all lost", 1.0) == []
    ledger.report("w2", 3, [report(1)])
    assert ledger.complete(2.0)[0].generation == 3


def test_at_the_end_all_that_any_member_reported_is_committed() -> None:
    ledger = world("w0", "w1")
    ledger.report("w0", 1, [report(1), report(2), report(4)])
    (steps,) = ledger.close(1.0)
    assert (steps.first_step, len(steps.times), ledger.committed) == (1, 2, 2)


@settings(max_examples=60, stateful_step_count=40, deadline=None)
class LedgerMachine(RuleBasedStateMachine):
    """Ranks that report in any order, late or never, and generations from any step, against the log of facts alone."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.generation, self.members, self.at = 1, ["w0", "w1", "w2"], {}
        self.reported: dict[tuple[int, int], dict[str, Report]] = {}  # (generation, step) -> by whom
        self.history: list[int] = []  # the generation of each step of the final history
        self.take(self.ledger.begin(1, self.members, 0, "start", 0.0))
        self.reset_ranks(0)

    def reset_ranks(self, step: int) -> None:
        self.at = dict.fromkeys(self.members, step)

    def take(self, facts: list[ev.Event]) -> int:
        """Replay the facts; the number of roll-backs among them."""
        rolled_back = 0
        for fact in facts:
            if isinstance(fact, ev.StepsCommitted):
                assert fact.first_step == len(self.history) + 1, "a step lost or committed twice"
                reports = []
                for number, at in enumerate(fact.times):
                    step = fact.first_step + number
                    by_rank = self.reported[fact.generation, step]
                    assert at == min(item.at for item in by_rank.values())
                    assert fact.missing == len(self.members) - len(by_rank)
                    (epoch, first) = fact.cursors["train"]
                    assert divmod(step - 1, EPOCH) == (epoch, first + number)
                    reports += by_rank.values()
                    self.history.append(fact.generation)
                assert fact.rows == sum(item.rows for item in reports)
            elif isinstance(fact, ev.StepsRolledBack):
                rolled_back += 1
                assert (fact.from_step, fact.to_step < fact.from_step) == (len(self.history), True)
                del self.history[fact.to_step :]
            elif isinstance(fact, ev.MetricsReported):
                losses = [item.values["loss"] for item in self.reported[self.generation, fact.step].values()]
                assert abs(fact.values["loss"] - sum(losses) / len(losses)) < 1e-9
        return rolled_back

    @rule(rank=st.integers(0, 3), count=st.integers(1, 4), rows=st.integers(0, BATCH), late=st.booleans())
    def rank_reports(self, rank: int, count: int, rows: int, late: bool) -> None:
        name = self.members[rank % len(self.members)]
        first = self.at[name] + 1
        batch = [report(first + n, rows, loss=float(rank + n)) for n in range(count)]
        self.at[name] += count
        if late:  # lost on the way, or from before
            self.ledger.report(name, self.generation - 1, batch)
            return
        for item in batch:
            self.reported.setdefault((self.generation, item.step), {})[name] = item
        self.ledger.report(name, self.generation, batch)

    @rule(gone=st.frozensets(st.integers(0, 3)))
    def completes(self, gone: frozenset[int]) -> None:
        names = frozenset(self.members[rank] for rank in gone if rank < len(self.members))
        assert self.take(self.ledger.complete(1.0, names)) == 0
        wanted = set(self.members) - names
        ready = self.reported.get((self.generation, len(self.history) + 1), {})
        assert not wanted or not wanted <= ready.keys(), "a step that all have reported was left out"

    @rule(size=st.integers(1, 4), back=st.integers(0, 3))
    def generation_begins(self, size: int, back: int) -> None:
        """From the newest step that any rank has reached, or from an older one out of a checkpoint."""
        held = max(self.at.values())
        while held > len(self.history) and not self.reported.get((self.generation, held)):
            held -= 1
        step = max(0, held - back)
        before = len(self.history)
        members = [f"w{self.generation * 4 + n}" for n in range(size)]
        facts = self.ledger.begin(self.generation + 1, members, step, "lost", 2.0)
        rolled_back = self.take(facts)
        assert rolled_back == (1 if step < before else 0)
        if any(isinstance(fact, ev.Warned) for fact in facts):  # a step in between was reported by nobody
            self.history += [self.generation] * (step - len(self.history))
        assert len(self.history) == step
        self.generation, self.members = self.generation + 1, members
        self.reset_ranks(step)

    @invariant()
    def they_agree(self) -> None:
        assert self.ledger.committed == len(self.history)

    def teardown(self) -> None:
        assert self.take(self.ledger.close(3.0)) == 0
        assert (self.generation, len(self.history) + 1) not in self.reported


TestLedgerMachine = LedgerMachine.TestCase


def test_the_longest_wait_of_each_step_and_the_hashes_of_all_ranks_are_added_up() -> None:
    ledger = world("w0", "w1")

    def told(step: int, wait_s: float, row_hash: int) -> Report:
        return Report(step, 1.0, 4, {"train": (0, step - 1)}, wait_s=wait_s, hashes={"train": row_hash})

    ledger.report("w0", 1, [told(1, 0.5, 2**64 - 1), told(2, 0.25, 0)])
    ledger.report("w1", 1, [told(1, 0.125, 3), told(2, 0.75, 0)])
    (fact,) = ledger.complete(1.0)
    assert (fact.wait_s, fact.hashes) == (1.25, {"train": f"{2:016x}{0:016x}"})


def test_what_a_rank_did_not_live_to_report_is_taken_from_the_plan() -> None:
    for planned, hashes in ((lambda name, epoch, offset: 100 * epoch + offset, {"train": f"{3:016x}"}), (None, {})):
        ledger = Ledger(3, planned)
        ledger.begin(1, ["w0", "w1"], 3, "start", 0.0)
        ledger.report("w0", 1, [Report(4, 1.0, 4, {"train": (0, 3)}, hashes={"train": 7})])
        (fact,) = ledger.begin(2, ["w0"], 4, "w1 lost", 1.0)
        assert (fact.missing, fact.hashes) == (1, hashes)


def test_of_a_step_that_not_all_lived_to_report_no_value_is_told_that_may_be_a_share() -> None:
    ledger = Ledger()
    ledger.begin(1, ["a", "b"], 0, "start", 0.0)
    ledger.report("a", 1, [report(1, loss=1.0, of_rank_0=7.0), report(2, loss=1.0, of_rank_0=8.0, new=1.0)])
    ledger.report("b", 1, [report(1, loss=3.0)])
    facts = ledger.complete(1.0) + ledger.begin(2, ["a"], 2, "b lost", 2.0)
    told = [fact.values for fact in facts if isinstance(fact, ev.MetricsReported)]
    assert told == [{"loss": 2.0, "of_rank_0": 7.0}, {"of_rank_0": 8.0}]
    ledger.report("a", 2, [report(3, loss=math.nan)])
    (told,) = [fact.values for fact in ledger.begin(3, ["c"], 3, "a lost", 3.0) if isinstance(fact, ev.MetricsReported)]
    assert math.isnan(told["loss"])


def test_a_report_found_in_memory_completes_what_others_said_and_counts_nobody_twice() -> None:
    ledger = Ledger()
    ledger.begin(1, ["a", "b"], 0, "start", 0.0)
    ledger.report("a", 1, [Report(1, 1.0, 3), Report(2, 2.0, 3)])
    ledger.report("b", 1, [Report(1, 1.0, 5)])
    ledger.find("b", 1, [Report(1, 1.0, 5), Report(2, 2.0, 5), Report(3, 3.0, 5)])
    facts = ledger.begin(2, ["c"], 3, "all lost", 4.0)
    assert [(fact.first_step, fact.rows, fact.missing) for fact in facts] == [(1, 16, 0), (3, 5, 1)]
    assert ledger.committed == 3
    ledger.find("b", 2, [Report(3, 3.0, 5)])
    assert ledger.begin(3, ["c"], 3, "all lost", 5.0) == []


@pytest.mark.parametrize(("worker", "generation"), [("a", 5), ("b", 5), ("a", 7)])
@pytest.mark.parametrize("told", [False, True])
def test_a_report_found_of_a_world_that_was_rolled_back_had_another_share(
    worker: str, generation: int, told: bool
) -> None:
    """Seeds 15 to 19: three committed a step, of whom one survived that had not; it trained it again, alone, and froze.
    Then the step was found in the memory of another of the three, and its share was taken for all of it."""
    ledger = Ledger()
    ledger.begin(5, ["a", "b", "c"], 0, "start", 0.0)
    ledger.report("a", 5, [Report(1, 1.0, 8)])
    ledger.begin(6, ["a", "b"], 1, "c lost", 2.0)
    assert [type(fact) for fact in ledger.begin(7, ["b"], 0, "a lost", 3.0)] == [ev.StepsRolledBack]
    if told:
        ledger.report("b", 7, [Report(1, 4.0, 24)])
    ledger.find(worker, generation, [Report(1, 1.0, 8)])
    (fact,) = ledger.begin(8, ["x"], 1, "b frozen", 5.0)
    assert (fact.rows, fact.missing) == ((24, 0) if told else (8, 1))
