"""Videos: MP4 or GIF files below `media/`, or the files that were logged."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from destinations.run_directory.layout import MEDIA_FOLDER

from .kind import Kind, RecordOutput, Work
from .line import Line
from .media import MEDIA_INDEX, Medium, copy_medium, medium_fields

__all__ = ["VIDEO", "Video"]


@attrs.frozen
class Video(Medium):
    """A video; open `path` in a player.

    Attributes:
        fps: frames per second; None if unknown.
        format: the suffix of the file, without the dot.
    """

    fps: float | None = None
    format: str | None = None


def _write(
    _name: str, *, video: Any, fps: float | None, caption: str | None = None, format: str = "mp4"
) -> tuple[int, Work]:
    from destinations.copies import size_in_bytes
    from destinations.media import video_file

    given = Path(video).suffix if isinstance(video, str | Path) else ""
    copied = copy_medium(video)

    def work(output: RecordOutput) -> None:
        data, suffix = video_file(copied, fps, format)
        suffix, shape = given or suffix, None if isinstance(copied, bytes) else list(copied.shape)
        kind = suffix.removeprefix(".")
        output.add_medium(suffix, data, caption=caption, fps=fps, format=kind, shape=shape)

    return size_in_bytes(copied), work


def _parse(line: Line) -> Video:
    return Video(**medium_fields(line), fps=line.number("fps"), format=line.text("format"))


def _replay(lines: Sequence[Line]) -> dict[str, Any]:
    (line,) = lines
    return {"video": line.file(), "fps": line.fields.get("fps")}


VIDEO = Kind(
    name="video",
    index=MEDIA_INDEX,
    write=_write,
    parse=_parse,
    replay=_replay,
    copies={"video": copy_medium},
    shows="video",
    folder=MEDIA_FOLDER,
)
