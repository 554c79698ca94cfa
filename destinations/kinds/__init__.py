"""The kinds of records of a run. Each kind is declared in its own module.

`KINDS` lists them all. The writer and the reader of a run folder, `send`, the page and the exported site are
derived from it. Importing this package imports neither numpy nor Pillow nor torch.
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
"""Every kind. Counts are shown in this order, and records with the same time are replayed in it."""


def kind_of(**known: str) -> Kind:
    """Returns the kind with a given attribute, such as `plural="images"`.

    Raises:
        ValueError: there is no such kind.
    """
    ((attribute, wanted),) = known.items()
    there = {getattr(kind, attribute): kind for kind in KINDS}
    if wanted not in there:
        raise ValueError(f"kind must be one of {', '.join(there)}, got {wanted!r}.")
    return there[wanted]


def kind_of_line(index: str, fields: dict[str, Any]) -> Kind | None:
    """Returns the kind of an index line; None for a medium of unknown type."""
    kinds = [kind for kind in KINDS if kind.index == index]
    if index != MEDIA_INDEX:
        return kinds[0]
    return next((kind for kind in kinds if kind.name == fields.get("type")), None)


def indexes(*, with_files: bool = False) -> tuple[str, ...]:
    """Returns the names of the indexes; with `with_files`, only of indexes whose lines name files."""
    return tuple(dict.fromkeys(kind.index for kind in KINDS if kind.folder or not with_files))


def record_folders() -> tuple[str, ...]:
    """Returns the names of the folders that hold the files of records, inside a run folder."""
    return tuple(dict.fromkeys(kind.folder for kind in KINDS if kind.folder))


class RecordAccess:
    """The methods of a run that return its records."""

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
        """Returns images in the order of logging; None selects all names or steps.

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
