"""Tests that each metric arrives as a Python number, or is refused by name."""

import fractions
import subprocess
import sys

import numpy as np
import pytest
import torch
import torchmetrics
from tensordict import TensorDict

from destinations import LoggerDestination
from events import Logger, RecordError, State
from events.logger.values import host_metrics, to_host


class Received(LoggerDestination):
    def __init__(self):
        self.metrics = []

    def log_metrics(self, metrics, step=None):
        self.metrics.append(metrics)


def _logged(metrics):
    received = Received()
    Logger(State("r"), received, raise_errors=True, strict=True).log_metrics(metrics)
    (only,) = received.metrics
    return only


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [*((dtype, 0.5) for dtype in FLOATS), *((dtype, 3) for dtype in INTEGERS), (torch.bool, True)],
    ids=str,
)
def test_a_tensor_of_one_element_is_its_number(shape, dtype, value):
    """It may have any dtype and shape; booleans and integers stay what they are."""
    tensor = torch.full(shape, value, dtype=torch.float32).to(dtype)

    number = _logged({"a": tensor})["a"]

    assert (number, type(number)) == (value, type(value))


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (np.longdouble(0.5), 0.5),
        (np.int64(2**63 - 1), 2**63 - 1),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.int8(-3), -3),
        (np.bool_(False), False),  # noqa: FBT003  # the value is what is tested
        (np.array(0.5), 0.5),
        (np.array([[7]]), 7),
        (fractions.Fraction(1, 2), 0.5),
        (True, True),
        (3, 3),
        (0.1, 0.1),
    ],
)
def test_a_scalar_of_another_library_is_its_number(scalar, value):
    """Nothing is lost on the way, and the type is Python's own."""
    number = _logged({"a": scalar})["a"]

    assert (number, type(number)) == (value, type(value))


def test_a_64_bit_integer_keeps_its_last_bit():
    """A float in between would lose it."""
    assert _logged({"a": torch.tensor(2**63 - 1), "b": np.int64(2**53 + 1)}) == {
        "a": 2**63 - 1,
        "b": 2**53 + 1,
    }


def test_values_that_are_no_finite_number_pass():
    """A NaN loss is worth knowing."""
    metrics = _logged({"a": torch.tensor(float("nan")), "b": float("inf"), "c": np.float32("-inf")})

    assert str(metrics) == "{'a': nan, 'b': inf, 'c': -inf}"


def test_nested_mappings_are_flattened_in_order():
    """Names are joined with a slash, and come in the caller's order."""
    metrics = _logged({"z": 1, "loss": {"train": {"ce": 0.5, "kl": torch.tensor(0.25)}}, "a": 2, "none": {}})

    assert list(metrics.items()) == [("z", 1), ("loss/train/ce", 0.5), ("loss/train/kl", 0.25), ("a", 2)]


def test_the_callers_dictionary_is_not_changed():
    """Its tensors stay tensors."""
    tensor = torch.tensor(0.5)
    metrics = {"a": tensor, "b": {"c": 1}}

    _logged(metrics)

    assert metrics == {"a": tensor, "b": {"c": 1}}
    assert metrics["a"] is tensor


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (
            torch.zeros(8),
            r"metric 'bad' must be a scalar, got shape \(8,\)\. Log a mean, or use log_histogram\.",
        ),
        (np.zeros((2, 3)), r"metric 'bad' must be a scalar, got shape \(2, 3\)\. Log a mean"),
        (torch.zeros(0), r"metric 'bad' must be a scalar, got shape \(0,\)\."),
        ([1.0, 2.0], r"metric 'bad' must be a scalar, got a list of 2\. Log a mean"),
        ("0.5", r"metric 'bad' must be a scalar, got the string '0\.5'\. Use log_text\."),
        (None, r"metric 'bad' must be a scalar, got None \(NoneType\)\. Log a number\."),
        (1j, r"metric 'bad' must be a scalar, got 1j \(complex\)\. Log a number\."),
        (
            torch.tensor(1j),
            r"metric 'bad' must be a scalar, got a value of dtype torch\.complex64\. Log a real",
        ),
        (np.str_("x"), r"metric 'bad' must be a scalar, got a value of dtype <U1\. Log a real number\."),
        ({"in": [1]}, r"metric 'bad/in' must be a scalar, got a list of 1\."),
    ],
)
def test_values_that_are_no_scalars_are_named_and_the_others_are_logged(value, complaint):
    """The message has the name, the shape and what to use instead; siblings arrive."""
    received = Received()
    logger = Logger(State("r"), received, raise_errors=True, strict=True)

    with pytest.raises(RecordError, match=complaint):
        logger.log_metrics({"before": 1, "bad": value, "after": torch.tensor(2)})

    assert received.metrics == [{"before": 1, "after": 2}]


def test_every_bad_metric_is_named_at_once():
    """The caller can fix all of them at once."""
    with pytest.raises(RecordError, match=r"'a'.* 'b'.*must have a string as its name, got 3 \(int\)"):
        Logger(State("r"), strict=True).log_metrics({"a": "x", "b": [1], 3: 1.0})


def test_nothing_is_delivered_where_nothing_is_good():
    """An empty record has no use."""
    received = Received()

    with pytest.raises(RecordError):
        Logger(State("r"), received, strict=True).log_metrics({"a": "x"})

    assert received.metrics == []


@pytest.mark.parametrize("metrics", [5, "loss", None, [("a", 1)], ["a"], {"a"}])
def test_metrics_without_names_are_refused(metrics):
    """The message says what was given."""
    with pytest.raises(RecordError, match="metrics must be a dict from name to number, got"):
        Logger(State("r"), strict=True).log_metrics(metrics)


def test_plain_metrics_are_handed_on_uncopied():
    """The fast path makes no copy; the dict stays the caller's."""
    metrics = {"a": 1.0}

    assert _logged(metrics) is metrics


def test_host_metrics_gives_values_and_complaints():
    """The conversion itself raises nothing."""
    values, errors = host_metrics({"a": torch.tensor(1), "b": None})

    assert values == {"a": 1}
    assert len(errors) == 1


def test_to_host_detaches_tensors_in_lists_too():
    """A destination may convert what it gets to numpy; other values are unchanged."""
    tensor = torch.ones(2, requires_grad=True)
    array = np.ones(2)

    single, several, other, text = to_host(tensor), to_host([(tensor, 1)]), to_host(array), to_host("x")

    assert not single.requires_grad
    assert single.data_ptr() == tensor.data_ptr()
    assert not several[0][0].requires_grad
    assert several[0][1] == 1
    assert other is array
    assert text == "x"


# Nested, and of other libraries
# ----------------------------------------------------------------------------------


def test_a_tensordict_is_flattened_at_any_depth():
    """As the whole, and inside a dict; wrapped values are unwrapped."""
    nested = TensorDict({"a": torch.tensor(1.5), "n": TensorDict({"b": torch.tensor(2)}, []), "c": 3.0}, [])

    assert _logged(nested) == {"a": 1.5, "n/b": 2, "c": 3.0}
    assert _logged({"x": nested, "y": 1}) == {"x/a": 1.5, "x/n/b": 2, "x/c": 3.0, "y": 1}
    assert _logged(TensorDict({"a": torch.tensor([True]), "b": torch.tensor(2**63 - 1)}, [])) == {
        "a": True,
        "b": 2**63 - 1,
    }


@pytest.mark.parametrize(
    "metrics",
    [
        {"a": {"b": 1}, "a/b": 2},
        {"a/b": 1, "a": {"b": 2}},
        TensorDict({"a": TensorDict({"b": torch.tensor(1)}, []), "a/b": torch.tensor(2)}, []),
    ],
    ids=["dict", "nested last", "TensorDict"],
)
def test_two_values_of_one_name_are_an_error(metrics):
    """The first value stays; nothing is overwritten silently."""
    received = Received()

    with pytest.raises(RecordError, match="metric 'a/b' must be given once, got it again"):
        Logger(State("r"), received, strict=True).log_metrics(metrics)

    assert received.metrics == [{"a/b": 1}]


def test_results_of_torchmetrics_are_logged():
    """One value, or a collection's dict; for a metric object itself, the message asks for compute()."""
    accuracy = torchmetrics.classification.BinaryAccuracy()
    accuracy.update(torch.tensor([1, 0, 1, 1]), torch.tensor([1, 0, 0, 1]))
    both = torchmetrics.MetricCollection({"accuracy": accuracy, "mean": torchmetrics.MeanMetric()})
    both["mean"].update(2.0)

    assert _logged({"accuracy": accuracy.compute(), "all": both.compute()}) == {
        "accuracy": 0.75,
        "all/accuracy": 0.75,
        "all/mean": 2.0,
    }
    with pytest.raises(RecordError, match=r"got a BinaryAccuracy\. Log what its compute\(\) returns\."):
        Logger(State("r"), strict=True).log_metrics({"accuracy": accuracy})


def test_the_local_shard_of_a_dtensor_is_logged():
    """There is no collective, because other ranks may be elsewhere."""

    class Distributed:
        placements = ("a placement",)
        shape = (8,)

        def to_local(self):
            return torch.tensor(0.5)

        def full_tensor(self):
            raise AssertionError("all ranks were asked")

        item = tolist = redistribute = full_tensor

    assert _logged({"a": Distributed()}) == {"a": 0.5}


def test_a_tensor_without_data_is_named():
    """Its siblings are logged."""
    received = Received()

    with pytest.raises(RecordError, match="metric 'a' must be a scalar, got a tensor on the meta device"):
        Logger(State("r"), received, strict=True).log_metrics({"a": torch.zeros((), device="meta"), "b": 1})

    assert received.metrics == [{"b": 1}]


@pytest.mark.parametrize(
    "metrics",
    [
        {"a": torch.tensor(0.5), "b": torch.tensor([True]), "c": torch.tensor([[3]])},
        {"a": torch.tensor(0.5), "b": 1, "c": torch.nn.Parameter(torch.tensor(2.0))},
        TensorDict({"a": torch.tensor(0.5)}, []),
    ],
    ids=["tensors", "mixed", "TensorDict"],
)
def test_the_short_way_and_the_long_way_agree(metrics):
    """The fast path gives the same result."""
    assert _logged(metrics) == host_metrics(metrics)[0]


@pytest.mark.parametrize(
    ("metrics", "logged"),
    [
        ({"a": torch.tensor(1j)}, None),
        ({"a": torch.zeros(3)}, None),
        ({"a": 1.0, "b": torch.zeros(0)}, {"a": 1.0}),
        ({"a": torch.tensor(1j), "b": 1.0}, {"b": 1.0}),
        ({3: torch.tensor(1.0)}, None),
        ({"a": {"b": 1}}, {"a/b": 1}),
        ({"a": "x"}, None),
        (7, None),
        (None, None),
    ],
    ids=str,
)
def test_the_fast_path_leaves_other_values_to_the_slow_path(metrics, logged):
    """The slow path reports it, nothing is raised, and the same call made again ends the same."""
    received = Received()
    logger = Logger(State("r"), received)

    for _ in range(2):
        logger.log_metrics(metrics)

    assert received.metrics == ([] if logged is None else [logged] * 2)
    assert sum(logger.faults.value_counts.values()) == (0 if logged == {"a/b": 1} else 2)


def test_tensordict_is_imported_only_by_the_user():
    """It is optional, and slow to import."""
    program = "import sys, torch, events; events.Logger(events.State('r')).log_metrics({'a': torch.tensor(1)}); sys.exit('tensordict' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], timeout=300, check=False).returncode == 0
