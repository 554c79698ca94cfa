"""Opens a store by its URI; what a store says of itself comes back to the same place."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qsl, quote, unquote, unquote_to_bytes, urlencode, urlsplit, urlunsplit

from uploads.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from .store import Store

__all__ = [
    "compose_uri",
    "identity_of",
    "is_kept_option",
    "is_remote",
    "kept_options",
    "open_object",
    "open_store",
    "options_of",
]

_CLOUD_SCHEMES = ("gs", "az")
_ALMOST_A_URI = re.compile(r"(file|s3|gs|az|sftp):")
_SAYS_WHICH_SERVER = ("endpoint", "account_name")
# What may be written to disk and into URIs. A list of what must not would miss the next secret that a store takes.
_KEPT = frozenset(
    (
        # Of our stores.
        *("client", "endpoint_url", "region", "profile", "addressing_style", "checksum", "create_only"),
        *("part_bytes", "part_threads", "connect_timeout_seconds", "read_timeout_seconds", "timeout_seconds"),
        *("key_filename", "known_hosts", "read_back_bytes"),
        # Of S3's requests.
        *("ACL", "BucketKeyEnabled", "CacheControl", "ContentDisposition", "ContentEncoding"),
        *("ContentLanguage", "ContentType", "ExpectedBucketOwner", "RequestPayer", "SSEKMSKeyId"),
        *("ServerSideEncryption", "StorageClass"),
        # Of obstore.
        *("account_name", "azure_storage_account_name", "use_emulator", "azure_storage_use_emulator"),
        *("use_azure_cli", "skip_signature", "virtual_hosted_style_request"),
        *("service_account", "application_credentials"),
    )
)


def open_store(uri: str | Path, **options: Any) -> Store:
    """The store at a path, `file://`, `s3://bucket/prefix`, `gs://`, `az://` or `sftp://user@host/folder`.

    Args:
        uri: Options may follow a `?`: `s3://bucket/prefix?endpoint_url=http://127.0.0.1:9000&client=obstore`.
        options: The same by keyword, and those that do not belong into a URI; a keyword wins. They are the arguments of the
            store's class; `client="obstore"` takes CloudStore for `s3://`.

    Raises:
        ValueError: No store for that scheme.
        ImportError: The store's client is not installed; the message names the extra.
    """
    scheme, separator, rest = str(uri).partition("://")
    if not separator or scheme == "file":
        return _open_local(str(uri), options)
    location = rest.partition("?")[
        0
    ]  # A "#" is an ordinary character here: names of objects and runs have it.
    authority, _, quoted = location.partition("/")
    path = unquote(quoted)
    options = {**options_of(uri), **options}
    client: Literal["boto3", "obstore"] = options.pop("client", "boto3")
    host = urlsplit(f"//{authority}")
    if host.password is not None or (host.username is not None and scheme != "sftp"):
        raise ValueError(
            f"a store's URI must have no credentials, got some before the '@' of one that starts with {scheme}://. "
            "Give them by store_options={…}."
        )
    if scheme == "sftp":
        if not host.hostname:
            raise ValueError("an SFTP store must have a host, got none. Write sftp://user@host/folder.")
        from .sftp import SftpStore

        username = None if host.username is None else unquote(host.username)
        return SftpStore(host.hostname, f"/{path}", port=host.port or 22, username=username, **options)
    if any(part in {".", ".."} for part in path.split("/")):
        raise ValueError(f"a store's prefix must have no part '.' or '..', got {path!r}")
    if scheme == "s3" and client == "boto3":
        from .s3.store import S3Store

        return S3Store(authority, path.strip("/"), **options)
    if scheme in _CLOUD_SCHEMES or (scheme == "s3" and client == "obstore"):
        from .cloud import CloudStore

        return CloudStore(scheme, authority, path.strip("/"), **options)
    raise ValueError(
        f"a store's URI must be a path or start with file://, s3://, gs://, az:// or sftp://, got {redact(str(uri))!r}"
    )


def options_of(uri: str | Path) -> dict[str, str]:
    """The options that follow the `?` of a remote store's URI, secrets included."""
    return dict(parse_qsl(str(uri).partition("?")[2])) if is_remote(uri) else {}


def identity_of(uri: str) -> str:
    """What tells one store from another: scheme, host or bucket, prefix, and which server; nothing that may change between two runs.

    Args:
        uri: What `Store.uri` says.
    """
    scheme, _, rest = uri.partition("://")
    path, _, query = rest.partition("?")
    server = sorted(
        (key, value.rstrip("/"))
        for key, value in parse_qsl(query)
        if any(word in key.lower() for word in _SAYS_WHICH_SERVER)
    )
    return f"{scheme}://{path.rstrip('/')}" + (f"?{urlencode(server, safe='/:')}" if server else "")


def open_object(uri: str) -> tuple[Store, str]:
    """The store and the name behind what `handle.uri` says."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        raise ValueError(
            f"an object's URI must have a scheme, got {uri!r}. Give the store: download_file(name, destination, store=…)"
        )
    path, question, query = rest.partition("?")
    if scheme == "file":
        path, question, query = rest, "", ""
    parent, _, leaf = path.rpartition("/")
    return open_store(f"{scheme}://{parent}{question}{query}"), unquote(leaf)


def is_remote(uri: str | Path) -> bool:
    """Whether the URI leads over a network, as far as the URI tells."""
    scheme, separator, _ = str(uri).partition("://")
    return bool(separator) and scheme != "file"


def compose_uri(root: str, prefix: str, name: str, options: dict[str, Any]) -> str:
    """`root/prefix/name?options`, quoted; options that are None, or not known to be harmless, are left out."""
    path = "/".join(quote(part) for part in (prefix, name) if part)
    query = urlencode(kept_options(options), safe="/:")
    return root + (f"/{path}" if path else "") + (f"?{query}" if query else "")


def is_kept_option(name: str) -> bool:
    """Whether a store option of this name may be written to disk and into a URI."""
    return name in _KEPT


def kept_options(options: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Of a store's options what may be written to disk and into a URI; a URL among them loses user, password and query."""
    return {
        name: _without_credentials(value) if isinstance(value, str) else value
        for name, value in options.items()
        if is_kept_option(name) and isinstance(value, str | int | float)
    }


def _without_credentials(value: str) -> str:
    if "://" not in value:
        return value
    parts = urlsplit(value)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _open_local(uri: str, options: dict[str, Any]) -> Store:
    from .local import LocalStore

    if uri.startswith("file://"):
        host, slash, path = uri.removeprefix("file://").partition("/")
        if host not in {"", "localhost"} or not slash:
            raise ValueError(
                f"a file:// URI must be absolute, as in file:///folder, got {uri!r}. A relative folder is given as a path."
            )
        # As bytes, since not every path is UTF-8; a folder has no options, so "?" and "#" belong to it.
        return LocalStore("/" + os.fsdecode(unquote_to_bytes(os.fsencode(path))), **options)
    if not uri:
        raise ValueError("a store must be a path or a URI, got an empty text")
    if _ALMOST_A_URI.match(uri):
        raise ValueError(
            f"a store's URI must have '://' after its scheme, got {uri!r}. Give it as a string, since a Path drops a slash."
        )
    return LocalStore(uri, **options)
