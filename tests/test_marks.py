"""Marks are exact: whatever was drawn and whatever became of the buffers, going back to a mark is going back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_spark.worker import marks

DRAWS = {
    "uniform": lambda: np.random.rand(),
    "normal": lambda: np.random.randn(),  # every second one is left over from the pair before
    "many": lambda: np.random.rand(624),  # the position in the key is the same again
    "seed": lambda: np.random.seed(3),
    "seed again": lambda: np.random.set_state(np.random.get_state()),
    "nothing": lambda: None,
    "torch": lambda: torch.rand(1),
    "python": lambda: random.random(),
    "python normal": lambda: random.gauss(),  # every second one is left over here, too
    "python seed": lambda: random.seed(3),
}


def drawn():
    return np.random.randn(3).tolist(), np.random.rand(), torch.rand(2).tolist(), random.gauss(), random.random()


@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=6), st.lists(st.sampled_from(sorted(DRAWS)), max_size=6))
def test_a_generator_goes_back_to_where_the_last_mark_was(before, after):
    np.random.seed(1)
    kept = marks.RandomMarks()
    kept.take()
    for name in before:
        DRAWS[name]()
        kept.take()
    mark = kept.take()
    expected = drawn()
    marks.set_random_state(mark)
    for name in after:
        DRAWS[name]()
    marks.set_random_state(mark)
    assert drawn() == expected


def test_what_has_not_been_used_is_not_copied_again(monkeypatch):
    np.random.seed(1)
    kept = marks.RandomMarks()
    first = kept.take()
    monkeypatch.setattr(np.random, "get_state", lambda **_: pytest.fail("it was copied"))
    monkeypatch.setattr(random, "getstate", lambda: pytest.fail("it was copied"))
    again = kept.take()
    assert again["numpy"] is first["numpy"]
    assert again["python"] is first["python"]


def test_a_python_whose_words_are_not_found_is_asked_each_time(monkeypatch):
    monkeypatch.setattr(marks, "_address_of_python_words", lambda: None)
    kept = marks.RandomMarks()
    assert kept.take()["python"] == random.getstate()
    random.random()
    assert kept.take()["python"] == random.getstate()


def test_another_bit_generator_is_kept_as_it_is():
    mine = np.random.get_bit_generator()
    kept = marks.RandomMarks()
    kept.take()
    try:
        np.random.set_bit_generator(np.random.MT19937(7))
        mark = kept.take()
        expected = drawn()
        marks.set_random_state(mark)
        assert drawn() == expected
    finally:
        np.random.set_bit_generator(mine)


class Late(torch.nn.Module):
    """Makes its buffer when it is used, and then replaces it each time."""

    def forward(self, x):
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(1))
        self.seen = self.seen + len(x)
        return x


def buffers(model):
    return {name: value.tolist() for name, value in model.named_buffers()}


def test_buffers_go_back_also_where_they_come_late_are_replaced_or_belong_to_a_new_module():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), Late())
    model.register_buffer("nothing", None)
    kept = marks.BufferMarks([model, "no module"])
    x = torch.randn(8, 2)

    kept.take()
    before = buffers(model)
    model(x)
    assert buffers(model)["1.seen"] == [8]
    kept.put_back()
    assert buffers(model) == before
    assert not hasattr(model[1], "seen"), "the step that made it is undone"

    model(x)
    kept.take()
    before, live = buffers(model), model[1].seen
    model(x)
    model.nothing = torch.ones(1)
    model.append(torch.nn.BatchNorm1d(2))
    assert buffers(model)["1.seen"] == [16]
    kept.put_back()
    mine = {name: value for name, value in buffers(model).items() if not name.startswith("2.")}
    assert mine == before
    assert model[1].seen is live
    assert model.nothing is None

    model[0] = torch.nn.Identity()
    kept.take()
    model(x)
    kept.put_back()
    assert set(buffers(model)) == {"1.seen", "2.num_batches_tracked", "2.running_mean", "2.running_var"}
    assert buffers(model)["1.seen"] == [8]


def test_attributes_do_not_change_with_their_mark():
    given_ = {"best": 0.5, "history": [1, [2]], "name": "a"}
    mark = marks.copied(given_)
    given_["history"][1].append(3)
    assert mark == {"best": 0.5, "history": [1, [2]], "name": "a"}
