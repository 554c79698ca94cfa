"""Progress bars: drawn by tqdm on a terminal or in a notebook, and as lines where there is neither.

Also keeps what the user prints meanwhile from running into a bar.
"""

import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

import attrs

from ._formatting import one_line
from ._streams import Redirection, StandIn, is_terminal, write_text

__all__ = ["Bar", "BarPlan", "PrintGuard", "is_notebook", "open_bar"]


_ROWS_THAT_TQDM_LEAVES_EMPTY = 2
_USUAL_COLUMNS = 80
_USUAL_ROWS = 24


@attrs.frozen
class BarPlan:
    """What stays as it is while a bar moves.

    Attributes:
        title: what stands before it.
        unit: what is counted, in the singular.
        is_scaled: whether counts are shortened: "12.3k".
        initial: the count at which this session begins.
        total: where it ends, as far as that is known at the beginning.
    """

    title: str
    unit: str
    is_scaled: bool = False
    initial: float = 0
    total: float | None = None


class Bar(Protocol):
    """Something that shows how far something is."""

    def draw(self, count: float, total: float | None, values: str) -> None:
        """Shows a count, of a total if that is known, and some values."""

    def close(self) -> None:
        """Ends it; what it showed last stays."""


class _TqdmBar:
    """A bar of tqdm's, drawn when this project says so."""

    def __init__(self, plan: BarPlan, make: Callable[..., Any], **options: Any) -> None:
        self._bar = make(
            desc=one_line(plan.title),
            unit=f" {plan.unit}",
            unit_scale=plan.is_scaled,
            initial=plan.initial,
            total=plan.total,
            mininterval=0,
            leave=True,
            **options,
        )

    def draw(self, count: float, total: float | None, values: str) -> None:
        bar = self._bar
        if total != bar.total:
            bar.total = total
            if hasattr(bar, "container"):
                # A widget has its end in the middle one of its three parts; `reset` would set it, and begin at zero.
                bar.container.children[1].max = total
        bar.set_postfix_str(values, refresh=False)
        # The speed is computed in `update`, which draws too where there is something new.
        if not bar.update(count - bar.n):
            bar.refresh()

    def close(self) -> None:
        if hasattr(self._bar, "container"):
            self._bar.close()
            return
        # A bar below another ends in the other's place, and would leave the end of a longer one standing.
        with type(self._bar).external_write_mode(file=self._bar.fp):
            self._bar.close()


class _Lines:
    """A line at each draw."""

    def __init__(self, plan: BarPlan, stream: Any, clock: Callable[[], float]) -> None:
        self._plan = plan
        self._stream = stream
        self._clock = clock
        self._start = clock()
        self._shown: tuple[Any, ...] = ()

    def draw(self, count: float, total: float | None, values: str) -> None:
        if self._shown == (count, total, values):
            return
        self._shown = (count, total, values)
        line = _terminal_tqdm().format_meter(
            count,
            total,
            self._clock() - self._start,
            ncols=0,
            prefix=one_line(self._plan.title),
            unit=f" {self._plan.unit}",
            unit_scale=self._plan.is_scaled,
            initial=self._plan.initial,
            postfix=values,
        )
        write_text(self._stream, f"{line}\n")

    def close(self) -> None:
        """A line has its end already."""


def open_bar(plan: BarPlan, stream: Any, *, in_notebook: bool, clock: Callable[[], float]) -> Bar:
    """Returns a bar that suits the place where it is shown.

    Args:
        plan: what it is about.
        stream: where a terminal or a file is to get it.
        in_notebook: whether to show it as a widget instead.
        clock: the seconds that lines show.
    """
    if in_notebook:
        return _TqdmBar(plan, _notebook_tqdm())
    if is_terminal(stream):
        return _TqdmBar(plan, _terminal_tqdm(), file=stream, **_room(stream))
    return _Lines(plan, stream, clock)


def _room(stream: Any) -> dict[str, Any]:
    """Returns how large a bar may be: what the terminal says, again and again.

    A terminal in a container often says that it has no rows; tqdm would then draw nothing.
    """
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return {"dynamic_ncols": True}
    if rows > _ROWS_THAT_TQDM_LEAVES_EMPTY:
        return {"dynamic_ncols": True}
    return {"ncols": columns or _USUAL_COLUMNS, "nrows": _USUAL_ROWS}


def is_notebook() -> bool:
    """Says whether this is a notebook that can show widgets; asks nothing of who has not imported IPython."""
    ipython = sys.modules.get("IPython")
    if ipython is None or "IPKernelApp" not in getattr(ipython.get_ipython(), "config", {}):
        return False
    return importlib.util.find_spec("ipywidgets") is not None


@functools.cache
def _terminal_tqdm() -> Any:
    from tqdm.std import tqdm

    return _without_monitor(tqdm)


@functools.cache
def _notebook_tqdm() -> Any:
    from tqdm.notebook import tqdm

    return _without_monitor(tqdm)


def _without_monitor(base: Any) -> Any:
    # tqdm would start a thread that redraws bars that stand still; here nobody redraws but the loop.
    return type(base.__name__, (base,), {"monitor_interval": 0})


class PrintGuard:
    """Keeps what is printed to the terminal in whole lines above the bars, from `start` to `stop`.

    Standard streams that are terminals get a stand-in, and so do the handlers of the root logger that write to them. A
    line that has no end yet is shown when it has one.
    """

    def __init__(self) -> None:
        self._redirection: Redirection | None = None
        self._stand_ins: list[_AboveBars] = []
        self._handlers: list[tuple[Any, _AboveBars]] = []

    def start(self) -> None:
        """Begins; once more does nothing."""
        if self._redirection is not None:
            return
        names = tuple(name for name in ("stdout", "stderr") if is_terminal(getattr(sys, name)))
        self._redirection = Redirection(self._make, names)
        for handler in logging.getLogger().handlers:
            for stand_in in self._stand_ins:
                if getattr(handler, "stream", None) is stand_in.beneath:
                    handler.setStream(stand_in)  # type: ignore[attr-defined]  # a handler with a stream has it
                    self._handlers.append((handler, stand_in))

    def stop(self) -> None:
        """Ends, when the bars are closed."""
        if self._redirection is None:
            return
        for handler, stand_in in self._handlers:
            if handler.stream is stand_in:
                handler.setStream(stand_in.beneath)
        self._redirection.undo()
        for stand_in in self._stand_ins:
            stand_in.finish()
        self._redirection = None
        self._stand_ins, self._handlers = [], []

    def _make(self, _name: str, stream: Any) -> StandIn:
        stand_in = _AboveBars(stream)
        self._stand_ins.append(stand_in)
        return stand_in


class _AboveBars(StandIn):
    """Takes bars off the screen, writes whole lines, and draws the bars again."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._partial = ""

    @property
    def beneath(self) -> Any:
        """The stream."""
        return self._wrapped

    def write(self, text: str) -> int:
        # Bars of the user's own, and `tqdm.write`, know where they are on the screen.
        is_tqdm = sys._getframe(1).f_globals.get("__name__", "").startswith("tqdm.")  # noqa: SLF001
        if is_tqdm or not self.is_listening:
            return super().write(text)
        tqdm = _terminal_tqdm()
        # One lock, tqdm's: the bars and the half line belong to whoever holds it. It is reentrant.
        with tqdm.get_lock():
            lines, end, self._partial = (self._partial + text).rpartition("\n")
            if end:
                with tqdm.external_write_mode(file=self):
                    self._wrapped.write(lines + end)
                    self._wrapped.flush()
        return len(text)

    def finish(self) -> None:
        """Writes a last line that has no end."""
        partial, self._partial = self._partial, ""
        if partial:
            self._wrapped.write(partial)
