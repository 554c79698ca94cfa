"""A `logging.Handler` of the standard library that brings warnings and errors into a run, as texts.

Records may come from any thread. Destinations are called in the training thread alone: what comes from others waits, in a
queue with a bound, until the training thread logs something or an event comes.
"""

import logging
import threading
from collections import deque
from typing import Any

from events import Callback, EngineClosedError, Event, Logger, State, redact_text

__all__ = ["LogMessages", "LoggingHandler"]

# What these say may be about a destination that fails: to hand it to that destination would never end.
_OWN_LOGGERS = ("destinations", "events", "uploads")
_MOST_WAITING = 1000
_FORMAT = "%(name)s: %(message)s"


class LoggingHandler(logging.Handler):
    """Logs each record as a text called `log/<level>`, such as `log/warning`, without secrets.

    ```python
    handler = LoggingHandler(run.logger)
    logging.getLogger().addHandler(handler)
    ```

    What this project itself logs is left out, and so is what is logged while a record is handed over.

    **Threading.** The thread that makes the handler is the one that trains: what it logs arrives at once. What other
    threads log waits for it to log, to call `deliver`, or, with `LogMessages`, for the next event.

    Args:
        logger: the logger of the run.
        level: the least severe level that is taken.
    """

    def __init__(self, logger: Logger, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self.setFormatter(logging.Formatter(_FORMAT))
        self._logger = logger
        self._owner = threading.get_ident()
        # Filled by any thread, emptied by the owner; appending to a deque and taking from it are atomic.
        self._waiting: deque[tuple[str, str]] = deque()
        self._is_delivering = False
        self.dropped_records = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Takes a record; blocks no longer than a destination takes to accept a text."""
        is_owner = threading.get_ident() == self._owner
        if record.name.partition(".")[0] in _OWN_LOGGERS or (is_owner and self._is_delivering):
            return
        try:
            text = redact_text(self.format(record))
        except Exception:  # noqa: BLE001  # as in every handler of the standard library
            self.handleError(record)
            return
        if len(self._waiting) >= _MOST_WAITING:
            self.dropped_records += 1
        else:
            self._waiting.append((text, f"log/{record.levelname.lower()}"))
        if is_owner:
            self.deliver()

    def deliver(self) -> None:
        """Hands over what waits; for the training thread, others may call it and it does nothing."""
        if self._is_delivering or threading.get_ident() != self._owner:
            return
        self._is_delivering = True
        try:
            while self._waiting:
                text, name = self._waiting.popleft()
                self._logger.log_text(text, name=name)
        except EngineClosedError:
            # The run is over, and the handler is still attached: nobody is left to tell.
            self._waiting.clear()
        finally:
            self._is_delivering = False

    def flush(self) -> None:
        """Hands over what waits."""
        self.deliver()


class LogMessages(Callback):
    """Attaches a `LoggingHandler` while a run lasts, in whatever takes callbacks of ours.

    ```python
    Run(loggers=[RunDirectory("runs/digits")], callbacks=[LogMessages()])
    ```

    Args:
        level: the least severe level that is taken.
        logger_name: whose records are taken; the root's, which are all, where it is empty.
    """

    def __init__(self, level: int = logging.WARNING, logger_name: str = "") -> None:
        self._level = level
        self._logger_name = logger_name
        self._handler: LoggingHandler | None = None

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Attaches at `INIT`, hands over at every event."""
        if event is Event.INIT:
            self._handler = LoggingHandler(logger, self._level)
            logging.getLogger(self._logger_name).addHandler(self._handler)
        elif self._handler is not None:
            self._handler.deliver()

    def close(self, state: State, logger: Any) -> None:
        """Hands over the rest, and detaches."""
        handler, self._handler = self._handler, None
        if handler is not None:
            logging.getLogger(self._logger_name).removeHandler(handler)
            handler.deliver()
            handler.close()
