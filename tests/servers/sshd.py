"""A real sshd on loopback, for this user, with keys of its own."""

import contextlib
import getpass
import shutil
import subprocess
from pathlib import Path

from tests.servers.s3_servers import free_port, wait_for_port


def program() -> str | None:
    """Where sshd is, if it is."""
    return shutil.which("sshd") or shutil.which("/usr/sbin/sshd")


@contextlib.contextmanager
def sshd(folder: Path):
    """Yields what SftpStore needs to log in: host, port, user and two files."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    port = free_port()
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
        f"PidFile {folder}/pid\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\nSubsystem sftp internal-sftp\n"
    )
    kind, key, _ = (folder / "host.pub").read_text().split()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
    Path("/run/sshd").mkdir(exist_ok=True)  # Where sshd as root wants to separate privileges.
    process = subprocess.Popen(
        [program(), "-D", "-e", "-f", str(folder / "config")], stderr=subprocess.DEVNULL
    )
    try:
        wait_for_port(port)
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
