"""Values for `wandb.log` other than numbers: images, tables, sounds, files.

Each class takes the arguments of the class with its name in `wandb`, and keeps host values: a value on a
device is copied when the object is created, as in W&B.
"""

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, Self

import numpy as np
from PIL import Image as Pictures

from destinations.compat.arrays import videos_side_by_side
from destinations.media import class_color, to_numpy
from events import BinnedValues, LiteralName, Run, as_picture, as_table

from .elsewhere import missing, say_not_kept

__all__ = [
    "Artifact",
    "Audio",
    "Classes",
    "Histogram",
    "Html",
    "Image",
    "Object3D",
    "Table",
    "Value",
    "Video",
]

Classes = list

_DEFAULT_FPS = 4
_DIMENSIONS_OF_COLOR, _DIMENSIONS_OF_VIDEOS = 3, 5
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


class Value:
    """A value that is logged as a separate record.

    ```python
    wandb.log({"samples": [wandb.Html("<b>one</b>"), wandb.Html("<b>two</b>")]})
    ```
    """

    def put(self, run: Run, name: str, step: int) -> None:
        """Logs this value."""
        raise NotImplementedError

    @classmethod
    def put_all(cls, values: Sequence[Any], run: Run, name: str, step: int) -> None:
        """Logs several values of this class under one name."""
        for value in values:
            value.put(run, name, step)


class Image(Value):
    """A picture, with masks: `wandb.Image`.

    ```python
    wandb.log({"digit": wandb.Image(np.zeros((8, 8)), caption="nothing")})
    ```

    It is `(H, W)` or `(H, W, C)`, a tensor `(C, H, W)`, a PIL image, a figure of matplotlib or a path.
    Numbers in [0, 1] or [-1, 1] are scaled to [0, 255], others are clipped to it, unless `normalize` is
    False. `masks` are by name `{"mask_data": (H, W) integers, "class_labels": {1: "cat"}}`; `classes`, a list
    of `{"id": 1, "name": "cat"}`, are the labels of masks without. Boxes are not kept.
    """

    def __init__(
        self,
        data_or_path: Any,
        mode: str | None = None,
        caption: str | None = None,
        grouping: int | None = None,
        classes: Any = None,
        boxes: Any = None,
        masks: Mapping[str, Mapping[str, Any]] | None = None,
        file_type: str | None = None,
        normalize: bool = True,
    ) -> None:
        self.caption = caption
        if boxes:
            say_not_kept("boxes of an image")
        try:
            self.image = _picture(data_or_path, mode, normalize)
        except Exception:  # noqa: BLE001  # the logger says what is wrong with it
            self.image = data_or_path
        self.labels = {one["id"]: one["name"] for one in classes or ()}
        self.masks = {}
        for name, mask in (masks or {}).items():
            path = mask.get("path")
            self.masks[name] = to_numpy(mask["mask_data"] if path is None else Pictures.open(path))
            self.labels |= mask.get("class_labels") or {}

    def put(self, run: Run, name: str, step: int) -> None:
        self.put_all([self], run, name, step)

    @classmethod
    def put_all(cls, values: Sequence["Image"], run: Run, name: str, step: int) -> None:
        """Logs images as one record, or one record each if only some have a mask."""
        if len({frozenset(value.masks) for value in values}) > 1:
            return super().put_all(values, run, name, step)
        labels = {index: label for value in values for index, label in value.labels.items()}
        run.log_images(
            [value.image for value in values],
            name=name,
            step=step,
            channels_last=True,
            masks={mask: [value.masks[mask] for value in values] for mask in values[0].masks} or None,
            mask_class_labels=labels or None,
            captions=[value.caption or "" for value in values],
        )
        return None


def _picture(data: Any, mode: str | None, normalize: bool) -> Any:
    """Returns the data of an image as a PIL image."""
    if isinstance(data, Image | str | PurePath):
        return data.image if isinstance(data, Image) else Pictures.open(data).copy()
    picture = as_picture(data)
    if isinstance(picture, Pictures.Image):
        return picture.copy()
    array = to_numpy(data)
    if hasattr(data, "permute") and array.ndim == _DIMENSIONS_OF_COLOR:
        array = np.moveaxis(array, 0, -1)
    mode = mode or ("L" if array.squeeze().ndim < _DIMENSIONS_OF_COLOR else _MODES.get(array.shape[-1]))
    if normalize and array.min() >= -1 and array.max() <= 1:
        array = array * 255 if array.min() >= 0 else (array + 1) * 127.5
    pixels = (array.clip(0, 255) if normalize else array).astype(np.uint8)
    return Pictures.fromarray(pixels.squeeze() if pixels.ndim >= _DIMENSIONS_OF_COLOR else pixels).convert(
        mode
    )


class Histogram(Value):
    """A histogram of numbers in any shape, or of counts and edges: `wandb.Histogram`.

    ```python
    wandb.log({"weights": wandb.Histogram(np.arange(10.0), num_bins=5)})
    ```
    """

    def __init__(self, sequence: Any = None, np_histogram: Any = None, num_bins: int = 64) -> None:
        self.values = None if sequence is None else np.array(to_numpy(sequence))
        self.counted, self.num_bins = np_histogram, num_bins

    def put(self, run: Run, name: str, step: int) -> None:
        values: Any = self.values if self.counted is None else lambda: BinnedValues(*self.counted)
        run.log_histogram(values, name=name, step=step, bins=self.num_bins)


class Audio(Value):
    """A sound: `wandb.Audio`.

    ```python
    wandb.log({"tone": wandb.Audio(np.zeros(800), sample_rate=8000)})
    ```

    It is `(samples,)` or `(samples, channels)`, float in [-1, 1] or int16, or the path of a WAV file.
    """

    def __init__(self, data_or_path: Any, sample_rate: int | None = None, caption: str | None = None) -> None:
        is_path = isinstance(data_or_path, str | PurePath)
        self.sound = data_or_path if is_path else np.array(to_numpy(data_or_path).T)
        self.sample_rate = 44_100 if is_path and sample_rate is None else sample_rate
        self.caption = caption

    def put(self, run: Run, name: str, step: int) -> None:
        rate: Any = self.sample_rate
        run.log_audio(self.sound, rate, name=name, step=step, caption=self.caption)


class Video(Value):
    """A video: `wandb.Video`.

    ```python
    wandb.log({"walk": wandb.Video(np.zeros((4, 3, 16, 16), np.uint8), fps=4, format="gif")})
    ```

    It is frames `(T, C, H, W)`, uint8, or numbers in [0, 255] or [0, 1]; several videos `(N, T, C, H, W)`,
    shown side by side; or a file, or its path. Frames become a GIF, or with another format MP4.
    """

    def __init__(
        self,
        data_or_path: Any,
        caption: str | None = None,
        fps: float | None = None,
        format: str | None = None,
    ) -> None:
        self.video = data_or_path.read() if hasattr(data_or_path, "read") else data_or_path
        self.fps: float | None = None
        if not isinstance(self.video, str | bytes | PurePath):
            frames = to_numpy(self.video)
            frames = frames if frames.size and frames.max() <= 1 else frames.astype(np.uint8)
            self.video = (
                videos_side_by_side(frames) if frames.ndim == _DIMENSIONS_OF_VIDEOS else frames.copy()
            )
            self.fps = fps or _DEFAULT_FPS
        self.caption, self.format = caption, "gif" if format in {None, "gif"} else "mp4"

    def put(self, run: Run, name: str, step: int) -> None:
        run.log_video(self.video, self.fps, name=name, step=step, caption=self.caption, format=self.format)


class Object3D(Value):
    """Points, or a file with a model: `wandb.Object3D`.

    ```python
    wandb.log({"cube": wandb.Object3D(np.zeros((8, 3)))})
    ```

    Points are `(N, 3)`; `(N, 4)` with a class; `(N, 6)` with RGB in [0, 255]; or a dict with any of these as
    "points"; its boxes and vectors are not kept. A file or its path becomes an artifact.
    """

    def __init__(self, data_or_path: Any, caption: str | None = None, **more: Any) -> None:
        data = getattr(data_or_path, "name", data_or_path) if hasattr(data_or_path, "read") else data_or_path
        if isinstance(data, Mapping):
            if any(data.get(key) is not None and len(data[key]) for key in ("boxes", "vectors")):
                say_not_kept("boxes and vectors beside points")
            data = data["points"]
        self.points = data if isinstance(data, str | PurePath) else np.array(to_numpy(data))
        self.caption = caption

    @classmethod
    def from_numpy(cls, data: Any, **more: Any) -> Self:
        """Returns points."""
        return cls(data)

    @classmethod
    def from_file(cls, data_or_path: Any, file_type: str | None = None) -> Self:
        """Returns a file."""
        return cls(data_or_path)

    @classmethod
    def from_point_cloud(cls, points: Any, boxes: Any = None, vectors: Any = None, **more: Any) -> Self:
        """Returns points."""
        return cls({"points": points, "boxes": boxes, "vectors": vectors})

    def put(self, run: Run, name: str, step: int) -> None:
        if isinstance(self.points, str | PurePath):
            path = Path(self.points)
            run.upload_file(LiteralName(f"{name}/{step}{path.suffix}"), path, overwrite=True)
            return
        points, colors = self.points[:, :3], self.points[:, 3:]
        if colors.shape[1] == 1:
            colors = np.array([[*bytes.fromhex(class_color(int(one))[1:])] for one in colors[:, 0]])
        shown = colors.astype(np.uint8) if colors.size else None
        run.log_point_cloud(points, name=name, step=step, colors=shown, caption=self.caption)


class Html(Value):
    """A page, kept as a text: `wandb.Html`, of a text, a file, or the path of an ".html".

    ```python
    wandb.log({"answer": wandb.Html("<b>yes</b>")})
    ```
    """

    def __init__(self, data: Any, inject: bool = True, data_is_not_path: bool = False) -> None:
        is_path = not data_is_not_path and str(data).endswith(".html")
        self.html = data.read() if hasattr(data, "read") else Path(data).read_text() if is_path else data

    def put(self, run: Run, name: str, step: int) -> None:
        run.log_text(self.html, name=name, step=step)


class Table(Value):
    """Rows with named columns: `wandb.Table`, of rows, an array or a data frame.

    ```python
    table = wandb.Table(columns=["class", "score"])
    table.add_data("cat", 0.9)
    wandb.log({"scores": table})
    ```

    Images and other records in its cells are logged beside it, as "scores/image" of a column "image".
    """

    def __init__(
        self,
        columns: Sequence[Any] | None = None,
        data: Any = None,
        rows: Any = None,
        dataframe: Any = None,
        **more: Any,
    ) -> None:
        given: Any = next((one for one in (dataframe, data, rows) if one is not None), [])
        own_columns, given = as_table(None, given)
        columns = columns if own_columns is None else own_columns
        self.columns = list(("Input", "Output", "Expected") if columns is None else columns)
        self.data = [list(row) for row in given]

    def add_data(self, *data: Any) -> None:
        """Adds a row."""
        self.data.append(list(data))

    add_row = add_data

    def add_column(self, name: str, data: Any) -> None:
        """Adds a column, with a value for each row."""
        self.data = [[*row, value] for row, value in zip(self.data or [[] for _ in data], data, strict=True)]
        self.columns.append(name)

    def get_column(self, name: str, convert_to: str | None = None) -> Any:
        """Returns the values of a column, with `convert_to="numpy"` as an array."""
        values = [row[self.columns.index(name)] for row in self.data]
        return np.array(values) if convert_to == "numpy" else values

    def get_dataframe(self) -> Any:
        """Returns the table as a data frame of pandas."""
        import pandas as pd

        return pd.DataFrame(self.data, columns=self.columns)

    def put(self, run: Run, name: str, step: int) -> None:
        columns = [str(column) for column in self.columns]
        rows = [[_cell(value) for value in row] for row in self.data]
        run.log_table(columns, rows, name=name, step=step)
        for column, cells in zip(columns, zip(*self.data, strict=False), strict=False):
            records = [cell for cell in cells if isinstance(cell, Value)]
            if records:
                type(records[0]).put_all(records, run, f"{name}/{column}", step)


def _cell(value: Any) -> Any:
    return (getattr(value, "caption", None) or type(value).__name__) if isinstance(value, Value) else value


class Artifact:
    """Files under one name: `wandb.Artifact`; `Run.log_artifact` copies them into the run.

    ```python
    artifact = wandb.Artifact("weights", type="model")
    with artifact.new_file("note.txt") as file:
        file.write("of epoch 3")
    wandb.log_artifact(artifact)
    ```
    """

    def __init__(
        self, name: str, type: str = "", description: str | None = None, metadata: Any = None, **more: Any
    ) -> None:
        self.name, self.type, self.description, self.metadata = name, type, description, metadata
        self.aliases: list[str] = []
        self.version = "v0"
        self.files: dict[str, Path] = {}
        self.references: list[str] = []
        self.values: dict[str, Any] = {}
        self._made: Path | None = None

    def add_file(self, local_path: Any, name: str | None = None, **more: Any) -> None:
        """Adds a file."""
        self.files[name or Path(local_path).name] = Path(local_path)

    def add_dir(self, local_path: Any, name: str | None = None, **more: Any) -> None:
        """Adds the files below a folder."""
        for path in sorted(Path(local_path).rglob("*")):
            if path.is_file():
                self.files[(PurePath(name or "") / path.relative_to(local_path)).as_posix()] = path

    def add_reference(self, uri: str, name: str | None = None, **more: Any) -> None:
        """Keeps the address of a file stored elsewhere."""
        self.references.append(str(uri))

    def add(self, obj: Any, name: str, **more: Any) -> None:
        """Adds an image, a table or another record, which is logged with the artifact."""
        self.values[name] = obj

    @contextmanager
    def new_file(self, name: str, mode: str = "x", encoding: str | None = None) -> Iterator[Any]:
        """Opens a new file of the artifact for writing."""
        if self._made is None:
            self._made = Path(tempfile.mkdtemp())
            weakref.finalize(self, shutil.rmtree, self._made, ignore_errors=True)
        path = self._made / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode, encoding=encoding) as file:
            yield file
        self.files[name] = path

    def wait(self, timeout: float | None = None) -> Self:
        """Returns it: its files are in the run when `log_artifact` returns."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"an artifact in a run folder has no {name!r}: it is no artifact of a server.")


def __getattr__(name: str) -> Any:
    return missing(name, "wandb.data_types")
