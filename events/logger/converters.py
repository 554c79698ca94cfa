"""Recognises configurations, tables and pictures, once for all destinations, adapters and importers.

Training thread only. A value of another library is known by its methods: nothing here imports pandas, polars,
pyarrow, matplotlib or torch.
"""

import argparse
import dataclasses
import enum
import functools
import io
import math
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from events.errors import RecordError

from .values import is_on_device

__all__ = ["as_picture", "as_table", "plain_cell", "plain_config", "safe_text"]

_LEAVES = (str, bool, float, type(None))
_MAX_DEPTH = 100
_UNSET = object()
# Python refuses to print integers of more than 4,300 digits in decimal.
_MAX_INTEGER_BITS = 14_000


def plain_config(config: Any) -> dict[str, Any]:
    """Returns a configuration as nested dictionaries with string keys, lists and plain values.

    ```python
    config = plain_config({"dtype": torch.bfloat16, "lr": np.float32(0.5)})
    print(config)  # {'dtype': 'torch.bfloat16', 'lr': 0.5}
    ```

    Takes mappings, attrs classes and dataclasses (with or without slots), namespaces, named tuples, pydantic
    models, OmegaConf, `ConfigDict` and flags of absl, nested in any way. Enum members become their values;
    paths, dtypes, devices and other objects their `str`. A value that contains itself, is nested more than a
    hundred levels deep, or cannot be read, is replaced by a note. An interpolation of OmegaConf that cannot
    be resolved stays unchanged. Neither affects other values. The configuration is not changed, and the
    result shares nothing with it. A number, text, list or any other single object becomes
    `{"value": ...}`, and None an empty dict.
    """
    plain = {} if config is None else _plain(config)
    return plain if isinstance(plain, dict) else {"value": plain}


def safe_text(value: Any) -> str:
    """Returns `str(value)`, or a placeholder if that raises.

    ```python
    print(safe_text(Time(3, "ep")))  # 3ep
    ```
    """
    try:
        return "".join(str(value))
    except Exception as error:  # noqa: BLE001  # a user's own class
        return f"<{type(value).__name__} without a text: {type(error).__name__}>"


def _leaf(value: Any, parents: tuple[Any, ...]) -> Any:
    """Returns numbers of other libraries as Python's, and everything else as text."""
    if getattr(getattr(value, "dtype", None), "kind", None) in {"m", "M"}:
        # Python's are of microseconds: numpy returns finer times as integers.
        return value.astype(str).tolist()
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        item = value.item()
        # `longdouble` and `clongdouble` of numpy are their own items: Python has no number as precise.
        return str(value) if type(item) is type(value) else _plain(item, parents)
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return _plain(value.tolist(), parents)
    if isinstance(value, float):
        return float(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return safe_text(value)


_Leaf = Callable[[Any, tuple[Any, ...]], Any]


def _plain(value: Any, parents: tuple[Any, ...] = (), leaf: _Leaf = _leaf) -> Any:
    if type(value) in _LEAVES or (type(value) is int and value.bit_length() <= _MAX_INTEGER_BITS):
        return value
    if any(value is parent for parent in parents):
        return f"<{type(value).__name__} that contains itself>"
    if len(parents) >= _MAX_DEPTH:
        return f"<{type(value).__name__} nested too deeply>"
    try:
        return _plain_inside(value, (*parents, value), leaf)
    except Exception:  # noqa: BLE001  # a user's own class
        return safe_text(value)


def _plain_inside(value: Any, parents: tuple[Any, ...], leaf: _Leaf) -> Any:
    value = _without_omegaconf(value)
    match value:
        case enum.Enum():
            return _plain(value.value, parents, leaf)
        case set() | frozenset():
            return [_plain(item, parents, leaf) for item in sorted(value, key=safe_text)]
    fields = _fields(value)
    if fields is not None:
        return {
            key if type(key) is str else safe_text(_plain(key, parents)): _plain(item, parents, leaf)
            for key, item in fields.items()
        }
    match value:
        case list() | tuple():
            return [_plain(item, parents, leaf) for item in value]
        case int():
            # A subclass, such as a boolean or integer flag of another library.
            number = int(value)
            return hex(number) if number.bit_length() > _MAX_INTEGER_BITS else number
    return leaf(value, parents)


def _without_omegaconf(value: Any) -> Any:
    """Returns a configuration of OmegaConf as a dict or list of its values; other values unchanged."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is None or not omegaconf.OmegaConf.is_config(value):
        return value
    as_written = functools.cache(lambda: omegaconf.OmegaConf.to_container(value, resolve=False))

    def read(key: Any) -> Any:
        try:
            return value[key]
        except Exception:  # noqa: BLE001  # a resolver's own error, or a value that is missing
            return as_written()[key]

    if omegaconf.OmegaConf.is_list(value):
        return [read(index) for index in range(len(value))]
    return {key: read(key) for key in value}


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """Returns the fields of a value by name, or None if it has none."""
    match value:
        case dict():
            return value
        case argparse.Namespace() | types.SimpleNamespace():
            return vars(value)
        case tuple() if hasattr(value, "_asdict"):
            named: dict[str, Any] = value._asdict()
            return named
        case type():
            return None
    if isinstance(value, Mapping):
        return _read_each(list(value), value.__getitem__)
    if attrs.has(type(value)):
        names = [field.name for field in attrs.fields(type(value))]
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif (pydantic := sys.modules.get("pydantic")) and isinstance(value, pydantic.BaseModel):
        names = [*type(value).model_fields, *(value.model_extra or ())]
    elif hasattr(value, "flag_values_dict"):  # The flags of absl.
        flags: dict[str, Any] = value.flag_values_dict()
        return flags
    else:
        return _read_each(list(value.keys()), value.__getitem__) if _is_like_mapping(value) else None
    # A field that is declared with `init=False` may not be set.
    found = _read_each(names, lambda name: getattr(value, name, _UNSET))
    return {name: item for name, item in found.items() if item is not _UNSET}


def _is_like_mapping(value: Any) -> bool:
    """Returns whether a value has the methods of a mapping, as a `ConfigDict` of ml_collections has."""
    # Its class is asked: the attributes of a configuration may be its keys.
    has = functools.partial(hasattr, type(value))
    return all(map(has, ("keys", "items", "__getitem__"))) and not (has("shape") or callable(value))


def _read_each(names: Iterable[Any], read: Callable[[Any], Any]) -> dict[Any, Any]:
    """Returns the result of `read` for each name, or a note if it raises."""
    found = {}
    for name in names:
        try:
            found[name] = read(name)
        except Exception as error:  # noqa: BLE001  # a user's own class
            found[name] = f"<unreadable: {type(error).__name__}: {safe_text(error):.200}>"
    return found


_MAX_CELL_VALUES = 10_000


def plain_cell(value: Any) -> Any:
    """Returns a cell of a table as a value that shares nothing with the given one.

    Arrays and tensors become numbers, or nested lists of up to 10,000 numbers, and a text that names dtype
    and shape above that. Images of PIL are copied, and figures drawn. Lists, tuples, mappings and objects
    with named parts are converted item by item, and other objects become their text. Tensors on a device are
    left to be copied first, if not too large.
    """
    return _plain(value, leaf=_cell_leaf)


def _cell_leaf(value: Any, parents: tuple[Any, ...]) -> Any:
    if hasattr(value, "getbands"):
        return value.copy()
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        if math.prod(value.shape) > _MAX_CELL_VALUES:
            return f"<{type(value).__name__} of {value.dtype}, shape {tuple(value.shape)}>"
        return value if is_on_device(value) else _leaf(value, parents)
    picture = as_picture(value)
    return picture if hasattr(picture, "getbands") else _leaf(picture, parents)


def as_picture(value: Any) -> Any:
    """Returns a figure of matplotlib as an image of PIL, as its `savefig` draws it; other values as they are.

    ```python
    from matplotlib.figure import Figure

    print(as_picture(Figure(figsize=(2, 1), dpi=50)).size)  # (100, 50)
    ```

    Also takes the axes of a figure, `pyplot`, and any other object with `savefig`. An object without a shape
    that converts to a numpy array becomes one.

    Raises:
        RecordError: the figure cannot be drawn.
    """
    if hasattr(value, "shape") or hasattr(value, "getbands"):
        return value
    try:
        if hasattr(value, "__array__"):
            import numpy as np

            return np.asarray(value)
        figure = value.get_figure() if hasattr(value, "get_figure") else value
        return _drawn(figure) if hasattr(figure, "savefig") else value
    except Exception as error:
        reason = f"{type(error).__name__}: {safe_text(error)}"
        raise RecordError(f"image must be an array or a figure that can be drawn, got {reason}.") from error


def _drawn(figure: Any) -> Any:
    import PIL.Image

    file = io.BytesIO()
    figure.savefig(file, format="png", dpi="figure", pil_kwargs={"compress_level": 0})
    with PIL.Image.open(file) as image:
        is_opaque = image.getextrema()[-1] == (255, 255)
        return image.convert("RGB" if is_opaque else "RGBA")


def as_table(columns: Any, rows: Any) -> tuple[Any, Any]:
    """Returns the columns of a table, and a list of values for each row.

    ```python
    print(as_table({"image": [12, 7], "guess": ["dog", "cat"]}, None))
    # prints: (['image', 'guess'], [(12, 'dog'), (7, 'cat')])
    ```

    Either argument, if the other is None, may be a data frame of pandas or polars, a table of pyarrow, a
    mapping from column to values, or a list of mappings. Given with one of these, `columns` selects from it.
    The index of pandas becomes columns too if it has a name or is not of integers. Missing values
    are None. Other arguments are returned unchanged.

    Raises:
        RecordError: the columns have different lengths, or one is unknown.
    """
    given, wanted = (columns if rows is None else rows), None
    if columns is not None and rows is not None:
        if isinstance(columns, str) or not hasattr(columns, "__iter__"):
            return columns, rows
        wanted = list(columns)
    if isinstance(given, list | tuple) and any(isinstance(row, Mapping) for row in given):
        names = list(dict.fromkeys(name for row in given if isinstance(row, Mapping) for name in row))
        kept = _kept(names, wanted)
        # A row that is no mapping is refused by itself.
        given = [[row.get(name) for name in kept] if isinstance(row, Mapping) else row for row in given]
        return list(map(_name_of, kept)), given
    parts = _names_and_rows(given)
    if parts is None:
        return columns, rows
    names = list(map(_name_of, parts[0]))
    if wanted is None:
        return names, parts[1]
    kept = _kept(names, list(map(_name_of, wanted)))
    places = [names.index(name) for name in kept]
    return kept, [[row[place] for place in places] for row in parts[1]]


def _name_of(column: Any) -> str:
    return column if isinstance(column, str) else safe_text(column)


def _kept(names: list[Any], wanted: list[Any] | None) -> list[Any]:
    """Returns the columns that are asked for, by default all."""
    unknown = [name for name in wanted or () if name not in names]
    if unknown:
        known = ", ".join(map(repr, map(_name_of, names)))
        raise RecordError(f"table must have the column {_name_of(unknown[0])!r}, got {known}.")
    return names if wanted is None else wanted


def _names_and_rows(table: Any) -> tuple[list[Any], list[Any]] | None:
    """Returns the names of the columns and the rows, or None if a value is no table."""
    if hasattr(table, "to_frame"):  # A series of pandas or polars.
        table = table.to_frame()
    if isinstance(table, Mapping):
        names, columns = list(table), list(table.values())
    elif hasattr(table, "iloc"):
        index = table.index
        if any(name is not None for name in index.names) or index.dtype.kind not in "iu":
            table = table.reset_index(allow_duplicates=True)
        names, columns = list(table.columns), [table.iloc[:, place] for place in range(table.shape[1])]
    elif hasattr(table, "column_names") and hasattr(table, "to_pylist"):
        names, columns = table.column_names, table.columns
    elif hasattr(table, "iter_rows"):
        return list(table.columns), table.rows()
    else:
        return None
    cells = [_cells(name, column) for name, column in zip(names, columns, strict=True)]
    lengths = [len(one) for one in cells]
    if len(set(lengths)) > 1:
        got = ", ".join(f"{safe_text(name)!r}: {count}" for name, count in zip(names, lengths, strict=True))
        raise RecordError(f"table must have columns of the same length, got {got}.")
    return names, list(zip(*cells, strict=True))


def _cells(name: Any, column: Any) -> list[Any]:
    """Returns the values of a column; None for missing ones, but NaN among floats of numpy."""
    if isinstance(column, str | bytes) or not hasattr(column, "__iter__"):
        raise RecordError(
            f"table must have a list of values for each column, got {type(column).__name__} for "
            f"{safe_text(name)!r}. Write [...]."
        )
    if hasattr(column, "to_pylist"):
        return list(column.to_pylist())
    if not hasattr(column, "isna"):
        return list(column)
    values = column.tolist()
    if getattr(column.dtype, "kind", "") == "f" and type(column.dtype).__module__.startswith("numpy"):
        return list(values)
    return [None if is_missing else value for value, is_missing in zip(values, column.isna(), strict=True)]
