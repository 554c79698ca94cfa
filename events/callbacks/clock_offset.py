"""`ClockOffset`: how far the clock of rank 0 is ahead of that of this machine.

Ranks of one machine have one clock: its first rank alone asks, and tells the others. It asks rank 0 through
the store of torchrun's agent, in a daemon thread: no collective, and training waits for none of it.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from events.state import State

__all__ = ["ClockOffset"]

_PREFIX = "training-destinations/clock"
_PINGS = 10
# So long a rank asks and answers, and looks whether it has been asked or answered.
_SECONDS = 120.0
_LOOK_SECONDS = 0.002
_LAZY_SECONDS, _BUSY_SECONDS = 0.1, 1.0


def _machine() -> str:
    """Returns what ranks with the same clock have in common."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


class ClockOffset:
    """Asks for the clock of rank 0 by Cristian's algorithm.

    Of ten questions the one counts that was answered fastest; the offset is off by half of what that took at
    most. It is asked once: clocks that drift apart later are not noticed.

    **Threading.** A daemon thread asks, on rank 0 it answers, for two minutes at most.

    Args:
        store: returns torchrun's store, called in the thread.
        rank, world_size: of this process.
        round_name: of the attempt: the same on all ranks, and no other before.
        clock: returns seconds since 1970.
        machine: the same on ranks with one clock.
    """

    def __init__(
        self,
        store: Callable[[], Any],
        rank: int,
        world_size: int,
        round_name: str,
        *,
        clock: Callable[[], float] = time.time,
        machine: str | None = None,
    ) -> None:
        self.seconds: float | None = 0.0 if rank == 0 else None
        """What has to be added to this machine's time to have rank 0's; None while it is not known."""
        self.error_seconds: float | None = None
        """By how much it is off, at most."""
        self._make_store = store
        self._rank = rank
        self._world_size = world_size
        self._prefix = f"{_PREFIX}/{round_name}"
        self._clock = clock
        self._machine = _machine() if machine is None else machine
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clock-offset", daemon=True)

    @classmethod
    def of(cls, state: State) -> "ClockOffset | None":
        """Begins to ask for the ranks of a `torchrun`; None for a single machine, or without its store."""
        has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        port = os.environ.get("MASTER_PORT", "")
        if not has_store or not port.isdecimal() or state.world_size <= state.local_world_size:
            return None

        def store() -> Any:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

            address = os.environ.get("MASTER_ADDR", ""), int(port)
            return TCPStore(*address, is_master=False, timeout=timedelta(seconds=_SECONDS))

        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        found = cls(store, state.rank, state.world_size, f"{state.run_name}/{restart}")
        found.start()
        return found

    def start(self) -> None:
        """Begins to ask, or to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Ends that; does not wait."""
        self._stop.set()

    def join(self) -> None:
        """Waits until it is known, or given up."""
        self._thread.join(_SECONDS)

    def _run(self) -> None:
        # The store goes with its agent, at any time.
        with contextlib.suppress(RuntimeError, ValueError, OSError, TimeoutError):
            store = self._make_store()
            if self._rank == 0:
                store.set(f"{self._prefix}/machine", self._machine)
                self._answer(store)
            else:
                self._ask(store)

    def _wait_for(self, store: Any, key: str, until: float, *, is_busy: bool = False) -> bytes | None:
        """Returns a value of the store once it is there; None if it is too late, or the run has ended."""
        began = time.monotonic()
        while not store.check([key]):
            now = time.monotonic()
            pause = _LOOK_SECONDS if is_busy and now - began < _BUSY_SECONDS else _LAZY_SECONDS
            if now > until or self._stop.wait(pause):
                return None
        return bytes(store.get(key))

    def _answer(self, store: Any) -> None:
        until, number = time.monotonic() + _SECONDS, 1
        while self._wait_for(store, f"{self._prefix}/ask/{number}", until, is_busy=True) is not None:
            store.set(f"{self._prefix}/answer/{number}", repr(self._clock()))
            number += 1

    def _ask(self, store: Any) -> None:
        until = time.monotonic() + _SECONDS
        of_zero = self._wait_for(store, f"{self._prefix}/machine", until)
        if of_zero is None:
            return
        if of_zero.decode() == self._machine:
            self.seconds = self.error_seconds = 0.0
            return
        found = f"{self._prefix}/offset/{self._machine}"
        # The first of the machine that comes here asks.
        if store.add(f"{found}/askers", 1) == 1:
            best: tuple[float, float] | None = None
            for _ in range(_PINGS):
                ping = self._ping(store, until)
                if ping is None:
                    break
                best = ping if best is None else min(best, ping)
            if best is None:
                return
            store.set(found, f"{best[1]!r} {best[0] / 2!r}")
        text = self._wait_for(store, found, until)
        if text is not None:
            seconds, error = map(float, text.split())
            self.seconds, self.error_seconds = seconds, error

    def _ping(self, store: Any, until: float) -> tuple[float, float] | None:
        """Asks once; returns how long that took, and how far the clock of rank 0 is ahead."""
        number = store.add(f"{self._prefix}/asked", 1)
        began, at = time.monotonic(), self._clock()
        store.set(f"{self._prefix}/ask/{number}", "")
        answer = self._wait_for(store, f"{self._prefix}/answer/{number}", until, is_busy=True)
        if answer is None:
            return None
        took = time.monotonic() - began
        return took, float(answer) - (at + took / 2)
