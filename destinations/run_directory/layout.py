"""What a run folder holds: the names of its files, and what the records in them look like.

The one module that writer and readers share. It imports neither torch nor numpy, and touches no file by itself.
docs/run-directory.md describes the same for people.
"""

import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any

import attrs

from uploads.disk import read_regular

__all__ = [
    "ABANDONED_FOLDER",
    "ARTIFACTS_FOLDER",
    "ARTIFACTS_INDEX",
    "EDITS",
    "ENVIRONMENT",
    "FORMAT_VERSION",
    "HEARTBEAT",
    "HISTOGRAMS_INDEX",
    "HPARAMS",
    "JOURNAL_FOLDER",
    "MEDIA_FOLDER",
    "MEDIA_INDEX",
    "OWN_COLUMNS",
    "POSITION",
    "SEGMENT_SUFFIX",
    "SESSIONS",
    "SIDECAR",
    "SUMMARY",
    "TABLES_FOLDER",
    "TABLES_INDEX",
    "TERMINAL_STATUSES",
    "TEXTS_INDEX",
    "TRACES_INDEX",
    "CsvState",
    "Position",
    "column_of",
    "journal_path",
    "label_name",
    "lock_name",
    "metrics_name",
    "safe_name",
    "segment_number",
    "segment_path",
    "segment_paths",
    "summary_name",
]

FORMAT_VERSION = 1

SIDECAR = "sidecar.json"
SUMMARY = "summary.json"
HEARTBEAT = "heartbeat"
HPARAMS = "hparams.yaml"
ENVIRONMENT = "environment.json"
SESSIONS = "sessions.jsonl"
# What the user says of the run; the writer of the run never touches it.
EDITS = "edits.json"
MEDIA_FOLDER = "media"
MEDIA_INDEX = "media.jsonl"
TABLES_FOLDER = "tables"
TABLES_INDEX = "tables.jsonl"
HISTOGRAMS_INDEX = "histograms.jsonl"
TEXTS_INDEX = "texts.jsonl"
TRACES_INDEX = "traces.jsonl"
ARTIFACTS_FOLDER = "artifacts"
ARTIFACTS_INDEX = "artifacts.jsonl"
ABANDONED_FOLDER = "abandoned"
JOURNAL_FOLDER = "journal"
POSITION = "position.json"
SEGMENT_SUFFIX = ".journal"

TERMINAL_STATUSES = frozenset({"completed", "failed", "failed to write", "interrupted", "preempted"})

# The columns that every row has; they come first in a file that this project began.
OWN_COLUMNS = ("step", "epoch", "time")

_MAX_NAME_BYTES = 120
_SEGMENT = re.compile(rf"[0-9]+{re.escape(SEGMENT_SUFFIX)}")
_UNSAFE = re.compile(r"[^\w .,=+@()\[\]-]")


def metrics_name(rank: int) -> str:
    """Returns the name of the CSV of a rank: `metrics.csv` for rank 0, `metrics.rank3.csv` for rank 3."""
    return "metrics.csv" if rank == 0 else f"metrics.rank{rank}.csv"


def summary_name(rank: int) -> str:
    """Returns the name of the summary of a rank."""
    return SUMMARY if rank == 0 else f"summary.rank{rank}.json"


def lock_name(rank: int) -> str:
    """Returns the name of the file that the writer of a rank holds locked."""
    return ".lock" if rank == 0 else f".lock.rank{rank}"


def journal_path(run_dir: Path, rank: int) -> Path:
    """Returns the folder of the rows of a rank that its CSV does not have yet."""
    return run_dir / JOURNAL_FOLDER / f"rank{rank}"


def segment_path(journal: Path, number: int) -> Path:
    """Returns the path of one segment; the numbers rise, and a segment is complete when there is a higher one."""
    return journal / f"{number:08d}{SEGMENT_SUFFIX}"


def segment_number(path: Path) -> int:
    """Returns the number of a segment."""
    return int(path.name.removesuffix(SEGMENT_SUFFIX))


def segment_paths(journal: Path) -> list[Path]:
    """Returns the segments that are there, oldest first."""
    try:
        paths = [path for path in journal.iterdir() if _SEGMENT.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(paths, key=segment_number)


def column_of(key: str) -> str:
    """Returns the column of a metric: its name, but for "step" and "time", which are the row's own.

    A metric called "epoch" goes into the column of that name, as Lightning has it. What UTF-8 cannot hold, and NUL, is
    written as an escape.
    """
    if key in {"step", "time"}:
        return f"metrics/{key}"
    return key.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")


def safe_name(name: str) -> str:
    """Returns the name of a record as one path component; "/" becomes "__", as stable-pretraining has it.

    Raises:
        ValueError: the name is empty, absolute, or has a component "..".
    """
    parts = re.split(r"[/\\]", name)
    if not name.strip() or ".." in parts or not parts[0] or re.match(r"[A-Za-z]:", name) or "\0" in name:
        raise ValueError(
            f'name must be one that stays inside the run\'s folder, got {name!r}. Leave out "..", a leading "/" and NUL.'
        )
    text = _UNSAFE.sub(lambda match: f"%{ord(match[0]):02X}", "__".join(parts))
    text = f"%2E{text[1:]}" if text.startswith(".") else text
    if len(text.encode()) > _MAX_NAME_BYTES:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
        text = f"{text.encode()[: _MAX_NAME_BYTES - 13].decode(errors='ignore')}-{digest}"
    return text


def label_name(name: str) -> str:
    """Returns any label as one path component, which never leads out of a folder."""
    text = "/".join("%2E%2E" if part == ".." else part for part in re.split(r"[/\\]", name))
    text = text.replace("\0", "%00").replace(":", "%3A").lstrip("/")
    return safe_name(text).replace("%25", "%") if text.strip() else "_"


@attrs.frozen
class CsvState:
    """Up to where one version of a CSV counts, and where the journal goes on from there.

    What the file holds beyond `csv_bytes` was being written when the writer ended; its rows are in the journal.
    """

    header_crc32: int
    csv_bytes: int
    segment: int
    offset: int

    def fits(self, header: bytes, size: int) -> bool:
        """Says whether a file with this header line and of this size is that version."""
        return self.header_crc32 == zlib.crc32(header) and size >= self.csv_bytes


@attrs.frozen
class Position:
    """The content of `position.json`: which rows the CSV has; all others are in the journal.

    There are two states while a CSV is being replaced by another version of itself: the one before, then the one after.
    They differ in the header, or else the one after is shorter than the one before says it is. `generation` counts the
    replacements.
    """

    generation: int
    states: tuple[CsvState, ...]

    def state_of(self, header: bytes, size: int) -> CsvState | None:
        """Returns the state that a file with this header line and of this size is in, or None."""
        return next((state for state in self.states if state.fits(header, size)), None)

    def to_json(self) -> str:
        """Returns the content of the file."""
        return json.dumps({"format_version": FORMAT_VERSION, **attrs.asdict(self)})

    @classmethod
    def read(cls, path: Path) -> "Position | None":
        """Reads the file; None where there is none, or it cannot be understood."""
        try:
            data: dict[str, Any] = json.loads(read_regular(path))
            states = tuple(CsvState(**state) for state in data["states"])
            numbers = [data["generation"], *(value for state in states for value in attrs.astuple(state))]
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, RecursionError):
            return None
        # Whatever else it says is damage.
        is_sound = states and all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)
        return cls(data["generation"], states) if is_sound else None
