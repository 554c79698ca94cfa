"""Media and files with full disks, moved or replaced folders, and names with many files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from destinations import RunDirectory
from destinations.run_directory import read_series
from events import Run
from tests.test_destinations.run_directory.conftest import lines_on_a_small_disk

IMAGE = np.zeros((2, 2), np.uint8)


@pytest.fixture(autouse=True)
def _outside_of_any_repository(tmp_path, monkeypatch):
    """Spares each run three `git` processes, which would describe the repository."""
    monkeypatch.chdir(tmp_path)


def _sidecar(run_dir):
    return json.loads((run_dir / "sidecar.json").read_text("utf-8"))


def _lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


class FolderListings:
    """Counts how often folders below a path are listed.

    An audit hook can't be removed; it does nothing outside of `with`.
    """

    def __init__(self, path):
        self.path = str(path)
        self.count = 0
        self.is_on = False
        sys.addaudithook(self._hear)

    def _hear(self, event, arguments):
        if self.is_on and event in {"os.listdir", "os.scandir"}:
            self.count += str(os.path.realpath(arguments[0])).startswith(self.path)

    def __enter__(self):
        self.is_on = True
        return self

    def __exit__(self, *_):
        self.is_on = False


def test_an_image_does_not_list_the_files_of_its_name(tmp_path):
    """The cost of an image doesn't depend on how many there are."""
    folder = tmp_path / "run" / "media" / "a"
    folder.mkdir(parents=True)
    for step in range(3):
        (folder / f"{step:08d}_0.png").write_bytes(b"of an earlier session")

    with FolderListings(folder) as listings, Run(RunDirectory(tmp_path / "run"), run_name="r") as run:
        for step in range(10):
            run.log_images(IMAGE, "a", step=step)
            run.log_images(IMAGE, "a", step=step)

    names = [f"{step:08d}_{index}.png" for step in range(10) for index in range(3 if step < 3 else 2)]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert (folder / "00000000_0.png").read_bytes() == b"of an earlier session"
    assert listings.count == 0


def test_unwritten_media_are_in_the_sidecar_and_the_last_line(tmp_path, caplog):
    """The sidecar has their number and the status; texts and rows beside them are kept."""
    with Run(RunDirectory(tmp_path / "run"), run_name="r") as run:
        run.batch_start()
        run.flush()
        (tmp_path / "run" / "media").write_text("in the way")
        for step in range(5):
            run.log_images(IMAGE, "a", step=step)
            run.log_text("kept", step=step)
            run.log_metrics({"loss": 1.0}, step)
        (tmp_path / "file").write_text("x")
        (tmp_path / "run" / "artifacts").write_text("in the way")
        run.upload_file("name", tmp_path / "file")

    sidecar = _sidecar(tmp_path / "run")
    assert (sidecar["status"], sidecar["lost"]) == ("failed to write", {"media": 5, "files": 1})
    assert f"run folder {tmp_path / 'run'}: lost 1 files, 5 media and texts." in caplog.text
    assert "/proc/" not in caplog.text
    assert len(_lines(tmp_path / "run" / "texts.jsonl")) == 5
    assert len(read_series(tmp_path / "run", "loss")) == 5


def test_no_loss_is_reported_without_a_loss(tmp_path, caplog):
    """An empty table writes no line."""
    with Run(RunDirectory(tmp_path / "run"), run_name="r") as run:
        run.log_images(IMAGE)

    assert _sidecar(tmp_path / "run")["lost"] == {}
    assert "lost" not in caplog.text


def test_cells_and_traces_without_a_text_are_dropped_alone(tmp_path):
    """All other cells, columns and traces are written."""

    class Bad:
        def __repr__(self):
            raise ValueError("no text")

    cyclic = {}
    cyclic["again"] = cyclic
    with Run(RunDirectory(tmp_path / "run"), run_name="r") as run:
        run.log_table(["a", "b"], [[1, Bad()], [2, "x"]], "t", 0)
        run.log_traces({"bad": Bad(), "cyclic": cyclic, "good": {"a": 1}})

    (table,) = (tmp_path / "run" / "tables").rglob("*.csv")
    assert table.read_text() == "a,b\n1,<Bad without a text: ValueError>\n2,x\n"
    (trace,) = _lines(tmp_path / "run" / "traces.jsonl")
    assert trace["traces"]["good"] == {"a": 1}
    assert set(trace["traces"]) == {"bad", "cyclic", "good"}
    assert _sidecar(tmp_path / "run")["lost"] == {}


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="a folder is held by its path here")
def test_a_run_at_the_former_path_of_a_moved_folder_gets_nothing_of_the_other(tmp_path):
    """Texts, media and files follow the folder that the run holds, wherever it moves."""
    path, moved = tmp_path / "run", tmp_path / "moved"
    (tmp_path / "file").write_text("x")

    def log(run, who):
        run.log_text(who)
        run.log_images(IMAGE, who)
        run.log_table(["a"], [[1]], who)
        run.upload_file(who, tmp_path / "file")

    first = Run(RunDirectory(path, flush_seconds=1000), run_name="first")
    with first:
        log(first, "first")
        first.flush()
        path.rename(moved)
        with Run(RunDirectory(path), run_name="second") as second:
            log(second, "second")
            log(first, "first")
            first.close()

    for folder, who, times in ((moved, "first", 2), (path, "second", 1)):
        assert [line["text"] for line in _lines(folder / "texts.jsonl")] == [who] * times
        assert [line["name"] for line in _lines(folder / "media.jsonl")] == [who] * times
        assert [entry.name for entry in (folder / "media").iterdir()] == [who]
        assert len(list((folder / "media" / who).iterdir())) == times
        assert [entry.name for entry in (folder / "tables").iterdir()] == [who]
        assert [entry.name for entry in (folder / "artifacts").iterdir()] == [who]


def test_media_on_a_full_disk_are_counted_and_the_run_ends(tmp_path):
    """The disk fills up and is freed before the end: losses are counted, and later records are there."""
    code = """
import json, logging, sys
from pathlib import Path
import numpy as np
from destinations import RunDirectory
from events import Run
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
disk = Path(sys.argv[1])
noise = np.random.default_rng(0).integers(0, 255, (200, 200, 3), dtype=np.uint8)
with Run(RunDirectory(disk / "run"), run_name="r") as run:
    run.log_images(noise, "before", channels_last=True)
    run.flush()
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 12)): pass
        except OSError: pass
    for step in range(3):
        run.log_images(noise, "lost", channels_last=True, step=step)
    run.flush()
    ballast.unlink()
    run.log_images(noise, "after", channels_last=True)
sidecar = json.loads((disk / "run" / "sidecar.json").read_text())
names = sorted(path.parent.name for path in (disk / "run" / "media").rglob("*.png"))
print(json.dumps([sidecar["status"], sidecar["lost"], names]))
"""
    lines = lines_on_a_small_disk(tmp_path, code)

    assert json.loads(lines[-1]) == ["failed to write", {"media": 3}, ["after", "before"]], lines
    assert any(line.endswith("lost 3 media and texts.") for line in lines)


def test_media_without_free_file_descriptors_are_counted(tmp_path):
    """With too many open files, the run ends and reports what is missing."""
    code = """
import json, os, resource, sys
from pathlib import Path
import numpy as np
from destinations import RunDirectory
from events import Run
path = Path(sys.argv[1])
image = np.zeros((2, 2), np.uint8)
with Run(RunDirectory(path, flush_seconds=1000), run_name="r") as run:
    run.log_images(image, "a")
    run.flush()
    run.logger.destinations[0]._writer._papers.environment.join(60)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = []
    try:
        while True: held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError: pass
    for step in range(3): run.log_images(image, "b", step=step)
    run.logger.destinations[0]._run._lane.flush(60)
    for fd in held: os.close(fd)
    run.log_images(image, "c")
sidecar = json.loads((path / "sidecar.json").read_text())
print(json.dumps([sidecar["status"], sidecar["lost"], sorted(one.name for one in (path / "media").iterdir())]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp_path,
    )

    assert json.loads(done.stdout) == ["failed to write", {"media": 3}, ["a", "c"]], done.stderr
    assert "lost 3 media and texts." in done.stderr
