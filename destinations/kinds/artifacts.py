"""Artifacts: the files of `upload_file` below `artifacts/`. A line of `artifacts.jsonl` may delete one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from destinations.run_directory.layout import ARTIFACTS_FOLDER

from .kind import Kind
from .line import Line

__all__ = ["ARTIFACT", "ARTIFACTS_INDEX", "Artifact", "Deletion"]

ARTIFACTS_INDEX = "artifacts.jsonl"


@attrs.frozen
class Artifact:
    """A file passed to `upload_file` and kept in the run.

    Attributes:
        name: the remote name.
        step: the step of the call.
        time: the time of the call, in seconds since 1970.
        path: the absolute path of the file; a later artifact with the same name replaces it.
        size: bytes.
        sha256: the checksum in hexadecimal.
    """

    name: str
    step: int | None
    time: float | None
    path: Path
    size: int | None
    sha256: str | None


@attrs.frozen
class Deletion:
    """The deletion of an artifact's file: its name and size in bytes."""

    name: str
    size: int | None


def _parse(line: Line) -> Artifact | Deletion:
    call, size = line.call(), line.whole("size")
    if line.fields.get("is_deleted") is True:
        return Deletion(call["name"], size)
    return Artifact(**call, path=line.path(), size=size, sha256=line.text("sha256"))


def _replay(lines: Sequence[Line]) -> dict[str, Any]:
    (line,) = lines
    return {"file_path": line.file()}


ARTIFACT = Kind(
    name="artifact",
    index=ARTIFACTS_INDEX,
    parse=_parse,
    replay=_replay,
    method="upload_file",
    folder=ARTIFACTS_FOLDER,
)
