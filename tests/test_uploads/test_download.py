"""A file back from a store."""

import contextlib
import ctypes
import errno
import hashlib
import os
import signal
import subprocess
import sys
import zlib

import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends

from tests.servers.failing_disk import FailingDisk
from tests.servers.fault_proxy import Answer, Reset, Truncate
from tests.servers.s3_servers import BUCKET
from tests.servers.stores import MemoryStore
from uploads import LocalStore, RetryPolicy, download_file, open_store
from uploads.disk import rename_new
from uploads.errors import BytesCorruptError, RemoteNotFoundError, TransientStoreError
from uploads.stores import Body, RemoteObject

LARGE = os.urandom(1 << 20) * 3
AT_ONCE = RetryPolicy(uniform=lambda low, high: low)


@pytest.fixture
def store(tmp_path, make_file):
    """A folder with one object, `folder/name`."""
    store = LocalStore(tmp_path / "store")
    _put(store, make_file, "folder/name", LARGE)
    return store


def _put(store, make_file, name, content):
    with Body(make_file("staged", content), "id") as body:
        store.put(name, body, overwrite=True)


def test_the_store_may_be_a_folder_or_a_uri(store, tmp_path):
    """It is given as for `UploadQueue`."""
    for number, place in enumerate((tmp_path / "store", str(tmp_path / "store"), store.uri())):
        download_file("folder/name", tmp_path / f"{number}", store=place, progress_bar=False)

        assert (tmp_path / f"{number}").read_bytes() == LARGE


def test_the_bar_has_a_true_total_and_reaches_it(store, tmp_path, capsys):
    """Progress counts bytes, ends at the size, and knows it from the start."""
    download_file("folder/name", tmp_path / "file", store=store)

    assert "3.15M/3.15M" in capsys.readouterr().err


def test_an_existing_file_is_kept_unless_asked(store, tmp_path):
    """Overwrite=False refuses before anything is fetched."""
    (tmp_path / "file").write_text("mine")

    with pytest.raises(FileExistsError, match="overwrite=True"):
        download_file("folder/name", tmp_path / "file", store=store, progress_bar=False)
    assert (tmp_path / "file").read_text() == "mine"
    download_file("folder/name", tmp_path / "file", store=store, overwrite=True, progress_bar=False)
    assert (tmp_path / "file").read_bytes() == LARGE


def test_a_broken_connection_continues_where_it_broke(proxy, moto, prefix, make_file, tmp_path):
    """After a reset in the middle, only the rest is requested."""
    _put(open_store(moto.uri(prefix)), make_file, "a", LARGE)
    proxy.fail_first(1, Truncate(1_500_000), method="GET", part="/a")

    download_file(
        "a",
        tmp_path / "file",
        store=open_store(moto.at(proxy.url).uri(prefix)),
        progress_bar=False,
        policy=AT_ONCE,
    )

    ranges = [request.headers.get("Range") for request in proxy.seen if request.method == "GET"]
    assert (tmp_path / "file").read_bytes() == LARGE
    assert ranges[0] is None
    assert ranges[1] is not None
    assert int(ranges[1].removeprefix("bytes=").removesuffix("-")) > 0


def test_a_large_object_comes_over_several_connections(proxy, moto, prefix, make_file, tmp_path):
    """Each range continues where it broke, and the CRC-32 of the whole follows from the ranges."""
    content = os.urandom(1 << 20) * 33
    _put(open_store(moto.uri(prefix)), make_file, "a", content)
    proxy.fail_first(1, Truncate(1_500_000), method="GET", part="/a")

    store = open_store(moto.at(proxy.url).uri(prefix))
    download_file("a", tmp_path / "file", store=store, progress_bar=False, policy=AT_ONCE)

    ranges = {request.headers.get("Range") for request in proxy.seen if request.method == "GET"}
    whole = {"bytes=0-16777215", "bytes=16777216-33554431", "bytes=33554432-34603007"}
    assert (tmp_path / "file").read_bytes() == content
    assert len(ranges) == 4
    assert whole < ranges


class StoreOfRanges(MemoryStore):
    """Has versions, and gives ranges as a function says."""

    def __init__(self, content, give):
        super().__init__()
        self.objects["a"], self.give = content, give

    def head(self, name):
        return RemoteObject(name, len(self.objects[name]), version="1", noted_crc32=zlib.crc32(b""))

    def get_range(self, name, offset, size, version):
        yield self.give(self.objects[name][offset : offset + size], offset)


def _ignore(*_):
    raise NotImplementedError


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda data, offset: data, "has CRC-32"),
        (_ignore, "has CRC-32"),
        (lambda data, offset: data[offset > 0 :], "expected 1048576"),
        (lambda data, offset: data + b"more", "expected 16777216"),
    ],
    ids=["ranges", "ignored", "short", "long"],
)
def test_ranges_are_verified(tmp_path, give, message):
    """Each range has its length, and together they have the CRC-32; without ranges, the whole has it."""
    with pytest.raises(BytesCorruptError, match=message):
        download_file("a", tmp_path / "file", store=StoreOfRanges(bytes(17 << 20), give), progress_bar=False)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", [Answer(503, "SlowDown"), Reset()], ids=["503", "reset"])
def test_a_store_that_never_answers_is_given_up(proxy, moto, prefix, make_file, tmp_path, fault):
    """Eight tries without a byte are enough, and no half file stays."""
    _put(open_store(moto.uri(prefix)), make_file, "a", LARGE)
    proxy.fail_first(1000, fault, method="GET")

    with pytest.raises(TransientStoreError):
        download_file(
            "a",
            tmp_path / "out/file",
            store=open_store(moto.at(proxy.url).uri(prefix)),
            progress_bar=False,
            policy=AT_ONCE,
        )

    assert proxy.count("GET") == 8
    assert list((tmp_path / "out").iterdir()) == []


class StoreThatLies(MemoryStore):
    """Says another digest than its bytes have."""

    def head(self, name):
        return RemoteObject(name, 4, sha256=hashlib.sha256(b"true").hexdigest()) if name == "a" else None

    def get(self, name, offset=0, version=None):
        yield b"lies"[offset:]


def test_a_download_is_verified(tmp_path):
    """Bytes that differ from the uploaded ones aren't kept."""
    with pytest.raises(BytesCorruptError, match="has SHA-256"):
        download_file("a", tmp_path / "file", store=StoreThatLies(), progress_bar=False)

    assert not (tmp_path / "file").exists()


class StoreThatBreaks(MemoryStore):
    """Breaks each connection after so many bytes, and sees how often it is asked."""

    def __init__(self, content, piece_bytes):
        super().__init__()
        self.content, self.piece_bytes, self.asked = content, piece_bytes, 0

    def head(self, name):
        return RemoteObject(name, len(self.content)) if name == "a" else None

    def get(self, name, offset=0, version=None):
        self.asked += 1
        yield self.content[offset : offset + self.piece_bytes]
        if offset + self.piece_bytes < len(self.content):
            raise TransientStoreError("broken")


def test_a_connection_that_breaks_again_and_again_with_progress_is_not_given_up(tmp_path):
    """The eight tries count only those without a byte."""
    store, waits = StoreThatBreaks(b"0123456789abcdef", 1), []
    policy = RetryPolicy(uniform=lambda low, high: waits.append(high) or low)

    path = download_file("a", tmp_path / "file", store=store, policy=policy)

    assert path.read_bytes() == store.content
    assert store.asked == len(store.content)
    assert waits == [policy.first_seconds] * 15


@pytest.mark.parametrize("there", [b"sho", b"longer"])
def test_a_size_that_is_not_the_objects_is_an_error(tmp_path, there):
    """Even without a broken connection it is an error, and the download doesn't repeat forever."""

    class Other(StoreThatBreaks):
        def get(self, name, offset=0, version=None):
            self.asked += 1
            yield there[offset:]

    store = Other(b"whole", 100)

    with pytest.raises(BytesCorruptError, match=f"has {len(there)} bytes, expected 5"):
        download_file("a", tmp_path / "out/file", store=store)

    assert store.asked <= 2
    assert list((tmp_path / "out").iterdir()) == []


def test_a_small_download_shows_no_bar(store, make_file, tmp_path, capsys):
    """It ends before anyone reads a bar; a download of a MiB has one."""
    for size in (0, (1 << 20) - 1, 1 << 20):
        _put(store, make_file, f"{size}", bytes(size))
        download_file(f"{size}", tmp_path / f"{size}", store=store)

        assert (tmp_path / f"{size}").stat().st_size == size
        assert bool(capsys.readouterr().err) is (size == 1 << 20)


@pytest.mark.parametrize(("count", "is_followed"), [(9, True), (10, False)])
def test_a_chain_of_pointers_has_an_end(store, make_file, tmp_path, count, is_followed):
    """Up to nine pointers lead to the object; the error for more names them."""
    for number in range(count):
        target = f"{number + 1}.symlink" if number + 1 < count else "folder/name"
        _put(store, make_file, f"{number}.symlink", target.encode())

    if is_followed:
        download_file("0", tmp_path / "file", store=store, progress_bar=False)
        assert (tmp_path / "file").read_bytes() == LARGE
    else:
        with pytest.raises(RemoteNotFoundError, match=r"a chain of 10: 0 → 1\.symlink"):
            download_file("0", tmp_path / "file", store=store, progress_bar=False)


class StoreInPieces(MemoryStore):
    """Sends what it has byte by byte, and counts them."""

    sent = 0

    def get(self, name, offset=0, version=None):
        for byte in self.objects[name][offset:]:
            self.sent += 1
            yield bytes([byte])


def test_a_pointer_is_read_to_its_end_and_not_much_further(tmp_path):
    """A pointer may come in pieces; a large file isn't a pointer and isn't read whole."""
    store = StoreInPieces()
    store.objects = {
        "a": b"content",
        "good.symlink": b"a",
        "long.symlink": f"{'x' * 900}/a".encode(),
        "large.symlink": b"a" * 100_000,
    }

    for name in ("good", "long"):
        assert download_file(name, tmp_path / name, store=store).read_bytes() == b"content"
    store.sent = 0
    with pytest.raises(RemoteNotFoundError, match=r"'large\.symlink' does not contain a valid name"):
        download_file("large", tmp_path / "large", store=store)

    assert store.sent < 10_000


def test_composers_pointers_are_followed(store, make_file, tmp_path):
    """You give the name without the ending; pointers may name others with or without it."""
    _put(store, make_file, "latest.symlink", b"folder/name\n")
    _put(store, make_file, "newest.symlink", b"latest")
    _put(store, make_file, "last.symlink", b"latest.symlink")

    for name in ("latest", "newest", "last"):
        download_file(name, tmp_path / name, store=store, progress_bar=False)

        assert (tmp_path / name).read_bytes() == LARGE


@pytest.mark.parametrize("content", [b"folder/name", b"of no object", b"\xff" * 5000, b""])
def test_a_file_with_the_ending_of_pointers_comes_back_as_it_was_put(
    store, make_queue, make_file, tmp_path, content
):
    """Asked for by its own name, it returns its own bytes, even if they name another object."""
    handle = make_queue(store).submit(make_file("mine", content), "notes.symlink")
    handle.result(120)

    path = download_file(handle.uri, tmp_path / "back", progress_bar=False)

    assert path.read_bytes() == content


def test_a_pointer_is_followed_from_inside_its_folder(store, make_file, tmp_path):
    """A pointer's name may begin with folders that the store's prefix already has."""
    _put(store, make_file, "folder/latest.symlink", b"run/folder/name")

    for uri in (store.uri("folder/latest"), LocalStore(tmp_path / "store/folder").uri("latest")):
        path = download_file(uri, tmp_path / "file", overwrite=True, progress_bar=False)

        assert path.read_bytes() == LARGE


def test_pointers_that_lead_nowhere_are_named(store, make_file, tmp_path):
    """A circle, a dangling pointer and a missing object are errors, not hangs."""
    _put(store, make_file, "a.symlink", b"b.symlink")
    _put(store, make_file, "b.symlink", b"a.symlink")
    _put(store, make_file, "dangling.symlink", b"gone")

    for name, text in (("a", "circle"), ("dangling", "gone"), ("missing", "missing")):
        with pytest.raises(RemoteNotFoundError, match=text):
            download_file(name, tmp_path / "file", store=store, progress_bar=False)


def test_a_name_without_a_store_must_be_a_uri(tmp_path):
    """The message says what to add."""
    with pytest.raises(ValueError, match="store="):
        download_file("name", tmp_path / "file")


def test_an_object_of_parts_is_compared_with_the_checksum_of_the_store(
    moto, prefix, make_queue, make_file, tmp_path
):
    """Its metadata have no SHA-256; the store's CRC-32 detects rotten bytes."""
    content = LARGE * 4
    queue = make_queue(moto.uri(prefix) + f"&part_bytes={5 << 20}")
    handle = queue.submit(make_file(content=content), "name")
    handle.result(120)

    assert download_file(handle.uri, tmp_path / "good", progress_bar=False).read_bytes() == content

    stored = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].get_object(BUCKET, f"{prefix}/name")
    stored._value_buffer.seek(1000)
    stored._value_buffer.write(b"rot")
    with pytest.raises(BytesCorruptError, match="has CRC-32"):
        download_file(handle.uri, tmp_path / "bad", progress_bar=False)
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("kind", ["link", "other owner"])
def test_a_partial_file_that_others_share_is_left_alone(store, tmp_path, kind):
    """Nobody else's file is truncated, and nobody else keeps the file that is downloaded."""
    shared, partial = tmp_path / "shared", tmp_path / "out/.file.0.partial"
    partial.parent.mkdir()
    shared.write_bytes(b"not ours")
    if kind == "link":
        os.link(shared, partial)
    else:
        partial.write_bytes(b"not ours")
        try:
            os.chown(partial, 12345, -1)
        except PermissionError:
            pytest.skip("only root gives files away")

    path = download_file("folder/name", tmp_path / "out/file", store=store, progress_bar=False)

    assert path.read_bytes() == LARGE
    assert path.stat().st_uid == os.geteuid()
    assert partial.read_bytes() == shared.read_bytes() == b"not ours"
    assert sorted(path.parent.iterdir()) == [partial, path]


def test_a_file_system_without_locks_keeps_no_partial_file(store, tmp_path, monkeypatch):
    """The download gets a unique name there, and leaves only its file."""

    def refuse(descriptor):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("uploads.download.try_lock", refuse)

    path = download_file("folder/name", tmp_path / "out/file", store=store, progress_bar=False)

    assert path.read_bytes() == LARGE
    assert list(path.parent.iterdir()) == [path]


def test_a_long_name_is_counted_in_bytes(store, tmp_path):
    """Sixty emoji are 240 bytes, so the partial file has a shorter name."""
    path = download_file(
        "folder/name", tmp_path / "out" / ("\N{ROCKET}" * 60), store=store, progress_bar=False
    )

    assert path.read_bytes() == LARGE
    assert list((tmp_path / "out").iterdir()) == [path]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_destination_that_appears_meanwhile_is_kept_unless_asked(tmp_path, overwrite):
    """The second of two writers gets an error, and nothing else stays."""
    target = tmp_path / "out/file"

    class StoreThatIsSlow(MemoryStore):
        def head(self, name):
            return RemoteObject(name, 5)

        def get(self, name, offset=0, version=None):
            target.write_bytes(b"mine")
            yield b"bytes"

    with contextlib.nullcontext() if overwrite else pytest.raises(FileExistsError, match="overwrite=True"):
        download_file("a", target, store=StoreThatIsSlow(), overwrite=overwrite, progress_bar=False)

    assert target.read_bytes() == (b"bytes" if overwrite else b"mine")
    assert [path.name for path in target.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("can_rename", [True, False], ids=["rename", "neither"])
def test_a_file_system_without_hard_links_keeps_the_file(store, tmp_path, monkeypatch, can_rename):
    """On FAT, exFAT and FUSE a rename that replaces nothing names the file."""

    def link(*_, **__):
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", link)
    if not can_rename:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: None)

    download_file("folder/name", tmp_path / "out/file", store=store, progress_bar=False)
    with pytest.raises(FileExistsError):
        rename_new(str(tmp_path / "staged"), str(tmp_path / "out/file"))

    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]
    assert (tmp_path / "out/file").read_bytes() == LARGE


KILLED = """
import sys
from uploads import download_file
from uploads.stores import RemoteObject
class Half:
    def head(self, name):
        return RemoteObject(name, 8)
    def get(self, name, offset=0, version=None):
        yield b"half"
        print("half", flush=True)
        sys.stdin.read()
    def put(self): pass
download_file("a", sys.argv[1], store=Half(), progress_bar=False)
"""


def test_leftovers_of_killed_downloads_do_not_accumulate(store, tmp_path):
    """The next download to the same file reuses the leftover of a killed one, and not that of a living one."""
    (tmp_path / "out").mkdir()
    arguments = [sys.executable, "-c", KILLED, tmp_path / "out/file"]
    with contextlib.ExitStack() as running:
        killed, living = (
            running.enter_context(subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for _ in range(2)
        )
        for child in (killed, living):
            child.stdout.readline()
        killed.send_signal(signal.SIGTERM)
        killed.wait(60)
        left = len(list((tmp_path / "out").iterdir()))

        download_file("folder/name", tmp_path / "out/file", store=store, progress_bar=False)

        names = [path.name for path in (tmp_path / "out").iterdir()]
        living.kill()

    assert left == 2
    assert len(names) == 2
    assert (tmp_path / "out/file").read_bytes() == LARGE


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_each_call_of_a_download_may_fail(tmp_path, monkeypatch, code):
    """A failing disk raises an error and leaves neither a destination nor a partial file."""
    store = MemoryStore()
    store.objects["a"] = b"content"
    (tmp_path / "out").mkdir()
    disk = FailingDisk(tmp_path / "out", code)
    raised = 0
    for number in range(1, 100):
        target = tmp_path / f"out/file-{number}"
        with disk.failing(monkeypatch, number):
            try:
                download_file("a", target, store=store, progress_bar=False)
            except OSError as error:
                raised += 1
                assert error.errno == code  # noqa: PT017  # it need not be raised
                assert not target.exists()
            else:
                assert target.read_bytes() == b"content"
        if not disk.failed:
            break
    target.unlink()

    assert not disk.failed
    assert raised
    left = [path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith("file-")]
    assert left == []
