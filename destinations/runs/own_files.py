"""Which files and folders a run writes, by their path in its folder; who deletes asks here."""

import re

from destinations.kinds import indexes, record_folders
from destinations.run_directory.layout import (
    ABANDONED_FOLDER,
    EDITS,
    ENVIRONMENT,
    HEARTBEAT,
    HPARAMS,
    JOURNAL_FOLDER,
    PARTS_FOLDER,
    SESSIONS,
    SIDECAR,
    SUMMARY,
    TIME_FOLDER,
)

__all__ = ["FOLDERS", "KNOWN", "LOCK"]

_NAMES = {SIDECAR, SUMMARY, HEARTBEAT, HPARAMS, ENVIRONMENT, SESSIONS, EDITS, *indexes()}
LOCK = re.compile(r"\.lock(\.rank\d+)?")
"""Names of lock files."""

KNOWN = re.compile(
    "|".join(
        (
            *map(re.escape, sorted(_NAMES)),
            r"(metrics|summary)(\.rank\d+)?\.(csv|json)",
            LOCK.pattern,
            rf"{ABANDONED_FOLDER}/\.?metrics(\.rank\d+)?\.step-?\d+(\.[0-9a-f]+\.csv|\.tmp)",
            rf"{TIME_FOLDER}/(rank|spans|slow)-\d+\.csv",
            rf"{PARTS_FOLDER}/metrics(\.rank\d+)?/(\d+\.(csv|npy)|\.[\w.-]+\.tmp)",
            rf"{JOURNAL_FOLDER}/rank\d+/(\d+\.journal|position\.json|spare[\w.-]*|\.[\w.-]+\.tmp)",
            r"\.(sidecar|summary|hparams|environment|sessions|edits|metrics|reserve)[\w.-]*\.tmp",
        )
    )
)
"""Files of a run, temporary ones too (`uploads.disk.open_temporary`), but for media, tables and artifacts."""

FOLDERS = re.compile(
    rf"({'|'.join(record_folders())})(/.*)?"
    rf"|{ABANDONED_FOLDER}|{JOURNAL_FOLDER}(/rank\d+)?|{TIME_FOLDER}|{PARTS_FOLDER}(/metrics(\.rank\d+)?)?"
)
"""Folders of a run."""
