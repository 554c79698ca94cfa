"""Reads `sessions.jsonl`, the sessions of a run, and finds the documents of each."""

import codecs
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uploads.disk import read_regular

from .sums import parse_line

__all__ = ["CHECKPOINTS", "SESSIONS", "SESSIONS_FOLDER", "read_lines", "read_sessions", "session_path"]

_log = logging.getLogger("destinations")

SESSIONS = "sessions.jsonl"
"""One line per session, oldest first; the last belongs to the process that writes."""

SESSIONS_FOLDER = "sessions"
"""Each session's hyperparameters, environment and checkpoints."""

CHECKPOINTS = "checkpoints.jsonl"
"""A session's document with a line for each checkpoint: how much the session had logged then."""


def read_sessions(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the lines of `sessions.jsonl`; none without a file. Damaged lines are left out and logged.

    Raises:
        OSError: the file can't be read.
    """
    return read_lines(run_dir)[0]


def read_lines(folder: Path, name: str = SESSIONS) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Returns the lines of `sessions.jsonl` or a similar file, and its damaged lines."""
    try:
        data = read_regular(folder / name).removeprefix(codecs.BOM_UTF8)
    except (FileNotFoundError, NotADirectoryError):
        return [], []
    lines: list[dict[str, Any]] = []
    damaged = []
    for line in filter(bytes.strip, data.splitlines(keepends=True)):
        try:
            found = parse_line(line)
        except ValueError as error:
            found = error
        if isinstance(found, dict):
            lines.append(found)
        else:
            damaged.append(line)
            _log.warning("%s has a damaged line, which is left out: %s", folder / name, found)
    return lines, damaged


def session_path(run_dir: Path, line: Mapping[str, Any], document: str) -> Path:
    """Returns the path of a session's document, such as `sessions/0002-1f6a0c3b9d42.hparams.yaml`.

    Raises:
        ValueError: the line is damaged, or an earlier version wrote it, which kept no documents of a session.
    """
    match line:
        case {"number": int(number), "session": str(session)} if session.isalnum():
            return run_dir / SESSIONS_FOLDER / f"{number:04d}-{session}.{document}"
    raise ValueError(f"session {line.get('session')!r} has no documents of its own.")
