"""Bytes to a store, surviving the process.

    from uploads import UploadQueue

    queue = UploadQueue("s3://bucket/prefix")
    handle = queue.submit("checkpoints/ep1.pt", "ep1.pt")   # safe from kill -9 from here
    handle.result(timeout_seconds=60)
    queue.close(timeout_seconds=30)

Importing this package starts nothing and loads no store's client. Names are imported when they are first
used: `destinations` needs `uploads.disk` and the redaction alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .command_line import add_commands
    from .download import download_file
    from .drain.retry import RetryPolicy
    from .errors import RemoteConflictError, UploadError
    from .handle import Backlog, FolderHandle, Outcome, UploadHandle, UploadState
    from .messages import encodable, missing_name, one_line, one_line_json, parse_seconds
    from .redaction import redact, redact_arguments, redact_table, redact_text
    from .stores import (
        LocalStore,
        RemoteObject,
        Store,
        StoreLocation,
        object_store_location,
        open_store,
        register_store,
    )
    from .upload_queue import UploadQueue, default_spools, exit_on_sigterm

__all__ = [
    "Backlog",
    "FolderHandle",
    "LocalStore",
    "Outcome",
    "RemoteConflictError",
    "RemoteObject",
    "RetryPolicy",
    "Store",
    "StoreLocation",
    "UploadError",
    "UploadHandle",
    "UploadQueue",
    "UploadState",
    "add_commands",
    "default_spools",
    "download_file",
    "encodable",
    "exit_on_sigterm",
    "missing_name",
    "object_store_location",
    "one_line",
    "one_line_json",
    "open_store",
    "parse_seconds",
    "redact",
    "redact_arguments",
    "redact_table",
    "redact_text",
    "register_store",
]

_MODULES = {
    "Backlog": ".handle",
    "FolderHandle": ".handle",
    "LocalStore": ".stores",
    "Outcome": ".handle",
    "RemoteConflictError": ".errors",
    "RemoteObject": ".stores",
    "RetryPolicy": ".drain.retry",
    "Store": ".stores",
    "StoreLocation": ".stores",
    "UploadError": ".errors",
    "UploadHandle": ".handle",
    "UploadQueue": ".upload_queue",
    "UploadState": ".handle",
    "add_commands": ".command_line",
    "default_spools": ".upload_queue",
    "download_file": ".download",
    "encodable": ".messages",
    "exit_on_sigterm": ".upload_queue",
    "missing_name": ".messages",
    "object_store_location": ".stores",
    "one_line": ".messages",
    "one_line_json": ".messages",
    "open_store": ".stores",
    "parse_seconds": ".messages",
    "redact": ".redaction",
    "redact_arguments": ".redaction",
    "redact_table": ".redaction",
    "redact_text": ".redaction",
    "register_store": ".stores",
}

__project__ = "training-destinations"


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name], __name__), name)
        return value
    from .messages import missing_name

    raise missing_name(__name__, name, __all__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
