"""Delivers each logged record to every destination.

Training thread only. `log_metrics` is the hot path: about a microsecond for ten numbers, plus
what the destinations take.
"""

import functools
import inspect
import logging
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any, Never, Protocol, SupportsIndex

from events.errors import EngineClosedError, RecordError
from events.event import Event
from events.names import LiteralName, format_name
from events.redaction import redact, redact_text
from events.state import State

from . import checks
from .checks import check_file
from .converters import plain_config
from .delivery import Delivery, LogRow
from .destination import Destination, MetricsPacker
from .device import DeviceCopies
from .faults import Faults, caller
from .records import RECORD_KINDS, RecordMethods, RecordTools
from .values import (
    are_plain_types,
    are_real,
    read_numbers,
    short_repr,
)

__all__ = ["Logger"]

_log = logging.getLogger("events")

# The methods whose time a `TimeLedger` charges; the other `log_*` methods call `log_record`.
_CHARGED = ("log_hyperparameters", "log_record", "upload_file", "flush")
_NO_SPAN: AbstractContextManager[None] = nullcontext()
# A journal, Parquet and SQL hold a step in 64 bits, and Python prints no integer of more than 4,300 digits.
_MAX_STEP = 2**63 - 1
# The namespaces of this thread and task, of each logger by its identity.
_prefixes: ContextVar[Mapping[int, str]] = ContextVar("events.namespaces", default=MappingProxyType({}))


class AttachedCallback(Protocol):
    """A callback that joins a run in progress, without naming `Callback`, which names `Logger`."""

    def run_event(self, event: Event, state: State, logger: "Logger") -> None:
        """Handles an event."""

    def close(self, state: State, logger: "Logger") -> None:
        """Ends the callback's work."""

    def post_close(self) -> None:
        """Releases resources."""


class Logger(RecordMethods):
    """Delivers what is logged to every destination.

    ```python
    class LossPerClass(Callback):
        def batch_end(self, state, logger):
            logger.log_metrics({"loss/cat": 0.1, "loss/dog": 0.3})
            logger.log_table(["label", "count"], [["cat", 3], ["dog", 5]], name="labels")
    ```

    **Steps.** The default `step` is the number of completed batches: a loss logged while batch 0 is trained
    has step 0, and a metric that a callback logs on the following `BATCH_END` has step 1. In a loop that
    counts no batches, it is the last step that was passed.

    **Values.** Any value may be a function without arguments. It is called in this thread, at most once, and
    only if a destination will write its result. If it raises, or returns something that can't be logged, only
    its own value is lost.
    Values on a device are copied without waiting, several calls at a time, and delivered in order once they
    have arrived; meanwhile the state has the position of the call. See `DeviceCopies`.

    **Rates.** A destination with a `write_rate` gets metrics when it is due; see `WriteRate`.

    **Errors.** A bad value is dropped, and the rest of the call is logged. Bad values are a metric that isn't
    a number, a name that isn't a string, a step that isn't a whole number, an image of the wrong shape, and
    so on. They are counted in `faults.value_counts`, reported once with the line of the caller, and
    summarized at close. A record with a bad step gets the default step, and one with a bad name gets the text
    of that name. With `strict` the call raises `RecordError` once the rest is logged; for a bad name or step
    it raises at once, and nothing is logged.

    An exception of a destination is caught, counted in `faults.counts`, reported once per kind, and
    summarized at close. A `RecordError` of a destination, for a record that it cannot take, counts as a bad
    value; the other destinations get the record.

    **Threading.** Call it from the thread that trains. One exception: with `RunDirectory`, `TextFile` and
    `InMemory`, any thread may call `log_metrics` with plain numbers and an explicit `step`. Only
    `upload_file`, which copies the file, and `download_file` wait for a disk or a network. Only `flush`,
    and a call that finds too many pending copies, wait for a device; see `DeviceCopies`.

    **Ownership.** The caller may change its values as soon as the call returns.

    Args:
        state: the run; its timestamp gives the steps.
        destinations: one, or several.
        raise_errors: lets exceptions of destinations propagate, for tests.
        strict: raises `RecordError` for bad values, for tests and notebooks.
        namespace: prefixes the names of all metrics and records; see the method of that name.
        device_copies: how values are copied from a device.
    """

    def __init__(
        self,
        state: State,
        destinations: Destination | Iterable[Destination] | None = None,
        raise_errors: bool = False,
        *,
        strict: bool = False,
        namespace: str = "",
        device_copies: DeviceCopies = DeviceCopies(),  # noqa: B008  # frozen
    ) -> None:
        self._state = state
        self._destinations = _as_destinations(destinations)
        self._is_stopped = False
        # The step that was given last, the default where no batches are counted.
        self._given_step = 0
        # Whether the warning about hyperparameters without names was logged.
        self._has_warned_of_names = False
        # Whether the warning about a file that no destination takes was logged.
        self._has_warned_of_files = False
        self._ledger: Any = None
        self._own_prefix = _prefix("", namespace) if namespace else ""
        # One for each open block, of any thread or task.
        self._open_namespaces: list[str] = []
        self.faults = Faults(raise_errors=raise_errors, strict=strict)
        self._delivery = Delivery(state, self._destinations, lambda: self.faults, device_copies)
        # Whether copies from a device are pending; an attribute, because the engine checks it at each event.
        self.is_busy = False
        # Callbacks that joined a run in progress; an attribute, because the engine checks it at each event.
        self.attached: tuple[AttachedCallback, ...] = ()
        # The destination that packs metrics without a look at their values first, and all others.
        self._packer: Any = _packer_of(self._destinations)
        self._unpacked = tuple(one for one in self._destinations if one is not self._packer)
        # Whether the last metrics were Python's numbers: then the next ones probably are.
        self._expects_plain = self._packer is not None
        # Tried first where `log_metrics` has to do more than to convert values and call the destinations.
        self._shortcut: Callable[[Any, int], bool] | None = None
        # Logs scalars on a device, if the last metrics were such scalars.
        self._log_row: LogRow | None = None
        self._outbox = self._delivery.outbox
        self._refresh()

    @property
    def destinations(self) -> tuple[Destination, ...]:
        """The destinations."""
        return self._destinations

    @property
    def state(self) -> State:
        """The state of the run."""
        return self._state

    def charge_time(self, ledger: Any) -> None:
        """Lets a `TimeLedger` charge the time of all calls to `logging`, and keep spans."""
        self._ledger = ledger
        for name in _CHARGED:
            setattr(self, name, functools.partial(ledger.charge_call, "logging", getattr(self, name)))
        self.log_metrics = ledger.charge_metrics(self.log_metrics)  # type: ignore[method-assign]

    def span(self, name: str) -> AbstractContextManager[None]:
        """Adds the time of a block to the trace of the run; blocks can be nested.

        ```python
        with run.span("tokenize"):
            batch = tokenize(texts)
        ```

        The `TimeLedger` of the run keeps it; without one, this does nothing. `destinations runs trace NAME`
        shows it. Use it in any thread.

        Args:
            name: the name of the span, in a few words; similar spans should share a name.
        """
        return _NO_SPAN if self._ledger is None else self._ledger.span(name)

    def begin_span(self, name: str, track: str) -> Callable[[], None]:
        """Begins a span of background work, such as an upload; for callbacks and destinations.

        Args:
            name: of the span.
            track: of those that are alike: "checkpoints", or "uploads", which may overlap.

        Returns:
            A function that ends it, in any thread.
        """
        end: Callable[[], None] = _nothing if self._ledger is None else self._ledger.begin_span(name, track)
        return end

    def attach(self, callback: AttachedCallback) -> None:
        """Adds a callback to a run in progress; it gets all later events, before the other callbacks.

        Unless detached before, it is closed with the run, before the others. Its exceptions propagate to the
        caller of the event. Attaching it again does nothing.

        Raises:
            EngineClosedError: the run is closed.
        """
        self._require_open("attach")
        self.detach(callback)
        self.attached = (*self.attached, callback)

    def detach(self, callback: AttachedCallback) -> None:
        """Removes a callback added by `attach`; does nothing for others."""
        self.attached = tuple(one for one in self.attached if one is not callback)

    def add_destination(self, destination: Destination) -> None:
        """Adds a destination to a run in progress, such as in a callback's `init`.

        It gets all later records, but no events: an engine looks up its destinations once.

        Raises:
            EngineClosedError: the run is closed.
            TypeError: it is not a destination.
        """
        self._require_open("add_destination")
        added = _as_destinations(destination)
        self._destinations = (*self._destinations, *added)
        self._unpacked = (*self._unpacked, *added)
        self._delivery.add(added)
        self._refresh()

    def log_metrics(  # noqa: C901, PLR0912  # the hot path: a function more would cost a tenth of it
        self, metrics: Mapping[str, Any], step: int | None = None
    ) -> None:
        """Logs scalars.

        Args:
            metrics: numbers by name: Python's, numpy's, tensors of one element on any device, or functions
                that return one. Nested mappings and TensorDicts are flattened, their names joined with "/".
            step: the step they belong to. Default: see **Steps** of the class.

        Raises:
            EngineClosedError: the run is closed.
        """
        if self._log_row is not None and not self.faults.failing and self._log_row(metrics, step):
            if not self.is_busy:
                self._refresh()
            return
        if step is None:
            step = self._state.timestamp.batch.value or self._given_step  # type: ignore[assignment]
        else:
            if type(step) is not int or not -_MAX_STEP <= step <= _MAX_STEP:
                step = self._step(step)
            self._given_step = step
        if self._shortcut is not None or self.faults.failing:
            if self.faults.failing or not self._shortcut(metrics, step):  # type: ignore[arg-type, misc]
                self._log_any_metrics(metrics, step)  # type: ignore[arg-type]
            elif bool(self._outbox) is not self.is_busy:
                self._refresh()
            return
        destinations, packer = self._destinations, self._packer
        values: Mapping[str, Any] | None = metrics
        try:
            # Ten floats take 1.2 µs if a packer checks them while it packs; 1.8 if they are checked before.
            if self._expects_plain and packer.try_log_metrics(metrics, step):
                destinations = self._unpacked
                if not destinations:
                    return
            # This runs in C: 0.3 µs for ten numbers. A function call would add half as much.
            elif are_plain_types(map(type, metrics.values())):
                "".join(metrics)
                self._expects_plain = self._packer is not None
            else:
                values, self._expects_plain = read_numbers(metrics), False
                if values and packer is not None and packer.try_log_metrics(values, step):
                    destinations = self._unpacked
                elif values is not None and not are_real(values):
                    values = None
        except Exception as error:  # noqa: BLE001  # no mapping, no string: the slow path reports it
            self.faults.raise_if_foreign(error)
            values = None
        if values is None:
            if not self._delivery.try_log(metrics, self._prefix, step):  # type: ignore[arg-type]
                self._log_any_metrics(metrics, step)  # type: ignore[arg-type]
            elif self._outbox:
                self._refresh()
            return
        is_refused = False
        for destination in destinations:
            try:
                destination.log_metrics(values, step)
            except RecordError as error:
                is_refused = True
                name = f"{type(destination).__name__}.log_metrics"
                self.faults.refuse(name, error, raises=self.faults.raise_errors)
            except BaseException as error:  # noqa: BLE001  # a destination must not stop training
                self.faults.failed(destination, "log_metrics", error)
        if is_refused:
            self.faults.raise_refused()

    def log_scalar(self, name: str, value: Any, step: int | None = None) -> None:
        """Logs one scalar; see `log_metrics`."""
        self.log_metrics({self._text_name(name): value}, step)

    def log_hyperparameters(self, parameters: Any) -> None:
        """Logs hyperparameters: a dict, attrs class, dataclass, Namespace, pydantic model or OmegaConf.

        Secrets are redacted. A later call adds to an earlier one. Values of any kind are taken; see
        `plain_config`. A string has no names: it is logged as "value", with a warning.

        Raises:
            EngineClosedError: the run is closed.
        """
        self._record("log_hyperparameters", "", (parameters,), self._named_parameters)

    def _named_parameters(self, parameters: Any) -> dict[str, Any]:
        plain = redact(plain_config(parameters))
        if isinstance(parameters, str | bytes) and not self._has_warned_of_names:
            self._has_warned_of_names = True
            _log.warning(
                "%s: hyperparameters must have names, got %s: logged as 'value'. "
                'Write log_hyperparameters({"lr": 0.1}).',
                caller(),
                redact_text(short_repr(parameters, 80)),
            )
        return {"hyperparameters": plain}

    def log_record(self, kind: str, arguments: Mapping[str, Any]) -> None:
        """Logs a record of any kind; `log_table`, `log_images` and the like call it.

        Args:
            kind: the method without its "log_": "table", "images", "text", …
            arguments: the arguments of the method, by name and in its order.

        Raises:
            EngineClosedError: the run is closed.
        """
        action, values = f"log_{kind}", dict(arguments)
        if kind == "traces" and isinstance(values.get("traces"), Mapping):
            values["traces"] = self._with_trace_files(values["traces"])
        if action not in RECORD_KINDS or not RECORD_KINDS[action].is_record:
            self._require_open("log_record")
            self.faults.refuse("log_record", RecordError(f"kind {short_repr(kind)} of a record is unknown."))
            self.faults.raise_refused()
            return
        if kind == "images" and isinstance(values.get("images"), Mapping):
            self._log_images_by_name(values)
        else:
            self._log_record(action, values)

    def _with_trace_files(self, traces: Mapping[Any, Any]) -> dict[Any, Any]:
        """Uploads the files among traces, and returns the traces with the files replaced by their names."""
        found = dict(traces)
        for name, path in traces.items():
            if not isinstance(path, Path) or not path.is_file():
                continue
            state = self._state
            ending = "".join(one for one in path.suffixes[-2:] if one in {".json", ".gz"})
            place = f"{self._prefix}{name}-ba{state.timestamp.batch.value}-rank{state.rank}{ending}"
            remote = LiteralName(f"{state.run_name}/traces/{place}")
            try:
                self.upload_file(remote, path, overwrite=True)
            except (OSError, RecordError) as error:
                self.faults.refuse("log_traces", RecordError(f"{name!r}: {error}"))
            found[name] = {"file": str(remote), "size": path.stat().st_size}
        return found

    def _log_record(self, action: str, values: dict[str, Any]) -> None:
        kind, name = RECORD_KINDS[action], ""
        if "name" in values:
            name = values["name"] = self._prefix + self._text_name(values["name"])
        if "step" in values:
            values["step"] = self._step(values["step"])
        if "caption" in values:
            caption = checks.valid_caption(values.pop("caption"), name, self.faults.refuse)
            values |= {"caption": caption} if caption else {}
        delivery = self._delivery
        tools = RecordTools(self._prefix, self.faults.refuse, delivery.to_host, delivery.cell_to_host)
        lazy = kind.lazy or tuple(values)[:1]

        def prepare(*given: Any) -> dict[str, Any]:
            return kind.prepare(tools, **values | dict(zip(lazy, given, strict=True)))

        self._record(action, name, tuple(values.get(one) for one in lazy), prepare)

    def _log_images_by_name(self, values: dict[str, Any]) -> None:
        """Logs one record for each name of a dict of images."""
        name, captions = values.get("name"), values.get("captions")
        try:
            by_name = dict(values["images"])
        except Exception as error:  # noqa: BLE001  # a mapping's own methods
            self.faults.refuse("log_images", checks.unreadable("log_images", self._text_name(name), error))
            by_name = {}
        refused: list[RecordError] = []
        for key, images in by_name.items():
            own = {
                "images": images,
                "name": key if name == "Images" else f"{self._text_name(name)}/{self._text_name(key)}",
                "captions": captions.get(key) if isinstance(captions, Mapping) else captions,
            }
            try:
                self._log_record("log_images", values | own)
            except RecordError as error:  # with `strict`: once the others are logged
                refused.append(error)
        if refused:
            raise refused[0]
        self.faults.raise_refused()

    def upload_file(
        self,
        remote_file_name: str,
        file_path: Path | str,
        *,
        overwrite: bool = False,
        link: bool = False,
        crc32: int | None = None,
    ) -> None:
        """Uploads a file to every destination that takes files; they have taken it when the call returns.

        With `link=True`, `Artifacts` and `RunDirectory` take a hard link if they are on the same file
        system, which takes no time and no space. The caller may delete or replace the file, but must never
        write into it.

        Args:
            remote_file_name: the name in the destination, with placeholders such as `{run_name}`, `{rank}`,
                `{epoch}` and `{batch}`, see `format_name`; a `LiteralName` has none.
            file_path: the local path; placeholders are filled in unless the file exists.
            overwrite: whether it may replace an older file of that name.
            link: whether destinations may link the file instead of copying it.
            crc32: the CRC-32 of the file, if known, so that a destination that links the file need not read
                it.

        Raises:
            FileNotFoundError: there is no such file, and a destination takes files.
            IsADirectoryError: it is a directory.
            RecordError: it is a pipe or a device, or a name is invalid.
            EngineClosedError: the run is closed.
        """
        from uploads import UploadError

        name, path = self._file_names(remote_file_name, file_path)
        if "{" in str(path) and not os.path.exists(path):  # noqa: PTH110  # Path raises for a long name
            path = Path(format_name(str(path), self._state))
        if self.has_file_upload_destination():
            try:
                is_folder, is_there = path.is_dir(), path.exists()
            except (OSError, ValueError) as error:
                raise RecordError(
                    f"cannot read {str(path)!r:.200}, to be uploaded as {name!r}: {error}."
                ) from error
            if is_folder:
                raise IsADirectoryError(
                    f"{str(path)!r}, to be uploaded as {name!r}, is a directory. "
                    "Upload its files one by one, or an archive of it."
                )
            if not is_there:
                raise FileNotFoundError(f"file to upload as {name!r} must exist, got {str(path)!r}.")
            check_file(path, f"file to upload as {name!r}")
        elif not self._has_warned_of_files and self._state.rank == 0:
            self._has_warned_of_files = True
            _log.warning(
                "%s: file %r is not kept: no destination of this run takes files. Add RunDirectory(...), "
                "or Artifacts(...) for a store. More of the same are not reported.",
                caller(),
                name,
            )

        def upload(destination: Destination) -> None:
            # Destinations written for Composer take neither argument.
            known = inspect.signature(destination.upload_file).parameters if link else ()
            more: dict[str, Any] = {
                key: value for key, value in (("link", link), ("crc32", crc32)) if key in known
            }
            try:
                destination.upload_file(self._state, name, path, overwrite=overwrite, **more)
            except (RecordError, FileExistsError, UploadError) as error:
                if isinstance(error, UploadError) and not isinstance(error, FileExistsError | ValueError):
                    raise
                # Of the name or the file, and no failure: ten of those would park the destination.
                kind = f"{type(destination).__name__}.upload_file({name!r})"
                raises = self.faults.raise_errors
                self.faults.refuse(kind, error, raises=raises, outcome="The file is not taken")

        self._each("upload_file", upload)

    def download_file(
        self,
        remote_file_name: str,
        destination: str | Path,
        overwrite: bool = False,
        progress_bar: bool = True,
    ) -> None:
        """Downloads a file from the first destination that has it.

        Args:
            remote_file_name: the name in the destination; placeholders as in `upload_file`.
            destination: the local path to write, without placeholders.
            overwrite: whether an existing local file may be replaced.
            progress_bar: whether to show the progress.

        Raises:
            FileNotFoundError: no destination has it.
            FileExistsError: the local file exists.
            RecordError: a name is invalid.
            EngineClosedError: the run is closed.
        """
        self._require_open("download_file")
        name, local = self._file_names(remote_file_name, destination)
        path = str(local)
        asked = [one for one in self._destinations if self._takes_files(one)]
        for one in asked:
            try:
                one.download_file(name, path, overwrite, progress_bar)
            except (NotImplementedError, FileNotFoundError):
                continue
            return
        names = ", ".join(type(one).__name__ for one in asked) or "no destination, for none stores files"
        raise FileNotFoundError(f"file {name!r} was not found; asked: {names}.")

    def may_drop_files(self, *remote_file_names: str) -> None:
        """Lets files that belong together give way to newer ones where a bounded spool has no room for these.

        Args:
            remote_file_names: as in `upload_file`.
        """
        names = [self._file_names(name, "")[0] for name in remote_file_names]

        def note(destination: Any) -> None:
            if hasattr(destination, "may_drop_files"):
                destination.may_drop_files(self._state, *names)

        self._each("may_drop_files", note)

    def delete_file(
        self,
        remote_file_name: str,
        *,
        local: bool = False,
        after: Sequence[str] = (),
        then: Sequence[str] = (),
    ) -> None:
        """Deletes a file that this run has uploaded, in the background.

        Args:
            remote_file_name: as in `upload_file`.
            local: deletes it where destinations keep it on this machine (`RunDirectory`), not where they send
                it (`Artifacts`).
            after: names of files that must be there before.
            then: names of files that are deleted next, once this one is gone.
        """
        name, *before = (self._file_names(one, "")[0] for one in (remote_file_name, *after))
        more = {"then": [self._file_names(one, "")[0] for one in then]} if then else {}

        def delete(destination: Any) -> None:
            if getattr(destination, "keeps_files_here", False) == local and hasattr(
                destination, "delete_file"
            ):
                destination.delete_file(self._state, name, after=before, **more)

        self._each("delete_file", delete)

    def file_uris(self, remote_file_name: str) -> tuple[str, ...]:
        """Returns the URIs that a file of this name has in the stores of destinations.

        Args:
            remote_file_name: as in `upload_file`.
        """
        self._require_open("file_uris")
        name = self._file_names(remote_file_name, "")[0]
        found: list[str] = []

        def ask(destination: Any) -> None:
            uri = destination.file_uri(name) if hasattr(destination, "file_uri") else None
            found.extend([] if uri is None else [uri])

        self._each("file_uri", ask)
        return tuple(found)

    def list_files(self, prefix: str) -> list[str]:
        """Returns the names of files that destinations have in stores, of this run or another.

        Waits for the stores.

        Args:
            prefix: the beginning of the names; of each destination the first thousand are returned.

        Raises:
            OSError: a store cannot be asked.
        """
        self._require_open("list_files")
        return [name for list_files in self._methods_of_stores("list_files") for name in list_files(prefix)]

    def has_file_upload_destination(self) -> bool:
        """Returns whether a destination takes files."""
        return any(self._takes_files(destination) for destination in self._destinations)

    def has_uploaded(self, remote_file_name: str) -> bool:
        """Returns whether a file that was given to `upload_file` has arrived at every destination.

        A destination without `has_uploaded`, as one written for Composer, has it once `upload_file` returns.

        Args:
            remote_file_name: the name in the destination, without placeholders.

        Raises:
            OSError: a destination will never have it.
        """
        try:
            return all(ask(remote_file_name) for ask in self._methods_of_stores("has_uploaded"))
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    def flush(self) -> None:
        """Writes all waiting records, and flushes every destination.

        Waits for pending copies from devices, until the deadline of `device_copies`.
        """
        self._require_open("flush")
        self.deliver_pending()
        self._each("flush", lambda destination: destination.flush())

    @contextmanager
    def namespace(self, name: str) -> Iterator[None]:
        """Prefixes the names of all metrics and records that are logged in a `with` block.

        Blocks may be nested: inside `namespace("eval")` and `namespace("clean")`, "loss" is
        "eval/clean/loss". Hyperparameters and files keep their names. A block applies to its
        own thread and asyncio task; a task inherits the blocks in which it was created.

        Raises:
            RecordError: the name is not a string, or empty.
        """
        before = _prefixes.get()
        prefix = _prefix(self._prefix, name)
        self._open_namespaces.append(name)
        _prefixes.set({**before, id(self): prefix})
        self._refresh()
        try:
            yield
        finally:
            _prefixes.set(before)
            self._open_namespaces.pop()
            self._refresh()

    @property
    def _prefix(self) -> str:
        """What precedes names in this thread and task."""
        return _prefixes.get().get(id(self), self._own_prefix) if self._open_namespaces else self._own_prefix

    def poll(self) -> None:
        """Delivers what has arrived from devices, if it is time to look, without waiting.

        The engine calls it at each event.
        """
        if self.is_busy:
            # No `with`: it would take longer than most polls.
            try:
                self._delivery.look()
            finally:
                if not self._outbox:
                    self._refresh()

    def wait_for_copies(self) -> None:
        """Waits for pending copies until the deadline of `device_copies`, and delivers them."""
        if self.is_busy:
            with self._refreshing():
                self._delivery.wait_for_copies()

    def deliver_pending(self, *, is_last: bool = False) -> None:
        """Writes all waiting records, and waits for pending copies from devices.

        Args:
            is_last: copies that are not complete at the deadline are dropped, and counted.
        """
        with self._refreshing():
            self._delivery.write_all()
            self._delivery.wait_for_copies(is_last=is_last)

    def stop(self) -> None:
        """Makes later calls raise; called by the engine once its destinations are closed."""
        self._is_stopped = True
        self._refresh()

    def report_faults(self) -> None:
        """Logs a summary of the destinations' failures, if any; called once the run is closed."""
        for line in self.faults.summary(self._destinations):
            _log.warning("%s", line)
        if lost := self._delivery.lost_values:
            _log.warning("%s values on a device were lost.", f"{lost:,}")

    @property
    def lost_values(self) -> int:
        """How many values on a device were lost: its ring was full, it failed, or the deadline passed."""
        return self._delivery.lost_values

    def __reduce__(self) -> Never:
        """Raises TypeError: another process needs a logger of its own."""
        raise TypeError(
            f"Run {self._state.run_name!r} cannot be sent to another process, such as a worker of a "
            "DataLoader. Return values from the worker, and log them here; or make a Run there, with "
            'RunDirectory(..., writer="...").'
        )

    def _each(self, action: str, call: Callable[[Destination], None]) -> None:
        self._require_open(action)
        for destination in self._destinations:
            self.faults.attempt(destination, action, call)
        self.faults.raise_refused()

    def _try_log(self, metrics: Any, step: int) -> bool:
        return self._delivery.try_log(metrics, self._prefix, step)

    def _log_any_metrics(self, metrics: Any, step: int) -> None:
        """Logs any metrics: on devices, functions, with rates, and to destinations that are failing."""
        self._require_open("log_metrics")
        if isinstance(metrics, Mapping):
            with self._refreshing():
                self._delivery.log_metrics(metrics, self._prefix, step)
        else:
            got = f"{short_repr(metrics, 80)} ({type(metrics).__name__})"
            self.faults.refuse(
                "log_metrics",
                RecordError(
                    f"metrics must be a dict from name to number, got {got}. "
                    'Write log_metrics({"loss": 0.5}), or log_scalar("loss", 0.5).'
                ),
            )
        self.faults.raise_refused()

    def _record(
        self, action: str, name: str, given: tuple[Any, ...], prepare: Callable[..., dict[str, Any]]
    ) -> None:
        self._require_open(action)
        with self._refreshing():
            self._delivery.log_record(action, name, given, prepare)
        self.faults.raise_refused()

    @contextmanager
    def _refreshing(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._refresh()

    def _refresh(self) -> None:
        self.is_busy = self._delivery.is_busy
        needs_more = bool(self._own_prefix or self._open_namespaces or self.is_busy)
        is_paced = self._delivery.is_paced
        if self._is_stopped or (is_paced and needs_more):
            self._shortcut = _never
        elif is_paced:
            self._shortcut = self._delivery.try_defer
        else:
            self._shortcut = self._try_log if needs_more else None
        # In a namespace the prefix depends on the caller.
        has_rows = not (self._is_stopped or is_paced or self._open_namespaces) and self._delivery.has_rows
        self._log_row = self._delivery.log_row(self._own_prefix) if has_rows else None

    def _text_name(self, name: Any) -> str:
        if isinstance(name, str):
            return name
        text = short_repr(name)
        error = RecordError(f"name must be a string, got {text} ({type(name).__name__}).")
        self.faults.refuse("name", error, outcome="It is logged under that text")
        self.faults.raise_refused()
        return text

    def _step(self, step: SupportsIndex | None) -> int:
        if step is not None:
            try:
                given = operator.index(step)
            except Exception:  # noqa: BLE001  # a value's own methods
                text = f"step must be a whole number, got {short_repr(step)} ({type(step).__name__})."
            else:
                if -_MAX_STEP <= given <= _MAX_STEP:
                    self._given_step = given
                    return given
                text = f"step must be between -2**63 and 2**63, got an integer of {given.bit_length()} bits."
            self.faults.refuse("step", RecordError(text), outcome="It is logged at the default step")
            self.faults.raise_refused()
        return int(self._state.timestamp.batch) or self._given_step

    def _require_open(self, action: str) -> None:
        if self._is_stopped:
            raise EngineClosedError(
                f"{action} was called after the run was closed. Make a new Trainer or Run."
            )

    def _file_names(self, remote: Any, local: Any) -> tuple[str, Path]:
        """Returns the remote name of a file, with placeholders filled in, and the local path."""
        if not isinstance(remote, str):
            raise RecordError(f"file must have a string as its name, got {short_repr(remote)}.")
        try:
            text = os.fsdecode(local)
        except Exception:  # noqa: BLE001  # a value's own methods
            raise RecordError(f"file {remote!r:.200} must have a path, got {short_repr(local)}.") from None
        if "\0" in text:
            raise RecordError(f"file {remote!r:.200} must have a path without NUL, got {text!r:.200}.")
        return format_name(remote, self._state), Path(text)

    def _methods_of_stores(self, name: str) -> list[Callable[..., Any]]:
        """Returns a method of the destinations that take files; those written for Composer lack it."""
        stores = [one for one in self._destinations if self._takes_files(one)]
        return [getattr(one, name) for one in stores if hasattr(one, name)]

    def _takes_files(self, destination: Destination) -> bool:
        try:
            return destination.can_upload_files()
        except BaseException as error:  # noqa: BLE001  # a destination must not stop training
            self.faults.failed(destination, "can_upload_files", error)
            return False


def _nothing() -> None:
    """Ends a span that nobody keeps."""


def _never(_metrics: Any, _step: int) -> bool:
    """Logs nothing: there is no shortcut."""
    return False


def _prefix(before: str, name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise RecordError(f'namespace must be a name, got {short_repr(name)}. Write namespace("train").')
    return f"{before}{name}/"


def _packer_of(destinations: Iterable[Any]) -> MetricsPacker | None:
    return next((one for one in destinations if hasattr(one, "try_log_metrics")), None)


def _as_destinations(destinations: Any) -> tuple[Destination, ...]:
    """Returns the destinations as a tuple.

    Raises:
        TypeError: one is not a destination.
    """
    match destinations:
        case None:
            return ()
        case list() | tuple() | set():
            several = tuple(destinations)
        case _:
            several = (destinations,)
    for destination in several:
        match destination:
            case type():
                hint = f"Write {destination.__name__}(...)."
            case _ if hasattr(destination, "log_metrics"):
                continue
            case str() | os.PathLike():
                text = os.fspath(destination)
                hint = f"For a name, write run_name={text!r}; for a folder, RunDirectory({text!r})."
            case list() | tuple():
                hint = "Give each destination by itself, without the inner list."
            case _:
                hint = "See LoggerDestination."
        raise TypeError(f"logger destination must be a LoggerDestination, got {destination!r}. {hint}")
    return several
