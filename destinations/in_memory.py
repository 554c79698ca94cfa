"""A destination that keeps all records in memory, for notebooks, tests and hyperparameter searches."""

import difflib
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from events import Logger, State, Time, Timestamp, WriteRate

from .base import RecordDestination
from .copies import own_copy
from .kinds import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy as np
    import pandas as pd

__all__ = ["InMemory", "Record", "Table"]


class Record(NamedTuple):
    """One call of a `log_*` method. A named tuple, because a class takes three times as long to create.

    Attributes:
        kind: the method without its "log_": "metrics", "table", "images", …
        name: the given name; "" for metrics, hyperparameters and traces, which name their parts.
        step: the given step, or the batch of the timestamp.
        timestamp: the progress of the run at the call.
        value: metrics, hyperparameters and traces as dicts, a `Table`, a text; media as a dict of the
            arguments.
    """

    kind: str
    name: str
    step: int
    timestamp: Timestamp
    value: Any


@attrs.frozen
class Table:
    """A table as it was logged at one step."""

    columns: list[str]
    rows: list[list[Any]]
    step: int
    timestamp: Timestamp
    caption: str | None = None


class InMemory(RecordDestination):
    """Keeps copies of all records in memory, with their steps and the timestamps of the run.

    ```python
    memory = InMemory()
    Trainer(..., loggers=[memory]).fit()
    series = memory.get_timeseries("loss/train/total")
    print(len(series["batch"]), len(series["loss/train/total"]))  # 4 4
    ```

    Records before `init` have a timestamp of zero. A second run adds to the records of the first; `clear`
    removes them. Each rank keeps its own records.

    Args:
        max_records: the most records to keep; the oldest are dropped, and `dropped_records` counts them. The
            latest value of each metric and the hyperparameters always stay.
        write_rate: how often metrics are recorded; None for every call.
    """

    def __init__(self, max_records: int | None = None, *, write_rate: WriteRate | None = None) -> None:
        super().__init__(write_rate=write_rate)
        if max_records is not None and max_records < 1:
            raise ValueError(f"max_records must be at least 1, or None for no bound, got {max_records!r}.")
        self._max_records = max_records
        self._state: State | None = None
        self._before_init = Timestamp()
        self.clear()

    def clear(self) -> None:
        """Removes all records."""
        self._records: deque[Record] = deque(maxlen=self._max_records)
        self._latest: dict[str, Record] = {}
        self._hyperparameters: dict[str, Any] = {}
        self._accepted = 0

    def init(self, state: State, logger: Logger) -> None:
        self._state = state

    def close(self, state: State, logger: Logger) -> None:
        # Otherwise the state would keep the model alive.
        self._state = None

    def log_metrics(self, metrics: "Mapping[str, float]", step: int | None = None) -> None:
        timestamp = self._before_init if self._state is None else self._state.timestamp
        if step is None:
            step = int(timestamp.batch)
        record = Record("metrics", "", step, timestamp, dict(metrics))
        self._accepted += 1
        self._records.append(record)
        self._latest.update(dict.fromkeys(metrics, record))

    def log_hyperparameters(self, hyperparameters: "dict[str, Any]") -> None:
        own = own_copy(hyperparameters)
        self._hyperparameters.update(own)
        timestamp = self._timestamp()
        self._keep(Record("hyperparameters", "", int(timestamp.batch), timestamp, own))

    def log_record(self, kind: str, arguments: "dict[str, Any]") -> None:
        timestamp = self._timestamp()
        name, step = arguments.pop("name", ""), arguments.pop("step", None)
        step = int(timestamp.batch) if step is None else step
        value = own_copy(arguments)
        if kind == "table":
            rows = list(map(list, value["rows"]))
            value = Table(list(value["columns"]), rows, step, timestamp, value.get("caption"))
        elif kind_of(method=f"log_{kind}").is_single:
            (value,) = value.values()
        self._keep(Record(kind, name, step, timestamp, value))

    @property
    def state(self) -> State | None:
        """The state of the run, while it is open; None before and after."""
        return self._state

    @property
    def records(self) -> list[Record]:
        """The records that are kept, oldest first."""
        return list(self._records)

    @property
    def dropped_records(self) -> int:
        """The number of records that were dropped to make room."""
        return self._accepted - len(self._records)

    @property
    def data(self) -> dict[str, list[tuple[Timestamp, float]]]:
        """The values of each metric, oldest first, each with the timestamp of the run."""
        data: dict[str, list[tuple[Timestamp, float]]] = {}
        for record in self._of_kind("metrics"):
            for name, value in record.value.items():
                data.setdefault(name, []).append((record.timestamp, value))
        return data

    @property
    def most_recent_values(self) -> dict[str, float]:
        """The last value of each metric."""
        return {name: record.value[name] for name, record in self._latest.items()}

    @property
    def most_recent_timestamps(self) -> dict[str, Timestamp]:
        """The timestamp of the last record of each metric."""
        return {name: record.timestamp for name, record in self._latest.items()}

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """All hyperparameters, later ones over earlier ones of the same name."""
        return dict(self._hyperparameters)

    @property
    def tables(self) -> dict[str, list[Table]]:
        """Every table by name, oldest first."""
        tables: dict[str, list[Table]] = {}
        for record in self._of_kind("table"):
            tables.setdefault(record.name, []).append(record.value)
        return tables

    def get_timeseries(self, name: str) -> "dict[str, np.ndarray]":
        """Returns a metric over time.

        Args:
            name: the metric.

        Returns:
            Arrays of equal length: the metric under its name, `step`, and each field of `Timestamp`
            (`batch`, `epoch`, `sample_in_epoch`, …; durations such as `total_wct` in seconds). A
            metric with the name of a field replaces it.

        Raises:
            ValueError: the metric was never logged, or its values were dropped.
        """
        import numpy as np

        records = [record for record in self._of_kind("metrics") if name in record.value]
        if not records:
            known = ", ".join(map(repr, sorted(self._latest))) or "none"
            raise ValueError(f"unknown metric {name!r}{_near_miss(name, self._latest)} Kept: {known}.")
        series = {
            field.name: np.asarray([_number(getattr(record.timestamp, field.name)) for record in records])
            for field in attrs.fields(Timestamp)
        }
        series["step"] = np.asarray([record.step for record in records])
        series[name] = np.asarray([record.value[name] for record in records])
        return series

    def get_table(self, name: str = "Table", step: int | None = None) -> "pd.DataFrame":
        """Returns a table as a pandas DataFrame.

        Args:
            name: the name of the table.
            step: its step; the last one logged if None.

        Raises:
            ValueError: there is no such table.
            ImportError: pandas is not installed; the table is in `tables` without it.
        """
        tables = [table for table in self.tables.get(name, []) if step is None or table.step == step]
        if not tables:
            kept = ", ".join(
                f"{key!r} at {[table.step for table in all_]}" for key, all_ in self.tables.items()
            )
            at = "" if step is None else f" at step {step}"
            raise ValueError(f"unknown table {name!r}{at}. Kept: {kept or 'none'}.")
        import pandas as pd

        return pd.DataFrame(tables[-1].rows, columns=tables[-1].columns)

    def _of_kind(self, kind: str) -> list[Record]:
        # The copy is atomic: a thread may read while training logs.
        return [record for record in self.records if record.kind == kind]

    def _timestamp(self) -> Timestamp:
        return self._before_init if self._state is None else self._state.timestamp

    def _keep(self, record: Record) -> None:
        self._accepted += 1
        self._records.append(record)


def _near_miss(name: str, known: "Iterable[str]") -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else "."


def _number(value: Time | timedelta) -> int | float:
    return value.total_seconds() if isinstance(value, timedelta) else value.value
