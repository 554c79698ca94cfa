"""The exceptions of `uploads`.

    UploadError
    ├── InvalidRemoteNameError      a bad argument: raised in the caller's thread, at once
    ├── InvalidSourceError          as above
    ├── RemoteNameTakenError        as above: `overwrite=False`, and an upload of this name is pending
    ├── QueueClosedError            as above
    ├── UnstableSourceError         the file changed while it was copied, twice
    ├── UploadTimeoutError          a wait exceeded its timeout
    ├── UploadsIncompleteError      `close(raise_errors=True)` with uploads still pending
    ├── SpoolError
    │   ├── SpoolFullError          no room within the user's limits, or on the disk
    │   ├── SpoolOwnedError         another live process drains this spool
    │   ├── SpoolUnusableError      cannot be created, read or written
    │   └── ManifestError           an entry's `entry.json` is truncated, foreign, or from a newer version
    └── StoreError
        ├── TransientStoreError     retried, for as long as the queue lives
        ├── StoreParkedError        no upload succeeds until credentials, clock or bucket change
        ├── RejectedByStoreError    this entry alone will never be accepted
        ├── RemoteNotFoundError     no object of that name
        ├── RemoteExistsError       `overwrite=False` and the name is taken; becomes a conflict or a success
        ├── RemoteConflictError     `overwrite=False` and other bytes are there
        └── BytesCorruptError       the bytes changed in the spool, on the wire or in the store

Stores translate the exceptions of their clients into the last group; no other module knows them.
"""

__all__ = [
    "BytesCorruptError",
    "InvalidRemoteNameError",
    "InvalidSourceError",
    "ManifestError",
    "QueueClosedError",
    "RejectedByStoreError",
    "RemoteConflictError",
    "RemoteExistsError",
    "RemoteNameTakenError",
    "RemoteNotFoundError",
    "SpoolError",
    "SpoolFullError",
    "SpoolOwnedError",
    "SpoolUnusableError",
    "StoreError",
    "StoreParkedError",
    "TransientStoreError",
    "UnstableSourceError",
    "UploadError",
    "UploadTimeoutError",
    "UploadsIncompleteError",
]


class UploadError(Exception):
    """Base class of the exceptions of this package."""


class InvalidRemoteNameError(UploadError, ValueError):
    """A remote name that could leave its prefix, or that a store would change."""


class InvalidSourceError(UploadError, ValueError):
    """The source is not a readable regular file or folder."""


class RemoteNameTakenError(UploadError, FileExistsError):
    """`overwrite=False`, and an upload of the same name from this queue is pending."""


class QueueClosedError(UploadError, RuntimeError):
    """The queue is closed and accepts no more files."""


class UnstableSourceError(UploadError, RuntimeError):
    """The source changed while it was copied, and again when the copy was repeated."""


class UploadTimeoutError(UploadError, TimeoutError):
    """A wait exceeded its timeout; the upload itself continues."""


class UploadsIncompleteError(UploadError, RuntimeError):
    """Uploads were still pending when the queue closed."""


class SpoolError(UploadError):
    """Base class of errors of the spool."""


class SpoolFullError(SpoolError):
    """No room in the spool within its limits, or on its disk."""


class SpoolOwnedError(SpoolError):
    """Another live process uses this spool."""


class SpoolUnusableError(SpoolError):
    """The spool cannot be created, read or written."""


class ManifestError(SpoolError):
    """An unreadable manifest; its entry is moved to quarantine, never deleted."""


class StoreError(UploadError):
    """Base class of errors of a store.

    Raised itself for an answer that may come from a proxy or a captive portal instead of the store.
    """


class TransientStoreError(StoreError):
    """A temporary failure of the store, such as a timeout or a 503; the upload is retried.

    Args:
        message: What happened, without secrets.
        retry_after_seconds: The server's Retry-After; None if it sent none.
        is_answer_lost: Whether the request may have succeeded although no answer came.
    """

    def __init__(
        self, message: str, retry_after_seconds: float | None = None, *, is_answer_lost: bool = False
    ) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.is_answer_lost = is_answer_lost


class StoreParkedError(StoreError):
    """No upload succeeds until something outside changes.

    Args:
        message: What happened and what to do, without secrets.
        may_be_the_entry: Whether the answer may concern this name alone (a policy that denies one prefix) and
            not the whole store.
    """

    def __init__(self, message: str, *, may_be_the_entry: bool = False) -> None:
        super().__init__(message)
        self.may_be_the_entry = may_be_the_entry


class RejectedByStoreError(StoreError):
    """The store will never accept this entry; it may accept others."""


class RemoteNotFoundError(StoreError, FileNotFoundError):
    """There is no object of that name."""


class RemoteExistsError(StoreError):
    """The name of a create-only put is taken, perhaps by an earlier attempt of ours."""


class RemoteConflictError(StoreError, FileExistsError):
    """`overwrite=False`, and an object with other bytes exists; it was not changed."""


class BytesCorruptError(StoreError):
    """The bytes differ from the staged ones."""
