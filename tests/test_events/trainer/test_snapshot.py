"""Tests that snapshots of any state are copied, written and loaded unchanged."""

import contextlib
import datetime as dt
import decimal
import enum
import pathlib
import struct
import warnings
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from events import CheckpointError
from events.trainer.checkpoint.files import write_checkpoint
from events.trainer.checkpoint.plain import plain_values
from events.trainer.checkpoint.snapshot import (
    NotEnoughMemoryError,
    SnapshotBuffer,
    outline_of,
    rebuild,
)


def through_a_file(values, path, buffer=None):
    """Returns what is loaded after a copy, a change of the original tensors' buffer, and a file."""
    buffer = buffer or SnapshotBuffer()
    snapshot, wait = buffer.take(values)
    wait()
    write_checkpoint(rebuild(snapshot, buffer.memory), path)
    return torch.load(path, weights_only=True)


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

    assert outline_of(values).room == weight.nbytes + 64
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


class Mode(enum.StrEnum):
    """A string with a class of its own."""

    FAST = "fast"


class Old(str, enum.Enum):  # noqa: UP042  # as old code has them
    """The same, as before Python 3.11: its `str()` is "Old.FAST"."""

    FAST = "fast"


class Level(enum.IntEnum):
    """A number with a class of its own."""

    HIGH = 3


class Loud(float):
    """A number that says something else when it is asked."""

    def __float__(self):
        return 7.0


Pair = namedtuple("Pair", "first second")  # noqa: PYI024  # as old code has them


def numbers(*sizes):
    """Returns arrays and scalars of numpy of many types."""
    kinds = (
        "?",
        "i1",
        "<i8",
        ">i4",
        "u2",
        "u8",
        "f2",
        ">f4",
        "f8",
        "c8",
        ">c16",
        "g",
        "G",
        "M8[ns]",
        "m8[s]",
        "U1",
        "O",
    )
    return [
        np.zeros(size, kind) + (kind[0] in "fc<>" and 3) if kind[0] not in "?MmUO" else np.zeros(size, kind)
        for size in sizes
        for kind in kinds
    ]


def tensors():
    """Returns tensors of many types, layouts and kinds."""
    warnings.simplefilter("ignore")  # Some are experimental.
    base = torch.arange(12, dtype=torch.float32)
    wave = torch.view_as_complex(base.view(6, 2))
    dtypes = [one for one in vars(torch).values() if isinstance(one, torch.dtype)]
    plain = [
        torch.empty(0, dtype=one).set_(torch.UntypedStorage(bytes(range(64))), 1, (2, 3), (1, 2))
        for one in set(dtypes)
        if not str(one).startswith(("torch.q", "torch.bits"))
    ]
    return [
        *plain,
        base,
        base.view(torch.int32),
        base[3:9:2],
        base.view(3, 4).t(),
        wave,
        wave.conj(),
        wave.conj().imag,
        torch.empty(2, 0),
        torch.tensor(1.5, requires_grad=True),
        torch.tensor([1.0, 2.0], requires_grad=True) * 2,
        torch.nn.Parameter(torch.randn(2)),
        torch.nn.Buffer(torch.randn(2)),
        torch.eye(3).to_sparse(),
        torch.eye(2).to_sparse_csr(),
        torch.ones(1).expand(3),
        torch.empty(3, device="meta"),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.nn.parameter.UninitializedParameter(),
        torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})),
    ]


def warned(make):
    """Returns what a function returns, whatever torch warns of."""
    with warnings.catch_warnings():
        return make()


def looped():
    """Returns a list that contains itself."""
    found = [1]
    found.append({"again": found})
    return found


def deep(levels):
    """Returns a list in a list, and so on."""
    found = []
    for _ in range(levels):
        found = [found]
    return found


KEYS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**2041), 2**2041)
    | st.floats()
    | st.text(st.characters(), max_size=3)
    | st.binary(max_size=3)
    | st.complex_numbers()
    | st.sampled_from([Mode.FAST, Old.FAST, Level.HIGH, Pair(1, "a"), ((1, b"a"), None), frozenset({1})])
    | st.sampled_from([np.float64(1), torch.bfloat16, torch.device("cpu"), torch.Size([1])])
)
ODD = [
    *(one for size in ((), 0, 3) for one in numbers(size)),
    *(one[()] for one in numbers(())),
    np.arange(6.0)[::-2],
    np.arange(6.0).reshape(2, 3).T,
    np.broadcast_to(np.float32(2.0), (2, 2)),
    np.frombuffer(b"abcd", np.uint8),
    np.ma.masked_array([1, 2], [True, False]),
    np.zeros(2, [("a", "i4"), ("b", "f8")])["b"],
    np.zeros(2, [("a", "i4"), ("b", "f8")]),
    *warned(tensors),
    bytearray(b"ab"),
    b"",
    Loud(2.5),
    np.str_("a"),
    np.bytes_(b"a"),
    {Old.FAST: np.int8(1)},
    defaultdict(list, a=[1]),
    Counter("aab"),
    object(),
    pathlib.Path("a"),
    dt.datetime(2026, 1, 1),  # noqa: DTZ001  # whatever a user has
    decimal.Decimal(1),
    range(3),
    torch.UntypedStorage(2),
    torch.Generator(),
    torch.Tensor,
    enum.Enum("Plain", "A").A,
    looped(),
    deep(90),
    deep(2000),
]
# By their places: of some there is no `repr`.
LEAVES = KEYS | st.integers(0, len(ODD) - 1).map(lambda place: ODD[place])
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | inner.map(lambda one: Pair(one, one))
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter)
        | st.sets(KEYS, max_size=3)
    ),
    max_leaves=6,
)


def is_same(loaded, saved):
    """Returns whether a value is what was saved, or the plain value that the docs name for it."""
    if isinstance(saved, torch.Tensor | np.ndarray):
        return is_same_tensor(loaded, saved)
    if isinstance(saved, np.generic) and not isinstance(saved, str | bytes):
        saved = saved.item()
    saved = saved.value if isinstance(saved, enum.Enum) else saved
    kinds = {
        Pair: tuple,
        Counter: dict,
        defaultdict: dict,
        frozenset: set,
        np.str_: str,
        np.bytes_: bytes,
        Loud: float,
    }
    kind = bytearray if saved == b"" else kinds.get(type(saved), type(saved))
    if type(loaded) is not kind:
        return False
    if kind in {dict, OrderedDict}:
        return is_same(list(loaded.items()), list(saved.items()))
    if kind is set:  # NaN is not equal to itself.
        return len(loaded) == len(saved) and all(
            any(is_same(one, other) for one in loaded) for other in saved
        )
    if kind in {list, tuple}:
        return len(loaded) == len(saved) and all(map(is_same, loaded, saved))
    if kind in {float, complex}:
        bits = [struct.pack("dd", one.real, one.imag) for one in (loaded, saved)]
        return bits[0] == bits[1]
    return loaded == saved


def is_same_tensor(loaded, saved):
    """Returns whether two tensors, or a tensor and an array, are the same, bit by bit."""
    is_strided = isinstance(saved, torch.Tensor) and saved.layout is torch.strided
    if isinstance(saved, np.ndarray):
        native = np.ascontiguousarray(saved, saved.dtype.newbyteorder("="))
        saved = torch.from_numpy(native).reshape(saved.shape)
    kind = torch.nn.Parameter if type(saved) is torch.nn.Parameter else torch.Tensor
    about = [(one.dtype, one.layout, one.is_nested, one.requires_grad) for one in (loaded, saved)]
    if type(loaded) is not kind or about[0] != about[1]:
        return False
    if saved.is_nested:
        return all(map(is_same_tensor, loaded.unbind(), saved.unbind()))
    if saved.shape != loaded.shape:
        return False
    if is_strided and loaded.stride() != saved.stride():
        return False
    whole = [one.detach().to_dense().resolve_conj().resolve_neg() for one in (loaded, saved)]
    bits = [bytes(torch.empty(one.shape, dtype=one.dtype).copy_(one).untyped_storage()) for one in whole]
    return bits[0] == bits[1]


def through_no_copy(values, path):
    """Returns what is loaded after a save for which training waits."""
    write_checkpoint(plain_values(values), path)
    return torch.load(path, weights_only=True)


def is_loaded_or_refused(way, value, path):
    """Returns whether a value comes back as the same, or is refused with its location."""
    with contextlib.suppress(CheckpointError):
        plain_values({"callbacks": {"Mine": value}})
        return is_same(way({"callbacks": {"Mine": value}}, path)["callbacks"]["Mine"], value)

    with pytest.raises(CheckpointError, match=" at /callbacks/Mine"):
        way({"callbacks": {"Mine": value}}, path)
    return True


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("way", [through_a_file, through_no_copy])
@settings(max_examples=40, deadline=None)
@given(value=VALUES)
def test_saved_values_are_loaded_and_others_are_refused_with_their_location(way, value, tmp_path_factory):
    """Equal and of the same type, or of the plain type that stands for it; whatever it is nested in."""
    assert is_loaded_or_refused(way, value, tmp_path_factory.getbasetemp() / "drawn.pt")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("way", [through_a_file, through_no_copy])
def test_so_is_each_odd_value(way, tmp_path):
    """What torch.load(weights_only=True) would refuse is converted, both ways of saving alike."""
    assert [one for one in ODD if not is_loaded_or_refused(way, one, tmp_path / "a.pt")] == []


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("save", [lambda values: SnapshotBuffer().take(values), plain_values])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2**2039, "an int of 2040 bits, where 2039 can be read, at /a/0"),
        ({"b": {torch.ones(1): 1}}, "a Tensor as a key or in a set at /a/0/b/<Tensor>"),
        ({frozenset({1})}, "a frozenset as a key or in a set at /a/0/0"),
        ({b"": 1}, "a bytes as a key or in a set at /a/0/<bytes>"),
        (np.longdouble(1), f"a numpy scalar of type {np.dtype('g')} at /a/0"),
        (np.zeros(1, "g"), f"an array of type {np.dtype('g')} at /a/0"),
        (np.datetime64(1, "ns"), r"a numpy scalar of type datetime64\[ns\] at /a/0"),
        (np.zeros(1, "M8[s]"), r"an array of type datetime64\[s\] at /a/0"),
        (np.ma.masked_array([1], [True]), "a MaskedArray, which a tensor cannot represent at /a/0"),
        (looped(), "a list that contains itself at /a/0/1/again"),
        (deep(2000), "more than 100 levels at /a/0/0/0"),
        (torch.empty(1, device="meta"), "a tensor on the device 'meta', which has no values, at /a/0"),
        (
            torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
            "a NestedTensor, which .* at /a/0",
        ),
        (torch.UntypedStorage(1), "an? UntypedStorage, which torch.load reads as .* at /a/0"),
        ({"\ud800": object()}, r"a object at /a/0/\\ud800"),
    ],
)
def test_values_that_could_not_be_read_again_are_refused_by_name(save, value, message):
    """Torch would write some of it, or say something else."""
    with pytest.raises(CheckpointError, match=message):
        save({"a": [value]})


@pytest.mark.parametrize("way", [through_a_file, through_no_copy])
def test_memory_of_two_types_is_saved_as_two(way, tmp_path):
    """torch.save refuses to write it once for both."""
    numbers = torch.arange(4, dtype=torch.float32)

    loaded = way({"a": numbers, "b": numbers.view(torch.int32), "c": numbers[1:]}, tmp_path / "a.pt")

    assert torch.equal(loaded["b"], numbers.view(torch.int32))
    loaded["a"][1] = 9.0
    assert (loaded["c"][0], loaded["b"][1]) == (9.0, 1065353216)


@pytest.mark.parametrize("save", [lambda values: SnapshotBuffer().take(values), plain_values])
def test_a_tensor_whose_memory_is_gone_is_refused(save):
    """A parameter that is gathered only while it is used is one."""
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)

    with pytest.raises(CheckpointError, match="a tensor whose memory has been freed at /a"):
        save({"a": tensor})


def test_a_list_that_is_there_twice_stays_one(tmp_path):
    """Else sixty lists of two each would be written 2**60 times."""
    twice = [1.5]
    for _ in range(60):
        twice = [twice, twice]

    loaded = through_a_file(twice, tmp_path / "a.pt")

    assert loaded[0] is loaded[1]


def test_the_buffer_is_kept_and_grows():
    """A state that grows, as an optimizer's after its first step, gets a larger one; a smaller state none."""
    buffer = SnapshotBuffer()
    identifiers = []

    for count in (100, 100, 50, 10_000, 100):
        snapshot, _ = buffer.take([torch.full((count,), float(count))])
        identifiers.append(snapshot.buffer)
        assert rebuild(snapshot, buffer.memory)[0].sum() == count * count

    assert [one - identifiers[0] for one in identifiers] == [0, 0, 0, 1, 1]


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
