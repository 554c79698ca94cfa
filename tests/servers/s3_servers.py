"""Two independent S3 servers on loopback: moto (conditional puts, multipart) and `rclone serve s3` (checks MD5, ignores If-None-Match)."""

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import attrs
import boto3

ACCESS_KEY = "key"
SECRET_KEY = "secretsecret"
BUCKET = "bucket"


@attrs.frozen
class S3Server:
    """Where a server listens, and how to write that in a store's URI."""

    endpoint_url: str
    options: str = ""

    def uri(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}?endpoint_url={self.endpoint_url}{self.options}"

    def at(self, endpoint_url: str) -> "S3Server":
        """The same server, reached by another way."""
        return attrs.evolve(self, endpoint_url=endpoint_url)

    def client(self):
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
        )

    def objects(self, prefix: str) -> dict[str, bytes]:
        """Every object under the prefix, by its name without the prefix."""
        client = self.client()
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix + "/")
        keys = [item["Key"] for page in pages for item in page.get("Contents", ())]
        return {
            key.removeprefix(prefix + "/"): client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
            for key in keys
        }

    def open_uploads(self) -> int:
        client = self.client()
        try:
            return len(client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []))
        except client.exceptions.NoSuchUpload:  # rclone's way to say none
            return 0


@contextlib.contextmanager
def moto():
    """Moto in a thread, with the bucket."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    found = S3Server("http://{}:{}".format(*server.get_host_and_port()))
    found.client().create_bucket(Bucket=BUCKET)
    try:
        yield found
    finally:
        server.stop()


@contextlib.contextmanager
def rclone(folder: Path):
    """Rclone in a process, serving this folder, with the bucket."""
    (folder / BUCKET).mkdir(parents=True)
    program = Path(sys.executable).with_name("rclone")
    port = free_port()
    command = [
        str(program) if program.exists() else shutil.which("rclone"),
        "serve",
        "s3",
        str(folder),
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        f"{ACCESS_KEY},{SECRET_KEY}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port)
        yield S3Server(f"http://127.0.0.1:{port}", "&checksum=md5&create_only=head")
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_port(port: int) -> None:
    """Returns when somebody listens."""
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return
