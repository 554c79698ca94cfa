"""W&B's local runs, by its own `leet inspect`, which prints the records of a log."""

import base64
import hashlib
import html
import json
import math
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from destinations.history.metric_summary import metric_of
from destinations.kinds.images import IMAGE, read_pixels
from destinations.kinds.line import file_inside, number_of, whole_of
from destinations.kinds.texts import TEXT
from uploads.disk import read_regular

from .media import READERS, UNREADABLE
from .source import File, Item, Logged, Source, SourceError, SourceRun, Values
from .tables import seconds_of, stamp_of

__all__ = ["WANDB"]

_LOGS = "run-*.wandb"
_FOLDER = re.compile(r"run-(\d{8}_\d{6})-")
_SUMMARY_FIELDS = ("entity", "project")
_STEPS = 1 << 63
_PRE = re.compile(r'<pre style="white-space: pre-wrap">(.*)</pre>', re.DOTALL)
_RUN_FIELDS = ("host", "run_group", "job_type", "git", "sweep_id")


def _claims(place: str) -> bool:
    path = Path(place)
    return path.suffix == ".wandb" if path.is_file() else next(path.rglob(_LOGS), None) is not None


def _runs(place: str, _: Mapping[str, str]) -> list[SourceRun]:
    """Returns a run for each id; one that was resumed has several logs."""
    top = Path(place).absolute()
    logs: dict[str, list[Path]] = {}
    for path in [top] if top.is_file() else top.rglob(_LOGS):
        logs.setdefault(path.stem.removeprefix("run-"), []).append(path)
    found = []
    for run_id, paths in sorted(logs.items(), key=lambda pair: min(map(_begun, pair[1]))):
        paths.sort(key=_begun)
        # The folder of the first log has its time and the id.
        identity = f"wandb {run_id} {paths[0].parent.name}"
        logs_of = _Logs(paths)
        found.append(
            SourceRun(run_id, run_id, identity, stamp_of(*paths), logs_of.read, facts=logs_of.read_facts)
        )
    return found


def _begun(log: Path) -> str:
    match = _FOLDER.search(log.parent.name)
    return match[1] if match else log.parent.name


def _inspect(log: Path, *options: str) -> Iterator[bytes]:
    """Yields the lines that W&B's own reader prints.

    Raises:
        ImportError: W&B is not installed.
        SourceError: it cannot read the log.
    """
    try:
        from wandb.util import get_core_path
    except ImportError as error:
        raise ImportError('W&B\'s logs need W&B: pip install "training-destinations[wandb]"') from error
    command = [get_core_path(), "leet", "inspect", "-json", "-no-observability", *options]
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(  # noqa: S603  # W&B's own program
            [*command, "-run-file", str(log)], stdout=subprocess.PIPE, stderr=errors
        ) as process:
            try:
                yield from process.stdout or ()
            except BaseException:
                process.kill()
                raise
        if process.returncode > 0:
            errors.seek(0)
            said = errors.read(10_000).decode(errors="replace").strip().splitlines() or [""]
            raise SourceError(
                f"W&B's reader failed on {log} ({said[0]}). If it does not know `wandb leet inspect`, update "
                "wandb."
            )


class _Logs:
    """The logs of one run.

    Args:
        paths: of them, in order.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._summary: dict[str, Any] = {}

    def read_facts(self, run: SourceRun) -> None:
        """Reads what W&B says about the run; the last log has the newest config, tags and notes."""
        for path in self._paths:
            facts = json.loads(b"".join(_inspect(path, "-summary")))
            if not facts.get("run_id"):
                raise SourceError(f"W&B's reader finds no run in {path}.")
            begun_at = seconds_of(facts.get("start_time"))
            if begun_at is not None:
                run.created_at = min(run.created_at or begun_at, begun_at)
            run.name = facts.get("name") or run.name
            run.tags = tuple(facts.get("tags") or ())
            run.notes = facts.get("notes") or ""
            run.hyperparameters |= facts.get("config") or {}
            run.environment |= {name: facts[name] for name in _SUMMARY_FIELDS if facts.get(name)}
            self._summary |= facts.get("summary") or {}

    def read(self, run: SourceRun) -> Iterator[Item]:
        """Yields what is in the logs, then what only the summary has, at the last step."""
        step, names, axes = 0, set(), _Axes(run)
        # First, because a program may define a metric after it has logged some.
        for line in (line for path in self._paths for line in self._lines(path)):
            if b'"type":"metric"' in line:
                axes.define(json.loads(line).get("metric") or {})
        for path in self._paths:
            log = _Log(run, path.parent / "files", axes)
            for line in self._lines(path, run):
                yield from log.items_of(json.loads(line))
            yield from log.files()
            step = max(step, log.step)
            names |= log.names
        only = {name: value for name, value in _flat(self._summary) if name not in names}
        yield Values(only, step)

    def _lines(self, path: Path, run: SourceRun | None = None) -> Iterator[bytes]:
        """Yields the records of a log; counts one that was cut off, unless nothing of it can be read."""
        count = 0
        try:
            for count, line in enumerate(_inspect(path), 1):  # noqa: B007  # looked at where it fails
                yield line
        except SourceError:
            if not count:
                raise
            if run is not None:
                run.left_out["damaged logs"] += 1


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers of a summary, but for W&B's own and those of media."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            if "_type" not in value:
                yield from _flat(value, f"{prefix}{name}.")
        elif not name.startswith("_") and (number := number_of(value)) is not None:
            yield prefix + name, float(number)


class _Axes:
    """The steps of values: those of the metric that `define_metric` made their x axis, else W&B's own.

    W&B's own step counts the calls of `log`, unless the program gave one.

    Args:
        run: its run.
    """

    def __init__(self, run: SourceRun) -> None:
        self._run = run
        self._axis_of: dict[str, str | None] = {}
        self._axes: set[str] = set()
        self._found: dict[str, str | None] = {}
        # The last value of each axis: a row may lack it.
        self._last: dict[str, Any] = {}

    def define(self, metric: Mapping[str, Any]) -> None:
        """Takes a definition of a metric, or of all whose names begin so ("val/*")."""
        axis = metric.get("step_metric")
        self._axis_of[str(metric.get("glob_name") or metric.get("name"))] = axis
        self._axes |= {axis} if axis else set()

    def of(self, name: str) -> str | None:
        """Returns the x axis of a metric or a medium; an axis without one is its own."""
        if name not in self._found:
            globs = [one for one in self._axis_of if one.endswith("*") and name.startswith(one[:-1])]
            # Of several patterns the most specific one that has an axis.
            named = (self._axis_of.get(one) for one in (name, *sorted(globs, key=len, reverse=True)))
            self._found[name] = next(filter(None, named), name if name in self._axes else None)
        return self._found[name]

    def own(self, name: str) -> str:
        """Returns the name of a metric as it was logged: our `WandB` renames one named like its axis."""
        own = name.removeprefix("metric/")
        return own if self.of(own) == own else name

    def steps_of(self, names: Iterable[str], values: Mapping[str, float], own_step: int) -> dict[str, int]:
        """Returns the steps of what a row has; an axis that only says where the others stand is left out.

        Args:
            names: of the row.
            values: its numbers.
            own_step: W&B's.
        """
        self._last |= {name: values[name] for name in self._axes & values.keys()}
        axes, steps = {name: self.of(name) for name in names}, {}
        used = {axis for name, axis in axes.items() if axis != name}
        for name, axis in axes.items():
            at = own_step if axis is None else self._last.get(axis, math.nan)
            is_step = 0 <= at < _STEPS and float(at).is_integer()
            if not is_step and axis != name:
                self._run.left_out["x values that are no steps, for which W&B's own step stands"] += 1
            if not is_step or axis != name or name not in used:
                steps[name] = int(at) if is_step else own_step
        return steps


class _Log:
    """Reads the records of one log.

    Args:
        run: its run.
        folder: that of the files that the records name.
        axes: the steps of its values; default: W&B's own.
    """

    def __init__(self, run: SourceRun, folder: Path, axes: _Axes | None = None) -> None:
        self._run = run
        self._folder = folder
        self._axes = axes or _Axes(run)
        self.step = 0
        self.names: set[str] = set()
        self._labels: dict[str, dict[int, str]] = {}
        self._staged: dict[str, tuple[Any, Any]] = {}

    def items_of(self, record: dict[str, Any]) -> Iterator[Item]:
        kind = record.get("type", "")
        fields = record.get(kind) or {}
        if kind == "history":
            yield from self._history(fields.get("item") or {})
        elif kind == "stats":
            values = {f"system/{name}": number_of(value) for name, value in fields.get("item", {}).items()}
            numbers = {name: float(value) for name, value in values.items() if value is not None}
            yield Values(numbers, self.step, seconds_of(fields.get("timestamp")))
        elif kind in {"config", "run"}:
            update = (fields.get("config", fields) if kind == "run" else fields).get("update") or {}
            self._read_labels(update.get("_wandb") or {})
            self._run.environment |= {name: fields[name] for name in _RUN_FIELDS if fields.get(name)}
        elif kind == "environment":
            self._run.environment |= {name: value for name, value in fields.items() if name != "writer_id"}
        elif kind == "exit":
            code = fields.get("exit_code") or 0
            self._run.status = {0: "completed", 255: "interrupted"}.get(code, "failed")
            self._run.exception = f"Exit: code {code}" if code else ""
            self._run.ended_at = None
        elif kind == "artifact" and fields.get("type") == "run_table":
            self._read_table((fields.get("manifest") or {}).get("contents") or ())
        elif kind == "artifact":
            self._run.left_out["W&B artifacts"] += 1

    def _read_table(self, contents: Iterable[dict[str, Any]]) -> None:
        """Takes note of where the files of a table are, which only its artifact has."""
        for one in contents:
            if Path(one.get("local_path") or "").is_file():
                self._staged[one["path"]] = (one["local_path"], one.get("digest"))
            elif one["path"].startswith("media/"):
                self._run.left_out["files of tables, which W&B keeps elsewhere"] += 1

    def _read_labels(self, about: dict[str, Any]) -> None:
        for key, label in (about.get("mask/class_labels") or {}).items():
            self._labels[key] = {int(number): str(text) for number, text in label["value"].items()}

    def _history(self, item: dict[str, Any]) -> Iterator[Item]:
        time = number_of(item.get("_timestamp"))
        values, texts, typed = self._parts_of(item)
        self.names |= values.keys()
        own_step = whole_of(item.get("_step")) or 0
        steps = self._axes.steps_of([*values, *texts, *typed], values, own_step)
        self.step = max(steps.values(), default=self.step)
        for name, text in texts.items():
            yield Logged(TEXT, name, steps[name], time, {"text": text})
        for step in dict.fromkeys(steps.values()):
            here = {self._axes.own(name): values[name] for name in values if steps.get(name) == step}
            yield Values(here, step, time)
        for name, fields in typed.items():
            yield from self._medium(name, fields, steps[name], time)

    def _parts_of(
        self, item: dict[str, Any]
    ) -> tuple[dict[str, float], dict[str, str], dict[str, dict[str, Any]]]:
        """Returns the numbers, texts and typed values of a row, by name."""
        values: dict[str, float] = {}
        texts: dict[str, str] = {}
        # What is nested is flat here, its names joined with dots.
        owners = sorted(key.removesuffix("._type") for key in item if key.endswith("._type"))
        typed: dict[str, dict[str, Any]] = {}
        for key in owners:
            if not any(key.startswith(f"{other}.") for other in typed):
                typed[key] = {}
        for name, value in item.items():
            owner = next((key for key in typed if name.startswith(f"{key}.")), None)
            number = metric_of(value)
            if owner is not None:
                typed[owner][name[len(owner) + 1 :]] = value
            elif name in {"_step", "_timestamp", "_runtime"} or value is None:
                pass
            elif number is not None:
                values[name] = float(number)
            elif isinstance(value, str):
                texts[name] = value
            else:
                self._run.left_out["lists"] += 1
        return values, texts, typed

    def _medium(self, name: str, fields: dict[str, Any], step: int, time: float | None) -> Iterator[Item]:
        what = str(fields.get("_type"))
        kind, read = READERS.get(what, (None, None))
        try:
            if what == "images/separated":
                kind, arguments = IMAGE, self._images(name, fields)
            elif what == "table-file" and (pictures := self._pictures(name)):
                kind, arguments = IMAGE, self._images(name, pictures)
            elif what == "html-file" and (text := self._text(fields["path"])) is not None:
                kind, arguments = TEXT, {"text": text}
            elif kind is not None and read is not None:
                arguments = read(self._path, fields)
                if what == "image-file":
                    parts = (re.fullmatch(r"masks\.(.+)\.path", key) for key in fields)
                    masks = {part[1]: {"path": fields[part[0]]} for part in parts if part}
                    arguments |= self._masks(name, [masks])
            elif "path" in fields:
                # Nothing else is lost: it is kept as a file.
                yield File(str(fields["path"]), self._path(fields["path"]), time)
                return
            else:
                self._run.left_out[what] += 1
                return
        except UNREADABLE:
            self._run.left_out[f"unreadable {what}"] += 1
            return
        yield Logged(kind, name, step, time, arguments)

    def _path(self, relative: Any) -> Path:
        staged, digest = self._staged.get(relative, ("", ""))
        if staged:
            # A stranger's log may name any file of this machine: it must know the content, too.
            data = hashlib.md5(read_regular(staged), usedforsecurity=False).digest()
            if base64.b64encode(data).decode() == digest:
                return Path(staged)
        return file_inside(self._folder, relative)

    def _pictures(self, name: str) -> dict[str, Any]:
        """Returns the images of a table that has nothing else, as those of a list are described."""
        if f"{name}.table.json" not in self._staged:
            return {}
        table = json.loads(self._path(f"{name}.table.json").read_text(encoding="utf-8"))
        cells = [row[0] for row in table["data"]] if table["columns"] == ["image"] else []
        if not all(isinstance(cell, dict) and cell.get("_type") == "image-file" for cell in cells):
            return {}
        named = {"filenames": "path", "captions": "caption", "all_masks": "masks"}
        return {key: [cell.get(one) for cell in cells] for key, one in named.items()} if cells else {}

    def _text(self, relative: Any) -> str | None:
        """Returns the text that our `WandB` logged as HTML."""
        match = _PRE.fullmatch(self._path(relative).read_bytes().decode())
        return match and html.unescape(match[1])

    def _images(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        paths = [self._path(path) for path in fields["filenames"]]
        captions = [caption or "" for caption in fields.get("captions") or ()]
        given = {"captions": captions} if any(captions) else {}
        return {"images": paths, **given, **self._masks(name, fields.get("all_masks") or [])}

    def _masks(self, name: str, masks: list[dict[str, Any] | None]) -> dict[str, Any]:
        """Returns the masks of images; all of them need one of each name."""
        names = list(masks[0] or ()) if masks else []
        if not any(masks):
            return {}
        if not all(one is not None and list(one) == names for one in masks):
            self._run.left_out["masks that not every image has"] += 1
            return {}
        read = {mask: [read_pixels(self._path(one[mask]["path"])) for one in masks if one] for mask in names}
        labels = self._labels.get(f"{name}_wandb_delimeter_{names[0]}")
        return {"masks": read} | ({"mask_class_labels": labels} if labels else {})

    def files(self) -> Iterator[Item]:
        """Yields the files beside the log, but for media, which their records have named."""
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if path.is_symlink():
                self._run.left_out["links"] += 1
            elif path.is_file() and not name.startswith("media/"):
                yield File(name, path)


WANDB = Source("wandb", "W&B's folder, the folder of a run in it, or a .wandb file", _claims, _runs)
