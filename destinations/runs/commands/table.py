"""Tables that fit the screen: columns as wide as their content, truncated where the screen is narrower."""

from collections.abc import Sequence

import attrs

from destinations.text.formatting import ELLIPSIS, cut, one_line, pad, shortened, width_of

from .screen import Screen

__all__ = ["Cell", "Column", "table_lines"]

_GAP = "  "
_NARROWEST = 5


@attrs.frozen
class Column:
    """A column of a table.

    Attributes:
        title: the header.
        is_right: right-aligned.
        is_whole: truncated only after all other columns, and in the middle: both ends of a name matter.
        narrowest: never narrower than this, unless its content is.
    """

    title: str
    is_right: bool = False
    is_whole: bool = False
    narrowest: int = _NARROWEST


@attrs.frozen
class Cell:
    """A text with a colour."""

    text: str
    style: str | None = None


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[Cell | str]], screen: Screen) -> list[str]:
    """Returns the lines of a table, header first.

    On a narrow screen the widest columns are truncated with "…"; where even that does not suffice, the last
    columns are omitted, and the header ends with "…".
    """
    # Escaped before measuring: an escape is wider than the character it replaces.
    table = [
        [
            Cell(one_line(cell.text), cell.style) if isinstance(cell, Cell) else Cell(one_line(cell))
            for cell in row
        ]
        for row in rows
    ]
    columns = [attrs.evolve(column, title=one_line(column.title)) for column in columns]
    widths = [
        max([width_of(column.title), *(width_of(row[index].text) for row in table)])
        for index, column in enumerate(columns)
    ]
    shown = len(columns)
    if screen.width is not None:
        shown = _fitting(widths, columns, screen.width)
    head = [Cell(column.title, "bold") for column in columns]
    lines = [_line(row[:shown], columns, widths, screen) for row in (head, *table)]
    if shown < len(columns):
        lines[0] += f"{_GAP}{ELLIPSIS}"
    return lines


def _fitting(widths: list[int], columns: Sequence[Column], room: int) -> int:
    """Narrows `widths` in place until the table fits `room` cells; returns the number of columns shown."""

    # The "…" for omitted columns needs space too.
    def room_between(shown: int) -> int:
        return len(_GAP) * (shown - 1) + (0 if shown == len(columns) else len(_GAP) + len(ELLIPSIS))

    least = [min(width, column.narrowest) for width, column in zip(widths, columns, strict=True)]
    shown = len(columns)
    while shown > 1 and sum(least[:shown]) + room_between(shown) > room:
        shown -= 1
    free = room - room_between(shown)
    for may_cut_whole in (False, True):
        while (excess := sum(widths[:shown]) - free) > 0:
            candidates = [
                index
                for index in range(shown)
                if widths[index] > least[index] and (may_cut_whole or not columns[index].is_whole)
            ]
            if not candidates:
                break
            widest = max(candidates, key=widths.__getitem__)
            second = max((widths[index] for index in candidates if index != widest), default=least[widest])
            # In one step down to the next widest, but no further than needed.
            widths[widest] -= max(1, min(excess, widths[widest] - max(second, least[widest])))
    return shown


def _line(row: Sequence[Cell], columns: Sequence[Column], widths: Sequence[int], screen: Screen) -> str:
    cells = []
    for index, cell in enumerate(row):
        text = (shortened if columns[index].is_whole else cut)(cell.text, widths[index])
        is_last = index == len(row) - 1
        padded = (
            text
            if is_last and not columns[index].is_right
            else pad(text, widths[index], right=columns[index].is_right)
        )
        cells.append(screen.styled(padded, cell.style))
    return _GAP.join(cells).rstrip() if not screen.has_colors else _GAP.join(cells)
