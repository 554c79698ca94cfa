"""The kinds of records other than metrics: their methods, and what is checked, copied and delivered of each.

A new kind has a method in `RecordMethods` and an entry in `RECORD_KINDS` here, a method in
`destinations.base.LoggerDestination`, and a declaration in `destinations.kinds`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from events.redaction import redact, redact_table, redact_text

from . import checks
from .converters import as_table, safe_text

__all__ = ["RECORD_KINDS", "RecordKind", "RecordMethods", "RecordTools"]


@attrs.frozen
class RecordTools:
    """What a logger offers to `RecordKind.prepare`.

    Attributes:
        prefix: of all names, given by namespaces.
        refuse: takes the name and the error of a value that is left out of its record.
        to_host: returns a value in host memory; a tensor on a device as a copy that is pending.
        cell_to_host: the same for a cell of a table.
    """

    prefix: str
    refuse: checks.Refuse
    to_host: Callable[[Any], Any]
    cell_to_host: Callable[[Any], Any]


def _to_host(tools: RecordTools, **arguments: Any) -> dict[str, Any]:
    return {name: tools.to_host(value) for name, value in arguments.items()}


@attrs.frozen
class RecordKind:
    """Defines how one kind of record is checked and delivered.

    Attributes:
        prepare: checks the arguments of a call, by name, and returns the arguments of a destination's method,
            in its order; their values are in host memory or being copied there. Leaves out bad parts if it
            can, and otherwise raises `RecordError`.
        lazy: the arguments that may be functions; the first one if empty.
        keywords: arguments that a destination gets only if its method has them.
        can_wait: whether a `WriteRate` with `media=True` may delay it.
        reaches_parked: whether a parked destination gets it, because it comes only once.
        is_record: whether `Logger.log_record` takes it; the others have separate methods.
    """

    prepare: Callable[..., dict[str, Any]] = _to_host
    lazy: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ("caption",)
    can_wait: bool = True
    reaches_parked: bool = False
    is_record: bool = True


def _table(tools: RecordTools, columns: Any, rows: Any, name: str, **others: Any) -> dict[str, Any]:
    columns, rows = checks.valid_table(*as_table(columns, rows), name, tools.refuse)
    cells = [[tools.cell_to_host(value) for value in row] for row in rows]
    columns, cells = redact_table(columns, cells)
    return {"columns": columns, "rows": cells, "name": name, **others}


def _images(
    tools: RecordTools,
    images: Any,
    name: str,
    channels_last: bool,
    step: int,
    masks: Any,
    mask_class_labels: Any,
    use_table: bool,
    captions: Any,
) -> dict[str, Any]:
    labels = mask_class_labels and redact(
        {
            index: label if isinstance(label, str | int | float) else safe_text(label)
            for index, label in mask_class_labels.items()
        }
    )
    images, masks, captions = checks.valid_images(images, name, channels_last, masks, captions, tools.refuse)
    return {
        "images": tools.to_host(images),
        "name": name,
        "channels_last": channels_last,
        "step": step,
        "masks": None if masks is None else {key: tools.to_host(mask) for key, mask in masks.items()},
        "mask_class_labels": labels,
        "use_table": use_table,
        **({} if captions is None else {"captions": captions}),
    }


def _text(_: RecordTools, text: Any, name: str, step: int) -> dict[str, Any]:
    checks.check_text(text, name)
    return {"text": redact_text(text), "name": name, "step": step}


def _audio(tools: RecordTools, audio: Any, sample_rate: Any, name: str, **others: Any) -> dict[str, Any]:
    checks.check_audio(audio, sample_rate, name)
    return {"audio": tools.to_host(audio), "sample_rate": int(sample_rate), "name": name, **others}


def _video(tools: RecordTools, video: Any, fps: Any, name: str, format: Any, **others: Any) -> dict[str, Any]:
    checks.check_video(video, fps, name, format)
    encoding = {} if format == "mp4" else {"format": format}
    return {"video": tools.to_host(video), "fps": fps, "name": name, **others, **encoding}


def _histogram(tools: RecordTools, values: Any, name: str, step: int, bins: Any) -> dict[str, Any]:
    checks.check_histogram(values, bins, name)
    number = _auto_bins(values) if isinstance(bins, str) else bins
    return {"values": tools.to_host(values), "name": name, "step": step, "bins": tools.to_host(number)}


def _auto_bins(values: Any) -> int:
    shape = getattr(values, "shape", None)
    count = math.prod(shape) if shape is not None else len(values) if isinstance(values, list | tuple) else 1
    return math.ceil(math.log2(max(1, count))) + 1


def _point_cloud(tools: RecordTools, points: Any, colors: Any, name: str, **others: Any) -> dict[str, Any]:
    checks.check_point_cloud(points, colors, name)
    step = others.pop("step")
    points, colors = tools.to_host(points), tools.to_host(colors)
    return {"points": points, "name": name, "step": step, "colors": colors, **others}


def _traces(tools: RecordTools, traces: Any) -> dict[str, Any]:
    checks.check_traces(traces)
    return {"traces": {tools.prefix + key: value for key, value in redact(traces).items()}}


RECORD_KINDS = {
    "log_metrics": RecordKind(keywords=(), is_record=False),
    "log_hyperparameters": RecordKind(keywords=(), can_wait=False, reaches_parked=True, is_record=False),
    "log_table": RecordKind(_table, lazy=("columns", "rows")),
    "log_images": RecordKind(_images, lazy=("images", "masks", "captions"), keywords=("captions",)),
    "log_text": RecordKind(_text),
    "log_audio": RecordKind(_audio),
    "log_video": RecordKind(_video, keywords=("caption", "format")),
    "log_histogram": RecordKind(_histogram),
    "log_point_cloud": RecordKind(_point_cloud, lazy=("points", "colors")),
    "log_traces": RecordKind(_traces, can_wait=False),
    "upload_file": RecordKind(keywords=(), can_wait=False, reaches_parked=True, is_record=False),
}
"""The kinds of records, by the method that `Logger` and `Destination` have for them."""


class RecordMethods:
    """The methods of `Logger` and `Run` for tables, texts, traces and media."""

    def log_record(self, kind: str, arguments: Mapping[str, Any]) -> None:
        """Logs a record of any kind; see `Logger.log_record`."""
        raise NotImplementedError

    def log_table(
        self,
        columns: Any,
        rows: Any = None,
        name: str = "Table",
        step: int | None = None,
        *,
        caption: str | None = None,
    ) -> None:
        """Logs a table; secrets are redacted, in cells and in columns named like one.

        ```python
        run.log_table(["image", "guess"], [[12, "dog"]], "wrong")
        run.log_table({"image": [12], "guess": ["dog"]}, "wrong")
        run.log_table(dataframe, "wrong")
        ```

        Numbers, booleans, texts and None keep their types; times become texts.

        Args:
            columns: the column names; or the whole table: a data frame of pandas or polars, a table of
                pyarrow, a dict from column to values, or a list of dicts. Then the name may come second.
            rows: a list of values per row, one for each column; or a whole table, and then
                `columns` selects from it.
            name: the name of the table.
            step: as for `log_metrics`.
            caption: a text shown with it; secrets are redacted.

        Raises:
            EngineClosedError: the run is closed.
        """
        if isinstance(rows, str) and name == "Table":
            rows, name = None, rows
        values = {"columns": columns, "rows": rows, "name": name, "step": step, "caption": caption}
        self.log_record("table", values)

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: Mapping[str, Any] | None = None,
        mask_class_labels: Mapping[int, str] | None = None,
        use_table: bool = True,
        *,
        captions: Sequence[str] | Mapping[str, Any] | str | None = None,
    ) -> None:
        """Logs images.

        Args:
            images: one array or tensor, `(H, W)`, `(C, H, W)` or `(N, C, H, W)`, uint8 or float in [0, 1],
                with 1, 3 or 4 channels; a PIL image, a path, or a figure of matplotlib, which is drawn in
                this call; or a list of these. Floats outside [0, 1] are clipped; invalid images and
                unreadable files in a list are left out. A dict from name to any of these is logged as one
                record for each name.
            name: the name of the images; with a dict, the prefix of its names, unless it is the default.
            channels_last: the shapes are `(H, W, C)` and `(N, H, W, C)`.
            step: as for `log_metrics`.
            masks: by name, class indices for the images: an integer array `(H, W)` or `(N, H, W)`, or a list
                of them.
            mask_class_labels: the label of each class index.
            use_table: whether to show the images in a table, if the destination can.
            captions: a text for each image, "" for none; or a text for a single image; or a dict of these for
                a dict of images. Secrets are redacted.

        Raises:
            EngineClosedError: the run is closed.
        """
        values = {
            "images": images,
            "name": name,
            "channels_last": channels_last,
            "step": step,
            "masks": masks,
            "mask_class_labels": mask_class_labels,
            "use_table": use_table,
            "captions": captions,
        }
        self.log_record("images", values)

    def log_text(self, text: str, name: str = "Text", step: int | None = None) -> None:
        """Logs a text; secrets are redacted.

        Raises:
            EngineClosedError: the run is closed.
        """
        self.log_record("text", {"text": text, "name": name, "step": step})

    def log_audio(
        self,
        audio: Any,
        sample_rate: int,
        name: str = "Audio",
        step: int | None = None,
        *,
        caption: str | None = None,
    ) -> None:
        """Logs audio.

        Args:
            audio: `(samples,)` or `(channels, samples)`, float in [-1, 1] or int16; or the path or bytes of a
                WAV file.
            sample_rate: samples per second.
            name: the name of the audio.
            step: as for `log_metrics`.
            caption: a text shown with it; secrets are redacted.

        Raises:
            EngineClosedError: the run is closed.
        """
        values = {"audio": audio, "sample_rate": sample_rate, "name": name, "step": step, "caption": caption}
        self.log_record("audio", values)

    def log_video(
        self,
        video: Any,
        fps: float | None = None,
        name: str = "Video",
        step: int | None = None,
        *,
        caption: str | None = None,
        format: str = "mp4",
    ) -> None:
        """Logs a video.

        Args:
            video: frames `(T, C, H, W)`, uint8 or float in [0, 1]; or the path or bytes of a video file.
            fps: frames per second; needed for frames.
            name: the name of the video.
            step: as for `log_metrics`.
            caption: a text shown with it; secrets are redacted.
            format: how frames are encoded, "mp4" or "gif"; a video file keeps its own.

        Raises:
            EngineClosedError: the run is closed.
        """
        values = {
            "video": video,
            "fps": fps,
            "name": name,
            "step": step,
            "caption": caption,
            "format": format,
        }
        self.log_record("video", values)

    def log_histogram(
        self,
        values: Any,
        name: str = "Histogram",
        step: int | None = None,
        bins: int | str | Sequence[float] = 64,
    ) -> None:
        """Logs a histogram of values.

        Args:
            values: numbers in any shape; or `BinnedValues`, if only counts and edges are known.
            name: the name of the histogram.
            step: as for `log_metrics`.
            bins: a number of bins of equal width, increasing edges, or "auto": one more than the binary
                logarithm of the number of values (Sturges' rule). Ignored for `BinnedValues`.

        Raises:
            EngineClosedError: the run is closed.
        """
        self.log_record("histogram", {"values": values, "name": name, "step": step, "bins": bins})

    def log_point_cloud(
        self,
        points: Any,
        name: str = "Points",
        step: int | None = None,
        colors: Any = None,
        *,
        caption: str | None = None,
    ) -> None:
        """Logs a point cloud.

        Args:
            points: `(N, 3)`, or `(B, N, 3)` for several clouds; x, y, z.
            name: the name of the points.
            step: as for `log_metrics`.
            colors: `(N, 3)` or `(N, 4)`, RGB or RGBA, with B if the points have it; uint8 or float in [0, 1].
            caption: a text that belongs to them; secrets are redacted.

        Raises:
            EngineClosedError: the run is closed.
        """
        values = {"points": points, "name": name, "step": step, "colors": colors, "caption": caption}
        self.log_record("point_cloud", values)

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Logs debugging traces: values of any kind by name; secrets are redacted.

        ```python
        profiler.export_chrome_trace("trace.json.gz")
        run.log_traces({"profile": Path("trace.json.gz")})
        ```

        A `Path` is uploaded like a file, as `RUN/traces/NAME-baN-rankN.json.gz`. `destinations runs trace
        --profiles` joins the files of `torch.profiler` to the trace of the run.

        Raises:
            EngineClosedError: the run is closed.
        """
        self.log_record("traces", {"traces": traces})
