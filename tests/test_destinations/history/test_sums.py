"""Checksums of blocks: writers add them in any order of operations, and readers find the damage."""

import random
import zlib

import pytest

from destinations.history.sums import (
    BlockSums,
    CheckedBlocks,
    Sums,
    parse_line,
    read_sums,
    summed_line,
    sums_path,
)
from tests.effort import times

HEADER = b"step,epoch,time,loss\n"


def rows_of(draw, count):
    """Returns rows of some widths."""
    return b"".join(
        b"%d,0,%d,%s\n" % (step, draw.randrange(10**9), b"1" * draw.randrange(1, 400))
        for step in range(count)
    )


def checks_of(path, content, end=None, tail=None):
    """Returns a function that compares content with the checksums beside a path."""

    def read(at, length):
        return content[at : at + length]

    size = len(content)
    header = content[: content.find(b"\n") + 1]
    checks = CheckedBlocks(path, read_sums(path), header, size, size if end is None else end, read, tail)
    return checks, read


def write(path, content, *others):
    """Writes content and its checksums, preceded by checksums of other versions."""
    sums = BlockSums.begin(HEADER)
    sums.add(content[len(HEADER) :])
    sums.close_block()
    path.write_bytes(content)
    sums_path(path).write_bytes(b"".join([*others, sums.content()]))
    return sums


def test_sums_do_not_depend_on_how_rows_are_appended():
    """Appending any number of whole rows and going back give the same blocks."""
    for seed in range(times(2, 50)):
        draw = random.Random(seed)
        rows = rows_of(draw, 2000)
        content = HEADER + rows
        whole = BlockSums.begin(HEADER)
        assert whole.add(rows) == 2000
        ends = [at + 1 for at, byte in enumerate(rows) if byte == ord("\n")]

        sums = BlockSums.begin(HEADER)
        at = 0
        while at < len(rows):
            until = min(len(rows), draw.choice(ends))
            if until > at:
                sums.add(rows[at:until])
            else:
                sums.rewind(len(HEADER) + until, lambda start, length, of=content: of[start : start + length])
            at = until

        assert [(one.end, one.rows, one.crc32) for one in sums.blocks] == [
            (one.end, one.rows, one.crc32) for one in whole.blocks
        ]
        assert sums.tail == whole.tail
        assert sums.tail.end == len(content)


def test_any_changed_byte_costs_the_rows_of_its_block(tmp_path, caplog):
    """Blank lines replace its rows, so all other bytes and row numbers stay."""
    path = tmp_path / "metrics.csv"
    draw = random.Random(1)
    content = HEADER + rows_of(draw, 1500)
    blocks = write(path, content).blocks
    assert len(blocks) > 3
    for _ in range(60):
        at = draw.randrange(len(HEADER), len(content))
        damaged = bytearray(content)
        damaged[at] ^= 1 << draw.randrange(8)
        checks, read = checks_of(path, bytes(damaged))
        pieces, place = [], 0
        while place < len(content):
            length = draw.randrange(1, 200_000)
            pieces.append(checks.checked(read(place, length), place, read))
            place += length
        found = b"".join(pieces)
        (block,) = [one for one in blocks if one.start <= at < one.end]
        assert [*checks.damaged.values()] == [block]
        assert found[: block.start] == content[: block.start]
        assert found[block.end :] == content[block.end :]
        blank = found[block.start : block.end]
        assert len(blank) == block.end - block.start
        assert [line.strip() for line in blank.splitlines()] == [b",,,"] * block.rows
        assert f"{block.rows} rows, in bytes {block.start} to {block.end}" in caplog.text
        assert checks.damage().startswith(f"metrics.csv is damaged: {block.rows:,} of 1,500 rows")


@pytest.mark.parametrize("change", ["cut", "changed", "header", "longer", "none"])
def test_file_changed_by_another_program_is_read_unchecked(tmp_path, change):
    """Only a file of the right size has damaged blocks. All rows of another file count, with a warning."""
    path = tmp_path / "metrics.csv"
    content = HEADER + rows_of(random.Random(2), 1000)
    write(path, content)
    lines = content.splitlines(keepends=True)
    now = {
        "cut": b"".join(lines[:-3]),
        "changed": b"".join([*lines[:5], b"5,0,5,5\n", *lines[5:]]),
        "header": content.replace(b"loss", b"l0ss", 1),
        "longer": content + b"1000,0,1,1\n",
        "none": content,
    }[change]

    checks, read = checks_of(path, now)

    assert checks.checked(now, 0, read) == now
    said = {
        "cut": "metrics.csv is cut: 3 of 1,000 rows are lost",
        "changed": "metrics.csv was changed by another program: its checksums are of another file",
        "header": "metrics.csv has another header than its checksums are of",
    }
    assert checks.damage() == said.get(change)


def test_sums_of_the_matching_version_are_used(tmp_path):
    """Both exist while a file is replaced. Files without checksums or with damaged ones aren't compared."""
    path = tmp_path / "metrics.csv"
    draw = random.Random(3)
    before, after = (HEADER + rows_of(draw, 500) for _ in range(2))
    first = write(path, before)
    write(path, after, first.content())

    for content in (before, after):
        checks, read = checks_of(path, content)
        checks.verify(read)
        assert (checks.damage(), len(checks.blocks) > 1) == (None, True)
    raw = sums_path(path).read_bytes()
    sums_path(path).write_bytes(raw.replace(b'"rows": ', b'"rows": 1'))
    assert checks_of(path, after)[0].blocks == []
    assert read_sums(path).damaged_lines == raw.count(b"rows")
    sums_path(path).unlink()
    assert read_sums(path) == Sums()


def test_the_position_has_the_sum_of_rows_after_the_last_block(tmp_path):
    """Readers compare these rows too, and their number if the file was cut."""
    path = tmp_path / "metrics.csv"
    content = HEADER + rows_of(random.Random(4), 700)
    sums = BlockSums.begin(HEADER)
    sums.add(content[len(HEADER) :])
    sums_path(path).write_bytes(sums.content())
    tail = sums.tail
    damaged = content[:-3] + b"x\n\n"

    checks, read = checks_of(path, damaged, tail=tail)
    checks.verify(read)
    assert [*checks.damaged.values()] == [tail]
    checks, _ = checks_of(path, content[: tail.start], tail=tail)
    assert checks.damage() == f"metrics.csv is cut: {tail.rows} of 700 rows are lost"


def test_each_line_has_a_checksum():
    """Any change of a line is found. A line without a checksum is accepted."""
    line = summed_line('{"mark": 3, "rows": 812}')

    assert parse_line(line) == {"mark": 3, "rows": 812}
    assert parse_line(b'{"mark": 3}\n') == {"mark": 3}
    assert b'"sum": %d}' % zlib.crc32(b'{"mark": 3, "rows": 812') in line
    for at in range(len(line) - 1):
        changed = bytearray(line)
        changed[at] ^= 1
        try:
            found = parse_line(bytes(changed))
        except ValueError:
            continue
        # Only the name of the checksum itself was changed.
        assert found["mark"] == 3
        assert found["rows"] == 812
        assert at >= line.index(b", ", 12)
