"""Imports Comet's offline experiments: archives with one message a line and the files that they name."""

import contextlib
import functools
import json
import shutil
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import PIL.Image

from destinations.kinds.images import IMAGE
from destinations.kinds.line import number_of, whole_of
from destinations.kinds.texts import TEXT
from destinations.runs.move.stream import Logged, Record, SourceRun, Values

from .media import UNREADABLE
from .source import Source, unreadable_run
from .tables import stamp_of

_ABOUT, _MESSAGES = "experiment.json", "messages.json"
_OWN_METRICS = {"process duration"}
_OWN_OTHERS = {"offline_experiment", "hasNestedParams"}


def _archives(place: str) -> list[Path]:
    path = Path(place).absolute()
    return [one for one in ([path] if path.is_file() else sorted(path.glob("*.zip"))) if one.suffix == ".zip"]


def _about(path: Path) -> dict[str, Any] | None:
    """Returns the description of the experiment in an archive; None if there is none.

    Raises:
        BadZipFile: the archive is damaged; or another error of `UNREADABLE`.
    """
    with zipfile.ZipFile(path) as archive:
        if not {_ABOUT, _MESSAGES} <= set(archive.namelist()):
            return None
        about: dict[str, Any] = json.loads(archive.read(_ABOUT))
        return {**about, "offline_id": str(about["offline_id"])}


def _claims(place: str) -> bool:
    for path in _archives(place):
        with contextlib.suppress(*UNREADABLE):
            if _about(path) is not None:
                return True
    return False


def _runs(place: str, _: Mapping[str, str]) -> list[SourceRun]:
    """Returns a run for each experiment. A continued experiment has several archives."""
    experiments: dict[str, list[tuple[dict[str, Any], Path]]] = {}
    damaged = []
    for path in _archives(place):
        try:
            about = _about(path)
        except UNREADABLE as error:
            damaged.append(unreadable_run(path, f"the archive is damaged: {error}"))
            continue
        if about is not None:
            experiments.setdefault(about["offline_id"], []).append((about, path))
    return [*(_run_of(key, sorted(parts, key=_began)) for key, parts in experiments.items()), *damaged]


def _began(part: tuple[dict[str, Any], Path]) -> float:
    return number_of(part[0].get("start_time")) or 0.0


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


def _messages(path: Path, lost: Counter[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(_MESSAGES) as lines:
            count = 0
            for count, line in enumerate(lines, 1):  # noqa: B007  # used below
                try:
                    message = json.loads(line)
                    yield str(message["type"]), {**message["payload"]}
                except UNREADABLE:
                    lost["unreadable messages"] += 1
            if not count:
                lost["archives without messages"] += 1
    except UNREADABLE:
        # The checksum of the messages is only checked after the last one.
        lost["archives with damaged messages"] += 1


def _read_facts(paths: list[Path], run: SourceRun) -> None:
    """Reads the name, the parameters, and how the run ended."""
    for kind, payload in (message for path in paths for message in _messages(path, Counter())):
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


def _read(path: Path, run: SourceRun) -> Iterator[Record]:
    step = 0
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        for kind, payload in _messages(path, run.lost):
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
                if value is None:
                    run.lost["unreadable values"] += 1
                else:
                    yield Values({metric["metricName"]: value}, step, time)
            elif kind not in {"metric_msg", "parameter_msg", "log_other"}:
                run.left_out[kind.removesuffix("_msg").replace("_", " ")] += 1


def _file(
    archive: zipfile.ZipFile, payload: dict[str, Any], step: int, time: float | None, folder: Path
) -> Iterator[Record]:
    """Yields an image, a text, or any other file."""
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
            # The name of the copy must not depend on the name in the archive.
            copy = folder / str(payload["message_id"])
            with copy.open("wb") as file:
                shutil.copyfileobj(data, file)
            yield Logged.file(str(about.get("fileName") or copy.name), copy, time)


COMET = Source(
    "comet",
    "the folder of Comet's offline experiments, or the archive of one",
    _claims,
    _runs,
)
