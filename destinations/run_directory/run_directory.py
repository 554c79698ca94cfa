"""`RunDirectory`: a run as a folder of plain files.

Its methods run in the training thread. They pass metrics to a memory-mapped journal, and everything else to a
lane (one background thread). A writer thread moves rows from the journal to `metrics.csv` and keeps the
documents of the run up to date.
"""

import functools
import inspect
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import attrs

from destinations.base import RecordDestination, closed_state
from destinations.copies import own_copy
from destinations.history.snapshot import metric_columns, take_snapshot
from events import State, WriteRate, check_unknown, redact_text, safe_text
from uploads.disk import call_in_forked_children, stop_calling_in_forked_children

from .drain import PART_BYTES
from .environment import describe_environment
from .folder import RunDirectoryError, RunNotOpenError, RunPathError, check_path
from .layout import column_of
from .media_writer import FileKeeping
from .open_run import OpenRun
from .opening import EarlyRecords, IfExists, Opening, Silence, TakenPlace, check_ranks
from .place import check_fork, check_template, check_writer, place_of
from .rank_writer import JournalKind, RankWriter, RunOptions, loss_text
from .resumption import Continuation
from .segments import MappedSegment

if TYPE_CHECKING:
    from .claim import Claim

__all__ = ["RunDirectory"]


_log = logging.getLogger("destinations")

_NAMES_SHOWN = 3


class RunDirectory(RecordDestination):
    """Writes a run as a folder of plain files: `metrics.csv`, `sidecar.json`, media, tables, and more.

    ```python
    trainer = Trainer(model, train_dataloader, max_duration="5ep", loggers=[RunDirectory("runs/mine")])
    ```

    **Metrics.** A call packs one row into a memory-mapped journal in about a microsecond, without a lock or a
    system call. A row whose call has returned survives `kill -9`. A power loss loses at most the rows of the
    last `flush_seconds`. A writer thread moves rows to `metrics.csv`.

    **Everything else** is copied during the call and written by a second thread. When its queue is full
    (1,000 records or 256 MiB), a call waits at most one second; then the record is dropped, counted, and
    reported.

    **Resume.** A run is continued if there is proof that it is the same run, see `if_exists`. Records from
    before the checkpoint belong to the run; later records stay on disk as a branch. Without proof, the run in
    the folder is left unchanged, and the new run gets a free name beside it, such as "digits-2", with a
    warning. The proof may come after `init`: records logged by then move to the run that it names. One
    process writes at a time; a second one gets a `RunInUseError`.

    **Several processes.** With `writer="eval"`, another process adds to the run before, while, or after its
    trainer writes. It has its own folder, `writers/eval` of the run, so neither waits for the other, and
    readers see one run. Steps may be late and in any order. Each session appends to earlier ones; only a
    `Trainer` that loads a checkpoint and trains replaces rows, and only this writer's rows.

    **Disk failures** don't reach training: rows are buffered in memory, up to 64 MiB, and written once the
    disk works again.

    **In a store.** If you pass a URI instead of the folder, or as `mirror`, a separate process uploads new
    data every `mirror_seconds`. If the machine is lost, up to `mirror_seconds` of data are lost with it. The
    same line on another machine fetches the run's rows and documents and continues it. While one machine
    writes the run, another one gets a `RunInUseError`. A machine that was wrongly taken for dead can't change
    its successor's files; its rows are kept as a branch. Files given to `upload_file` go to the store too.

    See the pages "A run that lives in a bucket" and "The format on disk".

    Args:
        run_dir: the folder; may contain placeholders that are constant during a run, such as `{run_name}`. A
            URI, such as "s3://bucket/runs/{run_name}", keeps the run in a store: see **In a store**.
        run_id: the id of a new run. A run in the folder with this id is continued. Default: twelve random
            hexadecimal digits.
        tags: added to the tags of the run.
        notes: the notes of the run, if it has none.
        flush_seconds: the interval at which rows are written to `metrics.csv`; limits what a power loss can
            lose.
        if_exists: what to do if the folder holds a run: "resume" continues it, "error" raises, and "new"
            takes a free name beside it, such as "digits-2", which `run_dir` returns. "new" needs a single
            writing rank. The default, "auto", continues the run if there is proof, and otherwise takes a free
            name. Proof is the `run_id` of that run; `state.continues_run`, which is set by trainers that load
            a checkpoint and by `Run.fit_start(batch=...)`; or, for a run that did not complete, a scheduler
            that restarts the job.
        fork_from: the run that a new run continues, and where: a path or the name of a folder beside the
            new one, then "@" and the step or name of a checkpoint, as in "digits@ba120". Default: the
            checkpoint that is loaded, else the end of that run. Ignored for a run that is continued.
        writer: the name of another process that adds to the run; letters, digits, ".", "_" and "-". It has
            its own files, tags, status, and heartbeat. With `if_exists="auto"`, it is continued even if it
            was completed. Default: the trainer, which sets the status of the run.
        all_ranks: also writes the metrics of ranks other than 0, one CSV per rank. Without it, a rank that
            logs a metric that rank 0 doesn't have warns at its end.
        keep_files: what to do with files given to `upload_file`: "copy", "link" (hard links; don't modify
            the file in place), "off", or "auto": "copy", but "off" if another destination takes files.
        journal: "mapped", "appended" (one system call per row), or "auto": mapped, except on network file
            systems.
        close_seconds: the timeout for writing the rest at close.
        mirror: the URI of a store, or a folder, that also gets the run; with placeholders as in `run_dir`.
        mirror_seconds: the interval at which new data is uploaded there.
        write_rate: limits how often metrics are taken. Default: every call.
        clock: the current time in seconds since 1970; called in the thread that logs. For replayed runs.
        unknown: not allowed; an unknown argument raises a `TypeError` that names the nearest known one.

    Raises:
        RunPathError: the path is a file or isn't writable, the run name leads out of the folder, the store
            can't be read, or a newer release wrote the run. Raised by the constructor if possible, else at
            `init`.
        RunExistsError: at `init`, the folder holds a run, and `if_exists` is "error"; or it is "auto" without
            proof, and several ranks write.
        RunInUseError: at `init`, another process writes to the folder, or another machine to the store.
        ValueError: the URI has no store, an argument has a value that isn't listed above, `if_exists="new"`
            is combined with `all_ranks`, or the name of the writer is invalid.
        TypeError: `tags` is a string.
    """

    _warns_of_repeats = True
    _part_bytes = PART_BYTES
    _make_segment = staticmethod(MappedSegment)
    _describe_environment = staticmethod(describe_environment)

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        run_id: str | None = None,
        tags: Sequence[str] = (),
        notes: str = "",
        flush_seconds: float = 1.0,
        if_exists: IfExists = "auto",
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
        _check_arguments(if_exists, keep_files, journal, tags, notes, flush_seconds, mirror_seconds)
        check_ranks(if_exists, all_ranks=all_ranks)
        self._writer_name = "" if writer is None else check_writer(writer)
        self._template, self._mirror_template = check_template(run_dir, mirror, self._writer_name)
        check_fork(fork_from, self._template, self._writer_name)
        self._options = RunOptions(
            run_id=run_id,
            tags=tuple(redact_text(str(tag)) for tag in tags),
            notes=redact_text(notes),
            is_trainer=writer is None,
            flush_seconds=flush_seconds,
            mirror_seconds=mirror_seconds,
            journal=journal,
            fork_from=None if fork_from is None else os.fspath(fork_from),
            clock=clock,
        )
        self._more_tags: tuple[str, ...] = ()
        self._if_exists = if_exists
        self._all_ranks = all_ranks
        self._keep_files: FileKeeping = keep_files
        self._close_seconds = close_seconds
        self._clock = clock
        self._was_closed = False
        self._forget()

    def _forget(self) -> None:
        """Resets the attributes to the closed state."""
        self._state: State | None = None
        self._opening: Opening | None = None
        self._run: OpenRun | None = None
        # The logger calls this instead of `log_metrics`. An attribute, since another call would take
        # microseconds.
        self.try_log_metrics: Callable[[Mapping[str, Any], int], bool] = _takes_none
        # Records logged before `init`, or before the folder is decided.
        self._early = EarlyRecords(self._template)
        self._continuation = Continuation(
            self._clock, is_trainer=self._options.is_trainer, warns=self._warns_of_repeats
        )
        self._keeping: FileKeeping = "copy" if self._keep_files == "auto" else self._keep_files
        self.cannot_open = False
        # Set if this process, or its forked children, write nothing.
        self._silence: Silence | None = None

    # Properties.

    @property
    def template(self) -> str:
        """The folder as given, with its placeholders; with `writer=`, the folder of the writer."""
        return self._template

    @property
    def writer(self) -> str:
        """The name of the writer; "" for the trainer of the run."""
        # The requested name may have been taken.
        return self._writer_name if self._run is None or self._options.is_trainer else self._run.run_dir.name

    def move_to(self, run_dir: str | os.PathLike[str], *, tags: Sequence[str] = ()) -> None:
        """Sets the folder of the next run; for trainers that make several runs with one destination.

        Args:
            run_dir: the folder, as in the constructor.
            tags: tags of the next run, in addition to the constructor's.

        Raises:
            RunPathError: a run is open, or the path is a file or not writable.
        """
        if self._run is not None:
            raise RunPathError(f"run folder {str(self._run.run_dir)!r} is open. Close its run first.")
        # For a writer, the folder comes from `template`.
        self._template, uri = check_template(run_dir, None)
        self._mirror_template = uri or self._mirror_template
        self._more_tags = tuple(redact_text(str(tag)) for tag in tags)

    @property
    def run_dir(self) -> Path | None:
        """The folder of the open run, or None.

        If the folder holds a run and it isn't known yet whether this one continues it, reading the property
        decides: this run gets a folder beside it.
        """
        self._choose(for_good=True)
        return None if self._run is None else self._run.run_dir

    @property
    def is_undecided(self) -> bool:
        """Whether the folder holds a run, and it isn't known yet whether this run continues it."""
        return self._opening is not None and self._opening.earlier is not None

    @property
    def run_id(self) -> str | None:
        """The id of the open run, or None; only rank 0 knows it."""
        return None if self._run is None or self._run.documents is None else self._run.documents.run_id

    @property
    def keeps_files_here(self) -> bool:  # type: ignore[override]  # an attribute of others
        """Whether uploaded files stay on this machine; False for a run in a store."""
        return self._mirror_template is None

    def folder_of(self, state: State, run_dir: str | None = None) -> Path:
        """Returns the local folder of a run with this state, whether or not it is open.

        Args:
            state: the state of the run.
            run_dir: a folder as given to `move_to`. Default: the present one.

        Raises:
            RunPathError: the name of the run leads out of the folder.
        """
        template = self._template if run_dir is None else run_dir
        return place_of(template, template if "://" in template else self._mirror_template, state).folder

    def place(self) -> str:
        return "" if self._run is None else str(self._run.place)

    @property
    def _writer(self) -> RankWriter | None:
        return None if self._run is None else self._run.writer

    # Events.

    def init(self, state: State, logger: Any) -> None:
        """Opens the folder, then writes the records that were logged before."""
        self._state = state
        self._run_begins()
        if state.rank and not self._all_ranks:
            self._silence = Silence()
            self._early.clear()
            return
        place = place_of(self._template, self._mirror_template, state)
        check_path(place.folder)
        others = (one for one in state.callbacks if one is not self and hasattr(one, "can_upload_files"))
        if self._keep_files == "auto" and any(one.can_upload_files() for one in others):
            self._keeping = "off"
        self._opening = Opening(
            place=place,
            state=state,
            if_exists=self._if_exists,
            run_id=self._options.run_id,
            is_trainer=self._options.is_trainer,
            is_shared=self._all_ranks and state.world_size > 1,
            claim_of=self._claim_of,
            start=functools.partial(self._start, state),
            leave=self._leave,
            early=self._early,
        )
        self._opening.begin()
        if self._run is not None:
            self._early.log()
        self._choose_packer()

    def before_load(self, state: State, logger: Any) -> None:
        """Forgets the last checkpoint; later rows belong to the training that begins."""
        self._tell(state, self._continuation.before_load)

    def after_load(self, state: State, logger: Any) -> None:
        """Schedules a resume: the checkpoint may be older than the rows logged so far."""
        self._tell(state, lambda: self._continuation.after_load(int(state.timestamp.batch)))

    def fit_start(self, state: State, logger: Any) -> None:
        """Drops the rows that training will repeat, now or once it has repeated the first step."""
        self._tell(state, lambda: self._continuation.fit_start(continues=bool(state.continues_run)))
        if self._opening is not None and not state.is_done:
            self._opening.train()

    def state_dict(self) -> dict[str, Any]:
        """Returns the place of the checkpoint: everything this session has logged so far belongs to it."""
        return self._continuation.checkpoint()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the place of the checkpoint."""
        self._continuation.load(state)

    @property
    def counts(self) -> dict[str, int]:
        """Rows that wait for the disk, dropped rows, refused values, and the sum of all losses."""
        return {} if self._run is None else self._run.writer.counts()

    def close(self, state: State, logger: Any) -> None:
        """Records how the run ended; records logged until `post_close` are still written."""
        self._choose(for_good=True)
        if self._opening is not None:
            self._opening.end()
        self._continuation.end()
        self._choose_packer()
        if self._run is not None:
            self._run.end(state, self._clock())

    def post_close(self) -> None:
        """Writes the rest and releases the folder.

        A second Ctrl-C makes it return at once. The threads then finish on their own and release the folder.
        """
        self._run_begins()
        if self._silence is not None and self._silence.names and self._state is not None:
            _say_unwritten(self._silence.names, self.folder_of(self._state), self._state)
        run, early = self._run, self._early
        if run is not None and self._opening is not None:
            self._opening.settle()
        early.lost += len(early)
        try:
            if run is not None:
                run.stop(self._close_seconds)
        finally:
            if text := loss_text({"early": early.lost, **({} if run is None else run.writer.lost())}):
                _log.warning("run folder %s: lost %s.", self._template if run is None else run.run_dir, text)
            if self._opening is not None:
                self._opening.settle()
            early.close()
            stop_calling_in_forked_children(self.forget_in_child)
            self._forget()
            self._was_closed = True

    # Which folder.

    def _choose(self, *, for_good: bool = False) -> None:
        """Decides which folder the run gets, if that is known by now; see `Opening`."""
        if self._opening is not None and self._opening.earlier is not None:
            try:
                self._opening.choose(is_written=self._run is not None, for_good=for_good)
            except RunDirectoryError:
                # Another process has taken the run in the store.
                self.cannot_open = True
                raise
            self._choose_packer()

    def _tell(self, state: State, call: Callable[[], None]) -> None:
        """Passes an event to the continuation."""
        if state.continues_run is not None:
            self._choose()
        call()
        self._choose_packer()

    def _start(self, state: State, taken: TakenPlace) -> None:
        """Starts writing to a place."""
        options = attrs.evolve(
            self._options,
            tags=(*self._options.tags, *self._more_tags),
            keeping=self._keeping,
            part_bytes=self._part_bytes,
            make_segment=self._make_segment,
            describe=self._describe_environment,
        )
        run = OpenRun(taken, state, options, self._early)
        self._run = run
        self._continuation.enter(run)
        self._silence = Silence()
        call_in_forked_children(self.forget_in_child)

    def _leave(self) -> None:
        """Closes and removes the folder beside the earlier run; its records go to the earlier run."""
        run, self._run, self._silence = self._run, None, None
        self._continuation.leave()
        stop_calling_in_forked_children(self.forget_in_child)
        if run is not None:
            run.discard(self._clock(), self._close_seconds)

    # Records.

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Packs one row into the journal; buffers it before `init`."""
        if self._silence is not None and self._run is None and not self._silence.is_child:
            self._silence.note(metrics)
        elif run := self._open_for(
            "metrics", lambda: functools.partial(self.log_metrics, dict(metrics), step)
        ):
            if self._continuation.is_watching:
                self._continuation.before(metrics, step)
                self._choose_packer()
            run.writer.journal.append(metrics, step)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Adds hyperparameters to `hparams.yaml` and the sidecar."""
        # A completed run keeps its own until it is trained again.
        is_reopened = self._opening is not None and self._opening.is_reopened
        if self._run is None or is_reopened or self.is_undecided:
            # Hyperparameters open no folder, because proof often comes after them.
            again = functools.partial(self.log_hyperparameters, own_copy(hyperparameters))
            self._keep_for_init("hyperparameters", again)
        if self._run is not None and not is_reopened:
            self._run.add_hyperparameters(hyperparameters)

    def log_record(self, kind: str, arguments: dict[str, Any]) -> None:
        """Writes a record in the background; see `MediaWriter`."""
        # A copy: the caller may change the values meanwhile.
        if run := self._open_for(
            "media", lambda: functools.partial(self.log_record, kind, own_copy(arguments))
        ):
            run.log_record(kind, arguments)

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

        A file that may be linked, or a pointer, belongs to the checkpoint that was saved last.
        """

        def again() -> Callable[[], None]:
            path = self._early.copy_of(file_path) if self.is_undecided else file_path
            return lambda: self.upload_file(state, remote_file_name, path, overwrite=overwrite, link=link)

        if self._keeping != "off" and (run := self._open_for("files", again)):
            run.files.upload(remote_file_name, file_path, overwrite=overwrite, link=link, step=run.step)
            run.writer.changed()

    def delete_file(
        self, state: State, remote_file_name: str, *, after: Sequence[str] = (), then: Sequence[str] = ()
    ) -> None:
        """Removes files from `artifacts/`, in the background."""
        again = functools.partial(self.delete_file, state, remote_file_name, after=after, then=then)
        if self._keeping != "off" and (run := self._open_for("files", lambda: again)):
            run.files.delete(remote_file_name, after=after, then=then, step=run.step)
            run.writer.changed()

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Copies a file out of `artifacts/`."""
        if self._run is None:
            raise FileNotFoundError(f"no run is open to download artifact {remote_file_name!r} from")
        self._run.files.download(
            remote_file_name, destination, overwrite=overwrite, progress_bar=progress_bar
        )

    def list_files(self, prefix: str) -> Sequence[str]:
        return () if self._run is None else self._run.files.names(prefix)

    def has_uploaded(self, remote_file_name: str) -> bool:
        return self._run is None or self._run.files.has_uploaded(remote_file_name)

    def file_uri(self, remote_file_name: str) -> str | None:
        return None if self._run is None else self._run.files.uri(remote_file_name)

    def can_upload_files(self) -> bool:
        """Returns whether files may be kept; with "auto", `init` decides."""
        return self._keep_files != "off"

    def flush(self) -> None:
        """Waits until everything logged is written, at most ten seconds each for media and for metrics."""
        if self._run is not None:
            self._run.flush()

    # Inside.

    def _open_for(self, what: str, again: Callable[[], Callable[[], None]]) -> OpenRun | None:
        """Returns the run that takes a record now.

        Keeps the record if no run is open, or if the record may have to move to another folder.

        Args:
            what: the record, for messages.
            again: returns a call that logs a copy of the record.
        """
        if self._run is None or (self._state is not None and self._state.continues_run is not None):
            self._choose()
        if self.is_undecided and not self._early.keep(again()):
            self._choose(for_good=True)
        if self._run is None:
            self._keep_for_init(what, again())
        return self._run

    def _keep_for_init(self, what: str, call: Callable[[], None]) -> None:
        """Buffers a record until `init`; does nothing on a silent rank and in a forked child."""
        if self._silence is not None and self._run is None:
            self._silence.tell(what, self._template)
            return
        if self._was_closed:
            raise RunNotOpenError(f"cannot log {what}: the run is closed. Log between init and post_close.")
        if self._state is None:
            self._keeps_early_records(f"run folder {self._template}")
        if not self._early.keep(call):
            self._early.drop()

    def _choose_packer(self) -> None:
        """Sets the function that packs rows; `log_metrics` handles them while each must be inspected."""
        is_ours = type(self).log_metrics is RunDirectory.log_metrics
        run = None if self.is_undecided or self._continuation.is_watching else self._run
        self.try_log_metrics = run.writer.journal.try_append if is_ours and run is not None else _takes_none

    def _claim_of(self, uri: str, rank: int) -> "Claim":
        """Returns the claim on a run in a store."""
        from .claim import Claim

        return Claim(uri, rank, max(self._options.mirror_seconds, self._options.flush_seconds))

    def forget_in_child(self) -> None:
        """Silences a forked child: threads, lock and files belong to its parent."""
        run, self._run, self._opening = self._run, None, None
        self._continuation.leave()
        self.try_log_metrics = _takes_none
        if self._silence is not None:
            self._silence.is_child = True
        if run is not None:
            run.writer.forget_in_child()

    __getstate__ = closed_state

    def __repr__(self) -> str:
        return f"RunDirectory({self._template!r})"


def _check_arguments(
    if_exists: Any,
    keep_files: Any,
    journal: Any,
    tags: Any,
    notes: Any,
    flush_seconds: Any,
    mirror_seconds: Any,
) -> None:
    for name, value, choices in (
        ("if_exists", if_exists, get_args(IfExists)),
        ("keep_files", keep_files, get_args(FileKeeping)),
        ("journal", journal, get_args(JournalKind)),
    ):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
    if isinstance(tags, str):
        raise TypeError(f"tags must be a list of strings, got {tags!r}. Write tags=[{tags!r}].")
    if not isinstance(notes, str):
        raise TypeError(f"notes must be a string, got {notes!r}. Write notes={str(notes)!r}.")
    for name, seconds in (("flush_seconds", flush_seconds), ("mirror_seconds", mirror_seconds)):
        if not seconds > 0:
            raise ValueError(f"{name} must be more than 0, got {seconds}.")


def _say_unwritten(names: Iterable[str], folder: Path, state: State) -> None:
    """Warns about metrics that only this rank has logged; rank 0 may be about to log them too."""
    if state.node_rank and not folder.exists():
        # Rank 0's files aren't on this machine.
        return
    try:
        with take_snapshot(folder, 0) as snapshot:
            there = {"epoch", *metric_columns(snapshot)}
    except OSError:
        return
    missing = sorted(name for name in names if column_of(name) not in there)
    if missing:
        shown = ", ".join(map(repr, missing[:_NAMES_SHOWN])) + (", …" if missing[_NAMES_SHOWN:] else "")
        alone = " If this process is a run of its own, set RANK=0 and WORLD_SIZE=1."
        _log.warning(
            "rank %d of %d (%s) writes no metrics to run folder %s: %s is only there if rank 0 logs it "
            "too. To keep it, make the run on every rank with RunDirectory(..., all_ranks=True).%s",
            state.rank,
            state.world_size,
            state.found_ranks.source,
            folder,
            redact_text(safe_text(shown)),
            "" if state.found_ranks.source == "process group" else alone,
        )


def _takes_none(_metrics: Mapping[str, Any], _step: int) -> bool:
    return False
