"""Where bytes go: the protocol of a store, a folder, S3, other clouds, SFTP."""

from .local import LocalStore
from .registry import open_store
from .store import Body, Digest, RemoteObject, Store

__all__ = ["Body", "Digest", "LocalStore", "RemoteObject", "Store", "open_store"]
