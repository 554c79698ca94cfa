"""`LoggingHandler`: a `logging.Handler` that logs warnings and errors as texts of a run.

Log records may come from any thread. Destinations are called only in the training thread: records of other
threads wait in a bounded queue until the training thread logs a message or an event fires.
"""

import logging
import threading
from collections import deque
from typing import Any

from events import Callback, EngineClosedError, Event, Logger, State, redact_text

__all__ = ["LogMessages", "LoggingHandler"]

# Their messages may be about a failing destination; passing them on to it would recurse.
_OWN_LOGGERS = ("destinations", "events", "uploads")
_MAX_PENDING = 1000
_FORMAT = "%(name)s: %(message)s"


class LoggingHandler(logging.Handler):
    """Logs each log record as a text named `log/<level>`, such as `log/warning`, with secrets redacted.

    ```python
    handler = LoggingHandler(run.logger)
    logging.getLogger().addHandler(handler)
    ```

    Messages of this project itself are ignored, and so are messages logged while a record is being delivered.

    **Threading.** The thread that creates the handler is the training thread; its records are delivered at
    once. Records of other threads are delivered when it next logs, calls `deliver`, or, with `LogMessages`,
    at the next event.

    Args:
        logger: the logger of the run.
        level: minimum level.
    """

    def __init__(self, logger: Logger, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self.setFormatter(logging.Formatter(_FORMAT))
        self._logger = logger
        self._owner = threading.get_ident()
        # Filled by any thread, emptied by the owner; deque.append and popleft are atomic.
        self._pending: deque[tuple[str, str]] = deque()
        self._is_delivering = False
        self.dropped_records = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a record; in the training thread, also delivers it."""
        is_owner = threading.get_ident() == self._owner
        if record.name.partition(".")[0] in _OWN_LOGGERS or (is_owner and self._is_delivering):
            return
        try:
            text = redact_text(self.format(record))
        except Exception:  # noqa: BLE001  # like all handlers of the standard library
            self.handleError(record)
            return
        if len(self._pending) >= _MAX_PENDING:
            self.dropped_records += 1
        else:
            self._pending.append((text, f"log/{record.levelname.lower()}"))
        if is_owner:
            self.deliver()

    def deliver(self) -> None:
        """Delivers queued records; does nothing in threads other than the training thread."""
        if self._is_delivering or threading.get_ident() != self._owner:
            return
        self._is_delivering = True
        try:
            while self._pending:
                text, name = self._pending.popleft()
                self._logger.log_text(text, name=name)
        except EngineClosedError:
            # The run is closed, but the handler is still attached.
            self._pending.clear()
        finally:
            self._is_delivering = False

    def flush(self) -> None:
        """Delivers queued records."""
        self.deliver()


class LogMessages(Callback):
    """Callback that attaches a `LoggingHandler` for the duration of a run.

    ```python
    Run(loggers=[RunDirectory("runs/digits")], callbacks=[LogMessages()])
    ```

    Args:
        level: minimum level.
        logger_name: name of the logger to attach to; default: the root logger.
    """

    def __init__(self, level: int = logging.WARNING, logger_name: str = "") -> None:
        self._level = level
        self._logger_name = logger_name
        self._handler: LoggingHandler | None = None

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Attaches the handler at `INIT`, and delivers queued records at every event."""
        if event is Event.INIT:
            self._handler = LoggingHandler(logger, self._level)
            logging.getLogger(self._logger_name).addHandler(self._handler)
        elif self._handler is not None:
            self._handler.deliver()

    def close(self, state: State, logger: Any) -> None:
        """Detaches the handler and delivers the rest."""
        handler, self._handler = self._handler, None
        if handler is not None:
            logging.getLogger(self._logger_name).removeHandler(handler)
            handler.deliver()
            handler.close()
