"""URIs of stores: their options, and which of these may be written down. Knows no store."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

import attrs

__all__ = [
    "StoreLocation",
    "add_public_options",
    "compose_uri",
    "identity_of",
    "is_kept_option",
    "is_remote",
    "kept_options",
    "options_of",
]

_SERVER_OPTIONS = ("endpoint", "account_name")
# What may be written to disk and into URIs. A deny list would miss the next secret option.
_PUBLIC_OPTIONS = {
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
}


@attrs.frozen
class StoreLocation:
    """A store's URI without its options: what the factory of a store gets.

    ```python
    register_store("ftp", lambda location, options: FtpStore(location.authority, location.path))
    ```

    Attributes:
        scheme: "s3".
        authority: What stands between `://` and the next `/`: a bucket, or `user@host:port`.
        quoted_path: The rest as it stands in the URI; empty, or begins with `/`.
    """

    scheme: str
    authority: str
    quoted_path: str = ""

    @property
    def path(self) -> str:
        """The path, unquoted."""
        return unquote(self.quoted_path)

    @property
    def host(self) -> str | None:
        """The host in the authority, in lower case."""
        return urlsplit(f"//{self.authority}").hostname

    @property
    def port(self) -> int | None:
        """The port in the authority."""
        return urlsplit(f"//{self.authority}").port

    @property
    def username(self) -> str | None:
        """The user in the authority, unquoted."""
        name = urlsplit(f"//{self.authority}").username
        return None if name is None else unquote(name)


def options_of(uri: str | Path) -> dict[str, str]:
    """Returns the options after the `?` of a remote store's URI, secrets included."""
    return dict(parse_qsl(str(uri).partition("?")[2])) if is_remote(uri) else {}


def identity_of(uri: str) -> str:
    """Returns what identifies a store: scheme, host or bucket, prefix, server; no option that may change.

    Args:
        uri: From `Store.uri`.
    """
    scheme, _, rest = uri.partition("://")
    path, _, query = rest.partition("?")
    server = sorted(
        (key, value.rstrip("/"))
        for key, value in parse_qsl(query)
        if any(word in key.lower() for word in _SERVER_OPTIONS)
    )
    return f"{scheme}://{path.rstrip('/')}" + (f"?{urlencode(server, safe='/:')}" if server else "")


def is_remote(uri: str | Path) -> bool:
    """Returns whether the URI has a scheme other than `file`."""
    scheme, separator, _ = str(uri).partition("://")
    return bool(separator) and scheme != "file"


def compose_uri(root: str, prefix: str, name: str, options: dict[str, Any]) -> str:
    """Returns `root/prefix/name?options`, quoted, with those options that are set and public."""
    path = "/".join(quote(part) for part in (prefix, name) if part)
    query = urlencode(kept_options(options), safe="/:")
    return root + (f"/{path}" if path else "") + (f"?{query}" if query else "")


def add_public_options(names: Iterable[str]) -> None:
    """Adds names of options that hold no secret."""
    _PUBLIC_OPTIONS.update(names)


def is_kept_option(name: str) -> bool:
    """Returns whether a store option of this name may be written to disk and into a URI."""
    return name in _PUBLIC_OPTIONS


def kept_options(options: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Returns the public options. URLs among them lose user, password and query."""
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
