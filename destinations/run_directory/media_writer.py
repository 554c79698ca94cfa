"""Writes everything but metrics: media, tables, texts, histograms, traces and files, each with an index line.

The `log_*` methods copy in the training thread; a lane encodes and writes.
"""

import contextlib
import csv
import errno
import hashlib
import io
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from destinations.background import Lane, RetryLaterError
from destinations.copies import size_in_bytes
from destinations.media import (
    copy_value,
    histogram_record,
    iter_images,
    iter_masks,
    iter_point_clouds,
    mask_png,
    overlay_png,
    ply_bytes,
    png_bytes,
    to_numpy,
    video_file,
    wav_bytes,
)
from events import BinnedValues, RecordError, safe_text
from uploads.disk import (
    append_line,
    is_open_file,
    open_regular,
    open_temporary,
    read_regular,
    replace_file,
)

from .folder import HeldFolder, with_user_paths
from .layout import (
    ARTIFACTS_FOLDER,
    ARTIFACTS_INDEX,
    HISTOGRAMS_INDEX,
    MEDIA_FOLDER,
    MEDIA_INDEX,
    TABLES_FOLDER,
    TABLES_INDEX,
    TEXTS_INDEX,
    TRACES_INDEX,
    append_record,
    label_name,
    safe_name,
)

__all__ = ["FileKeeping", "MediaWriter"]

FileKeeping = Literal["auto", "copy", "link", "off"]

_INDICES_KEPT = 1000


class _Index:
    """One index: lines that another program takes out of it are put back from the open file, else counted.

    Args:
        folder: the folder of the run.
        name: of the index.
    """

    def __init__(self, folder: HeldFolder, name: str) -> None:
        self._folder = folder
        self._path = folder.path / name
        # The lines of these have files, which go with the folder.
        self.group = {ARTIFACTS_INDEX: "files"}.get(name, "media")
        self._has_files = name in {MEDIA_INDEX, TABLES_INDEX, ARTIFACTS_INDEX}
        self._fd = -1
        self._renewals = folder.renewals
        self._start = self._size = self._lines = 0

    def append(self, record: dict[str, Any]) -> None:
        """Appends a line."""
        if self._fd < 0:
            self._renewals = self._folder.renewals
            with contextlib.suppress(FileNotFoundError):
                self._start = self._path.stat().st_size
        append_record(self._path, record)
        if self._fd < 0:
            # Held, so that its lines can be read after it was deleted.
            self._fd = open_regular(self._path)
        self._size = os.fstat(self._fd).st_size
        self._lines += 1

    def restore(self) -> int:
        """Puts missing lines of this session back, and returns how many cannot be."""
        if self._fd < 0:
            return 0
        is_there = is_open_file(self._fd)(str(self._path))
        if is_there and os.fstat(self._fd).st_size == self._size:
            return 0
        if self._has_files and self._renewals != self._folder.renewals:
            return self._begin_again(self._lines)
        lines = self._own_lines()
        lost = max(0, self._lines - len(lines))
        if not is_there:
            try:
                present = set(read_regular(self._path).splitlines())
            except FileNotFoundError:
                start = os.pread(self._fd, self._start, 0)
                replace_file(self._path, start + b"".join(line + b"\n" for line in lines))
            else:
                for line in lines:
                    if line not in present:
                        append_line(self._path, line.decode())
        return self._begin_again(lost)

    def _own_lines(self) -> list[bytes]:
        data = os.pread(self._fd, max(0, self._size - self._start), self._start)
        return [line for line in data.split(b"\n")[:-1] if line.strip(b"\0")]

    def _begin_again(self, lost: int) -> int:
        self.close()
        self._start = self._size = self._lines = 0
        return lost

    def close(self) -> None:
        """Closes the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


@attrs.define(eq=False, slots=False, repr=False)
class MediaWriter:
    """The media writer of one run.

    Args:
        folder: the folder of the run.
        lane: the background thread.
        clock: the current time in seconds since 1970.
        on_deleted: called when the folder turns out to be deleted, to have it recreated.
    """

    _folder: HeldFolder
    _lane: Lane
    _clock: Callable[[], float]
    _on_deleted: Callable[[], object]

    def __attrs_post_init__(self) -> None:
        self._run_dir = self._folder.path
        self._accepted: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        """Counts of accepted "media" and "files" that were not written; complete after `count_losses`."""
        # The next index by folder, step and suffix, newest last; a cache of what the folder shows.
        self._next_indices: dict[tuple[Path, int, str], int] = {}
        self._indexes: dict[str, _Index] = {}
        self.bytes_written = 0
        self.files_written = 0

    def log_images(
        self,
        images: Any,
        name: str,
        step: int,
        channels_last: bool,
        masks: dict[str, Any] | None,
        mask_class_labels: dict[int, str] | None,
        captions: Sequence[str] = (),
    ) -> None:
        """Writes each image, and each mask with its overlay, as PNG."""
        checked_name(name)
        images = copy_value(images)
        masks = {key: copy_value(mask) for key, mask in (masks or {}).items()}
        for mask_name in masks:
            checked_name(mask_name)
        labels = None
        if mask_class_labels is not None:
            labels = {str(key): label for key, label in mask_class_labels.items()}
        texts = list(captions)

        def work(at: float = self._clock()) -> None:
            by_mask = {key: list(iter_masks(mask)) for key, mask in masks.items()}
            for index, pixels in enumerate(iter_images(images, channels_last)):
                caption = texts[index] if index < len(texts) else None
                more: dict[str, Any] = {"caption": caption or None, "shape": list(pixels.shape)}
                if pixels.value_range is not None:
                    more["value_range"] = list(pixels.value_range)
                if by_mask:
                    more["masks"] = {
                        key: self._mask(pixels.array, found[index], f"{name}/{key}", step)
                        for key, found in by_mask.items()
                    }
                    more["mask_class_labels"] = labels
                self._write_medium("image", name, step, index, at, ".png", png_bytes(pixels.array), **more)

        self._put(work, size_in_bytes([images, masks]), f"image {name!r}")

    def _mask(self, pixels: Any, mask: Any, name: str, step: int) -> dict[str, str]:
        return {
            "path": self._write_free(MEDIA_FOLDER, name, step, ".mask.png", mask_png(mask)),
            "overlay": self._write_free(MEDIA_FOLDER, name, step, ".overlay.png", overlay_png(pixels, mask)),
        }

    def log_audio(
        self, audio: Any, sample_rate: int, name: str, step: int, caption: str | None = None
    ) -> None:
        """Writes audio as WAV; encoded bytes and files are kept as they are."""
        checked_name(name)
        copied = copy_value(audio)
        shape = None if isinstance(copied, bytes) else list(copied.shape)

        def work(at: float = self._clock()) -> None:
            data = wav_bytes(copied, sample_rate)
            more = {"caption": caption, "sample_rate": sample_rate, "shape": shape}
            self._write_medium("audio", name, step, 0, at, ".wav", data, **more)

        self._put(work, size_in_bytes(copied), f"sound {name!r}")

    def log_video(
        self,
        video: Any,
        fps: float | None,
        name: str,
        step: int,
        caption: str | None = None,
        format: str = "mp4",
    ) -> None:
        """Writes frames as MP4 or GIF; encoded bytes and files are kept as they are."""
        checked_name(name)
        given = Path(video).suffix if isinstance(video, str | Path) else ""
        copied = copy_value(video)

        def work(at: float = self._clock()) -> None:
            data, suffix = video_file(copied, fps, format)
            suffix, shape = given or suffix, None if isinstance(copied, bytes) else list(copied.shape)
            more = {"caption": caption, "fps": fps, "format": suffix.removeprefix("."), "shape": shape}
            self._write_medium("video", name, step, 0, at, suffix, data, **more)

        self._put(work, size_in_bytes(copied), f"video {name!r}")

    def log_point_cloud(
        self, points: Any, name: str, step: int, colors: Any, caption: str | None = None
    ) -> None:
        """Writes each point cloud as PLY."""
        checked_name(name)
        points, colors = copy_value(points), None if colors is None else copy_value(colors)

        def work(at: float = self._clock()) -> None:
            for index, (cloud, shades) in enumerate(iter_point_clouds(points, colors)):
                more = {"caption": caption, "shape": list(cloud.shape), "has_colors": shades is not None}
                data = ply_bytes(cloud, shades)
                self._write_medium("point_cloud", name, step, index, at, ".ply", data, **more)

        self._put(work, size_in_bytes([points, colors]), f"point cloud {name!r}")

    def log_histogram(self, values: Any, name: str, step: int, bins: "int | Sequence[float]") -> None:
        """Appends counts, edges and moments to the index."""
        if not isinstance(values, BinnedValues):
            values = to_numpy(values).copy()
            if values.dtype.kind not in "biuf":
                raise RecordError(f"histogram {name!r} needs numbers, got dtype {values.dtype}.")

        def work(at: float = self._clock()) -> None:
            record = {"step": step, "name": name, "time": at, **histogram_record(values, bins)}
            self._index(HISTOGRAMS_INDEX).append(record)

        self._put(work, getattr(values, "nbytes", 0), f"histogram {name!r}")

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str, step: int, caption: str | None = None
    ) -> None:
        """Writes a table as CSV, and its column types to the index; the name may be any string."""
        rows = [list(row) for row in rows]

        def work(at: float = self._clock()) -> None:
            text = io.StringIO(newline="")
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([_cell(value) for value in row] for row in rows)
            data = text.getvalue().encode("utf-8", "backslashreplace")
            record = {
                "step": step,
                "name": name,
                "time": at,
                "path": self._write_free(TABLES_FOLDER, name, step, ".csv", data),
                "size": len(data),
                "rows": len(rows),
                "columns": [
                    {"name": column, "type": _column_type(row[index] for row in rows)}
                    for index, column in enumerate(columns)
                ],
            }
            self._index(TABLES_INDEX).append(record if caption is None else {**record, "caption": caption})

        self._put(work, 64 * len(rows) * (len(columns) + 1), f"table {name!r}")

    def log_text(self, text: str, name: str, step: int) -> None:
        """Appends a text to the index."""
        record = {"step": step, "name": name, "time": self._clock(), "text": text}
        self._put(lambda: self._index(TEXTS_INDEX).append(record), len(text), f"text {name!r}")

    def log_traces(self, traces: dict[str, Any], step: int) -> None:
        """Appends traces to the index; values that JSON lacks are written as text."""
        record = {"step": step, "time": self._clock(), "traces": dict(traces)}
        self._put(lambda: self._index(TRACES_INDEX).append(record), 0, "trace")

    def keep_file(
        self, source: Path, remote_name: str, *, overwrite: bool, keeping: FileKeeping, step: int
    ) -> None:
        """Copies or links a file into `artifacts/` before it returns; the lane hashes it later.

        Raises:
            RecordError: the name leads out of the folder.
            FileExistsError: the file exists, and overwrite is False.
        """
        target = artifact_path(self._run_dir, remote_name)
        if target.exists() and not overwrite:
            raise FileExistsError(
                f"artifact {remote_name!r} exists already. Pass overwrite=True to replace it."
            )
        try:
            self._copy_file(source, target, keeping)
        except OSError as error:
            self.lost["files"] += 1
            self._accepted["files"] += 1
            with_user_paths(error, self._folder.where)
            raise

        def work(at: float = self._clock()) -> None:
            with target.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = target.stat().st_size
            self.bytes_written += size
            path = target.relative_to(self._run_dir).as_posix()
            self._index(ARTIFACTS_INDEX).append(
                {"step": step, "name": remote_name, "time": at, "path": path, "size": size, "sha256": digest}
            )

        self._put(work, 0, f"artifact {remote_name!r}", "files")

    def delete_file(self, remote_name: str, *, step: int, with_folder: bool = False) -> None:
        """Removes a file from `artifacts/` in the lane, and says so in the index.

        Args:
            remote_name: of the file.
            step: for the index.
            with_folder: whether its folder goes too, if nothing else is in it.

        Raises:
            RecordError: the name leads out of the folder.
        """
        target = artifact_path(self._run_dir, remote_name)
        path = target.relative_to(self._run_dir).as_posix()

        def work(at: float = self._clock()) -> None:
            try:
                size = target.stat().st_size
                target.unlink()
            except FileNotFoundError:
                return
            record = {"step": step, "name": remote_name, "time": at, "path": path, "size": size}
            self._index(ARTIFACTS_INDEX).append({**record, "is_deleted": True})
            if with_folder:
                with contextlib.suppress(OSError):
                    target.parent.rmdir()

        self._put(work, 0, f"deletion of artifact {remote_name!r}", "files")

    def _copy_file(self, source: Path, target: Path, keeping: FileKeeping) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        fd, name = open_temporary(target)
        os.close(fd)
        temporary = Path(name)
        try:
            if keeping == "link":
                temporary.unlink()
                os.link(source, temporary)
            else:
                shutil.copyfile(source, temporary)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def count_losses(self) -> None:
        """Counts everything not written as lost, once the lane has stopped."""
        for index in self._indexes.values():
            with contextlib.suppress(OSError):
                self._restore(index)
            index.close()
        self.lost.update(self._accepted - self._done - self.lost)

    # Files.

    def _index(self, name: str) -> _Index:
        """Returns an index with the lines that were written to it."""
        if name not in self._indexes:
            self._indexes[name] = _Index(self._folder, name)
        self._restore(self._indexes[name])
        return self._indexes[name]

    def _restore(self, index: _Index) -> None:
        gone = index.restore()
        if gone:
            # They were written, and are not there any more.
            self._done[index.group] -= gone
            self.lost[index.group] += gone

    def _put(self, work: Callable[[], object], size: int, kind: str, group: str = "media") -> None:
        def counted() -> None:
            if self._folder.is_deleted:
                self._on_deleted()
                raise RetryLaterError("the run folder was deleted") from FileNotFoundError(
                    errno.ENOENT, "the run folder was deleted"
                )
            try:
                work()
            except Exception as error:
                self.lost[group] += 1
                with_user_paths(error, self._folder.where)
                raise
            self._done[group] += 1

        self._accepted[group] += 1
        if not self._lane.put(counted, size=size, kind=kind):
            self.lost[group] += 1

    def _write_medium(
        self, kind: str, name: str, step: int, index: int, at: float, suffix: str, data: bytes, **more: Any
    ) -> None:
        """Writes a file and its index line, whose first fields are those of stable-pretraining."""
        path = self._write_free(MEDIA_FOLDER, name, step, suffix, data)
        record = {"step": step, "tag": name, "type": kind, "path": path, "name": name, "index": index}
        self._index(MEDIA_INDEX).append({**record, "time": at, "size": len(data), **more})

    def _write_free(self, folder: str, name: str, step: int, suffix: str, data: bytes) -> str:
        """Writes a file under the first free name; earlier files are never overwritten."""
        path = self._free_path(folder, name, step, suffix)
        replace_file(path, data)
        self.bytes_written += len(data)
        self.files_written += 1
        return path.relative_to(self._run_dir).as_posix()

    def _free_path(self, folder: str, name: str, step: int, suffix: str) -> Path:
        parent = self._run_dir / folder / label_name(name)
        key = (parent, step, suffix)
        index = self._next_indices.pop(key, 0)
        while os.path.lexists(parent / f"{step:08d}_{index}{suffix}"):
            index += 1
        self._next_indices[key] = index + 1
        if len(self._next_indices) > _INDICES_KEPT:
            del self._next_indices[next(iter(self._next_indices))]
        return parent / f"{step:08d}_{index}{suffix}"


def artifact_path(run_dir: Path, remote_name: str) -> Path:
    """Returns the path of an artifact.

    Raises:
        RecordError: the name leads out of the folder.
    """
    parts = remote_name.split("/")
    if (
        not remote_name
        or "\0" in remote_name
        or any(part in {"", ".", ".."} for part in parts)
        or "\\" in remote_name
    ):
        raise RecordError(f'artifact name must be a relative path without "..", got {remote_name!r}.')
    return run_dir.joinpath(ARTIFACTS_FOLDER, *parts)


def checked_name(name: str) -> str:
    """Returns a name as one path component.

    Raises:
        RecordError: the name leads out of the folder.
    """
    try:
        return safe_name(name)
    except ValueError as error:
        raise RecordError(str(error)) from None


def _cell(value: Any) -> Any:
    """Returns a value for the CSV module: numbers and strings unchanged, other types as text."""
    if hasattr(value, "getbands"):  # An image of PIL.
        return f"{value.mode} image {value.size[0]}x{value.size[1]}"
    return value if value is None or isinstance(value, str | int | float) else safe_text(value)


def _column_type(values: Iterable[Any]) -> str:
    """Returns the narrowest type that holds all values: bool, int, float or str; None is ignored."""
    kinds = {type(value) for value in values if value is not None}
    for name, allowed in (("bool", {bool}), ("int", {bool, int}), ("float", {bool, int, float})):
        if kinds and kinds <= allowed:
            return name
    return "str" if kinds else "empty"
