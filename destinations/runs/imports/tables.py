"""Imports CSV and Parquet files, whose columns the user names, and charts downloaded from W&B's page."""

import csv
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from destinations.run_directory.layout import parse_number, whole_number
from destinations.runs.move.stream import Record, SourceRun, Values
from destinations.trackers.names import short_hash

from .source import ColumnsError, Source, SourceError, UnreadableError, unique_id

_Rows = Callable[[], Iterable[list[Any]]]
_SUFFIXES = {".csv": ",", ".tsv": "\t", ".parquet": ""}
_ROLES = ("step", "time", "epoch", "run")
# The names under which Lightning, Transformers and this package log their step.
STEPS = ("trainer/global_step", "train/global_step", "global_step")
# The columns that are used if the user names none: our names and W&B's.
_DEFAULTS = {
    "step": ("step", *STEPS, "_step"),
    "time": ("time", "_timestamp"),
    "epoch": ("epoch",),
    "run": (),
}

_EMPTY = ("", None)
_ODD = "rows with other cells than the first line"
# Texts that programs write for a missing value.
_NO_VALUE = {"na", "n/a", "null", "none", "-"}


def _claims(place: str) -> bool:
    path = Path(place)
    return path.is_file() and path.suffix in _SUFFIXES and not _is_chart(path)


def stamp_of(*paths: Path) -> str:
    """Returns a text that changes when a file is written to or added to a folder."""
    folders = (path for path in paths if path.is_dir() and not path.is_symlink())
    inside = (one for path in folders for one in sorted(path.rglob("*")))
    files = [path for path in (*paths, *inside) if path.is_file()]
    stamps = [f"{path.name}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in files]
    return " ".join(stamps) if len(files) == len(paths) else short_hash(" ".join(stamps), 16)


def _lines_of(path: Path) -> Iterator[list[Any]]:
    """Yields the names of the columns, then the rows."""
    if path.suffix == ".parquet":
        columns: list[str] = []
        for batch in parquet_batches(path):
            if not columns:
                columns = batch.schema.names
                yield list(columns)
            yield from map(list, zip(*(column.to_pylist() for column in batch.columns), strict=True))
        return
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        try:
            lines = csv.reader(file, delimiter=_SUFFIXES.get(path.suffix, ","))
            names = next(lines, [])
            if any("\N{REPLACEMENT CHARACTER}" in name for name in names):
                raise UnreadableError(f"{path} is not a table of texts and numbers: it is not UTF-8.")
            yield names
            yield from lines
        except csv.Error as error:
            raise UnreadableError(f"{path} is not a table of texts and numbers: {error}.") from error


def _with_end(path: Path, runs: list[SourceRun]) -> list[SourceRun]:
    """Adds damage to the last run if the table ends without a line end, so its last number may be cut off."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        is_whole = path.suffix == ".parquet" or file.read() in {b"\n", b"\r", b'"'}
    if not is_whole:
        for run in runs[-1:]:
            run.lost["last rows without a line end, which may be cut off"] += 1
    return runs


def parquet_batches(path: Path, needed: Collection[str] = ()) -> Iterator[Any]:
    """Yields the record batches of a Parquet file.

    Raises:
        UnreadableError: the file is not Parquet, or lacks one of the needed columns.
    """
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with pa.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            missing = {*needed} - {*file.schema_arrow.names}
            yield from () if missing else file.iter_batches()
    except Exception as error:  # pyarrow raises many types
        raise UnreadableError(f"{path} is not a Parquet file: {error}.") from error
    if missing:
        raise UnreadableError(f"{path} has no column {min(missing)!r}.")


def _runs(place: str, columns: Mapping[str, str]) -> list[SourceRun]:
    path = Path(place).absolute()
    # Taken before reading, because the file may grow meanwhile.
    stamp, written_at = stamp_of(path), path.stat().st_mtime
    lines = _lines_of(path)
    names = next(lines, [])
    if unknown := columns.keys() - set(_ROLES):
        raise SourceError(f"a column holds one of {', '.join(_ROLES)}, got {min(unknown)!r}.")
    roles: dict[str, int] = {}
    for role in _ROLES:
        given = columns.get(role)
        if given and given not in names:
            raise SourceError(f"{place} has no column {given!r}. It has {', '.join(map(repr, names))}.")
        for name in _DEFAULTS[role] if given is None else (given,):
            if name in names:
                roles.setdefault(role, names.index(name))
    if "step" not in roles and columns.get("step") is None:
        raise ColumnsError(place, names)
    stamp = f"{stamp} {roles}"
    of_run = roles.get("run")
    if of_run is None:
        # Read again when the run is written, because a table may be larger than memory.
        rows_of: dict[str, _Rows] = {path.stem: lambda: itertools.islice(_lines_of(path), 1, None)}
    else:
        by_run: dict[str, list[list[Any]]] = {}
        for line in lines:
            name = str(line[of_run]) if of_run < len(line) else ""
            by_run.setdefault(name or path.stem, []).append(line)
        rows_of = {name: rows.copy for name, rows in by_run.items()}
    # In W&B's own history, only the rows that a trainer logged have its step.
    is_history = "_step" in names and names.index("_step") != roles.get("step")
    taken = {*roles.values(), *([names.index("_step")] if is_history else ())}
    metrics = {index: name for index, name in enumerate(_unlike(names)) if index not in taken}
    found = []
    for run, rows in rows_of.items():
        table = _Table(rows, len(names), metrics, roles, fills_steps=is_history)
        found.append(table.run_of(f"table {path} {run}", run, stamp, written_at))
    return _with_end(path, found)


class _Table:
    """The rows of a run.

    Args:
        rows: returns the rows, each a list of cells; texts are parsed as numbers.
        width: the number of cells of a row.
        metrics: the names of columns, by index.
        roles: the index of the columns that hold "step", "time", "epoch" and "run", as far as they exist.
            Without a step, rows are counted.
        fills_steps: whether a row without a step has the step of the row before.
    """

    def __init__(
        self,
        rows: _Rows,
        width: int,
        metrics: Mapping[int, str],
        roles: Mapping[str, int],
        *,
        fills_steps: bool = False,
    ) -> None:
        self._rows = rows
        self._width = width
        self._metrics = metrics
        self._roles = roles
        self._fills_steps = fills_steps
        self._last_step: float | None = None
        # The columns with numbers, and the number of texts in each column.
        self._with_numbers: set[int] = set()
        self._texts: Counter[int] = Counter()

    def run_of(self, identity: str, name: str, stamp: str, written_at: float) -> SourceRun:
        """Returns the run. It began at its first time, or if there is none, when the table was written."""
        began_at = seconds_of(self.cell(next(filter(None, self._rows()), []), "time"))
        run_id = unique_id(name, identity)
        return SourceRun(run_id, name, identity, stamp, self.read, created_at=began_at or written_at)

    def cell(self, row: Sequence[Any], role: str) -> Any:
        """Returns the cell with the step, time, epoch or run; None if there is none."""
        index = self._roles.get(role)
        return None if index is None or index >= len(row) else row[index]

    def read(self, run: SourceRun) -> Iterator[Record]:
        """Yields the values of each row."""
        for number, row in enumerate(filter(None, self._rows())):
            if len(row) < self._width or any(cell not in _EMPTY for cell in row[self._width :]):
                run.lost[_ODD] += 1
            step = self._step_of(row, number)
            if step is None:
                run.lost["rows without a whole step"] += 1
                continue
            time, epoch = seconds_of(self.cell(row, "time")), _number(self.cell(row, "epoch"))
            for role, found in (("time", time), ("epoch", epoch)):
                if found is None and self.cell(row, role) not in _EMPTY:
                    run.lost[f"unreadable {role}s"] += 1
            yield Values(self._values_of(row, run), step, time, epoch)
        # A column of texts is not a metric. In a column of numbers, a text is a damaged value.
        for index, count in self._texts.items():
            where = run.lost if index in self._with_numbers else run.left_out
            where["cells that are no numbers"] += count

    def _step_of(self, row: Sequence[Any], number: int) -> int | None:
        step = number if "step" not in self._roles else _number(self.cell(row, "step"))
        if self._fills_steps and (step is None or math.isnan(step)):
            step = self._last_step
        self._last_step = step
        return whole_number(step) if step is not None and float(step).is_integer() else None

    def _values_of(self, row: Sequence[Any], run: SourceRun) -> dict[str, float]:
        values = {}
        for index, metric in self._metrics.items():
            cell = row[index] if index < len(row) else None
            if not metric:
                run.left_out["cells of a column without a name"] += cell not in _EMPTY
            elif (value := _number(cell)) is not None:
                values[metric] = value
                self._with_numbers.add(index)
            elif isinstance(cell, str) and cell.strip().lower() in _NO_VALUE:
                run.left_out["cells that are no numbers"] += 1
            elif cell not in _EMPTY:
                self._texts[index] += 1
        return values


def _unlike(names: Sequence[str]) -> list[str]:
    """Returns unique names: a second "loss" becomes "loss.1"."""
    found: list[str] = []
    for name in names:
        others = {*names, *found}
        numbered = (f"{name}.{number}" for number in itertools.count(1))
        is_new = not name or name not in found
        found.append(name if is_new else next(one for one in numbered if one not in others))
    return found


def _number(cell: Any) -> float | None:
    """Returns a cell as a number, or None; integers stay exact."""
    if isinstance(cell, str | Decimal):
        return parse_number(str(cell))
    return cell if isinstance(cell, int | float) else None


def seconds_of(cell: Any) -> float | None:
    """Returns a number, datetime or ISO 8601 text as seconds since 1970; without a zone, the time is UTC."""
    if isinstance(cell, str) and _number(cell) is None:
        try:
            cell = datetime.fromisoformat(cell)
        except ValueError:
            return None
    if isinstance(cell, datetime):
        return (cell if cell.tzinfo else cell.replace(tzinfo=UTC)).timestamp()
    seconds = _number(cell)
    return seconds if seconds is not None and math.isfinite(seconds) else None


# Charts downloaded from W&B.


def _is_chart(path: Path) -> bool:
    """Returns whether a table is a chart from W&B's page: it has a column for each run and metric."""
    if path.suffix != ".csv" or not path.is_file():
        return False
    try:
        first, *others = next(_lines_of(path), []) or [""]
    except (OSError, SourceError):
        return False
    # The first column is named after the x axis of the chart. The page exports each point with its extremes.
    has_extremes = any({f"{name}__MIN", f"{name}__MAX"} <= set(others) for name in others)
    is_axis = first in {"Step", *_DEFAULTS["step"]} or has_extremes
    return is_axis and bool(others) and all(" - " in name for name in others)


def _exported_runs(place: str, _: Mapping[str, str]) -> list[SourceRun]:
    path = Path(place).absolute()
    # Taken before reading, because the file may grow meanwhile.
    stamp, written_at = stamp_of(path), path.stat().st_mtime
    names = next(_lines_of(path), [])
    by_run: dict[str, dict[int, str]] = {}
    for index, name in enumerate(names[1:], 1):
        run, _separator, metric = name.rpartition(" - ")
        # The page adds the smallest and the largest of the values behind each point, and their steps.
        if not metric.endswith(("__MIN", "__MAX")) and metric != "_step":
            by_run.setdefault(run, {})[index] = metric
    found = []
    for run, metrics in by_run.items():
        unlike = dict(zip(metrics, _unlike([*metrics.values()]), strict=True))
        table = _Table(lambda: itertools.islice(_lines_of(path), 1, None), len(names), unlike, {"step": 0})
        found.append(table.run_of(f"wandb-export {path} {run}", run, stamp, written_at))
    return _with_end(path, found)


TABLE = Source("table", "a .csv, .tsv or .parquet file with a column of steps", _claims, _runs)
CHART = Source(
    "wandb-export",
    "a .csv of a chart, downloaded from W&B",
    lambda place: _is_chart(Path(place)),
    _exported_runs,
)
