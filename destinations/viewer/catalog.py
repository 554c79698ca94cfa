"""Answers about runs: the table, the columns that it can have, and runs by the ids of the API.

Nothing here knows HTTP: the server and the exported site give the same answers.
"""

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from destinations.kinds import KINDS
from destinations.runs import (
    HEARTBEAT_SECONDS,
    EditError,
    FilterError,
    Run,
    RunNotFoundError,
    RunRecord,
    Runs,
    is_alive,
)
from destinations.runs.commands.fields import OWN_FIELDS, check_fields, field_of
from destinations.runs.index.filters import parse_filter
from destinations.runs.order import MISSING, label_of, orders_of, same_values, sort_rows
from destinations.runs.record import FIELDS, status_of, value_of

from .answers import shown

__all__ = ["Catalog"]

_MAX_QUERY = 1000
_MAX_TAGS = 1000
# How many runs tell the kinds of hyperparameters.
_SAMPLE = 200
_SEARCHED = ("name", "run_id", "tags", "notes")
_ID = re.compile(r"[0-9a-f]{12}")
# The names of the API for fields that have another one in the record.
_ALIASES = {"note": "notes"}


class Catalog:
    """The runs that a page shows.

    **Threading.** Any thread may call any method.

    Args:
        runs: open, and stays so.
        source: where the runs come from, if they are copies: nothing can be edited then.
        clock: returns the time in seconds since 1970.
    """

    def __init__(self, runs: Runs, *, source: str = "", clock: Callable[[], float] = time.time) -> None:
        self.runs = runs
        self._source = source or str(getattr(runs, "uri", ""))
        self.clock = clock
        self._lock = threading.Lock()  # Guards `_places`.
        self._places: dict[str, Path | str] = {}

    # Ids.

    def id_of(self, record: RunRecord) -> str:
        """Returns the id of a run, and remembers what it stands for."""
        if self.runs.roots:
            return self.id_at(record.path)
        # A dataset: a folder may have had several runs.
        found = _digest(record.run_id)
        with self._lock:
            self._places[found] = record.run_id
        return found

    def id_at(self, path: Path) -> str:
        """Returns the id of the run in a folder below a root."""
        for number, root in enumerate(self.runs.roots):
            if path.is_relative_to(root):
                found = _digest(f"{number}\0{path.relative_to(root)}")
                break
        else:
            found = _digest(str(path))
        with self._lock:
            self._places[found] = path
        return found

    def run(self, run_id: str) -> Run:
        """Returns the run of an id, with its record as of the last scan.

        Raises:
            RunNotFoundError: there is none, or its folder is gone.
        """
        place = self._place(run_id)
        run = self.runs[place]
        if self.runs.roots and not run.path.is_dir():
            raise RunNotFoundError(run.name)
        return run

    def folder(self, run_id: str) -> Path | None:
        """Returns the folder of a run if it is known, without checking that it exists."""
        with self._lock:
            place = self._places.get(run_id)
        return place if isinstance(place, Path) else None

    def run_or_none(self, run_id: str) -> Run | None:
        """Returns the run of an id, or None."""
        try:
            return self.run(run_id)
        except LookupError:
            return None

    def _place(self, run_id: str) -> Path | str:
        if _ID.fullmatch(run_id) is None:
            raise RunNotFoundError(run_id)
        with self._lock:
            place = self._places.get(run_id)
        if place is None:
            # Of an earlier server, or never listed.
            for path in self.runs.fingerprints() if self.runs.roots else ():
                self.id_at(path)
            for record in () if self.runs.roots else self.runs.records(archived=None):
                self.id_of(record)
            with self._lock:
                place = self._places.get(run_id)
        if place is None:
            raise RunNotFoundError(run_id)
        return place

    # The table.

    def page(
        self,
        *,
        where: str = "",
        query: str = "",
        sort: str = "",
        columns: Sequence[str] = (),
        archived: bool | None = False,
        offset: int = 0,
        limit: int = 100,
    ) -> dict[str, Any]:
        """Returns the answer of `/api/runs`.

        Raises:
            FilterError: the filter does not parse.
            MetricNotFoundError: no run has the column to sort by.
            UsageError: unknown column.
        """
        columns = [_ALIASES.get(name, name) for name in dict.fromkeys(columns)]
        check_fields(columns, self.runs.hparam_names(), self.runs.metric_names())
        name = sort.removeprefix("-")
        records, total = self.runs.page(
            offset,
            limit,
            where=self._where(where, query),
            sort_by=_ALIASES.get(name, name) or None,
            descending=sort.startswith("-") if name else None,
            archived=archived,
        )
        return {
            "total": total,
            "offset": offset,
            "columns": [{"name": name, "kind": _kind_of(name, records)} for name in columns],
            "rows": [self.row(record, columns) for record in records],
        }

    def groups(
        self, group: str, *, where: str = "", query: str = "", archived: bool | None = False
    ) -> dict[str, Any]:
        """Returns the answer of `/api/groups`.

        Raises:
            FilterError: the filter does not parse.
            MetricNotFoundError: no run has the column to group by.
        """
        found = self.runs.count_by(
            _ALIASES.get(group, group), where=self._where(where, query), archived=archived
        )
        return {"groups": [{"label": label, "total": total} for label, total in found.items()]}

    def orders(self, records: Sequence[RunRecord], cells: Iterable[str]) -> dict[str, Any]:
        """Returns how an exported site sorts, groups and searches rows, which computes nothing of it itself.

        Args:
            records: of the rows, newest first.
            cells: hyperparameters and metrics.
        """
        now = self.clock()
        own = [name for name, field in FIELDS.items() if field.type != "texts"]
        columns = {}
        for name in (*own, *_ALIASES, *cells):
            values = [value_of(record, _ALIASES.get(name, name), now) for record in records]
            columns[name] = {**orders_of(values), "labels": [label_of(value) for value in values]}
        texts = ((record.name, record.run_id, *record.tags, record.notes) for record in records)
        return {"columns": columns, "search": ["\n".join(found).lower() for found in texts]}

    def row(self, record: RunRecord, columns: Sequence[str] = ()) -> dict[str, Any]:
        """Returns a row of the table."""
        now = self.clock()
        values = {name: value_of(record, name, now) for name in columns}
        return {
            "id": self.id_of(record),
            "run_id": record.run_id,
            "name": record.name,
            "path": self.shown_path(record),
            "status": status_of(record, now),
            "alive": is_alive(record.status, record.heartbeat_at, now),
            "tags": list(record.tags),
            "note": record.notes,
            "archived": record.archived,
            "created_at": record.created_at,
            "duration": field_of(record, "duration", now),
            "problem": record.problem,
            "values": {name: shown(value) for name, value in values.items() if value is not MISSING},
        }

    def fields(self) -> dict[str, Any]:
        """Returns the answer of `/api/fields`."""
        names = [
            *OWN_FIELDS,
            *(f"hparams.{name}" for name in self.runs.hparam_names()),
            *(f"summary.{name}" for name in self.runs.metric_names()),
        ]
        sample, _ = self.runs.page(0, _SAMPLE, archived=None)
        fields = [{"name": name, "kind": _kind_of(name, sample)} for name in names]
        return {"fields": fields, "metrics": self.runs.metric_names()}

    def info(self) -> dict[str, Any]:
        """Returns the answer of `/api/info`, but for the version."""
        roots = [self._source] if self._source else [str(root) for root in self.runs.roots]
        return {
            "roots": roots,
            "name": ", ".join(root.rstrip("/").rpartition("/")[2] for root in roots),
            "writable": not self._source,
            "dead_after_seconds": HEARTBEAT_SECONDS,
            "kinds": [{"name": kind.plural, "shows": kind.shows} for kind in KINDS if kind.shows],
            "now": self.clock(),
        }

    def bands(
        self, runs: Sequence[tuple[str, Run]], *, group: str = "", over: str = "", ranks: bool = False
    ) -> list[tuple[str, list[tuple[str, Run, int]]]]:
        """Returns the groups of `/api/band`: a label, and members: id, run and rank.

        Args:
            runs: id and run.
            group: a column: runs of the same value are a group.
            over: a hyperparameter: runs alike in all others are a group.
            ranks: whether each run is a group of its ranks.

        Raises:
            ValueError: none or several of these are given.
            UsageError: unknown column.
        """
        if (bool(group), bool(over), ranks).count(True) != 1:
            raise ValueError("one of group, over and ranks must be given.")
        if ranks:
            return [(run.name, [(run_id, run, rank) for rank in run.ranks()]) for run_id, run in runs]
        check_fields([group or over], self.runs.hparam_names(), self.runs.metric_names())
        now = self.clock()
        of_run = [(run_id, run, 0) for run_id, run in runs]
        groups: dict[str, list[tuple[str, Run, int]]] = {}
        if group:
            rows = [(value_of(member[1].record, group, now), member) for member in of_run]
            for value, member in sort_rows(rows, descending=False):
                groups.setdefault(label_of(value), []).append(member)
            return list(groups.items())
        names = sorted({name for _, run in runs for name in run.hparams} - {over.removeprefix("hparams.")})
        values = {name: [run.hparams.get(name, MISSING) for _, run in runs] for name in names}
        varied = [name for name in names if not same_values(values[name])]
        for place, member in enumerate(of_run):
            label = ", ".join(f"{name}={label_of(values[name][place])}" for name in varied) or "all"
            groups.setdefault(label, []).append(member)
        return list(groups.items())

    def shown_path(self, record: RunRecord) -> str:
        """Returns the folder of a run, relative to its root."""
        for root in self.runs.roots:
            if record.path.is_relative_to(root):
                return str(record.path.relative_to(root))
        return str(record.path)

    def edit(self, run_id: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the edits of `PATCH /api/runs/ID`, and returns the row.

        Raises:
            ValueError: a field is unknown or of a wrong type.
            EditError: the edit cannot be written.
            RunNotFoundError: there is no such run.
        """
        names = {"tags": "tags", "note": "notes", "archived": "archived", "name": "display_name"}
        for name, value in changes.items():
            if name not in names:
                raise ValueError(f"unknown field {name!r}. Fields to edit are {', '.join(names)}.")
            _check_edit(name, value)
        if self._source:
            raise EditError(f"these runs come from {self._source}, where nothing is edited.")
        run = self.run(run_id)
        edited = self.runs.edit(
            run.path,
            **{names[name]: value for name, value in changes.items()},
        )
        return self.row(edited.record)

    def _where(self, where: str, query: str) -> str | None:
        where, query = where.strip(), query.strip()
        if len(query) > _MAX_QUERY:
            raise ValueError(f"q must have at most {_MAX_QUERY} characters, got {len(query)}.")
        if where:
            # By itself first, so that a message shows the filter as it was written.
            parse_filter(where, self.clock())
        if not query:
            return where or None
        quoted = re.escape(query).replace("\\", "\\\\").replace('"', '\\"')
        found = " or ".join(f'{field} ~ "(?i){quoted}"' for field in _SEARCHED)
        try:
            parse_filter(found, 0.0)
        except FilterError as error:
            raise ValueError(f"q must be plain text, got {query!r}.") from error
        return f"({where}) and ({found})" if where else found


def _kind_of(name: str, records: Sequence[RunRecord]) -> str:
    """Returns the kind of a column: of its field, or of the values that some runs have."""
    if name in FIELDS:
        return {"texts": "tags"}.get(FIELDS[name].type, FIELDS[name].type)
    group, _, rest = name.partition(".")
    if group == "summary":
        return "number"
    kinds = {type(value) for record in records if (value := record.hparams.get(rest)) is not None}
    return "bool" if kinds == {bool} else "number" if kinds and kinds <= {int, float} else "text"


def _check_edit(name: str, value: Any) -> None:
    if name == "tags":
        is_list = isinstance(value, list) and len(value) <= _MAX_TAGS
        is_sound = is_list and all(isinstance(tag, str) for tag in value)
    else:
        is_sound = isinstance(value, bool if name == "archived" else str)
    if not is_sound:
        wanted = {"tags": "a list of at most 1,000 texts", "archived": "true or false"}.get(name, "a text")
        raise ValueError(f"{name} must be {wanted}, got {value!r:.100}.")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]
