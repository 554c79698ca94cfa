"""If a run is deleted in its store and started again, nobody sees rows of the old one."""

import logging
import shutil

import numpy as np
import pytest

from destinations.history.snapshot import read_series
from destinations.run_directory.stored_run import StoredRun
from destinations.runs import Run
from destinations.runs.index.bucket import BucketCopy
from tests.test_destinations.run_directory.test_mirror import Mirrored, fetched
from tests.test_destinations.runs.written import Written
from uploads import open_store


@pytest.fixture(autouse=True)
def _folders(tmp_path, monkeypatch):
    """Gives each test its own spool and local folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def write(folder, store, value, *, rows=3, part_bytes=100, **options):
    """Writes a run with closed parts and a picture; returns the folder."""
    with Mirrored(folder, store, **options) as run:
        run.destination._writer._drain.file.part_bytes = part_bytes
        for step in range(rows):
            run.log({"loss": value + step}, step)
            run.flush()
        run.logger.log_images(np.full((2, 2), int(value), np.uint8), "Inputs", step=0)
    return folder


def read(copy):
    """Returns the values of the run and its writers and a pixel of its pictures, from a copy of the store."""
    copy.refresh(at_once=True)
    copy.bring(copy.folder / "run")
    run = Run.open(copy.folder / "run")
    copy.bring_files([image.path for image in run.images()])
    values = {name: run.series("loss", writer=name).value.tolist() for name in ("", *run.writers)}
    return values, [np.asarray(image.load()).max() for image in run.images()]


@pytest.mark.parametrize("is_same_reader", [True, False])
def test_a_reader_shows_the_new_run(tmp_path, is_same_reader):
    """This holds even if sessions, pieces and files have the same names as before."""
    store = tmp_path / "store"
    write(tmp_path / "one" / "run", store / "run", 10.0)
    write(tmp_path / "one" / "eval", store / "run", 20.0, writer="eval")
    copy = BucketCopy(open_store(str(store)), tmp_path / "copy")
    before = read(copy)
    shutil.rmtree(store / "run")
    write(tmp_path / "two" / "run", store / "run", 30.0)

    after = read(copy if is_same_reader else BucketCopy(open_store(str(store)), tmp_path / "copy"))

    assert before == ({"": [10.0, 11.0, 12.0], "eval": [20.0, 21.0, 22.0]}, [10, 20])
    assert after == ({"": [30.0, 31.0, 32.0]}, [30])


def test_a_polling_reader_takes_no_piece_of_another_run(tmp_path):
    """The piece that it requests next belongs to the new run."""
    store = tmp_path / "store"
    old = Mirrored(tmp_path / "one" / "run", store)
    old.log({"loss": 1.0}, 0)
    old.send()
    run = StoredRun(open_store(str(store)), "", tmp_path / "copy")
    run.look()
    run.fetch()
    old.stop_sending()
    shutil.rmtree(store)
    with Mirrored(tmp_path / "two" / "run", store) as new:
        for step in range(2, 6):
            new.log({"loss": float(step)}, step)
            new.send()

        with pytest.raises(ValueError, match="does not continue"):
            run.poll()
        run.look()
        run.fetch()

        assert read_series(tmp_path / "copy", "loss") == [(step, float(step)) for step in range(2, 6)]
    old.mirror.finish = lambda *_: old.queue.close(0.0)
    old.close()


class LosesOnce:
    """A store that loses an object at the first request for it."""

    def __init__(self, store, name):
        self.store, self.name = store, name

    def get(self, name):
        if name == self.name:
            self.name = ""
            raise FileNotFoundError(name)
        return self.store.get(name)

    def __getattr__(self, name):
        return getattr(self.store, name)


def test_an_interrupted_reader_keeps_nothing_of_the_old_run(tmp_path):
    """A piece of the new run is merged during the read, so the finished part counts as done."""
    store = tmp_path / "store"
    with Mirrored(tmp_path / "one" / "run", store) as old:
        old.logger.log_hyperparameters({"lr": 0.1})
        old.log({"loss": 1.0}, 0)
    fetched(store, tmp_path / "copy")
    shutil.rmtree(store)
    new = Mirrored(tmp_path / "two" / "run", store)
    for step in range(3):
        new.log({"loss": float(step)}, step)
        new.send()

    run = StoredRun(
        LosesOnce(open_store(str(store)), "live/rank0/0001/00000002-00000002.zip"), "", tmp_path / "copy"
    )
    run.look()
    run.fetch()

    assert not (tmp_path / "copy" / "hparams.yaml").exists()
    assert read_series(tmp_path / "copy", "loss") == [(step, float(step)) for step in range(3)]
    new.close()


def test_a_deleted_run_is_gone(tmp_path):
    """It disappears for a new reader too, even if the run was never closed."""
    store = tmp_path / "store"
    run = Mirrored(tmp_path / "one" / "run", store / "run")
    run.log({"loss": 1.0}, 0)
    run.stop_sending()
    BucketCopy(open_store(str(store)), tmp_path / "copy").refresh()
    assert (tmp_path / "copy" / "run" / "sidecar.json").exists()
    shutil.rmtree(store / "run")

    BucketCopy(open_store(str(store)), tmp_path / "copy").refresh()

    assert not (tmp_path / "copy" / "run").exists()
    run.mirror.finish = lambda *_: run.queue.close(0.0)
    run.close()


@pytest.mark.parametrize("place", ["run", "."])
def test_a_reader_that_lists_between_two_runs_keeps_nothing_of_the_old_run(tmp_path, place):
    """The new run has claimed the store but has not uploaded anything yet."""
    store, other = tmp_path / "store" / place, tmp_path / "other"
    old = Mirrored(tmp_path / "one" / "run", store)
    old.logger.log_traces({"sample": 7})
    old.log({"loss": 1.0}, 0)
    old.stop_sending()
    copy = BucketCopy(open_store(str(tmp_path / "store")), tmp_path / "copy")
    copy.refresh()
    copy.bring(tmp_path / "copy" / place)
    assert Run.open(tmp_path / "copy" / place).traces()
    shutil.rmtree(store)
    write(tmp_path / "two" / "run", other, 30.0)

    claimed = store / "live" / "rank0" / "0001"
    claimed.mkdir(parents=True)
    shutil.copy(other / "live" / "rank0" / "0001" / "session.json", claimed)
    copy.refresh(at_once=True)
    shutil.copytree(other, store, dirs_exist_ok=True)
    copy.refresh(at_once=True)
    copy.bring(tmp_path / "copy" / place)

    run = Run.open(tmp_path / "copy" / place)
    assert run.traces() == []
    assert run.series("loss").value.tolist() == [30.0, 31.0, 32.0]
    old.mirror.finish = lambda *_: old.queue.close(0.0)
    old.close()


def test_a_named_writer_keeps_its_old_rows_apart(tmp_path, caplog):
    """Its local folder belongs to a run that is no longer in the store."""
    store, folder = tmp_path / "store", tmp_path / "machine" / "run"
    write(tmp_path / "one" / "run", store, 10.0)
    write(folder, store, 20.0, writer="eval")
    shutil.rmtree(store)
    write(tmp_path / "two" / "run", store, 30.0)

    with caplog.at_level(logging.WARNING, "destinations"):
        write(folder, store, 40.0, writer="eval")

    assert "not in" in caplog.text
    assert "It is kept as" in caplog.text
    copy = fetched(store / "writers" / "eval", tmp_path / "copy")
    assert read_series(copy, "loss") == [(step, 40.0 + step) for step in range(3)]
    assert read_series(folder / "writers" / "eval.aside-1", "loss") == [
        (step, 20.0 + step) for step in range(3)
    ]


def test_a_named_writer_without_a_run_folder_sends_no_row_of_the_deleted_run(tmp_path, monkeypatch):
    """The local stand-in for the run's folder has no name that identifies it as a writer's."""
    store = tmp_path / "store"
    for value in (10.0, 20.0):
        for machine, options in ((f"trainer-{value}", {}), ("machine", {"writer": "eval"})):
            monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / machine))
            with Written(f"{store.as_uri()}/run", **options) as run:
                run.log({"loss": value}, 0)
                run.flush()
        values, _ = read(BucketCopy(open_store(str(store)), tmp_path / f"copy-{value}"))
        assert values == {"": [value], "eval": [value]}
        shutil.rmtree(store)
