"""Where bytes go: the protocol of a store, a folder, S3, other clouds, SFTP."""

from .body import Body, Digest
from .local import LocalStore
from .store import RemoteObject, Store
from .uris import open_store

__all__ = ["Body", "Digest", "LocalStore", "RemoteObject", "Store", "open_store"]
