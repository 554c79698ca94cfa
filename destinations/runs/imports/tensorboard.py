"""Imports TensorBoard's event files; TensorBoard's own code converts old formats."""

import functools
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from destinations.kinds.audio import AUDIO
from destinations.kinds.histograms import HISTOGRAM
from destinations.kinds.images import IMAGE
from destinations.kinds.texts import TEXT
from destinations.runs.move.stream import Bytes, Logged, Record, Restart, SourceRun, Values

from .frames import event_records
from .media import sound_arguments
from .source import Source, unique_id

_FILES = "*tfevents*"


def _claims(place: str) -> bool:
    path = Path(place)
    return "tfevents" in path.name if path.is_file() else next(path.rglob(_FILES), None) is not None


def _runs(place: str, _: Mapping[str, str]) -> list[SourceRun]:
    """Returns a run for each folder with event files, named by its path as in TensorBoard."""
    top = Path(place).absolute()
    files: dict[Path, list[Path]] = {}
    for path in [top] if top.is_file() else sorted(top.rglob(_FILES)):
        if path.is_file():
            files.setdefault(path.parent, []).append(path)
    found = []
    for folder, paths in sorted(files.items()):
        name = folder.relative_to(top).as_posix() if top.is_dir() and folder != top else folder.name
        # The name of an event file has a time, a host and a process, so it identifies the run.
        identity = f"tensorboard {name} {paths[0].name}"
        stamp = " ".join(f"{path.name}:{path.stat().st_size}" for path in paths)
        read = functools.partial(_read, paths)
        made = SourceRun(unique_id(name, identity), name, identity, stamp, read)
        first = next(_events(paths[0], made, Bytes()), None)
        made.created_at = paths[0].stat().st_mtime if first is None else first.wall_time
        found.append(made)
    return found


def _events(path: Path, run: SourceRun, seen: Bytes) -> Iterator[Any]:
    from tensorboard import data_compat, dataclass_compat
    from tensorboard.compat.proto.event_pb2 import Event

    metadata: dict[str, Any] = {}
    for record in event_records(path, seen):
        try:
            event = data_compat.migrate_event(Event.FromString(record))
            yield from dataclass_compat.migrate_event(event, metadata)
        except Exception:  # noqa: BLE001  # TensorBoard raises many types
            run.lost["unreadable events"] += 1


def _read(paths: list[Path], run: SourceRun) -> Iterator[Record]:
    from tensorboard.compat.proto.event_pb2 import SessionLog

    plugins: dict[str, str] = {}
    for path in paths:
        for event in _events(path, run, run.seen):
            what = event.WhichOneof("what")
            if what == "summary":
                for value in event.summary.value:
                    # Only the first value of a tag must name its plugin.
                    plugin = value.metadata.plugin_data.plugin_name
                    plugin = plugins.setdefault(value.tag, plugin) if plugin else plugins.get(value.tag, "")
                    yield from _items_of(run, plugin, value, event.step, event.wall_time)
            elif what == "session_log" and event.session_log.status == SessionLog.START:
                yield Restart(event.step)


def _items_of(run: SourceRun, plugin: str, value: Any, step: int, time: float) -> Iterator[Record]:
    try:
        yield from list(_read_value(run, plugin, value, step, time))
    except Exception:  # noqa: BLE001  # decoders of damaged bytes raise many types
        run.lost[f"unreadable {plugin or 'values'}"] += 1


def _read_value(run: SourceRun, plugin: str, value: Any, step: int, time: float) -> Iterator[Record]:
    from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR

    read = _READERS.get(plugin)
    if plugin == "hparams":
        _read_session(run, value.metadata.plugin_data.content)
    elif plugin == "scalars" or (read is None and value.metadata.data_class == DATA_CLASS_SCALAR):
        yield Values({value.tag: float(_array(value).item())}, step, time)
    elif read is None:
        run.left_out[plugin.replace("_", " ") or "values of an unknown type"] += 1
    else:
        kind, arguments_of = read
        found = arguments_of(_array(value))
        for index, arguments in enumerate(found):
            name = value.tag if len(found) == 1 else f"{value.tag}/{index}"
            yield Logged(kind, name, step, time, arguments)


def _array(value: Any) -> Any:
    from tensorboard.util import tensor_util

    return tensor_util.make_ndarray(value.tensor)


def _images(array: Any) -> list[dict[str, Any]]:
    import PIL.Image

    # The first two entries are width and height.
    images = [PIL.Image.open(io.BytesIO(data)) for data in array.reshape(-1)[2:]]
    for image in images:
        image.load()
    return [{"images": images}] if images else []


def _sounds(array: Any) -> list[dict[str, Any]]:
    # Each entry is a sound, or a pair of a sound and its label.
    return [sound_arguments(bytes(data)) for data in (array[:, 0] if array.ndim > 1 else array)]


def _histograms(array: Any) -> list[dict[str, Any]]:
    from events import BinnedValues

    buckets = [bucket for bucket in array.reshape(-1, 3).tolist() if bucket[0] < bucket[1] or bucket[2]]
    if not buckets:
        return []
    if len(buckets) == 1 and buckets[0][0] == buckets[0][1]:
        # A single value is a bucket without width.
        value = buckets[0][0]
        buckets[0][:2] = [value - 0.5, value + 0.5]
    edges = [buckets[0][0], *(right for _, right, _ in buckets)]
    if any(left != edge for edge, (left, _, _) in zip(edges, buckets, strict=False)):
        raise ValueError
    return [{"values": BinnedValues([count for *_, count in buckets], edges)}]


def _texts(array: Any) -> list[dict[str, Any]]:
    if array.ndim == 0:
        return [{"text": _text(array.item())}]
    rows = array.reshape(len(array), -1)
    return [{"text": "\n".join("\t".join(map(_text, row)) for row in rows)}]


def _text(data: Any) -> str:
    return data.decode("utf-8", "replace") if isinstance(data, bytes) else str(data)


_READERS = {
    "images": (IMAGE, _images),
    "audio": (AUDIO, _sounds),
    "histograms": (HISTOGRAM, _histograms),
    "text": (TEXT, _texts),
}


def _read_session(run: SourceRun, content: bytes) -> None:
    """Reads hyperparameters and the end of the run as `add_hparams` and Keras write them."""
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

    data = plugin_data_pb2.HParamsPluginData.FromString(content)
    if data.HasField("session_start_info"):
        for name, value in data.session_start_info.hparams.items():
            run.hyperparameters[name] = getattr(value, value.WhichOneof("kind") or "string_value")
    elif data.HasField("session_end_info"):
        words = {api_pb2.STATUS_SUCCESS: "completed", api_pb2.STATUS_FAILURE: "failed"}
        run.status = words.get(data.session_end_info.status, "")
        run.ended_at = data.session_end_info.end_time_secs or None


TENSORBOARD = Source("tensorboard", "a folder with event files, at any depth", _claims, _runs, "tensorboard")
