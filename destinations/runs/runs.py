"""`Runs`: the runs below some roots, to query, compare and edit."""

import contextlib
import heapq
import importlib
import logging
import math
import operator
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import attrs

from .budget import spend
from .errors import (
    AmbiguousRunError,
    EditError,
    FilterError,
    MetricNotFoundError,
    RunNotFoundError,
    RunsError,
    WriterNotFoundError,
)
from .files import clean_text
from .index.edits import edit_run
from .index.filter_sql import Order, Query
from .index.filters import Chain, Field, In, Node, parse_field, parse_filter
from .index.index import Index
from .index.root import Root
from .index.scan import RUNNING, ScanChange, ScanReport
from .order import MISSING, label_of, same_values, sort_rows
from .record import FIELDS, Extremes, RunRecord, flat_record, is_terminal
from .run import RecordedRun
from .summary import read_extremes

if TYPE_CHECKING:
    from .content.series import Series
    from .index.bucket import BucketCopy

__all__ = ["BestRun", "RunLike", "Runs", "differing", "matches"]

_log = logging.getLogger("destinations")


def differing(flats: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Any]]:
    """Returns the fields that differ between runs, each with its values by the index of the run."""
    names = dict.fromkeys(name for flat in flats for name in flat)
    return {
        name: {place: flat[name] for place, flat in enumerate(flats) if name in flat}
        for name in names
        if not same_values(flat.get(name, MISSING) for flat in flats)
    }


def _compared(record: RunRecord, now: float) -> dict[str, Any]:
    """Returns the fields that are worth comparing, hyperparameters and metrics."""
    fields = flat_record(record, now).items()
    return {name: value for name, value in fields if name not in FIELDS or FIELDS[name].is_compared}


def matches(record: RunRecord, where: str, now: float) -> bool:
    """Returns whether a filter is true of one run; takes about a millisecond, for an index in memory.

    Raises:
        FilterError: the filter does not parse.
    """
    node = parse_filter(where, now)
    flags = 0 if is_terminal(record.status) else RUNNING
    path = str(record.path).lstrip("/")
    index = Index("/", None)
    fields = attrs.asdict(record, recurse=False)
    try:
        index.write([ScanChange(path, fields, record.problem, record.heartbeat_at, 0, 0, "", flags)])
        order = Order(Field("run", "run_id"), descending=False)
        return bool(index.select(index.compile(node, order, now=now, archived=None), 1))
    finally:
        index.close()


_TRIES = 3
# In a notebook.
_SHOWN = 20
_LAST_CHARACTER = "\U0010ffff"
# Groups sorted in descending order by default.
_DESCENDING_GROUPS = frozenset({"summary"})

Result = TypeVar("Result")
RunLike = str | os.PathLike[str] | RecordedRun | RunRecord


@attrs.frozen
class BestRun:
    """A run with the best value that a metric reached in it.

    ```python
    with open_runs("runs") as runs:
        best = runs.best("loss", is_max=False)[0]
    print(best.run.path.name, best.value, best.step)  # digits 0.25 3
    ```

    Attributes:
        run: the run.
        value: the smallest or largest finite value.
        step: where the value was first logged; None if unknown.
    """

    run: RecordedRun
    value: float
    step: int | None


class Runs:
    """The runs below some roots; `open_runs` makes one.

    ```python
    with open_runs("runs") as runs:
        runs.edit("digits", tags=["baseline"])
        best = runs.query(where="'baseline' in tags", sort_by="summary.loss", limit=1)
        print(best[0].path.name)  # digits
    ```

    **Threading.** Any thread may call any method; a lock serializes them. Open the runs again in a forked
    child.

    **Freshness.** Queries read the index only; call `scan` to see changes since the last scan.

    Args:
        roots: the roots with their indexes.
        clock: returns the time in seconds since 1970.
        warnings: warnings to add to the report of each scan.
    """

    def __init__(
        self, roots: Sequence[Root], *, clock: Callable[[], float] = time.time, warnings: Sequence[str] = ()
    ) -> None:
        self._roots = tuple(roots)
        self._clock = clock
        self._warnings = tuple(warnings)
        # Guards the indexes and the report.
        self._lock = threading.RLock()
        self._is_closed = False
        self.report = ScanReport()

    @property
    def roots(self) -> tuple[Path, ...]:
        """The folders, absolute and without links."""
        return tuple(Path(root.folder) for root in self._roots)

    @property
    def copies(self) -> "tuple[BucketCopy, ...]":
        """The local copies of the roots that are in a store."""
        return tuple(root.copy for root in self._roots if root.copy is not None)

    def scan(self, *, full: bool = False) -> ScanReport:
        """Updates the index with the changes on disk, and returns a report, also kept as `report`.

        Takes about 10 µs per unchanged run, 50 µs per changed one. Raises nothing for what it finds: runs
        may be written, moved and deleted meanwhile.

        Args:
            full: whether to read every run again.
        """
        for root in self._roots:
            # Outside the lock, because it may ask a store.
            root.bring(at_once=full)
        with self._lock:
            started = time.perf_counter()
            reports = [root.scan(self._clock(), full=full) for root in self._roots]
            total = ScanReport.total(reports)
            self.report = attrs.evolve(
                total,
                warnings=(*self._warnings, *total.warnings),
                duplicates=self._duplicates(),
                is_full=full,
                seconds=time.perf_counter() - started,
            )
            return self.report

    def query(
        self,
        *,
        where: str | None = None,
        tag: str | None = None,
        status: str | None = None,
        alive: bool | None = None,
        hparams: Mapping[str, Any] | None = None,
        sort_by: str | None = None,
        descending: bool | None = None,
        archived: bool | None = False,
        limit: int | None = None,
    ) -> list[RecordedRun]:
        """Returns the runs that match.

        Args:
            where: a filter, such as `hparams.optim.lr >= 1e-3 and summary.val/acc > 0.9`.
            tag: a tag of the runs.
            status: the status of the runs.
            alive: whether the runs are being written; None for both.
            hparams: values of hyperparameters by dotted name, or nested. A run must have all of them.
            sort_by: a field (`created_at`), hyperparameter (`hparams.optim.lr`) or metric
                (`summary.val/acc`). Default: newest first. Runs without a value come last in both directions,
                preceded by those with NaN.
            descending: whether to sort from max to min. Default: for times and metrics.
            archived: whether the runs are archived; None for both.
            limit: the maximum number of runs.

        Raises:
            FilterError: the filter does not parse.
            MetricNotFoundError: no run has the field to sort by.
        """
        tests = (*_tests(tag, status), *_more_tests(alive, hparams))
        found = self._with_retry(
            lambda: _without_gone(
                self._fetch(self._select(where, tests, sort_by, descending, archived, limit))
            )
        )
        return _RunList(self, map(self._run, found))

    def records(self, **query: Any) -> list[RunRecord]:
        """Returns the records of the runs that match; see `query`."""
        return [run.record for run in self.query(**query)]

    def page(
        self,
        offset: int,
        limit: int,
        *,
        where: str | None = None,
        sort_by: str | None = None,
        descending: bool | None = None,
        archived: bool | None = False,
    ) -> tuple[list[RunRecord], int]:
        """Returns some records of the matching runs, and how many runs match; see `query`.

        Args:
            offset: how many runs to skip.
            limit: the maximum number of records.
            where: as for `query`.
            sort_by: as for `query`.
            descending: as for `query`.
            archived: as for `query`.
        """

        def ask() -> tuple[list[RunRecord], int]:
            found = self._select(where, (), sort_by, descending, archived, None)
            return _without_gone(self._fetch(found[offset : offset + limit])), len(found)

        return self._with_retry(ask)

    def count_by(
        self, field: str, *, where: str | None = None, archived: bool | None = False
    ) -> dict[str, int]:
        """Returns how many runs have each value of a field, in the order of `query(sort_by=field)` from min.

        Values are compared as in filters: `1` and `1.0` are the same, the text `"1"` differs and is quoted.
        Runs without the field are counted under a dash, which comes last.

        Args:
            field: as `sort_by` of `query`.
            where: as for `query`.
            archived: as for `query`.

        Raises:
            FilterError: the filter does not parse.
            MetricNotFoundError: no run has the field.
        """
        order = Order(self._order_field(field), descending=False)
        rows = self._with_retry(lambda: self._rows(where, (), order, archived))
        return dict(Counter(label_of(value) for value, *_ in rows))

    def best(
        self,
        metric: str,
        *,
        is_max: bool,
        where: str | None = None,
        tag: str | None = None,
        status: str | None = None,
        archived: bool | None = False,
        limit: int | None = None,
    ) -> list[BestRun]:
        """Returns runs by the best value that a metric reached at any step, best first.

        The first call reads the `summary.json` of each matching run. The index keeps the values, so later
        calls read only changed runs. Runs without a finite value are left out; so are unreadable runs, with a
        warning.

        Args:
            metric: its name.
            is_max: whether the largest value is the best one.
            where: as for `query`.
            tag: as for `query`.
            status: as for `query`.
            archived: as for `query`.
            limit: the maximum number of runs.

        Raises:
            FilterError: the filter does not parse.
            MetricNotFoundError: no run has the metric.
        """
        name = clean_text(metric)

        def ask() -> list[BestRun]:
            order = Order(Field("run", "created_at"), descending=True)
            read, sign = self._reader_of_extremes(name), 1 if is_max else -1
            found = [
                (sign * value, -math.inf if created_at is None else created_at, number, step, root)
                for root, query in self._queries(where, _tests(tag, status), order, archived)
                for value, step, created_at, number in root.index.best(name, query, read, is_max=is_max)
            ]
            if not found and metric not in self._names("summary"):
                raise MetricNotFoundError(metric, self._names("summary"))
            # Among equal values, the newest run comes first.
            count = len(found) if limit is None else limit
            best = heapq.nlargest(count, found, key=operator.itemgetter(0, 1, 2))
            records = self._fetch([(root, number) for _, _, number, _, root in best])
            return [
                BestRun(self._run(record), sign * value, step)
                for record, (value, _, _, step, _) in zip(records, best, strict=True)
                if record is not None
            ]

        return self._with_retry(ask)

    def _reader_of_extremes(self, metric: str) -> Callable[[str], Extremes | None]:
        """Returns a function that reads a metric's min and max from the run in a folder."""

        def read(folder: str) -> Extremes | None:
            try:
                return read_extremes(folder, metric)
            except Exception as error:  # noqa: BLE001  # whatever is wrong with this run, the others count
                _log.warning("skipped run in %s: %s", folder, error)
                return None

        return read

    def fingerprints(self) -> dict[Path, Hashable]:
        """Returns a value for each run that changes when a scan finds a change in the run."""
        return self._with_retry(
            lambda: {
                root.index.full_path(path): (mtime_ns, inode, files)
                for root in self._roots
                for path, (_, mtime_ns, inode, _, files, _) in root.index.state().runs.items()
            }
        )

    def _select(
        self,
        where: str | None,
        tests: tuple[Node, ...],
        sort_by: str | None,
        descending: bool | None,
        archived: bool | None,
        limit: int | None,
    ) -> list[tuple[Root, int]]:
        field = self._order_field(sort_by)
        if descending is None:
            descending = field.group in _DESCENDING_GROUPS or field.type == "time"
        order = Order(field, descending)
        return [(root, number) for _, _, number, root in self._rows(where, tests, order, archived, limit)]

    def _rows(
        self,
        where: str | None,
        tests: Iterable[Node],
        order: Order,
        archived: bool | None,
        limit: int | None = None,
    ) -> list[tuple[Any, float | None, int, Root]]:
        """Returns runs in order: value to sort by, time of creation, id, root."""
        found = [
            (*row, root)
            for root, query in self._queries(where, tests, order, archived)
            for row in root.index.select(query, limit)
        ]
        if len(self._roots) > 1:
            found.sort(key=lambda row: -math.inf if row[1] is None else row[1], reverse=True)
            found = sort_rows(found, descending=order.descending)[:limit]
        return found

    def _queries(
        self, where: str | None, tests: Iterable[Node], order: Order, archived: bool | None
    ) -> list[tuple[Root, Query]]:
        """Returns the query of each root."""
        now = self._clock()
        nodes = (*(() if where is None else (parse_filter(where, now, self._names),)), *tests)
        node = Chain("and", nodes) if nodes else None
        field = order.field
        is_known = field.group == "run" or any(root.index.numbers([field]) for root in self._roots)
        if not is_known and len(self):
            names = [f"{field.group}.{name}" for name in self._names(field.group)]
            raise MetricNotFoundError(str(field), names)
        return [(root, root.index.compile(node, order, now=now, archived=archived)) for root in self._roots]

    def __getitem__(self, wanted: str | os.PathLike[str]) -> RecordedRun:
        """Returns one run.

        Args:
            wanted: its id, its name, its path, or a prefix of its id.

        Raises:
            RunNotFoundError: no run matches.
            AmbiguousRunError: several runs match.
        """
        return self._run(self._find(wanted))

    def many(self, wanted: Iterable[Path | str]) -> dict[Path | str, RecordedRun]:
        """Returns runs by their folders, without folders that are no runs; takes one query for each root."""
        folders = [Path(one) for one in wanted]

        def ask() -> dict[Path | str, RecordedRun]:
            found = []
            for root in self._roots:
                paths = (root.below(str(folder)) for folder in folders)
                numbers = root.index.ids_at([path for path in paths if path is not None])
                found += [(root, number) for number in numbers]
            return {one.path: self._run(one) for one in _without_gone(self._fetch(found))}

        return self._with_retry(ask)

    def get(self, wanted: str | os.PathLike[str]) -> RecordedRun | None:
        """Returns one run, as `runs[wanted]` does, or None if there is none.

        Raises:
            AmbiguousRunError: several runs match.
        """
        try:
            return self[wanted]
        except RunNotFoundError:
            return None

    def __len__(self) -> int:
        return self._with_retry(lambda: sum(root.index.count() for root in self._roots))

    def __iter__(self) -> Iterator[RecordedRun]:
        """Yields all runs including archived ones, newest first."""
        return iter(self.query(archived=None))

    def hparam_names(self) -> list[str]:
        """Returns the dotted names of all hyperparameters."""
        return self._names("hparams")

    def metric_names(self) -> list[str]:
        """Returns the names of all metrics."""
        return self._names("summary")

    def compare(self, runs: Sequence[RunLike]) -> dict[str, dict[str, Any]]:
        """Returns the fields that differ, such as `hparams.optim.lr`, each with its values by run id.

        If two runs have the same id, the values are keyed by path. Runs without the field are left out.

        Raises:
            RunNotFoundError: no run matches.
            AmbiguousRunError: several runs match.
        """
        records = [self._find(run) for run in runs]
        ids = [record.run_id for record in records]
        labels = ids if len(set(ids)) == len(ids) else [str(record.path) for record in records]
        now = self._clock()
        found = differing([_compared(record, now) for record in records])
        return {name: {labels[place]: one for place, one in values.items()} for name, values in found.items()}

    def to_dicts(self, **query: Any) -> list[dict[str, Any]]:
        """Returns a flat dict for each run: fields, `hparams.…`, `summary.…`, by `query`."""
        now = self._clock()
        return [flat_record(record, now) for record in self.records(**query)]

    def to_dataframe(self, **query: Any) -> Any:
        """Returns a `pandas.DataFrame` with a row for each run; see `to_dicts`.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError(
                f"to_dataframe needs pandas ({error}). Install pandas, or use to_dicts()."
            ) from error
        rows = self.to_dicts(**query)
        recorded = (name for name, field in FIELDS.items() if field.is_recorded)
        columns = {name: index for index, name in enumerate(recorded)}
        for group in ("hparams.", "summary."):
            for row in rows:
                for name in row:
                    if name.startswith(group):
                        columns.setdefault(name, len(columns))
        return pd.DataFrame(rows, columns=list(columns))

    def series(
        self, name: str, runs: "Iterable[RunLike] | None" = None, rank: int = 0, writer: str | None = None
    ) -> "dict[str, Series]":
        """Returns a metric of many runs by run id, without runs that lack it. A dataset reads all at once.

        Args:
            name: of the metric.
            runs: which ones; None for all.
            rank: as for `RecordedRun.series`.
            writer: as for `RecordedRun.series`.

        Raises:
            RunNotFoundError: no run matches.
            AmbiguousRunError: several runs match.
        """
        found = {}
        for run in self if runs is None else [self._run(self._find(one)) for one in runs]:
            with contextlib.suppress(MetricNotFoundError, WriterNotFoundError):
                found[run.run_id] = run.series(name, rank, writer)
        return found

    def plot(
        self, metric: str, *, x: str = "step", is_logarithmic: bool = False, limit: int = 20, **query: Any
    ) -> Any:
        """Returns a matplotlib figure of a metric of several runs, which a notebook shows.

        Args:
            metric: its name; runs without it are left out.
            x: "step", or "time" for seconds since the start of each run.
            is_logarithmic: use a logarithmic y axis.
            limit: the largest number of runs.
            query: as for `query`.

        Raises:
            MetricNotFoundError: no run has the metric.
            ImportError: matplotlib is not installed.
        """
        from .notebook import draw, lines_of, require_matplotlib

        require_matplotlib()
        lines: list[tuple[str, Any, Any]] = []
        runs = [run for run in self.query(**query) if metric in run.record.summary]
        found = self.series(metric, runs[:limit])
        for run in runs:
            if run.run_id in found and len(lines) < limit:
                lines += lines_of(run.record, found[run.run_id], x)
        if not lines:
            raise MetricNotFoundError(metric, self.metric_names())
        return draw({metric: lines}, x=x, is_logarithmic=is_logarithmic)

    def view(self, *, port: int | None = None) -> Any:
        """Serves the page of these runs, and returns its `destinations.viewer.Viewer`; `close` stops it.

        Keep the runs open meanwhile.

        Args:
            port: to bind; None for 8377, or any free one if that is taken.

        Raises:
            ImportError: starlette or uvicorn is not installed.
        """
        # Imported by name, because the page imports this module.
        return importlib.import_module("destinations.viewer").Viewer(self, port=port).start()

    def __repr__(self) -> str:
        return f"Runs({', '.join(repr(str(root)) for root in self.roots)})"

    def _repr_html_(self) -> str:
        return self.html_of(*self.page(0, _SHOWN))

    def html_of(self, records: Sequence[RunRecord], total: int) -> str:
        """Returns records as a table for a notebook, with the number of further runs."""
        from .notebook import runs_html

        return runs_html(records, total, map(str, self.roots), self._clock())

    def edit(
        self,
        run: RunLike,
        *,
        tags: Sequence[str] | None = None,
        notes: str | None = None,
        display_name: str | None = None,
        archived: bool | None = None,
        based_on: Mapping[str, Any] | None = None,
    ) -> RecordedRun:
        """Writes edits to `edits.json` in the folder of a run, and returns the edited run.

        The run's own files aren't touched, so you can edit a run while it is being written. None leaves a
        field unchanged, and a value equal to the current one isn't written.

        Args:
            run: the run.
            tags: all tags of the run; tags that the run gives itself later are added.
            notes: the notes.
            display_name: the name; "" for the name of its folder.
            archived: whether it is archived.
            based_on: the `tags`, `notes` and `display_name` that the edit started from. Tags that others
                added or removed since then stay so, and a text that others changed isn't replaced.

        Raises:
            RunNotFoundError: no run matches.
            AmbiguousRunError: several runs match.
            EditError: the folder is not writable, or a text was changed meanwhile.
        """
        if isinstance(tags, str):
            raise TypeError(f"tags must be a list of strings, got {tags!r}. Write tags=[{tags!r}].")
        with self._lock:
            record = self._find(run)
            root, path = self._place(record.path)
            if root.copy is not None:
                raise EditError(
                    f"run {record.name!r} is in {root.copy.uri}, of which this is a copy. Edit it on the "
                    "machine that writes it."
                )
            root.refresh(path)
            record = self._find(record.path)
            there = {"tags": [*record.tags], "notes": record.notes, "archived": record.archived}
            there["display_name"] = record.display_name or ""
            given = {"tags": None if tags is None else [*tags], "notes": notes, "archived": archived}
            given["display_name"] = display_name
            changed = {name: one for name, one in given.items() if one is not None and one != there[name]}
            if changed:
                edit_run(record.path, root.own_tags(path), **changed, based_on=based_on, clock=self._clock)
                root.refresh(path)
            return RecordedRun(self._find(record.path), clock=self._clock)

    def close(self) -> None:
        """Closes the indexes; idempotent."""
        with self._lock:
            self._is_closed = True
            for root in self._roots:
                root.index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _with_retry(self, ask: Callable[[], Result]) -> Result:
        """Calls `ask`; if an index turns out to be corrupt, rebuilds it and calls again."""
        with self._lock:
            spend()  # While this waited for the lock, the client may have gone.
            for attempt in range(_TRIES):
                try:
                    return ask()
                except sqlite3.ProgrammingError as error:
                    if self._is_closed:
                        raise RunsError(
                            "these runs are closed. Open them again with open_runs(...)."
                        ) from error
                    raise
                except sqlite3.DatabaseError as error:
                    spend()  # SQLite is interrupted when the budget is used up.
                    if attempt == _TRIES - 1:
                        raise
                    for root in self._roots:
                        database = root.index.database
                        # If a sound file fails again, another program wrote its content.
                        if database.has_file and (attempt or not database.is_sound()):
                            database.rescue(error)
                    self.scan()
            raise AssertionError

    # Finding one.

    def _find(self, wanted: RunLike) -> RunRecord:
        if isinstance(wanted, RecordedRun):
            wanted = wanted.record
        if isinstance(wanted, RunRecord):
            wanted = wanted.path
        text = os.fspath(wanted)

        def ask() -> list[RunRecord]:
            if not isinstance(wanted, str):
                found = self._at(text)
            else:
                found = self._with("run_id = ?", text) or self._with("name = ?", text) or self._at(text)
                if not found and text:
                    found = self._with("run_id >= ? AND run_id < ?", text, text + _LAST_CHARACTER)
            if not found:
                names = (name for root in self._roots for name in root.index.names_of_runs())
                raise RunNotFoundError(text, dict.fromkeys(names))
            return _without_gone(self._fetch(found))

        records = self._with_retry(ask)
        if len(records) > 1:
            raise AmbiguousRunError(text, [f"{record.run_id} ({record.path})" for record in records])
        if not records:
            raise RunNotFoundError(text)
        return records[0]

    def _with(self, condition: str, *values: str) -> list[tuple[Root, int]]:
        try:
            for value in values:
                value.encode()
        except UnicodeEncodeError:
            return []
        return [(root, number) for root in self._roots for number in root.index.ids_where(condition, values)]

    def _at(self, text: str) -> list[tuple[Root, int]]:
        """Returns the run with this path: absolute, or relative to the current folder or a root."""
        for base in ("", *(root.folder for root in self._roots)):
            try:
                full = os.path.realpath(os.path.join(base, text))  # noqa: PTH118  # as in `_folders`
            except ValueError:
                # NUL, or a lone surrogate: not a path.
                return []
            for root in self._roots:
                path = root.below(full)
                if path is not None and (found := root.index.ids_at([path])):
                    return [(root, number) for number in found]
        return []

    def _place(self, folder: Path) -> tuple[Root, str]:
        for root in self._roots:
            path = root.below(str(folder))
            if path is not None:
                return root, path
        raise RunNotFoundError(str(folder))

    # Internal.

    def _run(self, record: RunRecord) -> RecordedRun:
        copy = next((one for one in self.copies if record.path.is_relative_to(one.folder)), None)
        return RecordedRun(record, clock=self._clock, copy=copy)

    def _fetch(self, found: Sequence[tuple[Root, int]]) -> list[RunRecord | None]:
        """Returns the records of runs in the same order; None for a run removed meanwhile."""
        records: dict[tuple[int, int], RunRecord] = {}
        for place, root in enumerate(self._roots):
            numbers = [number for one, number in found if one is root]
            records |= {(place, number): record for number, record in root.index.records(numbers)}
        places = {id(root): place for place, root in enumerate(self._roots)}
        keys = [(places[id(root)], number) for root, number in found]
        return [records.get(key) for key in keys]

    def _names(self, group: str) -> list[str]:
        return self._with_retry(
            lambda: list(dict.fromkeys(name for root in self._roots for name in root.index.names(group)))
        )

    def _order_field(self, sort_by: str | None) -> Field:
        if sort_by is None:
            return Field("run", "created_at")
        try:
            field = parse_field(sort_by, self._names)
        except FilterError:
            cells = [f"{group}.{name}" for group in ("hparams", "summary") for name in self._names(group)]
            raise MetricNotFoundError(sort_by, [*FIELDS, *cells]) from None
        if field.name == "tags" and field.group == "run":
            raise MetricNotFoundError(sort_by)
        return field

    def _duplicates(self) -> Mapping[str, tuple[Path, ...]]:
        """Returns the paths of ids that occur more than once, in one root or in several."""
        counts = Counter(run_id for root in self._roots for run_id in root.index.ids_of_runs())
        return {
            run_id: tuple(path for root in self._roots for path in root.index.paths_of(run_id))
            for run_id, count in counts.items()
            if count > 1
        }


def _without_gone(records: Iterable[RunRecord | None]) -> list[RunRecord]:
    return [record for record in records if record is not None]


def _tests(tag: str | None, status: str | None) -> Iterator[Node]:
    if tag is not None:
        yield In(Field("run", "tags"), (tag,))
    if status is not None:
        yield In(Field("run", "status"), (status,))


def _more_tests(alive: bool | None, hparams: Mapping[str, Any] | None) -> Iterator[Node]:
    if alive is not None:
        yield In(Field("run", "alive"), (alive,))
    for name, value in (hparams or {}).items():
        if isinstance(value, Mapping):
            yield from _more_tests(None, {f"{name}.{key}": inner for key, inner in value.items()})
        elif value is None or isinstance(value, bool | int | float | str):
            yield In(Field("hparams", str(name)), (value,))
        else:
            raise TypeError(
                f"hparams must have numbers, texts or None as values, got {name}={value!r:.60}. "
                "Use where= for other tests."
            )


class _RunList(list[RecordedRun]):
    """Runs that were found, as a list that a notebook shows as a table."""

    def __init__(self, origin: Runs, found: Iterable[RecordedRun]) -> None:
        super().__init__(found)
        self._origin = origin

    @property
    def report(self) -> ScanReport:
        """The report of the scan that found them."""
        return self._origin.report

    def _repr_html_(self) -> str:
        return self._origin.html_of([run.record for run in self[:_SHOWN]], len(self))
