"""A thread that does the same work at an interval, and when asked."""

import threading
import time
from collections.abc import Callable

__all__ = ["Timer"]


class Timer:
    """Calls `work` every `seconds`, and once more when it is stopped.

    What `work` raises goes to `on_error`, and the next call comes all the same. A forked child has no thread; call
    `forget_in_child` there.

    Args:
        work: called with whether this is the last time.
        seconds: between the end of a call and the next.
        on_error: takes what `work` raised.
        name: of the thread.
        on_end: called at the end of the thread, in it.
    """

    def __init__(
        self,
        work: Callable[[bool], None],
        seconds: float,
        on_error: Callable[[Exception], None],
        name: str,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._work = work
        self._seconds = seconds
        self._on_error = on_error
        self._name = name
        self._on_end = on_end
        self._wake = threading.Event()
        # Guards the three counters below, and tells those who wait in `flush`.
        self._turn = threading.Condition()
        self._begun = 0
        self._done = 0
        self._is_stopping = False
        self._thread: threading.Thread | None = None

    @property
    def is_started(self) -> bool:
        """Whether there is, or was, a thread."""
        return self._thread is not None

    def start(self) -> None:
        """Starts the thread; does nothing where it runs."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Has the work done soon; returns at once."""
        self._wake.set()

    def flush(self, timeout_seconds: float) -> bool:
        """Waits for a call of `work` that begins after this one; False where that takes longer than the timeout."""
        if self._thread is None or threading.current_thread() is self._thread:
            return True
        self.start()
        with self._turn:
            wanted = self._begun + 1
            self._wake.set()
            return self._turn.wait_for(lambda: self._done >= wanted, timeout_seconds)

    def stop(self, timeout_seconds: float) -> bool:
        """Does the work for the last time, and ends the thread; False where that takes longer than the timeout."""
        thread = self._thread
        if thread is None:
            return True
        self._is_stopping = True
        self._wake.set()
        thread.join(timeout_seconds)
        return not thread.is_alive()

    def forget_in_child(self) -> None:
        """Forgets the thread, which is the parent's."""
        self._thread = None
        self._turn = threading.Condition()

    def _attempt_end(self) -> None:
        try:
            self._on_end()
        except Exception as error:  # noqa: BLE001  # handed on
            self._on_error(error)

    def _run(self) -> None:
        while True:
            if not self._is_stopping:
                self._wake.wait(self._seconds)
            with self._turn:
                # Together: a call of `flush` is answered by this turn, or else by the next, and never costs both.
                self._wake.clear()
                self._begun += 1
                turn = self._begun
            is_last = self._is_stopping
            try:
                self._work(is_last)
            except Exception as error:  # noqa: BLE001  # handed on
                self._on_error(error)
            with self._turn:
                self._done = turn
                self._turn.notify_all()
            if is_last:
                self._attempt_end()
                return
            time.sleep(0)
