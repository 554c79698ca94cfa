"""Imports W&B's local runs: reads the records of its logs with W&B's own schema."""

import base64
import hashlib
import html
import importlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from destinations.history.metric_summary import metric_of
from destinations.kinds.images import IMAGE, read_pixels
from destinations.kinds.line import file_inside, number_of, whole_of
from destinations.kinds.texts import TEXT
from destinations.runs.move.stream import Bytes, Logged, Record, SourceRun, Values
from uploads.disk import read_regular

from .frames import log_records
from .media import READERS, UNREADABLE
from .source import Source, SourceError
from .tables import stamp_of

_LOGS = "run-*.wandb"
_FOLDER = re.compile(r"run-(\d{8}_\d{6})-")
_STEPS = 1 << 63
_PRE = re.compile(r'<pre style="white-space: pre-wrap">(.*)</pre>', re.DOTALL)
_ABOUT = ("entity", "project", "host", "run_group", "job_type", "git", "sweep_id")
_OWN = {"_step", "_timestamp", "_runtime"}


def _claims(place: str) -> bool:
    path = Path(place)
    return path.suffix == ".wandb" if path.is_file() else next(path.rglob(_LOGS), None) is not None


def _runs(place: str, _: Mapping[str, str]) -> list[SourceRun]:
    """Returns a run for each id. A resumed run has several logs."""
    top = Path(place).absolute()
    logs: dict[str, list[Path]] = {}
    for path in [top] if top.is_file() else top.rglob(_LOGS):
        logs.setdefault(path.stem.removeprefix("run-"), []).append(path)
    found = [_Log(run_id, sorted(paths, key=_begun)) for run_id, paths in logs.items()]
    return [log.run for log in sorted(found, key=lambda log: _begun(log.paths[0]))]


def _begun(log: Path) -> str:
    match = _FOLDER.search(log.parent.name)
    return match[1] if match else log.parent.name


def _records(path: Path, lost: Counter[str], seen: Bytes) -> Iterator[tuple[str, Any]]:
    """Yields the kind and the fields of each record of a log."""
    from wandb.proto.wandb_internal_pb2 import Record as LogRecord

    for data in log_records(path, seen):
        try:
            record = LogRecord.FromString(data)
        except Exception:  # noqa: BLE001  # protobuf's error types differ between its implementations
            lost["unreadable records"] += 1
            continue
        if kind := record.WhichOneof("record_type"):
            yield kind, getattr(record, kind)


def _plain(fields: Any) -> dict[str, Any]:
    as_dict = importlib.import_module("google.protobuf.json_format").MessageToDict
    plain: dict[str, Any] = as_dict(fields, preserving_proto_field_name=True)
    return plain


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields names and values. Nested names are joined with dots; a medium is a single value."""
    for name, value in values.items():
        if isinstance(value, dict) and "_type" not in value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    numbers = ((name, metric_of(value)) for name, value in _leaves(values, prefix))
    return {name: number for name, number in numbers if number is not None}


@attrs.define
class _Axes:
    """Finds the step of each value: from the x axis set by `define_metric`, or else W&B's own step.

    W&B's own step counts the calls of `log`, unless the program sets it.

    Attributes:
        run: the run, for counts of omitted records.
        last: the last value of each axis, for rows without it.
    """

    run: SourceRun
    last: dict[str, Any] = attrs.field(factory=dict)
    _axis_of: dict[str, str] = attrs.field(factory=dict)
    _axes: set[str] = attrs.field(factory=set)
    _found: dict[str, str | None] = attrs.field(factory=dict)

    def define(self, name: str, axis: str) -> None:
        """Sets the x axis, "" for none, of a metric or of a pattern such as "val/*"."""
        self._axis_of[name] = axis
        self._axes |= {axis} if axis else set()

    def of(self, name: str) -> str | None:
        """Returns the x axis of a metric or medium. A metric that is an axis is its own axis by default."""
        if name not in self._found:
            globs = [one for one in self._axis_of if one.endswith("*") and name.startswith(one[:-1])]
            # The most specific pattern with an axis wins.
            named = (self._axis_of.get(one) for one in (name, *sorted(globs, key=len, reverse=True)))
            self._found[name] = next(filter(None, named), name if name in self._axes else None)
        return self._found[name]

    def own(self, name: str) -> str:
        """Returns the original name of a metric. Our `WandB` renames a metric that is named like its axis."""
        own = name.removeprefix("metric/")
        return own if self.of(own) == own else name

    def steps_of(self, names: Iterable[str], values: Mapping[str, float], own_step: int) -> dict[str, int]:
        """Returns the step of each name of a row; leaves out an axis that only serves other metrics.

        Args:
            names: the names in the row.
            values: the numbers in the row.
            own_step: W&B's own step.
        """
        self.last |= {name: values[name] for name in self._axes & values.keys()}
        axes, steps = {name: self.of(name) for name in names}, {}
        used = {axis for name, axis in axes.items() if axis != name}
        for name, axis in axes.items():
            at = own_step if axis is None else self.last.get(axis, math.nan)
            is_step = 0 <= at < _STEPS and float(at).is_integer()
            if not is_step and axis != name:
                self.run.left_out["x values that are not steps, replaced by W&B's own step"] += 1
            if not is_step or axis != name or name not in used:
                steps[name] = int(at) if is_step else own_step
        return steps


class _Log:
    """The logs of one run.

    Args:
        run_id: its id.
        paths: the logs, in order; each has its files beside it.
    """

    def __init__(self, run_id: str, paths: list[Path]) -> None:
        self.paths = paths
        # The folder of the first log has its time and the id.
        identity = f"wandb {run_id} {paths[0].parent.name}"
        self.run = SourceRun(
            run_id,
            run_id,
            identity,
            stamp_of(*(one for path in paths for one in (path, path.parent / "files"))),
            lambda _run: self._read(),
            facts=lambda _run: self._read_facts(),
        )
        self._folder = Path()
        self._own: dict[str, Any] = {}
        self._summary: dict[str, Any] = {}
        self._axes = _Axes(self.run)
        self._step = 0
        self._names: set[str] = set()
        # Files of tables, by name: only their artifacts tell where W&B keeps them.
        self._staged: dict[str, tuple[str, str]] = {}

    def _read_facts(self) -> None:
        """Reads W&B's facts about the run; the last log has the newest config, tags and notes.

        Also reads the definitions of metrics, because a program may define a metric after logging it.
        """
        kinds = set()
        for path in self.paths:
            self.run.status = self.run.exception = ""
            for kind, fields in _records(path, Counter(), Bytes()):
                kinds.add(kind)
                self._read_fact(kind, fields)
        if not kinds - {"header"}:
            raise SourceError(f"there is no run of W&B in {self.paths[0]}.")
        self._own = self.run.hyperparameters.pop("_wandb", {})
        self.run.created_at = self.run.created_at or self.paths[0].stat().st_mtime

    def _read_fact(self, kind: str, fields: Any) -> None:
        run = self.run
        if kind == "run":
            run.created_at = run.created_at or fields.start_time.ToMicroseconds() / 1e6
            run.name = fields.display_name or run.name
            run.tags, run.notes = tuple(fields.tags), fields.notes
            about = _plain(fields)
            run.environment |= {name: about[name] for name in _ABOUT if about.get(name)}
        if kind in {"run", "config"}:
            config = fields.config if kind == "run" else fields
            self._update(run.hyperparameters, config.update)
            for item in config.remove:
                run.hyperparameters.pop(item.key, None)
        elif kind == "summary":
            self._update(self._summary, fields.update)
        elif kind == "metric":
            self._axes.define(fields.glob_name or fields.name, fields.step_metric)
        elif kind == "environment":
            run.environment |= {name: value for name, value in _plain(fields).items() if name != "writer_id"}
        elif kind == "exit":
            code = fields.exit_code
            run.status = {0: "completed", 255: "interrupted"}.get(code, "failed")
            run.exception = f"Exit: code {code}" if code else ""

    def _update(self, values: dict[str, Any], items: Iterable[Any]) -> dict[str, Any]:
        """Updates values from items with a path of names and JSON each; returns the values."""
        for item in items:
            *outer, name = list(getattr(item, "nested_key", ())) or [item.key]
            inner = values
            for part in outer:
                found = inner.get(part)
                inner[part] = inner = found if isinstance(found, dict) else {}
            try:
                inner[name] = json.loads(item.value_json)
            except (ValueError, RecursionError):
                self.run.lost["unreadable values"] += 1
        return values

    def _read(self) -> Iterator[Record]:
        """Yields the records of the logs, then values that only the summary has, at the last step."""
        for path in self.paths:
            self._folder = path.parent / "files"
            for kind, fields in _records(path, self.run.lost, self.run.seen):
                if kind == "history":
                    yield from self._history(self._update({}, fields.item))
                elif kind == "stats":
                    numbers = _numbers(self._update({}, fields.item), "system/")
                    yield Values(numbers, self._step, fields.timestamp.ToMicroseconds() / 1e6)
                elif kind == "artifact" and fields.type == "run_table":
                    self._read_table(fields.manifest.contents)
                elif kind == "artifact":
                    self.run.left_out["W&B artifacts"] += 1
            yield from self._files()
        numbers = _numbers({name: value for name, value in self._summary.items() if name[:1] != "_"})
        yield Values({name: numbers[name] for name in numbers if name not in self._names}, self._step)

    def _read_table(self, contents: Iterable[Any]) -> None:
        for one in contents:
            if one.local_path and Path(one.local_path).is_file():
                self._staged[one.path] = (one.local_path, one.digest)
            elif one.path.startswith("media/"):
                self.run.left_out["files of tables, which W&B keeps elsewhere"] += 1

    def _history(self, row: dict[str, Any]) -> Iterator[Record]:
        time, own_step = number_of(row.get("_timestamp")), whole_of(row.get("_step")) or 0
        leaves = {name: value for name, value in _leaves(row) if name not in _OWN and value is not None}
        for name in [name for name, value in leaves.items() if isinstance(value, list)]:
            del leaves[name]
            self.run.left_out["lists"] += 1
        numbers = _numbers(leaves)
        self._names |= numbers.keys()
        steps = self._axes.steps_of(leaves, numbers, own_step)
        self._step = max(steps.values(), default=self._step)
        for name, value in leaves.items():
            if isinstance(value, str) and name not in numbers:
                yield Logged(TEXT, name, steps[name], time, {"text": value})
        for step in dict.fromkeys(steps.values()):
            here = {self._axes.own(name): numbers[name] for name in numbers if steps.get(name) == step}
            yield Values(here, step, time)
        for name, value in leaves.items():
            if isinstance(value, dict):
                yield from self._medium(name, value, steps[name], time)

    def _medium(self, name: str, fields: dict[str, Any], step: int, time: float | None) -> Iterator[Record]:
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
                    arguments |= self._masks(name, [fields.get("masks")])
            elif "path" in fields:
                # Other media are kept as files.
                yield Logged.file(str(fields["path"]), self._path(fields["path"]), time)
                return
            else:
                self.run.left_out[what] += 1
                return
        except UNREADABLE:
            self.run.lost[f"unreadable {what}"] += 1
            return
        yield Logged(kind, name, step, time, arguments)

    def _path(self, relative: Any) -> Path:
        staged, digest = self._staged.get(relative, ("", ""))
        if staged:
            # An untrusted log may name any file of this machine, so it must also know its digest.
            data = hashlib.md5(read_regular(staged), usedforsecurity=False).digest()
            if base64.b64encode(data).decode() == digest:
                return Path(staged)
        # Checked from the parent, because the folder itself may be a link.
        return file_inside(self._folder.parent, f"{self._folder.name}/{relative}")

    def _pictures(self, name: str) -> dict[str, Any]:
        """Returns the images of a table that has nothing else, described like a list of images."""
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
        """Returns the masks of images; every image needs a mask of each name."""
        names = list(masks[0] or ()) if masks else []
        if not any(masks):
            return {}
        if not all(one is not None and list(one) == names for one in masks):
            self.run.left_out["masks that not every image has"] += 1
            return {}
        read = {mask: [read_pixels(self._path(one[mask]["path"])) for one in masks if one] for mask in names}
        labels = self._own.get("mask/class_labels", {}).get(f"{name}_wandb_delimeter_{names[0]}", {})
        given = {int(number): str(text) for number, text in labels.get("value", {}).items()}
        return {"masks": read} | ({"mask_class_labels": given} if given else {})

    def _files(self) -> Iterator[Record]:
        """Yields the files beside the log, except for media, which have records of their own."""
        if self._folder.is_symlink():
            self.run.left_out["links"] += 1
            return
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if path.is_symlink():
                self.run.left_out["links"] += 1
            elif path.is_file() and not name.startswith("media/"):
                yield Logged.file(name, path)


WANDB = Source("wandb", "W&B's folder, the folder of a run in it, or a .wandb file", _claims, _runs, "wandb")
