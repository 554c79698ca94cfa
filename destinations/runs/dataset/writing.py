"""`DatasetWriter`: transactions over all tables of a dataset, for `compact` and for edits.

A change commits to each table it touches, and to `runs` last. All commits name the same application: if
another process commits first, the change starts over from the newest version.
"""

import json
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from destinations.runs.errors import DatasetError
from destinations.runs.index.edits import apply_edits, edited

from .tables import APPLICATION, COLUMNS, PARTITIONS, Location, TableVersions, arrow_schema, load

__all__ = ["DatasetWriter", "condition", "delete_runs", "edited_row", "with_edits"]

_TRIES = 20
# The files of one large run overlap in their metrics until `optimize` sorts them.
_FILE_BYTES = 32 << 20
_EDITED = ("tags", "notes", "display_name", "archived")


class DatasetWriter:
    """Writes to the tables of a dataset.

    Args:
        location: the place of the dataset.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        # The dataset at the start of this attempt, and the tables it has written to since.
        self.snapshot: TableVersions
        self._written: dict[str, Any] = {}

    def repeat(self, act: Callable[[], None]) -> None:
        """Calls `act` on the newest version; starts over if another process commits first."""
        from deltalake.exceptions import CommitFailedError

        for attempt in range(_TRIES):
            self.snapshot, self._written = load(self.location), {}
            try:
                return act()
            except CommitFailedError:
                time.sleep(random.uniform(0, min(0.1 * 2**attempt, 10.0)))  # noqa: S311  # spreads retries
        raise DatasetError(
            f"other processes committed to {self.location.uri} first, {_TRIES} times. Run this command again."
        )

    def write(self, name: str, rows: Any, replaced: str | None = None) -> None:
        """Writes rows to a table in one transaction.

        Args:
            name: the name of the table.
            rows: a `pyarrow.Table`, or record batches with the columns of this version of the package.
            replaced: the condition for the rows to remove.
        """
        import pyarrow as pa
        from deltalake import write_deltalake

        mode: dict[str, Any] = {"mode": "append"}
        if replaced is not None:
            mode = {"mode": "overwrite", "predicate": replaced}
        if not isinstance(rows, pa.Table):
            rows = pa.RecordBatchReader.from_batches(arrow_schema(name), rows)
        write_deltalake(
            self.table(name),
            rows,
            # Another version of this package may have other columns.
            schema_mode="merge",
            commit_properties=self.commit_of(name),
            writer_properties=writer_properties(name),
            target_file_size=_FILE_BYTES,
            **mode,
        )

    def table(self, name: str) -> Any:
        """Returns a table to write to, without the remains of a change that was killed or lost."""
        from deltalake.exceptions import CommitFailedError

        if name not in self._written:
            table, pinned = self.location.open(name), self.snapshot.tables[name].version()
            if table.version() != pinned:
                if self.location.open("runs").version() != self.snapshot.version:
                    raise CommitFailedError("another compaction committed first")
                table.restore(pinned, commit_properties=self.commit_of(name))
            self._written[name] = table
        return self._written[name]

    def commit_of(self, name: str) -> Any:
        """Returns the properties of a commit: our application and, for `runs`, the versions of the others."""
        from deltalake import CommitProperties, Transaction

        transactions = [Transaction(APPLICATION, time.time_ns())]
        if name == "runs":
            tables = {**self.snapshot.tables, **self._written}
            del tables["runs"]
            transactions += [
                Transaction(f"{APPLICATION}.{other}", table.version()) for other, table in tables.items()
            ]
        return CommitProperties(app_transactions=transactions)


def condition(name: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns the condition that selects the rows of some runs.

    Args:
        name: the name of the table.
        rows: `run_id`, and `part` or `shelf`, of each run; only these partitions are read.
    """
    rows = list(rows)
    texts = ["'" + row["run_id"].replace("'", "''") + "'" for row in rows]
    found = f"run_id IN ({', '.join(dict.fromkeys(texts))})"
    partition = PARTITIONS.get(name)
    numbers: list[Any] = sorted({row[partition] for row in rows}, key=str) if partition else [None]
    if None not in numbers:
        found = f"{partition} IN ({', '.join(map(str, numbers))}) AND {found}"
    return found


def writer_properties(name: str) -> Any:
    """Returns the encodings of the columns of a table."""
    from deltalake import ColumnProperties, WriterProperties

    columns = {}
    if name == "metrics":
        # These encodings halve the size of steps, times and values.
        delta = ColumnProperties(dictionary_enabled=False, encoding="DELTA_BINARY_PACKED")
        columns = dict.fromkeys(("step", "row", "time"), delta)
        columns["value"] = ColumnProperties(dictionary_enabled=False, encoding="BYTE_STREAM_SPLIT")
    return WriterProperties(compression="ZSTD", column_properties=columns)


def delete_runs(writer: DatasetWriter, rows: Iterable[Mapping[str, Any]], *, is_forever: bool) -> None:
    """Removes runs from all tables.

    Args:
        writer: the writer of the dataset.
        rows: `run_id`, `part` and `shelf` of each run.
        is_forever: whether later compactions must not add them again.
    """
    import pyarrow as pa

    rows = list(rows)
    for name in COLUMNS:
        ids = [{"run_id": row["run_id"]} for row in rows if is_forever and name == "deleted"]
        writer.write(name, pa.Table.from_pylist(ids, arrow_schema(name)), condition(name, rows))


def edited_row(row: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Returns the columns of a run that an edit changes.

    Args:
        row: the row of the run in the table `runs`.
        changes: as for `destinations.runs.index.edits.edited`.
    """
    before = json.loads(row["edits"] or "{}")
    source = {key: row[key] for key in _EDITED} | before.get("source", {})
    found = edited(before, source["tags"], **changes) | {"source": source}
    fields = {key: row[key] for key in _EDITED if key == "tags" or key not in found} | {
        "tags": source["tags"]
    }
    text = json.dumps(found)
    return {**apply_edits(fields, text.encode()), "edits": text}


def with_edits(fields: Mapping[str, Any], edits: str | None) -> dict[str, Any]:
    """Returns the fields of a run with the edits made in the dataset, and the column `edits`.

    Tags stay added or removed. An edited text, or archived state, is kept until the run itself changes it.

    Args:
        fields: the fields from the run.
        edits: the column `edits`.
    """
    if not edits:
        return {**fields, "edits": None}
    data: dict[str, Any] = json.loads(edits)
    then = data["source"]
    kept = {key: one for key, one in data.items() if key not in then or then[key] == fields[key]}
    kept["source"] = {key: fields[key] for key in _EDITED}
    text = json.dumps(kept)
    return {**apply_edits(dict(fields), text.encode()), "edits": text}
