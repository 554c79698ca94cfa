"""`edits.json`: what the user says of a run, in a file of its own.

It lies in the folder of the run, so that it moves with it, and the writer of the run never touches it. Tags are kept as what the
user added and what the user took away: a tag that the run gives itself later shows all the same. Two who edit at once wait for
each other, where the file system has flock(2); of what both change, the later counts.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from destinations.run_directory.files import strict_json
from destinations.run_directory.layout import EDITS
from uploads.disk import lock, read_regular, replace_file

from .errors import EditError
from .files import clean_text, read_object
from .record import RunRecord

__all__ = ["Edits", "apply_edits", "edit_run", "read_edits"]

_FORMAT_VERSION = 1


@attrs.frozen
class Edits:
    """What a user says of a run; None is what the user said nothing of."""

    added_tags: tuple[str, ...] = ()
    removed_tags: tuple[str, ...] = ()
    notes: str | None = None
    display_name: str | None = None
    archived: bool | None = None

    def tags(self, own: Sequence[str]) -> tuple[str, ...]:
        """Returns the tags of a run that gave itself these."""
        kept = [tag for tag in own if tag not in self.removed_tags]
        return tuple(dict.fromkeys([*kept, *self.added_tags]))


def read_edits(raw: bytes) -> Edits:
    """Returns what the file says; fields that cannot be understood are left out.

    Raises:
        ValueError: it is no JSON object.
    """
    data = read_object(raw)
    notes, name, archived = (data.get(key) for key in ("notes", "display_name", "archived"))
    return Edits(
        added_tags=_texts(data.get("added_tags")),
        removed_tags=_texts(data.get("removed_tags")),
        notes=notes if isinstance(notes, str) else None,
        display_name=name if isinstance(name, str) else None,
        archived=archived if isinstance(archived, bool) else None,
    )


def apply_edits(record: RunRecord, edits: Edits) -> RunRecord:
    """Returns the record with the edits applied."""
    changes: dict[str, Any] = {"tags": edits.tags(record.tags)}
    if edits.notes is not None:
        changes["notes"] = edits.notes
    if edits.display_name is not None:
        changes["display_name"] = edits.display_name or None
    if edits.archived is not None:
        changes["archived"] = edits.archived
    return attrs.evolve(record, **changes)


def edit_run(
    run_dir: Path,
    own_tags: Sequence[str],
    *,
    tags: Sequence[str] | None = None,
    notes: str | None = None,
    display_name: str | None = None,
    archived: bool | None = None,
    clock: Callable[[], float] = time.time,
) -> None:
    """Writes what is not None into the file; the rest stays.

    Args:
        run_dir: the folder of the run.
        own_tags: the tags that the run gave itself.
        tags: all tags that the run is to have.
        notes: the notes; "" for none, whatever the run wrote.
        display_name: what to call the run; "" for the name of its folder.
        archived: whether the run is put away.
        clock: tells the time of the edit.

    Raises:
        EditError: the folder cannot be written to.
    """
    try:
        with _locked(run_dir):
            data = _content(run_dir / EDITS)
            if tags is not None:
                wanted = [clean_text(tag) for tag in tags]
                data["added_tags"] = [tag for tag in dict.fromkeys(wanted) if tag not in own_tags]
                data["removed_tags"] = [tag for tag in own_tags if tag not in wanted]
            texts = {"notes": notes, "display_name": display_name}
            data |= {key: clean_text(text) for key, text in texts.items() if text is not None}
            if archived is not None:
                data["archived"] = archived
            data = {"format_version": _FORMAT_VERSION, **data, "updated_at": clock()}
            # `replace_file` would make the folder of a run that is gone.
            run_dir.stat()
            replace_file(run_dir / EDITS, f"{strict_json(data, indent=2)}\n".encode())
    except OSError as error:
        raise EditError(
            f"run folder must be one that can be written to, got {str(run_dir)!r}: {error.strerror or error}."
        ) from error


def _content(path: Path) -> dict[str, Any]:
    """Returns the file as it is, fields of later versions among them; an unreadable one is begun anew."""
    try:
        return read_object(read_regular(path))
    except (FileNotFoundError, ValueError):
        return {}


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    # The folder itself is what is locked: no further file, and the writer of the run does not look at it.
    fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            lock(fd)
        yield
    finally:
        os.close(fd)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, list) else ()
