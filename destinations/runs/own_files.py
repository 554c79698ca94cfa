"""Which files and folders a run writes, by their path in its folder, for code that deletes them."""

import re

from destinations.history.sessions import SESSIONS, SESSIONS_FOLDER
from destinations.kinds import indexes, record_folders
from destinations.run_directory.layout import (
    ABANDONED_FOLDER,
    EDITS,
    ENVIRONMENT,
    HEARTBEAT,
    HPARAMS,
    JOURNAL_FOLDER,
    PARTS_FOLDER,
    SIDECAR,
    SUMMARY,
    TIME_FOLDER,
    WRITER_NAME,
    WRITERS_FOLDER,
)

__all__ = ["FOLDERS", "KNOWN", "LOCK"]

_NAMES = {SIDECAR, SUMMARY, HEARTBEAT, HPARAMS, ENVIRONMENT, SESSIONS, EDITS, *indexes()}
# A named writer has a run folder of its own.
_OF_WRITER = rf"{WRITERS_FOLDER}/{WRITER_NAME.pattern}"
LOCK = re.compile(r"\.lock(\.rank\d+)?")
"""Names of lock files."""

KNOWN = re.compile(
    rf"({_OF_WRITER}/)?("
    + "|".join(
        (
            *map(re.escape, sorted(_NAMES)),
            r"(metrics|summary)(\.rank\d+)?\.(csv|json)",
            r"metrics(\.rank\d+)?\.(history|sums)\.jsonl",
            LOCK.pattern,
            rf"{ABANDONED_FOLDER}/\.?metrics(\.rank\d+)?\.step-?\d+(\.[0-9a-f]+\.csv|\.tmp)",
            rf"{TIME_FOLDER}/(rank|spans|slow)-\d+\.csv",
            rf"{SESSIONS_FOLDER}/\.?\d{{4,}}-[0-9a-f]+\.[\w.-]+",
            rf"{PARTS_FOLDER}/metrics(\.rank\d+)?/(\d+\.(csv|npy|parquet)|\.[\w.-]+\.tmp)",
            rf"{JOURNAL_FOLDER}/rank\d+/(\d+\.journal|position\.json|spare[\w.-]*|\.[\w.-]+\.tmp)",
            r"\.(sidecar|summary|hparams|environment|sessions|edits|metrics|reserve)[\w.-]*\.tmp",
        )
    )
    + ")"
)
"""Files of a run, temporary ones too (`uploads.disk.open_temporary`), but for media, tables and artifacts."""

FOLDERS = re.compile(
    rf"({_OF_WRITER}/)?("
    rf"({'|'.join(record_folders())})(/.*)?"
    rf"|{ABANDONED_FOLDER}|{JOURNAL_FOLDER}(/rank\d+)?|{TIME_FOLDER}|{SESSIONS_FOLDER}"
    rf"|{PARTS_FOLDER}(/metrics(\.rank\d+)?)?"
    rf")|{WRITERS_FOLDER}|{_OF_WRITER}"
)
"""Folders of a run."""
