"""Imports runs of other loggers as run folders, with the readers of the loggers' own packages.

```python
from destinations.runs.imports import import_runs

report = import_runs("logs", "runs")
```

Each source is a module that declares a `Source`; `SOURCES` lists them all.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from destinations.runs.move.ledger import SendingError
from destinations.runs.move.stream import MoveReport, Progress, move
from destinations.trackers.tracker import require_package

from .aim import AIM
from .comet import COMET
from .loggers import LOGGERS
from .mlflow import MLFLOW
from .neptune import NEPTUNE
from .source import ColumnsError, Source, SourceError, UnreadableError
from .tables import CHART, TABLE
from .tensorboard import TENSORBOARD
from .trackio import TRACKIO
from .wandb import WANDB
from .writing import Writer

__all__ = [
    "SOURCES",
    "ColumnsError",
    "MoveReport",
    "SendingError",
    "SourceError",
    "UnreadableError",
    "import_runs",
]

SOURCES = (TENSORBOARD, WANDB, CHART, MLFLOW, TRACKIO, COMET, AIM, NEPTUNE, TABLE, LOGGERS)
"""Every source, in the order of the help."""


def import_runs(
    place: str | os.PathLike[str],
    root: str | os.PathLike[str] = "runs",
    *,
    source: str | None = None,
    columns: Mapping[str, str] | None = None,
    progress: Progress = lambda _done, _runs, _items: None,
    dry_run: bool = False,
) -> MoveReport:
    r"""Writes the runs of another logger as run folders; blocks until they are on disk.

    ```python
    from destinations.runs.imports import import_runs

    Path("history.csv").write_text("iteration,loss\n0,0.5\n10,0.25\n")
    report = import_runs("history.csv", "imported", columns={"step": "iteration"})
    print(report.runs, report.rows)  # 1 2
    ```

    Runs keep their ids, names, steps, times, tags, notes and hyperparameters. The source is only read. A run
    that was imported before is skipped if it has not changed; otherwise its folder is written again, and the
    user's edits are kept. After an interruption, the next call continues with the incomplete run.

    Args:
        place: a file, a folder, or the URI of a server or database.
        root: the folder of run folders; created if missing.
        source: the name of one of `SOURCES`. Default: the source that recognises `place`.
        columns: for a table, the names of the columns that hold "step", "time", "epoch" and "run".
        progress: called with the number of runs done, the number of runs, and the number of values and
            records written since the last call.
        dry_run: read everything and report what would be written, without writing.

    Raises:
        SourceError: no source recognises `place`, or several do.
        UnreadableError: the source is so damaged that no run can be found.
        ColumnsError: a table needs `columns`.
        ImportError: the package of the source is not installed.
    """
    place = os.fspath(place)
    found = _source_of(place, source)
    if found.package:
        require_package(found.package, f"the import from {found.name}")
    runs = found.runs(place, columns or {})
    if not runs:
        raise SourceError(f"there are no runs of {found.name} in {place!r}.")
    root = Path(root).absolute()
    if not dry_run:
        root.mkdir(parents=True, exist_ok=True)
    report = MoveReport()
    move(runs, Writer(root, found.name, report, is_dry=dry_run).write, report, progress)
    return report


def _source_of(place: str, name: str | None) -> Source:
    named = {source.name: source for source in SOURCES}
    if name is not None:
        if name not in named:
            raise SourceError(f"source must be one of {', '.join(named)}, got {name!r}.")
        return named[name]
    if "://" not in place and not Path(place).exists():
        raise SourceError(f"nothing exists at {place!r}.")
    claiming = [source for source in SOURCES if source.claims(place)]
    if len(claiming) == 1:
        return claiming[0]
    if claiming:
        names = " and ".join(source.name for source in claiming)
        raise SourceError(f"{place!r} has runs of {names}. Choose one with --from NAME.")
    known = "; ".join(f"{source.name}: {source.place}" for source in SOURCES)
    raise SourceError(f"no runs were recognised in {place!r}. Supported sources: {known}.")
