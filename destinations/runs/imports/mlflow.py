"""Imports MLflow runs with MLflow's own client, from a database, a folder of files, or a server."""

import contextlib
import json
import os
import re
import sqlite3
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlparse

from destinations.kinds.images import IMAGE, open_image
from destinations.kinds.texts import TEXT
from destinations.runs.move.stream import Logged, Record, SourceRun, Values
from destinations.trackers.names import short_hash

from .databases import damage_of, has_tables
from .source import Source, SourceError, UnreadableError, unreadable_run

_SCHEMES = re.compile(r"(sqlite|postgresql|mysql|mssql|https?|file|databricks)(\+\w+)?:")
_READ_ONLY = "sqlite+pysqlite:///file:"
_RUN_ID = re.compile("[0-9a-f]{32}")
_DATABASE, _FILES = "mlflow.db", "mlruns"
_STATUSES = {"FINISHED": "completed", "FAILED": "failed", "KILLED": "interrupted"}
# The files that `log_image` writes, each beside a smaller copy.
_IMAGE = re.compile(r"images/(?P<key>.+)[+%]step[+%](?P<step>\d+)[+%]timestamp[+%](?P<ms>\d+)[+%][\w-]+\.png")
_COPY = re.compile(r"images/.+[+%]compressed\.webp")
_OWN_FOLDER, _NOTE = "mlflow.", "mlflow.note.content"
# Written by our `MLflow`: texts, nested hyperparameters, names that MLflow rejects, and tags.
_TEXT = re.compile(r"texts/(?P<key>.+)/(?P<step>\d+)_(?P<ms>\d+)_\d+\.txt")
_HPARAMS, _NAME, _TAG, _EXCEPTION = "hparams.yaml", "metric_name.", "tag.", "exception"
_LINKS, _OUTSIDE = "links", "artifact folders outside MLflow"
_OURS = (_NAME, "changed_param.", "training_destinations.", _EXCEPTION)


def _uri_of(place: str) -> str:
    """Returns the tracking URI of a place; "" if MLflow has nothing there."""
    if _SCHEMES.match(place):
        return place
    path = Path(place).absolute()
    if path.is_dir() and (path / _DATABASE).is_file():
        path /= _DATABASE
    elif path.is_dir() and (path / _FILES).is_dir():
        path /= _FILES
    if path.is_file() and path.suffix in {".db", ".sqlite", ".sqlite3"}:
        # Opened read-only. Quoted twice, for SQLAlchemy and for SQLite. With a driver in the URI, MLflow
        # creates no folder called "file:" in the working directory.
        is_ours = has_tables(path, "experiments", "runs")
        return f"{_READ_ONLY}{quote(quote(str(path)))}?mode=ro&uri=true" if is_ours else ""
    is_store = path.is_dir() and any("experiment_id" in _start_of(one) for one in path.glob("*/meta.yaml"))
    return path.as_uri() if is_store else ""


def _start_of(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(10_000)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Allows MLflow to read folders of files, and hides its warnings and progress bars."""
    before = dict(os.environ)
    os.environ |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ |= before


def _runs(place: str, _: Mapping[str, str]) -> list[SourceRun]:
    """Returns the runs of all experiments, without deleted ones."""
    uri = _uri_of(place)
    if not uri:
        raise SourceError(f"{place!r} is not a database, folder or server of MLflow.")
    with _quiet():
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        try:
            client = MlflowClient(tracking_uri=uri)
            found = list(_found_in(client, Path(unquote(urlparse(uri).path))))
        except (MlflowException, sqlite3.Error) as error:
            raise UnreadableError(f"MLflow cannot read {place!r}: {error}") from error
    database = Path(place) / _DATABASE if Path(place).is_dir() else Path(place)
    if uri.startswith(_READ_ONLY) and (damage := damage_of(database)):
        found.append(unreadable_run(database, damage))
    return found


def _found_in(client: Any, folder: Path) -> Iterator[SourceRun]:
    """Yields the runs. Reads a folder run by run, so that a damaged run does not hide the others."""
    names: dict[str, str] = {}
    if not client.tracking_uri.startswith("file:"):
        for experiment in _pages(lambda token: client.search_experiments(page_token=token)):
            ids = [experiment.experiment_id]
            for run in _pages(lambda token, ids=ids: client.search_runs(ids, page_token=token)):
                yield _run_of(client, experiment.name, run)
        return
    for path in sorted(path for path in folder.glob("[!.]*/*") if _RUN_ID.fullmatch(path.name)):
        try:
            run = client.get_run(path.name)
            of = run.info.experiment_id
            names[of] = names.get(of) or client.get_experiment(of).name
        except Exception as error:  # noqa: BLE001  # MLflow's readers of YAML and metrics raise many types
            yield unreadable_run(path, f"MLflow cannot read it: {error}")
            continue
        if run.info.lifecycle_stage == "active":
            yield _run_of(client, names[of], run)


def _pages(search: Any) -> Iterator[Any]:
    token = None
    while True:
        page = search(token)
        yield from page
        token = page.token
        if not token:
            return


def _run_of(client: Any, experiment: str, run: Any) -> SourceRun:
    from destinations.trackers.mlflow import entity_key

    info, tags = run.info, run.data.tags
    own = {
        name.removeprefix(_OWN_FOLDER): text for name, text in tags.items() if name.startswith(_OWN_FOLDER)
    }
    about = (info.run_name, info.status, info.end_time, sorted(tags.items()), sorted(run.data.params.items()))

    def stamp() -> str:
        # The run object of MLflow has only the last value of each metric, and no artifacts.
        return short_hash(repr((about, _points_of(client, run), list(_files_of(client, run, "")))), 16)

    return SourceRun(
        info.run_id,
        info.run_name or info.run_id,
        f"mlflow {info.run_id}",
        stamp,
        lambda found: _read(client, run, found),
        created_at=(info.start_time or 0) / 1000,
        ended_at=info.end_time / 1000 if info.end_time else None,
        status=_STATUSES.get(info.status, ""),
        exception=tags.get(_EXCEPTION, ""),
        tags=tuple(
            text if name == entity_key(f"{_TAG}{text}") else f"{name}:{text}"
            for name, text in tags.items()
            if not name.startswith((_OWN_FOLDER, *_OURS))
        ),
        notes=tags.get(_NOTE, ""),
        hyperparameters={name: _typed(text) for name, text in run.data.params.items()},
        environment={"experiment": experiment, **own},
    )


def _typed(text: str) -> Any:
    """Returns a parameter, which MLflow stores as text, as the number or bool that it was."""
    if text in {"True", "False"}:
        return text == "True"
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float) else text


def _points_of(client: Any, run: Any) -> list[tuple[int, int, str, float]]:
    """Returns the values of all metrics by time, so that values that were logged together are one row."""
    with _quiet():
        return sorted(
            (point.timestamp, point.step, point.key, point.value)
            for name in run.data.metrics
            for point in client.get_metric_history(run.info.run_id, name)
        )


def _read(client: Any, run: Any, found: SourceRun) -> Iterator[Record]:
    for time, step, name, value in _points_of(client, run):
        yield Values({run.data.tags.get(f"{_NAME}{name}", name): float(value)}, step, time / 1000)
    with tempfile.TemporaryDirectory() as folder:
        for name, kind, _ in _files_of(client, run, ""):
            if kind != "file":
                (found.left_out if kind in {_LINKS, _OUTSIDE} else found.lost)[kind] += 1
                continue
            if _COPY.fullmatch(name):
                continue
            try:
                with _quiet():
                    path = Path(client.download_artifacts(run.info.run_id, name, folder))
                yield from _read_file(path, name, found)
            except Exception:  # noqa: BLE001  # the packages of stores raise many types
                found.lost["artifacts that cannot be read"] += 1


def _read_file(path: Path, name: str, found: SourceRun) -> list[Record]:
    record = _IMAGE.fullmatch(name) or _TEXT.fullmatch(name)
    if record is None:
        return [] if name == _HPARAMS and _read_hparams(path, found) else [Logged.file(name, path)]
    key, step, time = record["key"], int(record["step"]), int(record["ms"]) / 1000
    if record.re is _TEXT:
        return [Logged(TEXT, key, step, time, {"text": path.read_bytes().decode("utf-8", "replace")})]
    with open_image(path) as pixels:
        # Loaded now, because the file is deleted before the record is written.
        pixels.load()
        return [Logged(IMAGE, re.sub("[#~]", "/", key), step, time, {"images": [pixels]})]


def _read_hparams(path: Path, found: SourceRun) -> bool:
    """Reads nested hyperparameters, if they have the same names as MLflow's text parameters."""
    from destinations.run_directory.documents import flat_hyperparameters, read_hparams

    try:
        hparams = read_hparams(path)
        is_same = found.hyperparameters.keys() == flat_hyperparameters(hparams).keys()
    except (OSError, ValueError, RecursionError):
        return False
    if is_same:
        found.hyperparameters = dict(hparams)
    return is_same


def _files_of(client: Any, run: Any, folder: str) -> Iterator[tuple[str, str, Any]]:
    """Yields the name of each artifact, a description, and a value that changes when it is written to."""
    local = Path(unquote(urlparse(run.info.artifact_uri).path))
    own = (run.info.run_id, "artifacts")
    if local.is_dir() and (local.parts[-2:] != own or local.is_symlink() or local.parent.is_symlink()):
        # An untrusted run may name any folder of this machine. MLflow's own folders are named like this.
        yield folder, _OUTSIDE, None
        return
    try:
        with _quiet():
            entries = client.list_artifacts(run.info.run_id, folder)
    except Exception:  # noqa: BLE001  # the packages of stores raise many types
        yield folder, "folders of artifacts that are missing", None
        return
    for entry in entries:
        # MLflow would follow a link out of the folder.
        if (local / entry.path).is_symlink():
            yield entry.path, _LINKS, None
        elif entry.is_dir:
            yield from _files_of(client, run, entry.path)
        else:
            path = local / entry.path
            yield entry.path, "file", (entry.file_size, path.stat().st_mtime_ns if path.is_file() else 0)


MLFLOW = Source(
    "mlflow",
    "MLflow's database or folder mlruns, a folder with either, or a tracking URI",
    lambda place: bool(_uri_of(place)),
    _runs,
    "mlflow",
)
