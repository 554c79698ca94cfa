"""Texts, in `texts.jsonl`."""

from collections.abc import Sequence
from typing import Any

import attrs

from .kind import Kind, Work
from .line import Line

__all__ = ["TEXT", "Text"]


@attrs.frozen
class Text:
    """A text."""

    name: str
    step: int | None
    time: float | None
    text: str


def _write(_name: str, *, text: str) -> tuple[int, Work]:
    return len(text), lambda output: output.add_line({"text": text})


def _parse(line: Line) -> Text:
    return Text(**line.call(), text=str(line.fields["text"]))


def _replay(lines: Sequence[Line]) -> dict[str, Any]:
    (line,) = lines
    return {"text": str(line.fields.get("text", ""))}


TEXT = Kind(
    name="text",
    index="texts.jsonl",
    write=_write,
    parse=_parse,
    replay=_replay,
    shows="text",
    is_single=True,
)
