"""Hyperparameters of any kind are kept, and the run ends."""

import argparse
import dataclasses
import datetime as dt
import decimal
import fractions
import json
import types

import numpy as np
import pytest
import torch
import yaml

from destinations import RunDirectory
from events import Run


class WithoutText:
    """An object that raises whenever it's converted to a text."""

    def __repr__(self):
        raise RuntimeError("no text")


@dataclasses.dataclass
class Config:
    """A dataclass with anything in it."""

    rate: object = 0.1


VALUES = {
    "complex64": np.complex64(1 + 2j),
    "complex": 1j,
    "longdouble": np.longdouble("0.1"),
    "clongdouble": np.clongdouble(1),
    "timedelta64": np.timedelta64(5, "s"),
    "datetime64": np.datetime64("2026-01-01"),
    "not a time": np.datetime64("NaT"),
    "object array": np.array([1, "a", None, {1: 2}], dtype=object),
    "object scalar": np.array({"a": 1}, dtype=object),
    "structured array": np.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
    "void": np.void(b"abc"),
    "function": len,
    "lambda": lambda: 1,
    "class": WithoutText,
    "no text": WithoutText(),
    "device": torch.device("cpu"),
    "dtype": torch.float16,
    "numpy dtype": np.dtype("float32"),
    "complex tensor": torch.tensor(1j),
    "meta tensor": torch.empty(2, device="meta"),
    "bfloat16": torch.tensor(1.5, dtype=torch.bfloat16),
    "namespace": argparse.Namespace(a=np.int8(1)),
    "simple namespace": types.SimpleNamespace(a=1),
    "dataclass": Config(Config()),
    "decimal": decimal.Decimal("1.5"),
    "fraction": fractions.Fraction(1, 3),
    "date": dt.date(2026, 1, 1),
    "bytes": b"\x00\xff",
    "range": range(3),
    "generator": (index for index in range(3)),
    "large integer": 10**5000,
    "not a number": float("nan"),
    "surrogate": "\ud800",
    "control characters": "\x00\x1b\u2028",
    "keys": {1: 1, None: 2, (1, 2): 3, 1.5: 4},
    "scalar": 3,
    "list": [1, {"a": 2}],
}


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_hyperparameters_of_any_kind_are_kept(value, is_alone, tmp_path):
    """`hparams.yaml` can be read and has the call's other values, and the run is completed."""
    with Run(RunDirectory(tmp_path / "run"), run_name="mine") as run:
        # If the whole argument is a function, it is called for its value.
        run.log_hyperparameters(value if is_alone and not callable(value) else {"value": value, "good": 1})
        run.log_hyperparameters({"later": 2})

    written = yaml.safe_load((tmp_path / "run" / "hparams.yaml").read_text())
    assert written["later"] == 2
    assert len(written) >= 2
    assert json.loads((tmp_path / "run" / "sidecar.json").read_text())["status"] == "completed"
    assert run.logger.faults.counts == run.logger.faults.value_counts == {}


def test_hyperparameters_of_omegaconf_are_kept(tmp_path):
    """Interpolations may be broken, and values may be missing."""
    omegaconf = pytest.importorskip("omegaconf")

    with Run(RunDirectory(tmp_path / "run"), run_name="mine") as run:
        run.log_hyperparameters(omegaconf.OmegaConf.create({"a": {"b": [1, "${nowhere}"]}, "c": "???"}))

    assert yaml.safe_load((tmp_path / "run" / "hparams.yaml").read_text()) == {
        "a": {"b": [1, "${nowhere}"]},
        "c": "???",
    }
