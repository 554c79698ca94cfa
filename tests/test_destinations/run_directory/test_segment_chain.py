"""Which segments of a journal count."""

import errno
import mmap
import os
from pathlib import Path

import pytest

from destinations.history.rows import Call
from destinations.run_directory import frames, segments
from destinations.run_directory.drain import JournalDrain
from destinations.run_directory.frames import MAGIC, encode_frame, keys_frame
from destinations.run_directory.layout import segment_path, segment_paths
from destinations.run_directory.metrics_csv import MetricsCsv
from destinations.run_directory.segments import (
    AppendedSegment,
    MappedSegment,
    allocate,
    continues_from,
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


def test_a_segment_without_a_predecessor_counts(tmp_path):
    """Earlier versions wrote segments without this frame."""
    two = segment(3)
    write(tmp_path, s1=segment(1, 2), s2=two)

    assert steps_in(tmp_path) == ([1, 2, 3], (2, len(two)))


def test_a_segment_ends_at_a_row_with_lost_names(tmp_path):
    """The next segment, which follows the true end, is skipped."""
    one = segment(1, place=START) + row(2, schema=1) + row(3)
    write(tmp_path, s1=one, s2=segment(4, place=(1, len(one))))

    assert steps_in(tmp_path) == ([1], (1, len(segment(1, place=START))))


def test_reading_continues_inside_a_segment(tmp_path):
    """It starts at an offset, with the names that were defined before it."""
    one = segment(1, 2, place=START)
    write(tmp_path, s1=one)

    assert steps_in(tmp_path, (1, len(one) - len(row(2)))) == ([2], (1, len(one)))
    assert steps_in(tmp_path, (2, len(MAGIC))) == ([], (2, len(MAGIC)))


@pytest.mark.parametrize("data", [b"", b"\0" * 100, MAGIC[:-1]])
def test_a_file_that_is_not_a_segment_follows_nothing(tmp_path, data):
    """One example is a segment whose beginning never reached the disk."""
    write(tmp_path, s1=data)

    assert not continues_from(data, START)
    assert steps_in(tmp_path) == ([], START)


def test_the_end_of_a_segment_is_read_without_its_beginning(tmp_path, monkeypatch):
    """A returning reader decodes only names and new rows, however many rows were drained."""
    one = segment(*range(5000)) + keys_frame(1, ("b",)) + row(5001, 1)
    start = len(one) - len(row(5001, 1))
    folder = tmp_path
    segment_path(folder, 1).write_bytes(one + row(5002, 0) + bytes(4096))
    decoded = []
    original = frames._record
    monkeypatch.setattr(frames, "_record", lambda payload: decoded.append(1) or original(payload))

    records, end, _ = journal_records(folder, (1, start))

    assert records == [(("b",), 5001, 0, 1.0, (5001.0,)), (("a",), 5002, 0, 1.0, (5002.0,))]
    assert end == (1, len(one) + len(row(5002)))
    assert len(decoded) == 4


def test_a_second_read_decodes_only_new_frames(tmp_path, monkeypatch):
    """It returns all rows each time, whether or not the writer has drained some."""
    one = segment(*range(1000))
    write(tmp_path, s1=one)
    known = {}
    journal_records(tmp_path, START, known)
    segment_path(tmp_path, 1).write_bytes(one + row(1000) + bytes(4096))
    seen = []
    original = frames._record
    monkeypatch.setattr(frames, "_record", lambda payload: seen.append(1) or original(payload))

    every, end, _ = journal_records(tmp_path, START, known)
    last, same_end, _ = journal_records(tmp_path, (1, len(one)), known)

    assert [[record.step for record in found] for found in (every, last)] == [[*range(1001)], [1000]]
    assert end == same_end == (1, len(one) + len(row(1000)))
    # The first frame of a segment names its predecessor.
    assert len(seen) == 1 + 1


def test_another_segment_of_the_same_name_is_decoded_anew(tmp_path):
    """A run folder that was deleted and begun again has segments of the same numbers."""
    known = {}
    write(tmp_path, s1=segment(1, 2, 3))
    journal_records(tmp_path, START, known)
    write(tmp_path, s1=segment(4, 5))

    records, _, _ = journal_records(tmp_path, START, known)

    assert [record.step for record in records] == [4, 5]


def test_the_extent_of_a_journal_changes_with_each_row(tmp_path):
    """It reads no rows, keeps no file open, and is the same for any earlier place."""
    one = segment(1, 2)
    write(tmp_path, s1=one)
    before = journal_extent(tmp_path, START)
    write(tmp_path, s1=one + row(3))
    grown = journal_extent(tmp_path, (1, len(one)))
    whole = journal_extent(tmp_path, None)
    write(tmp_path, s2=segment(4))

    assert before == (1, len(one))
    assert grown == whole == (1, len(one + row(3)))
    for place in (None, START, (1, 1), (1, len(one)), (2, len(MAGIC))):
        assert journal_extent(tmp_path, place) == (2, len(segment(4)))
    assert journal_extent(tmp_path, (2, 10_000)) == (2, 10_000)  # The file was cut meanwhile.
    assert journal_extent(tmp_path / "nothing", START) == (0, 0)
    assert open_files(tmp_path) == []


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


@pytest.fixture(params=[MappedSegment, AppendedSegment], ids=["mapped", "appended"])
def fresh(request, tmp_path):
    """A new segment of each kind, of 256 bytes."""
    made = request.param(tmp_path / "new", 0, 256)
    yield made
    made.close()


def test_a_segment_takes_whole_frames_until_it_is_full(fresh):
    """Data that doesn't fit isn't started; data that fits exactly is taken."""
    rest = 256 - len(MAGIC)
    assert fresh.end() == len(MAGIC)
    fresh.write(row(1))
    room = rest - len(row(1))

    with pytest.raises(ValueError, match=r"out of range|full|closed"):
        fresh.write(bytes(room + 1))
    assert fresh.end() == 256 - room
    fresh.write(b"x" * room)
    assert fresh.end() == 256
    assert os.pread(fresh.fileno(), 256, 0) == MAGIC + row(1) + b"x" * room


def test_a_sealed_segment_takes_nothing_more(fresh):
    """Its end is the end of its frames, for every call."""
    fresh.write(row(1))
    end = len(MAGIC) + len(row(1))

    assert [fresh.seal(), fresh.seal(), fresh.end()] == [end, end, end]
    with pytest.raises(ValueError, match=r"out of range|full|closed"):
        fresh.write(b"x")
    fresh.close()
    fresh.close()
    assert (fresh.seal(), fresh.fileno()) == (end, -1)


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


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_an_unmapped_segment_is_readable_and_takes_no_address_space(tmp_path):
    """The journal keeps full segments this way until they are drained."""
    made = MappedSegment(tmp_path / "new", 0, 4096)
    made.write(row(1))
    before = Path("/proc/self/maps").read_text()
    made.unmap()

    assert str(tmp_path) in before
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert os.pread(made.fileno(), 4096, 0).startswith(MAGIC + row(1))
    with pytest.raises(ValueError, match="closed"):
        made.write(row(2))
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
