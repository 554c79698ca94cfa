"""The public queue: takes files and uploads them to a store in the background.

Staging runs in the thread that calls `submit`; uploads run in a worker process or in threads. Accepted files
survive the process: they are in the spool.
"""

import atexit
import contextlib
import errno
import functools
import hashlib
import itertools
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Self, get_args

from .arguments import Fence, Timeouts, check_bytes, check_choice, check_seconds, check_workers
from .deletions import Deletions
from .disk import call_in_forked_children, write_new
from .download import POINTER_SUFFIX, download_file
from .drain.drain import Drain
from .drain.retry import RetryPolicy
from .drain.supervisor import WorkerConfig, WorkerSupervisor
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
from .handle import (
    Backlog,
    FolderHandle,
    Outcome,
    UploadHandle,
    UploadState,
)
from .ledger import Ledger
from .messages import log_error, log_warning
from .names import check_remote_name
from .redaction import redact
from .spool.entry import Entry, read_attempts
from .spool.flush import Flusher
from .spool.ownership import OwnerLock, owner_of
from .spool.spool import Spool
from .spool.staging import DiskQuota, How, Stager, Submission, files_of, size_of
from .stores import LocalStore, Store, open_store
from .stores.uri import identity_of, is_kept_option, is_remote, kept_options, options_of

__all__ = [
    "Isolation",
    "UploadQueue",
    "choose_isolation",
    "default_spools",
    "exit_on_sigterm",
    "start_drain",
    "take_over_leftovers",
    "take_spool",
]


def default_spools(store_uri: str) -> Iterator[Path]:
    """Yields the default spools for a store, numbered from 0, without end.

    ```python
    print(next(default_spools("s3://bucket/digits")))
    ```

    A queue takes the first that no live queue owns.

    Under `$UPLOADS_HOME`, else `$XDG_STATE_HOME/uploads`, else `~/.local/state/uploads`.
    """
    home = os.environ.get("UPLOADS_HOME")
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    root = Path(home or f"{state}/uploads").expanduser()
    readable = re.sub(r"[^A-Za-z0-9]+", "-", store_uri.partition("?")[0]).strip("-")[:60]
    digest = hashlib.sha256(store_uri.encode()).hexdigest()[:8]
    for number in itertools.count():
        yield root / f"{readable}-{digest}" / str(number)


def take_over_leftovers(spool: Spool) -> list[Spool]:
    """Moves entries of ended processes from other default spools for the same store into this one.

    So nothing is left behind if a training is restarted with fewer ranks. Call it before anything is
    submitted: later submissions have higher numbers, and so are newer.

    Args:
        spool: The queue's spool, one of the default ones.

    Returns:
        Spools that could not be emptied, for instance because an earlier worker still uploads from them.
    """
    left = []
    for path in sorted(spool.path.parent.iterdir()):
        other = Spool(path)
        if path == spool.path or not _left_in(other):
            continue
        try:
            with OwnerLock(other.queue_lock, "queue"), OwnerLock(other.drain_lock, "queue"):
                spool.take_over(other)
        except (OSError, UploadError) as error:
            log_warning("cannot take over the leftovers in %s: %s", path, redact(str(error)))
            left.append(other)
    return left


def _left_in(spool: Spool) -> list[str]:
    """Returns the unfinished entries of a spool without an owner; none if it has one or can't be read."""
    try:
        is_owned = owner_of(spool.queue_lock) is not None
        return [] if is_owned else [*spool.list_inflight(), *spool.list_pending()]
    except OSError:
        return []


Isolation = Literal["threads", "process"]


def choose_isolation(asked: Isolation | None, store: Store | str | Path) -> Isolation:
    """Returns the isolation that was asked for; the default is a process for remote stores given by URI.

    Raises:
        ValueError: A process was asked for, and the store is not given by URI; or neither of the two.
    """
    place = store if isinstance(store, str | Path) else None
    if asked is not None:
        check_choice("isolation", asked, get_args(Isolation))
    if asked == "process" and place is None:
        raise ValueError(
            f"isolation='process' needs a store given by URI, got {store!r}; "
            "give its URI, or isolation='threads'"
        )
    return asked or ("process" if place is not None and is_remote(place) else "threads")


def start_drain(
    isolation: Isolation,
    spool: Spool,
    store: Store,
    config: WorkerConfig,
    policy: RetryPolicy,
    ledger: Ledger,
) -> Drain | WorkerSupervisor:
    """Starts to upload the entries of a spool, in threads if no process can be started.

    Args:
        isolation: Threads or a process.
        spool: The queue's spool.
        store: The same as in the configuration, opened.
        config: Of the worker process; threads take `workers` from it.
        policy: The delays between attempts.
        ledger: Receives outcomes.

    Raises:
        SpoolOwnedError: Threads were asked for, and a live process drains the spool.
        RuntimeError: No thread can be started.
    """
    if isolation == "process":
        link = WorkerSupervisor(config, on_settled=ledger.settle, look_up=ledger.reconcile)
        try:
            link.start()
        except OSError as error:
            log_warning("cannot start a worker process: %s; uploading in threads", error)
        else:
            return link
    drain = Drain(
        spool,
        store,
        workers=config.workers,
        policy=policy,
        on_settled=ledger.settle,
        on_idle=ledger.reconcile,
    )
    drain.start()
    return drain


def take_spool(path: str | Path | None, store: Store, options: dict[str, Any]) -> tuple[Spool, OwnerLock]:
    """Locks the given spool, or the first default one without an owner.

    Args:
        path: The given spool, if any.
        store: The queue's store.
        options: Options of the store. `spool.json` keeps harmless ones, and the names of the others.

    Raises:
        SpoolOwnedError: A live queue owns the given spool.
        SpoolUnusableError: It cannot be written, belongs to another user, or holds entries for another store.
    """
    kept = kept_options(options)
    left_out = sorted(name for name in options if not is_kept_option(name))
    description = {"uri": store.uri(), "options": kept, "left_out": left_out}
    for candidate in default_spools(identity_of(store.uri())) if path is None else (path,):
        spool = Spool(candidate)
        spool.create()
        owner = OwnerLock(spool.queue_lock, "queue")
        try:
            with spool.writing():
                owner.take()
            spool.assign_store(description)
        except SpoolOwnedError:
            if path is not None:
                raise
        except BaseException:
            owner.release()
            raise
        else:
            return spool, owner
    raise AssertionError("the default spools have no end")


def exit_on_sigterm() -> None:
    """Makes SIGTERM raise SystemExit(143) in the main thread.

    ```python
    exit_on_sigterm()
    ```

    Then `finally` blocks run, and queues drain for up to the `exit_seconds` of their `Timeouts`.
    An earlier handler is called first. Call this from the main thread.

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


def _check_apart(store: Store, spool: Path) -> None:
    """Raises ValueError if the store is a folder among the files of the spool."""
    if isinstance(store, LocalStore) and spool in (store.root, *store.root.parents):
        raise ValueError(f"the store {store.root} is in the folder of the spool, {spool}: name another")


class UploadQueue:
    """Uploads files to a store in the background.

    ```python
    with UploadQueue("store", workers=8) as queue:     # or "s3://bucket/digits"
        handle = queue.submit("notes.txt", "notes.txt")      # survives kill -9 from here on
        ...
        handle.result(timeout_seconds=60)
    ```

    A file is safe when `submit` returns: its bytes are in the spool and survive `kill -9` of this process.
    Uploads start at once, beginning with entries that an earlier process left in the spool.

    **Threading.** Every method may be called from any thread. Versions of one name are delivered in the order
    in which they became pending, the last step of `submit`; if two threads submit one name at once, the one
    whose copy is ready later wins. `submit` blocks for as long as staging takes, never for the network.

    **Fork.** For a forked child the queue is closed: it submits and deletes nothing.

    **Exit.** At interpreter exit (`sys.exit`, an exception, Ctrl-C) the queue drains for up to
    `timeouts.exit_seconds`. The log names files that remain in the spool, and the command that finishes them.
    No signal handler is installed; see `exit_on_sigterm`.

    Args:
        store: A URI or path for `open_store`, or a Store.
        spool: A folder for one queue at a time. The next process with the same store finds the default
            again, and uploads what ended processes left in other default spools.
        workers: The number of concurrent uploads.
        isolation: "process" uploads in a worker process, so that the training loop keeps its interpreter to
            itself; the worker is replaced when it dies and outlives this process by up to
            `timeouts.grace_seconds`. "threads" uploads in threads of this process. By default remote stores
            given by URI get a process, anything else threads.
        durability: "process": a submitted file survives the process at once, and a power loss within about a
            second. "power": it survives a power loss when `submit` returns, which waits for the disk.
        spool_bytes: The maximum size of the spool, including leftovers and failed entries.
        free_bytes: The minimum to leave free on the disk of the spool.
        timeouts: How long the queue waits: for room, at interpreter exit, for uploads in flight.
        close_at_exit: Whether to close the queue at interpreter exit.
        raise_errors: Whether `submit` raises if it refuses a file, and `close` if a file was not delivered.
        policy: The delays between attempts; a worker process gets all of it but `uniform`.
        fence: Applies to every file, pointer and deletion of this queue, even after this process has ended.
        store_options: For `open_store`, if `store` is a URI.

    Raises:
        SpoolOwnedError: Another live queue has this spool.
        SpoolUnusableError: It cannot be written.
        RuntimeError: Neither a worker process nor a thread can be started.
        ValueError: A bad argument, or the store is in the folder of the spool.
        TypeError: An argument of a wrong type.
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
        timeouts: Timeouts = Timeouts(),  # noqa: B008  # frozen
        close_at_exit: bool = True,
        raise_errors: bool = False,
        policy: RetryPolicy | None = None,
        fence: Fence | None = None,
        store_options: dict[str, Any] | None = None,
    ) -> None:
        self.check_arguments(locals())
        self._fence = fence
        self._timeouts = timeouts
        isolation = choose_isolation(isolation, store)
        options: dict[str, Any] = {}
        if isinstance(store, str | Path):
            options = options_of(store) | (store_options or {})
            store = open_store(store, **(store_options or {}))
        if spool is not None:
            spool = Path(os.path.expanduser(spool)).absolute()  # noqa: PTH111  # Path raises without a home
            _check_apart(store, spool)
        self._store = store
        self._durability = durability
        self._raise_errors = raise_errors
        self._closing = threading.Lock()  # Guards _closed.
        self._closed: Backlog | None = None
        self._deletions: Deletions | None = None
        self._policy = policy or RetryPolicy()
        self._has_ended = False
        self._left_behind: list[Spool] = []
        self._droppable: tuple[
            tuple[str, ...], ...
        ] = ()  # Names that give way together, the first ones first.
        self._dropped = 0
        self.spool, self._owner = take_spool(spool, store, options)
        self._earlier_status = self.spool.read_status()
        try:
            self.spool.sweep_tmp(is_owner=True)
            if spool is None:
                self._left_behind = take_over_leftovers(self.spool)
            self._quota = DiskQuota(
                self.spool.path,
                spool_bytes=spool_bytes,
                free_bytes=free_bytes,
                wait_seconds=timeouts.full_wait_seconds,
                clock=time.monotonic,
            )
            self._stager = Stager(self.spool, self._quota, identity_of(self._store.uri()))
            self._flusher = Flusher(self.spool)
            self._ledger = Ledger(self.spool, self._quota.release)
            self._uri_of, self._state_of = self._store.uri, self._ledger.state_of  # Shared by all handles.
            self._ledger.add_existing((*self.spool.pending_folders(), *self.spool.inflight_folders()))
            if spool_bytes is not None:  # Without a limit, the sizes of all files need not be read.
                self._quota.add_existing(self.spool.staged_bytes())
            config = WorkerConfig(
                str(self.spool.path),
                store.uri(),
                options,
                workers,
                timeouts,
                self._policy.to_json(),
                identity_of(store.uri()),  # In another environment, the URI may lead to another server.
            )
            self._drainer = start_drain(isolation, self.spool, store, config, self._policy, self._ledger)
        except BaseException:  # Nobody will close it.
            self._owner.release()
            with self.spool.writing():
                raise
        call_in_forked_children(self._forget_after_fork)
        if close_at_exit:
            atexit.register(self._close_at_exit)

    @staticmethod
    def check_arguments(arguments: Mapping[str, Any]) -> None:
        """Checks arguments of the constructor, by name, without looking at disk or store.

        Raises:
            TypeError: One has a wrong type.
            ValueError: One has a wrong value.
        """
        store = arguments["store"]
        if not isinstance(store, str | Path) and not hasattr(store, "put"):
            raise TypeError(f"store must be a URI, a folder or a Store, got {store!r}")
        choose_isolation(arguments["isolation"], store)
        check_workers(arguments["workers"])
        check_choice("durability", arguments["durability"], get_args(Durability))
        if not isinstance(arguments["timeouts"], Timeouts):
            raise TypeError(f"timeouts must be uploads.Timeouts(…), got {arguments['timeouts']!r}")
        check_bytes("free_bytes", arguments["free_bytes"])
        if arguments["spool_bytes"] is not None:
            check_bytes("spool_bytes", arguments["spool_bytes"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(self._timeouts.exit_seconds)

    def submit(
        self,
        source: str | Path,
        remote_name: str | None = None,
        *,
        overwrite: bool = False,
        move: bool = False,
        link: bool = False,
        crc32: int | None = None,
        after: Sequence[UploadHandle | FolderHandle] = (),
        unless: str | None = None,
        durability: Durability | None = None,
    ) -> UploadHandle | FolderHandle:
        """Submits a file, or every file under a folder. Returns after staging; never waits for the network.

        Args:
            source: A regular file, or a folder, whose files are submitted under `remote_name/`. Symlinks in
                it are followed if they lead to something in it.
            remote_name: Its name in the store; by default the name of the source.
            overwrite: Whether an existing object may be replaced. A pending older version of the name is
                superseded.
            move: Whether to move the file into the spool: instant on the same file system, and the source is
                gone afterwards. Files of a folder are moved one by one.
            link: Whether to take the file by hard link, where the system can: instant but for one reading, or
                at once if `crc32` is given. **Dangerous** if the file is later rewritten in place (as
                `torch.save` to the same path does): the upload then fails as corrupt, and an object in a
                folder on the same file system changes too, because it is the same file. Safe for writers that
                replace by rename.
            crc32: The CRC-32 of a file to move or to link, if you computed it while writing, which saves
                reading the file. If it is wrong, the upload fails as corrupt. Ignored for copies.
            after: Handles of uploads of this queue that must be in the store first. If one was refused, so is
                this one. Handles of another queue must be done.
            unless: The name of an object that supersedes this upload once it exists. It is looked for right
                before the bytes are sent. If a successor puts that object first, files that wait here can't
                replace what it wrote. The default is the fence of the queue; empty for none.
            durability: Overrides the queue's `durability`.

        Raises:
            InvalidRemoteNameError: At once, like the next four; nothing was staged.
            InvalidSourceError: Neither a readable regular file nor a folder; or a folder with something else
                in it, such as a FIFO, a symlink out of it or, with `move`, any symlink.
            RemoteNameTakenError: `overwrite=False`, and this name is on its way already.
            UnstableSourceError: The file changed while it was copied, twice. Earlier files of a folder are on
                their way.
            QueueClosedError: After `close`.
            ValueError: `move` and `link` together, or `after` names an upload of another queue that has not
                ended.
            UploadError: No room (`SpoolFullError`), or one of `after` was refused, and the queue has
                `raise_errors`; else the handle is in state `refused`.
        """
        source = Path(source)
        name = check_remote_name(source.name if remote_name is None else remote_name)
        if move and link:
            raise ValueError("move=True and link=True exclude each other")
        how: How = "move" if move else "link" if link else "copy"
        try:
            names = self._dependency_names(after)
        except UploadError as error:
            return self._refused(name, 0, error)
        if durability is not None:
            check_choice("durability", durability, get_args(Durability))
        to_disk = (durability or self._durability) == "power"
        if unless:
            check_remote_name(unless)
        if not source.is_dir():
            return self._submit_file(
                Submission(source, name, how, overwrite, names, to_disk, crc32, *self._fenced(name, unless))
            )
        if self.spool.path.resolve().is_relative_to(source.resolve()):
            raise InvalidSourceError(f"a folder to submit must not hold the queue's spool, got {source}")
        try:
            files = [
                Submission(
                    path, file_name, how, overwrite, names, to_disk, None, *self._fenced(file_name, unless)
                )
                for path, inner in files_of(source, is_moved=move)
                for file_name in [check_remote_name(f"{name}/{inner}")]
            ]
            for file in files:  # Before staging the first: a folder is refused whole.
                self._check_name(file.name, overwrite=overwrite)
                size_of(file.source)
        except UploadError:
            raise
        except OSError as error:
            return self._refused(name, 0, SpoolFullError(f"cannot read {source}: {error.strerror}"))
        return FolderHandle(name, self._store.uri(name), tuple(self._submit_file(file) for file in files))

    def _fenced(self, name: str, unless: str | None) -> tuple[str, str]:
        """Returns `unless` and `instead` of a file, from the call or else from the fence of the queue."""
        if unless is not None or self._fence is None:
            return unless or "", ""
        return self._fence.unless, self._fence.instead_of(name)

    def submit_pointer(self, remote_name: str, target: UploadHandle) -> UploadHandle:
        """Makes `remote_name` a pointer to `target`, visible once that is in the store.

        Writes `remote_name.symlink`, a text file with the target's name, as Composer does;
        `download_file(remote_name)` follows it. A newer pointer replaces an older one.
        """
        name = check_remote_name(remote_name + POINTER_SUFFIX)
        try:
            names = self._dependency_names((target,))
        except UploadError as error:
            return self._refused(name, 0, error)
        try:
            self._recreate_spool()
            with self.spool.staging() as folder:
                source, to_disk = folder / "pointer", self._durability == "power"
                write_new(source, target.remote_name)
                unless = "" if self._fence is None else self._fence.unless
                handle = self._submit_file(
                    Submission(
                        source, name, "move", overwrite=True, after=names, to_disk=to_disk, unless=unless
                    )
                )
        except (OSError, InvalidSourceError, SpoolUnusableError) as error:  # The source is in the spool.
            return self._refused(name, 0, _spool_full_error(error, self.spool.path, 0))
        if handle.folder:  # The drain doesn't supersede while the store is unreachable.
            self._supersede(handle)
        return handle

    def withdraw(self, remote_name: str) -> int:
        """Withdraws uploads of a name that haven't begun: they leave the spool, and are not uploaded.

        Their handles end in state `withdrawn`, which is also in `delivered.jsonl`. Uploads that are in flight
        or partly sent continue. A closed queue withdraws nothing.

        Returns:
            The number of withdrawn uploads.

        Raises:
            InvalidRemoteNameError: The name is invalid.
        """
        return self._end_waiting(self._waiting(check_remote_name(remote_name)))

    def may_drop(self, *remote_names: str) -> None:
        """Lets a group of uploads make room for newer files if the spool is full.

        With enough room they are uploaded like all others. Without, they are withdrawn in the order of these
        calls, with the uploads that wait for them (`after=`), even if an attempt is under way: the object may
        still arrive. An upload in parts that has begun stays.

        Raises:
            InvalidRemoteNameError: A name is invalid.
        """
        known = dict.fromkeys((*self._droppable, tuple(map(check_remote_name, remote_names))))
        self._droppable = tuple(group for group in known if any(map(self._ledger.has_name, group)))

    def status(self) -> dict[str, Any]:
        """Returns the output of `destinations uploads status --json`, without entries, and "room_bytes".

        "room_bytes" is how much more the spool accepts, by its limit and by the room on its disk.
        """
        from .command_line import status

        return {**status(self.spool.path, entries=0), "room_bytes": self._quota.room_bytes()}

    def is_retrying(self, failures: int = 1) -> bool:
        """Returns whether an upload has failed this often and waits for a retry."""
        return any(
            read_attempts(place / folder).count >= failures
            for folder in self._ledger.folders()
            for place in (self.spool.pending, self.spool.inflight)
        )

    def _waiting(self, name: str, *, from_drain: bool = False) -> Iterator[Entry]:
        """Yields the entries of a name that aren't even partly sent, oldest first."""
        for folder in () if self._closed is not None else self._ledger.folders_of(name):
            pending = self.spool.pending / folder
            place = self.spool.place_of(folder) or pending if from_drain else pending
            entry = None
            with contextlib.suppress(ManifestError, OSError):
                entry = self.spool.entry_of(folder) if from_drain else Entry.read(pending)
            if entry is None or entry.remote_name != name or (place / "multipart.json").exists():
                continue
            if entry.store in {"", identity_of(self._store.uri())}:
                yield entry

    def _end_waiting(self, entries: Iterable[Entry], newer: str | None = None, **options: Any) -> int:
        """Ends entries as withdrawn, or as superseded by a newer one; returns how many."""
        state = UploadState.WITHDRAWN if newer is None else UploadState.SUPERSEDED
        count = 0
        for entry in entries:
            name, identifier = entry.remote_name, entry.identifier
            uri = self._store.uri(name)
            outcome = Outcome(identifier, name, state, uri, entry.size, superseded_by=newer)
            try:
                if self.spool.withdraw(entry.folder, outcome, **options):
                    self._ledger.settle(entry.folder, outcome)
                    count += 1
            except OSError as error:
                log_warning("cannot withdraw %s: %s", name, error.strerror)
        return count

    def _supersede(self, newer: UploadHandle) -> None:
        """Ends older versions that wait, which the drain doesn't while the store is unreachable."""
        older = (entry for entry in self._waiting(newer.remote_name) if entry.folder < newer.folder)
        self._end_waiting(older, newer.identifier)

    @contextlib.contextmanager
    def _room_for(self, handle: UploadHandle, file: Submission, size: int) -> Iterator[None]:
        """Makes room for a file that is staged in the block, by dropping and replacing other files."""
        has_room = functools.partial(self._quota.has_room, size, adds_to_disk=file.how == "copy")
        is_newer = file.overwrite and self._ledger.has_name(file.name)
        if not (is_newer or self._droppable) or has_room():
            yield
            return
        # Includes one in flight, although the spool holds both for a while.
        replaced = [entry.size for entry in self._waiting(file.name, from_drain=True) if is_newer]
        with self._quota.lent(sum(replaced)):
            while self._droppable and not has_room():
                group, *others = self._droppable
                self._droppable = tuple(others)
                self._drop(group, file.name)
            yield
        self._supersede(handle)

    def _drop(self, names: Sequence[str], newer: str) -> None:
        """Withdraws uploads of these names, but first those that wait for them and would fail."""
        entries = [entry for name in names for entry in self._waiting(name, from_drain=True)]
        gone = {entry.identifier for entry in entries}
        for folder in self._ledger.folders() if gone else ():
            with contextlib.suppress(ManifestError, OSError):
                entry = self.spool.entry_of(folder)
                if entry is not None and not gone.isdisjoint(entry.after):
                    entries.insert(0, entry)
        count = self._end_waiting(entries, from_drain=True)
        if count and not self._dropped:
            log_warning(
                "the spool %s is full: %s gives way to %s, which is newer", self.spool.path, names[0], newer
            )
        self._dropped += count

    def delete(
        self,
        remote_name: str,
        *,
        after: Sequence[UploadHandle | FolderHandle] = (),
        then: Sequence[str] = (),
        may_have_pointer: bool = True,
    ) -> None:
        """Deletes an object from the store in the background, if it is there; returns at once.

        The object stays if one of `after` fails, or if a pointer in its folder leads to it; the log says so.
        `drain` and `close` wait for deletions as for uploads. A deletion that remains when the process ends
        is forgotten: request it again.

        Args:
            remote_name: Its name in the store. Uploads of this name, and of names in `then`, are withdrawn,
                or finished first if they have begun.
            after: Handles of uploads of this queue that must be in the store before.
            then: Names of objects to delete next, once this one is gone, such as the files of a manifest.
            may_have_pointer: Whether to list its folder for a pointer that leads to it.

        Raises:
            InvalidRemoteNameError: At once.
            QueueClosedError: After `close`.
        """
        name, *others = map(check_remote_name, (remote_name, *then))
        with self._closing:
            if self._closed is not None:
                raise QueueClosedError(f"cannot delete {name!r}: the queue is closed")
            if self._deletions is None:
                unless = "" if self._fence is None else self._fence.unless
                self._deletions = Deletions(
                    self._store, self._ledger.has_name, self.withdraw, self._policy, unless
                )
        self._deletions.add(name, after, others, may_have_pointer=may_have_pointer)

    def download_file(
        self, name: str, destination: str | Path, *, overwrite: bool = False, progress_bar: bool = True
    ) -> Path:
        """`uploads.download_file` from this queue's store."""
        return download_file(
            name, destination, store=self._store, overwrite=overwrite, progress_bar=progress_bar
        )

    def names(self, prefix: str, limit: int) -> list[str]:
        """Returns up to `limit` names of objects in the store that begin with a prefix; waits for the store.

        Raises:
            UploadError: It cannot be listed.
        """
        return [one.name for one in itertools.islice(self._store.list(prefix), limit)]

    def uri(self, remote_name: str) -> str:
        """Returns the URI of an upload of this name."""
        return self._store.uri(remote_name)

    def unsettled(self) -> int:
        """Returns the number of entries that have not ended, including leftover default spools."""
        return self._ledger.count() + sum(len(_left_in(spool)) for spool in self._left_behind)

    @property
    def paused_because(self) -> str:
        """Why uploads are paused until somebody acts, such as missing credentials; else empty.

        The draining process writes it every five seconds.
        """
        status = self.spool.read_status()
        return "" if status == self._earlier_status else str(status.get("parked_because") or "")

    def backlog(self) -> Backlog:
        """Returns the uploads that aren't delivered yet, and those that failed."""
        left = (
            Backlog(spool.path, tuple(spool.name_of(folder) for folder in _left_in(spool)), ())
            for spool in self._left_behind
        )
        return Backlog(
            self.spool.path,
            self._ledger.remaining(),
            self._ledger.failures(),
            tuple(one for one in left if one.remaining),
            self._dropped,
        )

    def drain(self, timeout_seconds: float) -> Backlog:
        """Waits until every entry has ended, even one submitted meanwhile; returns what was not delivered.

        Blocks for at most `timeout_seconds`.
        """
        self._wait(check_seconds("timeout_seconds", timeout_seconds))
        return self.backlog()

    def _wait(self, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        self._ledger.wait_empty(timeout_seconds)
        if self._deletions is not None:
            self._deletions.wait(max(0.0, deadline - time.monotonic()))

    def close(self, timeout_seconds: float = 30.0) -> Backlog:
        """Drains for up to the timeout, stops, and returns what was not delivered.

        A second call returns the same.

        Blocks for up to `timeout_seconds`, and up to `give_back_seconds` more for uploads in flight.

        Raises:
            UploadsIncompleteError: An upload was not delivered, and the queue has `raise_errors`.
        """
        timeout_seconds = check_seconds("timeout_seconds", timeout_seconds)
        with self._closing:
            if self._closed is not None:
                return self._closed
            self._closed = self.backlog()  # From here on submit refuses; replaced below.
        give_back_seconds = 0.0
        try:
            atexit.unregister(self._close_at_exit)
            self._wait(timeout_seconds)
            give_back_seconds = self._timeouts.give_back_seconds
        finally:  # If Ctrl-C ended the wait, nothing else is waited for.
            closed = self._end(give_back_seconds)
        if self._raise_errors and not closed.is_empty:
            raise UploadsIncompleteError(str(closed))
        return closed

    def _end(self, give_back_seconds: float) -> Backlog:
        try:
            if self._deletions is not None:
                self._deletions.stop(give_back_seconds)
            self._drainer.stop(give_back_seconds)
            self._flusher.stop(give_back_seconds)
        finally:  # Also when Ctrl-C ends that wait.
            with contextlib.suppress(OSError):  # Deliveries of other processes.
                self._ledger.reconcile()
            self._owner.release()
            self._closed = self.backlog()
            self._has_ended = True
            if not self._closed.is_empty:
                log_warning("%s", self._closed)
        return self._closed

    # Submitting.

    def _submit_file(self, file: Submission) -> UploadHandle:
        self._check_name(file.name, overwrite=file.overwrite)
        handle = UploadHandle(uuid.uuid4().hex[:16], file.name, self._uri_of, self._state_of)
        size = 0
        try:
            # Only to reserve room; `stage` opens the file and reports errors.
            with contextlib.suppress(OSError, ValueError):
                size = file.source.stat().st_size
            self._recreate_spool()
            with self._room_for(handle, file, size):
                entry = self._stage(handle, file, size)
        except (SpoolFullError, SpoolUnusableError) as error:
            return self._refused(file.name, size, error)
        except UploadError:
            raise
        except OSError as error:
            return self._refused(file.name, size, _spool_full_error(error, self.spool.path, size))
        if not file.to_disk:
            self._flusher.add(entry.folder, unchecked=entry.crc32 is None)
        return handle

    def _stage(self, handle: UploadHandle, file: Submission, size: int) -> Entry:
        try:
            return self._stager.stage(
                handle.identifier,
                file,
                size,
                register=lambda entry: self._track(entry, handle),
                announce=self._announce,
            )
        except BaseException:
            if handle.folder:
                self._ledger.discard(handle.folder)
            raise

    def _announce(self, entry: Entry) -> None:
        self._ledger.confirm(entry.folder)
        self._drainer.add([entry.folder])

    def _recreate_spool(self) -> None:
        if not self.spool.can_stage():
            log_error("the spool %s was deleted; creating it again", self.spool.path)
            self.spool.create()
        # Without its lock, another queue could take the spool and upload the same entries.
        with contextlib.suppress(SpoolOwnedError, OSError):
            self._owner.renew()

    def _dependency_names(self, after: Sequence[UploadHandle | FolderHandle]) -> dict[str, str]:
        """Returns the remote names of dependencies by identifier, without delivered ones.

        Raises:
            UploadError: A dependency was refused, or failed in another queue.
            ValueError: It is pending in another queue.
            TypeError: It isn't a handle.
        """
        names = {}
        given: Any = (after,) if hasattr(after, "handles") else after
        try:
            handles: list[UploadHandle] = [handle for one in given for handle in one.handles]
        except (TypeError, AttributeError) as error:
            raise TypeError(
                f"an upload can wait for handles that submit returned, got {after!r:.200}"
            ) from error
        for handle in handles:
            is_ours = handle._look == self._state_of or self._knows(handle)  # noqa: SLF001
            failure = handle.exception(0) if handle.done() else None
            if failure is not None and not (is_ours and handle.folder):
                raise type(failure)(
                    f"the upload it depends on (after=), {handle.remote_name!r}, failed: {failure}"
                )
            if handle.done() and handle.state is UploadState.DONE:
                continue
            if not is_ours:
                raise ValueError(
                    f"after= takes handles of this queue, got one of {handle.uri}; "
                    "wait for it first, with result()"
                )
            names[handle.identifier] = handle.remote_name
        return names

    def _knows(self, handle: UploadHandle) -> bool:
        """Returns whether an earlier queue of this process left the entry in this spool."""
        return bool(handle.folder) and self._ledger.knows(handle.folder)

    def _check_name(self, name: str, *, overwrite: bool) -> None:
        if self._closed is not None:
            raise QueueClosedError(f"cannot submit {name!r}: the queue is closed")
        if not overwrite and self._ledger.has_name(name):
            raise RemoteNameTakenError(f"{name!r} is pending already; use overwrite=True to replace it")

    def _track(self, entry: Entry, handle: UploadHandle) -> None:
        """Adds the entry to the ledger.

        Called in the order of sequence numbers, before the drain can see the entry.
        """
        self._check_name(entry.remote_name, overwrite=entry.overwrite)
        handle.folder = entry.folder
        self._ledger.add(entry.folder, handle)

    def _refused(self, name: str, size: int, error: UploadError) -> UploadHandle:
        if self._raise_errors:
            raise error
        log_error("%s was refused: %s", name, redact(str(error)))
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
                log_warning(
                    "finishing %d uploads, for up to %.0f s; Ctrl-C stops at once and loses nothing",
                    waiting,
                    self._timeouts.exit_seconds,
                )
            self.close(self._timeouts.exit_seconds)
        except UploadsIncompleteError:
            pass
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C; SIGTERM, where `exit_on_sigterm` was called.
            if not self._has_ended:  # It arrived before `close` could handle it.
                self._end(0.0)

    def _forget_after_fork(self) -> None:
        """Closes the queue in a forked child: its threads, files and locks belong to the parent."""
        self._closing = threading.Lock()
        self._closed = Backlog(self.spool.path, (), ())
        self._left_behind, self._deletions = [], None
        self._ledger.forget_after_fork()
        self._owner.forget_in_child()
        self._drainer.forget_after_fork()
        atexit.unregister(self._close_at_exit)


def _spool_full_error(error: Exception, spool: Path, size: int) -> SpoolFullError:
    what = getattr(error, "strerror", None) or str(error)
    if getattr(error, "errno", None) in _NO_ROOM:
        what = "no room"
    return SpoolFullError(
        f"cannot stage {size} bytes in spool {spool}: {what}; make room or choose another spool"
    )
