"""The sessions of a run, as `sessions.jsonl` lists them, and where each keeps what it was started with."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uploads.disk import read_regular

__all__ = ["CHECKPOINTS", "SESSIONS", "SESSIONS_FOLDER", "read_lines", "read_sessions", "session_path"]

SESSIONS = "sessions.jsonl"
"""One line per session, oldest first; the last is that of the process that writes."""

SESSIONS_FOLDER = "sessions"
"""What each session was started with, its own hyperparameters and environment, and its checkpoints."""

CHECKPOINTS = "checkpoints.jsonl"
"""The document of a session that has a line for each checkpoint: how much it had logged then."""


def read_sessions(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the lines of `sessions.jsonl`; none if there is no such file. Damaged lines are skipped.

    Raises:
        OSError: the file cannot be read.
    """
    return read_lines(run_dir / SESSIONS)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a file of JSON lines; none if there is no such file.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        text = read_regular(path).decode("utf-8-sig", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return []
    lines = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict):
                lines.append(found)
    return lines


def session_path(run_dir: Path, line: Mapping[str, Any], document: str) -> Path:
    """Returns the path of a document of a session, such as `sessions/0002-1f6a0c3b9d42.hparams.yaml`.

    Raises:
        ValueError: the line is damaged, or an earlier version wrote it, which kept no documents of a session.
    """
    match line:
        case {"number": int(number), "session": str(session)} if session.isalnum():
            return run_dir / SESSIONS_FOLDER / f"{number:04d}-{session}.{document}"
    raise ValueError(f"session {line.get('session')!r} has no documents of its own.")
