"""The kinds of records of a run. Each is declared in a module of its own, from which all else is derived.

`KINDS` is the only list of them: the writer and the reader of a run folder, `send`, the page and the exported
site take theirs from it. Importing this package imports neither numpy nor Pillow nor torch.
"""

from typing import Any

from .artifacts import ARTIFACT, Artifact
from .audio import AUDIO, Audio
from .histograms import HISTOGRAM, Histogram
from .images import IMAGE, Image
from .kind import Kind
from .media import MEDIA_INDEX
from .point_clouds import POINT_CLOUD, PointCloud
from .tables import TABLE, TableEntry
from .texts import TEXT, Text
from .traces import TRACES, Trace
from .videos import VIDEO, Video

__all__ = ["KINDS", "RecordAccess", "indexes", "kind_of", "kind_of_line", "record_folders"]

KINDS = [IMAGE, AUDIO, VIDEO, POINT_CLOUD, TABLE, HISTOGRAM, TEXT, TRACES, ARTIFACT]
"""Every kind, in the order in which counts are shown, and records of the same time are replayed."""


def kind_of(**known: str) -> Kind:
    """Returns the kind that has one attribute, such as `plural="images"`.

    Raises:
        ValueError: there is none.
    """
    ((attribute, wanted),) = known.items()
    there = {getattr(kind, attribute): kind for kind in KINDS}
    if wanted not in there:
        raise ValueError(f"kind must be one of {', '.join(there)}, got {wanted!r}.")
    return there[wanted]


def kind_of_line(index: str, fields: dict[str, Any]) -> Kind | None:
    """Returns the kind of a line of an index; None for a medium of a type that is unknown."""
    kinds = [kind for kind in KINDS if kind.index == index]
    if index != MEDIA_INDEX:
        return kinds[0]
    return next((kind for kind in kinds if kind.name == fields.get("type")), None)


def indexes(*, with_files: bool = False) -> tuple[str, ...]:
    """Returns the names of the indexes; with `with_files`, of those whose lines name files."""
    return tuple(dict.fromkeys(kind.index for kind in KINDS if kind.folder or not with_files))


def record_folders() -> tuple[str, ...]:
    """Returns the names of the folders in that of a run that the files of records are in."""
    return tuple(dict.fromkeys(kind.folder for kind in KINDS if kind.folder))


class RecordAccess:
    """The methods of a run of the reader that return its records."""

    def records(self, kind: str, name: str | None = None, step: int | None = None) -> list[Any]:
        """Returns the records of any kind in the order of logging.

        Args:
            kind: "images", "audio", "videos", "point_clouds", "tables", "histograms", "texts", "traces" or
                "artifacts".
            name: None for all names.
            step: None for all steps.

        Raises:
            ValueError: there is no such kind.
            MetricNotFoundError: nothing has this name.
        """
        raise NotImplementedError

    def images(self, name: str | None = None, step: int | None = None) -> list[Image]:
        """Returns images in the order of logging; of all names and steps if None.

        Raises:
            MetricNotFoundError: nothing has this name.
        """
        return self.records("images", name, step)

    def audio(self, name: str | None = None, step: int | None = None) -> list[Audio]:
        """Returns audio clips; see `images`."""
        return self.records("audio", name, step)

    def videos(self, name: str | None = None, step: int | None = None) -> list[Video]:
        """Returns videos; see `images`."""
        return self.records("videos", name, step)

    def point_clouds(self, name: str | None = None, step: int | None = None) -> list[PointCloud]:
        """Returns point clouds; see `images`."""
        return self.records("point_clouds", name, step)

    def tables(self, name: str | None = None) -> list[TableEntry]:
        """Returns the metadata of tables in the order of logging; see `images`."""
        return self.records("tables", name)

    def histograms(self, name: str | None = None) -> list[Histogram]:
        """Returns histograms in the order of logging; see `images`."""
        return self.records("histograms", name)

    def texts(self, name: str | None = None) -> list[Text]:
        """Returns texts in the order of logging; see `images`."""
        return self.records("texts", name)

    def traces(self) -> list[Trace]:
        """Returns traces in the order of logging."""
        return self.records("traces")

    def artifacts(self, name: str | None = None) -> list[Artifact]:
        """Returns the files kept in the run; see `images`. Deleted ones are left out."""
        return self.records("artifacts", name)
