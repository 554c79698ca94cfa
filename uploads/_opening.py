"""What a queue settles before it takes its first file: where uploads run and what does them, which spool is its own, what that spool says of itself."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ._default_spool import default_spools
from ._worker_link import WorkerLink, WorkerOrder
from .drain import Drain
from .errors import SpoolOwned
from .ownership import OwnerLock
from .spool import Spool
from .stores.uris import identity_of, is_kept_option, is_remote, kept_options, options_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ._ledger import Ledger
    from .retry import RetryPolicy
    from .stores import Store

__all__ = ["Drainer", "Isolation", "choose_isolation", "order_for", "start_drainer", "take_spool"]

Isolation = Literal["threads", "process"]

_log = logging.getLogger("uploads")


class Drainer(Protocol):
    """What empties the spool: a Drain in this process, or a WorkerLink to one in another."""

    def start(self) -> None:
        """Takes the spool over and begins."""

    def add(self, folders: Iterable[str]) -> None:
        """Hears of new entries."""

    def stop(self, timeout_seconds: float = ...) -> None:
        """Ends, and gives the spool back."""

    def forget_after_fork(self) -> None:
        """In a forked child: everything is the parent's."""


def choose_isolation(asked: Isolation | None, store: Store | str | Path) -> Isolation:
    """What was asked for; by default a process for stores over a network that are given by URI, threads for the rest.

    Raises:
        ValueError: A process was asked for, and the store cannot be sent to one.
    """
    is_uri = isinstance(store, str | Path)
    if asked == "process" and not is_uri:
        raise ValueError(
            f"isolation='process' must have a store given by URI, got {store!r}. Give its URI, or isolation='threads'."
        )
    return asked or ("process" if isinstance(store, str | Path) and is_remote(store) else "threads")


def start_drainer(
    isolation: Isolation,
    spool: Spool,
    store: Store,
    order: WorkerOrder,
    policy: RetryPolicy | None,
    ledger: Ledger,
) -> Drainer:
    """Starts what empties the spool, and tells the ledger what became of entries. Threads do it where no process can be started.

    Args:
        isolation: Where.
        spool: The queue's.
        store: The same as in the order, opened.
        order: What a worker process is told; threads do as much.
        policy: As the user gave it.
        ledger: Hears.

    Raises:
        SpoolOwned: Threads were asked for, and a live process drains the spool.
        RuntimeError: No thread can be started.
    """
    if isolation == "process":
        link = WorkerLink(order, on_settled=ledger.close, look_up=ledger.look_up)
        try:
            link.start()
        except OSError as error:
            _log.warning("no worker process can be started, so that threads of this one upload: %s", error)
        else:
            return link
    drain = Drain(
        spool,
        store,
        workers=order.workers,
        policy=policy,
        on_settled=ledger.close,
        on_idle=ledger.look_up,
    )
    drain.start()
    return drain


def order_for(
    spool: Spool, given: Store | str | Path, store: Store, options: dict[str, Any], **how: Any
) -> WorkerOrder:
    """What a worker process is told: the store as it was opened here, wherever and in whatever environment it is opened there.

    Args:
        spool: The queue's.
        given: How the user gave the store.
        store: The same, opened.
        options: Given with it, secrets included.
        how: What else the order has.
    """
    everything = options_of(given) | options if isinstance(given, str | Path) else {}
    return WorkerOrder(
        str(spool.path), store.uri(), everything, **how, store_identity=identity_of(store.uri())
    )


def take_spool(
    path: str | Path | None, given: Store | str | Path, store: Store, options: dict[str, Any]
) -> tuple[Spool, OwnerLock]:
    """The spool that was asked for, or the first of the default ones that nobody has: the lock decides, not a look before it.

    Args:
        path: Asked for, if any.
        given: How the user gave the store.
        store: The same, opened.
        options: Given with it.

    Raises:
        SpoolOwned: Somebody has the one that was asked for.
        SpoolUnusable: It cannot be written, is another user's, or holds entries for another store.
    """
    description = _description(given, store, options)
    for candidate in default_spools(identity_of(store.uri())) if path is None else (path,):
        spool = Spool(candidate)
        spool.create()
        owner = OwnerLock(spool.queue_lock, "queue")
        try:
            owner.acquire()
        except SpoolOwned:
            if path is not None:
                raise
        else:
            try:
                spool.belong_to(description)
            except BaseException:
                owner.release()
                raise
            return spool, owner
    raise AssertionError("the default spools have no end")


def _description(given: Store | str | Path, store: Store, options: dict[str, Any]) -> dict[str, Any]:
    """What `spool.json` keeps for `resume`: of the options those that are known to be harmless, of the others their names."""
    everything = options_of(given) | options if isinstance(given, str | Path) else {}
    return {
        "uri": store.uri(),
        "options": kept_options(everything),
        "left_out": sorted(name for name in everything if not is_kept_option(name)),
    }
