"""Store on a machine that is reached over SSH, through paramiko (extra `sftp`)."""

import contextlib
import errno
import hashlib
import posixpath
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs

from uploads.errors import (
    BytesCorruptError,
    RemoteExistsError,
    RemoteNotFoundError,
    StoreParkedError,
    TransientStoreError,
)
from uploads.names import CLAIM_PREFIX, PARTIAL_PREFIX, check_remote_name, name_key
from uploads.redaction import redact

from .create_only import CreateOnlyPolicy, CreateOnlySupport
from .store import Body, RemoteObject, check_version
from .uri import StoreLocation, compose_uri

__all__ = ["SftpStore", "open_at"]

_CHUNK_BYTES = 1 << 20
_CLAIM_TRIES = 20
_CLAIM_POLL_SECONDS = 0.1
_ABANDONED_SECONDS = 3600.0  # On the server's clock. A live writer writes, or times out, far sooner.
_SSH_PORT = 22
_CAUSE_IS_KNOWN = {errno.ENOENT, errno.EACCES}  # The only error codes that paramiko tells apart.


@attrs.define(eq=False)
class _Connection:
    """An SSH connection, and the number of requests in progress on it."""

    client: Any
    request_count: int = 0


@attrs.define(eq=False, slots=False, repr=False)
class SftpStore:
    """Objects are files in a folder of a machine that is reached over SSH.

    A put writes a partial file beside the target and renames it. Before that the size is compared, and files
    up to `read_back_bytes` are read back and compared: SSH protects the bytes on the wire, but SFTP servers
    have no checksums of what is on disk (`check-file` is an extension that OpenSSH does not have).

    **Create-only.** With `overwrite=False` a writer first creates a claim (`.uploads-claim-…`, beside the
    target) with SFTP's exclusive flag, checks that the target is free, renames, and removes the claim. The
    server's RENAME is not enough: some replace the target, and OpenSSH's is not atomic on file systems
    without hard links. Whether the server honours the exclusive flag is probed once.

    Partial files and claims that killed writers left are removed when they are an hour old on the server's
    clock, by the first put to a folder.

    **Threading.** Each thread has a session of its own over one connection, which is opened by the first
    request.

    Args:
        host: Hostname or address.
        root: The folder, absolute; created when the first object is put.
        port: Of its sshd.
        username: Default: the current user.
        password: For servers that accept neither keys nor an agent. Never written to disk.
        key_filename: A private key.
        known_hosts: A file of host keys, in addition to `~/.ssh/known_hosts`; an unknown host is refused.
        timeout_seconds: For a connection and for each answer.
        read_back_bytes: Files up to this size are read back after they are written, which transfers them
            twice; 0 for none.
        create_only: What `overwrite=False` needs. "auto": where the server does not honour the exclusive
            flag, check for the target and then rename: two writers at the same instant may both succeed.
            "require": it must honour it. "head": an earlier name of "auto".

    Raises:
        ImportError: paramiko is not installed.
        ValueError: A bad argument.
    """

    _host: str
    _root: str
    _port: int = attrs.field(default=_SSH_PORT, kw_only=True)
    _username: str | None = attrs.field(default=None, kw_only=True)
    _password: str | None = attrs.field(default=None, kw_only=True)
    _key_filename: str | None = attrs.field(default=None, kw_only=True)
    _known_hosts: str | None = attrs.field(default=None, kw_only=True)
    _timeout_seconds: float = attrs.field(default=60.0, converter=float, kw_only=True)
    _read_back_bytes: int = attrs.field(default=1 << 20, converter=int, kw_only=True)
    _create_only: CreateOnlyPolicy = attrs.field(default="auto", kw_only=True)

    def __attrs_post_init__(self) -> None:
        try:
            import paramiko
        except ImportError as error:
            raise ImportError(
                "sftp:// needs paramiko, which is not installed. "
                "Install it with: pip install 'training-destinations[sftp]'"
            ) from error
        if self._root and not self._root.startswith("/"):
            raise ValueError(
                f"the folder of an SFTP store must be absolute, as in its URI; got {self._root!r}"
            )
        self._paramiko = paramiko
        self._root = posixpath.normpath(self._root or "/")
        self._create_only_support = CreateOnlySupport(
            self._create_only, known=None, mechanism="SFTP's exclusive flag"
        )
        self._lock = threading.Lock()  # Guards the connection.
        self._connection: _Connection | None = None
        self._sessions = threading.local()
        self._swept: set[str] = set()

    def put(self, name: str, body: Body, *, overwrite: bool, notes: Path | None = None) -> RemoteObject:
        target = self._path(name)
        folder = posixpath.dirname(target)
        partial = posixpath.join(folder, PARTIAL_PREFIX + body.identifier)
        claims = not overwrite and self._create_only_support.check(self, name)
        with self._session(f"put {name}") as sftp:
            self._make_folders(sftp, folder)
            try:
                now = self._write(sftp, partial, body)
                self._sweep(sftp, folder, now)
                body.check()
                if overwrite:
                    sftp.posix_rename(partial, target)
                else:
                    claim = self._claimed(sftp, target, body.identifier, now)
                    with claim if claims else contextlib.nullcontext():
                        self._rename_new(sftp, partial, target)
            finally:
                with contextlib.suppress(OSError):
                    sftp.remove(partial)
        return RemoteObject(name, body.digest.size, body.identifier, body.digest.sha256)

    def head(self, name: str) -> RemoteObject | None:
        try:
            with self._session(f"head {name}") as sftp:
                found = sftp.lstat(self._path(name))
        except RemoteNotFoundError:
            return None
        return _describe(name, found) if stat.S_ISREG(found.st_mode) else None

    def get(self, name: str, offset: int = 0, version: str | None = None) -> Iterator[bytes]:
        with self._session(f"get {name}") as sftp, sftp.open(self._path(name), "rb") as stream:
            if version is not None:  # Without one, the server is not asked.
                check_version(_describe(name, stream.stat()).version, version, self.uri(name))
            stream.seek(offset)
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk

    def list(self, prefix: str = "") -> Iterator[RemoteObject]:
        with self._session(f"list {prefix}") as sftp:
            found = [_describe(name, attributes) for name, attributes in self._walk(sftp, "", prefix)]
        yield from sorted(found, key=lambda item: item.name)

    def delete(self, name: str) -> None:
        with contextlib.suppress(RemoteNotFoundError), self._session(f"delete {name}") as sftp:
            sftp.remove(self._path(name))

    def uri(self, name: str = "") -> str:
        user = f"{quote(self._username)}@" if self._username else ""
        port = f":{self._port}" if self._port != _SSH_PORT else ""
        host = f"[{self._host}]" if ":" in self._host else self._host
        options = {
            "key_filename": self._key_filename,
            "known_hosts": self._known_hosts,
            "create_only": None if self._create_only == "auto" else self._create_only,
        }
        return compose_uri(f"sftp://{user}{host}{port}", self._root.strip("/"), name, options)

    def renew(self) -> None:
        """Reconnects at the next request; the last request in progress on the old connection closes it."""
        with self._lock:
            old, self._connection = self._connection, None
            is_idle = old is not None and old.request_count == 0
        if old is not None and is_idle:
            old.client.close()

    def credential_files(self) -> tuple[Path, ...]:
        paths = ("~/.ssh/known_hosts", self._known_hosts, self._key_filename)
        return tuple(Path(path).expanduser() for path in paths if path)

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, check_remote_name(name))

    def _connect(self) -> Any:
        client = self._paramiko.SSHClient()
        try:
            client.load_system_host_keys()
            if self._known_hosts:
                client.load_host_keys(self._known_hosts)
            if self._key_filename:
                Path(self._key_filename).open("rb").close()
        # paramiko raises all kinds for files that are missing, unreadable or no host keys.
        except Exception as error:
            raise StoreParkedError(
                redact(f"could not read known_hosts or key_filename for {self._host}: {error}")
            ) from error
        limit = self._timeout_seconds
        client.connect(
            self._host,
            self._port,
            self._username,
            self._password,
            key_filename=self._key_filename,
            timeout=limit,
            auth_timeout=limit,
            banner_timeout=limit,
        )
        return client

    @contextlib.contextmanager
    def _connected(self) -> Iterator[_Connection]:
        """Yields the connection, which stays open meanwhile."""
        with self._lock:
            if self._connection is None:
                self._connection = _Connection(self._connect())
            connection = self._connection
            connection.request_count += 1
        try:
            yield connection
        finally:
            with self._lock:
                connection.request_count -= 1
                is_unused = connection is not self._connection and connection.request_count == 0
            if is_unused:
                connection.client.close()

    @contextlib.contextmanager
    def _session(self, what: str) -> Iterator[Any]:
        """Yields this thread's session; translates errors, and drops a broken connection."""
        try:
            with self._connected() as connection:
                if getattr(self._sessions, "connection", None) is not connection:
                    sftp = connection.client.open_sftp()
                    sftp.get_channel().settimeout(self._timeout_seconds)
                    self._sessions.sftp, self._sessions.connection = sftp, connection
                yield self._sessions.sftp
        except FileNotFoundError as error:
            raise RemoteNotFoundError(f"{what}: {error}") from error
        except (self._paramiko.AuthenticationException, self._paramiko.BadHostKeyException) as error:
            raise StoreParkedError(redact(f"{what}: {error}. Check user, key and known_hosts.")) from error
        except self._paramiko.SSHException as error:
            self.renew()
            if "not found in known_hosts" in str(error):
                advice = "Add the host's key with known_hosts=…."
                raise StoreParkedError(f"{what}: {error}. {advice}") from error
            raise TransientStoreError(redact(f"{what}: {error}")) from error
        except PermissionError as error:
            raise StoreParkedError(f"{what}: {error}", may_be_the_entry=True) from error
        except (OSError, EOFError) as error:
            self.renew()
            raise TransientStoreError(redact(f"{what}: {error}")) from error

    def refuses_overwrite(self) -> bool:
        """Returns whether the server refuses a create-only put of a name that exists; see S3Store."""
        return self._create_only_support.is_supported(self)

    def put_probe(self, name: str) -> None:
        """Creates a small file exclusively; see `CreateOnlySupport`."""
        path = self._path(name)
        with self._session(f"probe {self.uri()}") as sftp:
            self._make_folders(sftp, posixpath.dirname(path))
            try:
                self._create_exclusively(sftp, path, b"probe")
            except FileExistsError as error:
                raise RemoteExistsError(str(error)) from error

    def _make_folders(self, sftp: Any, folder: str) -> None:
        try:
            sftp.stat(folder)
        except FileNotFoundError:
            if posixpath.dirname(folder) == folder:  # A server without a root directory.
                raise
            self._make_folders(sftp, posixpath.dirname(folder))
            with contextlib.suppress(OSError):  # Another thread was first; otherwise the write fails.
                sftp.mkdir(folder)

    def _write(self, sftp: Any, path: str, body: Body) -> float:
        """Writes and checks the partial file; returns its modification time, by the server's clock."""
        with sftp.open(path, "wb") as stream:
            stream.set_pipelined(True)
            for chunk in body.chunks(_CHUNK_BYTES):
                stream.write(chunk)
        found = sftp.stat(path)
        if found.st_size != body.digest.size:
            raise BytesCorruptError(
                f"{path} has {found.st_size} bytes on {self._host}, expected {body.digest.size}"
            )
        if found.st_size <= self._read_back_bytes:
            with sftp.open(path, "rb") as stream:
                sha256 = hashlib.sha256(stream.read()).hexdigest()
            if sha256 != body.digest.sha256:
                raise BytesCorruptError(
                    f"{path} has SHA-256 {sha256} on {self._host}, expected {body.digest.sha256}"
                )
        return float(found.st_mtime or 0)

    def _rename_new(self, sftp: Any, partial: str, target: str) -> None:
        """Renames where the target is free.

        SSH_FXP_RENAME should refuse an existing target (draft-ietf-secsh-filexfer-02, 6.5), with an error
        code that may mean anything.
        """
        if self._exists(sftp, target):
            raise RemoteExistsError(f"{target} exists on {self._host}")
        try:
            sftp.rename(partial, target)
        except OSError as error:
            if error.errno in _CAUSE_IS_KNOWN or not self._exists(sftp, target):
                raise
            raise RemoteExistsError(f"{target} exists on {self._host}") from error

    @contextlib.contextmanager
    def _claimed(self, sftp: Any, target: str, identifier: str, now: float) -> Iterator[None]:
        """Holds the claim on a target, which excludes other create-only puts; waits two seconds for it.

        A claim that an earlier attempt of the same entry left is taken over; one that is an hour old is
        removed.

        Raises:
            TransientStoreError: Another writer still has it.
        """
        folder, leaf = posixpath.split(target)
        claim = posixpath.join(folder, CLAIM_PREFIX + name_key(leaf))
        for _ in range(_CLAIM_TRIES):
            try:
                self._create_exclusively(sftp, claim, identifier.encode())
                break
            except OSError as error:
                if error.errno in _CAUSE_IS_KNOWN:
                    raise
                refusal = error
            with contextlib.suppress(FileNotFoundError):  # Removed meanwhile.
                with sftp.open(claim, "rb") as stream:
                    if stream.read(1 + len(identifier)) == identifier.encode():
                        break
                if now - (sftp.lstat(claim).st_mtime or now) > _ABANDONED_SECONDS:
                    sftp.remove(claim)
            time.sleep(_CLAIM_POLL_SECONDS)
        else:
            raise TransientStoreError(f"could not claim {target} on {self._host}: {refusal}")
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                sftp.remove(claim)

    def _create_exclusively(self, sftp: Any, path: str, content: bytes) -> None:
        """Creates a small file.

        Raises:
            FileExistsError: The path exists.
        """
        try:
            stream = sftp.open(path, "wx")
        except OSError as error:
            if error.errno in _CAUSE_IS_KNOWN or not self._exists(sftp, path):
                raise
            raise FileExistsError(f"{path} exists on {self._host}") from error
        with stream:
            stream.write(content)

    def _sweep(self, sftp: Any, folder: str, now: float) -> None:
        """Removes what killed writers left in a folder, once per folder."""
        if folder in self._swept:
            return
        self._swept.add(folder)
        with contextlib.suppress(OSError):
            for item in sftp.listdir_attr(folder):
                is_ours = item.filename.startswith((PARTIAL_PREFIX, CLAIM_PREFIX))
                if is_ours and now - (item.st_mtime or now) > _ABANDONED_SECONDS:
                    with contextlib.suppress(OSError):  # Gone meanwhile, or another user's.
                        sftp.remove(posixpath.join(folder, item.filename))

    @staticmethod
    def _exists(sftp: Any, path: str) -> bool:
        try:
            sftp.lstat(path)
        except FileNotFoundError:
            return False
        return True

    def _walk(self, sftp: Any, folder: str, prefix: str) -> Iterator[tuple[str, Any]]:
        try:
            items = sftp.listdir_attr(posixpath.join(self._root, folder))
        except FileNotFoundError:
            return
        for item in items:
            name = posixpath.join(folder, item.filename)
            if stat.S_ISDIR(item.st_mode):
                if f"{name}/".startswith(prefix) or prefix.startswith(f"{name}/"):
                    yield from self._walk(sftp, name, prefix)
            elif (
                stat.S_ISREG(item.st_mode)
                and name.startswith(prefix)
                and not item.filename.startswith((PARTIAL_PREFIX, CLAIM_PREFIX))
            ):
                yield name, item


def _describe(name: str, found: Any) -> RemoteObject:
    # Not every server says when a file was changed.
    version = None if found.st_mtime is None else f"{found.st_mtime}-{found.st_size}"
    return RemoteObject(name, found.st_size, version=version)


def open_at(location: StoreLocation, **options: Any) -> SftpStore:
    """Returns the folder on the server of a URI.

    Raises:
        ValueError: It names no host.
    """
    if not location.host:
        raise ValueError("an SFTP store needs a host: sftp://user@host/folder")
    if location.port is not None:
        options["port"] = location.port
    return SftpStore(location.host, location.path, username=location.username, **options)
