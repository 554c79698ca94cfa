"""The door: files go in, and are in the store some time later, whatever happens to this process."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import hashlib
import itertools
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from .disk import call_in_forked_children, write_new
from .download import POINTER_SUFFIX, download_file
from .drain.drain import Drain
from .drain.retry import RetryPolicy
from .drain.worker_link import WorkerLink, WorkerOrder
from .errors import (
    InvalidSourceError,
    ManifestError,
    QueueClosedError,
    RemoteNameTakenError,
    SpoolFullError,
    SpoolOwnedError,
    SpoolUnusableError,
    UploadError,
    UploadsIncompleteError,
)
from .handle import Backlog, FolderHandle, Outcome, UploadHandle, UploadState, check_seconds, check_workers
from .ledger import Ledger
from .names import check_remote_name
from .redaction import redact
from .spool.flush import Flusher
from .spool.ownership import OwnerLock, owner_of
from .spool.spool import Spool
from .spool.staging import How, Intake, Room, files_of, size_of
from .stores import open_store
from .stores.uri import identity_of, is_kept_option, is_remote, kept_options, options_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType, TracebackType

    from .spool.entry import Entry
    from .stores import Store

__all__ = [
    "Drainer",
    "Isolation",
    "LeftBehind",
    "UploadQueue",
    "choose_isolation",
    "default_spools",
    "exit_on_sigterm",
    "order_for",
    "start_drainer",
    "take_spool",
]

_log = logging.getLogger("uploads")

_LOOK_SECONDS = 0.5


def default_spools(store_uri: str) -> Iterator[Path]:
    """Spools for this store, numbered from 0, without end. A queue takes the first that no live queue has: what an earlier process left there is uploaded along.

    Under `$UPLOADS_HOME`, else `$XDG_STATE_HOME/uploads`, else `~/.local/state/uploads`.
    """
    home = os.environ.get("UPLOADS_HOME")
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    root = Path(home or f"{state}/uploads").expanduser()
    readable = re.sub(r"[^A-Za-z0-9]+", "-", store_uri.partition("?")[0]).strip("-")[:60]
    digest = hashlib.sha256(store_uri.encode()).hexdigest()[:8]
    for number in itertools.count():
        yield root / f"{readable}-{digest}" / str(number)


class LeftBehind:
    """Uploads what processes that are gone left in the other default spools for the same store.

    A thread of its own opens a queue for each, one after the other, and closes it when it is empty; a spool that a live process has is
    left to it. So a training that is started again with fewer ranks leaves nothing behind.

    Args:
        own: The spool of the queue that this belongs to.
        open_queue: Opens a queue on one of the others.
    """

    def __init__(self, own: Path, open_queue: Callable[[Path], UploadQueue]) -> None:
        self._open_queue = open_queue
        self._backlogs = {
            path: found
            for path in sorted(own.parent.iterdir())
            if path != own and path.is_dir() and (found := _backlog_of(path)).remaining
        }
        self._current: tuple[Path, UploadQueue] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="uploads-left-behind", daemon=True)
        if self._backlogs:
            self._thread.start()

    def backlogs(self) -> tuple[Backlog, ...]:
        """What is left in each of them, but for those that a live process has."""
        current = self._current
        found = dict(self._backlogs)  # Entries are replaced, by the thread alone.
        if current is not None:
            found[current[0]] = current[1].backlog()
        return tuple(backlog for backlog in found.values() if not backlog.is_empty)

    def wait(self, timeout_seconds: float) -> bool:
        """Whether nothing more is done within this time."""
        if self._backlogs and not self._stopping.is_set():
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def stop(self, timeout_seconds: float) -> None:
        """Puts back what is in flight, and leaves the rest where it is."""
        self._stopping.set()
        if self._backlogs:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        for path in self._backlogs:
            if self._stopping.is_set():
                return
            try:
                self._finish(path)
            except SpoolOwnedError:
                self._backlogs[path] = Backlog(path, (), ())
            except Exception as error:  # noqa: BLE001  # what is wrong with one must not keep the others waiting
                _log.warning("what an earlier process left in %s is not uploaded: %s", path, error)

    def _finish(self, path: Path) -> None:
        queue = self._open_queue(path)
        self._current = path, queue
        try:
            while queue.unsettled() and not self._stopping.is_set():
                queue.drain(_LOOK_SECONDS)
        finally:
            self._backlogs[path] = queue.close(0.0)
            self._current = None


def _backlog_of(path: Path) -> Backlog:
    """What is in a spool that nobody has; nothing in one that cannot be looked at."""
    spool = Spool(path)
    try:
        if owner_of(spool.queue_lock) is not None:
            return Backlog(path, (), ())
        folders = [*spool.list_inflight(), *spool.list_pending()]
    except OSError:
        return Backlog(path, (), ())
    return Backlog(path, tuple(_name_of(spool, folder) for folder in folders), ())


def _name_of(spool: Spool, folder: str) -> str:
    try:
        entry = spool.entry_of(folder)
    except (ManifestError, OSError):
        return folder
    return folder if entry is None else entry.remote_name


Isolation = Literal["threads", "process"]


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
        SpoolOwnedError: Threads were asked for, and a live process drains the spool.
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
        SpoolOwnedError: Somebody has the one that was asked for.
        SpoolUnusableError: It cannot be written, is another user's, or holds entries for another store.
    """
    description = _description(given, store, options)
    for candidate in default_spools(identity_of(store.uri())) if path is None else (path,):
        spool = Spool(candidate)
        spool.create()
        owner = OwnerLock(spool.queue_lock, "queue")
        try:
            owner.acquire()
        except SpoolOwnedError:
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


def exit_on_sigterm() -> None:
    """Makes SIGTERM raise SystemExit(143) in the main thread, so that `finally` blocks run and queues drain up to their `exit_seconds`.

    A handler that was installed before is called first. Call it from the main thread.

    Raises:
        ValueError: Called from another thread.
    """
    earlier: Any = signal.getsignal(signal.SIGTERM)

    def end(number: int, frame: FrameType | None) -> None:
        if callable(earlier):
            earlier(number, frame)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


Durability = Literal["process", "power"]

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


class UploadQueue:
    """Takes files and brings them to a store.

    A file is safe when `submit` returns: its bytes are the spool's, and survive `kill -9` of this process.
    The queue starts working when it is made; what an earlier process left in the spool is uploaded along.

    **Threading.** Every method may be called from any thread. Versions of one name are delivered in the order in which they became
    pending, the last step of `submit`; of two threads that submit one name at once, the one whose copy is ready later wins. `submit` blocks for as long as staging takes, never for the network.

    **Fork.** A forked child may submit, which only stages; the parent's drain finds it within seconds. Its `close` does nothing.

    **Exit.** At interpreter exit (`sys.exit`, an exception, Ctrl-C) the queue drains for up to `exit_seconds`; what is left stays
    in the spool and is named, with the command that finishes it. No signal handler is installed; see `exit_on_sigterm`.

    Args:
        store: A URI or path for `open_store`, or a Store.
        spool: The folder of entries; one queue at a time. The default is found again by the next start for the same store, which also
            uploads what processes that are gone left in others of these.
        workers: Uploads at the same time.
        isolation: "process" uploads in a worker process, so that the training loop keeps its interpreter to itself; the worker is
            replaced when it dies and outlives this process by up to `grace_seconds`. "threads" uploads in threads of this process.
            By default remote stores given by URI get a process, anything else threads.
        durability: "process": what was submitted survives the process at once and a loss of power within about a second.
            "power": it survives a loss of power when `submit` returns, for the price of waiting for the disk.
        spool_bytes: The most that may be in the spool, with what earlier processes left there and what failed.
        free_bytes: What is left free on the spool's disk.
        full_wait_seconds: How long `submit` waits for room before it refuses.
        exit_seconds: How long the interpreter's exit may take for uploads.
        close_at_exit: Whether to do so at all; without, whoever made the queue closes it.
        give_back_seconds: How much longer `close` may take for what is in flight to end, or to be put back.
        grace_seconds: How long a worker process goes on alone.
        raise_errors: Whether `submit` raises when it refuses, and `close` when something was not delivered.
        policy: How long to wait between attempts. A worker process has it too, but for `uniform`, which it draws by itself.
        store_options: For `open_store`, where `store` is a URI.

    Raises:
        SpoolOwnedError: Another live queue has this spool.
        SpoolUnusableError: It cannot be written.
        RuntimeError: Neither a worker process nor a thread can be started.
        ValueError: A bad argument.
    """

    def __init__(
        self,
        store: Store | str | Path,
        *,
        spool: str | Path | None = None,
        workers: int = 4,
        isolation: Isolation | None = None,
        durability: Durability = "process",
        spool_bytes: int | None = None,
        free_bytes: int = 1 << 30,
        full_wait_seconds: float = 0.0,
        exit_seconds: float = 30.0,
        close_at_exit: bool = True,
        give_back_seconds: float = 5.0,
        grace_seconds: float = 600.0,
        raise_errors: bool = False,
        policy: RetryPolicy | None = None,
        store_options: dict[str, Any] | None = None,
    ) -> None:
        check_workers(workers)
        self._exit_seconds = check_seconds("exit_seconds", exit_seconds)
        self._give_back_seconds = check_seconds("give_back_seconds", give_back_seconds)
        grace_seconds = check_seconds("grace_seconds", grace_seconds)
        full_wait_seconds = check_seconds("full_wait_seconds", full_wait_seconds)
        self._store = open_store(store, **(store_options or {})) if isinstance(store, str | Path) else store
        isolation = choose_isolation(isolation, store)
        self._durability = durability
        self._raise_errors = raise_errors
        self._closing = threading.Lock()  # Guards _closed.
        self._closed: Backlog | None = None
        self._has_ended = False
        self._is_child = False
        self._left_behind: LeftBehind | None = None
        self.spool, self._owner = take_spool(spool, store, self._store, store_options or {})
        try:
            self.spool.sweep_tmp()
            self._room = Room(
                self.spool.path,
                spool_bytes=spool_bytes,
                free_bytes=free_bytes,
                wait_seconds=full_wait_seconds,
                clock=time.monotonic,
            )
            self._intake = Intake(self.spool, self._room, identity_of(self._store.uri()))
            self._flusher = Flusher(self.spool)
            self._ledger = Ledger(self.spool, self._room.give)
            self._uri_of, self._state_of = self._store.uri, self._ledger.state_of  # Shared by all handles.
            self._ledger.inherit((*self.spool.pending_folders(), *self.spool.inflight_folders()))
            if (
                spool_bytes is not None
            ):  # Else nobody asks, and a hundred thousand files need not be looked at.
                self._room.hold(self.spool.staged_bytes())
            order = order_for(
                self.spool,
                store,
                self._store,
                store_options or {},
                workers=workers,
                grace_seconds=grace_seconds,
                policy=(policy or RetryPolicy()).to_json(),
            )
            self._drainer = start_drainer(isolation, self.spool, self._store, order, policy, self._ledger)
        except BaseException:  # Nobody will close what was never made.
            self._owner.release()
            raise
        if spool is None:
            is_local = isinstance(store, str | Path) and not is_remote(store)
            open_queue = functools.partial(
                UploadQueue,
                self._store.uri() if is_local else store,
                workers=workers,
                isolation=isolation,
                free_bytes=free_bytes,
                close_at_exit=False,
                give_back_seconds=give_back_seconds,
                grace_seconds=grace_seconds,
                policy=policy,
                store_options=store_options,
            )
            self._left_behind = LeftBehind(self.spool.path, lambda path: open_queue(spool=path))
        call_in_forked_children(self._forget_after_fork)
        if close_at_exit:
            atexit.register(self._close_at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(self._exit_seconds)

    def submit(
        self,
        source: str | Path,
        remote_name: str | None = None,
        *,
        overwrite: bool = False,
        move: bool = False,
        link: bool = False,
        after: Sequence[UploadHandle | FolderHandle] = (),
        durability: Durability | None = None,
    ) -> UploadHandle | FolderHandle:
        """Takes a file, or every file under a folder. Returns after staging.

        Args:
            source: A regular file, or a folder, whose files are submitted under `remote_name/`.
            remote_name: Under which it is wanted; by default the source's name.
            overwrite: Whether an object of that name may be replaced. A newer version of a name that still waits replaces the older one.
            move: Takes the file by rename: instant, and gone from where it was. A folder's files are moved one by one.
            link: Takes the file by hard link: instant but for one reading. **Dangerous** where the file is later rewritten in place
                (as `torch.save` to the same path does): the upload then fails as corrupt. Safe for writers that replace by rename.
            after: Handles of uploads to this queue that must be in the store before this one is. Where one was refused, so is
                this. Of another queue only what is in its store already is accepted.
            durability: For this file, where it differs from the queue's.

        Raises:
            InvalidRemoteNameError: At once, like the next four; nothing was staged.
            InvalidSourceError: Neither a readable regular file nor a folder.
            RemoteNameTakenError: `overwrite=False`, and this name is on its way already.
            UnstableSourceError: The file changed while it was copied, twice. Of a folder, the files before it are on their way.
            QueueClosedError: After `close`.
            ValueError: `move` and `link` together, or `after` names an upload of another queue that has not ended.
            UploadError: No room (`SpoolFullError`), or what it comes after was refused, and the queue has `raise_errors`; else the
                handle is in state `refused`.
        """
        source = Path(source)
        name = check_remote_name(source.name if remote_name is None else remote_name)
        if move and link:
            raise ValueError("a file must be submitted with move=True or link=True, got both")
        how: How = "move" if move else "link" if link else "copy"
        try:
            names = self._names_before(after)
        except UploadError as error:
            return self._refused(name, 0, error)
        to_disk = (durability or self._durability) == "power"
        if not source.is_dir():
            return self._submit_file(source, name, how, overwrite=overwrite, after=names, to_disk=to_disk)
        files = [(path, check_remote_name(f"{name}/{inner}")) for path, inner in files_of(source)]
        for path, inner in files:  # Before the first is staged: a folder is refused whole.
            self._refuse_if_useless(inner, overwrite=overwrite)
            size_of(path)
        handles = tuple(
            self._submit_file(path, inner, how, overwrite=overwrite, after=names, to_disk=to_disk)
            for path, inner in files
        )
        return FolderHandle(name, self._store.uri(name), handles)

    def submit_pointer(self, remote_name: str, target: UploadHandle) -> UploadHandle:
        """Points `remote_name` at what `target` uploads, once that is there.

        Writes `remote_name.symlink`, a text file with the target's name, as Composer does; `download_file(remote_name)` follows it.
        A newer pointer replaces an older one.
        """
        name = check_remote_name(remote_name + POINTER_SUFFIX)
        try:
            names = self._names_before((target,))
        except UploadError as error:
            return self._refused(name, 0, error)
        try:
            self._mend_spool()
            folder = self.spool.new_folder()
            try:
                write_new(folder / "pointer", target.remote_name)
                return self._submit_file(
                    folder / "pointer",
                    name,
                    "move",
                    overwrite=True,
                    after=names,
                    to_disk=self._durability == "power",
                )
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        except (
            OSError,
            InvalidSourceError,
            SpoolUnusableError,
        ) as error:  # The source is the spool's own here.
            return self._refused(name, 0, _as_spool_full(error, self.spool.path, 0))

    def download_file(
        self, name: str, destination: str | Path, *, overwrite: bool = False, progress_bar: bool = True
    ) -> Path:
        """`uploads.download_file` from this queue's store."""
        return download_file(
            name, destination, store=self._store, overwrite=overwrite, progress_bar=progress_bar
        )

    def uri(self, remote_name: str) -> str:
        """Where an upload of this name is, or would be."""
        return self._store.uri(remote_name)

    def unsettled(self) -> int:
        """How many entries are on their way, with those that earlier processes left in other default spools."""
        left = (
            0
            if self._left_behind is None
            else sum(len(one.remaining) for one in self._left_behind.backlogs())
        )
        return self._ledger.count() + left

    def backlog(self) -> Backlog:
        """What was not delivered so far, by name."""
        left_behind = () if self._left_behind is None else self._left_behind.backlogs()
        return Backlog(self.spool.path, self._ledger.remaining(), self._ledger.failures(), left_behind)

    def drain(self, timeout_seconds: float) -> Backlog:
        """Waits until everything submitted so far and since has ended, well or not; returns what was not delivered.

        Blocks for at most `timeout_seconds`.
        """
        self._wait(check_seconds("timeout_seconds", timeout_seconds))
        return self.backlog()

    def _wait(self, timeout_seconds: float) -> None:
        """Until nothing is left, also of what other processes submitted here."""
        deadline = time.monotonic() + timeout_seconds
        while self._ledger.wait_empty(max(0.0, deadline - time.monotonic())):
            with contextlib.suppress(OSError):
                if adopted := self._ledger.adopt():
                    self._drainer.add(adopted)
                    continue
            break
        if self._left_behind is not None:
            self._left_behind.wait(max(0.0, deadline - time.monotonic()))

    def close(self, timeout_seconds: float = 30.0) -> Backlog:
        """Drains up to the limit, stops, and names what was not delivered. A second call returns what the first did.

        Blocks for `timeout_seconds`, and up to `give_back_seconds` more for what is in flight to be put back.

        Raises:
            UploadsIncompleteError: Something was not delivered, and the queue has `raise_errors`.
        """
        timeout_seconds = check_seconds("timeout_seconds", timeout_seconds)
        with self._closing:
            if self._closed is not None or self._is_child:
                return self._closed or self.backlog()
            self._closed = self.backlog()  # From here on submit refuses; replaced below.
        give_back_seconds = 0.0
        try:
            atexit.unregister(self._close_at_exit)
            self._wait(timeout_seconds)
            give_back_seconds = self._give_back_seconds
        finally:  # Also when Ctrl-C ends the wait; then nothing is waited for.
            closed = self._end(give_back_seconds)
        if self._raise_errors and not closed.is_empty:
            raise UploadsIncompleteError(str(closed))
        return closed

    def _end(self, give_back_seconds: float) -> Backlog:
        try:
            if self._left_behind is not None:
                self._left_behind.stop(give_back_seconds)
            self._drainer.stop(give_back_seconds)
            self._flusher.stop(give_back_seconds)
        finally:  # Also when Ctrl-C ends that wait.
            with contextlib.suppress(OSError):  # What others delivered, and what others submitted.
                self._ledger.look_up()
                self._ledger.adopt()
            self._owner.release()
            self._closed = self.backlog()
            self._has_ended = True
            if not self._closed.is_empty:
                _log.warning("%s", self._closed)
        return self._closed

    # Submitting.

    def _submit_file(
        self, source: Path, name: str, how: How, *, overwrite: bool, after: dict[str, str], to_disk: bool
    ) -> UploadHandle:
        self._refuse_if_useless(name, overwrite=overwrite)
        identifier = uuid.uuid4().hex[:16]
        handle = UploadHandle(identifier, name, self._uri_of, self._state_of)
        size = 0
        try:
            size = size_of(source)
            self._mend_spool()
            entry = self._intake.accept(
                identifier,
                source,
                name,
                size,
                how,
                overwrite=overwrite,
                after=after,
                to_disk=to_disk,
                register=lambda entry: self._follow(entry, handle),
                announce=self._announce,
            )
        except BaseException as error:
            if handle.folder:
                self._ledger.strike(handle.folder)
            if isinstance(error, SpoolFullError | SpoolUnusableError):
                return self._refused(name, size, error)
            if isinstance(error, OSError) and not isinstance(error, UploadError):
                return self._refused(name, size, _as_spool_full(error, self.spool.path, size))
            raise
        if not self._is_child and not to_disk:
            self._flusher.add(entry.folder, unchecked=entry.crc32 is None)
        return handle

    def _announce(self, entry: Entry) -> None:
        self._ledger.confirm(entry.folder)
        if not self._is_child:
            self._drainer.add([entry.folder])

    def _mend_spool(self) -> None:
        if not self.spool.tmp.is_dir():
            _log.error("the spool %s was deleted and is made anew", self.spool.path)
            self.spool.create()

    def _names_before(self, after: Sequence[UploadHandle | FolderHandle]) -> dict[str, str]:
        """The remote names of what must be in the store before, by identifier; without what is there for certain.

        Raises:
            UploadError: One was refused, or failed in another queue: it will never be there.
            ValueError: One is on its way in another queue.
        """
        names = {}
        for one in after:
            for handle in one.handles if isinstance(one, FolderHandle) else (one,):
                is_ours = handle._look == self._state_of or self._knows(handle)  # noqa: SLF001  # the queue is the other half of a handle
                error = handle.exception(0) if handle.done() else None
                if error is not None and not (is_ours and handle.folder):
                    raise type(error)(
                        f"what it comes after, {handle.remote_name!r}, was not uploaded: {error}"
                    )
                if handle.done() and handle.state is UploadState.DONE:
                    continue
                if not is_ours:
                    raise ValueError(
                        f"after= must have handles of this queue, got one of {handle.uri}. Wait for it first, with result()."
                    )
                names[handle.identifier] = handle.remote_name
        return names

    def _knows(self, handle: UploadHandle) -> bool:
        """Whether an earlier queue of this process left the entry in this spool."""
        return bool(handle.folder) and self._ledger.knows(handle.folder)

    def _refuse_if_useless(self, name: str, *, overwrite: bool) -> None:
        if self._closed is not None:
            raise QueueClosedError(
                f"a closed queue must not be given files, got {name!r}. Nothing would upload it."
            )
        if not overwrite and self._ledger.is_on_its_way(name):
            raise RemoteNameTakenError(
                f"overwrite=False must have a name of its own, got {name!r}, which is on its way already. Use overwrite=True to replace it."
            )

    def _follow(self, entry: Entry, handle: UploadHandle) -> None:
        """Called in the order of sequence numbers, just before the entry becomes visible to the drain."""
        self._refuse_if_useless(entry.remote_name, overwrite=entry.overwrite)
        handle.folder = entry.folder
        self._ledger.open(entry.folder, handle)

    def _refused(self, name: str, size: int, error: UploadError) -> UploadHandle:
        if self._raise_errors:
            raise error
        _log.error("%s was not taken: %s", name, error)
        outcome = Outcome(
            uuid.uuid4().hex[:16],
            name,
            UploadState.REFUSED,
            self._store.uri(name),
            size,
            reason=redact(str(error)),
        )
        handle = UploadHandle(outcome.identifier, name, self._uri_of, self._state_of)
        handle._settle(outcome)  # noqa: SLF001  # the queue is the other half of a handle
        self._ledger.add_failure(outcome)
        return handle

    # The end of the process.

    def _close_at_exit(self) -> None:
        try:
            waiting = self.unsettled()
            if waiting:
                _log.warning(
                    "finishing %d uploads, for up to %.0f s; Ctrl-C stops at once and loses nothing",
                    waiting,
                    self._exit_seconds,
                )
            self.close(self._exit_seconds)
        except UploadsIncompleteError:
            pass
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C; SIGTERM, where `exit_on_sigterm` was called.
            if not self._has_ended:  # It came before `close` was ready for it.
                self._end(0.0)

    def _forget_after_fork(self) -> None:
        self._is_child = True
        self._left_behind = None  # Its thread is the parent's.
        self._closing = threading.Lock()
        self._ledger.forget_after_fork()
        self._room.forget_after_fork()
        self._intake.forget_after_fork()
        self._owner.forget()
        self._drainer.forget_after_fork()
        atexit.unregister(self._close_at_exit)


def _as_spool_full(error: Exception, spool: Path, size: int) -> SpoolFullError:
    what = getattr(error, "strerror", None) or str(error)
    if getattr(error, "errno", None) in _NO_ROOM:
        what = "no room"
    return SpoolFullError(
        f"spool {spool} must take {size} bytes, got {what}. Make room or choose another spool."
    )
