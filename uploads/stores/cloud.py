"""Stores on Google Cloud Storage, Azure and S3 through obstore, a Rust client that releases the GIL.

Unlike S3Store, it doesn't resume parts after a restart, and has no checksums in headers and no ExtraArgs.
"""

import contextlib
import datetime as dt
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from uploads.errors import (
    BytesCorruptError,
    RejectedByStoreError,
    RemoteExistsError,
    RemoteNotFoundError,
    StoreError,
    StoreParkedError,
    TransientStoreError,
)
from uploads.messages import needs_package
from uploads.redaction import redact

from .create_only import CreateOnlyPolicy, CreateOnlySupport
from .store import Body, RemoteObject, can_match, check_version
from .uri import SCHEMES, StoreLocation, compose_uri, configured_endpoint

__all__ = ["CloudStore", "open_at"]

_CHUNK_BYTES = 1 << 20
_PARKED_CODES = re.compile(
    r"<Code>(ExpiredToken|InvalidToken|InvalidAccessKeyId|SignatureDoesNotMatch"
    r"|RequestTimeTooSkewed|NoSuchBucket)</Code>"
)
_NOT_KNOWN = re.compile(r"<Code>(InvalidArgument|InvalidRequest|NotImplemented)</Code>")


class CloudStore:
    """A bucket or container, or a prefix in one. obstore finds the credentials, or they are options.

    Args:
        scheme: "gs", "az" or "s3".
        bucket: Bucket or container.
        prefix: Put before every name, with a `/`.
        endpoint_url: URL of another server than the cloud's own.
        region: Region of S3.
        part_bytes: Files up to this size go in one request, larger ones in parts of this size.
        part_threads: Parts of one file in flight at the same time.
        create_only: What `overwrite=False` requires of an S3 server other than AWS; see S3Store.
        backend: An obstore store to use.
        config: obstore's own options for the cloud, such as `azure_storage_account_name`.

    Raises:
        ImportError: obstore is not installed.
    """

    def __init__(
        self,
        scheme: str,
        bucket: str,
        prefix: str = "",
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        part_bytes: int | str = 8 << 20,
        part_threads: int | str = 4,
        create_only: CreateOnlyPolicy = "auto",
        backend: Any = None,
        **config: Any,
    ) -> None:
        with needs_package(f"{scheme}://", "obstore"):
            import obstore
        if scheme == "s3":
            endpoint_url = endpoint_url or configured_endpoint()
        if scheme == "az" and not {"account_name", "azure_storage_account_name"} & config.keys():
            account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
            config |= {"account_name": account} if account else {}
        self._obstore = obstore
        self._root = f"{scheme}://{bucket}"
        self._prefix = prefix.strip("/")
        self._part_bytes = int(part_bytes)
        self._part_threads = int(part_threads)
        self._scheme = scheme
        self._uri_options = {
            "client": "obstore" if scheme == "s3" else None,
            "endpoint_url": endpoint_url,
            "region": region,
            "create_only": None if create_only == "auto" else create_only,
            **config,
        }
        self._arguments = _arguments(endpoint_url, region, config)
        self._bucket = bucket
        self._create_only = CreateOnlySupport(
            create_only, known=None if scheme == "s3" and endpoint_url else True
        )
        try:
            self._backend = backend or self._make_backend()
        except obstore.exceptions.BaseError as error:
            raise ValueError(f"cannot open {self.uri()}: {str(error).splitlines()[0]}") from error

    def put(self, name: str, body: Body, *, overwrite: bool, notes: Path | None = None) -> RemoteObject:
        key = self._key(name)
        create_only = not overwrite and self._create_only.check(self, name)
        is_large = body.digest.size > self._part_bytes
        with self._translated(f"put {key}"):
            if is_large and create_only:
                self._put_parts_create_only(key, body)
            else:
                self._send(key, body, create_only=create_only)
            size = self._obstore.head(self._backend, key)["size"] if is_large else body.digest.size
        if size != body.digest.size:
            raise BytesCorruptError(f"{key} has {size} bytes in the store, expected {body.digest.size}")
        return RemoteObject(name, body.digest.size, body.identifier, body.digest.sha256)

    def head(self, name: str) -> RemoteObject | None:
        try:
            with self._translated(f"head {self._key(name)}"):
                answer = self._obstore.get(self._backend, self._key(name), options={"head": True})
                attributes = {str(key).lower(): value for key, value in answer.attributes.items()}
                return RemoteObject(
                    name,
                    answer.meta["size"],
                    attributes.get("entry-id"),
                    attributes.get("sha256"),
                    answer.meta.get("e_tag") or None,
                )
        except RemoteNotFoundError:
            return None

    def get(self, name: str, offset: int = 0, version: str | None = None) -> Iterator[bytes]:
        yield from self._get(name, {"range": {"offset": offset}} if offset else {}, version)

    def get_range(self, name: str, offset: int, size: int, version: str) -> Iterator[bytes]:
        try:
            yield from self._get(name, {"range": (offset, offset + size)}, version)
        except TransientStoreError as error:
            if "NotPartial" in str(
                error
            ):  # Also rclone's answer, which sends the range with a status of 200.
                raise NotImplementedError(f"{self.uri(name)}: the server ignores ranges") from error
            raise

    def _get(self, name: str, options: Any, version: str | None) -> Iterator[bytes]:
        if version is not None and can_match(version):
            options["if_match"] = version
        with self._translated(f"get {self._key(name)}"):
            answer = self._obstore.get(self._backend, self._key(name), options=options)
            # Some servers ignore If-Match.
            check_version(answer.meta.get("e_tag"), version, self.uri(name))
            for chunk in answer.stream(min_chunk_size=_CHUNK_BYTES):
                yield bytes(chunk)

    def list(self, prefix: str = "") -> Iterator[RemoteObject]:
        start = f"{self._prefix}/" if self._prefix else ""
        folder = (start + prefix).rpartition("/")[0] or None  # obstore compares whole parts of a name.
        with self._translated(f"list {start}{prefix}"):
            found = [item for page in self._obstore.list(self._backend, folder) for item in page]
        objects = (
            RemoteObject(item["path"].removeprefix(start), item["size"], version=item.get("e_tag") or None)
            for item in found
        )
        yield from sorted(
            (item for item in objects if item.name.startswith(prefix)), key=lambda item: item.name
        )

    def delete(self, name: str) -> None:
        with contextlib.suppress(RemoteNotFoundError), self._translated(f"delete {self._key(name)}"):
            self._obstore.delete(self._backend, self._key(name))

    def uri(self, name: str = "") -> str:
        return compose_uri(self._root, self._prefix, name, self._uri_options)

    def renew(self) -> None:
        self._backend = self._make_backend()

    def credential_files(self) -> tuple[Path, ...]:
        return ()

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _make_backend(self) -> Any:
        import obstore.store

        kind = getattr(obstore.store, SCHEMES[self._scheme].obstore_class)
        return kind(
            self._bucket,
            retry_config={"max_retries": 0, "retry_timeout": dt.timedelta(seconds=60)},
            **self._arguments,
        )

    def refuses_overwrite(self) -> bool:
        """Returns whether the server refuses a create-only put of a name that exists; see S3Store."""
        return self._create_only.is_supported(self)

    def put_probe(self, name: str) -> None:
        """Puts a small object create-only; see `CreateOnlySupport`."""
        try:
            with self._translated(f"probe {self.uri()}"):
                self._obstore.put(self._backend, self._key(name), b"probe", mode="create")
        except StoreError as error:
            if _NOT_KNOWN.search(str(error)):
                raise NotImplementedError(str(error)) from error
            raise

    def _send(self, key: str, body: Body, *, create_only: bool = False) -> None:
        is_large = body.digest.size > self._part_bytes
        self._obstore.put(
            self._backend,
            key,
            body.chunks(self._part_bytes) if is_large else body.read(0, body.digest.size),
            attributes={"entry-id": body.identifier, "sha256": body.sha256},
            mode="create" if create_only else "overwrite",
            use_multipart=is_large,
            chunk_size=self._part_bytes,
            max_concurrency=self._part_threads,
        )

    def _put_parts_create_only(self, key: str, body: Body) -> None:
        """Uploads under another name, then copies: obstore cannot complete parts create-only."""
        if self._scheme == "s3":
            raise RejectedByStoreError(
                f"client=obstore takes overwrite=False up to {self._part_bytes} bytes, got "
                f"{body.digest.size}. Use boto3 (the default client) or overwrite=True."
            )
        partial = f"{key}.uploads-partial-{body.identifier}"
        self._send(partial, body)
        try:
            self._obstore.copy(self._backend, partial, key, overwrite=False)
        finally:
            self._obstore.delete(self._backend, partial)

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        exceptions = self._obstore.exceptions
        try:
            yield
        except FileNotFoundError as error:
            if _PARKED_CODES.search(str(error)):
                raise StoreParkedError(redact(f"{what}: {error}")) from error
            raise RemoteNotFoundError(redact(f"{what}: {error}")) from error
        except exceptions.AlreadyExistsError as error:
            raise RemoteExistsError(redact(f"{what}: {error}")) from error
        except exceptions.PreconditionError as error:
            raise TransientStoreError(redact(f"{what}: the object changed: {error}")) from error
        except exceptions.PermissionDeniedError as error:
            raise StoreParkedError(redact(f"{what}: {error}"), may_be_the_entry=True) from error
        except exceptions.UnauthenticatedError as error:
            raise StoreParkedError(redact(f"{what}: {error}")) from error
        except (exceptions.InvalidPathError, exceptions.NotSupportedError) as error:
            raise RejectedByStoreError(redact(f"{what}: {error}")) from error
        except exceptions.BaseError as error:
            kind: type[StoreError] = (
                StoreParkedError if _PARKED_CODES.search(str(error)) else TransientStoreError
            )
            raise kind(redact(f"{what}: {error}")) from error


def _arguments(endpoint_url: str | None, region: str | None, config: dict[str, Any]) -> dict[str, Any]:
    arguments = dict(config)
    client_options: dict[str, Any] = {
        "connect_timeout": dt.timedelta(seconds=10),
        "timeout": dt.timedelta(seconds=120),
    }
    if endpoint_url is not None:
        arguments["endpoint"] = endpoint_url
        client_options["allow_http"] = endpoint_url.startswith("http://")
    if region is not None:
        arguments["region"] = region
    return {**arguments, "client_options": client_options}


def open_at(location: StoreLocation, **options: Any) -> CloudStore:
    """Returns the bucket or container of a URI."""
    options.pop("client", None)  # There is no other one.
    return CloudStore(location.scheme, *location.bucket_and_prefix(), **options)
