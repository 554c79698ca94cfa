"""`sftp://`: fsspec's file system of SFTP, with timeouts and checked host keys."""

import posixpath
import stat
from pathlib import Path
from typing import Any

from uploads.errors import StoreParkedError
from uploads.messages import needs_package
from uploads.redaction import redact

from .file_system import FileSystemStore
from .uri import StoreLocation

with needs_package("sftp://", "paramiko", "fsspec"):
    import paramiko
    from fsspec.implementations.sftp import SFTPFileSystem

__all__ = ["SshFileSystem", "open_at"]

_SSH_PORT = 22


class SshFileSystem(SFTPFileSystem):  # type: ignore[misc]  # fsspec has no types
    """fsspec's class with checked host keys and timeouts, and without following links."""

    def _connect(self) -> None:
        options = dict(self.ssh_kwargs)
        known_hosts, seconds = options.pop("known_hosts"), options["timeout"]
        self.client = paramiko.SSHClient()
        try:
            self.client.load_system_host_keys()
            if known_hosts:
                self.client.load_host_keys(known_hosts)
            if options["key_filename"]:
                Path(options["key_filename"]).open("rb").close()
        # paramiko raises many kinds of errors for missing, unreadable and invalid files.
        except Exception as error:
            raise StoreParkedError(
                redact(f"could not read known_hosts or key_filename for {self.host}: {error}")
            ) from error
        try:
            self.client.connect(self.host, auth_timeout=seconds, banner_timeout=seconds, **options)
        except paramiko.SSHException as error:
            is_refused = isinstance(error, paramiko.AuthenticationException | paramiko.BadHostKeyException)
            if not is_refused and "not found in known_hosts" not in str(error):
                raise
            advice = "Check user, key and known_hosts."
            raise StoreParkedError(redact(f"{self.host}: {error}. {advice}")) from error
        session: Any = self.client.open_sftp()
        session.get_channel().settimeout(seconds)
        self.ftp = session

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        stream = self.ftp.open(path, mode)
        stream.set_pipelined("w" in mode)
        return stream

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return _describe(path, self.ftp.lstat(path))

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[dict[str, Any]]:
        return [_describe(item.filename, item) for item in self.ftp.listdir_attr(path)]

    def rm_file(self, path: str) -> None:
        self.ftp.remove(path)

    def rename_new(self, old: str, new: str) -> None:
        """Renames unless the target exists, as RENAME should (draft-ietf-secsh-filexfer-02, 6.5)."""
        self.ftp.rename(old, new)


def _describe(name: str, found: Any) -> dict[str, Any]:
    """Describes a path as fsspec does; the time is None if the server has none."""
    kind = {stat.S_IFDIR: "directory", stat.S_IFREG: "file"}.get(stat.S_IFMT(found.st_mode), "other")
    return {"name": name, "size": found.st_size, "type": kind, "mtime": found.st_mtime}


def open_at(
    location: StoreLocation,
    *,
    port: int | str = _SSH_PORT,
    password: str | None = None,
    key_filename: str | None = None,
    known_hosts: str | None = None,
    timeout_seconds: float | str = 60.0,
    **options: Any,
) -> FileSystemStore:
    """Returns the folder of an `sftp://` URI.

    Args:
        location: The URI.
        port: Port of its sshd, if the URI has none.
        password: For servers that accept neither keys nor an agent. Never written to disk.
        key_filename: A private key.
        known_hosts: A file of host keys, in addition to `~/.ssh/known_hosts`; an unknown host is refused.
        timeout_seconds: For a connection and for each answer.
        options: `read_back_bytes` and `create_only` of `FileSystemStore`.

    Raises:
        ValueError: It names no host.
    """
    if not location.host:
        raise ValueError("an SFTP store needs a host: sftp://user@host/folder")
    if location.port is None and int(port) != _SSH_PORT:
        location = StoreLocation(location.scheme, f"{location.authority}:{port}", location.quoted_path)
    arguments = {
        "host": location.host,
        "port": location.port or _SSH_PORT,
        "username": location.username,
        "password": password,
        "key_filename": key_filename,
        "known_hosts": known_hosts,
        "timeout": float(timeout_seconds),
    }
    files = [Path(path).expanduser() for path in ("~/.ssh/known_hosts", known_hosts, key_filename) if path]
    return FileSystemStore(
        location,
        SshFileSystem,
        arguments,
        {"key_filename": key_filename, "known_hosts": known_hosts},
        root=posixpath.normpath(location.path or "/"),
        credential_files=tuple(files),
        **options,
    )
