"""Opens stores by URI: ours, installed packages', registered ones, and fsspec's.

A package adds a store by an entry point in the group `training_destinations.stores`, whose name is the scheme
and whose value is a factory.
"""

import pkgutil
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from uploads.redaction import redact

from .store import Store
from .uri import (
    LOCAL_SCHEME,
    SCHEMES,
    StoreLocation,
    add_public_options,
    credentials_error,
    is_remote,
    options_of,
)

__all__ = ["ENTRY_POINT_GROUP", "StoreFactory", "open_object", "open_store", "register_store"]

ENTRY_POINT_GROUP = "training_destinations.stores"

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+")


StoreFactory: TypeAlias = Callable[..., Store]
"""Makes a store from a `StoreLocation` and the options of the URI and of the call; mostly the class itself.

An attribute `public_options` names the options that are no secret.
"""


def register_store(scheme: str, factory: StoreFactory) -> None:
    """Adds a store for a URI scheme in this process.

    ```python
    register_store("folder", lambda location, **options: LocalStore(location.path, **options))
    print(open_store("folder:///data/runs").uri())  # file:///data/runs
    ```

    Uploads to a remote store run in a worker process, which doesn't know this call. A package should use the
    entry point; otherwise pass `isolation="threads"` to `UploadQueue`.

    Args:
        scheme: In lower case, such as "webdav".
        factory: Called by `open_store`.

    Raises:
        ValueError: The scheme is invalid, or has a factory already.
    """
    if not _SCHEME.fullmatch(scheme):
        raise ValueError(
            f"invalid URI scheme {scheme!r}: use at least two lower-case letters, digits, '+', '.' or '-'"
        )
    with _lock:
        ours = SCHEMES.get(scheme)
        taken = _registered.setdefault(scheme, factory) if ours is None else ours.factory
        if taken is not factory:
            raise ValueError(f"the scheme {scheme!r} has a store already: {taken!r}")
    add_public_options(getattr(factory, "public_options", ()))


def open_store(uri: str | Path, **options: Any) -> Store:
    """Returns the store at a path or URI: `file`, `s3`, `gs`, `az`, `sftp`, registered ones, and fsspec's.

    ```python
    store = open_store("s3://bucket/digits?region=eu-west-1")
    ```

    Args:
        uri: Options may follow a `?`: `s3://bucket/prefix?endpoint_url=http://127.0.0.1:9000&client=obstore`.
        options: Arguments of the store's class, including secrets; they override the URI. With
            `client="obstore"`, `s3://` is a CloudStore.

    Raises:
        ValueError: The scheme is unknown, the URI is malformed or contains credentials, or the store doesn't
            have an option.
        ImportError: The store's client is not installed; the message names the package.
    """
    text = str(uri)
    try:
        return _open(text, options)
    except TypeError as error:  # An option that the store does not have.
        raise ValueError(f"cannot open the store {redact(text)!r}: {error}") from error


def _open(text: str, options: dict[str, Any]) -> Store:
    scheme, separator, rest = text.partition("://")
    if not separator:
        return _open_path(text, options)
    factory = _factory_of(scheme, text)
    # A folder has no options, so "?" belongs to its name. "#" always belongs to the name.
    if is_remote(text):
        options = {**options_of(text), **options}
        rest = rest.partition("?")[0]
    authority, slash, quoted = rest.partition("/")
    if urlsplit(f"//{authority}").password is not None:
        raise credentials_error(scheme)
    return factory(StoreLocation(scheme, authority, slash + quoted), **options)


def open_object(uri: str) -> tuple[Store, str]:
    """Returns the store and the object's name for the URI of an object, as in `handle.uri`."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        raise ValueError(
            f"an object's URI needs a scheme, got {uri!r}. "
            "Or give the store: download_file(name, destination, store=…)"
        )
    path, question, query = rest.partition("?")
    if scheme == LOCAL_SCHEME:
        path, question, query = rest, "", ""
    parent, _, leaf = path.rpartition("/")
    return open_store(f"{scheme}://{parent}{question}{query}"), unquote(leaf)


def _factory_of(scheme: str, uri: str) -> StoreFactory:
    with _lock:
        factory = _registered.get(scheme)
    if factory is not None:
        return factory
    if scheme in SCHEMES:
        found: StoreFactory = pkgutil.resolve_name(f"{__package__}.{SCHEMES[scheme].factory}")
        return found
    import difflib
    import importlib.metadata

    installed = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    if scheme in installed.names:
        register_store(scheme, installed[scheme].load())
        return _registered[scheme]
    from .file_system import is_known_to_fsspec, open_at

    if is_known_to_fsspec(scheme):
        return open_at
    known = sorted({*SCHEMES, *_registered, *installed.names})
    near = difflib.get_close_matches(scheme, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(
        f"no store for {redact(uri)!r}{hint} Known schemes: {', '.join(known)}, and those of fsspec that can "
        "be written to; a folder is given as a path. A package or uploads.register_store can add others."
    )


def _open_path(path: str, options: dict[str, Any]) -> Store:
    from .local import LocalStore

    if not path:
        raise ValueError("a store needs a path or a URI, got an empty string")
    known = {*SCHEMES, *_registered}
    scheme, colon, _ = path.partition(":")
    if colon and scheme in known:
        raise ValueError(
            f"'://' is missing after the scheme in {path!r}. Give a string, since a Path drops a slash."
        )
    scheme, slashes, rest = path.partition("//")
    if slashes and scheme in known:
        raise ValueError(
            f"a ':' is missing in {path!r}; did you mean '{scheme}://{rest}'? For a folder, give ./{path}"
        )
    return LocalStore(path, **options)


_lock = threading.Lock()  # Guards the table.
_registered: dict[str, StoreFactory] = {}
