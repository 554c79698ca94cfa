"""Answers about one run: its record, log, media, tables, point clouds and sounds; and the comparison of runs.

`destinations.runs` does all reading. Nothing here knows HTTP.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from destinations.kinds import kind_of
from destinations.kinds.kind import Kind
from destinations.kinds.point_clouds import read_points
from destinations.run_directory.layout import SIDECAR
from destinations.runs import BudgetError, RecordedRun
from destinations.runs.budget import spend
from destinations.runs.commands.show import differing_fields
from destinations.runs.content.flight import describe_flights
from destinations.runs.content.sources import branches_of
from destinations.runs.content.writers import writer_states
from destinations.runs.files import read_object_file
from destinations.runs.order import MISSING, orders_of
from destinations.runs.run import MetricSummary
from destinations.runs.streams import streams_of
from uploads.disk import open_regular

from .answers import plain
from .catalog import Catalog, state_of, statistics_of
from .charts import Axis, Rows, rows_of
from .columns import ColumnCache
from .downsampling import Array

__all__ = ["LOG_BYTES", "compare", "details", "log", "media", "points", "table"]

_MAX_STEPS = 10_000
_MAX_NAMES = 1000
_MAX_BRANCHES = 100
# Metrics of two runs that are read at a time.
_COMPARED_AT_ONCE = 200
_MAX_LOGS = 100
_MAX_STACKS = 64
_MAX_CHECKPOINTS = 1000
_MAX_SESSIONS = 1000
LOG_BYTES = 256 << 10
_LOG_SUFFIXES = (".log", ".txt", ".out", ".err")
_CHECKPOINT_SUFFIXES = (".ckpt", ".pt", ".pth", ".safetensors", ".symlink")
# Longer metrics aren't compared: their values take a gigabyte of memory meanwhile.
_MAX_COMPARED_VALUES = 1 << 23
# Memory of a table column in an answer, beside its cells.
_COLUMN_BYTES = 1 << 10
# Memory for reading a point cloud, as a multiple of its file.
_CLOUD_FACTOR = 3


def details(catalog: Catalog, run: RecordedRun) -> dict[str, Any]:
    """Returns the answer of `/api/runs/ID`."""
    record = run.record
    unreadable: list[dict[str, Any]] = []

    def read(what: str, ask: Callable[[], Any], default: Any) -> Any:
        """Returns the result of `ask`; on an error, notes it and returns the default."""
        try:
            return ask()
        except OSError as error:
            unreadable.append({"kind": "problem", "text": f"{what} cannot be read: {error}", "count": 1})
            return default

    environment = read("environment", lambda: run.environment, {})
    sidecar = read("sidecar", lambda: read_object_file(run.path / SIDECAR), {})
    sessions = read("sessions", lambda: run.sessions[-_MAX_SESSIONS:], [])
    answer = {
        **catalog.row(record),
        "ended_at": record.ended_at,
        "updated_at": record.updated_at,
        "heartbeat_at": record.heartbeat_at,
        "kind": record.kind,
        "checkpoint_path": record.checkpoint_path,
        "folder": run.place,
        "hyperparameters": plain(run.hyperparameters),
        **read("summary", lambda: _summary(run), {"summary": {}, "summary_orders": {}}),
        "metrics": read("metrics", run.metric_names, []),
        "ranks": read("ranks", run.ranks, []),
        "writers": read("writers", lambda: list(map(attrs.asdict, writer_states(run, catalog.clock()))), []),
        "environment": plain(environment),
        "git": plain(environment.get("git")),
        "sessions": plain(sessions),
        "parent": read("parent", lambda: None if run.parent is None else str(run.parent), None),
        "branches": read("branches", lambda: _branches(run), []),
        "checkpoints": read("checkpoints", lambda: _checkpoints(run), []),
        "artifacts": read("artifacts", lambda: _artifacts(run), []),
        "flight": read("flight records", lambda: _flight(run), {"summary": [], "ranks": []}),
        "time": read("time", lambda: _time(run), None),
        "overhead": plain(overhead if isinstance(overhead := sidecar.get("overhead"), dict) else {}),
        "lost": plain(sidecar.get("lost") or {}),
        "media": read("media", lambda: _media_index(run), {}),
        "damaged_lines": read("indexes", run.damaged_lines, {}),
        "logs": read("logs", lambda: [str(path.relative_to(run.path)) for path in _logs(run)], []),
    }
    errors = _errors(run, sidecar, sessions)
    errors += read("writers", lambda: _errors_of_writers(run), [])
    return {**answer, "errors": [*errors, *unreadable]}


def _summary(run: RecordedRun) -> dict[str, Any]:
    """Returns the statistics of metrics, and the order of metrics by each statistic."""
    found = {name: attrs.asdict(one) for name, one in statistics_of(run).items()}
    columns = {
        field.name: [one[field.name] for one in found.values()] for field in attrs.fields(MetricSummary)
    }
    orders = {name: orders_of(values) for name, values in {"metric": found, **columns}.items()}
    return {"summary": plain(found), "summary_orders": orders}


def _branches(run: RecordedRun) -> list[dict[str, Any]]:
    return [
        {
            "branch": one.name,
            "rank": one.rank,
            "file": str(one.path.relative_to(run.path)),
            "from_step": one.from_step,
        }
        for stream in streams_of(run.path)
        for one in branches_of(stream.folder)[:_MAX_BRANCHES]
    ]


def _checkpoints(run: RecordedRun) -> list[dict[str, Any]]:
    """Returns the checkpoints in the run's folder, and the newest one according to its record."""

    def about(path: str) -> dict[str, Any]:
        is_uri = "://" in path
        state = None if is_uri else state_of(Path(path))
        return {
            "name": path.rstrip("/").rpartition("/")[2],
            "path": path,
            "file": None,
            "size": state.st_size if state is not None and stat.S_ISREG(state.st_mode) else None,
            "time": None if state is None else state.st_mtime,
            "exists": None if is_uri else state is not None,
        }

    places = _files_in(run.path / "checkpoints", _CHECKPOINT_SUFFIXES, _MAX_CHECKPOINTS, with_folders=True)
    # A sharded checkpoint is a folder, which has no size and no link.
    found = [
        {**one, "file": None if one["size"] is None else run.name_of(path)}
        for path in places
        if (one := about(str(path)))["exists"]
    ]
    newest = run.checkpoint_path
    return [*found, about(newest)] if newest and Path(newest) not in places else found


def _artifacts(run: RecordedRun) -> list[dict[str, Any]]:
    """Returns the newest file for each name and writer."""
    newest = {one.path: one for one in run.artifacts()}
    return [
        {
            "name": one.name,
            "step": one.step,
            "time": one.time,
            "size": one.size,
            "file": run.name_of(one.path),
            "uri": None,
            "arrived": one.path.is_file(),
        }
        for one in list(newest.values())[:_MAX_NAMES]
    ]


def _errors(
    run: RecordedRun, sidecar: Mapping[str, Any], sessions: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    errors = []
    problems = [run.record.problem] if run.record.problem else []
    # If the rows can't be read at all, the metrics report it.
    with contextlib.suppress(OSError):
        problems = run.problems()
    errors += [{"kind": "problem", "text": problem, "count": 1} for problem in problems]
    errors += [
        {"kind": "exception", "text": str(session["exception"]), "count": 1}
        for session in sessions
        if session.get("exception")
    ]
    overhead = sidecar.get("overhead")
    if isinstance(overhead, dict) and isinstance(counted := overhead.get("errors"), dict) and counted:
        text = str(overhead.get("last_error") or "errors while writing records")
        count = sum(one for one in counted.values() if isinstance(one, int))
        errors.append({"kind": "logging", "text": text, "count": count})
    lost = sidecar.get("lost")
    for kind, count in lost.items() if isinstance(lost, dict) else ():
        if count:
            errors.append(
                {"kind": "lost", "text": f"{kind} that were accepted and not written", "count": count}
            )
    return plain(errors)  # type: ignore[no-any-return]  # of a list, a list


def _errors_of_writers(run: RecordedRun) -> list[dict[str, Any]]:
    return [
        {**error, "text": f"writer {one.path.name}: {error['text']}"}
        for one in run.writer_runs()
        for error in _errors(one, read_object_file(one.path / SIDECAR), one.sessions[-_MAX_SESSIONS:])
    ]


def _flight(run: RecordedRun) -> dict[str, Any]:
    """Returns the flight records: a line for each group of ranks, and the first stacks."""
    flights = run.flights()
    ranks = [
        {
            **{name: getattr(one, name) for name in ("rank", "reason", "detail", "time")},
            "step": next((step.get("step") for step in reversed(one.steps)), None),
            "stack": [
                {name: getattr(frame, name) for name in ("place", "function", "code", "is_library")}
                for frame in one.stack
            ],
        }
        for one in flights[:_MAX_STACKS]
    ]
    found = {"summary": describe_flights(flights), "ranks": ranks}
    return plain(found)  # type: ignore[no-any-return]  # of a dict, a dict


def _time(run: RecordedRun) -> dict[str, Any] | None:
    """Returns how the run spent its time, and its last faults; None without a time ledger."""
    report = run.time_report()
    if report is None:
        return None
    found = report.to_json()
    kept = {name: found[name] for name in ("wall", "goodput", "productive", "seconds")}
    kept |= {
        "faults": found["faults"][-_MAX_SESSIONS:],
        "slow": "; ".join(filter(None, (report.slow_text, report.slow_steps_text))),
    }
    return plain(kept)  # type: ignore[no-any-return]  # of a dict, a dict


def log(run: RecordedRun, name: str = "", offset: int = 0, limit: int = LOG_BYTES) -> dict[str, Any]:
    """Returns the answer of `/api/runs/ID/log`.

    Args:
        run: the run.
        name: a log file; "" for the first one.
        offset: in bytes; a negative offset counts from the end.
        limit: the largest number of bytes.

    Raises:
        FileNotFoundError: the run has no such log file.
    """
    logs = {str(path.relative_to(run.path)): path for path in _logs(run)}
    name = name or next(iter(logs), "")
    if name not in logs:
        raise FileNotFoundError(f"no log {name!r} in this run." if name else "this run has no log file.")
    fd = open_regular(logs[name])
    try:
        size = os.fstat(fd).st_size
        start = max(0, size + offset) if offset < 0 else min(offset, size)
        data = os.pread(fd, max(0, min(limit, LOG_BYTES)), start)
    finally:
        os.close(fd)
    # End at a whole line, so that no character is cut in two; a very long line is cut all the same.
    end = len(data) if start + len(data) >= size else data.rfind(b"\n") + 1 or len(data)
    text = data[:end].decode("utf-8", "replace")
    return {"file": name, "text": text, "offset": start, "next": start + end, "size": size}


def _logs(run: RecordedRun) -> list[Path]:
    return [
        path
        for folder in (run.path, run.path / "logs")
        for path in _files_in(folder, _LOG_SUFFIXES, _MAX_LOGS)
    ][:_MAX_LOGS]


def _files_in(folder: Path, suffixes: Sequence[str], limit: int, *, with_folders: bool = False) -> list[Path]:
    """Returns the regular files of a folder, by name; none if the folder is missing or a link."""
    try:
        if folder.is_symlink():
            return []
        with os.scandir(folder) as entries:
            found = [
                Path(entry.path)
                for entry in entries
                if not entry.name.startswith(".")
                and (
                    (entry.name.endswith(tuple(suffixes)) and entry.is_file(follow_symlinks=False))
                    or (with_folders and entry.is_dir(follow_symlinks=False))
                )
            ]
    except OSError:
        return []
    return sorted(found)[:limit]


# Media.


def _media_index(run: RecordedRun) -> dict[str, dict[str, list[int | None]]]:
    """Returns the steps of each name of each kind."""
    index: dict[str, dict[str, list[int | None]]] = {}
    for kind in run.record_counts():
        names: dict[str, dict[int | None, None]] = {}
        for one in run.records(kind, with_files=False):
            name = getattr(one, "name", "")
            if name in names or len(names) < _MAX_NAMES:
                names.setdefault(name, {})[one.step] = None
        # Records of named writers may arrive late.
        index[kind] = {
            name: _evenly(sorted(steps, key=lambda step: (step is not None, step)), _MAX_STEPS)
            for name, steps in names.items()
        }
    return index


def media(
    run: RecordedRun,
    kind: str,
    name: str,
    *,
    start: float | None = None,
    end: float | None = None,
    limit: int = 1000,
) -> dict[str, Any]:
    """Returns the answer of `/api/runs/ID/media`.

    Raises:
        ValueError: the kind is unknown.
        MetricNotFoundError: no record has this name.
    """
    about = kind_of(plural=kind)
    found = [one for one in run.records(kind, name, with_files=False) if _is_between(one.step, start, end)]
    items = [_item(run, about, one) for one in _evenly(found, limit)]
    return {"total": len(found), "items": plain_items(items)}


def _is_between(step: int | None, start: float | None, end: float | None) -> bool:
    if start is None and end is None:
        return True
    return step is not None and (start is None or step >= start) and (end is None or step <= end)


def plain_items(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns items for strict JSON, with arrays as they are."""
    return [
        {name: value if isinstance(value, np.ndarray) else plain(value) for name, value in item.items()}
        for item in items
    ]


def _item(run: RecordedRun, kind: Kind, one: Any) -> dict[str, Any]:
    def file_of(path: Path) -> str:
        return run.name_of(path)

    fields = attrs.asdict(one, recurse=False)
    fields.pop("name", None)
    if "path" in fields:
        fields["file"] = file_of(fields.pop("path"))
    return kind.page_fields(one, fields, file_of)


def _evenly(items: Sequence[Any], limit: int) -> list[Any]:
    """Returns up to `limit` items, evenly chosen, including the first and the last."""
    if len(items) <= limit:
        return list(items)
    return [items[round(place)] for place in np.linspace(0, len(items) - 1, max(1, limit))]


def table(
    run: RecordedRun, name: str, step: int | None = None, *, offset: int = 0, limit: int = 1000
) -> dict[str, Any]:
    """Returns the answer of `/api/runs/ID/table`.

    Raises:
        MetricNotFoundError: no table has this name, or there is none at this step.
    """
    found, kinds, total = run.table_part(name, step, offset, limit)
    rows, orders = found.rows, []
    for place in range(len(found.columns)):
        spend(_COLUMN_BYTES)
        # Another writer's row may be shorter than the header.
        orders.append(orders_of(row[place] if place < len(row) else MISSING for row in rows))
    return {
        "name": name,
        "step": found.step,
        "columns": [{"name": column, "type": kinds.get(column, "str")} for column in found.columns],
        "rows": plain(rows),
        "orders": orders,
        "offset": offset,
        "total": total,
    }


def points(run: RecordedRun, file: str, limit: int = 50_000) -> dict[str, Any]:
    """Returns the answer of `/api/runs/ID/points`.

    Raises:
        OSError: the file can't be read.
        ValueError: the file isn't a point cloud.
    """
    path = run.file(file)
    spend(_CLOUD_FACTOR * path.stat().st_size)
    places, colors = read_points(path)
    total = len(places)
    if total > limit:
        chosen = np.linspace(0, total - 1, limit).round().astype(np.intp)
        places, colors = places[chosen], None if colors is None else colors[chosen]
    shades = None if colors is None else [f"#{bytes(one[:3]).hex()}" for one in colors]
    x, y, z = places.T
    return {"x": x, "y": y, "z": z, "colors": shades, "total": total}


# Several runs.


def compare(runs: Sequence[tuple[str, RecordedRun]], cache: ColumnCache) -> dict[str, Any]:
    """Returns the answer of `/api/compare`.

    Args:
        runs: the id of each run, and the run.
        cache: the cache of their columns.
    """
    ids = [run_id for run_id, _ in runs]
    fields = [
        {"name": name, "values": {ids[place]: plain(value) for place, value in values.items()}}
        for name, values in differing_fields([run for _, run in runs]).items()
    ]
    first_id, first = runs[0]
    return {
        "runs": ids,
        "fields": fields,
        "parts": [{"a": first_id, "b": run_id, **_part(first, run, cache)} for run_id, run in runs[1:]],
    }


def _part(one: RecordedRun, other: RecordedRun, cache: ColumnCache) -> dict[str, Any]:
    """Returns the first step at which each common metric differs, and the number of unread metrics."""
    others = set(other.metric_names())
    names = [name for name in one.metric_names() if name in others]
    steps: dict[str, int | None] = {}
    read = 0
    # When the budget is used up, `unread` says so.
    with contextlib.suppress(BudgetError):
        for at in range(0, len(names), _COMPARED_AT_ONCE):
            some = names[at : at + _COMPARED_AT_ONCE]
            found, other_found = (rows_of(cache, run, some, Axis(), 0) for run in (one, other))
            for name, rows, other_rows in zip(some, found, other_found, strict=True):
                if max(rows.count, other_rows.count) > _MAX_COMPARED_VALUES:
                    continue
                if rows.error is None and other_rows.error is None:
                    steps[name] = _first_of(_single_values(rows), _single_values(other_rows))
                read += 1
    return {"metrics": steps, "unread": len(names) - read}


def _single_values(rows: Rows) -> Rows:
    """Returns the single values of a metric, also of a long run."""
    if not rows.entries:
        return rows
    closed, live = rows.within(rows.entries), len(rows.entries)
    return Rows(np.concatenate([closed.x, rows.x[live:]]), np.concatenate([closed.y, rows.y[live:]]))


def _first_of(one: Rows, other: Rows) -> int | None:
    common, values, other_values = one.x, one.y, other.y
    if not (np.array_equal(one.x, other.x) and (np.diff(one.x) > 0).all()):
        (steps, values), (other_steps, other_values) = _last_by_step(one), _last_by_step(other)
        common, at, other_at = np.intersect1d(steps, other_steps, assume_unique=True, return_indices=True)
        values, other_values = values[at], other_values[other_at]
    differs = ~((values == other_values) | (np.isnan(values) & np.isnan(other_values)))
    return int(common[np.argmax(differs)]) if differs.any() else None


def _last_by_step(rows: Rows) -> tuple[Array, Array]:
    """Returns the steps in increasing order, and the last value at each."""
    steps, places = np.unique(rows.x[::-1], return_index=True)
    return steps, rows.y[::-1][places]
