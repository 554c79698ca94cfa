"""Comet's offline experiments: archives of messages, a line each, with the files that they name."""

import functools
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import PIL.Image

from destinations.kinds.images import IMAGE
from destinations.kinds.line import number_of, whole_of
from destinations.kinds.texts import TEXT

from .media import UNREADABLE
from .source import File, Item, Logged, Source, SourceRun, Values
from .tables import stamp_of

__all__ = ["COMET"]

_ABOUT, _MESSAGES = "experiment.json", "messages.json"
_OWN_METRICS = {"process duration"}
_OWN_OTHERS = {"offline_experiment", "hasNestedParams"}


def _archives(place: str) -> list[Path]:
    path = Path(place).absolute()
    paths = [path] if path.is_file() else sorted(path.glob("*.zip"))
    return [one for one in paths if one.suffix == ".zip" and _has_experiment(one)]


def _has_experiment(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return {_ABOUT, _MESSAGES} <= set(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _runs(place: str, _: Mapping[str, str]) -> list[SourceRun]:
    """Returns a run for each experiment; one that was continued has several archives."""
    found: dict[str, list[tuple[dict[str, Any], Path]]] = {}
    for path in _archives(place):
        with zipfile.ZipFile(path) as archive:
            about = json.loads(archive.read(_ABOUT))
        found.setdefault(str(about["offline_id"]), []).append((about, path))
    return [_run_of(key, sorted(parts, key=_began)) for key, parts in found.items()]


def _began(part: tuple[dict[str, Any], Path]) -> float:
    return float(part[0].get("start_time") or 0)


def _run_of(key: str, parts: list[tuple[dict[str, Any], Path]]) -> SourceRun:
    paths = [path for _, path in parts]
    return SourceRun(
        key,
        key,
        f"comet {key}",
        stamp_of(*paths),
        lambda run: (item for path in paths for item in _read(path, run)),
        created_at=_began(parts[0]) / 1000,
        ended_at=(whole_of(parts[-1][0].get("stop_time")) or 0) / 1000 or None,
        tags=tuple(dict.fromkeys(tag for about, _ in parts for tag in about.get("tags") or ())),
        environment={"project": parts[0][0].get("project_name")},
        facts=functools.partial(_read_facts, paths),
    )


def _messages(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with zipfile.ZipFile(path) as archive, archive.open(_MESSAGES) as lines:
        for line in lines:
            message = json.loads(line)
            yield message["type"], message["payload"]


def _read_facts(paths: list[Path], run: SourceRun) -> None:
    """Takes the name, the parameters, and how the run ended."""
    for kind, payload in (message for path in paths for message in _messages(path)):
        param = payload.get("param") or payload.get("params") or {}
        if param.get("source") == "manual":
            # Names of nested ones are joined with "|".
            *outer, name = param["paramName"].split("|")
            inner = run.hyperparameters
            for part in outer:
                inner = inner.setdefault(part, {})
            inner[name] = param["paramValue"]
        elif kind == "log_other" and payload["key"] not in _OWN_OTHERS:
            run.environment[payload["key"]] = payload["value"]
    run.name = str(run.environment.pop("Name", run.name))
    run.status = str(run.environment.pop("status", ""))
    run.exception = str(run.environment.pop("exception", ""))


def _read(path: Path, run: SourceRun) -> Iterator[Item]:
    step = 0
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        for kind, payload in _messages(path):
            time = (number_of(payload.get("local_timestamp")) or 0) / 1000 or None
            metric = payload.get("metric") or {}
            if kind == "file_upload":
                try:
                    yield from _file(archive, payload, step, time, Path(folder))
                except UNREADABLE:
                    run.lost["unreadable files"] += 1
            elif metric and metric["metricName"] not in _OWN_METRICS:
                given = whole_of(metric.get("step"))
                step = step if given is None else given
                value = number_of(metric["metricValue"])
                yield Values({} if value is None else {metric["metricName"]: float(value)}, step, time)
            elif kind not in {"metric_msg", "parameter_msg", "log_other"}:
                run.left_out[kind.removesuffix("_msg").replace("_", " ")] += 1


def _file(
    archive: zipfile.ZipFile, payload: dict[str, Any], step: int, time: float | None, folder: Path
) -> Iterator[Item]:
    """Yields an image, a text, or a file that is neither."""
    about, what = payload["additional_params"], payload["upload_type"]
    given = whole_of(about.get("step"))
    step = step if given is None else given
    with archive.open(payload["file_path"]) as data:
        if what == "visualization":
            with PIL.Image.open(data) as pixels:
                pixels.load()
                yield Logged(IMAGE, str(about["figName"]), step, time, {"images": [pixels]})
        elif what == "text-sample":
            name = str((payload.get("metadata") or {}).get("name") or "text")
            yield Logged(TEXT, name, step, time, {"text": data.read().decode("utf-8", "replace")})
        else:
            # The name in the archive says nothing of where the copy is.
            copy = folder / str(payload["message_id"])
            with copy.open("wb") as file:
                shutil.copyfileobj(data, file)
            yield File(str(about.get("fileName") or copy.name), copy, time)


COMET = Source(
    "comet",
    "the folder of Comet's offline experiments, or the archive of one",
    lambda place: bool(_archives(place)),
    _runs,
)
