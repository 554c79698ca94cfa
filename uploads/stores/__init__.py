"""Stores: the protocol, the table of URI schemes, and ours: a folder, S3, other clouds, and fsspec's."""

from .create_only import put_new
from .local import LocalStore
from .object_store import object_store_location
from .registry import open_store, register_store
from .store import Body, Digest, RemoteObject, Store
from .uri import StoreLocation

__all__ = [
    "Body",
    "Digest",
    "LocalStore",
    "RemoteObject",
    "Store",
    "StoreLocation",
    "object_store_location",
    "open_store",
    "put_new",
    "register_store",
]
