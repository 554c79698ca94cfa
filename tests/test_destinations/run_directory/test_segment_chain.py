"""Which segments of a journal count."""

import errno
import mmap
import os
from pathlib import Path

import pytest

from destinations.history.rows import Call
from destinations.run_directory import segments
from destinations.run_directory.drain import JournalDrain
from destinations.run_directory.frames import MAGIC, encode_frame, keys_frame
from destinations.run_directory.layout import segment_path, segment_paths
from destinations.run_directory.metrics_csv import MetricsCsv
from destinations.run_directory.segments import (
    MappedSegment,
    allocate,
    end_of_journal,
    journal_extent,
    journal_records,
)

START = (0, len(MAGIC))


def row(step, schema=0):
    """Returns the frame of a row."""
    return encode_frame((schema, step, 0, 1.0, (float(step),)))


def segment(*steps, place=None):
    """Returns a segment with some rows, which follows a position if one is given."""
    first = b"" if place is None else encode_frame(("follows", *place))
    return MAGIC + first + keys_frame(0, ("a",)) + b"".join(map(row, steps))


def write(folder, **segments):
    """Writes segments by number, with free space after their frames, as in a mapped one."""
    folder.mkdir(exist_ok=True)
    for name, data in segments.items():
        segment_path(folder, int(name[1:])).write_bytes(data.ljust(4096, b"\0"))


def open_files(folder):
    """Returns the files of a folder that this process has open."""
    # A descriptor that another thread closes meanwhile isn't in the folder.
    found = [os.path.realpath(path) for path in Path("/dev/fd").iterdir()]
    return [path for path in found if Path(path).is_relative_to(folder)]


def steps_in(folder, place=START):
    """Returns the steps of the rows that count, and their end."""
    records, end, _ = journal_records(folder, place)
    return [one.step for one in records if isinstance(one, Call)], end


def test_segments_that_follow_each_other_count(tmp_path):
    """Each segment says where the previous one ended."""
    one = segment(1, 2, place=START)
    two = segment(3, place=(1, len(one)))
    write(tmp_path, s1=one, s2=two)

    assert steps_in(tmp_path) == ([1, 2, 3], (2, len(two)))
    assert end_of_journal(tmp_path) == (2, len(two))


def test_segments_after_a_gap_are_skipped_until_one_follows(tmp_path):
    """The second segment has rows after lost ones.

    A later session wrote the third, which follows the end of the first.
    """
    one = segment(1, 2, place=START)
    cut = one[: -len(row(2))]
    two = segment(4, place=(1, len(one)))
    three = segment(2, 3, place=(1, len(cut)))
    write(tmp_path, s1=cut, s2=two)
    before = steps_in(tmp_path)
    write(tmp_path, s3=three)

    assert before == ([1], (1, len(cut)))
    assert steps_in(tmp_path) == ([1, 2, 3], (3, len(three)))


def test_skipped_segments_are_counted_as_damage_once(tmp_path):
    """The bytes are counted once, however often they are met; earlier rows are in the CSV."""
    one = segment(1, 2, place=START)
    two = segment(4, place=(1, len(one)))
    write(tmp_path / "journal", s1=one[: -len(row(2))], s2=two)
    drain = JournalDrain(tmp_path, tmp_path / "journal", MetricsCsv(tmp_path / "metrics.csv"))

    assert [drain.run() for _ in range(2)] == [1, 0]
    assert drain.source.damaged_bytes == len(two.rstrip(b"\0"))


def test_a_segment_ends_at_a_row_with_lost_names(tmp_path):
    """The next segment, which follows the true end, is skipped."""
    one = segment(1, place=START) + row(2, schema=1) + row(3)
    write(tmp_path, s1=one, s2=segment(4, place=(1, len(one))))

    assert steps_in(tmp_path) == ([1], (1, len(segment(1, place=START))))


def remove_file(path):
    """Removes the segment, as the writer does after draining it."""
    path.unlink()


def replace_folder(path):
    """Replaces the segment's folder with a file, as a user might."""
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("another's")


@pytest.mark.parametrize("remove", [remove_file, replace_folder])
def test_a_segment_removed_during_a_look_is_no_error(tmp_path, monkeypatch, remove):
    """The writer may drain and remove the segment between two looks of a reader."""
    folder = tmp_path / "journal"

    def listed(path):
        found = segment_paths(path)
        if found:
            remove(found[0])
        return found

    monkeypatch.setattr(segments, "segment_paths", listed)
    write(folder, s1=segment(1))
    assert journal_extent(folder, START) == (1, 0)

    if folder.is_file():
        folder.unlink()
    write(folder, s1=segment(1))
    assert journal_records(folder, START) == ([], START, False)


def test_rows_written_while_a_segment_is_sealed_count(tmp_path, monkeypatch):
    """Another thread may write between reading the end and sealing."""

    class InBetween(mmap.mmap):
        rows = ()

        def seek(self, *arguments):
            for one in self.rows:
                self.write(one)
            return super().seek(*arguments)

    monkeypatch.setattr(mmap, "mmap", InBetween)
    made = MappedSegment(tmp_path / "new", 1, 256)
    made.write(keys_frame(0, ("a",)) + row(1))
    monkeypatch.setattr(InBetween, "rows", (row(2), row(3)))
    end = len(segment(1, 2, 3))

    assert [made.seal(), made.end()] == [end, end]
    made.move(segment_path(tmp_path, 1), 1)
    assert steps_in(tmp_path) == ([1, 2, 3], (1, end))
    made.close()


def test_a_segment_without_space_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    """It leaves neither a file nor a descriptor."""

    def posix_fallocate(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)

    with pytest.raises(OSError, match="No space"):
        MappedSegment(tmp_path / "new", 0, 4096)
    assert not list(tmp_path.iterdir())
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("most", [1 << 20, 10_000], ids=["whole writes", "a nearly full disk"])
def test_space_is_allocated_without_help_of_the_file_system(tmp_path, monkeypatch, most):
    """Zeros are written to the exact size, even with partial writes; a full disk is an error."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:most], offset))

    def refuse(number):
        def posix_fallocate(*arguments):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)

    with (tmp_path / "file").open("w+b") as file:
        for number in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            refuse(number)
            os.ftruncate(file.fileno(), 0)
            allocate(file.fileno(), 100_000)
            assert file.seek(0, os.SEEK_END) == 100_000
            assert os.fstat(file.fileno()).st_blocks * 512 >= 100_000
        refuse(errno.ENOSPC)
        with pytest.raises(OSError, match="No space"):
            allocate(file.fileno(), 200_000)
