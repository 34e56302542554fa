"""What a state may hold, and what is refused because it could not come back as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from elastic_spark.worker import tree


@pytest.mark.parametrize(
    "value",
    [
        {0: torch.ones(1), "0": torch.zeros(1)},
        {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        {"a/0": np.ones(1), "a": [torch.zeros(1)]},
    ],
)
def test_two_values_of_one_path_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="two values of this path"):
        tree.flatten(value, "attributes/t")


def test_keys_that_are_no_strings_come_back() -> None:
    value = {0: torch.ones(1), (1, "a"): [np.arange(3), None], "b": {2: 3.0}}
    skeleton, tensors = tree.flatten(value, "t")
    back = tree.unflatten(skeleton, tensors)
    assert back.keys() == value.keys()
    assert torch.equal(back[0], value[0])
    assert back[(1, "a")][0].tolist() == [0, 1, 2]
    assert back["b"] == {2: 3.0}
