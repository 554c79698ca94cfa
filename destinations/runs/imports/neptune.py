"""Imports the output of Neptune's exporter: Parquet with a row for each value, and downloaded files.

https://github.com/neptune-ai/neptune-exporter
"""

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from destinations.kinds.histograms import HISTOGRAM
from destinations.kinds.images import IMAGE
from destinations.kinds.line import path_inside
from destinations.kinds.texts import TEXT
from destinations.runs.move.stream import Logged, Record, SourceRun, Values

from .source import Source, UnreadableError, unreadable_run
from .tables import parquet_batches, seconds_of, stamp_of

_PART = re.compile(r"(?P<run>.+)_part_(?P<number>\d+)\.parquet")
_DATA, _FILES = "data", "files"
_COLUMNS = {"project_id", "run_id", "attribute_path", "attribute_type", "step", "timestamp"}
_SINGLE = {"float", "int", "string", "bool", "datetime", "string_set"}
_WHOLE = {"file", "artifact", "file_set"}
_OWN = "sys/"
_IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"}


def _parts_of(place: str) -> dict[tuple[Path, str], list[Path]]:
    """Returns the parts of each run, in order."""
    path = Path(place).absolute()
    found: dict[tuple[Path, str], list[tuple[int, Path]]] = {}
    for part in path.rglob("*_part_*.parquet") if path.is_dir() else ():
        if match := _PART.fullmatch(part.name):
            found.setdefault((part.parent, match["run"]), []).append((int(match["number"]), part))
    return {key: [part for _, part in sorted(parts)] for key, parts in sorted(found.items())}


def _runs(place: str, _: Mapping[str, str]) -> list[SourceRun]:
    found = []
    for (folder, name), parts in _parts_of(place).items():
        damaged: Counter[str] = Counter()
        first = next(_rows_of(parts, damaged), None)
        if first is None:
            found += [unreadable_run(parts[0], "its parts are damaged.")] if damaged else []
            continue
        run_id, project = str(first["run_id"]), str(first["project_id"])
        # By default, the exporter writes both folders side by side.
        files = folder.parent.with_name(_FILES) if folder.parent.name == _DATA else folder.parent / _FILES
        read = functools.partial(_read, parts, files / folder.name)
        facts = functools.partial(_read_facts, parts)
        identity = f"neptune {project} {run_id} {name}"
        environment = {"project": project}
        stamp = stamp_of(*parts)
        with contextlib.suppress(ValueError):
            # Rows name files in a folder that is named after the id of their run.
            stamp = stamp_of(*parts, _inside(files / folder.name, run_id))
        made = SourceRun(run_id, run_id, identity, stamp, read, facts=facts, environment=environment)
        # Part numbers begin at 0.
        if missing := int(parts[-1].stem.rpartition("_")[2]) + 1 - len(parts):
            made.lost["missing parts"] += missing
        found.append(made)
    return found


def _inside(files: Path, relative: str) -> Path:
    """Returns a path in a project's folder of files. Neither that folder nor its parent may be a link."""
    top = files.parent.parent
    return path_inside(top, f"{files.relative_to(top)}/{relative}")


def _rows_of(parts: list[Path], lost: Counter[str]) -> Iterator[dict[str, Any]]:
    for part in parts:
        try:
            for batch in parquet_batches(part, _COLUMNS):
                yield from batch.to_pylist()
        except UnreadableError:
            lost["damaged parts"] += 1


def _read_facts(parts: list[Path], run: SourceRun) -> None:
    """Reads the values without steps: Neptune's facts about the run, and hyperparameters."""
    own: dict[str, Any] = {}
    for row in _rows_of(parts, Counter()):
        kind, name = row["attribute_type"], row["attribute_path"]
        if kind not in _SINGLE:
            continue
        value = row[f"{kind}_value"]
        if name.startswith(_OWN):
            own[name.removeprefix(_OWN)] = value
        elif value is not None:
            run.hyperparameters[name.replace("/", ".")] = value
    run.created_at = seconds_of(own.pop("creation_time", None)) or parts[0].stat().st_mtime
    run.name = own.get("name") or own.get("custom_run_id") or run.name
    run.tags = (*(own.pop("tags", None) or ()), *(own.pop("group_tags", None) or ()))
    run.notes = own.pop("description", None) or ""
    if own.get("failed"):
        run.status = "failed"
    elif str(own.get("state", "")).lower() in {"inactive", "idle"}:
        run.status = "completed"
    run.environment |= {name: str(value) for name, value in own.items() if value is not None}


def _read(parts: list[Path], files: Path, run: SourceRun) -> Iterator[Record]:
    points: list[tuple[float, int, str, float]] = []
    for row in _rows_of(parts, run.lost):
        kind, name, time = row["attribute_type"], row["attribute_path"], seconds_of(row["timestamp"])
        step = int(row["step"] or 0)
        if row["step"] is not None and row["step"] != step:
            run.left_out["fractions of steps"] += 1
        if kind == "float_series":
            if row["float_value"] is not None:
                points.append((time or run.created_at, step, name, row["float_value"]))
        elif kind == "string_series":
            yield Logged(TEXT, name, step, time, {"text": row["string_value"] or ""})
        elif kind == "histogram_series":
            yield from _histogram(run, row, step, time)
        elif kind in _WHOLE | {"file_series"}:
            is_one = kind in _WHOLE
            yield from _files(run, files, row, name if is_one else f"{name}/step_{step}", step, time)
        elif kind not in _SINGLE:
            run.left_out[str(kind)] += 1
    # By time, so that values that were logged together are one row.
    for time, step, name, value in sorted(points, key=lambda point: point[:2]):
        yield Values({name: value}, step, time)


def _histogram(run: SourceRun, row: dict[str, Any], step: int, time: float | None) -> Iterator[Record]:
    from events import BinnedValues

    try:
        values = BinnedValues(row["histogram_value"]["values"], row["histogram_value"]["edges"])
    except (ValueError, TypeError):
        run.lost["unreadable histograms"] += 1
        return
    yield Logged(HISTOGRAM, row["attribute_path"], step, time, {"values": values})


def _files(
    run: SourceRun, files: Path, row: dict[str, Any], name: str, step: int, time: float | None
) -> Iterator[Record]:
    try:
        path = _inside(files, (row["file_value"] or {}).get("path") or "")
    except ValueError:
        run.left_out["paths out of the folder"] += 1
        return
    if path.is_symlink() or not path.exists() or path == files:
        run.lost["files that are missing"] += 1
    elif path.is_dir():
        for one in sorted(path.rglob("*")):
            if one.is_file() and not one.is_symlink():
                yield Logged.file(f"{name}/{one.relative_to(path).as_posix()}", one, time)
    elif row["attribute_type"] == "file_series" and path.suffix.lower() in _IMAGES:
        yield Logged(IMAGE, row["attribute_path"], step, time, {"images": [path]})
    else:
        has_suffix = name.lower().endswith(path.suffix.lower())
        yield Logged.file(name if has_suffix else f"{name}{path.suffix}", path, time)


NEPTUNE = Source(
    "neptune",
    "the folder that Neptune's exporter wrote, with data and files in it",
    lambda place: bool(_parts_of(place)),
    _runs,
)
