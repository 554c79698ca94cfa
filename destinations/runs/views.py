"""Views of runs: which runs to show, and how; saved by name in `views.json` beside the runs.

A view has the fields of the page's address: `where`, `q`, `without`, `archived`, `sort`, `group`, `column`,
`run`, `off`, and others that only the page uses, such as its colours.
The page writes the file, and commands with `--view NAME` read it.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from destinations.run_directory.layout import strict_json
from destinations.runs.errors import EditError, FilterError
from destinations.runs.files import read_object_file
from destinations.runs.index.filters import parse_filter
from uploads.disk import replace_file

__all__ = ["VIEWS", "RunView", "read_views", "save_view"]

VIEWS = "views.json"
_FORMAT_VERSION = 1
_MOST_NAME = 100
_MOST_BYTES = 8 << 20
_MAX_QUERY = 1000
_SEARCHED = ("name", "run_id", "tags", "notes")


@attrs.frozen
class RunView:
    """Which runs to show, in which order and groups.

    Attributes:
        where: a filter.
        q: a text to find in name, id, tags or notes.
        without: statuses to leave out.
        archived: True for archived runs only, False for the others, None for both.
        sort: a column, with a leading minus for max to min; "" for the newest first.
        group: columns; runs with the same values are grouped.
        column: the columns to show; empty for the usual ones.
        run: the ids (`run_id`) of the chosen runs; empty for all that match.
        off: the ids of hidden runs.
    """

    where: str = ""
    q: str = ""
    without: tuple[str, ...] = ()
    archived: bool | None = False
    sort: str = ""
    group: tuple[str, ...] = ()
    column: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    off: tuple[str, ...] = ()

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> "RunView":
        """Returns a view from saved fields; fields of a wrong type are left out."""

        def text(name: str) -> str:
            return value if isinstance(value := fields.get(name), str) else ""

        def texts(name: str) -> tuple[str, ...]:
            value = fields.get(name)
            return tuple(one for one in value if isinstance(one, str)) if isinstance(value, list) else ()

        return cls(
            text("where"),
            text("q"),
            texts("without"),
            text("archived") == "1",
            text("sort"),
            texts("group"),
            texts("column"),
            texts("run"),
            texts("off"),
        )

    @property
    def sort_by(self) -> str:
        """The column to sort by."""
        return self.sort.removeprefix("-")

    @property
    def descending(self) -> bool:
        """Whether to sort from max to min."""
        return self.sort.startswith("-")

    def filter(self, more: str = "") -> str | None:
        """Returns filter, search, statuses, and chosen and hidden runs as one filter; None if all runs match.

        Args:
            more: a further filter.

        Raises:
            ValueError: the search is too long, or has characters that a filter cannot contain.
        """
        query = self.q.strip()
        if len(query) > _MAX_QUERY:
            raise ValueError(f"q must have at most {_MAX_QUERY} characters, got {len(query)}.")
        parts = [f"({one})" for one in (self.where.strip(), more.strip()) if one]
        if query:
            found = " or ".join(f'{field} ~ "(?i){_quoted(re.escape(query))}"' for field in _SEARCHED)
            try:
                parse_filter(found, 0.0)
            except FilterError as error:
                raise ValueError(f"q must be plain text, got {query!r}.") from error
            parts.append(f"({found})")
        for test, values in (
            ("status not in", self.without),
            ("run_id in", self.run),
            ("run_id not in", self.off),
        ):
            if values:
                listed = ", ".join(f'"{_quoted(one)}"' for one in values)
                parts.append(f"{test} ({listed})")
        if self.archived:
            parts.append("archived")
        return " and ".join(parts) or None


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def read_views(root: Path) -> dict[str, dict[str, Any]]:
    """Returns the views saved beside the runs, by name.

    Raises:
        OSError: the file is unreadable or damaged.
    """
    views = read_object_file(root / VIEWS).get("views")
    if not isinstance(views, dict):
        return {}
    return {name: fields for name, fields in views.items() if isinstance(fields, dict)}


def save_view(root: Path, name: str, fields: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Saves a view, replacing one of the same name, or removes it; returns all views.

    Args:
        root: the folder of the runs.
        name: the name of the view.
        fields: texts and lists of texts, by the names of the page's address; None removes the view.

    Raises:
        ValueError: the name or a field cannot be saved.
        EditError: the file cannot be written.
    """
    if not name.strip() or len(name) > _MOST_NAME or not name.isprintable():
        raise ValueError(f"the name of a view must have 1 to {_MOST_NAME} characters, got {name!r:.200}.")
    for key, value in (fields or {}).items():
        if not all(isinstance(one, str) for one in (value if isinstance(value, list) else [value])):
            raise ValueError(f"{key} of a view must be a text or a list of texts, got {value!r:.100}.")
    try:
        views = read_views(root)
        views.pop(name, None)
        if fields is not None:
            views[name] = dict(fields)
        content = strict_json({"format_version": _FORMAT_VERSION, "views": views}, indent=2)
        if len(content) > _MOST_BYTES:
            raise ValueError("the views are too long to be saved. Remove one first.")
        replace_file(root / VIEWS, f"{content}\n".encode())
    except OSError as error:
        raise EditError(
            f"could not save the view in {os.fspath(root)!r}: {error.strerror or error}."
        ) from error
    return views
