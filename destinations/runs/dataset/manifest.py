"""The manifest of a dataset: it names the files of one consistent state.

```
manifests/00000007.json   the seventh state; the highest number is the present one
metrics/…parquet          points, sorted by metric, run, rank, step
tables/…parquet           runs, hparams, summary
```

A file is never changed. A manifest is put create-only, after everything that it names, so that of two writers
of one number one fails, and readers see all of a compaction or nothing. Files that neither the present
manifest nor the one before names are removed after that; whoever has the one before open can go on reading.
"""

import json
from typing import Any

import attrs

from destinations.runs.errors import DatasetError
from uploads import Store

__all__ = [
    "FORMAT_VERSION",
    "TABLES",
    "DataFile",
    "Manifest",
    "Part",
    "all_names",
    "latest_manifest",
    "manifest_name",
    "manifests",
]

FORMAT_VERSION = 1
TABLES = ("runs", "hparams", "summary")

_FOLDER = "manifests/"
_SUFFIX = ".json"


@attrs.frozen
class DataFile:
    """A Parquet file of points.

    Attributes:
        name: in the store.
        points: rows in it.
        size: bytes.
    """

    name: str
    points: int
    size: int


@attrs.frozen
class Part:
    """The points of some runs; nobody else has points of theirs.

    Attributes:
        id: stays the same while files are replaced.
        files: sorted one after the other.
    """

    id: str
    files: tuple[DataFile, ...]

    @property
    def points(self) -> int:
        """Rows in all files."""
        return sum(file.points for file in self.files)


@attrs.frozen
class Manifest:
    """One state of a dataset.

    Attributes:
        generation: its number; 0 is the empty dataset, of which there is no file.
        created_at: in seconds since 1970.
        runs: how many.
        parts: of the points.
        tables: file of each of `TABLES`.
    """

    generation: int = 0
    created_at: float = 0.0
    runs: int = 0
    parts: tuple[Part, ...] = ()
    tables: dict[str, str] = attrs.field(factory=dict)

    @property
    def points(self) -> int:
        """Points of all runs."""
        return sum(part.points for part in self.parts)

    @property
    def metric_files(self) -> tuple[str, ...]:
        """The names of all files of points."""
        return tuple(file.name for part in self.parts for file in part.files)

    def names(self) -> set[str]:
        """Returns every file that belongs to this state, the manifest itself among them."""
        return {manifest_name(self.generation), *self.metric_files, *self.tables.values()}

    def to_json(self) -> str:
        """Returns the content of the file."""
        return json.dumps({"format_version": FORMAT_VERSION, **attrs.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: bytes, name: str) -> "Manifest":
        """Reads what `to_json` wrote.

        Raises:
            DatasetError: it is something else, or of a later version.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            version = data["format_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(
                f"{name} must be the manifest of a dataset, got something else: {error}."
            ) from error
        if version != FORMAT_VERSION:
            raise DatasetError(
                f"{name} has format version {version!r}, not {FORMAT_VERSION}. Update training-destinations."
            )
        try:
            parts = tuple(
                Part(part["id"], tuple(DataFile(**file) for file in part["files"])) for part in data["parts"]
            )
            return cls(
                int(data["generation"]),
                float(data["created_at"]),
                int(data["runs"]),
                parts,
                dict(data["tables"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DatasetError(
                f"{name} must be the manifest of a dataset, got a damaged one: {error}."
            ) from error


def manifest_name(generation: int) -> str:
    """Returns the name of a manifest."""
    return f"{_FOLDER}{generation:08d}{_SUFFIX}"


def manifests(store: Store) -> list[int]:
    """Returns the numbers of the manifests that there are, lowest first."""
    numbers = [found.name.removeprefix(_FOLDER).removesuffix(_SUFFIX) for found in store.list(_FOLDER)]
    return sorted(int(number) for number in numbers if number.isdecimal())


def latest_manifest(store: Store) -> Manifest:
    """Returns the present state; the empty one where there is no dataset."""
    generations = manifests(store)
    return read_manifest(store, generations[-1]) if generations else Manifest()


def read_manifest(store: Store, generation: int) -> Manifest:
    """Returns a state."""
    name = manifest_name(generation)
    return Manifest.from_json(b"".join(store.get(name)), store.uri(name))


def all_names(store: Store) -> list[str]:
    """Returns the names of all files of a dataset, also of those that no manifest names."""
    return [found.name for prefix in (_FOLDER, "metrics/", "tables/") for found in store.list(prefix)]
