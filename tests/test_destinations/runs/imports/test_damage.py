"""Damages every source in every way: the imported values are correct, or the report names what is missing."""

import json
import random
import struct
import zipfile

import attrs
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from destinations.run_directory import read_rows
from destinations.runs import Run
from destinations.runs.imports import SOURCES, SourceError, import_runs
from destinations.runs.move.stream import Values
from tests.test_destinations.runs.folders import write_lightning
from tests.test_destinations.runs.imports.wandb_logs import history, log_bytes

STEPS = 40
TRUTH = [
    (step, name, value) for step in range(STEPS) for name, value in (("a", step / 7), ("b", step * 1000))
]
PLACES = 12


def write_events(path, rows, mode="wb"):
    """Writes an event file with a record for each value."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    with path.open(mode) as file:
        for step, name, value in rows:
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
            record = Event(step=step, wall_time=1e9 + step, summary=summary).SerializeToString()
            length = struct.pack("<Q", len(record))
            sums = [struct.pack("<I", masked_crc32c(data)) for data in (length, record)]
            file.write(length + sums[0] + record + sums[1])


def write_log(path, rows):
    """Writes a W&B log with a record for each value."""
    path.write_bytes(
        log_bytes(history(_step=step, _timestamp=1e9, **{name: value}) for step, name, value in rows)
    )


def frame_of(rows):
    """Returns a table with a row for each step."""
    return pd.DataFrame(
        [
            {"step": step} | {name: value for at, name, value in rows if at == step}
            for step in {row[0]: 0 for row in rows}
        ]
    )


def write_parquet(path, rows):
    """Writes Parquet pages with checksums."""
    table = pa.Table.from_pandas(frame_of(rows), preserve_index=False)
    pq.write_table(table, path, write_page_checksum=True, data_page_size=64)


def write_archive(path, rows):
    """Writes an offline experiment of Comet."""
    messages = [
        {
            "type": "metric_msg",
            "payload": {"metric": {"metricName": name, "metricValue": value, "step": step}},
        }
        for step, name, value in rows
    ]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("experiment.json", json.dumps({"offline_id": "one", "start_time": 1e12}))
        archive.writestr("messages.json", "".join(json.dumps(one) + "\n" for one in messages))


def write_export(path, rows):
    """Writes a part as Neptune's exporter does."""
    table = pa.table(
        {
            "project_id": ["p"] * len(rows),
            "run_id": ["one"] * len(rows),
            "attribute_path": [name for _, name, _ in rows],
            "attribute_type": ["float_series"] * len(rows),
            "step": [float(step) for step, *_ in rows],
            "timestamp": [1e9] * len(rows),
            "float_value": [float(value) for *_, value in rows],
        }
    )
    pq.write_table(table, path, write_page_checksum=True, data_page_size=64)


@attrs.frozen
class Format:
    """A format: its source, its file, its writer, and whether it has checksums."""

    source: str
    name: str
    write: object
    has_checksums: bool = True


def write_text(separator, **names):
    """Returns a function that writes a text table, with columns renamed."""
    return lambda path, rows: frame_of(rows).rename(columns=names).to_csv(path, index=False, sep=separator)


CHART = {"step": "Step", "a": "run - a", "b": "run - b"}
FORMATS = {
    "tensorboard": Format("tensorboard", "events.out.tfevents.1", write_events),
    "wandb": Format("wandb", "run-one.wandb", write_log),
    "csv": Format("table", "t.csv", write_text(","), has_checksums=False),
    "tsv": Format("table", "t.tsv", write_text("\t"), has_checksums=False),
    "chart": Format("wandb-export", "t.csv", write_text(",", **CHART), has_checksums=False),
    "parquet": Format("table", "t.parquet", write_parquet),
    "comet": Format("comet", "one.zip", write_archive),
    "neptune": Format("neptune", "one_part_0.parquet", write_export),
}


def read(place, source):
    """Returns the values that are read, and the failures that are reported."""
    try:
        report = import_runs(place, place.parent / "runs", source=source, dry_run=True)
    except SourceError as error:
        return [], [str(error)]
    (found,) = [one for one in SOURCES if one.name == source]
    values = []
    if not report.failures:
        for run in found.runs(str(place), {}):
            run.facts(run)
            items = [item for item in run.read(run) if isinstance(item, Values)]
            values += [(item.step, *pair) for item in items for pair in item.metrics.items()]
    return values, report.failures


def place_of(form, folder):
    """Returns the place to import from."""
    return folder if form.source in {"neptune", "tensorboard"} else folder / form.name


@pytest.fixture(params=FORMATS)
def form(request, tmp_path):
    """A format, a folder with a file in that format, and the file."""
    form = FORMATS[request.param]
    folder = tmp_path / "source"
    folder.mkdir()
    form.write(folder / form.name, TRUTH)
    return form, folder, folder / form.name


def assert_correct_or_reported(form, folder):
    """Asserts that all values are there and correct, unless a failure is reported."""
    values, failures = read(place_of(form, folder), form.source)
    if failures:
        return
    assert len(values) == len(TRUTH)
    if form.has_checksums:
        # The names in the footer of a Parquet file have no checksum.
        found, wanted = (
            sorted((step, np.float32(value)) for step, _, value in one) for one in (values, TRUTH)
        )
        assert found == wanted


def test_intact_source_is_read_without_failures(form):
    """All its values are there."""
    values, failures = read(place_of(*form[:2]), form[0].source)

    assert (len(values), failures) == (len(TRUTH), [])
    assert_correct_or_reported(*form[:2])


def test_truncated_source_is_reported(form):
    """This includes a missing end of a line, a record or a value."""
    form, folder, file = form
    whole = file.read_bytes()
    draw = random.Random(0)
    for size in (0, 1, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(PLACES))):
        file.write_bytes(whole[:size])

        _, failures = read(place_of(form, folder), form.source)

        # A cut between two lines can't be detected, and an empty event file is valid.
        is_whole = whole[:size].endswith(b"\n") or (form.source, size) == ("tensorboard", 0)
        assert failures or is_whole, size


def flip(data, at, draw):
    """Changes one bit."""
    data[at] ^= 1 << draw.randrange(8)


def overwrite(data, at, draw):
    """Writes other bytes over some."""
    data[at : at + 20] = draw.choice([b"\xff", b"\0", b"\n", b"7"]) * min(20, len(data) - at)


def remove(data, at, draw):
    """Leaves bytes out."""
    del data[at : at + draw.choice([1, 7, 50])]


def test_damage_is_reported_or_harmless(form):
    """The damage is at random places, and in the first and last bytes."""
    form, folder, file = form
    whole = file.read_bytes()
    draw = random.Random(1)
    # Without checksums, other damage of a text may produce valid rows.
    for damage in (flip, overwrite, remove) if form.has_checksums else (flip,):
        for at in (0, 4, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(PLACES))):
            data = bytearray(whole)
            damage(data, at, draw)
            file.write_bytes(data)

            assert_correct_or_reported(form, folder)


def test_source_that_disappears_during_the_import_is_reported(form, tmp_path):
    """The run is not marked as imported."""
    form, folder, file = form

    def remove_source(*_):
        file.unlink(missing_ok=True)

    report = import_runs(
        place_of(form, folder), tmp_path / "runs", source=form.source, progress=remove_source
    )
    form.write(file, TRUTH)
    again = import_runs(place_of(form, folder), tmp_path / "runs", source=form.source)

    assert report.failures
    assert (attrs.asdict(again)["values"], again.unchanged, again.failures) == (len(TRUTH), 0, [])


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "csv", "tsv", "chart"])
def test_rows_written_during_an_import_arrive_with_the_next(tmp_path, name):
    """The first import has the rows that were there when it began."""
    form, folder = FORMATS[name], tmp_path / "source"
    folder.mkdir()
    file, half = folder / form.name, TRUTH[: len(TRUTH) // 2]
    form.write(file, TRUTH)
    whole = file.read_bytes()
    form.write(file, half)
    start = file.read_bytes()
    assert whole.startswith(start)
    # The file grows by a part of a record, as a writer may leave it.
    appended = [whole[len(start) :][:20], whole[len(start) + 20 :]]

    def grow(_done, _runs, items):
        if items and len(appended) > 1:
            with file.open("ab") as growing:
                growing.write(appended.pop(0))

    first = import_runs(place_of(form, folder), tmp_path / "runs", progress=grow)
    with file.open("ab") as growing:
        growing.write(appended[0])
    second = import_runs(place_of(form, folder), tmp_path / "runs")

    assert attrs.asdict(first)["values"] >= len(half)
    assert (attrs.asdict(second)["values"], second.failures) == (len(TRUTH), [])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (b"0,1\n1,2\n2,3", "1 last rows without a line end, which may be cut off"),
        (b"0,1\n1.2\n2,3\n", "1 rows with other cells than the first line"),
        (b"0,1\n1,\xb2\n2,3\n", "1 cells that are no numbers"),
    ],
)
def test_damage_in_a_lightning_folder_is_reported(tmp_path, rows, said):
    """The readable rows are imported."""
    write_lightning(tmp_path / "logs/version_0")
    (tmp_path / "logs/version_0/metrics.csv").write_bytes(b"step,loss\n" + rows)

    report = import_runs(tmp_path / "logs", tmp_path / "runs")

    assert report.failures[0].partition(": ")[2] == said
    assert report.rows >= 2


HOSTILE = [
    "..",
    "../../up",
    "/abs",
    "a\0b",
    "a" * 300,
    "{run_name}",
    "{rank}/../..",
    "~",
    "con\n",
    "a\\b",
    "",
    "\x1b[2J",
]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "csv", "comet", "neptune"])
def test_hostile_names_stay_inside_the_folder(tmp_path, name):
    """Each value is imported under its name or reported, and nothing is written elsewhere."""
    form, folder = FORMATS[name], tmp_path / "top/source"
    folder.mkdir(parents=True)
    rows = [(step, metric, 1.0) for step, metric in enumerate(HOSTILE)]
    form.write(folder / form.name, rows)

    report = import_runs(place_of(form, folder), tmp_path / "top/runs", source=form.source)

    (run,) = (Run.open(path) for path in (tmp_path / "top/runs").iterdir())
    found = {metric for row in read_rows(run.path) for metric in row.metrics}
    lost = report.failure_count + report.left_out.total()
    assert len(found) + lost >= len(HOSTILE)
    assert {"..", "../../up", "/abs", "{run_name}", "~"} <= found
    assert [path.name for path in tmp_path.iterdir()] == ["top"]
    assert {path.name for path in (tmp_path / "top").iterdir()} == {"source", "runs"}
