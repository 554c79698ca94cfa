"""The lines of a text file: one record in, whole lines out, for people or as JSON.

Rendering runs in the thread that writes; a record is made in the training thread and shares nothing with the caller.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ._formatting import exact, header, one_line, plain

__all__ = ["LineRecord", "LineSplitter", "json_line", "text_lines"]

_LONGEST_LINE = 1 << 20
# What JSON may hold as it is, though some readers end a line there.
_JSON_CONTROLS = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}
_SINGULAR = {"metrics": "metric", "hyperparameters": "hyperparameter", "traces": "trace"}


class LineRecord(NamedTuple):
    """What becomes one line, or several.

    Attributes:
        kind: "metrics", "hyperparameters", "table", "text", "traces", "stdout", "stderr", "exception", "note", or one of
            the media: "images", "audio", "video", "histogram", "point_cloud".
        name: the name given, or "".
        step: the step, or None for what has none.
        time: when it was logged, in seconds since the epoch (Unix time).
        value: a dict of plain values, or a text.
    """

    kind: str
    name: str
    step: int | None
    time: float
    value: Any


def text_lines(record: LineRecord) -> str:
    """Returns lines such as `[metric][batch=3]: loss/train: 0.25`; each number reads back as the same number."""
    kind = _SINGULAR.get(record.kind, record.kind)
    start = f"[{kind}]{header({} if record.step is None else {'batch': record.step})}: "
    return "".join(f"{start}{part}\n" for part in _parts(record))


def _parts(record: LineRecord) -> Iterator[str]:
    """Returns what stands on each line after its prefix."""
    value = record.value
    if record.kind == "hyperparameters":
        value = dict(_flat(value))
    if record.kind in _SINGULAR:
        yield from (f"{one_line(name)}: {exact(item)}" for name, item in value.items())
    elif isinstance(value, str):
        name = f"{one_line(record.name)}: " if record.kind == "text" else ""
        yield from (f"{name}{one_line(line)}" for line in value.split("\n"))
    else:
        yield f"{one_line(record.name)}: {exact(value)}"


def _flat(parameters: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in parameters.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def json_line(record: LineRecord) -> str:
    """Returns one line of strict JSON.

    `kind` and `time` are always there, `step` and `name` where the record has them. What was logged is under the kind
    (`metrics`, `hyperparameters`, `traces`, `text`, `stdout`, …); a table is under `columns` and `rows`, media under the
    names of their arguments. Floats are written so that they read back as the same float.
    """
    fields: dict[str, Any] = {"kind": record.kind, "time": record.time}
    if record.step is not None:
        fields["step"] = record.step
    if record.name or record.kind not in {*_SINGULAR, "stdout", "stderr", "exception", "note"}:
        fields["name"] = record.name
    fields |= record.value if record.kind not in _SINGULAR and isinstance(record.value, dict) else {}
    if record.kind == "metrics" or not isinstance(record.value, dict):
        fields[record.kind] = plain(record.value)
    elif record.kind in _SINGULAR:
        fields[record.kind] = record.value
    text = json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"{text if text.isprintable() else text.translate(_JSON_CONTROLS)}\n"


class LineSplitter:
    """Makes lines of pieces of text as they come out of one stream.

    A carriage return begins the line again, as on a terminal: of a progress bar, its last state is left. A line of more
    than a million characters is cut into several.
    """

    def __init__(self) -> None:
        self._partial = ""

    def feed(self, text: str) -> list[str]:
        """Returns the lines that the text completes, without their ends."""
        if "\n" not in text and len(self._partial) + len(text) < _LONGEST_LINE:
            self._partial = _overwritten(self._partial + text)
            return []
        *lines, partial = (self._partial + text).split("\n")
        self._partial = _overwritten(partial)
        while len(self._partial) >= _LONGEST_LINE:
            lines.append(self._partial[:_LONGEST_LINE])
            self._partial = self._partial[_LONGEST_LINE:]
        pieces = (_cut(_overwritten(line).rstrip("\r")) for line in lines)
        return list(itertools.chain.from_iterable(pieces))

    def rest(self) -> list[str]:
        """Returns what has no end yet, and forgets it."""
        rest, self._partial = self._partial.rstrip("\r"), ""
        return [rest] if rest else []


def _overwritten(line: str) -> str:
    """Returns what a line is after its carriage returns; one at its end has overwritten nothing yet, and stays."""
    body = line.rstrip("\r")
    end = "\r" if len(body) < len(line) else ""
    return body[body.rfind("\r") + 1 :] + end


def _cut(line: str) -> list[str]:
    return [line[start : start + _LONGEST_LINE] for start in range(0, max(len(line), 1), _LONGEST_LINE)]
