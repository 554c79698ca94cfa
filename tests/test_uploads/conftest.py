"""Servers, proxies and queues for the tests of uploads."""

import os
import tempfile
import threading
from pathlib import Path

import pytest

from tests.servers import s3_servers, sshd
from uploads import RetryPolicy, Timeouts, UploadQueue, open_store

LIMIT_SECONDS = 120
SOON = RetryPolicy(first_seconds=0.01, cap_seconds=0.05)


@pytest.fixture(scope="session")
def _home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _credentials(_home):
    """Gives each test its own credentials: tests of other folders that run in this process have theirs."""
    home = _home
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_servers.ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(home / "credentials"))
        patch.setenv("AWS_CONFIG_FILE", str(home / "config"))
        patch.setenv("UPLOADS_HOME", str(home / "uploads"))
        yield


@pytest.fixture(scope="session")
def rclone(tmp_path_factory):
    """A server that checks MD5 and ignores If-None-Match."""
    with s3_servers.rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(params=["moto", "rclone"])
def s3(request):
    """Each of the two servers."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def sshd_login(tmp_path_factory):
    """The login for a real sshd."""
    if sshd.program() is None:
        pytest.skip("sshd is not installed")
    with sshd.sshd(tmp_path_factory.mktemp("sshd")) as login:
        yield login


@pytest.fixture
def make_file(tmp_path):
    """Creates files in the test's folder."""

    def make(name="file.bin", content=b"content"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    return make


@pytest.fixture
def other_disk(tmp_path):
    """A folder on another file system than the spool's; without one, the test is skipped."""
    here = tmp_path.stat().st_dev
    for place in (Path("/dev/shm"), Path("/var/tmp"), Path.cwd()):  # noqa: S108  # those of the system
        if os.access(place, os.W_OK) and place.stat().st_dev != here:
            with tempfile.TemporaryDirectory(dir=place) as folder:
                yield Path(folder)
            return
    pytest.skip("there is one disk only")


@pytest.fixture
def make_queue(tmp_path):
    """Creates queues with threads and short delays, and closes them.

    After the test none of their threads is left.
    """
    queues = []

    def make(store=None, **options):
        store = tmp_path / "store" if store is None else store
        store = open_store(store) if isinstance(store, str) else store
        options = {
            "spool": tmp_path / "spool",
            "isolation": "threads",
            "policy": SOON,
            "free_bytes": 0,
            "timeouts": Timeouts(give_back_seconds=LIMIT_SECONDS),
            **options,
        }
        queues.append(UploadQueue(store, **options))
        return queues[-1]

    yield make
    for queue in queues:
        queue._raise_errors = False
        queue.close(timeout_seconds=0)
        for thread in (*queue._drainer._threads, queue._flusher._thread):
            if thread is not None:
                thread.join(LIMIT_SECONDS)


@pytest.fixture
def gate(make_queue):
    """An event that stores wait for; set when the test ends, before the queues are closed."""
    gate = threading.Event()
    yield gate
    gate.set()
