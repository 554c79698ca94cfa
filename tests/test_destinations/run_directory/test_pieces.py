"""Pieces of a run in a store: written content comes back, and hostile pieces change nothing outside."""

import json
import os
import random
import struct
import zipfile
import zlib
from types import SimpleNamespace

import pytest

from destinations.history.snapshot import damage_of_rows
from destinations.history.sums import BlockSums
from destinations.run_directory.pieces import (
    Change,
    FileState,
    FolderState,
    Piece,
    PieceError,
    apply_piece,
    open_piece,
    write_piece,
)


def put_piece(path, files, *, session=1, first=1, last=1, starts=None, states=None, **about):
    """Writes a piece with these contents by path, each from its start."""
    states = states or {name: FileState(0, len(content)) for name, content in files.items()}
    changes = []
    for name, content in files.items():
        source = path.with_name(f"source-{name.replace('/', '_')}")
        source.write_bytes(content)
        fd = os.open(source, os.O_RDONLY)
        changes.append(Change(name, fd, (starts or {}).get(name, 0), states[name]))
    write_piece(path, Piece(session=session, first=first, last=last, files=states, **about), changes)
    for change in changes:
        os.close(change.fd)
    return path


def put_second_piece(tmp_path):
    """Writes the piece of the second interval, which adds a line to the seven bytes of the first."""
    return put_piece(
        tmp_path / "2",
        {"metrics.csv": b"step\n1\n2\n"},
        first=2,
        last=2,
        starts={"metrics.csv": 7},
        states={"metrics.csv": FileState(0, 9)},
    )


def take(folder, state, path):
    """Applies the piece in a file."""
    with path.open("rb") as file, open_piece(path.name, file) as piece:
        apply_piece(folder, state, piece)


def test_a_growing_file_keeps_its_inode_and_a_replaced_one_does_not(tmp_path):
    """Readers with an open file see it grow, because it keeps its inode."""
    folder, state = tmp_path / "copy", FolderState(1)
    take(folder, state, put_piece(tmp_path / "1", {"metrics.csv": b"step\n1\n", "a.json": b"{}"}))
    inode = (folder / "metrics.csv").stat().st_ino
    later = {"metrics.csv": b"step\n1\n2\n", "a.json": b'{"b": 1}'}
    states = {"metrics.csv": FileState(0, 9), "a.json": FileState(1, 8)}
    path = put_piece(tmp_path / "2", later, first=2, last=2, starts={"metrics.csv": 7}, states=states)

    take(folder, state, path)
    take(folder, state, path)

    assert (folder / "metrics.csv").read_bytes() == b"step\n1\n2\n"
    assert (folder / "metrics.csv").stat().st_ino == inode
    assert (folder / "a.json").read_bytes() == b'{"b": 1}'
    assert state.last == 2


def summed(header, *rows):
    """Returns a CSV and the checksums of its rows."""
    text = "".join(rows).encode()
    sums = BlockSums.begin(header.encode())
    sums.add(text)
    sums.close_block()
    return {"metrics.csv": header.encode() + text, "metrics.sums.jsonl": sums.content()}


@pytest.mark.parametrize(
    "later",
    [
        summed("step,epoch,time,a,b\n", "0,0,1.0,1.0,\n", "1,0,2.0,2.0,3.0\n"),
        summed("step,epoch,time,a\n", "2,0,3.0,4.0\n"),
    ],
    ids=["a column is added", "the rows before are in a closed part"],
)
@pytest.mark.parametrize("is_known", [True, False])
def test_a_reader_never_compares_new_rows_with_old_checksums(tmp_path, later, is_known):
    """A copy is read while a piece is applied: it has no damage before any file, nor after the last."""
    folder, state = tmp_path / "copy", FolderState(1)
    first = summed("step,epoch,time,a\n", "0,0,1.0,1.0\n", "1,0,2.0,2.0\n")
    take(folder, state, put_piece(tmp_path / "1", first))
    state = state if is_known else FolderState(1)
    states = {name: FileState(1, len(content)) for name, content in later.items()}
    found = []

    def look(name, start):
        found.extend(damage_of_rows(folder, is_whole=True))
        yield from opened.chunks(name, start)
        found.extend(damage_of_rows(folder, is_whole=True))

    path = put_piece(tmp_path / "2", later, first=1, last=2, states=states)
    with path.open("rb") as file, open_piece("2", file) as opened:
        apply_piece(folder, state, SimpleNamespace(about=opened.about, data=opened.data, chunks=look))

    assert found == damage_of_rows(folder, is_whole=True) == []
    assert (folder / "metrics.sums.jsonl").read_bytes() == later["metrics.sums.jsonl"]


@pytest.mark.parametrize(
    ("first", "session", "starts"),
    [(3, 1, {}), (2, 2, {}), (2, 1, {"b.csv": 3})],
    ids=["gap", "session", "start"],
)
def test_a_piece_that_does_not_continue_is_refused(tmp_path, first, session, starts):
    """The existing files don't change."""
    folder, state = tmp_path / "copy", FolderState(1)
    take(folder, state, put_piece(tmp_path / "1", {"a.json": b"{}"}))
    states = {"a.json": FileState(0, 2), "b.csv": FileState(0, 6)}
    path = put_piece(
        tmp_path / "2",
        {"b.csv": b"step\n1"},
        session=session,
        first=first,
        last=first,
        starts=starts,
        states=states,
    )

    with pytest.raises(PieceError):
        take(folder, state, path)

    assert [one.name for one in folder.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    "name",
    [
        "../outside.csv",
        "/outside.csv",
        ".lock",
        "a/.hidden",
        "journal/rank0/position.json",
        "a/../../b",
        "a\0b",
    ],
)
def test_names_lead_only_to_files_of_the_run(tmp_path, name):
    """The store may be untrusted."""
    about = {
        "format": 1,
        "session": 1,
        "first": 1,
        "last": 1,
        "needs": [],
        "files": {name: [0, 1]},
        "parts": [],
    }
    about |= {
        "objects": [],
        "plain": None,
        "status": "running",
        "written_at": 0,
        "seconds": 10,
        "data": {name: [0, 1]},
    }
    with zipfile.ZipFile(tmp_path / "piece", "w") as archive:
        archive.writestr("piece.json", json.dumps(about))
        archive.writestr(f"files/{name}", b"x")
    folder = tmp_path / "below" / "copy"

    with pytest.raises(PieceError):
        take(folder, FolderState(1), tmp_path / "piece")

    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path != tmp_path / "piece"]


def test_a_link_in_the_folder_is_not_followed(tmp_path):
    """A reader that shares its cache with a hostile user writes nowhere else."""
    folder, state = tmp_path / "copy", FolderState(1)
    take(folder, state, put_piece(tmp_path / "1", {"metrics.csv": b"step\n1\n"}))
    (tmp_path / "victim").write_bytes(b"step\n1\n")
    (folder / "metrics.csv").unlink()
    (folder / "metrics.csv").symlink_to(tmp_path / "victim")
    path = put_second_piece(tmp_path)

    with pytest.raises(OSError, match="symbolic links"):
        take(folder, state, path)

    assert (tmp_path / "victim").read_bytes() == b"step\n1\n"


def test_a_damaged_piece_is_an_error_of_ours(tmp_path):
    """Any byte may be changed, and any end missing."""
    draw = random.Random(0)
    content = zlib.compress(os.urandom(3000)) * 2
    good = put_piece(tmp_path / "good", {"metrics.csv": content, "a.json": b"{}" * 100}).read_bytes()
    refused = 0
    for number in range(300):
        damaged = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(good))] = draw.randrange(256)
        path = tmp_path / "piece"
        path.write_bytes(damaged if number % 3 else damaged[: draw.randrange(len(good))])
        folder = tmp_path / f"copy{number}"
        try:
            take(folder, FolderState(1), path)
        except PieceError:
            refused += 1
        else:
            assert (folder / "metrics.csv").read_bytes() == content

    assert refused > 150


def test_a_piece_with_wrong_offsets_is_damaged(tmp_path):
    """Its directory gives a later start, so that its members begin before the file."""
    path = put_piece(tmp_path / "piece", {"a.json": b"{}"})
    damaged = bytearray(path.read_bytes())
    (offset,) = struct.unpack_from("<I", damaged, len(damaged) - 6)
    struct.pack_into("<I", damaged, len(damaged) - 6, offset + 1000)
    path.write_bytes(damaged)

    with pytest.raises(PieceError, match="is damaged"):
        take(tmp_path / "copy", FolderState(1), path)


def test_a_piece_too_large_for_memory_or_disk_is_refused(tmp_path):
    """A zip of a few kilobytes may claim to hold gigabytes."""
    path = put_piece(tmp_path / "piece", {"metrics.csv": bytes(10 << 20)})
    assert path.stat().st_size < 1 << 20
    with zipfile.ZipFile(tmp_path / "many", "w") as archive:
        for number in range(20_000):
            archive.writestr(f"files/{number}", b"")
    about = {
        "format": 1,
        "session": 1,
        "first": 1,
        "last": 1,
        "needs": [],
        "files": {"a.csv": [0, 5]},
        "parts": [],
    }
    about |= {
        "objects": [],
        "plain": None,
        "status": "running",
        "written_at": 0,
        "seconds": 10,
        "data": {"a.csv": [0, 5]},
    }
    with zipfile.ZipFile(tmp_path / "longer", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("piece.json", json.dumps(about))
        archive.writestr("files/a.csv", bytes(10 << 20))

    for name in ("many", "longer"):
        with pytest.raises(PieceError):
            take(tmp_path / "copy", FolderState(1), tmp_path / name)

    assert not [path for path in (tmp_path / "copy").rglob("*") if path.stat().st_size > 5]


def test_a_piece_of_a_newer_format_raises(tmp_path):
    """A reader does not guess."""
    with zipfile.ZipFile(tmp_path / "piece", "w") as archive:
        archive.writestr("piece.json", json.dumps({"format": 2}))

    with pytest.raises(PieceError, match="newer format"):
        take(tmp_path / "copy", FolderState(1), tmp_path / "piece")


def test_a_damaged_state_starts_over(tmp_path):
    """The state of the copy may contain anything."""
    for content in ("{", "[]", '{"rank0": 3}', '{"rank0": {"session": 1, "last": 1, "files": {"a": 5}}}'):
        (tmp_path / ".pieces.json").write_text(content)

        assert FolderState.read(tmp_path, "rank0") == FolderState()
