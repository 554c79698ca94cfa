"""The promises of every store, and further promises of single kinds."""

import contextlib
import errno
import importlib.metadata
import inspect
import os
import pkgutil
import re
import threading
import zlib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import obstore.store
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.servers.s3_servers import refusing_port
from tests.servers.sshd import over_ssh
from tests.servers.stores import MemoryStore
from tests.waiting import open_files
from uploads import (
    LocalStore,
    StoreLocation,
    object_store_location,
    open_store,
    register_store,
)
from uploads.errors import (
    BytesCorruptError,
    InvalidRemoteNameError,
    RejectedByStoreError,
    RemoteExistsError,
    RemoteNotFoundError,
    StoreParkedError,
    TransientStoreError,
)
from uploads.stores import Body, registry, uri
from uploads.stores.cloud import CloudStore
from uploads.stores.file_system import FileSystemStore
from uploads.stores.registry import ENTRY_POINT_GROUP
from uploads.stores.uri import SCHEMES, kept_options
from uploads.testing import StoreContract

KINDS = ["local", "s3-moto", "s3-rclone", "obstore-s3", "obstore-memory", "fsspec-memory", "sftp"]


@pytest.fixture(params=KINDS)
def store(request, tmp_path, prefix):
    """A new store of each kind."""
    match request.param:
        case "local":
            yield LocalStore(tmp_path / "store")
        case "s3-moto":
            yield open_store(request.getfixturevalue("moto").uri(prefix))
        case "s3-rclone":
            yield open_store(request.getfixturevalue("rclone").uri(prefix))
        case "obstore-s3":
            yield open_store(request.getfixturevalue("moto").uri(prefix) + "&client=obstore")
        case "obstore-memory":
            yield CloudStore("gs", "bucket", prefix, part_bytes=1 << 20, backend=obstore.store.MemoryStore())
        case "fsspec-memory":
            yield open_store(f"memory://bucket/{prefix}")
        case _:
            store = over_ssh(tmp_path / "there", **request.getfixturevalue("sshd_login"))
            yield store
            store.renew()  # Closes the connection, and so ends its thread.


def _put(store, make_file, name, content, *, overwrite=True, identifier="id"):
    with Body(make_file("staged", content), identifier) as body:
        return store.put(name, body, overwrite=overwrite)


class TestEveryStore(StoreContract):
    """The contract of Store, for ours."""

    def supports_create_only(self, store):
        return not ("checksum=md5" in store.uri() or store.uri().startswith("memory://"))

    def is_opened_by_uri(self, store):
        return not store.uri().startswith("gs://")  # In the memory of this process.


class TestLocalStore:
    """Limits of a store in a folder."""

    def test_nothing_is_written_outside_the_root(self, tmp_path, make_file):
        """A link in the tree that leads outside is not followed, neither to write nor to read."""
        (tmp_path / "store").mkdir()
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside/secret").write_text("secret")
        (tmp_path / "store/link").symlink_to(tmp_path / "outside")
        (tmp_path / "store/file").symlink_to(tmp_path / "outside/secret")
        store = LocalStore(tmp_path / "store")

        with pytest.raises(RejectedByStoreError):
            _put(store, make_file, "link/new", b"x")
        with pytest.raises(RejectedByStoreError):
            list(store.get("file"))
        assert store.head("file") is None
        assert list(store.list()) == []
        _put(store, make_file, "file", b"x")

        assert sorted(path.name for path in (tmp_path / "outside").iterdir()) == ["secret"]
        assert (tmp_path / "outside/secret").read_text() == "secret"

    def test_an_object_deleted_during_a_listing_is_left_out(self, tmp_path, make_file, monkeypatch):
        """Listing during other puts and deletions returns existing objects."""
        store = LocalStore(tmp_path / "store")
        for name in ("a", "b"):
            _put(store, make_file, name, b"x")
        names = list(os.walk(store.root))
        store.delete("b")
        monkeypatch.setattr(os, "walk", lambda root: names)

        assert [found.name for found in store.list()] == ["a"]

    def test_a_pipe_in_the_folder_blocks_nothing(self, tmp_path, make_file):
        """Neither a pipe without a writer nor a folder is an object, whatever its name."""
        folder = tmp_path / "store"
        folder.mkdir()
        (folder / "inner").mkdir()
        os.mkfifo(folder / "pipe")
        os.mkfifo(folder / ".uploads-partial-left")
        os.utime(folder / ".uploads-partial-left", (1, 1))
        store, answers = LocalStore(folder), []

        def ask():
            for name in ("pipe", "inner"):
                answers.append(store.head(name))
                with pytest.raises(RemoteNotFoundError, match=f"no object '{name}'"):
                    list(store.get(name))
            _put(store, make_file, "name", b"x")
            answers.append([found.name for found in store.list()])

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(20)

        assert answers == [None, None, ["name"]]
        assert sorted(path.name for path in folder.iterdir()) == ["inner", "name", "pipe"]

    def test_no_descriptor_stays_open(self, tmp_path, make_file):
        """This covers nested folders, and existing and missing objects."""
        store = LocalStore(tmp_path / "store")
        _put(store, make_file, "a/b/c", b"x")

        for _ in range(5):
            _put(store, make_file, "a/b/c", b"x")
            assert list(store.get("a/b/c")) == [b"x"]
            assert store.head("a/b/none") is None
            for name in ("a/b", "a/b/c/d"):
                with pytest.raises((RemoteNotFoundError, RejectedByStoreError)):
                    list(store.get(name))
            store.delete("a/b/none")

        assert [path for path in open_files() if path.startswith(str(tmp_path))] == []

    def test_a_folder_is_swept_once(self, tmp_path, make_file, monkeypatch):
        """It may have many files, so later puts don't read it."""
        store, scanned, scandir = LocalStore(tmp_path / "store"), [], os.scandir
        monkeypatch.setattr(os, "scandir", lambda place: scanned.append(place) or scandir(place))

        for name in ("one", "two", "inner/one", "inner/two"):
            _put(store, make_file, name, b"x")

        assert len(scanned) == 2

    @pytest.mark.parametrize(
        ("code", "error", "message"),
        [
            (errno.ENOSPC, StoreParkedError, "folder must be writable, got No space left on device"),
            (errno.EACCES, StoreParkedError, "folder must be writable, got Permission denied"),
            (errno.EIO, TransientStoreError, "Input/output error: 'name'"),
        ],
    )
    def test_every_disk_error_has_a_meaning(self, tmp_path, make_file, monkeypatch, code, error, message):
        """A full disk delays all files; a missing permission may concern only one name."""

        def refuse(descriptor):
            raise OSError(code, os.strerror(code))

        store = LocalStore(tmp_path / "store")
        monkeypatch.setattr(os, "fsync", refuse)

        with pytest.raises(error, match=message) as raised:
            _put(store, make_file, "name", b"x")

        assert getattr(raised.value, "may_be_the_entry", None) in {None, code == errno.EACCES}
        assert list((tmp_path / "store").iterdir()) == []

    def test_create_only_works_without_hard_links(self, tmp_path, make_file, monkeypatch):
        """On FAT a rename refuses the second writer, and only the first file stays."""

        def link(*_args, **_options):
            raise OSError(errno.EPERM, "Operation not permitted")

        store = LocalStore(tmp_path / "store")
        monkeypatch.setattr(os, "link", link)
        _put(store, make_file, "name", b"x", overwrite=False)

        with pytest.raises(RemoteExistsError):
            _put(store, make_file, "name", b"y", overwrite=False)

        assert [path.name for path in (tmp_path / "store").iterdir()] == ["name"]

    def test_the_store_checks_names_too(self, tmp_path, make_file):
        """Direct calls of a store can't leave its root either."""
        for name in ("../x", "/etc/x", "a//b", "."):
            with pytest.raises(InvalidRemoteNameError):
                _put(LocalStore(tmp_path / "store"), make_file, name, b"x")

    def test_a_name_too_long_for_the_file_system_fails_alone(self, tmp_path, make_file):
        """A part of 1,024 bytes is a valid name, but not on ext4."""
        with pytest.raises(RejectedByStoreError, match="File name too long"):
            _put(LocalStore(tmp_path / "store"), make_file, "x" * 1024, b"x")


class TestSftpStore:
    """Responses to a login."""

    def test_an_unknown_host_key_parks(self, sshd_login, tmp_path, make_file):
        """An unknown host isn't trusted, and nothing fails because of it."""
        login = {**sshd_login, "known_hosts": None}

        with pytest.raises(StoreParkedError, match="known_hosts"):
            _put(over_ssh(tmp_path, **login), make_file, "a", b"x")

    def test_a_server_that_does_not_listen_is_retried(self, sshd_login, tmp_path, make_file):
        """A refused connection is transient."""
        with refusing_port() as port, pytest.raises(TransientStoreError):
            _put(over_ssh(tmp_path, **{**sshd_login, "port": port}), make_file, "a", b"x")


class TestCloudStore:
    """Features that obstore lacks raise an error."""

    def test_a_large_create_only_put_to_s3_is_refused(self, moto, prefix, make_file):
        """It would hold the whole file in memory."""
        store = open_store(moto.uri(prefix) + "&client=obstore&part_bytes=10")

        with pytest.raises(RejectedByStoreError, match="Use boto3"):
            _put(store, make_file, "a", b"x" * 100, overwrite=False)

    def test_a_server_that_ignores_create_only_is_detected(self, rclone, prefix, make_file):
        """boto3's store detects it in the same way."""
        uri = f"s3://bucket/{prefix}?client=obstore&create_only=require&endpoint_url={rclone.endpoint_url}"
        store = open_store(uri)

        with pytest.raises(RejectedByStoreError, match="ignores If-None-Match"):
            _put(store, make_file, "a", b"x", overwrite=False)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("s4://bucket", "did you mean 's3'"),
        ("http://host/folder", r"Known schemes: az, file, gs, .*s3, sftp, .*and those of fsspec"),
        ("hdsf://host/folder", r"Known schemes"),
        ("s3:/bucket", "'://' is missing"),
        ("", "empty string"),
    ],
)
def test_unknown_schemes_raise(uri, message):
    """The error for a typo in a URI lists the known schemes and the nearest match."""
    with pytest.raises(ValueError, match=message):
        open_store(uri)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scheme_of_ours_is_one_row(scheme):
    """Its factory can be imported, and the docs of `open_store` and of the queue name it."""
    page = Path(__file__).parents[3] / "docs/uploads.md"

    factory = pkgutil.resolve_name(f"uploads.stores.{SCHEMES[scheme].factory}")

    assert next(iter(inspect.signature(factory).parameters)) == "location"
    assert f"`{scheme}`" in open_store.__doc__
    assert f"{scheme}://" in page.read_text(encoding="utf-8")


def test_other_libraries_get_no_options_of_our_clients(monkeypatch):
    """`object_store_location` translates the other names, and knows its supported schemes."""
    monkeypatch.delenv("S3_ENDPOINT_URL", raising=False)

    place, options = object_store_location("gs://bucket/p?endpoint_url=http://h&part_bytes=1&client=obstore")

    assert (place, options) == ("gs://bucket/p", {"endpoint": "http://h", "allow_http": "true"})
    with pytest.raises(ValueError, match="expected a path, s3://, gs:// or az://, got sftp://"):
        object_store_location("sftp://host/folder")


class StoreElsewhere(MemoryStore):
    """A third party's store."""

    public_options = ("zone",)

    def __init__(self, location, *, zone="a"):
        super().__init__()
        self.location = location
        self.zone = zone


@pytest.fixture
def table(monkeypatch):
    """Restores the table of schemes after the test."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(uri, "_PUBLIC_OPTIONS", set(uri._PUBLIC_OPTIONS))


@pytest.mark.usefixtures("table")
class TestRegistering:
    """Stores of other packages, registered by a call or an installed package."""

    def test_a_registered_store_is_opened_by_its_scheme(self):
        """It gets the URI and the options that it accepts."""
        register_store("elsewhere", StoreElsewhere)

        store = open_store("elsewhere://me@host:80/a%20b?zone=c")

        assert isinstance(store, StoreElsewhere)
        assert store.location == StoreLocation("elsewhere", "me@host:80", "/a%20b")
        assert (store.location.host, store.location.port, store.location.username) == ("host", 80, "me")
        assert (store.location.path, store.zone) == ("/a b", "c")
        assert kept_options({"zone": "c", "token": "hush"}) == {"zone": "c"}

    def test_an_installed_package_adds_a_store(self, monkeypatch):
        """An entry point adds it; near misses suggest its name too."""
        mine = EntryPoint("elsewhere", f"{__name__}:StoreElsewhere", ENTRY_POINT_GROUP)
        monkeypatch.setattr(mine.__class__, "load", lambda _: StoreElsewhere)
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: EntryPoints([mine]))

        assert isinstance(open_store("elsewhere://host"), StoreElsewhere)
        with pytest.raises(ValueError, match="did you mean 'elsewhere'"):
            open_store("elswhere://host")

    def test_a_scheme_is_registered_once(self):
        """This includes ours; the same factory may be registered again."""
        register_store("elsewhere", StoreElsewhere)
        register_store("elsewhere", StoreElsewhere)

        for scheme in ("elsewhere", "s3"):
            with pytest.raises(ValueError, match="has a store already"):
                register_store(scheme, MemoryStore)
        with pytest.raises(ValueError, match="invalid URI scheme"):
            register_store("A", MemoryStore)

    def test_the_store_of_the_docs_keeps_the_contract(self, tmp_path):
        """The example of docs/writing-a-store.md runs unchanged, and passes the whole contract."""
        page = Path(__file__).parents[3] / "docs/writing-a-store.md"
        shown = {}
        for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            exec(code, shown)  # noqa: S102  # our own page
        shown["queue"].close(timeout_seconds=0)
        contract = shown["TestMemoryStore"]()

        for name in [name for name in dir(contract) if name.startswith("test_")]:
            shown["BUCKETS"].clear()
            test = getattr(contract, name)
            given = {"store": open_store("memory://here/digits"), "tmp_path": tmp_path}
            test(**{key: given[key] for key in inspect.signature(test).parameters})


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket",
        "s3://bucket/p",
        "s3://bucket/a%20b?endpoint_url=http://127.0.0.1:1&region=eu",
        "gs://bucket/p",
        "sftp://me@host:2222/folder/a%20b",
        "file:///tmp/a%20b",
    ],
)
def test_uris_round_trip(uri):
    """A store opened by a URI returns the same URI."""
    if uri.startswith("gs"):
        pytest.skip("obstore asks for Google's credentials when it is made")

    assert open_store(uri).uri() == uri


class DiskThatLies(MemoryFileSystem):
    """Returns another first byte than was written."""

    def cat_file(self, path, **options):
        return b"X" + super().cat_file(path, **options)[1:]


class RenameRefuses(MemoryFileSystem):
    """Renames nothing over an existing file, like HDFS."""

    def mv(self, old, new, **_):
        if self.exists(new):
            raise OSError(errno.EIO, "rename failed")
        super().mv(old, new)


def _store_in(kind, scheme, prefix, **options):
    return FileSystemStore(
        StoreLocation(scheme, "host", f"/{prefix}"), kind, {}, {}, root=f"/{prefix}", **options
    )


@pytest.mark.parametrize("read_back_bytes", [0, 100])
def test_small_files_are_read_back(make_file, prefix, read_back_bytes):
    """If files are read back, bytes changed on the server are noticed before the name appears."""
    store = _store_in(DiskThatLies, "memory", prefix, read_back_bytes=read_back_bytes)

    with Body(make_file(content=b"content"), "id") as body:
        refused = (
            contextlib.nullcontext()
            if read_back_bytes == 0
            else pytest.raises(BytesCorruptError, match="has SHA-256")
        )
        with refused:
            store.put("a", body, overwrite=True)

    assert [found.name for found in store.list()] == (["a"] if read_back_bytes == 0 else [])


def test_a_file_system_whose_rename_refuses_a_taken_name(make_file, prefix, caplog):
    """Create-only uses its rename, which replaces nothing; an object to be replaced is removed first."""
    store = _store_in(RenameRefuses, "hdfs", prefix, create_only="require")
    _put(store, make_file, "a", b"first", overwrite=False)

    with pytest.raises(RemoteExistsError):
        _put(store, make_file, "a", b"second", overwrite=False)
    _put(store, make_file, "a", b"third")

    assert b"".join(store.get("a")) == b"third"
    assert MemoryFileSystem().ls(f"/{prefix}", detail=False) == [f"/{prefix}/a"]
    assert caplog.text == ""


def test_a_file_system_that_promises_no_create_only(make_file, prefix, caplog):
    """The log explains the risk once, or nothing is put."""
    for _ in range(2):
        with contextlib.suppress(RemoteExistsError):
            _put(open_store(f"memory://{prefix}"), make_file, "a", b"x", overwrite=False)
    with pytest.raises(RejectedByStoreError, match="cannot be guaranteed"):
        _put(open_store(f"memory://{prefix}?create_only=require"), make_file, "b", b"x", overwrite=False)

    assert caplog.text.count("may overwrite each other") == 2
    assert [found.name for found in open_store(f"memory://{prefix}").list()] == ["a"]


@pytest.mark.parametrize("is_final", [False, True])
def test_a_folder_compares_a_large_file_while_reading_it(tmp_path, make_file, is_final):
    """Bytes with another CRC-32 than expected never appear; the right ones do, and no SHA-256 is computed.

    A final file on the same file system isn't copied: the object is another name of it.
    """
    store, content = LocalStore(tmp_path / "store"), bytes(9 << 20)
    path = make_file(content=content)
    assert store.checks_whole(len(content))

    right = zlib.crc32(content)
    bad = Body(path, "bad", crc32=right ^ 1, is_final=is_final)
    with bad as body, pytest.raises(BytesCorruptError):
        store.put("bad", body, overwrite=True)
    for overwrite in (False, True):
        with Body(path, "good", crc32=right, is_final=is_final) as body:
            put = store.put("good", body, overwrite=overwrite)

    assert [found.name for found in store.list()] == ["good"]
    assert (put.size, put.sha256, body.digest.crc32) == (len(content), None, zlib.crc32(content))
    assert sorted(found.name for found in (tmp_path / "store").iterdir()) == ["good"]
    assert path.samefile(tmp_path / "store" / "good") is is_final


class _BodyThatMeetsAnother(Body):
    """Has another process begin to write to the folder after the body was read."""

    def accept(self, digest):
        super().accept(digest)
        self.meet()


def test_an_old_linked_file_is_not_swept(tmp_path, make_file):
    """Another store that finds it half-written keeps it, however old the file is."""
    path = make_file(content=bytes(9 << 20))
    os.utime(path, (0, 0))

    large = _BodyThatMeetsAnother(path, "id", crc32=zlib.crc32(bytes(9 << 20)), is_final=True)
    with large, Body(make_file("small"), "other") as small:
        large.meet = lambda: LocalStore(tmp_path / "store").put("small", small, overwrite=True)
        LocalStore(tmp_path / "store").put("large", large, overwrite=True)

    assert sorted(found.name for found in (tmp_path / "store").iterdir()) == ["large", "small"]
