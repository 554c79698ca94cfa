"""`checkpoints`: lists the checkpoints of a run, and copies one out."""

import argparse
from pathlib import Path

import attrs

from destinations.runs import RecordedRun
from destinations.runs.content.checkpoints import Checkpoint, choose, copy_checkpoint, list_checkpoints

from .running import UsageError, find_runs
from .screen import Cell, Column, CommandContext, age_text, bytes_text, numbers

__all__ = ["checkpoints"]

_USAGE = "expected RUN, or get RUN best|latest|NAME"


def checkpoints(options: argparse.Namespace, session: CommandContext) -> None:
    """Lists the checkpoints of a run; with "get", copies one."""
    match options.words:
        case [name]:
            _list(name, options, session)
        case ["get", name, which]:
            _get(name, which, options, session)
        case _:
            raise UsageError(f"{_USAGE}, got {' '.join(options.words)!r}.")


def _list(name: str, options: argparse.Namespace, session: CommandContext) -> None:
    if options.to or options.by or options.mode or options.overwrite:
        raise UsageError(f"--to, --by, --mode and --overwrite need get: checkpoints get {name} latest.")
    found = list_checkpoints(_place(name, options, session), session.note)
    if options.json:
        session.screen.json([_as_json(one) for one in found])
        return
    metrics = sorted({metric for one in found for metric in one.metrics})
    columns = [Column("checkpoint", is_whole=True), *numbers("step", "epoch", *metrics, "size", "age")]
    now = session.clock()
    rows = [
        (
            *(Cell(one.name, "bold" if one.is_latest else None), one.step, one.epoch),
            *map(one.metrics.get, metrics),
            *(bytes_text(one.size), None if one.time is None else age_text(now - one.time), one.place),
            Cell("yes", "green") if one.problem is None else Cell(one.problem, "red"),
        )
        for one in found
    ]
    session.screen.table([*columns, "where", "whole"], rows)


def _get(name: str, which: str, options: argparse.Namespace, session: CommandContext) -> None:
    if which != "best" and (options.by or options.mode):
        raise UsageError(
            f"--by and --mode choose the best, got {which!r}. Write: checkpoints get {name} best."
        )
    found = list_checkpoints(_place(name, options, session), session.note)
    try:
        copies = choose(found, which, options.by, options.mode)
    except ValueError as error:
        raise UsageError(str(error)) from None
    target = Path(options.to or copies[0].name)
    taken = copy_checkpoint(copies, target, overwrite=options.overwrite, warn=session.note)
    if options.json:
        session.screen.json({**_as_json(taken), "to": str(target)})
    else:
        session.screen.line(
            f"wrote {target}: {taken.path}, {bytes_text(taken.size)}, every checksum compared"
        )


def _place(name: str, options: argparse.Namespace, session: CommandContext) -> RecordedRun | str:
    """Returns a run; the URI of a folder of checkpoints is returned unchanged."""
    return name if "://" in name else find_runs([name], options, session)[0]


def _as_json(one: Checkpoint) -> dict[str, object]:
    fields = attrs.asdict(one)
    rule = None if one.best_by is None else {"metric": one.best_by[0], "mode": one.best_by[1]}
    shards = {name: {"size": size, "crc32": crc32} for name, (size, crc32) in one.shards.items()}
    return {
        **fields,
        "best_by": rule,
        "metrics": dict(one.metrics),
        "shards": shards,
        "is_whole": one.problem is None,
    }
