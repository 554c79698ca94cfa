"""Folders of Lightning's `CSVLogger`: `metrics.csv`, and `hparams.yaml` if there are hyperparameters.

They have no id, status or heartbeat: the id is the path below the root, the status is "unknown", and the
modification time of `metrics.csv` is the heartbeat. `lightning.fabric.loggers.csv_logs` writes the format:
one line per call with the columns of all calls; missing cells are empty.
"""

import csv
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from destinations.run_directory.layout import HPARAMS
from destinations.runs.files import clean_text
from destinations.runs.record import sound_hparams
from uploads.disk import end_of_last_line, open_regular

if TYPE_CHECKING:
    from collections.abc import Mapping

    from destinations.runs.record import Scalar

__all__ = ["METRICS", "last_values", "read_lightning"]

METRICS = "metrics.csv"

_MOST_LOOKED_AT = 64 << 20
# Counters, not metrics.
_OWN_COLUMNS = frozenset({"step", "epoch", "time", "created_at"})


def read_lightning(run_dir: Path, path: str) -> dict[str, Any]:
    """Reads the folder; returns arguments of `RunRecord`.

    Args:
        run_dir: the folder.
        path: below the root; becomes the id.

    Raises:
        OSError: `metrics.csv` cannot be read.
    """
    # It imports numpy and PyYAML, which finding other runs does not need.
    from destinations.run_directory.documents import flat_hyperparameters, read_hparams

    hparams: Mapping[str, Scalar] = {}
    problem = None
    times = [run_dir.stat().st_mtime]
    metrics = run_dir / METRICS
    times.append(metrics.stat().st_mtime)
    try:
        times.append((run_dir / HPARAMS).stat().st_mtime)
        hparams = sound_hparams(flat_hyperparameters(read_hparams(run_dir / HPARAMS)))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:
        problem = f"{HPARAMS} cannot be read: {_first_line(error)}"
    try:
        summary = last_values(metrics)
    except (ValueError, csv.Error) as error:
        summary, problem = {}, f"{METRICS} cannot be read: {_first_line(error)}"
    return {
        "run_id": clean_text(path or run_dir.name),
        "kind": "lightning-csv",
        # Files were added when the run began, and rarely later.
        "created_at": min(times),
        "updated_at": times[1],
        "hparams": hparams,
        "summary": summary,
        "problem": problem,
    }


def last_values(path: Path) -> dict[str, float]:
    """Returns the last value of each column, read backwards from the end.

    Columns without a value in the last 64 MiB are left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a CSV in UTF-8.
    """
    from destinations.history.csv_file import CsvSnapshot
    from destinations.history.rows import parse_rows

    fd = open_regular(path)
    with os.fdopen(fd, "rb") as file:
        header = file.readline(_MOST_LOOKED_AT)
        names = next(csv.reader([header.decode("utf-8-sig")]), [])
        if not header.endswith(b"\n"):
            return {}
        wanted = {name for name in names if name and name not in _OWN_COLUMNS}
        found: dict[str, float] = {}
        looked_at = 0
        # A line without a line feed is being written.
        rows = CsvSnapshot(fd, header, end_of_last_line(fd, os.fstat(fd).st_size))
        for chunk in rows.chunks_from_end():
            for row in reversed(list(parse_rows(list(names), [chunk]))):
                for name in row.metrics.keys() & wanted:
                    found[name] = float(row.metrics[name])
                    wanted.remove(name)
            looked_at += len(chunk)
            if not wanted or looked_at >= _MOST_LOOKED_AT:
                break
    return {clean_text(name): found[name] for name in names if name in found}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
