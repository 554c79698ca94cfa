"""Staging a file's bytes: what is copied, what is refused, and changes meanwhile."""

import errno
import fcntl
import mmap
import os
import subprocess
import zlib

import pytest

from uploads.errors import InvalidSourceError, UnstableSourceError
from uploads.spool import staging
from uploads.spool.staging import files_of, opened

LARGE = os.urandom(1 << 20) * 40


def stage_copy(source, target, *, checksum=False):
    """Copies a file as `submit` does."""
    with opened(source) as descriptor:
        return staging.stage_copy(source, descriptor, target, checksum=checksum)


def stage_link(source, target):
    """Links a file as `submit` does."""
    with opened(source) as descriptor:
        return staging.stage_link(source, descriptor, target)


@pytest.mark.parametrize("content", [b"", b"x", LARGE], ids=["empty", "small", "large"])
def test_a_copy_has_the_bytes_and_their_checksum(make_file, tmp_path, content):
    """A file of any size, even an empty one, is copied whole; a large one has a checksum only on request."""
    source = make_file(content=content)

    staged = stage_copy(source, tmp_path / "data")
    checked = stage_copy(source, tmp_path / "checked", checksum=True)

    assert (tmp_path / "data").read_bytes() == (tmp_path / "checked").read_bytes() == content
    assert staged.size == checked.size == len(content)
    assert staged.crc32 == (None if content == LARGE else zlib.crc32(content))
    assert checked.crc32 == zlib.crc32(content)
    assert source.read_bytes() == content


def test_a_hole_in_a_sparse_file_is_copied_as_zeros(tmp_path):
    """A sparse file arrives with its length and its zeros."""
    source = tmp_path / "sparse"
    with source.open("wb") as stream:
        stream.truncate(50_000_000)

    staged = stage_copy(source, tmp_path / "data")

    assert staged.size == 50_000_000
    assert (tmp_path / "data").read_bytes() == bytes(50_000_000)


@pytest.mark.parametrize("take", [stage_copy, stage_link], ids=["copy", "link"])
def test_anything_but_a_readable_file_is_refused(tmp_path, take):
    """A folder, a FIFO, a device, and a missing or NUL path are refused at once, without hanging."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")

    for name in ("folder", "fifo", "missing", "nul\0", "/dev/null"):
        source = tmp_path / name
        with pytest.raises(InvalidSourceError, match="a source must be"):
            take(source, tmp_path / "data")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_refused(make_file, tmp_path):
    """A file that this user may not read is refused with the reason."""
    source = make_file()
    source.chmod(0)

    with pytest.raises(InvalidSourceError, match="Permission denied"):
        stage_copy(source, tmp_path / "data")


def test_a_symlink_is_followed_by_a_copy_and_refused_by_a_move(make_file, tmp_path):
    """A copy takes the target's bytes; a move would take only the link."""
    link = tmp_path / "link"
    link.symlink_to(make_file(content=b"behind"))

    stage_copy(link, tmp_path / "data")

    assert (tmp_path / "data").read_bytes() == b"behind"
    with pytest.raises(InvalidSourceError, match="symlink"), opened(link, is_moved=True):
        pass


@pytest.fixture
def written_while_read(monkeypatch):
    """Has another process write to a file just after it was read, the given number of times.

    Returns the function that does it.
    """

    def start(path, times):
        left, real = [times], os.preadv

        def preadv(descriptor, buffers, offset):
            count = real(descriptor, buffers, offset)
            if left[0] and os.path.samestat(os.fstat(descriptor), path.stat()):
                left[0] -= 1
                with path.open("r+b") as stream:
                    stream.write(b"%d" % left[0])
                os.utime(path, ns=(left[0], left[0]))  # A clock may be too coarse to show it.
            return count

        monkeypatch.setattr(os, "preadv", preadv)
        monkeypatch.setattr(fcntl, "ioctl", _no_reflink)

    return start


def _no_reflink(*arguments):
    raise OSError(errno.EOPNOTSUPP, "not here")


@pytest.mark.parametrize("content", [b"small", LARGE], ids=["small", "large"])
def test_a_file_that_keeps_changing_is_refused(make_file, tmp_path, written_while_read, content):
    """A source written during the copy is never mixed silently."""
    source = make_file(content=content)
    written_while_read(source, times=2)

    with pytest.raises(UnstableSourceError, match="changed while it was copied"):
        stage_copy(source, tmp_path / "data")


def test_a_small_file_that_changes_through_a_memory_map_is_refused(make_file, tmp_path, monkeypatch):
    """Its times may not change, so the copy is compared with the file."""
    source = make_file(content=b"small")
    real = os.preadv
    with source.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
        mapped[0] = 0  # From here on the kernel may let it change without updating its times.

        def preadv(*arguments):
            count = real(*arguments)
            mapped[0] += 1
            return count

        monkeypatch.setattr(os, "preadv", preadv)
        monkeypatch.setattr(fcntl, "ioctl", _no_reflink)

        with pytest.raises(UnstableSourceError, match="changed while it was copied"):
            stage_copy(source, tmp_path / "data")


def test_a_file_truncated_during_its_copy_is_copied_again(make_file, tmp_path, monkeypatch):
    """Nothing of the longer first copy is left."""
    source = make_file(content=b"long content")
    real = os.preadv

    def preadv(*arguments):
        count = real(*arguments)
        if source.stat().st_size > 5:
            os.truncate(source, 5)
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(fcntl, "ioctl", _no_reflink)

    staged = stage_copy(source, tmp_path / "data")

    assert (tmp_path / "data").read_bytes() == b"long "
    assert (staged.size, staged.crc32) == (5, zlib.crc32(b"long "))


def test_an_unchanging_file_is_copied_without_waiting(make_file, tmp_path, monkeypatch):
    """Files written before the current tick of the file system's clock are copied at once."""
    source = make_file()
    stage_copy(source, tmp_path / "first")  # Waits for the next tick.
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)

    stage_copy(source, tmp_path / "second")

    assert waits == []


def test_symlinks_within_a_folder_are_followed(make_file, tmp_path):
    """A linked sub-folder or file has the link's name; the folder itself may be a link."""
    make_file("folder/a/c")
    (tmp_path / "folder/linked").symlink_to("a")
    (tmp_path / "folder/file").symlink_to(tmp_path / "folder/a/c")
    (tmp_path / "link").symlink_to("folder")

    found = files_of(tmp_path / "link")

    assert [name for _, name in found] == ["a/c", "file", "linked/c"]
    assert {path.resolve() for path, _ in found} == {tmp_path / "folder/a/c"}


@pytest.mark.parametrize("target", ["outside", "outside/file", "nowhere", "folder/link", "folder"])
def test_other_symlinks_in_a_folder_are_refused(make_file, tmp_path, target):
    """The error names a link that leaves the folder, dangles, or leads to itself or a parent folder."""
    make_file("folder/a")
    make_file("outside/file")
    (tmp_path / "folder/link").symlink_to(tmp_path / target)

    with pytest.raises(InvalidSourceError, match="folder/link"):
        files_of(tmp_path / "folder")


def test_a_folder_with_a_common_prefix_is_outside(make_file, tmp_path):
    """`run2` isn't in `run`."""
    make_file("run/a")
    make_file("run2/b")
    (tmp_path / "run/link").symlink_to(tmp_path / "run2")

    with pytest.raises(InvalidSourceError, match="must lead to something in that folder"):
        files_of(tmp_path / "run")


def test_a_cycle_of_two_symlinks_is_found(make_file, tmp_path):
    """Each of two folders has a link to the other."""
    make_file("folder/a/file")
    make_file("folder/b/file")
    (tmp_path / "folder/a/to_b").symlink_to("../b")
    (tmp_path / "folder/b/to_a").symlink_to("../a")

    with pytest.raises(InvalidSourceError, match="must not be in itself"):
        files_of(tmp_path / "folder")


def test_symlinks_that_multiply_are_bounded(tmp_path, monkeypatch):
    """Forty folders with two links each to the next have too many paths to visit."""
    monkeypatch.setattr(staging, "_MAX_ITEMS", 1000)
    for number in range(40):
        (tmp_path / f"folder/{number}").mkdir(parents=True)
        (tmp_path / f"folder/{number}/x").symlink_to(f"../{number + 1}")
        (tmp_path / f"folder/{number}/y").symlink_to(f"../{number + 1}")
    (tmp_path / "folder/40").mkdir()

    with pytest.raises(InvalidSourceError, match="at most 1000 files and folders"):
        files_of(tmp_path / "folder")


def test_a_deep_folder_is_refused_by_the_limit_of_a_name(tmp_path):
    """1,500 nested folders make a name that no store accepts; there's no RecursionError."""
    place = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=place)
        inner = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=place))
    os.close(place)

    try:
        with pytest.raises(InvalidSourceError, match="names of at most 1024 bytes"):
            files_of(tmp_path)
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)
