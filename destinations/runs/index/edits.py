"""`edits.json`: the user's edits to a run, in a file that the run's writer never touches.

The file is in the run's folder and moves with it. It records added and removed tags, so tags that the run
adds later appear too. Concurrent edits wait for each other if the file system supports flock(2). The last one
wins, unless it gives `based_on`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from destinations.run_directory.layout import EDITS, strict_json
from destinations.runs.errors import EditError
from destinations.runs.files import clean_text, folder_lock, read_object
from uploads.disk import read_regular, replace_file

__all__ = ["apply_edits", "edit_run", "edited"]

_FORMAT_VERSION = 1


def apply_edits(fields: dict[str, Any], raw: bytes) -> dict[str, Any]:
    """Returns the fields of a run with a file's edits applied; edits of a wrong type are ignored.

    Raises:
        ValueError: the content is no JSON object.
    """
    data = read_object(raw)
    changes: dict[str, Any] = {"tags": _edited_tags(fields.get("tags", ()), data)}
    for name, kind in (("notes", str), ("display_name", str), ("archived", bool)):
        if isinstance(value := data.get(name), kind):
            changes[name] = value
    if changes.get("display_name") == "":
        changes["display_name"] = None
    return fields | changes


def _edited_tags(own_tags: Sequence[str], edits: Mapping[str, Any]) -> tuple[str, ...]:
    added, removed = (_texts(edits.get(key)) for key in ("added_tags", "removed_tags"))
    return tuple(dict.fromkeys([*(tag for tag in own_tags if tag not in removed), *added]))


def edit_run(
    run_dir: Path, own_tags: Sequence[str], *, clock: Callable[[], float] = time.time, **changes: Any
) -> None:
    """Writes edits to the file; see `edited`.

    Args:
        run_dir: the folder of the run.
        own_tags: the tags that the run gave itself.
        clock: returns the time of the edit.
        changes: the other arguments of `edited`.

    Raises:
        EditError: the folder is not writable, or another edit has changed a text of `based_on`.
    """
    try:
        with folder_lock(run_dir):
            data = edited(_content(run_dir / EDITS), own_tags, **changes) | {"updated_at": clock()}
            # `replace_file` would recreate the folder of a removed run.
            run_dir.stat()
            replace_file(run_dir / EDITS, f"{strict_json(data, indent=2)}\n".encode())
    except OSError as error:
        raise EditError(f"could not write edits to {str(run_dir)!r}: {error.strerror or error}.") from error


def edited(
    data: Mapping[str, Any],
    own_tags: Sequence[str],
    *,
    tags: Sequence[str] | None = None,
    notes: str | None = None,
    display_name: str | None = None,
    archived: bool | None = None,
    based_on: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the present edits updated with the arguments that are not None.

    Args:
        data: the present edits.
        own_tags: the tags that the run gave itself.
        tags: all tags of the run.
        notes: the notes; "" for none.
        display_name: the name of the run; "" for the name of its folder.
        archived: whether the run is archived.
        based_on: the fields when the edit began, by argument name. Tags that were added or removed since
            stay added or removed.

    Raises:
        EditError: another edit has changed a text of `based_on`.
    """
    found, texts, based_on = dict(data), {"notes": notes, "display_name": display_name}, based_on or {}
    for key, text in texts.items():
        # Only edits conflict; a text that the run itself changed is not in `found`.
        if text is not None and key in based_on and found.get(key, text) not in {text, based_on[key]}:
            raise EditError(f"the {key} of this run were changed meanwhile, to {found[key]!r:.200}.")
    if tags is not None:
        wanted = [clean_text(tag) for tag in tags]
        if "tags" in based_on:
            now = _edited_tags(own_tags, found)
            dropped = set(based_on["tags"]) - set(wanted)
            added = [tag for tag in wanted if tag not in based_on["tags"]]
            wanted = [tag for tag in now if tag not in dropped] + added
        found["added_tags"] = [tag for tag in dict.fromkeys(wanted) if tag not in own_tags]
        found["removed_tags"] = [tag for tag in own_tags if tag not in wanted]
    found |= {key: clean_text(text) for key, text in texts.items() if text is not None}
    if archived is not None:
        found["archived"] = archived
    return {"format_version": _FORMAT_VERSION, **found}


def _content(path: Path) -> dict[str, Any]:
    """Returns the content of the file, including fields of later versions; empty if missing or corrupt."""
    try:
        return read_object(read_regular(path))
    except (FileNotFoundError, ValueError):
        return {}


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, list) else ()
