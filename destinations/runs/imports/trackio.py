"""Imports Trackio runs with Trackio's own storage: a database for each project, with media beside it."""

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from destinations.history.metric_summary import metric_of
from destinations.kinds.line import file_inside
from destinations.kinds.tables import TABLE
from destinations.kinds.texts import TEXT
from destinations.runs.move.stream import Logged, Record, SourceRun, Values
from destinations.trackers.names import short_hash

from .databases import damage_of, has_tables
from .media import READERS, UNREADABLE
from .source import Source, unique_id, unreadable_run
from .tables import STEPS, seconds_of

_OWN_CONFIG = {"_Username": "user", "_Group": "group", "_Created": "created"}
# W&B's name for each of Trackio's types.
_TYPES = {
    "trackio.image": "image-file",
    "trackio.audio": "audio-file",
    "trackio.video": "video-file",
    "trackio.histogram": "histogram",
}
_TEXTS = {"trackio.markdown"}


def _databases(place: str) -> list[Path]:
    path = Path(place).absolute()
    paths = [path] if path.is_file() else sorted(path.glob("*.db"))
    return [one for one in paths if one.suffix == ".db"]


def _claims(place: str) -> bool:
    return any(has_tables(path, "metrics", "configs") for path in _databases(place))


def _runs(place: str, _: Mapping[str, str]) -> list[SourceRun]:
    found = []
    for database in _databases(place):
        if damage := damage_of(database):
            found.append(unreadable_run(database, damage))
        if not has_tables(database, "metrics", "configs"):
            continue
        folder, project = database.parent, database.stem
        with _storage(folder) as storage:
            for record in storage.get_run_records(project):
                name, run_id = str(record["name"]), record["id"]
                config = dict(storage.get_run_config(project, name, run_id=run_id) or {})
                reader = _Reader(folder, project, name, run_id)
                identity = f"trackio {project} {run_id or name}"
                made = SourceRun(
                    str(run_id or unique_id(name, identity)),
                    name,
                    identity,
                    reader.stamp,
                    reader.read,
                    created_at=seconds_of(record.get("created_at")) or database.stat().st_mtime,
                    environment={"project": project}
                    | {own: config[key] for key, own in _OWN_CONFIG.items() if config.get(key)},
                    hyperparameters={key: value for key, value in config.items() if key not in _OWN_CONFIG},
                )
                found.append(made)
    return found


@contextlib.contextmanager
def _storage(folder: Path) -> Iterator[Any]:
    """Yields Trackio's storage for a folder, which Trackio itself takes from the environment."""
    storage: Any = importlib.import_module("trackio.sqlite_storage")
    before = storage.TRACKIO_DIR
    storage.TRACKIO_DIR = folder
    try:
        yield storage.SQLiteStorage
    finally:
        storage.TRACKIO_DIR = before


@attrs.frozen
class _Reader:
    """Reads one run.

    Attributes:
        folder: Trackio's folder.
        project: the project of the run.
        name: the name of the run.
        run_id: the id of the run; None in an old database without ids.
    """

    folder: Path
    project: str
    name: str
    run_id: str | None

    def _stored(self) -> list[Any]:
        """Returns rows, rows of system metrics, alerts and configuration."""
        with _storage(self.folder) as storage:
            readers = (storage.get_logs, storage.get_system_logs, storage.get_alerts, storage.get_run_config)
            return [read(self.project, self.name, run_id=self.run_id) for read in readers]

    def stamp(self) -> str:
        """Returns a text that changes with anything that Trackio stores for the run."""
        return short_hash(repr(self._stored()), 16)

    def read(self, run: SourceRun) -> Iterator[Record]:
        """Yields rows and media, ordered by time."""
        logs, system, alerts, _ = self._stored()
        if alerts:
            run.left_out["alerts"] += len(alerts)
        by_time = [(seconds_of(log.pop("timestamp", None)) or 0.0, 1, log) for log in logs]
        by_time += [(seconds_of(log.pop("timestamp", None)) or 0.0, 0, log) for log in system]
        # Trackio counts rows that were logged without a step. They may hold the trainer's step as a metric.
        is_counted = [log.get("step") for log in logs] == list(range(len(logs)))
        axis = next((name for name in STEPS if is_counted and any(name in log for log in logs)), "step")
        step = 0
        for time, is_log, values in sorted(by_time, key=lambda one: one[:2]):
            if is_log:
                own_step = values.pop("step", step)
                found = own_step if axis == "step" else values.pop(axis, step)
                step = int(found if float(found).is_integer() else own_step)
                yield from self._items(run, "", values, step, time)
            else:
                yield from self._items(run, "system/", values, step, time)

    def _items(
        self, run: SourceRun, prefix: str, values: Mapping[str, Any], step: int, time: float
    ) -> Iterator[Record]:
        numbers: dict[str, float] = {}
        for key, value in values.items():
            name = prefix + key
            number = metric_of(value)
            if number is not None:
                numbers[name] = number
            elif isinstance(value, str):
                yield Logged(TEXT, name, step, time, {"text": value})
            elif isinstance(value, dict) and "_type" in value:
                yield from self._medium(run, name, value, step, time)
            elif isinstance(value, dict):
                yield from self._items(run, f"{name}/", value, step, time)
            elif value is not None:
                run.left_out["lists"] += 1
        yield Values(numbers, step, time)

    def _medium(
        self, run: SourceRun, name: str, fields: dict[str, Any], step: int, time: float
    ) -> Iterator[Record]:
        what = str(fields["_type"])
        try:
            if what in _TYPES:
                kind, read = READERS[_TYPES[what]]
                arguments = read(self._path, {**fields, "path": fields.get("file_path")})
                yield Logged(kind, name, step, time, arguments)
            elif what in _TEXTS:
                yield Logged(TEXT, name, step, time, {"text": str(fields["_value"])})
            elif what == "trackio.table":
                yield Logged(TABLE, name, step, time, _table(fields["_value"]))
            elif "file_path" in fields:
                yield Logged.file(str(fields["file_path"]), self._path(fields["file_path"]), time)
            else:
                run.left_out[what] += 1
        except UNREADABLE:
            run.lost[f"unreadable {what}"] += 1

    def _path(self, relative: Any) -> Path:
        return file_inside(self.folder, f"media/{relative}")


def _table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return {"columns": columns, "rows": [[row.get(key) for key in columns] for row in rows]}


TRACKIO = Source(
    "trackio",
    "Trackio's folder, or the .db of a project in it",
    _claims,
    _runs,
    "trackio",
)
