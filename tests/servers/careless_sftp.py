"""An SFTP server in this process, through paramiko, that keeps fewer promises than OpenSSH's."""

import contextlib
import os
import socket
import threading
from pathlib import Path

import paramiko

_PASSWORD = "hush"


class _AnyUser(paramiko.ServerInterface):
    def check_channel_request(self, kind, chanid):
        return paramiko.OPEN_SUCCEEDED

    def check_auth_password(self, username, password):
        return paramiko.AUTH_SUCCESSFUL if password == _PASSWORD else paramiko.AUTH_FAILED

    def get_allowed_auths(self, username):
        return "password"


def _answered(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return paramiko.SFTPServer.convert_errno(error.errno)
    return paramiko.SFTP_OK


class _Handle(paramiko.SFTPHandle):
    def __init__(self, flags, stream):
        super().__init__(flags)
        self.readfile = self.writefile = stream

    def stat(self):
        return paramiko.SFTPAttributes.from_stat(os.fstat(self.readfile.fileno()))


class RenameReplaces(paramiko.SFTPServerInterface):
    """A server whose RENAME silently replaces the target."""

    def open(self, path, flags, attr):
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno)
        writable = flags & (os.O_WRONLY | os.O_RDWR)
        return _Handle(flags, os.fdopen(descriptor, "wb" if writable else "rb", buffering=0))

    def list_folder(self, path):
        try:
            items = list(os.scandir(path))
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno)
        return [
            paramiko.SFTPAttributes.from_stat(item.stat(follow_symlinks=False), item.name) for item in items
        ]

    def stat(self, path):
        try:
            return paramiko.SFTPAttributes.from_stat(Path(path).stat())
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno)

    def lstat(self, path):
        try:
            return paramiko.SFTPAttributes.from_stat(Path(path).lstat())
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno)

    def remove(self, path):
        return _answered(os.remove, path)

    def rename(self, oldpath, newpath):
        return _answered(os.replace, oldpath, newpath)

    def posix_rename(self, oldpath, newpath):
        return _answered(os.replace, oldpath, newpath)

    def mkdir(self, path, attr):
        return _answered(os.mkdir, path)


@contextlib.contextmanager
def careless_sftp(folder: Path, interface=RenameReplaces):
    """Runs a server; yields what `over_ssh` needs to log in."""
    key = paramiko.ECDSAKey.generate()
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    known_hosts = folder / "known_hosts"
    known_hosts.write_text(f"[127.0.0.1]:{port} {key.get_name()} {key.get_base64()}\n")
    transports = []

    def serve():
        with contextlib.suppress(OSError):  # Closed.
            while True:
                connection, _ = listening.accept()
                transport = paramiko.Transport(connection)
                transports.append(transport)
                transport.add_server_key(key)
                transport.set_subsystem_handler("sftp", paramiko.SFTPServer, interface)
                with contextlib.suppress(paramiko.SSHException, EOFError):
                    transport.start_server(event=threading.Event(), server=_AnyUser())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield {
            "host": "127.0.0.1",
            "port": port,
            "username": "any",
            "password": _PASSWORD,
            "known_hosts": str(known_hosts),
        }
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for transport in transports:
            transport.close()
        thread.join()
