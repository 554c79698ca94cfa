"""Bytes to a store, surviving the process.

    from uploads import UploadQueue

    queue = UploadQueue("s3://bucket/prefix")
    handle = queue.submit("checkpoints/ep1.pt", "ep1.pt")   # safe from kill -9 from here
    handle.result(timeout_seconds=60)
    queue.close(timeout_seconds=30)

Importing this package starts nothing and loads no store's client.
"""

from .command_line import add_commands
from .download import download_file
from .drain.retry import RetryPolicy
from .errors import RemoteConflict, UploadError
from .handle import Backlog, FolderHandle, Outcome, UploadHandle, UploadState
from .redaction import redact, redact_arguments, redact_table, redact_text
from .stores import LocalStore, RemoteObject, Store, StoreLocation, open_store, register_store
from .upload_queue import UploadQueue, exit_on_sigterm

__all__ = [
    "Backlog",
    "FolderHandle",
    "LocalStore",
    "Outcome",
    "RemoteConflict",
    "RemoteObject",
    "RetryPolicy",
    "Store",
    "StoreLocation",
    "UploadError",
    "UploadHandle",
    "UploadQueue",
    "UploadState",
    "add_commands",
    "download_file",
    "exit_on_sigterm",
    "open_store",
    "redact",
    "redact_arguments",
    "redact_table",
    "redact_text",
    "register_store",
]

__project__ = "training-destinations"
