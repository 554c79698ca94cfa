"""`open_runs`: many runs, found, queried and compared."""

import time
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import Any, Self

from .record import RunRecord
from .run import Run
from .scan import ScanReport

__all__ = ["Runs", "open_runs"]


def open_runs(
    *roots: str | PathLike[str],
    cache: str | PathLike[str] | None = None,
    scan: bool = True,
    clock: Callable[[], float] = time.time,
) -> "Runs":
    """Opens the runs below some folders."""
    raise NotImplementedError


class Runs:
    """Runs below some roots."""

    report: ScanReport

    def scan(self, *, full: bool = False) -> ScanReport:
        """Looks at what changed."""
        raise NotImplementedError

    def query(
        self,
        *,
        where: str | None = None,
        tag: str | None = None,
        status: str | None = None,
        sort_by: str | None = None,
        descending: bool | None = None,
        archived: bool | None = False,
        limit: int | None = None,
    ) -> list[Run]:
        """Returns the runs that fit."""
        raise NotImplementedError

    def records(self, **query: Any) -> list[RunRecord]:
        """Returns what is known of the runs that fit; takes what `query` takes."""
        raise NotImplementedError

    def __getitem__(self, wanted: str) -> Run:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Run]:
        raise NotImplementedError

    def hparam_names(self) -> list[str]:
        """Returns the dotted names of all hyperparameters."""
        raise NotImplementedError

    def metric_names(self) -> list[str]:
        """Returns the names of all metrics."""
        raise NotImplementedError

    def compare(self, runs: Sequence[str | Run | RunRecord]) -> dict[str, dict[str, Any]]:
        """Returns what differs: field by field (`hparams.optim.lr`), the value of each run by its id."""
        raise NotImplementedError

    def to_dicts(self, **query: Any) -> list[dict[str, Any]]:
        """Returns a flat dict for each run: fields, `hparams.…`, `summary.…`."""
        raise NotImplementedError

    def to_dataframe(self, **query: Any) -> Any:
        """Returns a pandas DataFrame with a row for each run."""
        raise NotImplementedError

    def edit(
        self,
        run: str | Run | RunRecord,
        *,
        tags: Sequence[str] | None = None,
        notes: str | None = None,
        display_name: str | None = None,
        archived: bool | None = None,
    ) -> Run:
        """Writes what the user says of a run into `edits.json` in its folder, and returns the run as it is now."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the index."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
