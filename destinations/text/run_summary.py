"""`RunSummary`: the summary that `Console` or `ProgressBar` prints when a run has ended.

```
digits completed: 8 epochs, 168 batches, 0:29
  metrics/test/accuracy  best 0.9933 at step 126, last 0.9933
  loss/test/total        best 0.01775 at step 168, last 0.01775
  RunDirectory           runs/digits
  Artifacts              s3://bucket/digits: 9 files
Look at it: destinations runs show runs/digits
In a browser: destinations view runs
```

On rank 0, the first `Console` prints it, or else the first `ProgressBar`.
"""

import contextlib
import math
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

import attrs

from events import Logger, RunStatus, State, redact_text, safe_text
from uploads.disk import read_json

from .formatting import elapsed_text, metric_direction, one_line, pad, short, shortened, width_of

__all__ = ["RunSummary"]

_MAX_TRACKED = 100
# Names that contain a step would otherwise fill the memory of a long run.
_MAX_SEEN = 10_000
_MAX_SHOWN = 6
_MAX_PROBLEMS = 5
_MAX_HEADLINE = 300
_NAME_WIDTH = 36


@attrs.define
class _Best:
    """The best and the last value of a metric."""

    sign: int
    is_evaluation: bool
    best: float = math.nan
    step: int | None = None
    last: float = math.nan

    def add(self, value: float, step: int | None) -> None:
        self.last = value
        # NaN is never the best; the first value stands until a better one comes.
        if not math.isnan(value) and (self.step is None or (value - self.best) * self.sign > 0):
            self.best, self.step = value, step

    def take(self, value: float | None, step: int | None) -> None:
        """Takes the best value of the whole run, which may be from an earlier session."""
        if value is not None and not (value - self.best) * self.sign < 0:
            self.best, self.step = value, step

    def text(self) -> str:
        """Returns both values as text; only the last if all were NaN."""
        best = "" if math.isnan(self.best) else f"best {short(self.best)} at step {self.step}, "
        return f"{best}last {short(self.last)}"


class RunSummary:
    """Collects the best values of the main metrics, and the locations of a run's records.

    Training thread only. A call of `update` takes about half a microsecond for ten metrics.
    """

    @classmethod
    def of(cls, destination: object, state: State) -> "RunSummary":
        """Returns the summary of a run; it's empty unless this destination prints it.

        Destinations that can print a summary have a `summary_priority`; the lowest prints it.
        """
        priorities = [
            (priority, index)
            for index, one in enumerate(state.callbacks)
            if (priority := getattr(one, "summary_priority", None)) is not None
        ]
        is_first = bool(priorities) and state.callbacks[min(priorities)[1]] is destination
        return cls(is_shown=is_first and not state.rank)

    def __init__(self, *, is_shown: bool = False) -> None:
        self._is_shown = is_shown
        self._closing: tuple[State, Logger] | None = None
        self._seen: set[str] = set()
        self._tracked: dict[str, _Best] = {}
        self._places: dict[int, tuple[str, str]] = {}
        self._status = ""

    def update(self, metrics: Mapping[str, float], step: int | None, *, is_evaluation: bool) -> None:
        """Updates the best and last values with the metrics of one call."""
        if not self._is_shown:
            return
        if len(self._seen) < _MAX_SEEN and not self._seen.issuperset(metrics):
            self._learn(metrics, is_evaluation=is_evaluation)
        for name, best in self._tracked.items():
            value = metrics.get(name)
            if value is not None:
                best.add(value, step)

    def _learn(self, metrics: Mapping[str, float], *, is_evaluation: bool) -> None:
        for name in metrics:
            if (
                len(self._tracked) < _MAX_TRACKED
                and name not in self._seen
                and (sign := metric_direction(name))
            ):
                self._tracked[name] = _Best(sign, is_evaluation)
        self._seen.update(metrics)

    def note_places(self, logger: Logger) -> None:
        """Collects the location of each destination's records; called while the destinations are open."""
        for destination in logger.destinations if self._is_shown else ():
            place = ""
            with contextlib.suppress(Exception):  # as of a destination that is not open
                place = destination.place()  # type: ignore[attr-defined]  # other projects' may lack it
            if place:
                self._places[id(destination)] = (type(destination).__name__, str(place))

    def close(self, state: State, logger: Logger) -> None:
        """Records how the run ended; `post_close` builds the text, when all destinations have finished."""
        self.note_places(logger)
        self._closing = (state, logger)

    def text(self) -> str:
        """Returns the summary of a closed run; "" if nothing was trained, evaluated or logged."""
        if self._closing is None or not self._is_shown:
            return ""
        state, logger = self._closing
        batches = int(state.timestamp.batch)
        if not batches and not self._seen and state.exception is None:
            return ""
        self.note_places(logger)
        self._take_all(logger)
        lines = [
            _headline(state, self._status)[:_MAX_HEADLINE],
            *self._metric_lines(),
            *self._place_lines(),
            *_problem_lines(logger),
        ]
        folder = self._folder(logger)
        if folder:
            lines.append(f"Look at it: destinations runs show {shlex.quote(folder)}")
            lines.append(f"In a browser: destinations view {shlex.quote(str(Path(folder).parent))}")
        return "".join(f"{one_line(line)}\n" for line in lines)

    def _take_all(self, logger: Logger) -> None:
        """Takes the status and the best values, of all sessions, from the folder of a `RunDirectory`."""
        from destinations.run_directory.layout import SIDECAR, SUMMARY

        for place in self._run_folders(logger):
            # Only the folder has the number of lost records.
            if read_json(Path(place, SIDECAR)).get("status") == "failed to write":
                self._status = "failed to write"
            summary = read_json(Path(place, SUMMARY))
            metrics = summary.get("metrics") or {}
            for metric, best in self._tracked.items():
                if isinstance(found := metrics.get(metric), dict):
                    bound = "max" if best.sign > 0 else "min"
                    best.take(found.get(bound), found.get(f"{bound}_step"))

    def _metric_lines(self) -> list[str]:
        shown = [(name, best) for name, best in self._tracked.items() if best.is_evaluation]
        shown = (shown or list(self._tracked.items()))[:_MAX_SHOWN]
        names = [shortened(one_line(name), _NAME_WIDTH) for name, _ in shown]
        width = max(map(width_of, names), default=0)
        return [f"  {pad(name, width)}  {best.text()}" for name, (_, best) in zip(names, shown, strict=True)]

    def _place_lines(self) -> list[str]:
        names = {name for name, _ in self._places.values()}
        width = max(map(len, names), default=0)
        return [f"  {name:<{width}}  {_relative(place)}" for name, place in self._places.values()]

    def _folder(self, logger: Logger) -> str:
        """Returns the folder of a `RunDirectory` as a path that the command line takes, or ""."""
        for place in self._run_folders(logger):
            folder = _relative(place)
            return folder if os.sep in folder else os.path.join(os.curdir, folder)  # noqa: PTH118
        return ""

    def _run_folders(self, logger: Logger) -> list[str]:
        found = (self._places.get(id(destination), ("", "")) for destination in logger.destinations)
        return [place for name, place in found if name == "RunDirectory"]


def _headline(state: State, status: str) -> str:
    timestamp = state.timestamp
    counts = {("epoch", "epochs"): int(timestamp.epoch), ("batch", "batches"): int(timestamp.batch)}
    parts = [f"{count} {many if count > 1 else one}" for (one, many), count in counts.items() if count]
    seconds = timestamp.total_wct.total_seconds()
    if seconds >= 1:
        parts.append(elapsed_text(seconds))
    known = "completed" if state.status is RunStatus.RUNNING else str(state.status)
    text = f"{state.run_name} {status or known}"
    if parts:
        text += f": {', '.join(parts)}"
    if state.stop_reason is not None:
        text += f"; {redact_text(state.stop_reason)}"
    if state.exception is not None:
        reason = redact_text(safe_text(state.exception))
        text += f"; {type(state.exception).__name__}{f': {reason}' if reason else ''}"
    return text


def _problem_lines(logger: Logger) -> list[str]:
    faults = logger.faults.counts
    lines = [
        f"  {name}.{action} raised {error} {count:,} time{'' if count == 1 else 's'}"
        for (name, action, error), count in sorted(faults.items())
    ]
    rest = len(lines) - _MAX_PROBLEMS
    return lines[:_MAX_PROBLEMS] + ([f"  and {rest} more problems"] if rest > 0 else [])


def _relative(place: str) -> str:
    """Returns a path as one would type it: relative if it is below the working directory."""
    try:
        path = Path(place)
        return str(path.relative_to(Path.cwd())) if path.is_absolute() else place
    except (OSError, ValueError):
        return place
