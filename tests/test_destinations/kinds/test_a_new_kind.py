"""Declares a kind of record only in this file: it's written, read, exported, sent and shown."""

import json
from types import SimpleNamespace

import attrs
import pytest

from destinations import Functions, InMemory, RunDirectory, TensorBoard, TextFile
from destinations.kinds import KINDS
from destinations.kinds.kind import Kind
from destinations.runs import Run, open_runs
from destinations.runs.send.replay import replay
from destinations.testing import DestinationContract
from destinations.viewer.catalog import Catalog
from destinations.viewer.details import details, media
from destinations.viewer.files import STATIC
from destinations.viewer.site import export_site
from events import Logger, RecordError, State, WriteRate
from events import Run as WritingRun
from events.logger.records import RECORD_KINDS, RecordKind


@attrs.frozen
class Molecule:
    """A molecule, as a list of atoms."""

    name: str
    step: int | None
    time: float | None
    atoms: tuple[str, ...]


def check(tools, atoms, **others):
    """Checks the arguments of a call, for `RECORD_KINDS`."""
    if not isinstance(atoms, list | tuple):
        raise RecordError(f"molecule {others['name']!r} must have a list of atoms, got {atoms!r}.")
    return {"atoms": [str(atom) for atom in atoms], **others}


def write(name, *, atoms):
    """Copies the arguments; the background thread writes them."""
    copied = list(atoms)

    def work(output):
        output.add_line({"path": output.add_file(".xyz", " ".join(copied).encode()), "atoms": copied})

    return len(copied), work


MOLECULE = Kind(
    name="molecule",
    index="molecules.jsonl",
    folder="molecules",
    write=write,
    parse=lambda line: Molecule(**line.call(), atoms=tuple(line.fields["atoms"])),
    replay=lambda lines: {"atoms": lines[0].fields["atoms"]},
    shows="text",
    is_single=True,
    samples=({"atoms": ["O", "O"], "name": "oxygen", "step": 1},),
    page_fields=lambda molecule, fields, file_of: {"step": molecule.step, "text": "".join(molecule.atoms)},
)


@pytest.fixture(autouse=True)
def declared():
    """Declares the kind during a test."""
    KINDS.append(MOLECULE)
    RECORD_KINDS[MOLECULE.method] = RecordKind(check)
    yield
    KINDS.remove(MOLECULE)
    del RECORD_KINDS[MOLECULE.method]


def water(step=3, atoms=("H", "H", "O")):
    """Returns the arguments of a call."""
    return {"atoms": list(atoms), "name": "water", "step": step}


@pytest.fixture
def written(tmp_path):
    """Writes and reads a run with two molecules, and returns what other destinations received."""
    memory, text = InMemory(), TextFile(str(tmp_path / "log.txt"))
    folder = tmp_path / "runs" / "mine"
    with WritingRun([RunDirectory(folder), memory, text], run_name="mine", raise_errors=True) as run:
        run.log_record("molecule", water())
        run.log_record("molecule", water(7, "OH"))
    return SimpleNamespace(memory=memory, text=tmp_path / "log.txt", folder=folder, run=Run.open(folder))


def test_run_folder_has_a_line_for_each_record(written):
    """`RunDirectory` appends lines to the index of the kind, and files to the folder of the kind."""
    lines = [json.loads(line) for line in (written.folder / "molecules.jsonl").read_text().splitlines()]

    assert [(line["step"], line["name"], line["atoms"]) for line in lines] == [
        (3, "water", ["H", "H", "O"]),
        (7, "water", ["O", "H"]),
    ]
    assert [(written.folder / line["path"]).read_text() for line in lines] == ["H H O", "O H"]


def test_reader_returns_the_records(written):
    """`Run.records` parses and counts them like any kind."""
    found = written.run.records("molecules", "water")

    assert [(one.step, one.atoms) for one in found] == [(3, ("H", "H", "O")), (7, ("O", "H"))]
    assert written.run.record_counts()["molecules"].count == 2
    assert written.run.damaged_lines() == {}


def test_damaged_line_is_counted(written):
    """The kind raises for it, so it counts as a damaged line of the index."""
    with (written.folder / "molecules.jsonl").open("a") as file:
        file.write('{"name": "no atoms"}\n')

    assert written.run.damaged_lines() == {"molecules.jsonl": 1}
    assert len(written.run.records("molecules")) == 2


def test_in_memory_and_text_file_keep_it(written):
    """They keep its single argument with its name and step."""
    records = [(one.kind, one.name, one.step, one.value) for one in written.memory.records]

    assert records[0] == ("molecule", "water", 3, ["H", "H", "O"])
    assert '[molecule][batch=7]: water: ["O", "H"]\n' in written.text.read_text()


def test_destination_contract_logs_it(tmp_path):
    """`DestinationContract` logs the samples of the kind to each destination."""
    memory = InMemory()

    DestinationContract().test_takes_every_kind_of_record(memory, tmp_path)

    assert ("molecule", "oxygen") in [(one.kind, one.name) for one in memory.records]


def test_it_is_sent_to_another_destination(written):
    """`replay` logs it with its original step."""
    memory = InMemory()

    report = replay(written.run, memory)

    assert report.records["molecule"] == 2
    assert [(one.step, one.value) for one in memory.records] == [(3, ["H", "H", "O"]), (7, ["O", "H"])]


def test_unaware_destination_is_not_called(written, tmp_path):
    """Neither a logger nor `replay` calls it, and a tracker ignores the record."""
    seen = []
    board = TensorBoard(str(tmp_path / "board"))

    with WritingRun(
        [Functions(log_text=lambda *text: seen.append(text)), board], run_name="r", raise_errors=True
    ) as run:
        run.log_record("molecule", water())
    report = replay(written.run, Functions())

    assert seen == []
    assert report.left_out["molecule"] == 2


def test_page_shows_it(written, tmp_path):
    """The API lists it, gives its fields, and names its renderer."""
    with open_runs(tmp_path / "runs", cache=tmp_path / "cache") as runs:
        catalog = Catalog(runs)
        found = details(catalog, written.run)
        items = media(written.run, "molecules", "water")["items"]
        kinds = catalog.info()["kinds"]

    assert found["media"]["molecules"] == {"water": [3, 7]}
    assert items == [{"step": 3, "text": "HHO"}, {"step": 7, "text": "OH"}]
    assert {"name": "molecules", "shows": "text"} in kinds


def test_page_has_a_renderer_for_each_kind():
    """`shows` names one of the page's `RENDERERS`."""
    script = (STATIC / "media.js").read_text()
    renderers = script[script.index("const RENDERERS = {") :]

    assert [kind.name for kind in KINDS if kind.shows and f"\n  {kind.shows}: {{" not in renderers] == []


def test_exported_site_has_it(written, tmp_path):
    """The site has the API's responses for it."""
    with open_runs(tmp_path / "runs", cache=tmp_path / "cache") as runs:
        report = export_site(Catalog(runs), tmp_path / "site")

    data = "".join(path.read_text() for path in (tmp_path / "site" / "data").glob("*.js"))
    assert report.left_out == []
    assert '"text":"HHO"' in data.replace(" ", "").replace('\\"', '"')


def test_it_is_checked_at_the_call_and_limited_by_a_write_rate():
    """Its check raises in the caller's thread, and a write rate for media limits it."""
    memory = InMemory(write_rate=WriteRate(every_steps=1000, media=True))
    logger = Logger(State("mine"), memory, strict=True)

    with pytest.raises(RecordError, match="molecule 'water' must have a list of atoms, got 5"):
        logger.log_record("molecule", {"atoms": 5, "name": "water", "step": 0})
    for step in range(3):
        logger.log_record("molecule", {"atoms": lambda: ["H"], "name": "water", "step": step})

    assert [one.step for one in memory.records] == [0]
    logger.flush()
    assert [one.step for one in memory.records] == [0, 2]


def test_undeclared_kind_is_rejected():
    """An unknown name is a bad value, and `log_metrics` is not a kind of record."""
    logger = Logger(State("mine"), InMemory())

    logger.log_record("molecul", water())
    logger.log_record("metrics", {"metrics": {"loss": 1.0}})

    assert logger.faults.value_counts == {("log_record", "RecordError"): 2}
