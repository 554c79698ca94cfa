"""Store in a file system of fsspec: SFTP (see `ssh`), and every other scheme that fsspec knows.

Most need a package that fsspec names, such as huggingface_hub for `hf://` or Hadoop's client for `hdfs://`.
"""

import contextlib
import datetime as dt
import hashlib
import posixpath
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from uploads.errors import (
    BytesCorruptError,
    RejectedByStoreError,
    RemoteExistsError,
    RemoteNotFoundError,
    StoreError,
    StoreParkedError,
    TransientStoreError,
)
from uploads.names import PARTIAL_PREFIX, check_remote_name
from uploads.redaction import redact

from .create_only import CreateOnlyPolicy, CreateOnlySupport
from .store import Body, RemoteObject, check_version
from .uri import StoreLocation

__all__ = ["FileSystemStore", "is_known_to_fsspec", "open_at"]

_CHUNK_BYTES = 1 << 20
_ABANDONED_SECONDS = 3600.0  # On the server's clock; a live writer writes or times out far sooner.
# Fields that change with the bytes, in file systems of fsspec.
_VERSIONS = ("etag", "ETag", "blob_id", "mtime", "modify", "last_modified", "LastModified", "created")
# The web can't be written to, and fsspec's `ssh` trusts any host.
_NOT_STORES = {"http", "https", "ssh"}
_NO_REPLACING = {"hdfs"}  # A rename refuses a name that is taken.


@attrs.define(eq=False, slots=False, repr=False)
class FileSystemStore:
    """Objects are files in a folder of one of fsspec's file systems.

    A put writes a partial file beside the target, compares its size, reads it back if it has at most
    `read_back_bytes`, and renames it, or copies it if the file system has no rename. HDFS doesn't rename over
    another file, so a replaced object is removed right before.

    **Create-only.** SFTP and HDFS refuse to rename over a taken name; a probe finds out whether the server
    does. Other file systems of fsspec can't promise it, so the name is looked up first.

    The first put to a folder removes partial files of killed writers that are an hour old on the server's
    clock, if the file system has times.

    **Threading.** Each thread has its own file system, because most have one connection.

    Args:
        location: The URI.
        kind: A class of fsspec's file systems, or one with its interface.
        arguments: For the class. Never written to disk.
        uri_options: The options in the URI.
        root: The folder, as the class takes it.
        credential_files: Files that change when credentials are rotated.
        read_back_bytes: Files up to this size are read back after they are written, which transfers them
            twice; 0 for none.
        create_only: What `overwrite=False` requires. "auto": if the server can't refuse a taken name, look
            for the target and then rename, so that two writers at the same instant may both succeed.
            "require": it must refuse.
    """

    _location: StoreLocation
    _kind: Any
    _arguments: dict[str, Any]
    _uri_options: dict[str, Any]
    _root: str = attrs.field(kw_only=True)
    _credential_files: tuple[Path, ...] = attrs.field(default=(), kw_only=True)
    _read_back_bytes: int = attrs.field(default=1 << 20, converter=int, kw_only=True)
    _create_only: CreateOnlyPolicy = attrs.field(default="auto", kw_only=True)

    def __attrs_post_init__(self) -> None:
        self._support = CreateOnlySupport(self._create_only, known=None, mechanism="no-replace renames")
        self._local = threading.local()
        self._swept: set[str] = set()

    def put(self, name: str, body: Body, *, overwrite: bool, notes: Path | None = None) -> RemoteObject:
        target = self._path(name)
        is_exclusive = not overwrite and self._support.check(self, name)
        with self._partial(target, body.identifier) as partial:
            with self._translated(f"put {name}") as files:
                self._write(files, partial, body)
            body.check()
            with self._translated(f"put {name}") as files:
                self._rename(files, partial, target, is_exclusive=is_exclusive)
        return RemoteObject(name, body.digest.size, body.identifier, body.digest.sha256)

    def head(self, name: str) -> RemoteObject | None:
        with self._translated(f"head {name}") as files:
            found = _look(files, self._path(name))
        return _describe(name, found) if found is not None and found["type"] == "file" else None

    def get(self, name: str, offset: int = 0, version: str | None = None) -> Iterator[bytes]:
        path = self._path(name)
        with self._translated(f"get {name}") as files, files.open(path, "rb") as stream:
            if version is not None:  # Checked once it is open; a replacement is another file.
                check_version(_describe(name, files.info(path)).version, version, self.uri(name))
            if offset:
                stream.seek(offset)
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk

    def list(self, prefix: str = "") -> Iterator[RemoteObject]:
        with self._translated(f"list {prefix}") as files:
            found = [_describe(name, about) for name, about in self._walk(files, "", prefix)]
        yield from sorted(found, key=lambda item: item.name)

    def delete(self, name: str) -> None:
        path = self._path(name)
        with self._translated(f"delete {name}") as files:
            try:
                files.rm_file(path)
            except Exception:  # Not every file system raises FileNotFoundError.
                if _look(files, path) is not None:
                    raise

    def uri(self, name: str = "") -> str:
        policy = None if self._create_only == "auto" else self._create_only
        return self._location.uri(name, **self._uri_options, create_only=policy)

    def renew(self) -> None:
        """Connects anew at the next request; a request in progress keeps its connection."""
        self._local = threading.local()

    def credential_files(self) -> tuple[Path, ...]:
        return self._credential_files

    def refuses_overwrite(self) -> bool:
        """Returns whether the server refuses a create-only put of a name that exists; see S3Store."""
        return self._support.is_supported(self)

    def put_probe(self, name: str) -> None:
        """Puts a small file create-only; see `CreateOnlySupport`."""
        if self._location.scheme not in _NO_REPLACING and not hasattr(self._kind, "rename_new"):
            raise NotImplementedError
        target = self._path(name)
        with (
            self._partial(target, uuid.uuid4().hex) as partial,
            self._translated(f"probe {self.uri()}") as files,
        ):
            self._make_folder(files, partial)
            with files.open(partial, "wb") as stream:
                stream.write(b"probe")
            self._rename(files, partial, target, is_exclusive=True)

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, check_remote_name(name))

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[Any]:
        """Yields this thread's file system; translates errors, and drops a connection that may be broken."""
        local = self._local
        try:
            if not hasattr(local, "files"):
                local.files = self._kind(skip_instance_cache=True, **self._arguments)
            local.files.invalidate_cache()
            yield local.files
        except StoreError:
            raise
        except FileNotFoundError as error:
            self._swept.clear()  # A folder may be gone.
            raise RemoteNotFoundError(redact(f"{what}: {error}")) from error
        except PermissionError as error:
            raise StoreParkedError(redact(f"{what}: {error}"), may_be_the_entry=True) from error
        except NotImplementedError as error:
            raise RejectedByStoreError(redact(f"{what}: fsspec cannot do this here. {error}")) from error
        except Exception as error:  # Each client has errors of its own.
            vars(local).clear()
            raise TransientStoreError(redact(f"{what}: {str(error) or type(error).__name__}")) from error

    @contextlib.contextmanager
    def _partial(self, target: str, identifier: str) -> Iterator[str]:
        """Yields the path of a partial file beside the target, which is removed if the block raises.

        If the connection broke, it stays, and the next attempt replaces it.
        """
        partial = posixpath.join(posixpath.dirname(target), PARTIAL_PREFIX + identifier)
        try:
            yield partial
        except BaseException:
            if hasattr(local := self._local, "files"):
                with contextlib.suppress(Exception):
                    local.files.rm_file(partial)
            raise

    def _make_folder(self, files: Any, path: str) -> None:
        """Creates the folder of a file, unless this store has written to it before."""
        folder = posixpath.dirname(path)
        for _ in folder.split("/") if folder not in self._swept else ():
            with contextlib.suppress(OSError):  # Another writer was first, or the write fails.
                files.makedirs(folder, exist_ok=True)
                break

    def _write(self, files: Any, path: str, body: Body) -> None:
        """Writes and checks the partial file."""
        self._make_folder(files, path)
        with files.open(path, "wb") as stream:
            for chunk in body.chunks(_CHUNK_BYTES):
                stream.write(chunk)
        about = files.info(path)
        if about["size"] != body.digest.size:
            raise BytesCorruptError(f"{path} has {about['size']} bytes, expected {body.digest.size}")
        if about["size"] <= self._read_back_bytes:
            sha256 = hashlib.sha256(files.cat_file(path)).hexdigest()
            if sha256 != body.digest.sha256:
                raise BytesCorruptError(f"{path} has SHA-256 {sha256}, expected {body.digest.sha256}")
        self._sweep(files, posixpath.dirname(path), _time(about))

    def _rename(self, files: Any, partial: str, target: str, *, is_exclusive: bool) -> None:
        from fsspec import AbstractFileSystem

        if is_exclusive:
            try:
                getattr(files, "rename_new", files.mv)(partial, target)
            except OSError as error:
                # The server's error code may mean anything.
                if isinstance(error, FileNotFoundError | PermissionError) or _look(files, target) is None:
                    raise
                raise RemoteExistsError(f"{target} exists") from error
        elif type(files).mv is AbstractFileSystem.mv:  # It would take the name for a pattern.
            files.cp_file(partial, target)
            files.rm_file(partial)
        else:
            if self._location.scheme in _NO_REPLACING and _look(files, target) is not None:
                files.rm_file(target)
            files.mv(partial, target)

    def _sweep(self, files: Any, folder: str, now: float | None) -> None:
        """Removes partial files of killed writers in a folder, once per folder."""
        if folder in self._swept:
            return
        self._swept.add(folder)
        with contextlib.suppress(OSError):
            for item in files.ls(folder, detail=True):
                name, changed = item["name"].rpartition("/")[2], _time(item)
                is_old = now is not None and changed is not None and now - changed > _ABANDONED_SECONDS
                if is_old and name.startswith(PARTIAL_PREFIX):
                    with contextlib.suppress(OSError):  # Gone meanwhile, or another user's.
                        files.rm_file(posixpath.join(folder, name))

    def _walk(self, files: Any, folder: str, prefix: str) -> Iterator[tuple[str, Any]]:
        try:
            items = files.ls(posixpath.join(self._root, folder), detail=True)
        except FileNotFoundError:
            return
        for item in items:
            leaf = item["name"].rstrip("/").rpartition("/")[2]
            name = posixpath.join(folder, leaf)
            if item["type"] == "directory":
                if f"{name}/".startswith(prefix) or prefix.startswith(f"{name}/"):
                    yield from self._walk(files, name, prefix)
            elif item["type"] == "file" and name.startswith(prefix) and not leaf.startswith(PARTIAL_PREFIX):
                yield name, item


def _look(files: Any, path: str) -> dict[str, Any] | None:
    """Describes a path, or returns None if it is empty; unlike fsspec's `exists`, raises if it can't look."""
    try:
        about: dict[str, Any] = files.info(path)
    except FileNotFoundError:
        return None
    return about


def _time(about: dict[str, Any]) -> float | None:
    changed = about.get("mtime")
    return changed.timestamp() if isinstance(changed, dt.datetime) else changed


def _describe(name: str, about: dict[str, Any]) -> RemoteObject:
    known = next((value for key in _VERSIONS if (value := about.get(key))), None)
    if isinstance(known, dt.datetime):
        known = known.timestamp()
    version = None if known is None else f"{known}-{about['size']}"
    return RemoteObject(name, about["size"], version=version)


def is_known_to_fsspec(scheme: str) -> bool:
    """Returns whether fsspec may have a writable file system for a scheme."""
    try:
        import fsspec
    except ImportError:
        return False
    return scheme not in _NOT_STORES and scheme in fsspec.available_protocols()


def open_at(location: StoreLocation, **options: Any) -> FileSystemStore:
    """Returns the folder of a URI in the file system that fsspec has for its scheme.

    Raises:
        ImportError: The file system needs another package.
    """
    import fsspec

    own = {name: options.pop(name) for name in ("create_only", "read_back_bytes") if name in options}
    kind = fsspec.get_filesystem_class(location.scheme)
    # These two are made for subclasses.
    server = kind._get_kwargs_from_urls(f"{location.scheme}://{location.authority}/")  # noqa: SLF001
    # Where there is no server, the first part of the URI is a folder.
    path = location.path if server else f"{location.authority}{location.path}"
    root = kind._strip_protocol(path)  # noqa: SLF001
    return FileSystemStore(location, kind, server | options, options, root=root, **own)
