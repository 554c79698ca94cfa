"""The exported site: the page of some runs as static files, which open from a folder or any web server.

Browsers refuse module files and `fetch` for files. So one classic script has the modules of the page, and
each answer of the API is a script of its own. The page "The viewer's API" lists the keys.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from destinations.kinds import kind_of
from destinations.kinds.media import MEDIA_INDEX
from destinations.runs import RecordedRun, RunRecord, RunsError
from destinations.runs.commands.fields import OWN_FIELDS
from destinations.runs.files import read_object_file
from destinations.runs.views import RunView
from uploads.disk import IRREGULAR, open_regular, remove_if

from . import details
from .answers import encode
from .catalog import Catalog
from .charts import AXES, Axis, Rows, rows_of_writers, series_answer
from .columns import ColumnCache
from .downsampling import downsample
from .files import STATIC, TYPES

__all__ = ["Site", "SiteReport", "export_site"]

_MANIFEST = "data/manifest.js"
# Size and SHA-256 of every other file of the site, by path.
_FILES = "data/files.json"
_MODULE_TAG = '<script type="module" src="static/app.js"></script>'
_SITE_TAGS = f'<script src="{_MANIFEST}"></script>\n  <script src="static/app.js" defer></script>'
_COPIED = {*TYPES, ".ply"}
_MAX_METRICS = 1000
_ORDERS_TOGETHER = 100
# Points of a curve.
_POINTS = 1000
# Records of a name, evenly chosen.
_MEDIA_PER_NAME = 50
_MAX_COMPARED = 20
# Holds the rows of all compared runs, if they fit.
_CACHE_BYTES = 1 << 30
_COPY_BYTES = 1 << 20
# Answers with logged content, which stays unchanged.
_LOGGED = ("series/", "media/", "table/", "points/")
# Fields of environments and sessions that tell the origin.
_ORIGIN = {"host", "pid", "user", "argv", "executable", "working_directory", "slurm", "imported"}
# A name in a path, which may have single spaces.
_NAME = r"""[^\s/\\'"<>|:;,]+(?: [^\s/\\'"<>|:;,]+)*"""
# The folders of a path: POSIX, with or without a scheme; Windows, with a drive or a server, also escaped.
_FOLDERS = re.compile(
    rf"""(?<![\w.:/])(?:(?!https?:)[a-z][a-z0-9+]+:/)?(?:/{_NAME})+(?=/{_NAME})"""
    rf"""|(?<!\w)(?:[A-Za-z]:|\\(?=\\))(?:[\\/]+{_NAME})+(?=[\\/]+{_NAME})"""
)
# An import map resolves the names of modules to `data:` URLs, which browsers import for a file too.
_LOADER = """\
const sources = JSON.parse({sources});
const imports = {{}};
for (const [name, source] of Object.entries(sources)) {{
  imports[name] = `data:text/javascript,${{encodeURIComponent(source)}}`;
}}
const map = Object.assign(document.createElement("script"), {{ type: "importmap" }});
map.textContent = JSON.stringify({{ imports }});
document.head.append(map);
import("page/app.js");
"""


@attrs.define
class SiteReport:
    """The result of an export.

    Attributes:
        runs: the number of runs.
        media_files: the number of media files.
        media_bytes: their total size.
        left_out: a message for each omission.
    """

    runs: int = 0
    media_files: int = 0
    media_bytes: int = 0
    left_out: list[str] = attrs.field(factory=list)


def export_site(
    catalog: Catalog,
    target: Path,
    *,
    where: str = "",
    view: str = "",
    limit: int = 100,
    media_bytes: int = 200 << 20,
    overwrite: bool = False,
    with_origin: bool = False,
) -> SiteReport:
    """Writes a site, which appears when it is complete.

    An old site is removed just before; a kill in between leaves no site.

    Args:
        catalog: the runs.
        target: the folder of the site, which must be missing or empty.
        where: a filter.
        view: the view that the site opens with, as in the page's address.
        limit: the maximum number of runs; the newest come first.
        media_bytes: the maximum size of all media together.
        overwrite: replaces an old site, provided that nothing in it was added or changed.
        with_origin: includes hosts, users, command lines, and the folders of paths.

    Raises:
        FileExistsError: the folder has other files, or a site and `overwrite` is false.
        FilterError: the filter doesn't parse.
        OSError: a file can't be written.
    """
    target = Path(os.path.realpath(target))
    _check_target(target, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        folder.chmod(0o755)
        report = Site(catalog, folder, media_bytes, with_origin=with_origin).write(where, limit, view)
        if not remove_if(target, lambda path: overwrite and _foreign_in(Path(path)) is None):
            _check_target(target, overwrite=overwrite)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    # Fails if there is anything but an empty folder by now; the new site then stays in its temporary folder.
    folder.rename(target)
    return report


def _check_target(target: Path, *, overwrite: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if (foreign := _foreign_in(target)) is not None:
        raise FileExistsError(
            f"{target} has other files in it than a site: {foreign}. Give a new folder, or empty it."
        )
    if not overwrite:
        raise FileExistsError(f"{target} has a site in it. Give --overwrite to replace it.")


def _foreign_in(folder: Path) -> str | None:
    """Returns a file that `export_site` didn't write, or why a folder is no site; None if it is one."""
    if not folder.is_dir() or folder.is_symlink():
        return "it is no folder"
    if not (listed := read_object_file(folder / _FILES)):
        return f"there is no {_FILES}"
    folders = {str(parent) for name in (*listed, _FILES) for parent in Path(name).parents}

    def refuse(error: OSError) -> None:
        raise error

    for parent, names, files in os.walk(folder, onerror=refuse):
        base = Path(parent).relative_to(folder)
        for name in names:
            if str(base / name) not in folders or Path(parent, name).is_symlink():
                return f"{base / name}/"
        for name in files:
            path = str(base / name)
            if path != _FILES and (path not in listed or listed[path] != _size_and_digest(folder / path)):
                return path
    return None


def _size_and_digest(path: Path) -> list[Any]:
    """Returns size and SHA-256 of a regular file; for any other, the error, which equals no listed value."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()]
    except IRREGULAR as error:
        return [error]


def without_origin(answer: Any) -> Any:
    """Returns an answer without hosts, users and command lines; paths keep only their last name."""
    if isinstance(answer, str):
        return _FOLDERS.sub("…", answer)
    if isinstance(answer, list | tuple):
        return [without_origin(one) for one in answer]
    if not isinstance(answer, dict):
        return answer
    found = {name: without_origin(value) for name, value in answer.items()}
    if isinstance(environment := found.get("environment"), dict):
        found["environment"] = {name: one for name, one in environment.items() if name not in _ORIGIN}
    if isinstance(sessions := found.get("sessions"), list):
        found["sessions"] = [
            {name: value for name, value in one.items() if name not in _ORIGIN} for one in sessions
        ]
    if isinstance(fields := found.get("fields"), list):
        hidden = tuple(f"environment.{name}." for name in _ORIGIN)
        found["fields"] = [one for one in fields if not f"{one['name']}.".startswith(hidden)]
    return found


@attrs.define(eq=False, repr=False)
class Site:
    """A site in the making.

    Args:
        catalog: the runs.
        folder: an empty folder.
        media_bytes: the maximum size of all media together.
        with_origin: see `export_site`.
    """

    _catalog: Catalog
    _folder: Path
    _media_bytes: int
    _with_origin: bool = attrs.field(default=False, kw_only=True)
    _keys: dict[str, str] = attrs.field(factory=dict, init=False)
    _report: SiteReport = attrs.field(factory=SiteReport, init=False)
    _skipped_bytes: int = attrs.field(default=0, init=False)

    def write(self, where: str, limit: int, view: str = "") -> SiteReport:
        """Writes everything; see `export_site`."""
        catalog, report = self._catalog, self._report
        (self._folder / "data").mkdir()
        selected = RunView(where=where)
        first = catalog.page(selected, limit=limit)
        columns = dict.fromkeys(
            name
            for run in (catalog.run(row["id"]) for row in first["rows"])
            for name in (
                *(f"hparams.{name}" for name in run.hparams),
                *(f"{kind}.{name}" for name in run.record.summary for kind in ("summary", "min", "max")),
            )
        )
        page = catalog.page(selected, limit=limit, columns=[*OWN_FIELDS, *columns])
        runs = [(row["id"], catalog.run(row["id"])) for row in page["rows"]]
        report.runs = len(runs)
        if page["total"] > len(runs):
            report.left_out.append(f"{page['total'] - len(runs)} of {page['total']} runs")
        rows = [{**catalog.selected(run), **row} for row, (_, run) in zip(page["rows"], runs, strict=True)]
        self._add("runs", {**page, "rows": rows, "version": "0"})
        self._write_orders([run.record for _, run in runs], columns)
        cache = ColumnCache(_CACHE_BYTES)
        for run_id, run in runs:
            self._write_run(run_id, run, cache)
        self._write_comparisons(runs, cache)
        if self._skipped_bytes:
            report.left_out.append(
                f"media of {self._skipped_bytes} bytes beyond {self._media_bytes >> 20} MiB"
            )
        fields = catalog.fields()
        self._add(
            "fields",
            {
                "fields": [
                    field
                    for field in fields["fields"]
                    if "." not in field["name"] or field["name"] in columns
                ],
                "metrics": [name for name in fields["metrics"] if f"summary.{name}" in columns],
            },
        )
        bounds = {
            "points": _POINTS,
            "media_bytes": self._media_bytes,
            "media_per_name": _MEDIA_PER_NAME,
            "left_out": report.left_out,
        }
        self._add(
            "info", {**catalog.info(), "version": "0", "writable": False, "site": True, "bounds": bounds}
        )
        self._write_page(view)
        return report

    def _add(self, key: str, answer: Any) -> None:
        """Writes an answer to a file whose name doesn't depend on a run."""
        name = f"{len(self._keys):06}.js"
        self._keys[key] = name
        if not self._with_origin and not key.startswith(_LOGGED):
            answer = without_origin(answer)
        # JSON.parse, because `__proto__` isn't a property in a JavaScript literal.
        content = json.dumps(encode(answer).decode(), ensure_ascii=False)
        text = f"destinationsSite.add({json.dumps(key)}, JSON.parse({content}));\n"
        (self._folder / "data" / name).write_text(text, encoding="utf-8")

    def _write_orders(self, records: Sequence[RunRecord], columns: Iterable[str]) -> None:
        """Writes the orders of columns in several files; a browser loads only those that it sorts by."""
        orders, search = self._catalog.orders(records, columns)
        every = list(orders)
        parts = [every[at : at + _ORDERS_TOGETHER] for at in range(0, len(every), _ORDERS_TOGETHER)]
        for number, names in enumerate(parts):
            self._add(f"orders/{number}", {name: orders[name] for name in names})
        places = {name: number for number, names in enumerate(parts) for name in names}
        self._add("orders", {"columns": places, "search": search})

    def _write_page(self, view: str) -> None:
        static = self._folder / "static"
        static.mkdir()
        for path in STATIC.iterdir():
            if path.suffix not in {".js", ".html"}:
                shutil.copyfile(path, static / path.name)
        # A `data:` URL has no neighbours, so modules import each other by their names in the map.
        modules = {
            f"page/{path.name}": path.read_text(encoding="utf-8").replace(' from "./', ' from "page/')
            for path in STATIC.glob("*.js")
        }
        script = _LOADER.format(sources=json.dumps(json.dumps(modules)))
        (static / "app.js").write_text(script, encoding="utf-8")
        page = (STATIC / "index.html").read_text(encoding="utf-8")
        if _MODULE_TAG not in page:
            raise ValueError(f"index.html of the page must load its modules by {_MODULE_TAG}.")
        (self._folder / "index.html").write_text(page.replace(_MODULE_TAG, _SITE_TAGS), encoding="utf-8")
        keys = json.dumps(json.dumps({"keys": self._keys, "view": view}))
        (self._folder / _MANIFEST).write_text(
            f"globalThis.destinationsSite = JSON.parse({keys});\n", encoding="utf-8"
        )
        written = [path for path in sorted(self._folder.rglob("*")) if path.is_file()]
        files = {path.relative_to(self._folder).as_posix(): _size_and_digest(path) for path in written}
        (self._folder / _FILES).write_text(json.dumps(files, indent=0), encoding="utf-8")

    def _write_run(self, run_id: str, run: RecordedRun, cache: ColumnCache) -> None:
        detail = details.details(self._catalog, run)
        self._add(f"run/{run_id}", detail)
        for name in detail["logs"]:
            self._try(f"log/{run_id}/{name}", details.log, run, name, -details.LOG_BYTES)
        metrics = detail["metrics"][:_MAX_METRICS]
        if len(detail["metrics"]) > len(metrics):
            self._report.left_out.append(f"{len(detail['metrics']) - len(metrics)} metrics of {run.name}")
        axes = [rows_of_writers(cache, run, metrics, Axis(kind), 0) for kind in AXES] if metrics else []
        for place, metric in enumerate(metrics):
            first, *further = _series_of_writers(run_id, metric, [axis[place] for axis in axes])
            self._add(f"series/{run_id}/{metric}", {**first, "further": further})
        for kind, names in detail["media"].items():
            for name in names if kind_of(plural=kind).shows else ():
                self._try(f"media/{run_id}/{kind}/{name}", self._media, run_id, run, kind, name)

    def _try(self, key: str, answer: Callable[..., Any], *arguments: Any) -> None:
        """Writes an answer, or notes why it can't be read."""
        try:
            found = answer(*arguments)
        except (RunsError, OSError, ValueError) as error:
            self._report.left_out.append(f"{key}: {error}")
            return
        self._add(key, found)

    def _media(self, run_id: str, run: RecordedRun, kind: str, name: str) -> dict[str, Any]:
        """Copies the files of a name as long as they fit, and returns the answer for them."""
        answer = details.media(run, kind, name, limit=_MEDIA_PER_NAME)
        about = kind_of(plural=kind)
        if about.shows == "table":
            for item in answer["items"]:
                key = f"table/{run_id}/{name}/{item['step']}"
                self._try(key, details.table, run, name, item["step"])
        if about.index != MEDIA_INDEX:
            return answer
        kept = []
        for item in answer["items"]:
            file = item["file"]
            masks = [path for mask in (item.get("masks") or {}).values() for path in mask.values() if path]
            if self._copy(run_id, run, [file, *masks]):
                kept.append(item)
                if about.shows == "points":
                    self._try(f"points/{run_id}/{file}", details.points, run, file)
        return {**answer, "items": kept}

    def _copy(self, run_id: str, run: RecordedRun, files: Sequence[str]) -> bool:
        """Copies files that belong together; returns whether they fit and can be read."""
        with contextlib.ExitStack() as opened:
            readers = []
            for file in files:
                # A web server would serve an HTML file of a run as its own page.
                if Path(file).suffix.lower() not in _COPIED:
                    self._report.left_out.append(f"{run.name}: {file}, which is no image, sound or video")
                    return False
                try:
                    fd = open_regular(run.file(file))
                except (OSError, ValueError) as error:
                    self._report.left_out.append(f"{run.name}: {file}: {error}")
                    return False
                readers.append(opened.enter_context(os.fdopen(fd, "rb")))
            size = sum(os.fstat(reader.fileno()).st_size for reader in readers)
            if self._report.media_bytes + size > self._media_bytes:
                self._skipped_bytes += size
                return False
            for file, reader in zip(files, readers, strict=True):
                target = self._folder / "files" / run_id / file
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as writer:
                    shutil.copyfileobj(reader, writer, _COPY_BYTES)
            self._report.media_files += len(files)
            self._report.media_bytes += size
        return True

    def _write_comparisons(self, runs: Sequence[tuple[str, RecordedRun]], cache: ColumnCache) -> None:
        if len(runs) > _MAX_COMPARED:
            self._report.left_out.append(f"comparisons of more than {_MAX_COMPARED} runs")
            return
        for one, other in itertools.combinations(runs, 2):
            found = details.compare([one, other], cache)
            turned = [{**part, "a": part["b"], "b": part["a"]} for part in found["parts"]]
            self._add(f"compare/{one[0]}/{other[0]}", found)
            self._add(f"compare/{other[0]}/{one[0]}", {**found, "runs": found["runs"][::-1], "parts": turned})


def _series_of_writers(
    run_id: str, metric: str, axes: Sequence[Sequence[tuple[str, Rows]]]
) -> list[dict[str, Any]]:
    """Returns the series of a metric for each writer; `axes` has the values for each x axis."""
    known = [dict(axis) for axis in axes]
    missing = Rows(error="there is no such axis.")
    return [
        _series(run_id, metric, writer, [axis.get(writer, missing) for axis in known]) for writer in known[0]
    ]


def _series(run_id: str, metric: str, writer: str, axes: Sequence[Rows]) -> dict[str, Any]:
    """Returns the series of a metric with every x axis that covers all of its values in the same order."""
    first, *others = axes
    answer = {"run": run_id, "metric": metric, "rank": 0, "writer": writer, "branch": None}
    answer |= series_answer(first, Axis(), _POINTS) | {"cursor": ""}
    answer["step"] = answer.pop("x")
    for kind, rows in zip(AXES[1:], others, strict=True):
        is_whole = first.error is None and rows.error is None and len(rows.y) == len(first.y)
        if is_whole and not first.late:
            answer[kind] = downsample(rows.x, rows.y, _POINTS).x
    return answer
