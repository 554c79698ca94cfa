"""Answers about runs: the table, its possible columns, and runs by the ids of the API.

Nothing here depends on HTTP: the server and the exported site give the same answers.
"""

import contextlib
import hashlib
import math
import os
import re
import statistics as statistics_module
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from destinations.kinds import KINDS
from destinations.run_directory.layout import SUMMARY, metrics_name
from destinations.runs import (
    HEARTBEAT_SECONDS,
    EditError,
    RecordedRun,
    RunNotFoundError,
    RunRecord,
    Runs,
    is_alive,
)
from destinations.runs.budget import spend
from destinations.runs.commands.fields import OWN_FIELDS, check_fields, field_of
from destinations.runs.index.filters import parse_filter
from destinations.runs.order import MISSING, Kind, key_of, label_of, orders_of, same_values, sort_rows
from destinations.runs.record import FIELDS, is_terminal, status_of, value_of
from destinations.runs.run import MetricSummary
from destinations.runs.summary import summary_of
from destinations.runs.views import RunView, read_views, save_view
from destinations.text.formatting import metric_direction
from uploads import Gauge

from .answers import shown
from .importance import importance_of

__all__ = ["Catalog", "page_id", "state_of", "statistics_of", "with_page_ids"]

_MOST_BEATING = 1000
_MAX_TAGS = 1000
# The number of runs that are sampled for the kinds of hyperparameters.
_SAMPLE = 200
_ID = re.compile(r"[0-9a-f]{12}")
# Names in the API of fields with a different name in the record.
_ALIASES = {"note": "notes"}
# The most runs that are averaged by group, or sorted by several columns.
_MAX_WHOLE = 10_000
# The importance of hyperparameters is computed from at most so many of the newest runs.
_MAX_RANKED = 1000
# Columns of the API that aren't fields: the smallest and the largest value of a metric at any step.
_EXTREMES = {"min": False, "max": True}
# A request computes statistics of at most so many bytes of rows.
_MAX_COMPUTED_BYTES = 4 << 20
_ALL = RunView()
# Fields of a saved view that list runs: by `run_id` in the file, by the page's id in an answer.
_RUNS_OF_VIEW = ("run", "off")
# Hyperparameters that may differ between runs with the same settings.
_NUISANCE = re.compile(
    r"(^|[._-])"
    r"(seeds?|hosts?|hostname|node|rank|paths?|dir|folder|root|output|log_dir|run_id|run_name|uuid)$",
    re.IGNORECASE,
)


@attrs.define(eq=False, slots=False, repr=False)
class Catalog:
    """The runs that a page shows.

    **Threading.** Any thread may call any method.

    Args:
        runs: the runs; the catalog does not close them.
        source: where the runs come from, if they are copies; copies can't be edited.
        read_only: whether to refuse all edits.
        clock: returns the time in seconds since 1970.
    """

    runs: Runs
    _source: str = attrs.field(default="", kw_only=True)
    _read_only: bool = attrs.field(default=False, kw_only=True)
    clock: Callable[[], float] = attrs.field(default=time.time, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self._source = self._source or str(getattr(self.runs, "uri", ""))
        self._lock = threading.Lock()  # Guards `_places`.
        self._places: dict[str, Path | str] = {}

    # Ids.

    def id_of(self, record: RunRecord) -> str:
        """Returns the id of a run, and remembers its run."""
        # In a dataset, a folder may have had several runs.
        return self.id_at(record.path if self.runs.roots else record.run_id)

    def id_at(self, place: Path | str) -> str:
        """Returns the id of the run in a folder, or with an id in a dataset."""
        found = page_id(place, self.runs.roots)
        with self._lock:
            self._places[found] = place
        return found

    def run(self, run_id: str) -> RecordedRun:
        """Returns the run with an id, with its record as of the last scan.

        Raises:
            RunNotFoundError: there is no such run, or its folder is gone.
        """
        place = self._place(run_id)
        run = self.runs[place]
        if not self._is_there(run):
            raise RunNotFoundError(run.name)
        return run

    def folder(self, run_id: str) -> Path | None:
        """Returns the folder of a run if it is known, without checking that it exists."""
        with self._lock:
            place = self._places.get(run_id)
        return place if isinstance(place, Path) else None

    def record_at(self, path: Path) -> dict[str, Any] | None:
        """Returns the row of the run in a folder, or None."""
        try:
            return self.row(self.runs[path].record)
        except LookupError:
            return None

    def runs_of(self, run_ids: Sequence[str]) -> list[tuple[str, RecordedRun | None]]:
        """Returns ids with their runs; None for a run that is gone. Takes one query of the index."""
        places: dict[str, Path | str] = {}
        for run_id in run_ids:
            with contextlib.suppress(LookupError):
                places[run_id] = self._place(run_id)
        found = self.runs.many(places.values())
        runs = {run_id: found.get(place) for run_id, place in places.items()}
        there = {run_id: run for run_id, run in runs.items() if run is not None and self._is_there(run)}
        return [(run_id, there.get(run_id)) for run_id in run_ids]

    def _is_there(self, run: RecordedRun) -> bool:
        return not self.runs.roots or run.record.path.is_dir()

    def _place(self, run_id: str) -> Path | str:
        if _ID.fullmatch(run_id) is None:
            raise RunNotFoundError(run_id)
        with self._lock:
            place = self._places.get(run_id)
        if place is None:
            # The id comes from an earlier server, or the run was never listed.
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
        view: RunView = _ALL,
        *,
        columns: Sequence[str] = (),
        offset: int = 0,
        limit: int = 100,
    ) -> dict[str, Any]:
        """Returns the answer of `/api/runs`.

        Raises:
            FilterError: the filter does not parse.
            MetricNotFoundError: no run has the column to sort by.
            UsageError: unknown column.
        """
        columns = self._checked([_ALIASES.get(name, name) for name in dict.fromkeys(columns)])
        records, total = self._records(view, offset, limit)
        return {
            "total": total,
            "offset": offset,
            "columns": [{"name": name, "kind": _kind_of(name, records)} for name in columns],
            "rows": [self.row(record, columns) for record in records],
        }

    def rows(self, run_ids: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
        """Returns the answer of `/api/runs` with the rows of some runs; runs that are gone are left out."""
        columns = self._checked([_ALIASES.get(name, name) for name in dict.fromkeys(columns)])
        rows = [self.row(run.record, columns) for _, run in self.runs_of(run_ids) if run is not None]
        return {"total": len(rows), "offset": 0, "columns": [], "rows": rows}

    def _records(self, view: RunView, offset: int, limit: int) -> tuple[list[RunRecord], int]:
        """Returns a part of the runs of a view in its order, and the number of all."""
        selected: dict[str, Any] = {"where": self._where(view), "archived": view.archived}
        groups = self._groups_of(view)
        name = _ALIASES.get(view.sort_by, view.sort_by) or None
        descending = view.descending if name else None
        if not groups and _metric_of_extreme(view.sort_by) is None:
            return self.runs.page(offset, limit, sort_by=name, descending=descending, **selected)
        if len(groups) == 1 and name is None:
            return self.runs.page(offset, limit, sort_by=groups[0], descending=False, **selected)
        if _metric_of_extreme(view.sort_by) is None:
            found, _ = self.runs.page(0, _MAX_WHOLE, sort_by=name, descending=descending, **selected)
        else:
            found = self._by_extreme(view.sort_by, descending=view.descending, **selected)
        now = self.clock()
        for group in reversed(groups):
            spend()
            rows = [(value_of(record, group, now), record) for record in found]
            found = [record for _, record in sort_rows(rows, descending=False)]
        return found[offset : offset + limit], len(found)

    def _groups_of(self, view: RunView) -> list[str]:
        return self._checked([_ALIASES.get(name, name) for name in view.group if name])

    def _checked(self, names: Sequence[str]) -> list[str]:
        """Returns columns by their full names.

        Raises:
            UsageError: unknown column.
        """
        if not names:
            return []
        extremes = {name for name in names if _metric_of_extreme(name)}
        hparams, metrics = self.runs.hparam_names(), self.runs.metric_names()
        found = check_fields([_field_of(name) for name in names], hparams, metrics)
        return [name if name in extremes else whole for name, whole in zip(names, found, strict=True)]

    def _by_extreme(self, name: str, *, descending: bool, **selected: Any) -> list[RunRecord]:
        """Returns all runs sorted by the min or max of a metric, as `destinations runs best` ranks them."""
        metric, is_max = _metric_of_extreme(name) or "", _EXTREMES[name.partition(".")[0]]
        best = {one.run.record.path: one.value for one in self.runs.best(metric, is_max=is_max, **selected)}
        rows = [(best.get(one.path, MISSING), one.record) for one in self.runs.query(**selected)]
        return [record for _, record in sort_rows(rows, descending=descending)]

    def selected(self, run: RecordedRun) -> dict[str, Any]:
        """Returns a run's part of `/api/selected`: its row, and the metrics for charts and legends."""
        record = run.record
        row = self.row(record, [f"hparams.{name}" for name in record.hparams])
        spend()
        constant = self._constant(run) if self.runs.roots and not row["alive"] else []
        return {**row, "metrics": self._metric_names(run, is_live=row["alive"]), "constant": constant}

    def _constant(self, run: RecordedRun) -> list[str]:
        """Returns the metrics of an ended run that have the same value at all steps."""
        if not run.writers and state_of(run.record.path / SUMMARY) is None:
            return []  # Reading all rows is too expensive just for the order of charts.
        return [
            name
            for name, one in statistics_of(run).items()
            if one.min is not None and one.min == one.max and not one.non_finite
        ]

    def _metric_names(self, run: RecordedRun, *, is_live: bool) -> list[str]:
        # The summary has all metrics of an ended run; a live run may have logged new ones, so read its rows.
        if run.record.summary and not is_live:
            return list(run.record.summary)
        try:
            return run.metric_names()
        except OSError:
            return []

    def groups(self, view: RunView, *, columns: Sequence[str] = ()) -> dict[str, Any]:
        """Returns the answer of `/api/groups`.

        Raises:
            FilterError: the filter does not parse.
            UsageError: no run has a column to group by.
            ValueError: there are no groups, or too many runs to group by several columns.
        """
        groups = self._groups_of(view)
        if not groups:
            raise ValueError("group must be given, such as hparams.lr.")
        found: Mapping[str, int]
        values: dict[str, dict[str, Any]] = {}
        if len(groups) == 1:
            found = self.runs.count_by(groups[0], where=self._where(view), archived=view.archived)
        if len(groups) > 1 or (columns and sum(found.values()) <= _MAX_WHOLE):
            records, total = self._records(attrs.evolve(view, sort=""), 0, _MAX_WHOLE)
            if total > len(records):
                raise ValueError(f"at most {_MAX_WHOLE} runs are grouped by several columns, got {total}.")
            found = Counter(label for label, _ in self._labelled(records, groups))
            values = self._averages(records, groups, self._checked(list(dict.fromkeys(columns))))
        return {
            "groups": [
                {"label": label, "total": total, "values": values.get(label, {})}
                for label, total in found.items()
            ]
        }

    def _labelled(
        self, records: Iterable[RunRecord], groups: Sequence[str]
    ) -> Iterator[tuple[str, RunRecord]]:
        """Yields records with the labels of their groups."""
        now = self.clock()
        for record in records:
            yield " · ".join(label_of(value_of(record, group, now)) for group in groups), record

    def _averages(
        self, records: Sequence[RunRecord], groups: Sequence[str], columns: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        """Returns mean, standard deviation and number of the finite values of each column of each group."""
        now = self.clock()
        cells: dict[str, dict[str, list[float]]] = {}
        for label, record in self._labelled(records, groups):
            spend()
            statistics = self._statistics(record, columns)
            of_group = cells.setdefault(label, {})
            for name in columns:
                for number in _finite([_cell_of(record, name, now, statistics)]):
                    of_group.setdefault(name, []).append(number)
        return {
            label: {
                name: {
                    "mean": statistics_module.fmean(numbers),
                    "std": statistics_module.stdev(numbers) if len(numbers) > 1 else None,
                    "count": len(numbers),
                }
                for name, numbers in of_group.items()
            }
            for label, of_group in cells.items()
        }

    def importance(self, metric: str, view: RunView = _ALL) -> dict[str, Any]:
        """Returns the answer of `/api/importance`.

        Raises:
            FilterError: the filter does not parse.
            MetricNotFoundError: no run has the metric.
        """
        self._checked([f"summary.{metric}"])
        records, _ = self.runs.page(0, _MAX_RANKED, where=self._where(view), archived=view.archived)
        now = self.clock()
        # The latest value of a run in progress says little about its settings.
        ended = [one for one in records if not is_alive(one.status, one.heartbeat_at, now)]
        names = dict.fromkeys(name for record in ended for name in record.hparams)
        columns = {f"hparams.{name}": [one.hparams.get(name, MISSING) for one in ended] for name in names}
        return importance_of(columns, [one.summary.get(metric, MISSING) for one in ended])

    def orders(
        self, records: Sequence[RunRecord], cells: Iterable[str]
    ) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """Returns the orders of columns, and the text of each row that an exported site searches.

        Args:
            records: the records of the rows, newest first.
            cells: names of hyperparameters and metrics.
        """
        now = self.clock()
        own = [name for name, field in FIELDS.items() if field.type != "texts"]
        columns = {}
        cells = list(cells)
        statistics = [self._statistics(record, cells) for record in records]
        for name in (*own, *_ALIASES, *cells):
            field = _ALIASES.get(name, name)
            values = [
                _cell_of(record, field, now, one) for record, one in zip(records, statistics, strict=True)
            ]
            columns[name] = {**orders_of(values), "labels": [label_of(value) for value in values]}
        texts = ((record.name, record.run_id, *record.tags, record.notes) for record in records)
        return columns, ["\n".join(found).lower() for found in texts]

    def row(self, record: RunRecord, columns: Sequence[str] = ()) -> dict[str, Any]:
        """Returns a row of the table."""
        now = self.clock()
        statistics = self._statistics(record, columns)
        values = {name: _cell_of(record, name, now, statistics) for name in columns}
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

    def _statistics(self, record: RunRecord, columns: Iterable[str]) -> Mapping[str, MetricSummary]:
        """Returns the statistics of the metrics of a run; empty if no column needs them."""
        if not any(map(_metric_of_extreme, columns)):
            return {}
        return statistics_of(self.runs[record.path if self.runs.roots else record.run_id])

    def fields(self) -> dict[str, Any]:
        """Returns the answer of `/api/fields`."""
        names = [
            *OWN_FIELDS,
            *(f"hparams.{name}" for name in self.runs.hparam_names()),
            *(f"summary.{name}" for name in self.runs.metric_names()),
        ]
        sample, _ = self.runs.page(0, _SAMPLE, archived=None)
        fields: list[dict[str, Any]] = [{"name": name, "kind": _kind_of(name, sample)} for name in names]
        for field in fields:
            if field["name"].startswith("summary.") and (direction := metric_direction(field["name"][8:])):
                field["best"] = "max" if direction > 0 else "min"
        return {"fields": fields, "metrics": self.runs.metric_names()}

    def fields_digest(self) -> str:
        """Returns a digest of the possible columns."""
        return _digest("\0".join([*self.runs.hparam_names(), "", *self.runs.metric_names()]))

    def gauges(self) -> Iterator[Gauge]:
        """Yields the number of runs by status, and the age of the heartbeat of each run that hasn't ended."""
        self.runs.scan()
        now = self.clock()
        records = self.runs.records(sort_by="created_at", descending=True)
        for status, count in sorted(Counter(status_of(one, now) for one in records).items()):
            yield Gauge("destinations_runs", "Runs, by status.", count, {"status": status})
        living = [one for one in records if not is_terminal(one.status) and one.heartbeat_at is not None]
        for one in living[:_MOST_BEATING]:
            yield Gauge(
                "destinations_run_heartbeat_seconds",
                "Seconds since the last heartbeat of a run that has not ended.",
                now - (one.heartbeat_at or now),
                {"run": one.name, "path": str(one.path)},
            )

    def info(self) -> dict[str, Any]:
        """Returns the answer of `/api/info`, except for the version."""
        roots = [self._source] if self._source else [str(root) for root in self.runs.roots]
        return {
            "roots": roots,
            "name": ", ".join(root.rstrip("/").rpartition("/")[2] for root in roots),
            "writable": not (self._source or self._read_only),
            "dead_after_seconds": HEARTBEAT_SECONDS,
            "kinds": [{"name": kind.plural, "shows": kind.shows} for kind in KINDS if kind.shows],
            "now": self.clock(),
        }

    def bands(
        self,
        runs: Sequence[tuple[str, RecordedRun]],
        *,
        groups: Sequence[str] = (),
        over: str = "",
        ranks: bool = False,
        is_split: bool = False,
        goal: str = "",
    ) -> list[tuple[str, list[tuple[str, RecordedRun, int]]]]:
        """Returns the groups of `/api/band`: labels and members; a member is id, run and rank.

        Args:
            runs: ids and runs.
            groups: columns; runs with the same values form a group.
            over: a hyperparameter; runs that are equal in all others form a group.
            ranks: whether each run is a group of its ranks.
            is_split: whether to group runs by all hyperparameters in which they differ, except for seeds,
                hosts and paths.
            goal: the min or max of a metric, such as `min.loss`; the group with the best mean comes first.

        Raises:
            ValueError: none of these, or several, are given.
            UsageError: unknown column.
        """
        if (bool(groups), bool(over), ranks, is_split).count(True) != 1:
            raise ValueError("one of group, over, ranks and split must be given.")
        if ranks:
            return [(run.name, [(run_id, run, rank) for rank in run.ranks()]) for run_id, run in runs]
        now = self.clock()
        fields = self._checked([*groups, *([over] if over else [])])
        if not groups:
            names = {name for _, run in runs for name in run.hparams}
            names -= (
                {over.removeprefix("hparams.")}
                if over
                else {name for name in names if _NUISANCE.search(name)}
            )
            fields = [
                f"hparams.{name}"
                for name in sorted(names)
                if not same_values(run.hparams.get(name, MISSING) for _, run in runs)
            ]
        members = [(run_id, run, 0) for run_id, run in runs]
        for field in reversed(fields if groups else ()):
            cells = [(value_of(member[1].record, field, now), member) for member in members]
            members = [member for _, member in sort_rows(cells, descending=False)]
        of_label: dict[str, list[tuple[str, RecordedRun, int]]] = {}
        for member in members:
            labels = [label_of(value_of(member[1].record, field, now)) for field in fields]
            if groups:
                label = " · ".join(labels)
            else:
                # The user did not choose the columns, so labels name them.
                named = zip(fields, labels, strict=True)
                label = ", ".join(f"{field.removeprefix('hparams.')}={one}" for field, one in named)
            of_label.setdefault(label or "all", []).append(member)
        return sorted(of_label.items(), key=lambda group: self._distance(goal, group[1]))

    def _distance(self, goal: str, members: Sequence[tuple[str, RecordedRun, int]]) -> float:
        """Returns the mean of a goal over runs, negated if the largest is best; infinity without one."""
        if not goal:
            return 0.0
        records = [run.record for _, run, _ in members]
        cells = (_cell_of(one, goal, self.clock(), self._statistics(one, [goal])) for one in records)
        numbers = list(_finite(cells))
        mean = statistics_module.fmean(numbers) if numbers else math.inf
        return -mean if numbers and goal.startswith("max.") else mean

    def shown_path(self, record: RunRecord) -> str:
        """Returns the folder of a run, relative to its root."""
        for root in self.runs.roots:
            if record.path.is_relative_to(root):
                return str(record.path.relative_to(root))
        return str(record.path)

    def edit(self, run_id: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the edits of `PATCH /api/runs/ID`, and returns the row.

        Raises:
            ValueError: a field is unknown or has a wrong type.
            EditError: the edit cannot be written, or was based on outdated values.
            RunNotFoundError: there is no such run.
        """
        names = {"tags": "tags", "note": "notes", "archived": "archived", "name": "display_name"}
        was = changes.get("was", {})
        changes = {name: value for name, value in changes.items() if name != "was"}
        if not isinstance(was, dict):
            raise ValueError(f"was must be an object of fields, got {was!r:.100}.")  # noqa: TRY004  # of JSON
        for name, value in [*changes.items(), *was.items()]:
            if name not in names:
                raise ValueError(f"unknown field {name!r}. Fields to edit are {', '.join(names)}.")
            _check_edit(name, value)
        self._check_writable()
        run = self.run(run_id)
        edited = self.runs.edit(
            run.record.path,
            **{names[name]: value for name, value in changes.items()},
            based_on={names[name]: value for name, value in was.items()},
        )
        return self.row(edited.record)

    def _where(self, view: RunView) -> str | None:
        if where := view.where.strip():
            # Parsed alone first, so that an error shows the filter as the user wrote it.
            names = {"hparams": self.runs.hparam_names, "summary": self.runs.metric_names}
            parse_filter(where, self.clock(), lambda group: names[group]())
        return view.filter()

    # Saved views.

    def views(self) -> dict[str, Any]:
        """Returns the answer of `/api/views`, with the page's ids of runs."""
        views = read_views(self.runs.roots[0]) if self.runs.roots else {}
        return {"views": with_page_ids(views, self.runs)}

    def save_views(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Saves views by name, or removes a view if its value is None; returns all views.

        Raises:
            ValueError: a name or a field cannot be saved.
            EditError: the views cannot be written.
        """
        self._check_writable()
        for name, fields in changes.items():
            if fields is not None and not isinstance(fields, dict):
                raise ValueError(f"a view must be an object of fields, got {fields!r:.100}.")
            save_view(self.runs.roots[0], name, fields and _with_ids(fields, self._run_id_of))
        return self.views()

    def _run_id_of(self, page_id: str) -> str | None:
        try:
            return self.run(page_id).run_id
        except RunNotFoundError:
            return None

    def _check_writable(self) -> None:
        if self._read_only:
            raise EditError("this page is read-only.")
        if self._source:
            raise EditError(f"these runs come from {self._source}, where nothing is edited.")


def page_id(place: Path | str, roots: Sequence[Path]) -> str:
    """Returns the id in the API of the run in a folder, or with an id in a dataset.

    Args:
        place: the folder, or the id.
        roots: the folders of runs.
    """
    for number, root in enumerate(roots):
        if Path(place).is_relative_to(root):
            return _digest(f"{number}\0{Path(place).relative_to(root)}")
    return _digest(str(place))


def with_page_ids(views: Mapping[str, dict[str, Any]], runs: Runs) -> dict[str, dict[str, Any]]:
    """Returns saved views with the page's ids of their runs."""
    if not any(fields.get(name) for fields in views.values() for name in _RUNS_OF_VIEW):
        return dict(views)
    ids = {one.run_id: page_id(one.path, runs.roots) for one in runs.records(archived=None)}
    return {name: _with_ids(fields, ids.get) for name, fields in views.items()}


def statistics_of(run: RecordedRun) -> Mapping[str, MetricSummary]:
    """Returns the statistics of metrics; only last values if that would read all rows of a large run."""
    path = run.record.path
    if run.copy is not None and is_terminal(run.status):
        # Its documents are enough for a table; its rows need not be downloaded.
        return summary_of(path, 0)
    state = state_of(path / metrics_name(0))
    if state is None or state.st_size <= _MAX_COMPUTED_BYTES or state_of(path / SUMMARY) is not None:
        return run.summary
    return {
        name: MetricSummary(last, None, None, None, None, 0, 0, None)
        for name, last in run.record.summary.items()
    }


def state_of(path: Path) -> os.stat_result | None:
    """Returns the state of a file, folder or link, without following the link; None if there is none."""
    try:
        return path.stat(follow_symlinks=False)
    except (OSError, ValueError):
        return None


def _metric_of_extreme(name: str) -> str | None:
    """Returns the metric of a column such as `max.loss`; None for any other column."""
    group, _, rest = name.partition(".")
    return rest if group in _EXTREMES and rest else None


def _field_of(name: str) -> str:
    metric = _metric_of_extreme(name)
    return name if metric is None else f"summary.{metric}"


def _cell_of(record: RunRecord, name: str, now: float, statistics: Mapping[str, MetricSummary]) -> Any:
    metric = _metric_of_extreme(name)
    if metric is None:
        return value_of(record, name, now)
    found = getattr(statistics.get(metric), name.partition(".")[0], None)
    return MISSING if found is None else found


def _finite(cells: Iterable[Any]) -> Iterator[float]:
    """Yields the finite numbers among cells."""
    for kind, value in map(key_of, cells):
        if kind is Kind.NUMBER and math.isfinite(value):
            yield value


def _kind_of(name: str, records: Sequence[RunRecord]) -> str:
    """Returns the kind of a column, from its field or from the values of some runs."""
    if name in FIELDS:
        return {"texts": "tags"}.get(FIELDS[name].type, FIELDS[name].type)
    group, _, rest = name.partition(".")
    if group == "summary" or group in _EXTREMES:
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


def _with_ids(fields: Mapping[str, Any], id_of: Callable[[str], str | None]) -> dict[str, Any]:
    """Returns the fields of a view with the ids of its runs replaced, without the runs that are gone."""
    lists = {name: fields[name] for name in _RUNS_OF_VIEW if isinstance(fields.get(name), list)}
    return {
        **fields,
        **{name: [found for one in ids if (found := id_of(one))] for name, ids in lists.items()},
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]
