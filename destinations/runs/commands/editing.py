"""`tag`, `note`, `rename`, `archive`, `unarchive`: user edits of runs, kept in `edits.json`."""

import argparse

from .fields import as_json
from .running import UsageError, open_selected
from .screen import CommandContext

__all__ = ["archive", "note", "rename", "tag", "unarchive"]


def tag(options: argparse.Namespace, session: CommandContext) -> None:
    """Adds and removes tags; shows them without changes."""
    added, removed = _changes([*options.changes, *options.rest])
    with open_selected(options, session) as runs:
        run = runs[options.run_name]
        tags = [one for one in run.record.tags if one not in removed]
        tags += [one for one in added if one not in tags]
        if tuple(tags) != run.record.tags:
            run = runs.edit(run, tags=tags)
        if options.json:
            session.screen.json({"run_id": run.record.run_id, "tags": list(run.record.tags)})
        else:
            session.screen.lines(run.record.tags)


def _changes(changes: list[str]) -> tuple[list[str], set[str]]:
    added: list[str] = []
    removed: set[str] = set()
    for change in changes:
        name = change[1:].strip()
        if change[:1] not in {"+", "-"} or not name or change.startswith("--"):
            raise UsageError(f"expected +TAG or -TAG, got {change!r}. Write +{change.lstrip('-')}.")
        if change[0] == "+":
            added.append(name)
            removed.discard(name)
        else:
            removed.add(name)
    if both := removed & set(added):
        raise UsageError(f"cannot both add and remove tag {min(both)!r}.")
    return added, removed


def note(options: argparse.Namespace, session: CommandContext) -> None:
    """Replaces the notes of a run; shows them without a text."""
    with open_selected(options, session) as runs:
        run = runs[options.run_name]
        if options.text is not None and options.text != run.record.notes:
            run = runs.edit(run, notes=options.text)
        if options.json:
            session.screen.json({"run_id": run.record.run_id, "notes": run.record.notes})
        elif options.text is None and run.record.notes:
            session.screen.lines(run.record.notes.split("\n"))


def rename(options: argparse.Namespace, session: CommandContext) -> None:
    """Sets the display name of a run."""
    with open_selected(options, session) as runs:
        run = runs.edit(options.run_name, display_name=options.text)
        if options.json:
            session.screen.json({"run_id": run.record.run_id, "name": run.record.name})


def archive(options: argparse.Namespace, session: CommandContext) -> None:
    """Hides runs from `ls`."""
    _set_archived(options, session, archived=True)


def unarchive(options: argparse.Namespace, session: CommandContext) -> None:
    """Shows archived runs in `ls` again."""
    _set_archived(options, session, archived=False)


def _set_archived(options: argparse.Namespace, session: CommandContext, *, archived: bool) -> None:
    with open_selected(options, session) as runs:
        # All runs are looked up before any is changed, so that a wrong name changes nothing.
        found = [runs[name] for name in options.run_name]
        edited = [
            run if run.record.archived == archived else runs.edit(run, archived=archived) for run in found
        ]
        if options.json:
            session.screen.json([as_json(run.record, session.clock()) for run in edited])
