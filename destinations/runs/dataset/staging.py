"""Points on their way from runs, which have them row by row, to files, which have them metric by metric.

Blocks of rows are written to one scratch file as they are read; then each metric's values are picked from it,
run after run. So memory holds one batch at a time, however large the runs are, and nothing is sorted but
series that go back in steps.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import attrs
import numpy as np

from destinations.runs.series import MISSING_STEP, Block

__all__ = ["Batch", "Staging"]

_Array = np.ndarray[Any, Any]


@attrs.frozen
class _Piece:
    """Offsets of one metric's values in the scratch file, and of the rows, steps and times it shares."""

    rows: int
    first_row: int
    shared_at: int
    values_at: int
    present_at: int | None


@attrs.frozen(eq=False)
class Batch:
    """Points, sorted by metric, run, rank, step.

    Attributes:
        metrics: the metrics that there are, to which `metric` is an index.
        runs: as `metrics`.
        columns: `metric`, `run`, `rank` int32; `row`, `step`, `time` int64, the last two with `MISSING_STEP`
            for none, time in microseconds; `value` float64; all `(points,)`.
    """

    metrics: tuple[str, ...]
    runs: tuple[str, ...]
    columns: dict[str, _Array]

    def __len__(self) -> int:
        return len(self.columns["value"])


class Staging:
    """Takes the blocks of runs, and gives them back as batches of points.

    Args:
        path: the scratch file, which is made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._at = 0
        self._pieces: dict[str, dict[tuple[str, int], list[_Piece]]] = {}
        self.points = 0

    def add(self, run_id: str, rank: int, block: Block, first_row: int) -> int:
        """Takes rows of a run, in order; returns how many points they have.

        Args:
            run_id: whose rows.
            rank: whose rows.
            block: the rows.
            first_row: how many rows of the rank came before.
        """
        shared_at = self._at
        self._write(block.step)
        self._write(_microseconds(block.time))
        points = 0
        for name, (values, present) in block.columns.items():
            count = int(np.count_nonzero(present))
            if not count:
                continue
            points += count
            values_at = self._at
            self._write(np.ascontiguousarray(values))
            present_at = None
            if count < len(block):
                present_at = self._at
                self._write(np.ascontiguousarray(present))
            piece = _Piece(len(block), first_row, shared_at, values_at, present_at)
            self._pieces.setdefault(name, {}).setdefault((run_id, rank), []).append(piece)
        self.points += points
        return points

    def batches(self, most_points: int) -> Iterator[Batch]:
        """Returns all points, sorted, in batches of about that many.

        The scratch file is complete from now on.
        """
        self._file.close()
        if not self._at:
            return
        data = np.memmap(self._path, np.uint8, "r")
        waiting: list[tuple[str, str, int, dict[str, _Array]]] = []
        count = 0
        for metric in sorted(self._pieces):
            by_run = self._pieces.pop(metric)
            for run_id, rank in sorted(by_run):
                columns = _series(data, by_run[run_id, rank])
                waiting.append((metric, run_id, rank, columns))
                count += len(columns["value"])
                if count >= most_points:
                    yield _batch(waiting)
                    waiting, count = [], 0
        if waiting:
            yield _batch(waiting)

    def _write(self, array: _Array) -> None:
        self._file.write(array.data)
        self._at += array.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


def _microseconds(time: _Array) -> _Array:
    """Returns times as the CSV has them, in whole microseconds; `MISSING_STEP` where there is none."""
    with np.errstate(invalid="ignore"):
        fits = np.abs(time) < 1e12  # noqa: PLR2004  # far beyond any date; not so for NaN
        whole = np.rint(np.where(fits, time, 0.0) * 1e6).astype(np.int64)
    return np.where(fits, whole, MISSING_STEP)


def _series(data: _Array, pieces: Sequence[_Piece]) -> dict[str, _Array]:
    """Returns the points of one metric of one rank, by step, and as they were logged within a step."""
    found: dict[str, list[_Array]] = {"row": [], "step": [], "time": [], "value": []}
    for piece in pieces:
        eight = 8 * piece.rows
        arrays = {
            "row": np.arange(piece.first_row, piece.first_row + piece.rows),
            "step": data[piece.shared_at : piece.shared_at + eight].view(np.int64),
            "time": data[piece.shared_at + eight : piece.shared_at + 2 * eight].view(np.int64),
            "value": data[piece.values_at : piece.values_at + eight].view(np.float64),
        }
        present = None
        if piece.present_at is not None:
            present = data[piece.present_at : piece.present_at + piece.rows].view(np.bool_)
        for name, array in arrays.items():
            found[name].append(array if present is None else array[present])
    columns = {name: np.concatenate(arrays) for name, arrays in found.items()}
    step = columns["step"]
    if (step[1:] < step[:-1]).any():
        order = np.argsort(step, kind="stable")
        columns = {name: array[order] for name, array in columns.items()}
    return columns


def _batch(found: list[tuple[str, str, int, dict[str, _Array]]]) -> Batch:
    metrics = tuple(dict.fromkeys(metric for metric, _, _, _ in found))
    runs = tuple(dict.fromkeys(run_id for _, run_id, _, _ in found))
    metric_numbers = {metric: number for number, metric in enumerate(metrics)}
    run_numbers = {run_id: number for number, run_id in enumerate(runs)}
    lengths = [len(columns["value"]) for _, _, _, columns in found]

    def repeated(numbers: list[int]) -> _Array:
        return np.repeat(np.array(numbers, np.int32), lengths)

    return Batch(
        metrics,
        runs,
        {
            "metric": repeated([metric_numbers[metric] for metric, _, _, _ in found]),
            "run": repeated([run_numbers[run_id] for _, run_id, _, _ in found]),
            "rank": repeated([rank for _, _, rank, _ in found]),
            **{
                name: np.concatenate([columns[name] for _, _, _, columns in found])
                for name in ("row", "step", "time", "value")
            },
        },
    )
