"""Readers of damaged files return or raise an error of their package; they never raise another error or hang.

`fuzzing` sets the number of examples.
"""

import contextlib
import json
import os
import struct
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from destinations import RunDirectory
from destinations.run_directory.frames import MAGIC, encode_frame, keys_frame
from destinations.run_directory.layout import header_end
from destinations.runs import Run, RunsError, open_runs
from destinations.runs.content.follow import Follower
from destinations.runs.dataset.tables import Location
from destinations.runs.errors import DatasetError, FilterError
from destinations.runs.index.filters import parse_filter
from destinations.trackers.event_file import EventFile, records
from events import CheckpointError, read_checkpoint
from tests.hostile.fuzzing import changed, changed_text, damaged, fuzz, limit, little_memory
from tests.test_destinations.run_directory.test_parts import as_csv
from tests.test_destinations.runs.foreign_runs import write_full_run, write_killed_run, write_lightning_run
from tests.test_destinations.runs.written import Written
from uploads import UploadError, UploadState, open_store
from uploads import command_line as commands
from uploads.disk import to_utf8
from uploads.handle import Outcome
from uploads.names import check_remote_name
from uploads.spool.entry import Entry, read_attempts, read_reason
from uploads.spool.spool import Spool
from uploads.stores.registry import open_object
from uploads.stores.uri import identity_of, options_of

__all__ = ["limit"]

# Runs.

RUN_FILES = {
    "full": [
        *(
            "sidecar.json",
            "summary.json",
            "environment.json",
            "sessions.jsonl",
            "media.jsonl",
            "tables.jsonl",
        ),
        *("histograms.jsonl", "texts.jsonl", "traces.jsonl", "artifacts.jsonl", "edits.json", "hparams.yaml"),
        *("metrics.csv", "heartbeat", "media/Cloud/00000003_0.ply", "tables/Table/00000003_0.csv"),
        *("media/Sound/00000003_0.wav", "media/Inputs/00000003_0.png"),
    ],
    "killed": ["journal/rank0/position.json", "journal/rank0/00000001.journal", "metrics.csv"],
    "lightning": ["metrics.csv", "hparams.yaml"],
    "long": ["parts/metrics/00000001.parquet", "parts/metrics/00000002.csv"],
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A folder with a run of each kind."""
    root = tmp_path_factory.mktemp("originals")
    write_full_run(root / "full")
    write_killed_run(root / "killed")
    write_lightning_run(root / "lightning")
    write_long_run(root / "long")
    (root / "full/edits.json").write_text('{"added_tags": ["a"], "notes": "n", "archived": false}')
    (root / "full/traces.jsonl").write_text('{"step": 1, "time": 1.0, "traces": {"a": {"b": 1}}}\n')
    return root


class SmallParts(RunDirectory):
    """Closes parts of two kilobytes."""

    _part_bytes = 2000


class WrittenInParts(Written):
    """A run with small parts."""

    kind = SmallParts


def write_long_run(folder):
    """Writes a run with two parts, one of them as CSV, and rows after them."""
    with WrittenInParts(folder) as run:
        for step in range(150):
            run.log({"loss": step / 7, "count": step, "mixed": 0 if step % 2 else 0.5}, step)
            if step % 30 == 29:
                run.flush()
    as_csv(folder, [2])


def ask(question):
    """Queries a run, which answers or raises a documented error."""
    with contextlib.suppress(OSError, ValueError, RunsError):
        return question()
    return None


def follow(run):
    """Follows the run once, and returns what was found."""
    with Follower(run.path) as follower:
        return list(follower.poll())


def read_run(path):
    """Reads everything in a run, and asserts that each path is within its folder."""
    run = Run.open(path)
    for question in (
        *(lambda: repr(run), lambda: run.alive, lambda: run.hyperparameters, lambda: run.summary),
        *(lambda: run.environment, lambda: run.sessions, lambda: run.receipt, run.ranks, run.metric_names),
        *(lambda: run.series("loss"), lambda: list(run.blocks()), lambda: follow(run), run.histograms),
        *(run.texts, run.traces, run.record_counts, run.damaged_lines),
    ):
        ask(question)
    for image in ask(run.images) or ():
        assert image.path.is_relative_to(path)
        ask(image.load)
        ask(image.array)
        for mask in image.masks.values():
            assert mask.path.is_relative_to(path)
            ask(mask.load)
    for sound in ask(run.audio) or ():
        assert sound.path.is_relative_to(path)
        ask(sound.load)
    for cloud in ask(run.point_clouds) or ():
        assert cloud.path.is_relative_to(path)
        ask(cloud.load)
    for table in ask(run.tables) or ():
        assert table.path.is_relative_to(path)
        ask(lambda table=table: run.table(table.name, table.step).to_dicts())
    for artifact in ask(run.artifacts) or ():
        assert artifact.path.is_relative_to(path)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in RUN_FILES.items() for name in names]
)
def test_a_damaged_file_of_a_run_is_read_or_reported(originals, kind, name):
    """Bytes are damaged, and JSON values get other types."""
    path = originals / kind / name
    content = path.read_bytes()
    contents = damaged(content)
    if name.endswith((".json", ".jsonl")):
        contents |= changed_text(content)

    @fuzz(60)
    @given(contents)
    def check(data):
        path.write_bytes(data)
        read_run(originals / kind)

    try:
        check()
    finally:
        path.write_bytes(content)


# Frames of a journal.

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.tuples(inner, inner) | st.tuples(inner),
    max_leaves=12,
)
HEADS = st.sampled_from(
    [(0,), ("keys", 0), ("resume",), ("boundary",), ("follows",), (-1,), (1 << 40,), (True,)]
)


@fuzz(200)
@given(st.lists(st.tuples(HEADS, st.lists(VALUES, max_size=5)), max_size=5))
@example([((0, 1, None), [(1,), (2.0,)]), ((0, 1 << 70, 1 << 70, 0.0), [(float("nan"),)])])
def test_frames_with_a_valid_checksum_and_any_content_are_read_or_skipped(originals, payloads):
    """Valid frames of any values, in any order, become rows or are skipped."""
    path = originals / "killed/journal/rank0/00000001.journal"
    content = path.read_bytes()
    frames = [keys_frame(0, ("loss",)), *(encode_frame((*head, *values)) for head, values in payloads)]
    try:
        path.write_bytes(MAGIC + b"".join(frames) + bytes(8))
        read_run(originals / "killed")
    finally:
        path.write_bytes(content)


# Filters.

WORDS = st.sampled_from(
    [
        *(
            "summary.loss",
            "hparams.lr",
            "status",
            "tags",
            "created_at",
            "alive",
            "now",
            "now-7d",
            "2026-02-30",
        ),
        *("and", "or", "not", "in", "exists", "(", ")", "[", "]", ",", "<", "<=", "==", "!=", "~", "=", "!"),
        *(
            "1e999",
            "9" * 500,
            "-inf",
            "nan",
            "'a'",
            '"',
            "`",
            "\\",
            "'(a+)+$'",
            "'['",
            '"\0"',
            "now" + "+9w" * 99,
        ),
        *(
            "now+" + "9" * 400 + "w",
            "summary.'\ud800'",
            "9999-12-31T23:59:59-23:59",
            "0001-01-01",
            "_",
            "1_0_",
        ),
    ]
)


@fuzz(400)
@given(st.text(max_size=20) | st.lists(WORDS | st.text(max_size=3), max_size=12).map(" ".join))
@example("not " * 50_000 + "alive")
@example("(" * 50_000)
@example("summary.loss < 1 and " * 5000 + "alive")
def test_any_filter_is_parsed_or_raises(originals, text):
    """A filter is parsed and its query runs, or it raises FilterError."""
    try:
        parse_filter(text, 1e9)
    except FilterError as error:
        str(error)
        return
    with open_runs(originals, cache=originals.parent / "cache") as runs, contextlib.suppress(FilterError):
        runs.query(where=text)


# Single-line texts: hyperparameters, headers, paths of records.


@pytest.mark.parametrize(
    "text",
    [
        *("[" * 1_000_000, "- " * 500_000, "? " * 500_000, "{a: " * 300_000, "a: 1" + ":1" * 1_500_000),
        *(
            "a: 0x" + "f" * 4_000_000,
            "a: &a [*a]",
            "a: 2001-13-45",
            "a: !!binary 1",
            "a: !!python/name:os.system x",
        ),
    ],
    ids=lambda text: f"{text[:8]}-{len(text)}",
)
def test_expensive_hyperparameters_are_reported(tmp_path, text):
    """A few MiB of YAML can't end the process or keep it busy: the run is listed with an error."""
    write_lightning_run(tmp_path / "run")
    (tmp_path / "run/hparams.yaml").write_text(text)

    run = Run.open(tmp_path / "run")

    assert run.hparams or text.endswith("os.system x") or "hparams.yaml cannot be read" in run.record.problem
    assert list(run.series("loss").value) == [0.5, 0.25]


@pytest.mark.parametrize(
    "content",
    [b"step,epoch,time," + b"a" * 200_000 + b"\n1,2,3,4\n", b"step," + b"a" * 200_000 + b"\n1,2\n"],
    ids=["ours", "foreign"],
)
def test_a_column_name_that_csv_cannot_read_raises(tmp_path, content):
    """Reading the rows raises OSError, as for other unreadable files."""
    write_lightning_run(tmp_path / "run")
    (tmp_path / "run/metrics.csv").write_bytes(content)
    run = Run.open(tmp_path / "run")

    for question in (
        run.metric_names,
        lambda: run.series("loss"),
        lambda: list(run.blocks()),
        lambda: follow(run),
    ):
        with pytest.raises(OSError, match="header of the CSV cannot be read"):
            question()


def test_an_odd_quote_in_a_header_takes_linear_time():
    """The reader looks at each of a million lines once to find that the header has no end."""
    assert header_end(b'"step,loss\n' + b"1,2\n" * 1_000_000) == 0


@pytest.mark.parametrize(
    "path", ["a" * 300 + "/x.png", "a/" * 3000 + "x.png", "../x.png", "/etc/passwd", "."]
)
def test_a_bad_path_affects_only_its_record(originals, path):
    """A record whose path is too long or leaves the folder is a damaged line; the others are read."""
    index = originals / "full/media.jsonl"
    content = index.read_bytes()
    try:
        record = {"type": "image", "name": "bad", "step": 1, "path": path}
        index.write_bytes(json.dumps(record).encode() + b"\n" + content)
        run = Run.open(originals / "full")
        names = {image.name for image in run.images()}
        damaged_lines = run.damaged_lines()
    finally:
        index.write_bytes(content)

    assert names == {"Inputs"}
    assert damaged_lines == {"media.jsonl": 1}


# Spools.

ENTRY = Entry(
    *(f"{1:016x}", 1, "a/b.pt"),
    overwrite=True,
    size=4,
    crc32=7,
    staging="moved",
    source="/a",
    after={f"{2:016x}": "c"},
    submitted_at="now",
)
OUTCOME = Outcome(f"{1:016x}", "a/b.pt", UploadState.DONE, "s3://b/a/b.pt", 4, "0" * 64)
DESCRIPTION = {
    "format": "uploads-spool",
    "version": 1,
    "store": {"uri": "s3://b/p", "options": {"region": "x", "part_bytes": 5}, "left_out": ["a"]},
}


@fuzz(300)
@example(text=ENTRY.to_text().replace('"now"', r'"\ud800"').encode())
@given(
    damaged(ENTRY.to_text().encode())
    | changed(json.loads(ENTRY.to_text())).map(lambda one: json.dumps(one).encode())
)
def test_a_manifest_with_any_content_is_an_entry_or_raises(text):
    """It is an entry that `submit` could have written, or raises UploadError."""
    try:
        entry = Entry.parse(text)
    except UploadError:
        return

    check_remote_name(entry.remote_name)
    assert Path("/spool/pending", entry.folder).parent == Path("/spool/pending")
    # As `submit` writes it: a source may be a path that isn't UTF-8.
    assert Entry.parse(to_utf8(entry.to_text())) == entry


@pytest.mark.parametrize(
    "name", ["spool.json", "status.json", "delivered.jsonl", "attempts.json", "reason.json", "queue.lock"]
)
def test_a_damaged_spool_file_is_read_or_raises(tmp_path, name):
    """The commands that read a spool print its content, or raise UploadError or ValueError."""
    spool = Spool(tmp_path / "spool")
    spool.create(DESCRIPTION["store"])
    document = {
        "spool.json": DESCRIPTION,
        "status.json": {"pid": 1, "workers": [{"name": "a"}], "seconds": 1.5, "parked": "x"},
        "attempts.json": {"count": 1, "reason": "x", "is_answer_lost": True},
    }.get(name, {"folder": ENTRY.folder, **OUTCOME.to_json()})
    place = spool.failed / "rejected" / ENTRY.folder
    place.mkdir()
    (place / "entry.json").write_text(ENTRY.to_text())
    path = (place if name in {"attempts.json", "reason.json"} else spool.path) / name
    content = json.dumps(document).encode() + b"\n"

    @fuzz(60)
    @given(damaged(content) | changed_text(content))
    def check(data):
        path.write_bytes(data)
        assert all(isinstance(one, Outcome) for one in spool.delivered())
        list(spool.superseded())
        assert all(len(folder) == len(ENTRY.folder) for folder in spool.newest_delivered().values())
        assert read_attempts(place).count >= 0
        read_reason(place)
        for question in (
            spool.describe,
            lambda: commands.status(spool.path),
            lambda: spool.assign_store({"uri": "s3://other"}),
            lambda: commands._store_of(spool),
        ):
            with contextlib.suppress(UploadError, ValueError):
                question()

    check()


# Stores and datasets by URI.

URI_PARTS = st.sampled_from(
    [
        *(
            "s3",
            "gs",
            "az",
            "file",
            "x",
            "S3",
            "://",
            ":/",
            "//",
            "/",
            "?",
            "#",
            "@",
            ":",
            "[",
            "]",
            "%",
            "%ff",
            "%00",
        ),
        *(
            "b",
            "..",
            ".",
            "=",
            "&",
            "client=obstore",
            "endpoint_url=http://[",
            "part_bytes=x",
            "region=a",
            "location=1",
        ),
        *(
            "uri=1",
            "scheme=1",
            "bucket=b",
            "prefix=p",
            "foo=1",
            "profile=none",
            "u:p@",
            "h:99999",
            "\0",
            "\ud800",
            "é",
        ),
    ]
)
URIS = st.one_of(
    st.text(max_size=12),
    st.lists(URI_PARTS, max_size=9).map("".join),
    st.tuples(
        st.sampled_from(["s3://b", "gs://b/", "az://b/p", "file:///a"]), st.lists(URI_PARTS, max_size=5)
    ).map(lambda parts: parts[0] + "?" + "&".join(parts[1])),
)


@fuzz(300)
@given(URIS)
@example("sftp://h/x?foo=1")
@example("gs://b?x=1")
@example("s3://b?location=1")
@example("file://h")
@example("s3://b?profile=none")
def test_any_uri_is_opened_or_raises(uri):
    """A store opens without asking a server, or raises ValueError; objects and datasets do the same."""
    identity_of(uri)
    options_of(uri)
    for question in (lambda: open_store(uri).uri("a"), lambda: open_object(uri)):
        with contextlib.suppress(ValueError, UploadError):
            question()
    with contextlib.suppress(DatasetError):
        Location.of(uri, {})


# Checkpoints.


@fuzz(100)
@given(
    st.binary(max_size=40)
    | st.lists(st.sampled_from(["..", "/", "a", ".", "x.pt", "a" * 300, "\0"]), max_size=9)
    .map("".join)
    .map(str.encode)
)
@example(b"../secret.pt")
@example(b"a" * 300)
def test_a_pointer_with_any_content_stays_in_its_folder_or_raises(tmp_path_factory, content):
    """Reading returns a checkpoint in the folder, or raises CheckpointError or FileNotFoundError."""
    folder = tmp_path_factory.mktemp("outside") / "checkpoints"
    folder.mkdir()
    (folder.parent / "secret.pt").write_bytes(b"not ours")
    (folder / "latest.symlink").write_bytes(content)

    with pytest.raises((CheckpointError, FileNotFoundError)) as caught:
        read_checkpoint(folder / "latest.symlink")

    assert "BadZipFile" not in str(caught.value)


# Event files of TensorBoard.


@pytest.fixture(scope="module")
def event_bytes(tmp_path_factory):
    """Returns the bytes of an event file with two records."""
    path = tmp_path_factory.mktemp("events") / "events.out.tfevents.1"
    file = EventFile(os.open(path, os.O_WRONLY | os.O_CREAT))
    file.write(b"first")
    file.write(b"second")
    file.close()
    return path.read_bytes()


@fuzz(100)
@given(st.data())
def test_a_damaged_event_file_is_read_as_far_as_it_goes(tmp_path_factory, event_bytes, data):
    """Reading takes no more memory than the file."""
    length = st.sampled_from([1 << 30, 1 << 62, (1 << 64) - 1]).map(
        lambda one: struct.pack("<QI", one, 0) + b"abc"
    )
    path = tmp_path_factory.mktemp("events") / "events.out.tfevents.1"
    path.write_bytes(data.draw(damaged(event_bytes) | length.map(lambda one: event_bytes + one)))

    with little_memory():
        found = list(records(path))

    assert sum(map(len, found)) <= path.stat().st_size
