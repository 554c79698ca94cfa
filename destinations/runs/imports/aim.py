"""Imports runs of an Aim repository with Aim's own package."""

import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from destinations.kinds.audio import AUDIO
from destinations.kinds.histograms import HISTOGRAM
from destinations.kinds.images import IMAGE
from destinations.kinds.kind import Kind
from destinations.kinds.texts import TEXT
from destinations.runs.move.stream import Logged, Record, SourceRun, Values
from destinations.trackers.names import short_hash

from .media import UNREADABLE, sound_arguments
from .source import Source, SourceError

_FOLDER, _HPARAMS, _SYSTEM = ".aim", "hparams", "__system_params"


def _claims(place: str) -> bool:
    path = Path(place)
    return (path.name == _FOLDER and path.is_dir()) or (path / _FOLDER).is_dir()


def _runs(place: str, _: Mapping[str, str]) -> list[SourceRun]:
    aim: Any = importlib.import_module("aim")
    path = Path(place).absolute()
    repo = aim.Repo.from_path(str(path.parent if path.name == _FOLDER else path))
    indexed = {run.hash: run for run in repo.iter_runs()}
    if missing := set(repo.list_all_runs()) - indexed.keys():
        raise SourceError(f"Aim has not indexed {len(missing)} runs of {place!r}: run `aim storage reindex`.")
    return [_run_of(run) for run in indexed.values()]


def _run_of(run: Any) -> SourceRun:
    try:
        params = dict(run[...])
    except KeyError:
        params = {}
    system = params.pop(_SYSTEM, {})
    nested = params.pop(_HPARAMS, {})
    hparams = {**params, **(nested if isinstance(nested, Mapping) else {_HPARAMS: nested})}
    series = run.collect_sequence_info(("metric", *_READERS, *_UNKNOWN))
    ends = sorted(
        (kind, str(one["name"]), str(one["context"]), one["values"].get("last_step") or 0)
        for kind in series
        for one in series[kind]
    )
    about = (run.name, run.description, run.end_time, hparams, run.tags, ends)

    def stamp() -> str:
        # The index of series has only their last steps, so a value at an earlier step shows in the values.
        points = [
            (metric.name, str(metric.context.to_dict()), steps.tobytes(), values.tobytes())
            for metric in run.metrics()
            for steps, (values, *_) in [metric.data.numpy()]
        ]
        return short_hash(repr((about, sorted(points))), 16)

    return SourceRun(
        run.hash,
        run.name or run.hash,
        f"aim {run.hash}",
        stamp,
        lambda found: _read(run, series, found),
        created_at=run.creation_time,
        ended_at=run.end_time,
        status="" if run.active else "completed",
        tags=tuple(run.tags or ()),
        notes=run.description or "",
        hyperparameters=hparams,
        environment={"experiment": run.experiment, "system": system},
    )


def _read(run: Any, series: Mapping[str, list[Any]], found: SourceRun) -> Iterator[Record]:
    points: list[tuple[float, int, str, float, float | None]] = []
    metrics = list(run.metrics())
    names = _names_of([(metric.name, metric.context.to_dict()) for metric in metrics])
    for name, metric in zip(names, metrics, strict=True):
        steps, (values, epochs, times) = metric.data.numpy()
        for step, value, epoch, time in zip(steps, values, epochs, times, strict=True):
            of_epoch = float(epoch) if math.isfinite(epoch) else None
            points.append((float(time), int(step), name, float(value), of_epoch))
    # By time, so that values that were logged together are one row.
    for time, step, name, value, of_epoch in sorted(points, key=lambda point: point[:2]):
        yield Values({name: value}, step, time, of_epoch)
    yield from _records(run, series, found)
    for what in _UNKNOWN:
        if series.get(what):
            found.left_out[f"series of {what}"] += len(series[what])


def _records(run: Any, series: Mapping[str, list[Any]], found: SourceRun) -> Iterator[Record]:
    context_of = importlib.import_module("aim.storage.context").Context
    for what, (getter, kind, read) in _READERS.items():
        about = [(one["name"], one["context"]) for one in series.get(what, ())]
        for name, (key, context) in zip(_names_of(about), about, strict=True):
            sequence = getattr(run, getter)(key, context_of(context))
            for step, (value, _epoch, time) in sequence.data.items():
                values = value if isinstance(value, list) else [value]
                try:
                    for arguments in read(values):
                        yield Logged(kind, name, int(step), float(time), arguments)
                except UNREADABLE:
                    found.lost[f"unreadable {what}"] += 1


def _names_of(about: list[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Returns a name for each series, with the values of its context in front: "val/loss"."""
    short = ["/".join([*map(str, context.values()), name]) for name, context in about]
    whole = [
        "/".join([*(f"{key}={value}" for key, value in context.items()), name]) for name, context in about
    ]
    counts = Counter(short)
    return [one if counts[one] == 1 else other for one, other in zip(short, whole, strict=True)]


_Read = Callable[[list[Any]], list[dict[str, Any]]]


def _images(values: list[Any]) -> list[dict[str, Any]]:
    captions = [value.caption or "" for value in values]
    given = {"captions": captions} if any(captions) else {}
    return [{"images": [value.to_pil_image() for value in values], **given}]


def _sounds(values: list[Any]) -> list[dict[str, Any]]:
    return [sound_arguments(value.get().getvalue()) for value in values]


def _histograms(values: list[Any]) -> list[dict[str, Any]]:
    from events import BinnedValues

    found = []
    for value in values:
        counts, edges = value.to_np_histogram()
        found.append({"values": BinnedValues(counts.tolist(), edges.tolist())})
    return found


def _texts(values: list[Any]) -> list[dict[str, Any]]:
    return [{"text": value.data} for value in values]


_READERS: Mapping[str, tuple[str, Kind, _Read]] = {
    "images": ("get_image_sequence", IMAGE, _images),
    "audios": ("get_audio_sequence", AUDIO, _sounds),
    "distributions": ("get_distribution_sequence", HISTOGRAM, _histograms),
    "texts": ("get_text_sequence", TEXT, _texts),
}
_UNKNOWN = ("figures",)

AIM = Source("aim", "a folder with Aim's repository .aim", _claims, _runs, "aim")
