"""Uploads files to a store in the background; accepted files survive the process.

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
    from .arguments import Fence, Timeouts
    from .command_line import add_commands, spool_gauges
    from .download import download_file
    from .drain.retry import RetryPolicy
    from .errors import RemoteConflictError, TransientStoreError, UploadError
    from .handle import Backlog, FolderHandle, Outcome, UploadHandle, UploadState
    from .messages import (
        encodable,
        missing_name,
        needs_package,
        one_line,
        one_line_json,
        parse_retry_after,
        parse_seconds,
    )
    from .prometheus import Gauge, exposition
    from .redaction import redact, redact_arguments, redact_table, redact_text
    from .store_folder import StoreFolder
    from .stores import (
        LocalStore,
        RemoteObject,
        Store,
        StoreLocation,
        object_store_location,
        open_store,
        put_new,
        register_store,
    )
    from .upload_queue import UploadQueue, default_spools, exit_on_sigterm

__all__ = [
    "Backlog",
    "Fence",
    "FolderHandle",
    "Gauge",
    "LocalStore",
    "Outcome",
    "RemoteConflictError",
    "RemoteObject",
    "RetryPolicy",
    "Store",
    "StoreFolder",
    "StoreLocation",
    "Timeouts",
    "TransientStoreError",
    "UploadError",
    "UploadHandle",
    "UploadQueue",
    "UploadState",
    "add_commands",
    "default_spools",
    "download_file",
    "encodable",
    "exit_on_sigterm",
    "exposition",
    "missing_name",
    "needs_package",
    "object_store_location",
    "one_line",
    "one_line_json",
    "open_store",
    "parse_retry_after",
    "parse_seconds",
    "put_new",
    "redact",
    "redact_arguments",
    "redact_table",
    "redact_text",
    "register_store",
    "spool_gauges",
]

_MODULES = {
    name: module
    for module, names in {
        ".arguments": "Fence Timeouts",
        ".command_line": "add_commands spool_gauges",
        ".download": "download_file",
        ".drain.retry": "RetryPolicy",
        ".errors": "RemoteConflictError TransientStoreError UploadError",
        ".handle": "Backlog FolderHandle Outcome UploadHandle UploadState",
        ".messages": "encodable missing_name needs_package one_line one_line_json parse_retry_after "
        "parse_seconds",
        ".prometheus": "Gauge exposition",
        ".redaction": "redact redact_arguments redact_table redact_text",
        ".stores": "LocalStore RemoteObject Store put_new",
        ".stores.object_store": "object_store_location",
        ".stores.registry": "open_store register_store",
        ".stores.uri": "StoreLocation",
        ".store_folder": "StoreFolder",
        ".upload_queue": "UploadQueue default_spools exit_on_sigterm",
    }.items()
    for name in names.split()
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
