"""Brings runs of other loggers into run folders, through the readers of their own packages.

```python
from destinations.runs.imports import import_runs

report = import_runs("logs", "runs")
```

Each source is a module that declares a `Source`; `SOURCES` is the only list of them.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from destinations.runs.send.ledger import SendingError

from .aim import AIM
from .comet import COMET
from .loggers import LOGGERS
from .mlflow import MLFLOW
from .neptune import NEPTUNE
from .source import ColumnsError, ImportReport, Progress, Source, SourceError, UnreadableError
from .tables import CHART, TABLE
from .tensorboard import TENSORBOARD
from .trackio import TRACKIO
from .wandb import WANDB
from .writing import Writer

__all__ = [
    "SOURCES",
    "ColumnsError",
    "ImportReport",
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
) -> ImportReport:
    r"""Writes the runs of another logger as run folders, and blocks until they are on disk.

    ```python
    from destinations.runs.imports import import_runs

    Path("history.csv").write_text("iteration,loss\n0,0.5\n10,0.25\n")
    report = import_runs("history.csv", "imported", columns={"step": "iteration"})
    print(report.runs, report.rows)  # 1 2
    ```

    Ids, names, steps, times, tags, notes and hyperparameters are those of the source, which is only read. A
    run that was imported before is left alone if it has not changed, else its folder is written anew, with
    the edits of the user. After an interruption, the next call continues with the run that was not complete.

    Args:
        place: a file, a folder, or the URI of a server or database.
        root: the folder of run folders; it is created.
        source: the name of one of `SOURCES`. Default: the one that recognises `place`.
        columns: for a table, the names of its columns by what they hold: "step", "time", "epoch", "run".
        progress: called with how many runs are done, how many there are, and how many values and records were
            written since the last call.
        dry_run: read everything and report what would be written; nothing is.

    Raises:
        SourceError: nothing at `place` is recognised, or several sources recognise it.
        UnreadableError: what is there is damaged, so that no run can be told.
        ColumnsError: a table needs `columns`.
        ImportError: the package of the source is not installed.
    """
    from events import safe_text

    place = os.fspath(place)
    found = _source_of(place, source)
    report = ImportReport()
    root = Path(root).absolute()
    if found.copy is not None and dry_run:
        raise SourceError(f"runs of {found.name} are copied as they are: there is no dry run.")
    if not dry_run:
        root.mkdir(parents=True, exist_ok=True)
    if found.copy is not None:
        found.copy(place, root, report, progress)
        return report
    runs = found.runs(place, columns or {})
    if not runs:
        raise SourceError(f"there are no runs of {found.name} in {place!r}.")
    done = 0
    writer = Writer(root, found.name, report, lambda items: progress(done, len(runs), items), is_dry=dry_run)
    for done, run in enumerate(runs):  # `progress` is told
        progress(done, len(runs), 0)
        try:
            writer.write(run)
        except Exception as error:  # noqa: BLE001  # whatever is wrong with this run, the others are wanted
            report.fail(f"{run.run_id}: {safe_text(error)}")
    progress(len(runs), len(runs), 0)
    return report


def _source_of(place: str, name: str | None) -> Source:
    named = {source.name: source for source in SOURCES}
    if name is not None:
        if name not in named:
            raise SourceError(f"source must be one of {', '.join(named)}, got {name!r}.")
        return named[name]
    if "://" not in place and not Path(place).exists():
        raise SourceError(f"there is nothing at {place!r} to import runs from.")
    claiming = [source for source in SOURCES if source.claims(place)]
    if len(claiming) == 1:
        return claiming[0]
    if claiming:
        names = " and ".join(source.name for source in claiming)
        raise SourceError(f"{place!r} has runs of {names}. Say which to import: --from NAME.")
    known = "; ".join(f"{source.name}: {source.place}" for source in SOURCES)
    raise SourceError(f"no runs were recognised in {place!r}. What can be imported: {known}.")
