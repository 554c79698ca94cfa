"""`Place`: where a run is, in a local folder and in a store.

A run in a store is also written to a local folder, so that it survives a crash and an unreachable store.
"""

import hashlib
import os
import re
from pathlib import Path

import attrs

from events import (
    RecordError,
    State,
    check_placeholders,
    check_run_name,
    format_run_name,
    format_store,
    redact_text,
)
from uploads import open_store

from .folder import RunPathError, check_path
from .layout import WRITERS_FOLDER, is_writer_name

__all__ = ["Place", "check_fork", "check_template", "check_writer", "extended", "local_folder", "place_of"]


_MAX_WRITER = 100
# A scheme has at least two letters: `C:/` is a drive.
_LOST_SLASH = re.compile(r"[a-z][a-z0-9+.-]+:/(?!/)")


@attrs.frozen
class Place:
    """The location of one run.

    Attributes:
        folder: the local folder, absolute.
        uri: the URI of the run in a store; None without a store.
    """

    folder: Path
    uri: str | None = None

    def beside(self, number: int) -> "Place":
        """Returns a place beside this one whose name has a number, such as `digits-2`."""
        if self.uri is None:
            return Place(self.folder.with_name(f"{self.folder.name}-{number}"))
        uri = extended(self.uri, f"-{number}")
        if self.folder == local_folder(self.uri):
            return Place(local_folder(uri), uri)
        return Place(self.folder.with_name(f"{self.folder.name}-{number}"), uri)

    def __str__(self) -> str:
        return str(self.folder) if self.uri is None else redact_text(self.uri.partition("?")[0])


def check_template(
    run_dir: str | os.PathLike[str], mirror: str | os.PathLike[str] | None, writer: str = ""
) -> tuple[str, str | None]:
    """Checks the folder and the URI of a run, and returns both with their placeholders.

    Args:
        run_dir: the folder, or a URI, which also determines a local folder.
        mirror: the URI, or a folder as another store; None for none.
        writer: the name of a writer, whose folder and URI are below the run's; "" for the trainer.

    Raises:
        RunPathError: the folder is a file or isn't writable, or both are URIs.
        TypeError: one of them isn't a path.
        ValueError: the URI has no store.
    """
    for name, given in (("run_dir", run_dir), ("mirror", run_dir if mirror is None else mirror)):
        if not isinstance(given, str | os.PathLike):
            raise TypeError(f'{name} must be a path, got {given!r}. Write RunDirectory("runs/{{run_name}}").')
    template = os.path.expanduser(run_dir)  # noqa: PTH111  # Path raises without a home
    if _LOST_SLASH.match(template):
        raise RunPathError(
            f"'://' is missing in {template!r}. Give a URI as a string, since a Path drops a slash."
        )
    check_placeholders(template)
    uri = None if mirror is None else os.fspath(mirror)
    if "://" in template:
        if uri is not None:
            raise RunPathError(
                f"run_dir must be a folder where mirror is given, got the URI "
                f"{template.partition('?')[0]!r}. "
                'Write RunDirectory("runs/{run_name}", mirror="s3://...").'
            )
        uri = template
    elif "{" not in template:
        check_path(Path(template))
    if uri is not None:
        check_placeholders(uri)
        # Reports a mistake in the URI here, not with the first row.
        open_store(uri)
    return _of_writer(template, writer), None if uri is None else _of_writer(uri, writer)


def _of_writer(place: str, writer: str) -> str:
    """Returns the folder or URI of a writer, given the folder or URI of its run."""
    return extended(place, f"/{WRITERS_FOLDER}/{writer}") if writer else place


def extended(place: str, suffix: str) -> str:
    """Returns a folder or a URI with a suffix, which precedes the options of a URI."""
    path, question, options = place.partition("?" if "://" in place else "\0")
    return f"{path.rstrip('/')}{suffix}{question}{options}"


def check_writer(name: str) -> str:
    """Returns the name of a writer, or raises if it is invalid."""
    if not isinstance(name, str):
        raise TypeError(f'writer must be a name, got {name!r}. Write writer="eval".')
    if not is_writer_name(name) or len(name) > _MAX_WRITER:
        raise ValueError(
            f'writer must be a name of letters, digits, ".", "_" and "-" that does not begin with ".", of '
            f"{_MAX_WRITER} characters at most, got {name!r:.200}."
        )
    return name


def check_fork(fork_from: object, template: str, writer: str) -> None:
    """Raises ValueError if a fork is given a URI as its folder, or a writer."""
    if fork_from is not None and (writer or "://" in template):
        what = "a writer" if writer else f"the URI {template.partition('?')[0]!r}"
        raise ValueError(
            f"fork_from needs a run with a folder of its own, got {what}. "
            'Write RunDirectory("runs/new", fork_from="digits", mirror="s3://...").'
        )


def place_of(template: str, mirror: str | None, state: State) -> Place:
    """Returns the place of a run.

    Args:
        template: the folder or URI, with placeholders; see `check_template`.
        mirror: the URI, with placeholders.
        state: the state of the run.

    Raises:
        RunPathError: the name of the run leads out of the folder.
    """
    try:
        check_run_name(template, state)
        uri = None if mirror is None else format_store(mirror, state)
    except (RecordError, ValueError) as error:
        raise RunPathError(str(error)) from error
    if uri is not None and "://" in template:
        return Place(local_folder(uri), uri)
    return Place(Path(format_run_name(template, state)).absolute(), uri)


def local_folder(uri: str) -> Path:
    """Returns the local folder for a run in a store.

    It is in `$XDG_STATE_HOME/destinations/runs`, else in `~/.local/state/destinations/runs`, and not in a
    cache, because it may have rows that the store lacks.
    """
    path = uri.partition("?")[0].rstrip("/")
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", path.rpartition("/")[2]).strip("-.")[:60] or "run"
    digest = hashlib.sha256(uri.encode()).hexdigest()[:12]
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.path.expanduser(state)) / "destinations" / "runs" / digest / readable  # noqa: PTH111
