"""Turns what users keep hyperparameters in into nested dictionaries of plain values."""

import argparse
import dataclasses
import enum
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

import attrs

__all__ = ["plain_config", "safe_text"]

_LEAVES = (str, bool, float, type(None))
_DEEPEST = 100
# Python refuses to write an integer of more than 4,300 digits in decimal.
_LONGEST_INTEGER_BITS = 14_000


def plain_config(config: Any) -> dict[str, Any]:
    """Returns a configuration as nested dictionaries with string keys, lists, strings, numbers, booleans and None.

    Takes mappings, attrs classes and dataclasses (with or without slots), namespaces, named tuples, pydantic
    models and OmegaConf, nested in any way. Enum members become their values, paths, dtypes, devices and whatever else
    has no plain form become their text. A value that contains itself, is nested more than a hundred levels deep, or cannot
    be read, becomes a text that says so; the others are not affected. The configuration itself is not changed, and nothing
    in the result is shared with it.

    Raises:
        TypeError: the configuration as a whole is none of these.
    """
    plain = _plain(config)
    if not isinstance(plain, dict):
        raise TypeError(
            f"hyperparameters must be a mapping or a config object, got {type(config).__name__}. "
            'Write log_hyperparameters({"name": value}).'
        )
    return plain


def safe_text(value: Any) -> str:
    """Returns the text of a value, or one that says that it has none."""
    try:
        return "".join(str(value))
    except Exception as error:  # noqa: BLE001  # a user's own class
        return f"<{type(value).__name__} without a text: {type(error).__name__}>"


def _plain(value: Any, parents: tuple[Any, ...] = ()) -> Any:
    if type(value) in _LEAVES:
        return value
    if any(value is parent for parent in parents):
        return f"<{type(value).__name__} that contains itself>"
    if len(parents) >= _DEEPEST:
        return f"<{type(value).__name__} nested too deeply>"
    try:
        return _plain_inside(value, (*parents, value))
    except Exception:  # noqa: BLE001  # a user's own class
        return safe_text(value)


def _plain_inside(value: Any, parents: tuple[Any, ...]) -> Any:
    if isinstance(value, enum.Enum):
        return _plain(value.value, parents)
    fields = _fields(value)
    if fields is not None:
        return {
            key if type(key) is str else safe_text(_plain(key, parents)): _plain(item, parents)
            for key, item in fields.items()
        }
    if isinstance(value, list | tuple | set | frozenset) or _is_list_config(value):
        items = sorted(value, key=safe_text) if isinstance(value, set | frozenset) else value
        return [_plain(item, parents) for item in items]
    return _leaf(value, parents)


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """Returns what is inside something with named parts, or None."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(value):
        try:
            container = omegaconf.OmegaConf.to_container(value, resolve=True, throw_on_missing=False)
        except (
            omegaconf.errors.OmegaConfBaseException
        ):  # An interpolation that leads nowhere stays as it is written.
            container = omegaconf.OmegaConf.to_container(value, resolve=False)
        return container if isinstance(container, dict) else None
    if isinstance(value, Mapping):
        return value
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return vars(value)
    if isinstance(value, type):
        return None
    if attrs.has(type(value)):
        return _set_fields(value, attrs.fields(type(value)))
    if dataclasses.is_dataclass(value):
        return _set_fields(value, dataclasses.fields(value))
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        named: dict[str, Any] = value._asdict()
        return named
    pydantic = sys.modules.get("pydantic")
    if pydantic is not None and isinstance(value, pydantic.BaseModel):
        return {
            name: getattr(value, name) for name in (*type(value).model_fields, *(value.model_extra or ()))
        }
    return None


def _set_fields(value: Any, fields: Iterable[Any]) -> dict[str, Any]:
    """Returns the fields that have a value; one declared with `init=False` may have none yet."""
    return {field.name: getattr(value, field.name) for field in fields if hasattr(value, field.name)}


def _is_list_config(value: Any) -> bool:
    """Recognises a list of OmegaConf, which is no `list`; it resolves what it holds as it is gone through."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and omegaconf.OmegaConf.is_list(value)


def _leaf(value: Any, parents: tuple[Any, ...]) -> Any:
    """Returns numbers of other libraries as Python's own, and everything else as text."""
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return _plain(value.item(), parents)
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return _plain(value.tolist(), parents)
    if isinstance(value, bool | int | float | str):
        # A subclass, such as a boolean or integer flag of another library.
        number = next(base(value) for base in (bool, int, float, str) if isinstance(value, base))
        return (
            hex(number) if isinstance(number, int) and number.bit_length() > _LONGEST_INTEGER_BITS else number
        )
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return safe_text(value)
