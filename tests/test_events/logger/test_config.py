"""Tests that hyperparameters of any kind become nested dictionaries of plain values."""

import argparse
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import json
import pathlib
import types
import typing

import attrs
import numpy as np
import pytest
import torch

from events import plain_config


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Mode(enum.StrEnum):
    FAST = "fast"


@attrs.define
class Slotted:
    lr: float
    path: pathlib.Path = pathlib.Path("data")


@attrs.define(slots=False)
class Unslotted:
    inner: Slotted
    color: Color = Color.RED
    late: int = attrs.field(init=False)


@dataclasses.dataclass(slots=True)
class SlottedData:
    lr: float
    late: int = dataclasses.field(init=False)


@dataclasses.dataclass
class Data:
    shared: typing.ClassVar[int] = 7
    inner: SlottedData
    seed: dataclasses.InitVar[int] = 0


class Pair(typing.NamedTuple):
    left: int
    right: Slotted


def _some_function():
    """Stands for a loss or an activation in a configuration."""


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"a": {"b": [1, (2, 3)]}}, {"a": {"b": [1, [2, 3]]}}),
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (types.MappingProxyType({"a": 1}), {"a": 1}),
        (Slotted(0.1), {"lr": 0.1, "path": "data"}),
        (Unslotted(Slotted(0.1)), {"inner": {"lr": 0.1, "path": "data"}, "color": "red"}),
        (SlottedData(0.1), {"lr": 0.1}),
        (Data(SlottedData(0.1)), {"inner": {"lr": 0.1}}),
        (Pair(1, Slotted(0.1)), {"left": 1, "right": {"lr": 0.1, "path": "data"}}),
        (argparse.Namespace(lr=0.1, inner=argparse.Namespace(a=1)), {"lr": 0.1, "inner": {"a": 1}}),
        (types.SimpleNamespace(lr=0.1), {"lr": 0.1}),
        ({}, {}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_objects_with_named_parts_become_dictionaries(config, expected):
    """Mappings, attrs classes, dataclasses, namespaces and named tuples may be nested in any way."""
    assert plain_config(config) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Color.RED, "red"),
        (Level.HIGH, 3),
        (Mode.FAST, "fast"),
        (pathlib.Path("a/b"), "a/b"),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.device("cpu"), "cpu"),
        (torch.Size([2, 3]), [2, 3]),
        (torch.tensor(3), 3),
        (torch.tensor([1.0, 2.0]), [1.0, 2.0]),
        (np.float32(0.5), 0.5),
        (np.int64(2**62 + 1), 2**62 + 1),
        (np.bool_(True), True),  # noqa: FBT003  # the value is what is tested
        (np.str_("a"), "a"),
        (np.array([[1, 2]]), [[1, 2]]),
        ({3, 1, 2}, [1, 2, 3]),
        (frozenset({"a"}), ["a"]),
        (True, True),
        (None, None),
        (float("inf"), float("inf")),
        (decimal.Decimal("0.1"), "0.1"),
        (dt.date(2026, 1, 2), "2026-01-02"),
        (_some_function, f"{__name__}._some_function"),
        (torch.nn.ReLU, "torch.nn.modules.activation.ReLU"),
        (range(3), "range(0, 3)"),
    ],
)
def test_a_value_becomes_a_plain_value_of_the_same_meaning(value, expected):
    """Python's own numbers, strings, booleans, None and lists stay; everything else becomes text."""
    plain = plain_config({"value": value})["value"]

    assert plain == expected
    assert type(plain) is type(expected)
    json.dumps(plain)


@pytest.mark.parametrize(
    ("key", "name"),
    [(1, "1"), (None, "None"), (Color.RED, "red"), (Mode.FAST, "fast"), (("a", 1), "['a', 1]")],
)
def test_keys_become_strings(key, name):
    """Destinations get only strings as keys."""
    assert plain_config({key: 1}) == {name: 1}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (5, {"value": 5}),
        ("lr=1", {"value": "lr=1"}),
        ([1, {"a": 2}], {"value": [1, {"a": 2}]}),
        (None, {}),
        (Slotted, {"value": f"{Slotted.__module__}.Slotted"}),
        ({1, 2}, {"value": [1, 2]}),
        (np.longdouble(1.5), {"value": "1.5"}),
    ],
)
def test_objects_without_names_are_one_value(config, expected):
    """No hyperparameter is lost."""
    assert plain_config(config) == expected


def test_nothing_is_shared_with_the_configuration():
    """Changing one does not change the other."""
    config = {"a": {"b": [1]}}

    plain = plain_config(config)
    plain["a"]["b"].append(2)
    config["a"]["c"] = 3

    assert config == {"a": {"b": [1], "c": 3}}
    assert plain == {"a": {"b": [1, 2]}}


def test_a_pydantic_model_is_its_fields_and_extras():
    """Secrets of pydantic stay hidden."""
    pydantic = pytest.importorskip("pydantic")

    class Inner(pydantic.BaseModel):
        rate: float = 0.1

    class Model(pydantic.BaseModel, extra="allow"):
        inner: Inner = Inner()
        password: pydantic.SecretStr = pydantic.SecretStr("hunter2")

    plain = plain_config({"model": Model(more=[1])})

    assert plain == {"model": {"inner": {"rate": 0.1}, "password": "**********", "more": [1]}}


def test_omegaconf_is_resolved_and_its_lists_are_lists():
    """Interpolations are filled in; missing values are shown as missing."""
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"a": 1, "layers": [1, {"b": "${a}"}], "missing": "???"})

    assert plain_config(config) == {"a": 1, "layers": [1, {"b": 1}], "missing": "???"}
    assert plain_config({"layers": config.layers}) == {"layers": [1, {"b": 1}]}


def test_an_unresolvable_value_of_omegaconf_affects_no_other():
    """It stays as written, and all others are resolved, also in lists and in references to it."""
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create(
        {
            "lr": 0.1,
            "rate": "${lr}",
            "gone": "${nowhere}",
            "raised": "${oc.decode:'{'}",
            "layers": [1, "${nowhere}", "${lr}"],
            "inner": {"rate": "${lr}", "gone": "${nowhere}", "missing": "???", "none": None},
            "same": "${inner}",
        }
    )
    inner = {"rate": 0.1, "gone": "${nowhere}", "missing": "???", "none": None}

    assert plain_config(config) == {
        "lr": 0.1,
        "rate": 0.1,
        "gone": "${nowhere}",
        "raised": "${oc.decode:'{'}",
        "layers": [1, "${nowhere}", 0.1],
        "inner": inner,
        "same": inner,
    }


class _Raises:
    """A field that another program computes, and cannot."""

    def __get__(self, owner, kind):
        if owner is None:
            return self
        raise RuntimeError("not computed")

    def __set__(self, owner, value):
        """Takes anything."""


class ConfigDict:
    """Has the methods of ml_collections' class, which is no `Mapping`; its keys are attributes too."""

    def __init__(self, **fields):
        self._fields = fields

    def keys(self):
        return list(self._fields)

    def items(self):
        return [(key, self[key]) for key in self._fields]

    def __getitem__(self, key):
        if self._fields[key] is _Raises:
            raise ValueError("required")
        return self._fields[key]

    def __getattr__(self, key):
        try:
            return self[key]
        except KeyError as error:
            raise AttributeError(key) from error


class LazyMapping(collections.abc.Mapping):
    """Raises for one of its values."""

    def __iter__(self):
        return iter(["lr", "late"])

    def __len__(self):
        return 2

    def __getitem__(self, key):
        if key == "late":
            raise RuntimeError("not computed")
        return 0.1


def _with_raising_field(decorate):
    class Config:
        lr: float = 0.1
        late: int = 0

    config = decorate(Config)
    config.late = _Raises()
    return config()


@pytest.mark.parametrize(
    "config",
    [
        LazyMapping(),
        _with_raising_field(dataclasses.dataclass),
        _with_raising_field(attrs.define(slots=False)),
    ],
    ids=["mapping", "dataclass", "attrs"],
)
def test_an_unreadable_field_affects_no_other(config):
    """Its text gives the reason; the other fields have their values."""
    expected = {"lr": 0.1, "late": "<unreadable: RuntimeError: not computed>"}

    assert plain_config(config) == expected
    assert plain_config({"inner": [config]}) == {"inner": [expected]}


def test_objects_with_the_methods_of_a_mapping_are_mappings():
    """Its keys may have any name, and one that raises affects no other."""
    config = ConfigDict(lr=0.1, shape=[2], item=ConfigDict(dtype="bf16"), seed=_Raises)

    assert plain_config(config) == {
        "lr": 0.1,
        "shape": [2],
        "item": {"dtype": "bf16"},
        "seed": "<unreadable: ValueError: required>",
    }


def test_flags_of_absl_are_a_configuration():
    """They come by name."""
    flags = pytest.importorskip("absl.flags")
    values = flags.FlagValues()
    flags.DEFINE_float("lr", 0.1, "the rate", flag_values=values)
    values.mark_as_parsed()

    assert plain_config(values)["lr"] == 0.1
