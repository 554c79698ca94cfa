"""Removing and renaming an open file rather than another with its name; checksums of pieces."""

import os
import zlib
from pathlib import Path

import pytest

from uploads.disk import (
    IrregularFileError,
    closing,
    crc32_of_both,
    end_of_last_line,
    is_open_file,
    look_twice,
    read_at,
    read_regular,
    remove_if,
    rename_new,
)


def _names_in(folder):
    return sorted(one.name for one in folder.iterdir())


def test_a_file_that_took_its_name_stays(tmp_path):
    """It was renamed onto the name meanwhile."""
    path = tmp_path / "data"
    path.write_text("old")
    (tmp_path / "next").write_text("new")

    with closing(os.open(path, os.O_RDONLY)) as held:
        (tmp_path / "next").replace(path)

        assert not remove_if(path, is_open_file(held))

    assert path.read_text() == "new"
    assert _names_in(tmp_path) == ["data"]


def test_a_file_that_takes_the_name_between_look_and_move_is_put_back(tmp_path):
    """The comparison is repeated once nobody else can change what has the name."""
    path = tmp_path / "data"
    path.write_text("old")
    looks = []

    def is_meant(name):
        looks.append(name)
        is_it = Path(name).read_text() == "old"
        if len(looks) == 1:
            (tmp_path / "next").write_text("new")
            (tmp_path / "next").replace(path)
        return is_it

    assert not remove_if(path, is_meant)

    assert path.read_text() == "new"
    assert _names_in(tmp_path) == ["data"]


def test_a_comparison_that_raises_leaves_everything_in_place(tmp_path):
    """An error while a folder is compared is not an answer."""
    folder = tmp_path / "run"
    folder.mkdir()
    looks = []

    def is_meant(name):
        looks.append(name)
        if len(looks) > 1:
            raise PermissionError
        return True

    with pytest.raises(PermissionError):
        remove_if(folder, is_meant)

    assert _names_in(tmp_path) == ["run"]


def test_a_file_that_cannot_be_put_back_is_named_and_kept(tmp_path):
    """If the name is taken twice, both files are kept, and the error names the first one's place."""
    path = tmp_path / "data"
    path.write_text("first")

    def is_meant(name):
        if name == str(path):
            return True
        path.write_text("second")
        return False

    with pytest.raises(FileExistsError, match=r"\.data\..*\.removed"):
        remove_if(path, is_meant)

    assert sorted(one.read_text() for one in tmp_path.iterdir()) == ["first", "second"]


def test_a_folder_is_removed_with_its_content(tmp_path):
    """A symlink in it is removed, and not what it points to."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("kept")
    folder = tmp_path / ("é" * 120)
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "kept")

    assert remove_if(f"{folder}/", lambda name: Path(name).is_dir())

    assert _names_in(tmp_path) == ["kept"]
    assert _names_in(tmp_path / "kept") == ["file"]


def test_removing_a_missing_file_does_nothing(tmp_path):
    """It isn't an error."""
    assert not remove_if(tmp_path / "missing", lambda name: True)


@pytest.mark.parametrize("make", ["file", "folder", "link"])
@pytest.mark.parametrize("has_renameat2", [True, False])
def test_a_rename_replaces_nothing(tmp_path, monkeypatch, make, has_renameat2):
    """An existing target stays, on systems without renameat2(2) too."""
    if not has_renameat2:
        monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    source, taken, free = tmp_path / "source", tmp_path / "taken", tmp_path / "free"
    if make == "folder":
        source.mkdir()
        taken.mkdir()
    elif make == "file":
        source.write_text("source")
        taken.write_text("taken")
    else:
        source.symlink_to("nowhere")
        taken.symlink_to("elsewhere")

    with pytest.raises(FileExistsError):
        rename_new(str(source), str(taken))
    rename_new(str(source), str(free))

    assert _names_in(tmp_path) == ["free", "taken"]


@pytest.mark.parametrize("size", [0, 1, 65_537])
def test_the_crc32_of_a_whole_follows_from_its_parts(size):
    """No byte is read again, whatever the length of the second piece."""
    first, second = os.urandom(1000), os.urandom(size)

    assert crc32_of_both(zlib.crc32(first), zlib.crc32(second), size) == zlib.crc32(first + second)


def test_a_file_not_found_once_is_looked_up_again(tmp_path):
    """A missing file is looked up once; an existing one is found at the second attempt."""
    path = tmp_path / "file"
    asked = []

    def look():
        asked.append(path)
        if len(asked) < 2:
            raise FileNotFoundError(str(path))
        return "found"

    with pytest.raises(FileNotFoundError):
        look_twice(path, look)
    assert len(asked) == 1
    asked.clear()
    path.write_bytes(b"")
    assert look_twice(path, look) == "found"


def test_short_reads_are_continued(tmp_path, monkeypatch):
    """The whole file is read, though each system call returns at most seven bytes."""
    path = tmp_path / "file"
    content = b"".join(b"%d\n" % number for number in range(100)) + b"torn"
    path.write_bytes(content)
    for name in ("read", "pread"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, length, *at, real=real: real(fd, min(length, 7), *at))

    assert read_regular(path) == content
    with closing(os.open(path, os.O_RDONLY)) as descriptor:
        assert read_at(descriptor, 50, 3) == content[3:53]
        assert read_at(descriptor, 50, len(content) - 2) == b"rn"
        assert end_of_last_line(descriptor, len(content)) == len(content) - 4


def test_a_file_above_the_limit_is_not_read(tmp_path, monkeypatch):
    """Its size says enough; reading it up to the limit would take a second."""
    path = tmp_path / "huge"
    path.touch()
    os.truncate(path, 1 << 40)
    monkeypatch.setattr(os, "read", None)

    with pytest.raises(IrregularFileError, match="larger than 32 MiB"):
        read_regular(path)
