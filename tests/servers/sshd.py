"""A real sshd on loopback, for this user, with keys of its own."""

import contextlib
import getpass
import shutil
import socket
import subprocess
from pathlib import Path

from tests.servers.s3_servers import wait_until
from uploads import open_store

_TRIES = 20


def over_ssh(folder, *, host, port, username, **options):
    """Returns the store in a folder of a server."""
    return open_store(f"sftp://{username}@{host}:{port}{folder}", **options)


def program() -> str | None:
    """Returns the path of sshd, if it is installed."""
    return shutil.which("sshd") or shutil.which("/usr/sbin/sshd")


@contextlib.contextmanager
def sshd(folder: Path):
    """Yields what `over_ssh` needs to log in: host, port, user and two files."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    Path("/run/sshd").mkdir(exist_ok=True)  # Where sshd as root wants to separate privileges.
    process, port = _start(folder)
    try:
        kind, key, _ = (folder / "host.pub").read_text().split()
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
        yield {
            "host": "127.0.0.1",
            "port": port,
            "username": getpass.getuser(),
            "key_filename": str(folder / "user"),
            "known_hosts": str(folder / "known_hosts"),
        }
    finally:
        process.terminate()
        process.wait()


def _start(folder: Path) -> tuple[subprocess.Popen, int]:
    """Starts a listening server: it can't choose a port itself; a free one may be taken before it binds."""
    for turn in range(_TRIES):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pid = folder / f"pid-{turn}"  # Written once it listens.
        (folder / "config").write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
            f"PidFile {pid}\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\nSubsystem sftp internal-sftp\n"
        )
        process = subprocess.Popen(
            [program(), "-D", "-e", "-f", str(folder / "config")], stderr=subprocess.DEVNULL
        )
        with contextlib.suppress(ChildProcessError):
            wait_until(pid.exists, process)
            return process, port
    raise ChildProcessError(f"sshd did not start in {_TRIES} tries")
