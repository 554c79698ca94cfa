"""The documents of a run: `sidecar.json`, `summary.json`, `hparams.yaml`, and `sessions.jsonl`.

Each is a small file that is replaced as a whole.

The first two contain the fields of stable-pretraining's `RegistryLogger`, written as it writes them, plus
ours.

Runs in the writer thread, except `add_hyperparameters`, `write_hparams`, and the first write. The first write
syncs only if the run isn't new, because a file that is renamed before it is synced may be empty after a power
loss.
"""

from __future__ import annotations

import functools
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import yaml

from destinations.copies import merged
from destinations.history.chain import Chain, Follows
from destinations.history.fork import Parent, find_parents
from destinations.history.sessions import (
    CHECKPOINTS,
    SESSIONS,
    SESSIONS_FOLDER,
    read_lines,
    read_sessions,
    session_path,
)
from destinations.history.sums import summed_line
from events import RunStatus, plain_config, redact_text
from uploads.disk import DISK, Disk, read_json, read_regular, replace_file

from .layout import (
    FORMAT_VERSION,
    HEARTBEAT,
    HPARAMS,
    SIDECAR,
    append_record,
    is_shallow,
    strict_json,
    summary_name,
    trusted_heartbeat,
)

if TYPE_CHECKING:
    from pathlib import Path

    from destinations.history.aggregate import Aggregate
    from events import State

__all__ = [
    "Documents",
    "SessionLog",
    "flat_hyperparameters",
    "hyperparameter_files",
    "hyperparameters_of",
    "read_hparams",
    "session_hyperparameters",
    "write_summary",
]

_MAX_LIST_ITEMS = 100
_MOST_YAML_BYTES = 4 << 20
_MOST_VALUES = 100_000
_MOST_DIGITS = 4300  # The limit of `int`.
_MOST_NESTED = 1000
_REWOUND = "training goes on from an earlier checkpoint"
_SCHEMA_VERSION = 1


def flat_hyperparameters(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns hyperparameters with dotted names, including list indices; a long list becomes JSON."""
    flat: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        match value:
            case Mapping() if value:
                for key, item in value.items():
                    add(f"{prefix}.{key}" if prefix else str(key), item)
            case list() | tuple() if 0 < len(value) <= _MAX_LIST_ITEMS:
                for index, item in enumerate(value):
                    add(f"{prefix}.{index}", item)
            case Mapping() | list() | tuple():
                flat[prefix] = strict_json(value)
            case _:
                flat[prefix] = value

    add("", dict(hyperparameters))
    return flat if hyperparameters else {}


class Documents:
    """The sidecar, the hyperparameters, and the sessions of a run.

    Keeps changes that other programs make to `sidecar.json`: unknown fields, and tags and notes that differ
    from those written last.

    Args:
        run_dir: the folder of the run.
        run_id: the id of a new run; an existing run keeps its own.
        tags: added to the existing tags.
        notes: the notes, if there are none.
        now: the start time of a new run, in seconds since 1970.
        writer: the name of the writer; "" for the trainer.
        disk: the disk operations.
        fork: where a new run follows another run.
    """

    def __init__(
        self,
        run_dir: Path,
        run_id: str,
        tags: tuple[str, ...],
        notes: str,
        now: float,
        writer: str = "",
        disk: Disk = DISK,
        fork: Follows | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._disk = disk
        self._writer = writer
        existing = read_json(run_dir / SIDECAR)
        self.run_id: str = str(existing.get("run_id") or run_id)
        self._created_at = existing.get("created_at") or now
        self._tags = list(dict.fromkeys([*_texts(existing.get("tags")), *tags]))
        self._notes = str(existing.get("notes") or notes)
        self._written: dict[str, Any] = {
            "tags": existing.get("tags", self._tags),
            "notes": existing.get("notes", self._notes),
        }
        self._checkpoint_path = existing.get("checkpoint_path")
        self._checkpoint_uris = _texts(existing.get("checkpoint_uris"))
        # The last recorded checkpoint of this session.
        self._followed: str | None = None
        try:
            self.hyperparameters = read_hparams(run_dir / HPARAMS)
        except (OSError, ValueError):  # This session's hyperparameters replace them.
            self.hyperparameters = {}
        # The hyperparameters of earlier sessions, and those that this session was given between its
        # checkpoints, by their place among the records of the session.
        self._earlier_hyperparameters = self.hyperparameters
        self._own_hyperparameters: dict[int, dict[str, Any]] = {}
        self._is_saved = False
        self._hparams_written: dict[str, Any] | None = None
        self._are_hparams_safe = False
        # Reentrant: a signal handler may log.
        self._writing_hparams = threading.RLock()
        self.sessions = SessionLog(run_dir, now, disk, fork)
        if fork is not None and not self.sessions.before:
            self._follow()
        self.is_new = not existing and not self.hyperparameters
        """Whether there were no earlier documents that a power loss could destroy."""

    def end(self, state: State, at: float) -> None:
        """Sets the status of the run and this session at the end, from the state of the run."""
        status = "completed" if state.status is RunStatus.RUNNING else str(state.status)
        text = None
        if state.exception is not None and status == "failed":
            text = f"{type(state.exception).__name__}: {redact_text(str(state.exception))}"
        reason = None if state.stop_reason is None else redact_text(state.stop_reason)
        self.close(status, text, reason, at)

    def close(self, status: str, exception: str | None, stop_reason: str | None, at: float) -> None:
        """Sets how the run and this session ended."""
        session = self.sessions.current
        session.update(status=status, exception=exception)
        if stop_reason is not None:
            session["stop_reason"] = stop_reason
        # Set last, because readers of `end` rely on status and exception.
        session["end"] = at

    def note_checkpoint(self, place: Mapping[str, Any]) -> None:
        """Records how much the session had logged at a checkpoint; later hyperparameters aren't part of it.

        Raises:
            OSError: the record can't be written.
        """
        self._is_saved = True
        append_record(session_path(self._run_dir, self.sessions.current, CHECKPOINTS), dict(place))

    def add_hyperparameters(self, hyperparameters: dict[str, Any], place: int = 0) -> None:
        """Merges hyperparameters into the earlier ones.

        Args:
            hyperparameters: nested hyperparameters.
            place: the number of records that the session had logged before.
        """
        own = self._own_hyperparameters
        if not self._is_saved:
            place = max(own, default=0)
        # Also made plain here, for calls without a logger: one value that YAML refuses would lose all others.
        new = merged(own.get(place, {}), plain_config(hyperparameters))
        self._own_hyperparameters, self._is_saved = {**own, place: new}, False
        self._merge_hyperparameters()

    def _merge_hyperparameters(self) -> None:
        own = self._own_hyperparameters.values()
        self.hyperparameters = functools.reduce(merged, own, self._earlier_hyperparameters)

    def continue_from(self, step: int, checkpoint: Follows | None = None) -> bool:
        """Records where training continues, once that is known.

        Args:
            step: the number of batches before that place.
            checkpoint: the place of the loaded checkpoint. Default: the previous session, up to the step.

        Returns:
            Whether the place is in another run, which this run is a fork of.
        """
        follows = self.sessions.continue_from(step, checkpoint)
        self._follow()
        return follows is not None and follows.run is not None

    def _follow(self) -> None:
        """Loads the hyperparameters of the sessions that this one follows."""
        found = hyperparameters_of(self._run_dir, self.sessions.before, self.sessions.chain())
        if found is not None:
            self._earlier_hyperparameters = found
            self._merge_hyperparameters()

    def begin_session(self, now: float) -> None:
        """Begins another session in this process, which continues from an earlier place."""
        self.sessions.begin(now)
        self._earlier_hyperparameters, self._own_hyperparameters = self.hyperparameters, {}
        self._hparams_written, self._is_saved = None, False

    def write_history(self, *, durable: bool = True) -> None:
        """Writes what the session follows, and the resulting hyperparameters."""
        self.sessions.write(durable=durable)
        self.write_hparams(durable=durable)

    def follow(self, state: State) -> bool:
        """Updates the newest checkpoint and the status of an open run; returns whether either changed."""
        if state.stop_reason is not None:
            self.sessions.current["stop_reason"] = redact_text(state.stop_reason)
        checkpoint, status = state.last_checkpoint, str(state.status)
        has_new = checkpoint is not None and checkpoint != self._followed
        if checkpoint is not None and has_new:
            self._followed = checkpoint
            self._checkpoint_path, self._checkpoint_uris = str(checkpoint), list(state.last_checkpoint_uris)
        return self.sessions.follow(status) or has_new

    def write_hparams(self, *, durable: bool = True) -> None:
        """Writes `hparams.yaml` if it changed or isn't synced yet. Thread-safe.

        Args:
            durable: whether to sync it.
        """
        with self._writing_hparams:
            current = self.hyperparameters
            is_written = (
                current is self._hparams_written
                and (self._are_hparams_safe or not durable)
                and os.path.lexists(self._run_dir / HPARAMS)
            )
            if (current or os.path.lexists(self._run_dir / HPARAMS)) and not is_written:
                session = self.sessions.current
                pairs = [
                    (session_path(self._run_dir, session, _hparams_name(place)), found)
                    for place, found in self._own_hyperparameters.items()
                ]
                for path, found in [*pairs, (self._run_dir / HPARAMS, current)]:
                    text = yaml.safe_dump(found, sort_keys=False, allow_unicode=True)
                    content = text.encode("utf-8", "backslashreplace")
                    self._disk.make_folder(path.parent)
                    replace_file(path, content, durable=durable, disk=self._disk)
                self._hparams_written, self._are_hparams_safe = current, durable

    def write_sidecar(self, statistics: Aggregate, more: dict[str, Any], *, durable: bool = True) -> None:
        """Writes `sidecar.json`.

        Args:
            statistics: the statistics of the metrics.
            more: additional fields.
            durable: whether to sync it.
        """
        on_disk = read_json(self._run_dir / SIDECAR)
        if "tags" in on_disk and on_disk["tags"] != self._written["tags"]:
            self._tags = _texts(on_disk["tags"])
        if "notes" in on_disk and on_disk["notes"] != self._written["notes"]:
            self._notes = str(on_disk["notes"])
        session = self.sessions.line()
        ours: dict[str, Any] = {
            "schema_version": _SCHEMA_VERSION,
            "run_id": self.run_id,
            "run_dir": str(self._run_dir.resolve()),
            "status": session["status"],
            "created_at": self._created_at,
            "ended_at": session["end"],
            "updated_at": time.time(),
            "tags": self._tags,
            "notes": self._notes,
            "hparams": flat_hyperparameters(self.hyperparameters),
            "summary": statistics.finite_lasts(),
            "checkpoint_path": self._checkpoint_path,
            "checkpoint_uris": self._checkpoint_uris,
            "format_version": FORMAT_VERSION,
            "exception": session["exception"],
            "stop_reason": session.get("stop_reason"),
            **({"writer": self._writer} if self._writer else {}),
            **more,
        }
        others = {key: value for key, value in on_disk.items() if key not in ours}
        content = strict_json({**ours, **others}, indent=2).encode()
        replace_file(self._run_dir / SIDECAR, content, durable=durable, disk=self._disk)
        self._written = {"tags": self._tags, "notes": self._notes}


def write_summary(
    run_dir: Path,
    rank: int,
    run_id: str,
    statistics: Aggregate,
    csv: dict[str, Any],
    disk: Disk = DISK,
) -> None:
    """Writes and syncs `summary.json`.

    Args:
        run_dir: the folder of the run.
        rank: the rank that logged the metrics.
        run_id: the id of the run.
        statistics: the statistics of the metrics.
        csv: the mark of the rows that the statistics cover, see `layout.csv_mark`.
        disk: the disk operations.
    """
    epoch = statistics.last_epoch
    summary = {
        "schema_version": _SCHEMA_VERSION,
        "run_id": run_id,
        "run_dir": str(run_dir.resolve()),
        "updated_at": time.time(),
        "step": statistics.last_step,
        "epoch": int(epoch) if epoch is not None and math.isfinite(epoch) else None,
        "metrics": statistics.to_json(),
        "csv": csv,
    }
    content = strict_json(summary, indent=2).encode()
    replace_file(run_dir / summary_name(rank), content, durable=True, disk=disk)


def _texts(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


class SessionLog:
    """The lines of `sessions.jsonl`, one per session; the last line belongs to the current session.

    The file is replaced as a whole, so that a line can be completed when its session ends. If a session ended
    without closing, the next one sets its status to "killed".

    Args:
        run_dir: the folder of the run.
        now: the start time of this session, in seconds since 1970.
        disk: the disk operations.
        fork: where the first session of a new run follows another run.
    """

    def __init__(self, run_dir: Path, now: float, disk: Disk = DISK, fork: Follows | None = None) -> None:
        self._run_dir = run_dir
        self._disk = disk
        self._fork = fork
        # Any thread may write, one at a time. Reentrant: a signal handler may log.
        self._writing = threading.RLock()
        # Status and end time while the session is open.
        self._live_status: tuple[str, float | None] = ("running", None)
        self._lines, self._damaged = read_lines(run_dir)
        for line in self._lines:
            if line.get("status") == "running":
                line["status"] = "killed"
                line["end"] = self._last_heartbeat()
        self.begin(now)

    @property
    def before(self) -> list[dict[str, Any]]:
        """The lines of earlier sessions, oldest first."""
        return self._lines[:-1]

    def begin(self, now: float) -> None:
        """Begins a session that continues the newest one."""
        before = self._lines[-1] if self._lines else None
        if before is not None and before.get("end") is None and before.get("status") == "running":
            before.update(status="stopped", end=now, stop_reason=_REWOUND)
        numbers = [line["number"] for line in self._lines if type(line.get("number")) is int]
        follows = self._fork if before is None else Follows(str(before.get("session", "")))
        self.current: dict[str, Any] = {
            "number": max([*numbers, len(self._lines)]) + 1,
            "session": uuid.uuid4().hex[:12],
            "follows": None if follows is None else follows.to_json(),
            "start": now,
            "end": None,
            "resume_step": None,
            "status": "running",
            "exception": None,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        self._lines.append(self.current)

    def continue_from(self, step: int, checkpoint: Follows | None) -> Follows | None:
        """Records and returns where this session continues; see `Documents.continue_from`."""
        self.current["resume_step"] = step
        known = {line.get("session") for line in self.before}
        parent = None if checkpoint is None or checkpoint.session in known else self._parent_of(checkpoint)
        follows = Follows.of(self.current)
        if checkpoint is not None and checkpoint.session in known and checkpoint.records is not None:
            follows = Follows(checkpoint.session, checkpoint.records, step)
        elif checkpoint is not None and parent is not None:
            run = os.path.relpath(parent.path, os.path.realpath(self._run_dir))
            follows = attrs.evolve(checkpoint, run=run, run_id=parent.run_id)
        elif self.before:
            follows = Follows(str(self.before[-1].get("session", "")), None, step)
        self.current["follows"] = None if follows is None else follows.to_json()
        return follows

    def _parent_of(self, checkpoint: Follows) -> Parent | None:
        """Returns the parent of this fork that saved a checkpoint, if any."""
        for parent in find_parents(self._run_dir):
            if any(line.get("session") == checkpoint.session for line in read_sessions(parent.path)):
                return parent
        return None

    def chain(self) -> Chain:
        """Returns the sessions that lead to this one."""
        return Chain(self._lines)

    def follow(self, status: str) -> bool:
        """Updates the status of an open session; returns whether it changed."""
        has_changed = self.current["end"] is None and status != self._live_status[0]
        if has_changed:
            self._live_status = status, None if status == "running" else time.time()
        return has_changed

    def line(self) -> dict[str, Any]:
        """Returns the line of this session as it is now."""
        own, (status, end) = self.current, self._live_status
        return {**own, "status": status, "end": end} if own["end"] is None else own

    def write(self, *, durable: bool = True) -> None:
        """Replaces the file; `durable` syncs it."""
        with self._writing:
            lines = [*self._lines[:-1], self.line()]
            content = b"".join([*self._damaged, *(summed_line(strict_json(line)) for line in lines)])
            replace_file(self._run_dir / SESSIONS, content, durable=durable, disk=self._disk)

    def _last_heartbeat(self) -> float | None:
        try:
            at = (self._run_dir / HEARTBEAT).stat().st_mtime
        except OSError:
            return None
        return trusted_heartbeat(self._run_dir, at, time.time())


# Hyperparameters, which may be foreign.


def _hparams_name(place: int) -> str:
    """Returns the file name of the hyperparameters that a session got after logging `place` records."""
    return HPARAMS if not place else f"{HPARAMS.removesuffix('.yaml')}.{place}.yaml"


def hyperparameter_files(run_dir: Path) -> dict[str, dict[int, Path]]:
    """Returns the hyperparameter files of each session, by the prefix of their names.

    Returns:
        For each prefix, the files by how many records the session had logged.
    """
    found: dict[str, dict[int, Path]] = {}
    for path in (run_dir / SESSIONS_FOLDER).glob("*.yaml"):
        match path.name.split("."):
            case [session, "hparams", "yaml"]:
                found.setdefault(session, {})[0] = path
            case [session, "hparams", place, "yaml"] if place.isdecimal():
                found.setdefault(session, {})[int(place)] = path
    return found


def session_hyperparameters(
    run_dir: Path,
    line: Mapping[str, Any],
    records: int | None = None,
    files: Mapping[str, Mapping[int, Path]] | None = None,
) -> dict[str, Any]:
    """Returns the hyperparameters that a session was given.

    Args:
        run_dir: the folder of the run.
        line: the line of the session.
        records: includes only those given before the session had logged this many records. None for all.
        files: the result of `hyperparameter_files`, if several sessions are read.

    Raises:
        OSError: a file can't be read.
        ValueError: a file is damaged, or an earlier version wrote the session.
    """
    start = session_path(run_dir, line, HPARAMS).name.partition(".")[0]
    found = (hyperparameter_files(run_dir) if files is None else files).get(start, {})
    counted = (found[place] for place in sorted(found) if records is None or place < records)
    nothing: dict[str, Any] = {}
    return functools.reduce(merged, map(read_hparams, counted), nothing)


def hyperparameters_of(
    run_dir: Path, lines: Iterable[Mapping[str, Any]], chain: Chain
) -> dict[str, Any] | None:
    """Returns the merged hyperparameters of a chain's sessions, as far as they belong to the run.

    Args:
        run_dir: the folder of the run.
        lines: the lines of the sessions; sessions without a line are left out. A fork begins with the
            hyperparameters of its parent.
        chain: the sessions.

    Returns:
        The hyperparameters, or None if they can't be read, or if an earlier version wrote one of the
        sessions.
    """
    by_id: dict[str, Mapping[str, Any]] = {str(line.get("session")): line for line in lines}
    found: dict[str, Any] = {}
    if chain.origin is not None:
        parent = find_parents(run_dir, of=chain)[0]
        own = None
        if not parent.problem:
            own = hyperparameters_of(parent.path, read_sessions(parent.path), parent.chain)
        if own is None:
            return None
        found = own
    files = hyperparameter_files(run_dir)
    for one in reversed(chain.sessions):
        if one in by_id:
            line, count = by_id[one], chain.records_of(one)
            if "follows" not in line:
                return None
            try:
                found = merged(found, session_hyperparameters(run_dir, line, count, files))
            except (OSError, ValueError):
                return None
    return found


def read_hparams(path: Path) -> dict[str, Any]:
    """Returns the content of `hparams.yaml`, or {} if it isn't a mapping.

    Raises:
        OSError: the file can't be read, or is too large.
        ValueError: the file is damaged, or has more than 100,000 values.
    """
    raw = read_regular(path, _MOST_YAML_BYTES)
    try:
        _check_depth(raw)
        data = yaml.load(raw, Loader=_loader())  # noqa: S506  # the loader builds plain values only
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(str(error)) from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not is_shallow(data, _MOST_VALUES):
        # With aliases, a few lines can expand to any number of values.
        raise ValueError(f"it is nested too deeply, or has more than {_MOST_VALUES} values")
    return data if isinstance(data, dict) else {}


def _loader() -> Any:
    """Returns a safe loader that reads Python objects in Lightning's dumps as mappings and lists."""
    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc, valid-type]  # whichever PyYAML was built with
        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            if len(node.value) > _MOST_VALUES:
                # Merge keys can double a mapping at each level.
                raise yaml.YAMLError(f"it has more than {_MOST_VALUES} values")

    def plain(loader: Any, _: str, node: Any) -> Any:
        match node:
            case yaml.MappingNode():
                return loader.construct_mapping(node, deep=True)
            case yaml.SequenceNode():
                return loader.construct_sequence(node, deep=True)
        return loader.construct_scalar(node)

    def whole(loader: Any, node: Any) -> Any:
        # The time to read a base-60 number such as "1:1:1" grows with the square of its digits.
        if len(node.value) > _MOST_DIGITS:
            raise yaml.YAMLError(f"an integer has more than {_MOST_DIGITS} digits")
        return loader.construct_yaml_int(node)

    Loader.add_multi_constructor("", plain)
    Loader.add_constructor("tag:yaml.org,2002:int", whole)
    return Loader


def _check_depth(raw: bytes) -> None:
    """Refuses deep nesting, since the C loader recurses without a limit and would crash the process."""
    # Without these characters, depth needs indentation, whose size grows with the square of the depth.
    if sum(map(raw.count, (b"[", b"{", b"-", b"?"))) <= _MOST_NESTED:
        return
    depth = 0
    for event in yaml.parse(raw, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        match event:
            case yaml.CollectionStartEvent():
                depth += 1
            case yaml.CollectionEndEvent():
                depth -= 1
        if depth > _MOST_NESTED:
            raise ValueError("it is nested too deeply")
