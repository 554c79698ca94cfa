"""`python -m uploads status|resume|retry|verify|gc SPOOL`, and the same sub-commands for another command line (`add_commands`).

Exit codes: 0 everything was delivered, 1 something is left, 2 wrong usage, 3 another process owns the spool,
4 something failed for good or is not in the store as it was delivered.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import re
import sys
from typing import TYPE_CHECKING, Any

import attrs

from .commands import EXIT_FAILED, EXIT_OK, EXIT_OWNED, exit_code, gc, resume, retry, status, verify
from .errors import SpoolOwned, UploadError
from .retry import check_seconds, check_workers
from .spool import Spool
from .stores import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["add_commands", "main"]

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def add_commands(subparsers: Any) -> None:
    """Adds the sub-commands to what `ArgumentParser.add_subparsers` returned.

    The parsed namespace has `run`, to be called with the namespace; it prints errors to stderr and returns the exit code.
    """
    for name, run, text in (
        ("status", _run_status, "say what is in the spool and who works on it"),
        ("resume", _run_resume, "upload what is in the spool"),
        ("retry", _run_retry, "have failed entries wait again, for resume or the next queue"),
        ("verify", _run_verify, "compare what was delivered with what is in the store"),
        ("gc", _run_gc, "remove what nobody needs"),
    ):
        command = subparsers.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.add_argument("spool", metavar="SPOOL", help="the folder of entries")
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=functools.partial(_with_exit_code, run))
        if name != "status":
            command.add_argument("--store", metavar="URI", help="instead of the store that the spool names")
            command.add_argument(
                "--trust",
                action="store_true",
                help="work on another user's spool too, which decides what is done with your rights",
            )
        if name == "resume":
            command.add_argument(
                "--workers", type=_workers, default=4, metavar="N", help="uploads at the same time (4)"
            )
            command.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="stop after this long")
            command.add_argument(
                "--follow", action="store_true", help="wait for more when everything is uploaded"
            )
        if name == "retry":
            command.add_argument(
                "names", metavar="NAME", nargs="*", help="remote names; all that failed without one"
            )
        if name == "gc":
            command.add_argument(
                "--failed", action="store_true", help="remove failed entries and their bytes too"
            )
            command.add_argument("--delivered", action="store_true", help="forget what was delivered")


def main(arguments: list[str] | None = None) -> int:
    """`python -m uploads …`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m uploads",
        description="Look after a spool of uploads.",
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
    with _argument():
        return check_seconds("SECONDS", float(text))


@contextlib.contextmanager
def _argument() -> Iterator[None]:
    """What is wrong with an argument, as argparse shows it."""
    try:
        yield
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _with_exit_code(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    try:
        return run(options)
    except SpoolOwned as error:
        _say(str(error), stream=sys.stderr)
        return EXIT_OWNED
    except (UploadError, ValueError, ImportError) as error:
        _say(str(error), stream=sys.stderr)
        return EXIT_FAILED


def _run_status(options: argparse.Namespace) -> int:
    found = status(options.spool)
    _say(json.dumps(found, indent=2) if options.json else _as_text(found))
    return exit_code(Spool(options.spool))


def _run_resume(options: argparse.Namespace) -> int:
    store = open_store(options.store) if options.store else None
    code = resume(
        options.spool,
        store=store,
        workers=options.workers,
        timeout_seconds=options.timeout,
        follow=options.follow,
        trust=options.trust,
    )
    return max(_run_status(options), code)


def _run_retry(options: argparse.Namespace) -> int:
    names = retry(options.spool, options.names, trust=options.trust)
    _say(json.dumps(names) if options.json else "\n".join(f"waits again: {name}" for name in names))
    return EXIT_OK


def _run_verify(options: argparse.Namespace) -> int:
    findings = verify(
        options.spool, store=open_store(options.store) if options.store else None, trust=options.trust
    )
    _say(
        json.dumps([attrs.asdict(finding) for finding in findings], indent=2)
        if options.json
        else "\n".join(f"{finding.uri}: {finding.problem}" for finding in findings)
        or "everything that was delivered is there"
    )
    return EXIT_FAILED if findings else EXIT_OK


def _run_gc(options: argparse.Namespace) -> int:
    removed = gc(
        options.spool,
        store=open_store(options.store) if options.store else None,
        failed=options.failed,
        delivered=options.delivered,
        trust=options.trust,
    )
    _say(
        json.dumps(removed)
        if options.json
        else ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in removed.items()) + " removed"
    )
    return EXIT_OK


def _as_text(found: dict[str, Any]) -> str:
    said = found["last_said"]
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
            f"  {len(found['quarantined'])} damaged, in quarantine/: {', '.join(found['quarantined'])}"
        )
    if found["drained_by"] and said.get("parked_because"):
        lines.append(f"  waits: {said['parked_because']}")
    lines += [
        f"  {item.get('state', '?')} {item.get('remote_name', item.get('folder'))}"
        + (
            f": {item.get('last_error') or item.get('problem')}"
            if item.get("last_error") or item.get("problem")
            else ""
        )
        for item in found["entries"]
    ]
    lines += [f"  {item['state']} {item['remote_name']}: {item['reason']}" for item in found["failures"]]
    return "\n".join(lines)


def _say(text: str, stream: Any = None) -> None:
    """Prints lines in which nothing controls the terminal, and which its encoding can show."""
    stream = stream or sys.stdout
    shown = _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(shown.encode(encoding, "backslashreplace").decode(encoding) + "\n")
