"""Spreads tests over processes: each file stays in one process, and the longest files start first.

Imports, servers and a module's fixtures are then paid for once, not in each process. Files that
share more than that name an `xdist_group`.
"""

import functools
import gc
import os
import re
import shutil
import signal
import tempfile
import uuid
from pathlib import Path

import pytest
from botocore.loaders import JSONFileLoader

from tests.effort import IS_QUICK, LONGEST, is_quick
from tests.servers import s3_servers
from tests.servers.fault_proxy import FaultProxy
from tests.servers.fork_server import ForkServer

ROOT = Path(__file__).parents[1]
GPU_TESTS = ROOT / "tests/gpu"
MEMORY = Path("/dev/shm")  # noqa: S108  # the system's
ROOM_BYTES = 8 << 30
OUR_PACKAGES = {"destinations", "events", "uploads"}

# A shell ignores Ctrl-C in its background jobs, and all children of tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Hides GPUs from all tests except a run of `tests/gpu` alone, and makes the tests' folders in memory.

    A process that has looked at a GPU cannot be forked into ranks that use torch.cuda, and ranks of tests
    would share one GPU. Children inherit both settings. A run flushes its files some ten times, which takes
    five times as long on a disk. TMPDIR overrides the folder, and so does a lack of room.
    """
    paths = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    if not all(path.is_relative_to(GPU_TESTS) for path in paths):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not hasattr(config, "workerinput") and "TMPDIR" not in os.environ and _room_in_memory() >= ROOM_BYTES:
        os.environ["TMPDIR"] = str(MEMORY)
        # It is asked for once.
        tempfile.tempdir = None


def _room_in_memory():
    """Returns how many bytes of files fit in memory; 0 without such a folder, or one without programs."""
    try:
        found = re.search(
            r"^MemAvailable: *(\d+) kB$", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE
        )
        room = min(shutil.disk_usage(MEMORY).free, 1024 * int(found[1]))
        is_usable = os.access(MEMORY, os.W_OK) and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
    except (OSError, TypeError):
        return 0
    return room if is_usable else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Hands out whole files and groups, in the order in which they were collected."""
    from xdist.scheduler import LoadGroupScheduling

    class ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid):
            scope = super()._split_scope(nodeid)
            return scope.partition("::")[0] if scope == nodeid else scope

    # pytest-xdist would otherwise begin with the files that have the most tests, which are not the longest.
    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_ignore_collect(collection_path):
    """Leaves tests that need more than this process out of `make quick`."""
    is_tests = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return True if IS_QUICK and is_tests and not is_quick(collection_path) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keeps shared objects out of garbage collection, which would look through a million of them."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


def pytest_collection_modifyitems(config, items):
    """Starts the longest files first: idle processes would wait for one that came last."""
    if hasattr(config, "workerinput"):
        places = {ROOT / name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture
def caplog(caplog):
    """Pytest's own, for records of our packages only: others, and earlier tests' threads, log at any time."""

    def is_ours(record):
        return record.name.partition(".")[0] in OUR_PACKAGES

    caplog.handler.addFilter(is_ours)
    yield caplog
    caplog.handler.removeFilter(is_ours)


@pytest.fixture(scope="session")
def torch_server(request, testrun_uid):
    """Runs programs that need torch, in processes that don't have to import it. All test processes share one."""
    # The first optimizer of a process imports torch._dynamo, which is half of torch.
    of_torch = ("torch", "torch.monitor", "torch.distributed.launcher.api", "torch._dynamo")
    # Ours, which do nothing as they are imported, and what they import where it is used.
    ours = (
        "events.trainer.trainer",
        "destinations.run_directory.run_directory",
        "destinations.runs.run",
        "destinations.runs.commands",
    )
    others = ("boto3", "orjson", "PIL.Image", "pyarrow.csv", "pyarrow.parquet", "tqdm", "yaml")
    is_worker = hasattr(request.config, "workerinput")
    until = os.getppid() if is_worker else os.getpid()
    server = ForkServer(*of_torch, *ours, *others, name=f"torch-{testrun_uid}", until=until)
    # Some tests measure the time of a program: it begins when the server has imported everything.
    server.run("", env={})
    return server


@pytest.fixture(scope="session")
def torch_python(torch_server, tmp_path_factory):
    """A `python` that has imported torch already, with a `torchrun` beside it."""
    folder = tmp_path_factory.mktemp("bin")
    torch_server.write_commands(folder)
    return folder / "python"


@pytest.fixture(scope="session")
def moto():
    """An S3 server that supports conditional puts."""
    with s3_servers.moto() as server:
        yield server


@pytest.fixture
def proxy(moto):
    """A proxy in front of moto that misbehaves as planned."""
    proxy = FaultProxy(moto.endpoint_url)
    yield proxy
    proxy.close()


@pytest.fixture
def prefix(request):
    """A prefix in the bucket that nothing else uses, not even a repetition of this test."""
    readable = "".join(letter if letter.isalnum() else "-" for letter in request.node.name[:80])
    return f"{readable}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def s3_credentials(monkeypatch):
    """The credentials of the S3 servers, for clients in this process and in its children."""
    for name, value in s3_servers.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session", autouse=True)
def _botocore_parses_once():
    """Parses botocore's S3 model once: each of some hundred stores has its own session, which takes 0.1 s."""
    parsed = functools.cache(JSONFileLoader().load_file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", lambda _, path: parsed(path))
        yield
