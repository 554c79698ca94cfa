"""Formats numbers, values and tables as text, for all destinations with human-readable output.

Never touches a device and imports neither torch nor numpy: arrays are described by `shape` and `dtype`.
"""

import functools
import json
import math
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from uploads import one_line

__all__ = [
    "ELLIPSIS",
    "cut",
    "describe",
    "elapsed_text",
    "exact",
    "flattened",
    "header",
    "metric_direction",
    "one_line",
    "pad",
    "plain",
    "short",
    "shortened",
    "table_text",
    "width_of",
    "yaml_text",
]

ELLIPSIS = "…"

_WIDE = frozenset("WF")
_ASCII = 0x7F
_WORD_BREAKS = re.compile(r"[^a-z0-9]+")
_LOWER = frozenset({"loss", "losses", "error", "err", "perplexity", "ppl", "nll", "bpb"}) | frozenset(
    {"mse", "rmse", "mae", "wer", "cer", "fid"}
)
_HIGHER = frozenset(
    {"accuracy", "acc", "acc1", "acc5", "top1", "top5", "f1", "auc", "auroc", "map", "iou"}
) | (frozenset({"miou", "dice", "precision", "recall", "bleu", "rouge", "reward", "return", "psnr", "ssim"}))
_DIGITS = 4
_MAX_BITS = int(sys.int_info.default_max_str_digits * math.log2(10))
_SMALLEST_PLAIN, _LARGEST_PLAIN, _LARGEST_WHOLE = 1e-4, 1e4, 1e6


def short(value: Any) -> str:
    """Returns a number with four significant digits, or in full if that isn't longer.

    `2.302585` is "2.303", `0.00012345` is "0.0001234", `1e-5` is "1e-05", `12345678.9` is "1.235e+07". From
    10,000 to a million, numbers are rounded to whole ones: `123456.7` is "123457".
    """
    value = _printable(value)
    if not isinstance(value, float):
        return one_line(str(value))
    full = repr(float(value))
    size = abs(value)
    if not value or not math.isfinite(value):
        return full
    if _LARGEST_PLAIN <= size < _LARGEST_WHOLE:
        rounded = f"{value:.0f}"
    else:
        is_plain = _SMALLEST_PLAIN <= size < _LARGEST_PLAIN / 10
        rounded = f"{value:#.{_DIGITS}g}" if is_plain else f"{value:.{_DIGITS}g}"
    # The largest numbers would be rounded to infinity.
    return full if len(full) <= len(rounded) or math.isinf(float(rounded)) else rounded


@functools.lru_cache(1024)
def metric_direction(name: str) -> int:
    """Returns 1 if higher values of a metric are better, -1 if lower ones are, 0 if its name does not tell.

    It looks for words such as "loss", "error" or "accuracy". Such metrics are shown first.
    """
    words = set(_WORD_BREAKS.split(name.lower()))
    return -1 if words & _LOWER else 1 if words & _HIGHER else 0


def width_of(text: str) -> int:
    """Returns the width of a text in cells: 2 for East Asian wide characters, 0 for combining ones."""
    if text.isascii():
        return len(text)
    return sum(map(_width_of_character, text))


def _width_of_character(character: str) -> int:
    if ord(character) < _ASCII:
        return 1
    if unicodedata.combining(character) or unicodedata.category(character) in {"Cf", "Me", "Mn"}:
        return 0
    return 2 if unicodedata.east_asian_width(character) in _WIDE else 1


def cut(text: str, width: int) -> str:
    """Returns the text truncated to `width` cells; "…" marks the cut."""
    if width_of(text) <= width:
        return text
    kept, used = [], 0
    for character in text:
        used += _width_of_character(character)
        if used > width - 1:
            break
        kept.append(character)
    return "".join(kept) + (ELLIPSIS if width > 0 else "")


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Returns the text padded with spaces to `width` cells; `right` aligns it to the right."""
    spaces = " " * max(0, width - width_of(text))
    return spaces + text if right else text + spaces


def shortened(text: str, width: int) -> str:
    """Returns the text cut in the middle to `width` cells, because both ends distinguish a name."""
    if width_of(text) <= width:
        return text
    tail = cut(text[::-1], max(width // 2, 1)).removesuffix(ELLIPSIS)[::-1]
    head = cut(text, max(width - width_of(tail), 1))
    return f"{head}{tail}"


def elapsed_text(seconds: float) -> str:
    """Returns a duration as a clock shows it: "0:03", "12:34", "1:02:03"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def exact(value: Any) -> str:
    """Returns a value on one line; numbers round-trip exactly."""
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, Mapping | list | tuple):
        return one_line(json.dumps(plain(value), ensure_ascii=False))
    return one_line(str(describe(value)))


def flattened(
    values: Mapping[Any, Any], separator: str = ".", *, keeps_empty: bool = True, depth: int = 20
) -> dict[str, Any]:
    """Returns nested mappings as one, with joined names; the last value of a repeated name wins.

    Args:
        values: by name; names become strings.
        separator: between the names.
        keeps_empty: whether empty mappings are values; otherwise they are left out.
        depth: how deep mappings are nested at most; deeper ones are values.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and depth > 1 and (not keeps_empty or len(value)):
            inner = flattened(value, separator, keeps_empty=keeps_empty, depth=depth - 1)
            flat |= {f"{name}{separator}{key}": one for key, one in inner.items()}
        else:
            flat[f"{name}"] = value
    return flat


def header(counts: Mapping[str, object]) -> str:
    """Returns counts as `[epoch=1/5][batch=2/150]`."""
    return "".join(f"[{name}={one_line(str(count))}]" for name, count in counts.items())


def describe(value: Any) -> Any:
    """Returns plain values unchanged, and a description of others: "float32 (4, 3, 8, 8)" for an array.

    A value that cannot be described becomes a placeholder; the others beside it are kept.
    """
    return _converted(value, _array_text, _printable)


def plain(value: Any) -> Any:
    """Returns a copy of the value that strict JSON can represent.

    NaN and infinities become "NaN", "Infinity" and "-Infinity", an array `{"dtype": "uint8", "shape": [3, 8,
    8]}`, and any other value without a JSON form its `str`, or a placeholder if `str` raises.
    """
    return _converted(value, _array_document, _finite)


def _converted(value: Any, of_array: Callable[[Any], Any], of_plain: Callable[[Any], Any]) -> Any:
    """Returns a value with nested mappings and collections as dicts and lists.

    Args:
        value: the value.
        of_array: converts an array of at least one dimension.
        of_plain: converts a plain value: None, a text, a bool or a number.
    """
    try:
        if value is None or isinstance(value, str | bool | int | float):
            return of_plain(value)
        shape = getattr(value, "shape", None)
        if shape is not None:
            is_number = not tuple(shape) and hasattr(value, "item")
            return _converted(value.item(), of_array, of_plain) if is_number else of_array(value)
        if isinstance(value, Mapping):
            return {str(key): _converted(item, of_array, of_plain) for key, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [_converted(item, of_array, of_plain) for item in value]
        if hasattr(value, "getbands"):
            return f"{value.mode} image {value.size[0]}x{value.size[1]}"
        return of_plain(f"{len(value)} bytes" if isinstance(value, bytes | bytearray) else str(value))
    except Exception:  # noqa: BLE001  # a user's own class
        # Imported here: the commands show text without `events`, which takes 0.1 s.
        from events import safe_text

        return safe_text(value)


def _printable(value: Any) -> Any:
    """Returns infinity for an integer of more digits than Python prints."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return math.inf if value > 0 else -math.inf
    return value


def _finite(value: Any) -> Any:
    """Returns NaN and infinities as texts."""
    value = _printable(value)
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _array_text(array: Any) -> str:
    return f"{_dtype(array)} {tuple(int(size) for size in array.shape)}"


def _array_document(array: Any) -> dict[str, Any]:
    return {"dtype": _dtype(array), "shape": [int(size) for size in array.shape]}


def yaml_text(parameters: Mapping[str, Any]) -> str:
    """Returns hyperparameters as YAML, in their order, ending with a newline."""
    import yaml

    text: str = yaml.safe_dump(
        _converted(parameters, _array_text, _builtin), sort_keys=False, allow_unicode=True
    )
    return text


def table_text(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], max_rows: int, max_cell: int | None = None
) -> str:
    """Returns a table with aligned columns between bars, each line ending with a newline.

    Args:
        columns: the names of the columns.
        rows: the rows.
        max_rows: max number of rows; a last line counts the omitted ones.
        max_cell: max width of a cell, which is cut in the middle.
    """

    def cell(value: Any) -> str:
        text = _cell(value)
        return text if max_cell is None else shortened(text, max_cell)

    shown = [[cell(value) for value in row] for row in rows[:max_rows]]
    titles = [cell(column) for column in columns]
    widths = [max(map(width_of, column)) for column in zip(titles, *shown, strict=True)]
    lines = [_row(titles, widths), _row(["-" * width for width in widths], widths)]
    lines += [_row(row, widths) for row in shown]
    if len(rows) > max_rows:
        lines.append(f"({len(rows) - max_rows} more rows)")
    return "".join(f"{line}\n" for line in lines)


def _row(cells: Iterable[str], widths: Iterable[int]) -> str:
    padded = (pad(cell, width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"


def _cell(value: Any) -> str:
    value = describe(value)
    text = short(value) if isinstance(value, float) else exact(value)
    return text.replace("|", "\\|")


def _dtype(value: Any) -> str:
    return str(getattr(value, "dtype", "object")).removeprefix("torch.")


def _builtin(value: Any) -> Any:
    """Returns a plain value as its built-in type: `yaml.safe_dump` accepts no subclass."""
    if value is None or value is True or value is False:
        return value
    return next(base(value) for base in (int, float, str) if isinstance(value, base))
