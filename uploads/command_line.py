"""The commands `destinations uploads status|resume|retry|verify|gc SPOOL`, also for other command lines.

Exit codes: 0 everything is delivered, 1 uploads are pending, 2 wrong usage, 3 another process owns the spool,
4 an upload failed for good, or an object differs from what was delivered.
"""

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import math
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import attrs

from .arguments import Timeouts, check_seconds, check_workers
from .drain.drain import Drain
from .errors import (
    InvalidRemoteNameError,
    ManifestError,
    RejectedByStoreError,
    SpoolError,
    SpoolOwnedError,
    SpoolUnusableError,
    UploadError,
)
from .handle import Outcome, UploadState
from .messages import encodable, one_line, one_line_json, parse_seconds
from .names import check_remote_name
from .prometheus import Gauge, exposition, gauges_of_spool
from .spool.entry import Entry, key_of, read_attempts, read_reason
from .spool.ownership import OwnerLock, owner_of
from .spool.spool import Spool
from .stores import Store, open_store
from .stores.store import abandon, with_checksum
from .stores.uri import identity_of, kept_options

__all__ = [
    "EXIT_FAILED",
    "EXIT_LEFT",
    "EXIT_OK",
    "EXIT_OWNED",
    "Finding",
    "add_commands",
    "existing",
    "exit_code",
    "gc",
    "main",
    "resume",
    "retry",
    "spool_gauges",
    "status",
    "verify",
]

EXIT_OK = 0
EXIT_LEFT = 1
EXIT_OWNED = 3
EXIT_FAILED = 4

_ENTRIES_SHOWN = 20
_SPOOLS_NAMED = 5
_VERIFIED_AT_ONCE = 8
_Answer: TypeAlias = tuple[int, Any, Iterable[str]]  # The exit code, the JSON, and the lines of text.


@attrs.frozen
class Finding:
    """A delivered object that is missing in the store, or differs from what was delivered."""

    uri: str
    problem: str


def status(path: str | Path, *, entries: int = _ENTRIES_SHOWN) -> dict[str, Any]:
    """Returns what is pending and what failed, and the processes that own the spool. Read-only.

    Args:
        path: The spool.
        entries: How many entries to describe, among pending ones and for each kind of failure.
    """
    spool = existing(path, trust=True)
    waiting, inflight = spool.list_unfinished()
    failed = spool.list_failed()  # Listed last: an entry that fails meanwhile is here.
    ended = {folder for folders in failed.values() for folder in folders}
    inflight = [folder for folder in inflight if folder not in ended]
    manifests = {folder: _entry_of(spool, folder) for folder in sorted((*inflight, *waiting))}
    readable = [entry for entry in manifests.values() if isinstance(entry, Entry)]
    drained_by, said = owner_of(spool.drain_lock), spool.read_status()
    oldest_seconds = 0.0
    with contextlib.suppress(IndexError, ValueError):
        oldest_at = datetime.fromisoformat(readable[0].submitted_at)
        oldest_seconds = max(0.0, time.time() - oldest_at.timestamp())
    return {
        "spool": str(spool.path),
        "store": spool.describe().get("store", {}).get("uri"),
        "drained_by": drained_by,
        "submitted_by": owner_of(spool.queue_lock),
        "pending": len(waiting),
        "inflight": len(inflight),
        "waiting_files": len(waiting) + len(inflight),
        "waiting_bytes": sum(entry.size for entry in readable),
        "oldest_waiting_seconds": oldest_seconds,
        "last_success_timestamp_seconds": spool.delivered_at(),
        "free_bytes": shutil.disk_usage(spool.path).free,
        "uploader_up": drained_by is not None,
        "paused": drained_by is not None and bool(said.get("parked_because")),
        "failed": {str(state): len(folders) for state, folders in failed.items()},
        "quarantined": spool.list_quarantined(),
        "entries": [
            described
            for folder in (*inflight[:entries], *waiting[:entries])
            if (described := _describe(spool, folder, manifests[folder])) is not None
        ],
        "failures": [
            _describe_failure(spool, state, folder)
            for state, folders in failed.items()
            for folder in folders[:entries]
        ],
        "last_said": said,
    }


def spool_gauges(path: str | Path) -> list[Gauge]:
    """Returns the figures of a spool for a monitor; see `exposition`.

    ```python
    queue = UploadQueue("store", spool="spool")
    queue.submit("notes.txt", "notes.txt").result(60)
    print(spool_gauges("spool")[0].value)  # 0
    ```

    Raises:
        SpoolError: There is no spool.
    """
    return gauges_of_spool(status(path, entries=0))


def resume(
    path: str | Path,
    *,
    store: Store | None = None,
    workers: int = 4,
    timeout_seconds: float | None = None,
    follow: bool = False,
    give_back_seconds: float = Timeouts().give_back_seconds,
    trust: bool = False,
) -> int:
    """Uploads what is pending; returns the exit code.

    Blocks until everything has ended, for the timeout, or until Ctrl-C.

    Args:
        path: The spool.
        store: The store to use instead of the one that the spool names.
        workers: The number of concurrent uploads.
        timeout_seconds: None for no limit.
        follow: Whether to keep running once everything has ended.
        give_back_seconds: How much longer to wait for uploads in flight.
        trust: Whether the spool may belong to another user.

    Raises:
        SpoolOwnedError: Another process drains it.
        SpoolUnusableError: It belongs to another user, and `trust` is False.
        ValueError: A bad argument.
    """
    check_workers(workers)
    limit_seconds = check_seconds("timeout_seconds", math.inf if timeout_seconds is None else timeout_seconds)
    spool = existing(path, trust=trust)
    spool.create(trust=trust)  # Repairs what is missing or corrupt.
    spool.sweep_tmp()
    drain = Drain(
        spool, store or _store_of(spool), workers=workers, role="resume", any_store=store is not None
    )
    drain.start()
    try:
        if follow:
            threading.Event().wait(limit_seconds)
        else:
            drain.wait_idle(limit_seconds)
    except KeyboardInterrupt:
        pass
    finally:
        drain.stop(give_back_seconds)
    return exit_code(spool)


def verify(path: str | Path, *, store: Store | None = None, trust: bool = False) -> list[Finding]:
    """Compares the last delivery of each name with the object in the store, by size and checksum.

    The checksum is the SHA-256 in the object's metadata, else the CRC-32 in the metadata or from the store;
    without any of them, the object is downloaded. Files that were delivered to another store are compared
    only if `store` is given.
    """
    spool = existing(path, trust=trust)
    given = store is not None
    store = store or _store_of(spool)
    latest = {
        outcome.remote_name: outcome
        for outcome in spool.delivered()
        if outcome.state is UploadState.DONE and (given or _is_at(store, outcome))
    }
    with ThreadPoolExecutor(_VERIFIED_AT_ONCE) as pool:
        try:
            problems = list(pool.map(functools.partial(_problem, store), latest.values()))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [
        Finding(outcome.uri or store.uri(outcome.remote_name), problem)
        for outcome, problem in zip(latest.values(), problems, strict=True)
        if problem
    ]


def gc(
    path: str | Path,
    *,
    store: Store | None = None,
    failed: bool = False,
    trust: bool = False,
    delete: bool = True,
) -> dict[str, int]:
    """Removes half-staged files of dead processes and, if asked, failed entries; returns the numbers.

    Args:
        path: The spool.
        store: Instead of the one that the spool names.
        failed: Whether to remove failed entries, with their bytes and their half-sent parts.
        trust: Whether the spool may belong to another user.
        delete: False only counts them.

    Raises:
        SpoolOwnedError: Another process drains it.
        StoreError: Half-sent parts could not be removed from the store; their entry is kept.
    """
    spool = existing(path, trust=trust)
    if not delete:
        entries = sum(len(folders) for folders in spool.list_failed().values())
        return {"half_staged": len(spool.list_half_staged()), "failed": entries if failed else 0}
    spool.create(trust=trust)  # Repairs what is missing or corrupt.
    with OwnerLock(spool.drain_lock, "gc"):
        removed = {"half_staged": spool.sweep_tmp(), "failed": 0}
        spool.recover()
        if failed:
            for state, folders in spool.list_failed().items():
                for folder in folders:
                    _remove_failed(spool.failed / state / folder, store, spool)
                    removed["failed"] += 1
    return removed


def retry(path: str | Path, names: Iterable[str] = (), *, trust: bool = False) -> list[str]:
    """Makes failed entries pending again, for `resume` or the next queue; returns their remote names.

    An entry stays failed if a newer version of its name has been delivered.

    Args:
        path: The spool.
        names: Their remote names; none for all failed entries.
        trust: Whether the spool may belong to another user.

    Raises:
        SpoolOwnedError: Another process drains it.
        SpoolError: No entry of that name failed.
    """
    spool = existing(path, trust=trust)
    with OwnerLock(spool.drain_lock, "retry"):
        wanted, retried = set(names), []
        found = {
            folder: (state, entry)
            for state, folders in spool.list_failed().items()
            for folder in folders
            if isinstance(entry := _entry_of(spool, folder), Entry)  # Others would fail again.
        }
        missing = wanted - {entry.remote_name for _, entry in found.values()}
        if missing:
            raise SpoolError(f"no failed entry of that name: {', '.join(sorted(missing))}")
        newest = spool.newest_delivered()
        for folder, (state, entry) in sorted(found.items()):
            is_old = entry.overwrite and newest.get(key_of(folder), "") > folder
            if (not wanted or entry.remote_name in wanted) and not is_old:
                spool.requeue(state, folder)
                retried.append(entry.remote_name)
    return retried


def existing(path: str | Path, *, trust: bool = False) -> Spool:
    """Returns the spool at this path.

    Args:
        path: Where.
        trust: Whether it may belong to another user, whose spool then decides which files are written with
            your rights.

    Raises:
        SpoolError: There is none.
        SpoolUnusableError: It belongs to another user, or cannot be read.
    """
    spool = Spool(path)
    if not spool.exists():
        found = itertools.chain(spool.path.glob("*/pending"), spool.path.glob("*/*/pending"))
        inner = [str(one.parent) for one in itertools.islice(found, _SPOOLS_NAMED)]
        hint = f". Spools in it: {', '.join(sorted(inner))}" if inner else ""
        raise SpoolError(f"{spool.path} is not a spool: it has no folder pending/{hint}")
    try:
        spool.check_owner(trust=trust)
    except OSError as error:
        raise SpoolUnusableError(f"cannot read spool {spool.path}: {error.strerror}") from error
    return spool


def _store_of(spool: Spool) -> Store:
    about = spool.describe().get("store")
    if not isinstance(about, dict) or not isinstance(about.get("uri"), str):
        raise SpoolError(f"spool {spool.path} does not name its store; give one with --store URI")
    options, left_out = about.get("options"), about.get("left_out")
    missing = (
        [str(name) for name in left_out if str(name)[:1].isupper()] if isinstance(left_out, list) else []
    )
    if missing:
        raise SpoolError(
            f"spool {spool.path} needs the options {', '.join(missing)}, which are not kept on disk. "
            "Finish it from Python: UploadQueue(store, spool=…, store_options={…})."
        )
    return open_store(about["uri"], **kept_options(options if isinstance(options, dict) else {}))


def _is_at(store: Store, outcome: Outcome) -> bool:
    """Returns whether a file was delivered to this store, and not to an earlier store of the spool."""
    return not outcome.uri or identity_of(outcome.uri) == identity_of(store.uri(outcome.remote_name))


def exit_code(spool: Spool) -> int:
    """Returns the exit code for the state of the spool."""
    is_left = any(spool.list_unfinished())
    if any(spool.list_failed().values()):  # Listed last: an entry that fails meanwhile is here.
        return EXIT_FAILED
    return EXIT_LEFT if is_left else EXIT_OK


def _entry_of(spool: Spool, folder: str) -> Entry | str | None:
    """Returns an entry, or why it can't be read; None if it has left the spool."""
    try:
        return spool.entry_of(folder)
    except (ManifestError, OSError) as error:
        return str(error)


def _describe(spool: Spool, folder: str, entry: Entry | str | None) -> dict[str, Any] | None:
    """Returns a description of an entry; None if it has ended since it was listed."""
    if isinstance(entry, str):
        return {"folder": folder, "problem": entry}
    place = spool.place_of(folder)
    if place is None or place.parent not in {spool.pending, spool.inflight}:
        return None
    if entry is None:
        return {"folder": folder, "problem": "no manifest"}
    about = {
        "remote_name": entry.remote_name,
        "state": place.parent.name,
        "size": entry.size,
        "submitted_at": entry.submitted_at,
    }
    attempts = read_attempts(place)
    return about | ({"attempts": attempts.count, "last_error": attempts.reason} if attempts.count else {})


def _describe_failure(spool: Spool, state: UploadState, folder: str) -> dict[str, Any]:
    place = spool.failed / state / folder
    outcome = read_reason(place)
    return {
        "remote_name": outcome.remote_name if outcome else folder,
        "state": str(state),
        "reason": outcome.reason if outcome else "",
        "folder": str(place),
    }


def _problem(store: Store, outcome: Outcome) -> str:
    try:
        found = store.head(check_remote_name(outcome.remote_name))
    except (InvalidRemoteNameError, RejectedByStoreError) as error:
        return str(error)  # This line is wrong; the others are still compared.
    if found is None:
        return "missing"
    if found.size != outcome.size:
        return f"expected {outcome.size} bytes, found {found.size}"
    if outcome.crc32 is None:
        return ""
    if outcome.sha256 is not None and found.sha256 is not None:
        return _difference("SHA-256", outcome.sha256, found.sha256)
    crc32 = with_checksum(store, found).crc32 if found.noted_crc32 is None else found.noted_crc32
    if crc32 is None:
        crc32, sha256 = 0, hashlib.sha256()
        for chunk in store.get(outcome.remote_name):
            crc32 = zlib.crc32(chunk, crc32)
            sha256.update(chunk)
        if outcome.sha256 is not None:
            return _difference("SHA-256", outcome.sha256, sha256.hexdigest())
    return _difference("CRC-32", f"{outcome.crc32:08x}", f"{crc32:08x}")


def _difference(kind: str, expected: str, found: str) -> str:
    return "" if found == expected else f"expected {kind} {expected}, found {found}"


def _remove_failed(place: Path, store: Store | None, spool: Spool) -> None:
    notes = place / "multipart.json"
    if notes.exists():
        owner = store or _store_of(spool)
        theirs = ""
        with contextlib.suppress(ManifestError, OSError):
            theirs = Entry.read(place).store
        if theirs in {"", identity_of(owner.uri())}:
            abandon(owner, notes)
    shutil.rmtree(place)


def add_commands(subparsers: Any) -> None:
    """Adds the sub-commands to the result of `ArgumentParser.add_subparsers`.

    ```python
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    ```

    Call `run` of the parsed namespace with the namespace: it prints errors to stderr and returns the exit
    code.
    """
    for name, (run, text, *examples) in _COMMANDS.items():
        command = subparsers.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        lines = "".join(f"  {command.prog} {example}\n" for example in examples)
        command.epilog = f"examples:\n{lines}"
        command.add_argument("spool", metavar="SPOOL", help="folder of the spool")
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=functools.partial(_run, run))
        if name == "status":
            command.add_argument(
                "--prometheus", action="store_true", help="print figures in Prometheus' text format"
            )
        else:
            command.add_argument(
                "--store", metavar="URI", help="use this store instead of the one that the spool names"
            )
            command.add_argument(
                "--trust",
                action="store_true",
                help="accept a spool of another user, which decides which files are written with your rights",
            )
        if name == "resume":
            command.add_argument(
                "--workers", type=_workers, default=4, metavar="N", help="concurrent uploads (4)"
            )
            command.add_argument(
                "--timeout", type=_seconds, metavar="TIME", help="stop after this time: 30s, 5m, 1h30m"
            )
            command.add_argument("--follow", action="store_true", help="keep running and upload new entries")
        if name == "retry":
            command.add_argument(
                "names", metavar="NAME", nargs="*", help="remote names (default: all failed entries)"
            )
        if name == "gc":
            command.add_argument("--failed", action="store_true", help="also failed entries with their bytes")
            command.add_argument("--delete", action="store_true", help="delete them permanently")


def main(arguments: list[str] | None = None) -> int:
    """`destinations uploads …`, as `python -m uploads`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="destinations uploads",
        description="Inspect, resume and clean up a spool of uploads.",
        epilog=(__doc__ or "").partition("\n\n")[2],
    )
    add_commands(parser.add_subparsers(required=True, metavar="COMMAND"))
    options = parser.parse_args(arguments)
    return int(options.run(options))


def _workers(text: str) -> int:
    workers = int(text)
    with _argument():
        check_workers(workers)
    return workers


def _seconds(text: str) -> float:
    if text.strip().lower() == "inf":
        return math.inf
    with _argument():
        return parse_seconds(text)


@contextlib.contextmanager
def _argument() -> Iterator[None]:
    """Turns a ValueError into an error that argparse shows."""
    try:
        yield
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _run(command: Callable[[argparse.Namespace], _Answer], options: argparse.Namespace) -> int:
    try:
        code, value, lines = command(options)
    except SpoolOwnedError as error:
        _print([str(error)], sys.stderr)
        return EXIT_OWNED
    except (UploadError, OSError, ValueError, ImportError) as error:
        _print([str(error)], sys.stderr)
        return EXIT_FAILED
    _print(map(one_line_json, json.dumps(value, indent=2).split("\n")) if options.json else lines)
    return code


def _run_status(options: argparse.Namespace) -> _Answer:
    found = status(options.spool)
    lines = _as_text(found)
    if getattr(options, "prometheus", False):
        lines = exposition(gauges_of_spool(found)).splitlines()
    return exit_code(Spool(options.spool)), found, lines


def _store_given(options: argparse.Namespace) -> Store | None:
    return open_store(options.store) if options.store else None


def _run_resume(options: argparse.Namespace) -> _Answer:
    code = resume(
        options.spool,
        store=_store_given(options),
        workers=options.workers,
        timeout_seconds=options.timeout,
        follow=options.follow,
        trust=options.trust,
    )
    left, found, lines = _run_status(options)
    return max(left, code), found, lines


def _run_retry(options: argparse.Namespace) -> _Answer:
    names = retry(options.spool, options.names, trust=options.trust)
    return EXIT_OK, names, [f"pending again: {name}" for name in names]


def _run_verify(options: argparse.Namespace) -> _Answer:
    findings = verify(options.spool, store=_store_given(options), trust=options.trust)
    lines = [f"{finding.uri}: {finding.problem}" for finding in findings]
    return (
        EXIT_FAILED if findings else EXIT_OK,
        [attrs.asdict(finding) for finding in findings],
        lines or ["everything that was delivered is in the store"],
    )


def _run_gc(options: argparse.Namespace) -> _Answer:
    removed = gc(
        options.spool,
        store=_store_given(options),
        failed=options.failed,
        trust=options.trust,
        delete=options.delete,
    )
    counts = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in removed.items())
    done = "deleted" if options.delete else "not deleted; add --delete to delete them"
    return EXIT_OK, removed | {"deleted": options.delete}, [f"{counts}: {done}"]


_COMMANDS: dict[str, tuple[Any, ...]] = {
    "status": (
        _run_status,
        "show what is pending and what failed, and which process uploads it",
        "SPOOL",
        "SPOOL --prometheus > /var/lib/node_exporter/uploads.prom",
    ),
    "resume": (_run_resume, "upload what is pending", "SPOOL", "SPOOL --workers 8 --timeout 10m"),
    "retry": (
        _run_retry,
        "make failed entries pending again, for resume or the next queue",
        "SPOOL",
        "SPOOL checkpoints/ep1.pt",
    ),
    "verify": (
        _run_verify,
        "compare delivered files with the objects in the store",
        "SPOOL",
        "SPOOL --store s3://bucket/prefix",
    ),
    "gc": (
        _run_gc,
        "list leftovers of dead processes and, if asked, failed entries; delete them with --delete",
        "SPOOL --failed",
        "SPOOL --failed --delete",
    ),
}
"""Each command's function, its description, and examples of its arguments."""


def _as_text(found: dict[str, Any]) -> list[str]:
    last_status = found["last_said"]
    lines = [f"{found['spool']} → {found['store']}"]
    lines.append(
        f"  {found['pending']} pending, {found['inflight']} in flight, "
        + ", ".join(f"{count} {state}" for state, count in found["failed"].items())
    )
    lines += [
        f"  {what.replace('_', ' ')} pid {who.get('pid')} on {who.get('host')} ({who.get('role')})"
        for what in ("drained_by", "submitted_by")
        if (who := found[what]) is not None
    ]
    if found["quarantined"]:
        lines.append(
            f"  {len(found['quarantined'])} corrupt, in quarantine/: {', '.join(found['quarantined'])}"
        )
    if found["drained_by"] and last_status.get("parked_because"):
        lines.append(f"  paused: {last_status['parked_because']}")
    for item in found["entries"]:
        problem = item.get("last_error") or item.get("problem")
        name = item.get("remote_name", item.get("folder"))
        lines.append(f"  {item.get('state', '?')} {name}" + (f": {problem}" if problem else ""))
    lines += [f"  {item['state']} {item['remote_name']}: {item['reason']}" for item in found["failures"]]
    return lines


def _print(lines: Iterable[str], stream: TextIO | None = None) -> None:
    """Prints lines, with escapes for control characters and for characters that the encoding lacks."""
    stream = stream or sys.stdout
    for line in lines:
        stream.write(encodable(one_line(line), stream) + "\n")
