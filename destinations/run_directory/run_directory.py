"""`RunDirectory`: a run as a folder of plain files.

Its methods run in the training thread and hand over: metrics to a memory-mapped journal, everything else to
a lane (one background thread). A writer thread moves rows from the journal to `metrics.csv` and keeps the
documents of the run up to date.
"""

import inspect
import logging
import mmap
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from destinations.background import Lane
from destinations.base import RecordDestination, closed_state
from destinations.copies import own_copy
from destinations.history.chain import Follows
from destinations.kinds import kind_of
from events import (
    RecordError,
    RunStatus,
    State,
    WriteRate,
    check_unknown,
    is_restarted_job,
    redact_text,
    safe_text,
)
from uploads import UploadError
from uploads.disk import call_in_forked_children, read_json, stop_calling_in_forked_children

from .documents import Documents
from .drain import PART_BYTES
from .environment import describe_environment
from .folder import (
    HeldFolder,
    RunDirectoryError,
    RunInUseError,
    RunNotOpenError,
    RunPathError,
    WriterLock,
    check_known,
    check_path,
    holds_run,
    run_exists_error,
    set_aside,
)
from .forking import fork_place
from .layout import ARTIFACTS_FOLDER, SIDECAR, column_of, lock_name
from .media_writer import FileKeeping, MediaWriter, artifact_path
from .place import Place, check_template, check_writer, place_of
from .rank_writer import JournalKind, RankWriter, loss_text
from .reader import metric_columns, take_snapshot
from .resumption import Checkpoint, Resumption
from .segments import MappedSegment, Segment

if TYPE_CHECKING:
    from uploads import StoreFolder

    from .claim import Claim
    from .mirror import Mirror

__all__ = ["RunDirectory"]


_log = logging.getLogger("destinations")

_MAX_EARLY_RECORDS = 1000
_MAX_NAMES_BESIDE = 10_000
_FILES_LISTED = 1000
_NAMES_SHOWN = 3
# How a run ended, after "a run that".
_ENDED = {
    "completed": "was completed",
    "stopped": "was stopped",
    "failed": "failed",
    "interrupted": "was interrupted",
    "preempted": "was preempted",
}
_TO_CONTINUE = (
    ' To continue the earlier run, pass if_exists="resume", call run.fit_start(batch=...), or load its '
    "checkpoint in the trainer (ckpt_path, resume_from_checkpoint, autoresume)."
)

# The sessions that this process has begun: a job that was restarted does not continue these.
_sessions_here: set[str] = set()


class RunDirectory(RecordDestination):
    """Writes a run as a folder: `metrics.csv`, `sidecar.json`, media, tables and all else, as plain files.

    ```python
    trainer = Trainer(model, train_dataloader, max_duration="5ep", loggers=[RunDirectory("runs/mine")])
    ```

    **Metrics.** A call packs one row into a memory-mapped journal, in about a microsecond, without a lock or
    a system call. A row whose call has returned survives `kill -9` of the process. A power loss costs at most
    the rows of the last `flush_seconds`. A writer thread moves rows to `metrics.csv`.

    **Everything else** is copied at the call and written by a second thread. When its queue is full (1,000
    records or 256 MiB), a call waits one second at most, then the record is dropped, counted and reported.

    **Resume.** A run is continued with a proof that this is the same run, see `if_exists`: what was logged
    before the checkpoint was saved belongs to it, and what came after is left behind as a branch, which stays
    on disk. Without a proof, the run in the folder stays as it is: a script or a notebook cell that is run
    again gets a free name beside it, "digits-2", and a warning that says so. A proof may come after `init`:
    what was logged by then is in the run that it names. One process writes at a time, and a second one is
    refused.

    **Several processes.** With `writer="eval"`, another process adds to the run while, before or after its
    trainer writes: in a folder of its own, `writers/eval` of the run, so that neither waits for the other.
    Readers see one run. Steps may be late and in any order; a session adds to those before it, and only a
    `Trainer` that loads a checkpoint and trains replaces rows, those of this writer.

    **Disk failures** do not reach training: rows are buffered in memory, up to 64 MiB, and written when the
    disk works again.

    **In a store.** With a URI in the place of the folder, or beside it as `mirror`, what is new goes there
    every `mirror_seconds`, by a process of its own. A machine that is lost takes so much along. The same line
    on another machine continues the run: its rows and documents are fetched first. While a machine writes the
    run, another one is refused; one that was thought dead and comes back cannot change what its successor
    wrote, and its rows are kept as an abandoned branch. Files of `upload_file` go there too. docs/buckets.md
    tells how.

    docs/format.md describes every file.

    Args:
        run_dir: the folder; may contain placeholders that are constant during a run, such as `{run_name}`. A
            URI, such as "s3://bucket/runs/{run_name}", is a run that lives in a store: see **In a store**.
        run_id: the id of a new run; the run of this id is continued. Default: twelve random hexadecimal
            digits.
        tags: added to the tags of the run.
        notes: the notes of the run, if it has none.
        flush_seconds: the interval at which rows are written to `metrics.csv`; bounds what a power loss
            costs.
        if_exists: what to do if the folder holds a run: "resume" continues it, "error" refuses it, "new"
            takes a free name beside it, "digits-2"; `run_dir` tells which. "new" needs a single writing rank.
            Default, "auto": it is continued with a proof, and otherwise a free name is taken. Proofs are the
            `run_id` of that run, `state.continues_run`, which trainers set that load a checkpoint, as does
            `Run.fit_start(batch=...)`, and a scheduler's word that it restarts the job, for a run that did
            not complete.
        fork_from: the run that a new run continues, and where: a path or the name of a folder beside the
            new one, then "@" and the step or name of a checkpoint, as in "digits@ba120". Default: the
            checkpoint that is loaded, or its end. A run that is continued has its parent already.
        writer: the name of another process that adds to the run; letters, digits, ".", "_" and "-". It has
            files, tags, status and heartbeat of its own, and is continued with `if_exists="auto"` also where
            it was completed. Default: the trainer, whose status is that of the run.
        all_ranks: also writes the metrics of ranks other than 0, one CSV per rank. Without it, a rank that
            has logged a metric which rank 0 has not says so at its end.
        keep_files: what to do with files given to `upload_file`: "copy", "link" (hard links; do not modify
            the file in place), "off", or "auto": "copy", but "off" if another destination takes files.
        journal: "mapped", "appended" (one system call per row), or "auto": mapped, except on network file
            systems.
        close_seconds: the timeout for writing the rest at close.
        mirror: the URI of a store, or a folder, that has the run too; with placeholders as in `run_dir`.
        mirror_seconds: the interval at which what is new goes there.
        write_rate: limits how often metrics are taken. Default: every call.
        clock: the current time in seconds since 1970; called in the thread that logs. For replayed runs.
        unknown: none: an argument that is not known is a `TypeError` that names the nearest one.

    Raises:
        RunPathError: the path is a file, is not writable, or the run name leads out of the folder; the store
            cannot be read, or a newer release wrote the run. Raised by the constructor if it can tell, else
            at `init`.
        RunExistsError: at `init`, the folder holds a run, and `if_exists` is "error"; or "auto", without a
            proof, where several ranks write.
        RunInUseError: at `init`, another process writes to the folder, or another machine to the store.
        ValueError: the URI has no store; an argument has none of the values above, `if_exists="new"` with
            `all_ranks`, or the name of a writer is none.
        TypeError: tags are one string.
    """

    _warns_of_repeats = True
    _part_bytes = PART_BYTES

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        run_id: str | None = None,
        tags: Sequence[str] = (),
        notes: str = "",
        flush_seconds: float = 1.0,
        if_exists: Literal["auto", "resume", "error", "new"] = "auto",
        fork_from: str | os.PathLike[str] | None = None,
        writer: str | None = None,
        all_ranks: bool = False,
        keep_files: FileKeeping = "auto",
        journal: JournalKind = "auto",
        close_seconds: float = 60.0,
        mirror: str | os.PathLike[str] | None = None,
        mirror_seconds: float = 10.0,
        write_rate: WriteRate | None = None,
        clock: Callable[[], float] = time.time,
        **unknown: Any,
    ) -> None:
        check_unknown("RunDirectory", unknown, inspect.signature(RunDirectory).parameters)
        super().__init__(write_rate=write_rate)
        _check_choice("if_exists", if_exists, ("auto", "resume", "error", "new"))
        if if_exists == "new" and all_ranks:
            raise ValueError('if_exists must not be "new" with all_ranks=True: ranks cannot agree on a name.')
        _check_choice("keep_files", keep_files, ("auto", "copy", "link", "off"))
        _check_choice("journal", journal, ("auto", "mapped", "appended"))
        if not flush_seconds > 0:
            raise ValueError(f"flush_seconds must be more than 0, got {flush_seconds}.")
        if isinstance(tags, str):
            raise TypeError(f"tags must be a list of strings, got {tags!r}. Write tags=[{tags!r}].")
        if not isinstance(notes, str):
            raise TypeError(f"notes must be a string, got {notes!r}. Write notes={str(notes)!r}.")
        if not mirror_seconds > 0:
            raise ValueError(f"mirror_seconds must be more than 0, got {mirror_seconds}.")
        self._is_trainer = writer is None
        self._writer_name = "" if writer is None else check_writer(writer)
        self._mirror_seconds = mirror_seconds
        self._template, self._mirror_template = check_template(run_dir, mirror, self._writer_name)
        if fork_from is not None and (writer is not None or "://" in self._template):
            what = "a writer" if writer is not None else f"the URI {self._template.partition('?')[0]!r}"
            raise ValueError(
                f"fork_from needs a run with a folder of its own, got {what}. "
                'Write RunDirectory("runs/new", fork_from="digits", mirror="s3://...").'
            )
        self._run_id = run_id
        self._tags = tuple(redact_text(str(tag)) for tag in tags)
        self._more_tags: tuple[str, ...] = ()
        self._notes = redact_text(notes)
        self._flush_seconds = flush_seconds
        self._if_exists = if_exists
        self._fork_from = None if fork_from is None else os.fspath(fork_from)
        self._all_ranks = all_ranks
        self._keep_files: FileKeeping = keep_files
        self._journal_kind = journal
        self._close_seconds = close_seconds
        self._clock = clock
        self._forget()
        self._was_closed = False

    def _forget(self) -> None:
        """Resets the attributes of an open destination to those of a closed one."""
        self._forget_folder()
        self._state: State | None = None
        # The run that the folder holds, until it is known whether this one continues it: see `_choose`.
        self._earlier: _TakenPlace | None = None
        # Records that were logged before `init`, or while `_earlier` is set.
        self._early: list[Callable[[], None]] = []
        self._early_lost = 0
        self._early_files: tempfile.TemporaryDirectory[str] | None = None
        # Whether this is a completed run, and has not trained since: its hyperparameters stay as they were.
        self._is_reopened = False
        # Whether training has begun since `init`.
        self._has_trained = False
        # Whether a checkpoint is loaded by a session that has trained.
        self._goes_back = False
        self._checkpoint = Checkpoint()

    def _forget_folder(self) -> None:
        self._run_dir: Path | None = None
        self._place: Place | None = None
        self.cannot_open = False
        # The files of a run that lives in a store.
        self._files: StoreFolder | None = None
        self._writer: RankWriter | None = None
        # Called in the place of `log_metrics`. An attribute: a call more would cost it some microseconds.
        self.try_log_metrics: Callable[[Mapping[str, Any], int], bool] = _takes_none
        self._documents: Documents | None = None
        self._media: MediaWriter | None = None
        self._lane: Lane | None = None
        self._folder: HeldFolder | None = None
        self._keeping: FileKeeping = "copy" if self._keep_files == "auto" else self._keep_files
        self._is_silent = False
        # The metrics that a rank without files was given.
        self._unwritten: set[str] = set()
        # One byte that forked children share: whether one of them has said that it writes nothing.
        self._told_of_child: mmap.mmap | None = None
        # None where this session continues nothing, or what it replaces is marked.
        self._resumption: Resumption | None = None

    # Properties.

    @property
    def template(self) -> str:
        """The folder as given, with its placeholders; that of the writer, where one was named."""
        return self._template

    @property
    def writer(self) -> str:
        """The name of the writer; "" for the trainer of the run."""
        # The one asked for may have been taken.
        return self._writer_name if self._run_dir is None or self._is_trainer else self._run_dir.name

    def move_to(self, run_dir: str | os.PathLike[str], *, tags: Sequence[str] = ()) -> None:
        """Makes the next run use another folder; for trainers that make several runs with one destination.

        Args:
            run_dir: the folder, as in the constructor.
            tags: tags of the next run, beside those of the constructor.

        Raises:
            RunPathError: a run is open, or the path is a file or not writable.
        """
        if self._run_dir is not None:
            raise RunPathError(f"run folder {str(self._run_dir)!r} is open. Close its run first.")
        # That of a writer is given as `template` has it.
        self._template, uri = check_template(run_dir, None)
        self._mirror_template = uri or self._mirror_template
        self._more_tags = tuple(redact_text(str(tag)) for tag in tags)

    @property
    def run_dir(self) -> Path | None:
        """The folder of the open run, or None.

        While the folder holds a run, and it is not known whether this one continues it, asking decides: this
        one is beside it.
        """
        if self._earlier is not None:
            self._choose()
            self._settle()
        return self._run_dir

    @property
    def is_undecided(self) -> bool:
        """Whether the folder holds a run, and it is not known yet whether this one continues it."""
        return self._earlier is not None

    @property
    def run_id(self) -> str | None:
        """The id of the open run, or None; known to rank 0 only."""
        return None if self._documents is None else self._documents.run_id

    @property
    def keeps_files_here(self) -> bool:  # type: ignore[override]  # an attribute of others
        """Whether files that are uploaded stay on this machine: not those of a run in a store."""
        return self._mirror_template is None

    def folder_of(self, state: State, run_dir: str | None = None) -> Path:
        """Returns the folder of this machine that a run of this state has, whether or not it is open.

        Args:
            state: of the run.
            run_dir: as `move_to` would be given it. Default: as it is.

        Raises:
            RunPathError: the name of the run leads out of it.
        """
        template = self._template if run_dir is None else run_dir
        return place_of(template, template if "://" in template else self._mirror_template, state).folder

    def place(self) -> str:
        return "" if self._run_dir is None or self._is_silent else str(self._place)

    # Events.

    def init(self, state: State, logger: Any) -> None:
        """Opens the folder, then writes what was logged before."""
        self._state = state
        self._run_begins()
        writes = state.rank == 0 or self._all_ranks
        if not writes:
            self._is_silent = True
            self._early.clear()
            return
        place = place_of(self._template, self._mirror_template, state)
        check_path(place.folder)
        self._open_as_asked(place, state)
        others = [one for one in state.callbacks if one is not self and hasattr(one, "can_upload_files")]
        if self._keep_files == "auto" and any(one.can_upload_files() for one in others):
            self._keeping = "off"
        if self._writer is not None:
            self._write_early()

    def _write_early(self) -> None:
        early, self._early = self._early, []
        for call in early:
            try:
                call()
            except Exception as error:  # noqa: BLE001  # a bad record must not cost the run
                self._early_lost += 1
                _log.error(
                    "run folder %s: could not write a record that was logged before init (%s: %s).",
                    self._run_dir,
                    type(error).__name__,
                    redact_text(safe_text(error)),
                )

    # Which folder.

    def _open_as_asked(self, place: Place, state: State) -> None:
        """Opens the place or one beside it; neither where only a later event can tell which of the two."""
        try:
            taken = self._take(place, state)
        except RunInUseError as error:
            is_again = error.is_same_process and self._if_exists != "error" and not self._is_shared(state)
            if self._if_exists != "new" and not is_again:
                raise
            self._open_beside(place, state)
            return
        try:
            continues = self._continues(taken.place.folder, state)
            if continues is None:
                self._earlier = taken
            elif continues:
                self._start(taken, state)
            else:
                self._open_beside(place, state, "" if self._if_exists == "new" else taken.what_it_holds)
        finally:
            if self._earlier is None and self._place is not place:
                taken.lock.release()

    def _is_shared(self, state: State) -> bool:
        return self._all_ranks and state.world_size > 1

    def _continues(self, run_dir: Path, state: State) -> bool | None:
        """Returns whether this run goes on in a folder, also a new one; None where that is not known yet.

        Raises:
            RunExistsError: the folder holds a run, which `if_exists` refuses, or which is not continued where
                several ranks write.
        """
        if not holds_run(run_dir, state.rank):
            return True
        if self._if_exists == "error":
            raise run_exists_error(run_dir, "a run already")
        if self._if_exists == "new":
            return False
        if self._if_exists == "resume" or not self._is_trainer:
            return True
        sidecar = read_json(run_dir / SIDECAR)
        is_completed = sidecar.get("status") == "completed"
        has_id = self._run_id is not None and sidecar.get("run_id") == self._run_id
        is_restarted = is_restarted_job() and sidecar.get("session") not in _sessions_here
        is_restarted = is_restarted and not is_completed
        continues = has_id or is_restarted or _continues(state.continues_run, is_completed=is_completed)
        self._is_reopened = bool(continues) and is_completed
        if self._is_reopened:
            _log.warning(
                "run folder %s holds a run that was completed: it is continued. Pass "
                'if_exists="new" for a folder beside it, or "error" to refuse it.',
                run_dir,
            )
        if not continues and self._is_shared(state):
            raise run_exists_error(run_dir, "a run, and several ranks cannot agree on a name beside it")
        return continues

    def _choose(self) -> None:
        """Opens the folder: the earlier run's if it is proven by now that this one continues it.

        Otherwise one beside it. There, records are also kept as calls: a proof may still come, such as a
        checkpoint that is loaded after an evaluation, and takes them along into the earlier run.
        """
        earlier, state = self._earlier, self._state
        if earlier is None or state is None:
            return
        if _continues(state.continues_run, is_completed=earlier.is_completed):
            if self._writer is not None:
                self._leave_folder()
            self._earlier = None
            try:
                self._start(earlier, state)
            except RunDirectoryError:
                # Another process has taken the run in the store meanwhile.
                self.cannot_open = True
                raise
            self._write_early()
            return
        if self._writer is None:
            self._open_beside(earlier.place, state, earlier.what_it_holds)
            self._write_early()
        if state.continues_run is not None:
            self._settle()

    def _choose_if_known(self, state: State) -> None:
        if self._earlier is not None and state.continues_run is not None:
            self._choose()

    def _settle(self) -> None:
        """Stays in the folder beside the earlier run, for good."""
        earlier, self._earlier = self._earlier, None
        if earlier is not None:
            earlier.lock.release()
            self._early.clear()
            if self._writer is not None and self._resumption is None:
                self.try_log_metrics = self._packer_of(self._writer)

    def _leave_folder(self) -> None:
        """Closes the folder that was opened beside the earlier run, and removes it: its records go there."""
        place, documents = self._place, self._documents
        if documents is not None:
            documents.close("completed", None, None, self._clock())
        self._stop(self._close_seconds)
        stop_calling_in_forked_children(self.forget_in_child)
        self._forget_folder()
        if place is not None and place.uri is None:
            shutil.rmtree(place.folder, ignore_errors=True)

    def _keep_until_chosen(self, call: Callable[[], None]) -> None:
        """Opens a folder for a record, and keeps the call while it may have to go to another one."""
        if self._state is not None and (self._writer is None or self._state.continues_run is not None):
            self._choose()
        if self._earlier is None:
            return
        if len(self._early) < _MAX_EARLY_RECORDS:
            self._early.append(call)
        else:
            self._settle()

    def _open_beside(self, place: Place, state: State, what: str = "") -> None:
        """Opens a place with a free name beside a run; `what` says why, and then the line how to continue."""
        taken: RunDirectoryError = run_exists_error(place.folder, "a run already")
        for number in range(2, _MAX_NAMES_BESIDE):
            beside = place.beside(number)
            try:
                free = self._take(beside, state)
            except RunInUseError as error:
                taken = error
                continue
            if holds_run(beside.folder, state.rank):
                free.lock.release()
                continue
            try:
                self._start(free, state)
            except RunInUseError as error:
                taken = error
                continue
            _log.warning(
                "run folder %s %s: this run is written to %s.%s",
                place,
                what or "is taken",
                beside,
                _TO_CONTINUE if what else "",
            )
            return
        raise taken

    def _take(self, place: Place, state: State) -> "_TakenPlace":
        """Locks the folder of a place, and fetches what the store has."""
        run_dir = place.folder
        # Before the lock too, so that nothing in the folder changes.
        check_known(run_dir)
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = WriterLock(
                run_dir / lock_name(state.rank), writer="" if self._is_trainer else run_dir.name
            )
            lock.acquire()
        except OSError as error:
            raise RunPathError(f"run folder {str(run_dir)!r} must be writable: {error}.") from error
        try:
            claim = None if place.uri is None else self._claim_of(place.uri, state)
            if claim is not None:
                claim.prepare(run_dir, lambda: set_aside(run_dir, lock))
                check_known(run_dir)
        except BaseException as error:
            lock.release()
            if isinstance(error, OSError) and not isinstance(error, RecordError):
                raise RunPathError(f"run folder {str(run_dir)!r} must be writable: {error}.") from error
            raise
        return _TakenPlace(place, lock, claim)

    def _start(self, taken: "_TakenPlace", state: State) -> None:
        """Begins to write a place."""
        run_dir = taken.place.folder
        self._place = taken.place
        try:
            self._start_writing(run_dir, state, taken.lock, taken.claim)
        except BaseException as error:
            # All or nothing: a half-opened folder would accept records and lose them.
            if self._writer is not None:
                self._writer.close(0.0)
            elif self._files is not None:
                self._files.queue.close(0.0)
            taken.lock.release()
            stop_calling_in_forked_children(self.forget_in_child)
            self._forget_folder()
            if isinstance(error, OSError) and not isinstance(error, RecordError):
                raise RunPathError(f"run folder {str(run_dir)!r} must be writable: {error}.") from error
            raise

    def _claim_of(self, uri: str, state: State) -> "Claim":
        from .claim import Claim

        return Claim(uri, state.rank, max(self._mirror_seconds, self._flush_seconds))

    def _mirror_of(self, claim: "Claim", folder: HeldFolder, state: State) -> "Mirror":
        """Takes the run in the store for this session."""
        from uploads import StoreFolder

        from .mirror import Mirror

        claim.take(folder.where)
        self._files = StoreFolder(
            claim.uri, name_of=lambda name: f"{ARTIFACTS_FOLDER}/{name}", fence=claim.fence
        )
        return Mirror(claim, folder.path, state.rank, self._mirror_seconds, self._files.queue)

    def _start_writing(self, run_dir: Path, state: State, lock: WriterLock, claim: "Claim | None") -> None:
        self._run_dir = run_dir
        folder = self._folder = HeldFolder(run_dir)
        mirror = None if claim is None else self._mirror_of(claim, folder, state)
        if state.rank == 0:
            fork = None
            if self._fork_from is not None and not holds_run(run_dir, 0):
                fork = fork_place(self._fork_from, run_dir, loads=bool(state.continues_run))
            self._documents = Documents(
                folder.path,
                self._run_id or uuid.uuid4().hex[:12],
                self._tags,
                self._notes,
                self._clock(),
                self.writer,
                fork=fork,
            )
            _sessions_here.add(self._documents.sessions.current["session"])
            for tag in self._more_tags:
                self._documents.add_tag(tag)
            array_job = os.environ.get("SLURM_ARRAY_JOB_ID")
            if array_job:
                self._documents.add_tag(f"sweep:{array_job}")
            self._lane = Lane(f"run-directory-{run_dir.name}-media")
            taken = frozenset() if claim is None else frozenset(claim.there)
            self._media = MediaWriter(folder, self._lane, self._clock, self._wake_writer, taken)
            self._media.begin_session(self._documents.sessions.current["session"])
            if mirror is not None:
                self._media.on_file = mirror.add
        self._writer = RankWriter(
            run_dir=run_dir,
            state=state,
            lock=lock,
            documents=self._documents,
            flush_seconds=self._flush_seconds,
            journal_kind=self._journal_kind,
            media_stats=self._media_stats,
            run_folder=folder,
            make_segment=self._make_segment,
            clock=self._clock,
            describe=self._describe_environment,
            part_bytes=self._part_bytes,
            mirror=mirror,
            by_step=not self._is_trainer,
        )
        if self._earlier is None:
            self.try_log_metrics = self._packer_of(self._writer)
        if self._writer.had_rows and self._is_trainer:
            self._expect_resume()
        self._told_of_child = mmap.mmap(-1, 1)
        call_in_forked_children(self.forget_in_child)
        self._writer.start()

    def before_load(self, state: State, logger: Any) -> None:
        """Clears the time of the last checkpoint; rows from here on are of the training that begins."""
        self._choose_if_known(state)
        self._checkpoint = Checkpoint()
        # Otherwise what it follows is not known yet, and its own rows stay.
        self._goes_back = self._has_trained and (self._resumption is None or self._resumption.is_decided)
        if self._has_trained:
            self._expect_resume()

    def after_load(self, state: State, logger: Any) -> None:
        """Schedules a resume: the checkpoint may be older than the rows logged so far."""
        self._choose_if_known(state)
        writer = self._writer
        is_own = writer is not None and self._checkpoint.session == writer.session
        if writer is not None and (self._goes_back or is_own):
            self._begin_session(writer)
        if self._has_trained or is_own or (writer is not None and writer.had_rows):
            self._expect_resume()
        if state.timestamp.batch > 0 or self._checkpoint.session is not None:
            self._continue_from(int(state.timestamp.batch))

    def _begin_session(self, writer: RankWriter) -> None:
        """Begins a session of this process: it goes back to an earlier place."""
        if self._documents is not None:
            self._documents.begin_session(self._clock())
        session = writer.begin_session()
        if self._media is not None:
            self._media.begin_session(session)

    def _continue_from(self, step: int) -> None:
        if self._documents is not None:
            documents, saved = self._documents, self._checkpoint
            if saved.session == "":
                return
            follows = None
            if saved.session is not None:
                follows = Follows(saved.session, saved.records, step, mark=saved.mark, time=saved.time)
            if documents.continue_from(step, follows):
                # None of the rows here.
                self._checkpoint = attrs.evolve(saved, session="", mark=0)
            if self._writer is not None:
                self._writer.write_now(lambda: documents.write_history(durable=False))

    def _expect_resume(self) -> None:
        writer, state = self._writer, self._state
        if writer is None or state is None or self._run_dir is None:
            return
        if self._resumption is not None:
            if not self._resumption.has_begun:
                return
            self._resumption.end()

        self._resumption = Resumption(
            self._run_dir,
            state.rank,
            writer.journal,
            batches_done=lambda: int(state.timestamp.batch),
            on_step=self._continue_from,
            began_at=self._clock(),
            warns=self._warns_of_repeats and state.continues_run is None,
        )
        # Until then `log_metrics` takes all rows.
        self.try_log_metrics = _takes_none

    def fit_start(self, state: State, logger: Any) -> None:
        """Abandons the rows that training will repeat, now or once it has repeated the first step."""
        self._choose_if_known(state)
        is_first, self._has_trained = not self._has_trained, True
        if self._is_reopened and not state.is_done:
            self._is_reopened = False
            self._write_early()
        is_named = self._checkpoint != Checkpoint() or state.timestamp.batch > 0
        # Steps of a named writer do not tell where it goes on, nor do those of a loop that names an epoch.
        is_named |= bool(state.continues_run) and self._is_trainer and state.timestamp.epoch == 0
        if self._resumption is not None:
            if is_named:
                self._resumption.begin(self._checkpoint)
            else:
                self._resumption.follow_end()
            self._forget_resumption()
        elif is_named and is_first and self._is_trainer and self._has_earlier_sessions:
            # Without rows, but maybe with other records.
            self._continue_from(int(state.timestamp.batch))

    @property
    def _has_earlier_sessions(self) -> bool:
        return self._documents is not None and bool(self._documents.sessions.before)

    def _forget_resumption(self) -> None:
        if self._writer is not None and self._resumption is not None and self._resumption.is_done:
            self._resumption = None
            self.try_log_metrics = self._packer_of(self._writer)

    def state_dict(self) -> dict[str, Any]:
        """Returns the place of the checkpoint: what this session had logged by now belongs to it."""
        place: dict[str, Any] = {"time": self._clock()}
        if self._writer is not None:
            place |= {"session": self._writer.session, "mark": self._writer.journal.mark_boundary()}
        if self._media is not None:
            place["records"] = self._media.note_checkpoint()
        if self._documents is not None and self._writer is not None and self._state is not None:
            documents, line = self._documents, {"step": int(self._state.timestamp.batch), **place}
            self._writer.write_now(lambda: documents.note_checkpoint(line))
        return place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the place of the checkpoint."""
        self._checkpoint = Checkpoint.of(state)

    def close(self, state: State, logger: Any) -> None:
        """Records how the run ended; what is logged until `post_close` is still written."""
        if self._earlier is not None:
            self._choose()
            self._settle()
        if self._is_reopened and self._early:
            _log.warning("run folder %s: no batch was trained; its hyperparameters stay.", self._run_dir)
            self._early.clear()
        status = "completed" if state.status is RunStatus.RUNNING else str(state.status)
        text = None
        if state.exception is not None and status == "failed":
            text = f"{type(state.exception).__name__}: {redact_text(str(state.exception))}"
        reason = None if state.stop_reason is None else redact_text(state.stop_reason)
        if self._resumption is not None:
            self._resumption.end()
            self._forget_resumption()
        if self._documents is not None:
            self._documents.close(status, text, reason, self._clock())

    def post_close(self) -> None:
        """Writes the rest and releases the folder.

        After a second Ctrl-C it returns at once; the threads finish on their own and release the folder then.
        """
        self._run_begins()
        if self._writer is not None:
            self._settle()
        if self._unwritten and self._state is not None:
            self._say_unwritten(self._state)
        writer, self._early_lost = self._writer, self._early_lost + len(self._early)
        try:
            self._stop(self._close_seconds)
        except BaseException:
            self._stop(0.0)
            raise
        finally:
            lost = {} if writer is None else writer.lost()
            if text := loss_text({**lost, "early": self._early_lost}):
                _log.warning("run folder %s: lost %s.", self._run_dir or self._template, text)
            self._release()
            self._was_closed = True

    def _say_unwritten(self, state: State) -> None:
        """Names the metrics that this rank alone has logged; rank 0 may be about to log them too."""
        folder = self.folder_of(state)
        if state.node_rank and not folder.exists():
            # On a machine without the files of rank 0, which has written them or not.
            return
        try:
            with take_snapshot(folder, 0) as snapshot:
                there = {"epoch", *metric_columns(snapshot)}
        except OSError:
            return
        missing = sorted(name for name in self._unwritten if column_of(name) not in there)
        if missing:
            names = ", ".join(map(repr, missing[:_NAMES_SHOWN])) + (", …" if missing[_NAMES_SHOWN:] else "")
            alone = " If this process is a run of its own, set RANK=0 and WORLD_SIZE=1."
            _log.warning(
                "rank %d of %d (%s) writes no metrics to run folder %s: %s is only there if rank 0 logs it "
                "too. To keep it, make the run on every rank with RunDirectory(..., all_ranks=True).%s",
                state.rank,
                state.world_size,
                state.found_ranks.source,
                folder,
                redact_text(safe_text(names)),
                "" if state.found_ranks.source == "process group" else alone,
            )

    def _stop(self, seconds: float) -> None:
        """Stops the lane, then the writer, each with this timeout."""
        if self._lane is not None and self._media is not None:
            is_done = self._lane.stop(seconds)
            self._media.count_losses()
            if not is_done:
                _log.warning("run folder %s: media were dropped after %.0f s.", self._run_dir, seconds)
        if self._writer is not None:
            self._writer.close(seconds)

    def _release(self) -> None:
        self._settle()
        if self._early_files is not None:
            self._early_files.cleanup()
        stop_calling_in_forked_children(self.forget_in_child)
        self._forget()

    def _wake_writer(self) -> None:
        writer = self._writer
        if writer is not None:
            writer.timer.wake()

    # Records.

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Packs one row into the journal; buffers it before `init`."""
        if self._earlier is not None:
            row = dict(metrics)
            self._keep_until_chosen(lambda: self.log_metrics(row, step))
        writer = self._writer
        if writer is not None:
            if (resumption := self._resumption) is not None and step is not None:
                resumption.before(metrics, step)
                self._forget_resumption()
            writer.journal.append(metrics, step)
        elif self._is_silent and self._told_of_child is None:
            self._unwritten.update(metrics)
        else:
            kept = dict(metrics)
            self._keep_for_init("metrics", lambda: self.log_metrics(kept, step))

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Adds hyperparameters to `hparams.yaml` and the sidecar."""
        if self._state is not None and self._state.rank != 0:
            return
        is_open = self._documents is not None and not self._is_reopened
        if not is_open or self._earlier is not None:
            # They open no folder: what continues the run is often known only after them.
            kept = own_copy(hyperparameters)
            self._keep_for_init("hyperparameters", lambda: self.log_hyperparameters(kept))
        if self._documents is not None and self._writer is not None and is_open:
            place = 0 if self._media is None else self._media.next_place()["record"]
            self._documents.add_hyperparameters(hyperparameters, place)
            documents = self._documents
            self._writer.write_now(lambda: documents.write_hparams(durable=False))

    def log_record(self, kind: str, arguments: dict[str, Any]) -> None:
        """Writes a record in the background; see `MediaWriter`."""
        if self._state is None or self._earlier is not None:
            # Kept; the caller may change the values meanwhile.
            arguments = own_copy(arguments)
        if self._earlier is not None:
            again = dict(arguments)
            self._keep_until_chosen(lambda: self.log_record(kind, dict(again)))
        about, step = kind_of(method=f"log_{kind}"), arguments.pop("step", None)
        self._with_media(lambda media, at: media.log_record(about, arguments, at), step)

    def upload_file(
        self,
        state: State,
        remote_file_name: str,
        file_path: Path,
        *,
        overwrite: bool,
        link: bool = False,
    ) -> None:
        """Copies or links a file into `artifacts/`, according to `keep_files`; `link` allows it to link.

        A file that may be linked, or a pointer, is one of the checkpoint that was saved last.
        """
        if self._earlier is not None and self._keeping != "off":
            file_path = own = self._early_copy(file_path)
            self._keep_until_chosen(
                lambda: self.upload_file(state, remote_file_name, own, overwrite=overwrite, link=link)
            )
        if self._keeping != "off" and self._mirror_template is not None:
            self._send_file(remote_file_name, file_path, overwrite=overwrite, link=link)
            return
        keeping = self._keeping
        if link and keeping == "copy" and self._run_dir is not None:
            keeping = "link" if file_path.stat().st_dev == self._run_dir.stat().st_dev else "copy"
        if keeping != "off":
            self._with_media(
                lambda media, at: media.keep_file(
                    file_path,
                    remote_file_name,
                    overwrite=overwrite,
                    keeping=keeping,
                    step=at,
                    is_checkpoint=link or remote_file_name.endswith(".symlink"),
                ),
                None,
            )

    def delete_file(
        self, state: State, remote_file_name: str, *, after: Sequence[str] = (), then: Sequence[str] = ()
    ) -> None:
        """Removes files from `artifacts/`, in the background."""
        if self._earlier is not None and self._keeping != "off":
            self._keep_until_chosen(lambda: self.delete_file(state, remote_file_name, after=after, then=then))

        def delete(media: MediaWriter, at: int) -> None:
            for name in (remote_file_name, *then):
                media.delete_file(name, step=at, with_folder=bool(then))

        if self._keeping != "off" and self._files is not None:
            self._files.delete_file(remote_file_name, after=after, then=then)
        if self._keeping != "off":
            self._with_media(delete, None)

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Copies a file out of `artifacts/`."""
        if self._run_dir is None:
            raise FileNotFoundError(f"no run is open to download artifact {remote_file_name!r} from")
        if self._files is not None:
            # A pointer there names what it leads to as the store does.
            name = f"{ARTIFACTS_FOLDER}/{remote_file_name.removeprefix(f'{ARTIFACTS_FOLDER}/')}"
            try:
                self._files.queue.download_file(
                    name, destination, overwrite=overwrite, progress_bar=progress_bar
                )
            except UploadError as error:
                if isinstance(error, FileNotFoundError | FileExistsError):
                    raise
                raise OSError(f"could not download {remote_file_name!r}: {error}") from error
            return
        source = artifact_path(self._run_dir, remote_file_name)
        if not source.is_file():
            raise FileNotFoundError(f"no artifact {remote_file_name!r} in {self._run_dir / ARTIFACTS_FOLDER}")
        if Path(destination).exists() and not overwrite:
            raise FileExistsError(
                f"local file {destination!r} exists already. Pass overwrite=True to replace it."
            )
        Path(destination).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, destination)

    def list_files(self, prefix: str) -> Sequence[str]:
        if self._files is None or self._keeping == "off":
            return ()
        start = f"{ARTIFACTS_FOLDER}/"
        try:
            names = self._files.queue.names(start + prefix, _FILES_LISTED)
        except UploadError as error:
            raise OSError(f"cannot list {self._files.queue.uri(start)}: {error}") from error
        return [name.removeprefix(start) for name in names]

    def has_uploaded(self, remote_file_name: str) -> bool:
        return self._files is None or self._keeping == "off" or self._files.has_uploaded(remote_file_name)

    def file_uri(self, remote_file_name: str) -> str | None:
        return (
            None
            if self._files is None or self._keeping == "off"
            else self._files.file_uris(remote_file_name)[0]
        )

    def _early_copy(self, path: Path) -> Path:
        """Copies a file that may have to go to another folder: the caller may change or delete it."""
        if self._early_files is None:
            self._early_files = tempfile.TemporaryDirectory(prefix="early-files-")
        copy = Path(self._early_files.name) / uuid.uuid4().hex
        shutil.copyfile(path, copy)
        return copy

    def _send_file(self, name: str, path: Path, *, overwrite: bool, link: bool) -> None:
        """Submits a file to the store of the run; its line in the index is written here."""
        artifact_path(Path(), name)
        size = path.stat().st_size
        if self._files is not None:
            self._files.upload_file(name, path, overwrite=overwrite, link=link)
            is_checkpoint = link or name.endswith(".symlink")
            self._with_media(
                lambda media, at: media.note_file(name, size, step=at, is_checkpoint=is_checkpoint), None
            )
        elif self._state is None or self._state.rank == 0:
            self._keep_for_init("files", lambda: self._send_file(name, path, overwrite=overwrite, link=link))

    def can_upload_files(self) -> bool:
        """Returns whether files may be kept; `init` decides if another destination takes files too."""
        return self._keep_files != "off"

    def flush(self) -> None:
        """Waits until everything logged is written, at most ten seconds each for media and for metrics."""
        if self._lane is not None:
            self._lane.flush(10.0)
        if self._writer is not None:
            self._writer.flush()

    # Inside.

    def _with_media(self, call: Callable[[MediaWriter, int], None], step: int | None) -> None:
        media, state = self._media, self._state
        if state is not None and state.rank != 0:
            return
        if media is None or state is None:
            self._keep_for_init("media", lambda: self._with_media(call, step))
            return
        call(media, int(state.timestamp.batch) if step is None else step)
        if self._writer is not None:
            self._writer.changed()

    def _keep_for_init(self, what: str, call: Callable[[], None]) -> None:
        """Buffers a record until `init`; does nothing on a silent rank and in a forked child."""
        if self._is_silent:
            if self._told_of_child is not None and not self._told_of_child[0]:
                self._told_of_child[0] = 1
                _log.warning(
                    "%s is logged in a forked process, such as a worker of a DataLoader, and is not written: "
                    "only the process that began the run writes to %s. Return it from the worker, and log it "
                    "there. Said once.",
                    what,
                    self._run_dir,
                )
            return
        if self._was_closed:
            raise RunNotOpenError(f"cannot log {what}: the run is closed. Log between init and post_close.")
        if self._state is None:
            self._keeps_early_records(f"run folder {self._template}")
        if len(self._early) < _MAX_EARLY_RECORDS:
            self._early.append(call)
            return
        if not self._early_lost:
            _log.error(
                "run folder %s is not open: %d records are buffered for init; further ones are dropped.",
                self._template,
                _MAX_EARLY_RECORDS,
            )
        self._early_lost += 1

    def _make_segment(self, path: Path, number: int, size: int) -> Segment:
        """Makes a segment of a mapped journal; raises OSError if the file system maps no files."""
        return MappedSegment(path, number, size)

    def _packer_of(self, writer: RankWriter) -> Callable[[Mapping[str, Any], int], bool]:
        """Returns what packs rows into the journal; takes none if a subclass overrides `log_metrics`."""
        is_ours = type(self).log_metrics is RunDirectory.log_metrics
        return writer.journal.try_append if is_ours else _takes_none

    def _describe_environment(self, ranks: dict[str, Any]) -> dict[str, Any]:
        """Returns the content of `environment.json`; called in a thread of its own."""
        return describe_environment(ranks)

    def _media_stats(self) -> dict[str, Any]:
        if self._lane is None or self._media is None:
            return {}
        counts = self._lane.counts
        return {
            "accepted": counts.accepted,
            "done": counts.done,
            "failed": counts.failed,
            "dropped": counts.dropped,
            "errors": dict(counts.errors),
            "files": self._media.files_written,
            "bytes": self._media.bytes_written,
            "lost": dict(self._media.lost) | ({"early": self._early_lost} if self._early_lost else {}),
        }

    def forget_in_child(self) -> None:
        """Silences a forked child: threads, lock and files belong to its parent."""
        writer = self._writer
        self._writer = self._documents = self._media = self._lane = self._resumption = self._earlier = None
        self.try_log_metrics = _takes_none
        self._is_silent = True
        if writer is not None:
            writer.forget_in_child()

    __getstate__ = closed_state

    def __repr__(self) -> str:
        return f"RunDirectory({self._template!r})"


@attrs.frozen
class _TakenPlace:
    """A place that is locked, and to which nothing is written yet."""

    place: Place
    lock: WriterLock
    claim: "Claim | None"

    @property
    def is_completed(self) -> bool:
        """Whether it holds a completed run."""
        return self._status == "completed"

    @property
    def what_it_holds(self) -> str:
        """What the place holds, for messages."""
        return f"holds a run that {_ENDED.get(self._status, 'did not end')}"

    @property
    def _status(self) -> str:
        return str(read_json(self.place.folder / SIDECAR).get("status"))


def _continues(proof: bool | str | None, *, is_completed: bool) -> bool | None:
    """Returns whether a run is continued, given `State.continues_run`; None if that is not known yet."""
    return not is_completed if proof == "unless completed" else None if proof is None else bool(proof)


def _takes_none(_metrics: Mapping[str, Any], _step: int) -> bool:
    return False


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
