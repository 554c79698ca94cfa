"""What a store is: somewhere that keeps bytes under names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .body import Body

__all__ = ["RemoteObject", "Renewable", "Replacing", "Resuming", "Store"]


@attrs.frozen
class RemoteObject:
    """An object as the store describes it.

    Attributes:
        name: As in `put`: without the store's prefix.
        size: Bytes.
        entry_id: Which entry put it there, where the store keeps metadata and the object is ours.
        sha256: Hexadecimal digest of its bytes, where the metadata says so.
        version: Whatever changes when the bytes change (an ETag), where the store has it.
    """

    name: str
    size: int
    entry_id: str | None = None
    sha256: str | None = None
    version: str | None = None


class Store(Protocol):
    """Keeps bytes under names that `names.check_remote_name` accepts.

    **Threading.** Every method may be called from many threads of the process that made the store. A store is not
    used across a fork.

    **Errors.** Only those of the StoreError group: a store translates what its client raises.

    **Blocking.** Every call has time limits of its own and raises TransientStoreError when one passes.
    """

    def put(self, name: str, body: Body, *, overwrite: bool, notes: Path | None = None) -> RemoteObject:
        """Stores the bytes whole or not at all; returns when the store has acknowledged and the answer was checked.

        Args:
            name: The object's name.
            body: The bytes, their digests, and the entry's identifier, which go into the object's metadata where there is any.
            overwrite: False makes the put create-only, atomically: of two racing ones, one wins.
            notes: A file in which the store may keep what it needs to continue after a restart. It is deleted with the entry.

        Raises:
            RemoteExists: `overwrite=False` and the name is taken.
            StoreError: Any other of the group.
        """
        ...

    def head(self, name: str) -> RemoteObject | None:
        """The object's description; None where there is no such object."""
        ...

    def get(self, name: str, offset: int = 0, version: str | None = None) -> Iterator[bytes]:
        """The object's bytes from an offset on, in chunks.

        Args:
            name: The object's name.
            offset: How many bytes to leave out.
            version: From `head`; where given and the store can, a changed object raises TransientStoreError instead of mixing two versions.

        Raises:
            RemoteNotFound: No such object.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[RemoteObject]:
        """The objects whose name starts with the prefix, in the order of their names."""
        ...

    def delete(self, name: str) -> None:
        """Removes the object; nothing happens where there is none."""
        ...

    def uri(self, name: str = "") -> str:
        """What `open_store` (without a name) or `download_file` (with one) takes to come back here."""
        ...


@runtime_checkable
class Replacing(Protocol):
    """A store that can put on a condition, so that an older put never replaces a newer one."""

    def replace(self, name: str, body: Body, *, notes: Path | None = None) -> RemoteObject:
        """As `put` with `overwrite=True`, on the condition that the object is still the one that was there just before.

        A put that timed out here, and that the server carries out later, is then refused where a newer one came first.

        Raises:
            TransientStoreError: The object kept changing.
        """
        ...


@runtime_checkable
class Renewable(Protocol):
    """A store whose credentials may change while the process lives."""

    def renew(self) -> None:
        """Starts over with a new session, which reads the credentials anew."""
        ...

    def credential_files(self) -> tuple[Path, ...]:
        """The files that a change of credentials would show in."""
        ...


@runtime_checkable
class Resuming(Protocol):
    """A store that keeps half-sent files."""

    def abandon(self, notes: Path) -> None:
        """Has the store forget what `notes` says was half sent; the notes are removed when it did."""
        ...
