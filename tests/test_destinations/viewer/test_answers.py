"""Answers are strict JSON for any values."""

import json

import numpy as np
import pytest

from destinations.viewer import answers

ANSWER = {
    "x": np.arange(3),
    "y": np.array([1.5, np.nan, np.inf]),
    "every second": np.arange(6.0)[::2],
    "huge": 1 << 70,
    "number": float("-inf"),
    "name": "\udcff<script>\u2028",
    "scalar": np.float64(2.5),
    3: [None, True, ("a",)],
}
EXPECTED = {
    "x": [0, 1, 2],
    "y": [1.5, None, None],
    "every second": [0.0, 2.0, 4.0],
    "huge": 1 << 70,
    "number": None,
    "name": "\udcff<script>\u2028",
    "scalar": 2.5,
    "3": [None, True, ["a"]],
}


def refuse(constant):
    """Fails for NaN and the like, which are not JSON."""
    raise AssertionError(constant)


@pytest.mark.parametrize("dump", [answers.encode, answers._dump_plain])
@pytest.mark.parametrize("left_out", [(), ("huge", "name", "every second")])
def test_an_answer_is_strict_json(dump, left_out):
    """This holds for values that orjson refuses, too."""
    answer = {name: value for name, value in ANSWER.items() if name not in left_out}
    expected = {name: value for name, value in EXPECTED.items() if name not in left_out}

    assert json.loads(dump(answer), parse_constant=refuse) == expected


def test_non_finite_numbers_keep_their_names():
    """Hyperparameters and last values distinguish NaN and both infinities."""
    value = {"lr": float("nan"), "deep": [float("inf"), {"x": float("-inf")}], "n": 1, "t": ("a", None)}

    assert answers.plain(value) == {
        "lr": {"number": "nan"},
        "deep": [{"number": "inf"}, {"x": {"number": "-inf"}}],
        "n": 1,
        "t": ["a", None],
    }
