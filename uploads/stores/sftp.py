"""A folder on a machine that one can `ssh` to, through paramiko (extra `sftp`)."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import posixpath
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from uploads.errors import BytesCorrupt, RemoteExists, RemoteNotFound, StoreParked, TransientStoreError
from uploads.names import check_remote_name
from uploads.redaction import redact

from .store import RemoteObject

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .store import Body

__all__ = ["SftpStore"]

_CHUNK_BYTES = 1 << 20
_PARTIAL = ".uploads-partial-"


class _Link:
    """A connection, and how many requests are under way on it."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.sessions = 0


class SftpStore:
    """Objects are files under a folder there. A put writes beside its goal and renames.

    Before the rename the size is compared, and files up to `read_back_bytes` are read back and compared: SFTP has no checksums that servers
    offer (`check-file` is an extension that OpenSSH does not have), and what travels is vouched for by SSH itself, what is written is not.

    Every thread has a session of its own over one connection, which is made at the first request.

    Args:
        host: Its name.
        root: The folder; made when the first object is put.
        port: Of its sshd.
        username: Default: this user.
        password: Where keys and agents do not do. Never written to disk.
        key_filename: A private key.
        known_hosts: A file of host keys, besides `~/.ssh/known_hosts`; an unknown host is refused.
        timeout_seconds: For a connection and for each answer.
        read_back_bytes: Files up to this size are read back once they are written, which sends them twice; 0 for none.

    Raises:
        ImportError: paramiko is not installed.
    """

    def __init__(
        self,
        host: str,
        root: str,
        *,
        port: int = 22,
        username: str | None = None,
        password: str | None = None,
        key_filename: str | None = None,
        known_hosts: str | None = None,
        timeout_seconds: float | str = 60.0,
        read_back_bytes: int | str = 1 << 20,
    ) -> None:
        try:
            import paramiko
        except ImportError as error:
            raise ImportError(
                "a store for sftp:// must have paramiko, got none. Install it with: pip install 'training-destinations[sftp]'"
            ) from error
        self._paramiko = paramiko
        self._host = host
        self._root = posixpath.normpath(root or "/")
        self._port = port
        self._username = username
        self._password = password
        self._key_filename = key_filename
        self._known_hosts = known_hosts
        self._timeout_seconds = float(timeout_seconds)
        self._read_back_bytes = int(read_back_bytes)
        self._lock = threading.Lock()  # Guards the connection.
        self._link: _Link | None = None
        self._sessions = threading.local()

    def put(self, name: str, body: Body, *, overwrite: bool, notes: Path | None = None) -> RemoteObject:
        goal = self._path(name)
        partial = posixpath.join(posixpath.dirname(goal), _PARTIAL + body.identifier)
        with self._session(f"put {name}") as sftp:
            self._make_folders(sftp, posixpath.dirname(goal))
            try:
                self._write(sftp, partial, body)
                if overwrite:
                    sftp.posix_rename(partial, goal)
                else:
                    self._rename_create_only(sftp, partial, goal)
            finally:
                with contextlib.suppress(OSError):
                    sftp.remove(partial)
        return RemoteObject(name, body.digest.size, body.identifier, body.digest.sha256)

    def head(self, name: str) -> RemoteObject | None:
        try:
            with self._session(f"head {name}") as sftp:
                found = sftp.lstat(self._path(name))
        except RemoteNotFound:
            return None
        return _describe(name, found) if stat.S_ISREG(found.st_mode) else None

    def get(self, name: str, offset: int = 0, version: str | None = None) -> Iterator[bytes]:
        with self._session(f"get {name}") as sftp, sftp.open(self._path(name), "rb") as stream:
            if version is not None and _describe(name, stream.stat()).version != version:
                raise TransientStoreError(f"{self.uri(name)} must not change while it is read. Start over.")
            stream.seek(offset)
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk

    def list(self, prefix: str = "") -> Iterator[RemoteObject]:
        with self._session(f"list {prefix}") as sftp:
            found = [_describe(name, attributes) for name, attributes in self._walk(sftp, "")]
        yield from sorted(
            (item for item in found if item.name.startswith(prefix)), key=lambda item: item.name
        )

    def delete(self, name: str) -> None:
        with contextlib.suppress(RemoteNotFound), self._session(f"delete {name}") as sftp:
            sftp.remove(self._path(name))

    def uri(self, name: str = "") -> str:
        user = f"{quote(self._username)}@" if self._username else ""
        port = f":{self._port}" if self._port != 22 else ""  # noqa: PLR2004  # ssh's
        options = {"key_filename": self._key_filename, "known_hosts": self._known_hosts}
        query = "&".join(f"{key}={quote(value)}" for key, value in options.items() if value)
        host = f"[{self._host}]" if ":" in self._host else self._host
        return (
            f"sftp://{user}{host}{port}{quote(posixpath.join(self._root, name) if name else self._root)}"
            + (f"?{query}" if query else "")
        )

    def renew(self) -> None:
        """Connects anew at the next request. What other threads are sending over the old connection goes on; the last of them closes it."""
        with self._lock:
            old, self._link = self._link, None
            is_free = old is not None and old.sessions == 0
        if old is not None and is_free:
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
        except (
            Exception
        ) as error:  # Whatever a file that is missing, not readable or no list of keys makes paramiko raise.
            raise StoreParked(
                redact(f"connect to {self._host}: {error}. known_hosts and key_filename must be readable.")
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
    def _linked(self) -> Iterator[_Link]:
        """The connection, which is not closed while this lasts."""
        with self._lock:
            if self._link is None:
                self._link = _Link(self._connect())
            link = self._link
            link.sessions += 1
        try:
            yield link
        finally:
            with self._lock:
                link.sessions -= 1
                is_old = link is not self._link and link.sessions == 0
            if is_old:
                link.client.close()

    @contextlib.contextmanager
    def _session(self, what: str) -> Iterator[Any]:
        """This thread's session; a broken connection is given up, so that the next try makes a new one."""
        try:
            with self._linked() as link:
                if getattr(self._sessions, "link", None) is not link:
                    sftp = link.client.open_sftp()
                    sftp.get_channel().settimeout(self._timeout_seconds)
                    self._sessions.sftp, self._sessions.link = sftp, link
                yield self._sessions.sftp
        except FileNotFoundError as error:
            raise RemoteNotFound(f"{what}: {error}") from error
        except (self._paramiko.AuthenticationException, self._paramiko.BadHostKeyException) as error:
            raise StoreParked(redact(f"{what}: {error}. Check user, key and known_hosts.")) from error
        except self._paramiko.SSHException as error:
            self.renew()
            if "not found in known_hosts" in str(error):
                raise StoreParked(f"{what}: {error}. Add the host's key with known_hosts=….") from error
            raise TransientStoreError(redact(f"{what}: {error}")) from error
        except PermissionError as error:
            raise StoreParked(f"{what}: {error}", may_be_the_entry=True) from error
        except (OSError, EOFError) as error:
            self.renew()
            raise TransientStoreError(redact(f"{what}: {error}")) from error

    def _make_folders(self, sftp: Any, folder: str) -> None:
        try:
            sftp.stat(folder)
        except FileNotFoundError:
            if posixpath.dirname(folder) == folder:  # A server without a root: nothing to make.
                raise
            self._make_folders(sftp, posixpath.dirname(folder))
            with contextlib.suppress(OSError):  # Another thread was first; the write says if not.
                sftp.mkdir(folder)

    def _write(self, sftp: Any, path: str, body: Body) -> None:
        with sftp.open(path, "wb") as stream:
            stream.set_pipelined(True)
            for chunk in body.chunks(_CHUNK_BYTES):
                stream.write(chunk)
        size = sftp.stat(path).st_size
        if size != body.digest.size:
            raise BytesCorrupt(f"{path} must have {body.digest.size} bytes on {self._host}, got {size}")
        if size <= self._read_back_bytes:
            with sftp.open(path, "rb") as stream:
                sha256 = hashlib.sha256(stream.read()).hexdigest()
            if sha256 != body.digest.sha256:
                raise BytesCorrupt(
                    f"{path} must have SHA-256 {body.digest.sha256} on {self._host}, got {sha256}"
                )

    def _rename_create_only(self, sftp: Any, partial: str, goal: str) -> None:
        """SSH_FXP_RENAME refuses an existing goal (draft-ietf-secsh-filexfer-02, 6.5), but with a code that could mean anything."""
        try:
            sftp.rename(partial, goal)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.EACCES}:
                raise
            try:
                sftp.lstat(goal)
            except FileNotFoundError:
                raise error from None
            raise RemoteExists(f"{goal} exists on {self._host}") from error

    def _walk(self, sftp: Any, folder: str) -> Iterator[tuple[str, Any]]:
        try:
            items = sftp.listdir_attr(posixpath.join(self._root, folder))
        except FileNotFoundError:
            return
        for item in items:
            name = posixpath.join(folder, item.filename)
            if stat.S_ISDIR(item.st_mode):
                yield from self._walk(sftp, name)
            elif stat.S_ISREG(item.st_mode) and not item.filename.startswith(_PARTIAL):
                yield name, item


def _describe(name: str, found: Any) -> RemoteObject:
    return RemoteObject(name, found.st_size, version=f"{found.st_mtime}-{found.st_size}")
