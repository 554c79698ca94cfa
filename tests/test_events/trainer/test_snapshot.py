"""Snapshots: what is copied, written and loaded is what was there, whatever it was."""

import enum
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from events import CheckpointError
from events.trainer.checkpoint.files import write_checkpoint
from events.trainer.checkpoint.snapshot import (
    NotEnoughMemoryError,
    SnapshotBuffer,
    plain_values,
    rebuild,
    size_of,
)


def through_a_file(values, path, buffer=None):
    """Returns what is loaded after a copy, a change of the original tensors' buffer, and a file."""
    buffer = buffer or SnapshotBuffer()
    snapshot, wait = buffer.take(values)
    wait()
    write_checkpoint(rebuild(snapshot, buffer.memory), path)
    return torch.load(path, weights_only=True)


FLOAT8 = torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(9)[2:8:2],
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.randn(5).to(torch.bfloat16),
        FLOAT8,
        torch.arange(7),
        torch.tensor([True, False]),
        torch.randn(2, dtype=torch.complex64),
        torch.randn(2, dtype=torch.complex64).conj(),
        torch.ones(2, 3).expand(4, 2, 3),
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.randn(2)),
        torch.nn.Parameter(torch.randn(2), requires_grad=False),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tensor.layout}-{tuple(tensor.shape)}",
)
def test_tensors_of_every_kind_come_back_as_torch_save_brings_them(tensor, tmp_path):
    """The same values, type, shape, strides and class; with weights_only=True."""
    torch.save(tensor, tmp_path / "reference.pt")
    reference = torch.load(tmp_path / "reference.pt", weights_only=True)

    loaded = through_a_file({"a": tensor}, tmp_path / "a.pt")["a"]

    assert type(loaded) is type(reference)
    assert (loaded.dtype, loaded.shape, loaded.requires_grad) == (
        reference.dtype,
        reference.shape,
        reference.requires_grad,
    )
    if loaded.layout is torch.strided:
        assert loaded.stride() == reference.stride()
    bits = (lambda one: one.view(torch.uint8)) if tensor is FLOAT8 else (lambda one: one.to_dense())
    assert torch.equal(bits(loaded), bits(reference))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_a_quantized_tensor_comes_back(tmp_path):
    """It has no storage of its own kind that could be mapped."""
    tensor = torch.quantize_per_tensor(torch.randn(4), 0.1, 3, torch.qint8)

    loaded = through_a_file([tensor], tmp_path / "a.pt")[0]

    assert torch.equal(loaded.int_repr(), tensor.int_repr())
    assert (loaded.q_scale(), loaded.q_zero_point()) == (tensor.q_scale(), tensor.q_zero_point())


def test_tensors_that_share_memory_share_it_again_and_are_written_once(tmp_path):
    """Tied weights and views are one storage, in the buffer, in the file and when loaded."""
    weight = torch.randn(1000, 100)
    values = {"embedding": weight, "head": weight, "part": weight[3:5], "other": torch.zeros(2)}

    loaded = through_a_file(values, tmp_path / "a.pt")

    assert size_of(values) == weight.nbytes + 64
    assert (tmp_path / "a.pt").stat().st_size < weight.nbytes + 10_000
    loaded["embedding"][3] = 7.0
    assert torch.equal(loaded["head"][3], torch.full((100,), 7.0))
    assert torch.equal(loaded["part"][0], torch.full((100,), 7.0))
    assert not loaded["other"].any()


def test_the_copy_does_not_follow_the_original(tmp_path):
    """Training changes the state while the copy is written."""
    weight = torch.zeros(100)
    buffer = SnapshotBuffer()
    snapshot, _ = buffer.take({"a": weight})

    weight.fill_(1.0)

    assert not rebuild(snapshot, buffer.memory)["a"].any()


def test_the_versions_in_a_module_s_state_are_kept(tmp_path):
    """`load_state_dict` reads them: without them BatchNorm's counter would be taken for missing."""
    state = torch.nn.BatchNorm1d(2).state_dict()

    loaded = through_a_file(state, tmp_path / "a.pt")

    assert type(loaded) is OrderedDict
    assert loaded._metadata == state._metadata


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(min_size=1)
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
        | st.sets(st.integers())
    ),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(values=PLAIN)
def test_plain_values_come_back_equal_and_of_the_same_type(values, tmp_path_factory):
    """Whatever they are nested in."""
    path = tmp_path_factory.mktemp("plain") / "a.pt"

    loaded = through_a_file([values], path)[0]

    assert loaded == values
    assert type(loaded) is type(values)


class Mode(enum.StrEnum):
    """A string with a class of its own."""

    FAST = "fast"


Pair = namedtuple("Pair", "first second")  # noqa: PYI024  # as old code has them


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(1.5), 1.5),
        (np.int32(3), 3),
        (np.array([True])[0], True),
        (Mode.FAST, "fast"),
        (Pair(1, 2), (1, 2)),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (Counter("aab"), {"a": 2, "b": 1}),
        (frozenset({1}), {1}),
        (torch.Size([2]), torch.Size([2])),
        (torch.bfloat16, torch.bfloat16),
        (bytearray(b"x"), bytearray(b"x")),
        (b"", bytearray()),
    ],
)
def test_values_near_plain_ones_become_plain(value, expected, tmp_path):
    """What torch.load(weights_only=True) would refuse is converted, both ways of saving alike."""
    loaded = through_a_file({"a": value}, tmp_path / "a.pt")["a"]

    assert loaded == expected
    assert type(loaded) is type(expected)
    assert plain_values({"a": value})["a"] == expected


def test_a_numpy_array_becomes_a_tensor(tmp_path):
    """With its values and type."""
    loaded = through_a_file([np.arange(6, dtype=np.int16).reshape(2, 3)], tmp_path / "a.pt")[0]

    assert torch.equal(loaded, torch.arange(6, dtype=torch.int16).reshape(2, 3))


@pytest.mark.parametrize("save", [lambda values: SnapshotBuffer().take(values), plain_values])
def test_a_value_that_could_not_be_read_again_is_refused_with_its_place(save):
    """Better now than when the run is to be resumed."""
    with pytest.raises(CheckpointError, match="got a object at /callbacks/Mine/seen/1"):
        save({"callbacks": {"Mine": {"seen": [0, object()]}}})


def test_the_buffer_is_kept_and_grows():
    """A state that grows, as an optimizer's after its first step, gets a larger one; a smaller state none."""
    buffer = SnapshotBuffer()
    identifiers = []

    for count in (100, 100, 50, 10_000, 100):
        snapshot, _ = buffer.take([torch.full((count,), float(count))])
        identifiers.append(snapshot.buffer)
        assert rebuild(snapshot, buffer.memory)[0].sum() == count * count

    assert identifiers == [1, 1, 1, 2, 2]


def test_memory_that_is_not_there_is_not_taken():
    """The limit is asked before anything is allocated, and only for what is missing."""
    free = [10_000]
    buffer = SnapshotBuffer(available=lambda: free[0])
    buffer.take([torch.zeros(1000)])
    free[0] = 100

    buffer.take([torch.zeros(1000)])
    with pytest.raises(NotEnoughMemoryError, match="a copy of the state needs 4 MiB of memory"):
        buffer.take([torch.zeros(1 << 20)])


def test_preparing_changes_nothing_that_was_copied():
    """Pages may be made present while a snapshot is taken."""
    buffer = SnapshotBuffer()
    values = torch.randn(3 << 20)
    snapshot, _ = buffer.take([values])

    buffer.prepare()

    assert torch.equal(rebuild(snapshot, buffer.memory)[0], values)
