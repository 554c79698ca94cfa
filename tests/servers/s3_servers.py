"""Two independent S3 servers on loopback: moto (conditional puts, multipart) and `rclone serve s3` (checks MD5, ignores If-None-Match)."""

import contextlib
import re
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
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""The variables by which boto3 finds the credentials of the servers, and asks for no others."""
BUCKET = "bucket"
LIMIT_SECONDS = 120
_ADDRESS = re.compile(r"\[(http://127\.0\.0\.1:\d+)/\]")


@attrs.frozen
class S3Server:
    """Where a server listens, and how to write that in a store's URI."""

    endpoint_url: str
    options: str = ""
    pid: int | None = None  # Of its process, where it has one.

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

    def empty(self) -> None:
        """Deletes all objects."""
        client = self.client()
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
            for item in page.get("Contents", ()):
                client.delete_object(Bucket=BUCKET, Key=item["Key"])

    def open_uploads(self, prefix: str) -> int:
        """Returns how many multipart uploads are not completed under the prefix."""
        client = self.client()
        try:
            found = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        except client.exceptions.NoSuchUpload:  # rclone's way to say none
            return 0
        return sum(upload["Key"].startswith(prefix + "/") for upload in found)


@contextlib.contextmanager
def moto():
    """Moto in a thread, with the bucket.

    Its create-only puts are not atomic: two at once may both succeed.
    """
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    found = S3Server("http://{}:{}".format(*server.get_host_and_port()))
    found.client().create_bucket(Bucket=BUCKET)
    try:
        yield found
    finally:
        server.stop()


MOTO = """
import sys
from tests.servers import s3_servers
with s3_servers.moto() as server:
    print(server.endpoint_url, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def moto_process():
    """Moto in a process, with the bucket, so that its processor time is not the client's."""
    command = [sys.executable, "-c", MOTO]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null) as process:
        yield S3Server(process.stdout.readline().decode().strip(), pid=process.pid)
        process.stdin.close()


@contextlib.contextmanager
def rclone(folder: Path):
    """Rclone in a process, serving this folder, with the bucket."""
    (folder / BUCKET).mkdir(parents=True)
    program = Path(sys.executable).with_name("rclone")
    said = folder.with_name(f"{folder.name}.said")
    command = [
        str(program) if program.exists() else shutil.which("rclone"),
        "serve",
        "s3",
        str(folder),
        "--addr",
        "127.0.0.1:0",  # The system chooses a port, and rclone says which.
        "--auth-key",
        f"{ACCESS_KEY},{SECRET_KEY}",
    ]
    with said.open("wb") as stream:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stream)
    try:
        wait_until(lambda: _ADDRESS.search(said.read_text()), process)
        url = _ADDRESS.search(said.read_text())[1]
        yield S3Server(url, "&checksum=md5", process.pid)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def refusing_port():
    """A port that refuses connections and that no other process can take: bound, but not listened on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def wait_until(is_so, process: subprocess.Popen) -> None:
    """Waits until the condition holds; raises if the process has ended, or after a long time."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not is_so():
        if process.poll() is not None:
            raise ChildProcessError(f"{process.args[0]} ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{process.args[0]} was not ready in {LIMIT_SECONDS} s")
        time.sleep(0.02)
