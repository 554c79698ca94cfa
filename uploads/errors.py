"""Everything that `uploads` raises, or keeps on a handle.

    UploadError
    ├── InvalidRemoteName       a bad argument: raised in the caller's thread, at once
    ├── InvalidSource           as above
    ├── RemoteNameTaken         as above: `overwrite=False` and the name is already on its way
    ├── QueueClosed             as above
    ├── UnstableSource          the file changed while it was being copied, twice
    ├── UploadTimeout           a wait was longer than its limit
    ├── UploadsIncomplete       `close(raise_errors=True)` left something behind
    ├── SpoolError
    │   ├── SpoolFull           no room within the limits that the user set, or none on the disk
    │   ├── SpoolOwned          another live process drains this spool
    │   ├── SpoolUnusable       cannot be created, read or written
    │   └── ManifestUnreadable  an entry's `entry.json` is torn, foreign, or from the future
    └── StoreError
        ├── TransientStoreError will pass by itself: try again, for as long as the queue lives
        ├── StoreParked         nothing gets through until something outside changes (credentials, clock, bucket)
        ├── RejectedByStore     this entry alone will never be accepted
        ├── RemoteNotFound      no object of that name
        ├── RemoteExists        `overwrite=False` and the name is taken; becomes RemoteConflict or a success
        ├── RemoteConflict      `overwrite=False` and other bytes are there
        └── BytesCorrupt        the bytes in the spool, on the wire or in the store are not those that were staged

A store translates its client's exceptions into the last group; nothing else in the package knows a client's exceptions.
"""

from __future__ import annotations

__all__ = [
    "BytesCorrupt",
    "InvalidRemoteName",
    "InvalidSource",
    "ManifestUnreadable",
    "QueueClosed",
    "RejectedByStore",
    "RemoteConflict",
    "RemoteExists",
    "RemoteNameTaken",
    "RemoteNotFound",
    "SpoolError",
    "SpoolFull",
    "SpoolOwned",
    "SpoolUnusable",
    "StoreError",
    "StoreParked",
    "TransientStoreError",
    "UnstableSource",
    "UploadError",
    "UploadTimeout",
    "UploadsIncomplete",
]


class UploadError(Exception):
    """The root of everything this package raises."""


class InvalidRemoteName(UploadError, ValueError):
    """A remote name that could leave its prefix, or that no store would keep as it is."""


class InvalidSource(UploadError, ValueError):
    """A path that is not a readable regular file or folder."""


class RemoteNameTaken(UploadError, FileExistsError):
    """`overwrite=False`, and an upload of the same name is already on its way from this queue."""


class QueueClosed(UploadError, RuntimeError):
    """The queue was closed: nothing would ever upload the file."""


class UnstableSource(UploadError, RuntimeError):
    """The source changed while it was being copied, and again when the copy was repeated."""


class UploadTimeout(UploadError, TimeoutError):
    """The wait was longer than its limit; the upload itself goes on."""


class UploadsIncomplete(UploadError, RuntimeError):
    """Something was not delivered by the time the queue closed."""


class SpoolError(UploadError):
    """The folder of entries."""


class SpoolFull(SpoolError):
    """No room in the spool within its limits, or none on its disk."""


class SpoolOwned(SpoolError):
    """Another live process works on this spool."""


class SpoolUnusable(SpoolError):
    """The spool cannot be created, read or written."""


class ManifestUnreadable(SpoolError):
    """An entry whose manifest cannot be understood; the entry is set aside, never deleted."""


class StoreError(UploadError):
    """What a store answered, in our words. Raised itself for an answer that is not known to be the store's: a proxy's, a captive portal's."""


class TransientStoreError(StoreError):
    """Will pass by itself.

    Args:
        message: What happened, without secrets.
        retry_after_seconds: How long the server asked us to wait, where it did.
        is_answer_lost: Whether the request may have been carried out all the same.
    """

    def __init__(
        self, message: str, retry_after_seconds: float | None = None, *, is_answer_lost: bool = False
    ) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.is_answer_lost = is_answer_lost


class StoreParked(StoreError):
    """No entry gets through until something outside changes.

    Args:
        message: What happened and what to do about it, without secrets.
        may_be_the_entry: Whether the answer may be about this one name (a policy that denies one prefix)
            and not about the whole store.
    """

    def __init__(self, message: str, *, may_be_the_entry: bool = False) -> None:
        super().__init__(message)
        self.may_be_the_entry = may_be_the_entry


class RejectedByStore(StoreError):
    """This entry will never be accepted; the others may."""


class RemoteNotFound(StoreError, FileNotFoundError):
    """No object of that name."""


class RemoteExists(StoreError):
    """A create-only put found the name taken, perhaps by our own earlier attempt."""


class RemoteConflict(StoreError, FileExistsError):
    """`overwrite=False`, and other bytes are at that name; they were left as they are."""


class BytesCorrupt(StoreError):
    """The bytes are not those that were staged."""
