"""Opens a store by its URI; what a store says of itself comes back to the same place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from uploads._redact import is_secret_option

if TYPE_CHECKING:
    from pathlib import Path

    from .store import Store

__all__ = ["compose_uri", "is_remote", "open_object", "open_store"]

_CLOUD_SCHEMES = ("gs", "az")


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
    scheme, _, _ = str(uri).partition("://")
    if scheme == str(uri) or scheme == "file":
        return _open_local(str(uri), options)
    parts = urlsplit(str(uri))
    options = {**dict(parse_qsl(parts.query)), **options}
    client: Literal["boto3", "obstore"] = options.pop("client", "boto3")
    if scheme == "s3" and client == "boto3":
        from .s3 import S3Store

        return S3Store(parts.netloc, unquote(parts.path.strip("/")), **options)
    if scheme in _CLOUD_SCHEMES or (scheme == "s3" and client == "obstore"):
        from .cloud import CloudStore

        return CloudStore(scheme, parts.netloc, unquote(parts.path.strip("/")), **options)
    if scheme == "sftp":
        from .sftp import SftpStore

        return SftpStore(
            parts.hostname or "",
            unquote(parts.path),
            port=parts.port or 22,
            username=parts.username,
            **options,
        )
    raise ValueError(
        f"a store's URI must be a path or start with file://, s3://, gs://, az:// or sftp://, got {str(uri)!r}"
    )


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
    """`root/prefix/name?options`, quoted; options that are None or secret are left out."""
    path = "/".join(quote(part) for part in (prefix, name) if part)
    query = urlencode(
        {key: value for key, value in options.items() if value is not None and not is_secret_option(key)},
        safe="/:",
    )
    return root + (f"/{path}" if path else "") + (f"?{query}" if query else "")


def _open_local(uri: str, options: dict[str, Any]) -> Store:
    from .local import LocalStore

    path = unquote(urlsplit("//" + uri.removeprefix("file://")).path) if uri.startswith("file://") else uri
    return LocalStore(path, **options)
