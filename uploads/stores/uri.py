"""URIs of stores: our schemes, their options, and which options may be written to disk.

It imports no store, but knows where each one is.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

import attrs

__all__ = [
    "LOCAL_SCHEME",
    "SCHEMES",
    "Scheme",
    "StoreLocation",
    "add_public_options",
    "compose_uri",
    "configured_endpoint",
    "credentials_error",
    "identity_of",
    "is_kept_option",
    "is_remote",
    "kept_options",
    "options_of",
]

_SERVER_OPTIONS = ("endpoint", "account_name", "base_url")
_ENDPOINT = {"endpoint_url": "endpoint"}


@attrs.frozen
class Scheme:
    """A scheme of a store in this package.

    These options contain no secrets, so they may be written to disk and into URIs.

    Attributes:
        factory: Its `StoreFactory`, "module:function" in this folder, imported when it is first used.
        own_options: Options that other libraries don't know.
        shared_options: Options that they do know.
        obstore_class: Its class in obstore; empty if it has none.
        object_store_names: The names that `object_store`, the library of Delta Lake and others, has for our
            options; None if it doesn't know the scheme.
    """

    factory: str
    own_options: tuple[str, ...] = ()
    shared_options: tuple[str, ...] = ()
    obstore_class: str = ""
    object_store_names: Mapping[str, str] | None = None


LOCAL_SCHEME = "file"
_CLOUD_OPTIONS = ("client", "create_only", "part_bytes", "part_threads")
SCHEMES = {
    LOCAL_SCHEME: Scheme("local:open_at"),
    "s3": Scheme(
        "s3.store:open_at",
        own_options=(
            *_CLOUD_OPTIONS,
            *("addressing_style", "checksum", "connect_timeout_seconds", "profile", "read_timeout_seconds"),
        ),
        shared_options=(
            *("endpoint_url", "region"),
            # Of S3's requests.
            *("ACL", "BucketKeyEnabled", "CacheControl", "ContentDisposition", "ContentEncoding"),
            *("ContentLanguage", "ContentType", "ExpectedBucketOwner", "RequestPayer", "SSEKMSKeyId"),
            *("ServerSideEncryption", "StorageClass"),
            # Of obstore.
            *("skip_signature", "virtual_hosted_style_request"),
        ),
        obstore_class="S3Store",
        object_store_names={"endpoint_url": "aws_endpoint", "region": "aws_region"},
    ),
    "gs": Scheme(
        "cloud:open_at",
        own_options=_CLOUD_OPTIONS,
        shared_options=("endpoint_url", "service_account", "application_credentials"),
        obstore_class="GCSStore",
        object_store_names=_ENDPOINT,
    ),
    "az": Scheme(
        "cloud:open_at",
        own_options=_CLOUD_OPTIONS,
        shared_options=(
            *("endpoint_url", "account_name", "azure_storage_account_name"),
            *("use_emulator", "azure_storage_use_emulator", "use_azure_cli"),
        ),
        obstore_class="AzureStore",
        object_store_names=_ENDPOINT,
    ),
    "sftp": Scheme(
        "ssh:open_at",
        own_options=("create_only", "key_filename", "known_hosts", "read_back_bytes", "timeout_seconds"),
    ),
}
# These may be written to disk and into URIs. A deny list would miss the next secret option.
_PUBLIC_OPTIONS = {
    name for scheme in SCHEMES.values() for name in (*scheme.own_options, *scheme.shared_options)
} | {"base_url"}  # Of WebDAV, in fsspec.


@attrs.frozen
class StoreLocation:
    """A store's URI without its options; the argument of a store's factory.

    ```python
    location = StoreLocation("sftp", "me@host:2222", "/a%20folder")
    print(location.username, location.host, location.port, location.path)  # me host 2222 /a folder
    ```

    Attributes:
        scheme: "s3".
        authority: The part between `://` and the next `/`: a bucket, or `user@host:port`.
        quoted_path: The rest of the URI, still quoted; empty, or begins with `/`.
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

    def uri(self, name: str = "", **options: Any) -> str:
        """Returns the URI of the store, or of an object in it, with those options that may be shown."""
        root = f"{self.scheme}://{self.authority}"
        return compose_uri(root, self.path.strip("/"), name, options)

    def bucket_and_prefix(self) -> tuple[str, str]:
        """Returns the authority and the path of a URI that names a bucket.

        Raises:
            ValueError: It has no bucket, has credentials, or a part of the path is `.` or `..`.
        """
        if self.username is not None:
            raise credentials_error(self.scheme)
        if not self.authority:
            raise ValueError(f"a {self.scheme}:// URI needs a bucket: {self.scheme}://bucket/prefix")
        prefix = self.path.removeprefix("/")
        if any(part in {".", ".."} for part in prefix.split("/")):
            raise ValueError(f"a store's prefix cannot have a part '.' or '..', got {prefix!r}")
        return self.authority, prefix.strip("/")


def credentials_error(scheme: str) -> ValueError:
    """Returns the error for a URI with credentials; it doesn't show them."""
    return ValueError(
        f"a store's URI cannot contain credentials, got some before the '@' of a {scheme}:// URI. "
        "Give them by store_options={…}."
    )


def options_of(uri: str | Path) -> dict[str, str]:
    """Returns the options after the `?` of a remote store's URI, secrets included."""
    return dict(parse_qsl(str(uri).partition("?")[2])) if is_remote(uri) else {}


def identity_of(uri: str) -> str:
    """Returns the identity of a store: scheme, host or bucket, prefix, server; no option that may change.

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


def configured_endpoint() -> str | None:
    """Returns the S3 endpoint from the environment, ours before boto3's; None for boto3's own choice."""
    names = ["S3_ENDPOINT_URL"]
    if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() != "true":
        names += ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def is_remote(uri: str | Path) -> bool:
    """Returns whether the URI has a scheme other than `file`."""
    scheme, separator, _ = str(uri).partition("://")
    return bool(separator) and scheme != LOCAL_SCHEME


def compose_uri(root: str, prefix: str, name: str, options: dict[str, Any]) -> str:
    """Returns `root/prefix/name?options`, quoted, with the options that are set and public."""
    path = "/".join(quote(part) for part in (prefix, name) if part)
    query = urlencode(kept_options(options), safe="/:")
    return root + (f"/{path}" if path else "") + (f"?{query}" if query else "")


def add_public_options(names: Iterable[str]) -> None:
    """Adds names of options that contain no secrets."""
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
