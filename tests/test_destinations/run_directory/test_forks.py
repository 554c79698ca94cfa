"""A forked run begins with the records that its parent had logged by then; nothing is copied."""

import itertools
import json
import random
import shutil

import numpy as np
import pytest

from destinations import InMemory, RunDirectory, cli
from destinations.history.fork import find_parents
from destinations.history.sessions import read_sessions
from destinations.run_directory import RunPathError, read_rows
from destinations.runs import Run as Opened
from destinations.runs import open_runs
from destinations.runs.export import export_metrics
from destinations.runs.send.replay import replay
from events import Event, Run, Timestamp
from tests.effort import times
from tests.test_destinations.viewer.served import served


class Program:
    """Writes related runs session by session, and knows the records of each as lists.

    Each record logged is (kind, number, step).
    """

    def __init__(self, folder, seed):
        self.folder, self.draw, self.numbers = folder, random.Random(seed), itertools.count(1)
        self.batch, self.runs, self.checkpoints, self.open = 0, {}, [], None
        self.begin("run0", [])

    def begin(self, name, history, saved=None, **options):
        """Begins a session that continues from a checkpoint, if one is given."""
        self.end()
        options.setdefault("if_exists", "resume")
        self.ours = RunDirectory(self.folder / name, **options)
        self.open = Run(self.ours, run_name=name, raise_errors=True)
        self.open.__enter__()
        if saved is not None:
            self.open.run_event(Event.BEFORE_LOAD)
            self.open.state.continues_run = True
            self.ours.load_state_dict(saved["state"])
            self.open.state.timestamp = Timestamp(batch=saved["batch"])
            self.open.run_event(Event.AFTER_LOAD)
            self.open.run_event(Event.FIT_START)
        self.name, self.runs[name] = name, list(history)

    def end(self):
        if self.open is not None:
            self.open.close()
            self.open = None

    def log(self):
        kind, number = self.draw.choice(["loss", "text", "config"]), next(self.numbers)
        step = self.draw.randrange(9)
        if kind == "loss":
            self.open.log_metrics({"loss": float(number)}, step=step)
        elif kind == "text":
            self.open.log_text(str(number), "note", step=step)
        else:
            self.open.log_hyperparameters({f"only_{number}": number})
        self.runs[self.name].append((kind, number, None if kind == "config" else step))

    def save(self):
        self.batch += 1
        self.open.state.timestamp = Timestamp(batch=self.batch)
        saved = {"state": self.ours.state_dict(), "batch": self.batch}
        self.checkpoints.append((self.name, saved, list(self.runs[self.name])))

    def fork(self):
        """Forks a run at its end, at a named or loaded checkpoint, or at a step."""
        name = f"run{len(self.runs)}"
        way = self.draw.choice(["end", "name", "load", "step"])
        parent = self.draw.choice(list(self.runs))
        saved, history, at = None, self.runs[parent], ""
        # A checkpoint that belongs to the run.
        known = [one for one in self.checkpoints if one[0] == parent and history[: len(one[2])] == one[2]]
        if way in {"name", "load"} and known:
            _, saved, history = self.draw.choice(known)
            at = f"@{self.draw.choice(['', 'ba', 'ep0-ba'])}{saved['batch']}"
        elif way == "step":
            step = self.draw.randrange(9)
            if not any(saved["batch"] == step for _, saved, _ in self.checkpoints):
                at, history = f"@{step}", [one for one in history if one[2] is None or one[2] < step]
        if parent == self.name and not at:
            self.end()
        if way == "load" and saved is not None:
            self.begin(name, history, saved, fork_from=parent)
        else:
            self.begin(name, history, fork_from=str(self.folder / parent) + at)

    def go_on(self):
        """Continues a run at its end, or from a checkpoint of it or of its parents."""
        name = self.draw.choice(list(self.runs))
        lineage = [name, *(one.name for one in find_parents(self.folder / name))]
        known = [one for one in self.checkpoints if one[0] in lineage]
        if known and self.draw.random() < 0.7:
            _, saved, history = self.draw.choice(known)
            self.begin(name, history, saved)
        else:
            self.begin(name, self.runs[name])

    def check(self):
        if self.open is not None:
            self.open.flush()
        for name, history in self.runs.items():
            run = Opened.open(self.folder / name)
            losses = [(step, float(number)) for kind, number, step in history if kind == "loss"]
            assert [(row.step, row.metrics["loss"]) for row in read_rows(run.path)] == losses
            if losses:
                series = run.series("loss")
                assert list(zip(series.step.tolist(), series.value.tolist(), strict=True)) == losses
            texts = [(number, step) for kind, number, step in history if kind == "text"]
            assert [(int(one.text), one.step) for one in run.texts()] == texts
            configs = {f"only_{number}": number for kind, number, _ in history if kind == "config"}
            assert run.hyperparameters == configs


@pytest.mark.parametrize("seed", range(times(6, 400)))
def test_a_fork_has_the_records_of_its_parent_up_to_its_place(tmp_path, seed):
    """Runs go back, continue and fork each other; each has the records of its list, in any order of steps."""
    program = Program(tmp_path, seed)
    for _ in range(program.draw.randrange(8, 25)):
        chance = program.draw.random()
        if chance < 0.55:
            program.log()
        elif chance < 0.7:
            program.save()
        elif chance < 0.88:
            program.fork()
        else:
            program.go_on()
        program.check()
    program.end()
    program.check()


@pytest.fixture
def digits(tmp_path):
    """A run of four losses and texts, with a checkpoint after two; its folder."""
    ours = RunDirectory(tmp_path / "runs/digits")
    with Run(ours, run_name="digits", raise_errors=True) as run:
        run.log_hyperparameters({"lr": 0.1, "width": 8})
        for batch in range(4):
            run.batch_start()
            run.log_metrics({"loss": 4.0 - batch})
            run.log_text(f"text {batch}", "note")
            run.batch_end()
            if batch == 1:
                ours.state_dict()
    return tmp_path / "runs/digits"


def write_fork(folder, fork_from, **metrics):
    """Writes a fork of a few rows of a step; returns it as readers open it."""
    with Run(RunDirectory(folder, fork_from=fork_from), run_name=folder.name, raise_errors=True) as run:
        if metrics:
            run.log_metrics(metrics, step=9)
    return Opened.open(folder)


def test_readers_of_a_fork_have_the_rows_of_its_parent(digits, tmp_path, monkeypatch, capsys):
    """The API, `follow`, exports and commands show them before its own; the folder has no copy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = write_fork(digits.parent / "fork", "digits@ba2", loss=0.5, acc=1.0)

    assert (str(run.parent), run.parent.problem) == ("digits at ba2", "")
    assert (run.parent.path, run.parent.run_id) == (digits, Opened.open(digits).run_id)
    assert run.series("loss").value.tolist() == [4.0, 3.0, 0.5]
    assert run.metric_names() == ["loss", "acc"]
    assert [point.value for point in run.follow("loss", until_end=True)] == [4.0, 3.0, 0.5]
    assert [point.value for point in run.follow("loss", until_end=True, last=2)] == [3.0, 0.5]
    assert len(run.to_dataframe()) == 3
    assert run.record_counts()["texts"].count == 2
    assert run.hyperparameters == {"lr": 0.1, "width": 8}
    assert export_metrics([run], tmp_path / "out.csv") == 4
    assert cli.main(["runs", "series", str(run.path), "loss", "--limit", "1"]) == 0
    assert capsys.readouterr().out == "step 0  4.0\n"
    assert cli.main(["runs", "show", str(run.path)]) == 0
    assert "\nforked from digits at ba2\n" in capsys.readouterr().out
    assert cli.main(["runs", "show", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parent"]["step"] == 2
    assert (run.path / "metrics.csv").read_text().count("\n") == 2
    assert Opened.open(digits).parent is None


def test_a_live_parent_is_forked_at_a_given_place(digits):
    """Its end is not known yet; rows that are still in its journal count."""
    with Run(RunDirectory(digits, if_exists="resume", flush_seconds=1000.0), run_name="digits") as parent:
        parent.fit_start(batch=4)
        parent.log_metrics({"loss": 0.5}, step=4)
        parent.batch_start()
        parent.batch_end()
        with pytest.raises(RunPathError, match=r"is being written: .*It has checkpoints at ba2\."):
            write_fork(digits.parent / "fork", "digits")
        run = write_fork(digits.parent / "other", "digits@5")
        assert run.series("loss").value.tolist() == [4.0, 3.0, 2.0, 1.0, 0.5]


def test_forking_a_missing_run_raises(digits, tmp_path):
    """The parent is named by path, or by a folder beside the new run; nothing else is written there."""
    with pytest.raises(
        RunPathError, match=r"fork_from='digit@2' names no run: there is none at .*/runs/digit'"
    ):
        write_fork(digits.parent / "fork", "digit@2")
    assert not (digits.parent / "fork/sidecar.json").exists()
    assert write_fork(tmp_path / "elsewhere", f"{digits}@2").series("loss").value.tolist() == [4.0, 3.0]


@pytest.mark.parametrize("options", [{"run_dir": "s3://bucket/new"}, {"run_dir": "new", "writer": "eval"}])
def test_fork_needs_a_folder_of_its_own(options):
    """A run that exists only in a store can't be a fork, and a writer added by another process isn't one."""
    with pytest.raises(ValueError, match=r"fork_from needs a run with a folder of its own, got"):
        RunDirectory(**options, fork_from="digits")


def test_a_missing_parent_is_reported(digits, caplog):
    """The fork has its own rows and records. The parent's path must lead to the parent run."""
    run = write_fork(digits.parent / "fork", "digits@2", loss=0.5)

    digits.rename(digits.with_name("moved"))
    assert run.series("loss").value.tolist() == [0.5]
    assert (
        caplog.messages.count(
            f"run {run.path} was forked from digits at ba2, which cannot be read: it is not at {digits} any more. "
            "Its rows and records are left out."
        )
        == 1
    )
    shutil.copytree(digits.with_name("moved"), digits)
    sidecar = digits / "sidecar.json"
    sidecar.write_text(sidecar.read_text().replace(Opened.open(digits).run_id, "another"))
    assert run.texts() == []
    assert run.parent.problem == f"another run is at {digits}"
    shutil.rmtree(digits)
    digits.with_name("moved").rename(digits)
    assert run.series("loss").value.tolist() == [4.0, 3.0, 0.5]


def test_a_cycle_of_forks_ends(digits):
    """A circle of parents, which no writer creates, is reported after a hundred of them."""
    run = write_fork(digits.parent / "fork", "digits@2", loss=0.5)
    (line,) = read_sessions(run.path)
    follows = {**line["follows"], "session": line["session"], "run": "../fork", "run_id": run.run_id}
    (run.path / "sessions.jsonl").write_text(json.dumps({**line, "follows": follows}) + "\n")

    assert find_parents(run.path)[-1].problem == "it has more than 100 parents"


def test_an_index_lists_forks_like_other_runs(digits, tmp_path):
    """They move together with their parents."""
    write_fork(digits.parent / "fork", "digits@2", loss=0.5)
    digits.parent.rename(tmp_path / "moved")

    with open_runs(tmp_path / "moved", cache=tmp_path / "cache") as runs:
        assert runs["fork"].series("loss").value.tolist() == [4.0, 3.0, 0.5]
        assert [run.name for run in runs.query(sort_by="name")] == ["digits", "fork"]


def test_the_page_shows_the_inherited_rows_of_a_fork(digits, tmp_path, monkeypatch):
    """The page names the parent, draws its rows first, and serves its records' files but no other run's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Run(RunDirectory(digits, if_exists="resume"), run_name="digits", raise_errors=True) as run:
        run.log_images(np.zeros((1, 2, 2), np.uint8), "black", step=1)
    write_fork(digits.parent / "fork", "digits", loss=0.5)

    with served(digits.parent) as page:
        fork = page.run_id("fork")
        detail = page.get(f"/api/runs/{fork}")
        assert detail["parent"] == "digits at its end"
        assert page.get(f"/api/runs/{page.run_id('digits')}")["parent"] is None
        (series,) = page.get("/api/series", {"run": fork, "metric": "loss"})["series"]
        assert series["y"] == [4.0, 3.0, 2.0, 1.0, 0.5]
        (item,) = page.get(f"/api/runs/{fork}/media", {"kind": "images", "name": "black"})["items"]
        image = next((digits / "media").rglob("*.png"))
        assert page.request("GET", f"/api/runs/{fork}/files/{item['file']}").content == image.read_bytes()
        name = item["file"].rpartition("media/")[0] + ".lock"
        assert page.request("GET", f"/api/runs/{fork}/files/{name}").status == 404
        assert page.request("GET", f"/api/runs/{fork}/files/@parents/other/sidecar.json").status == 404


def test_a_forked_run_is_deleted_only_with_its_forks_or_by_force(digits, tmp_path, monkeypatch, capsys):
    """The forks would lose rows; `rm` and `gc` name them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_fork(digits.parent / "fork", "digits@2", loss=0.5)

    why = "fork was forked from it and needs its rows"
    assert cli.main(["runs", "rm", str(digits), "--yes"]) == 2
    assert why in capsys.readouterr().err
    assert cli.main(["runs", "archive", "digits", "--root", str(digits.parent)]) == 0
    collect = ["runs", "gc", "--older-than", "0s", "--delete", "--root", str(digits.parent), "--json"]
    capsys.readouterr()
    cli.main(collect)
    assert why in capsys.readouterr().out
    assert digits.exists()
    assert cli.main(["runs", "rm", str(digits), str(digits.parent / "fork"), "--yes"]) == 0
    assert not digits.exists()


def test_send_includes_the_inherited_records_of_a_fork(digits):
    """Rows and records of both runs arrive once, in the order of logging."""
    run = write_fork(digits.parent / "fork", "digits@ba2", loss=0.5)
    seen = InMemory()

    replay(run, seen)

    assert seen.get_timeseries("loss")["loss"].tolist() == [4.0, 3.0, 0.5]
    assert [one.value for one in seen.records if one.kind == "text"] == ["text 0", "text 1"]


def test_fork_in_a_store_has_the_rows_of_a_parent_beside_it(digits, tmp_path):
    """Both are below one root there, and a reader gets the parent's rows too."""
    store = (tmp_path / "store").as_uri()
    for name, options in (("digits", {"if_exists": "resume"}), ("fork", {"fork_from": "digits@ba2"})):
        ours = RunDirectory(digits.parent / name, mirror=f"{store}/{name}", **options)
        with Run(ours, run_name=name, raise_errors=True) as run:
            run.log_metrics({"loss": 0.5}, step=9)

    with open_runs(store, cache=tmp_path / "cache") as runs:
        fork = runs["fork"]
        assert fork.series("loss").value.tolist() == [4.0, 3.0, 0.5]
        assert [one.text for one in fork.texts()] == ["text 0", "text 1"]
        assert str(fork.parent) == "digits at ba2"


def add(folder, writer, steps):
    """Logs a metric and a text at some steps."""
    with Run(RunDirectory(folder, writer=writer, if_exists="resume"), run_name="mine") as run:
        for step in steps:
            run.log_metrics({"accuracy" if writer else "loss": float(step)}, step=step)
            run.log_text(f"step {step}", "note" if writer else "own", step=step)


@pytest.mark.parametrize(("place", "shown"), [("@3", [0, 1, 2]), ("", [0, 1, 2, 3, 4])])
def test_a_fork_has_earlier_records_of_named_writers(tmp_path, place, shown):
    """A writer of the same name adds to its rows; the parent's other writers stay the parent's."""
    add(tmp_path / "parent", None, range(5))
    add(tmp_path / "parent", "eval", range(5))
    add(tmp_path / "parent", "probe", range(5))
    with Run(
        RunDirectory(tmp_path / "fork", fork_from=f"{tmp_path / 'parent'}{place}"), run_name="fork"
    ) as run:
        run.log_metrics({"loss": 9.0}, step=9)
    add(tmp_path / "fork", "eval", [7])

    fork = Opened.open(tmp_path / "fork")
    found = fork.series("accuracy", writer="eval")

    assert fork.series("loss").step.tolist() == [*shown, 9]
    assert found.step.tolist() == [*shown, 7]
    assert fork.series("accuracy", writer="probe").step.tolist() == shown
    assert fork.series("accuracy").step.tolist() == sorted([*shown, *shown, 7])
    assert sorted(one.step for one in fork.texts("note")) == sorted([*shown, *shown, 7])
    assert [
        row.step for row in itertools.islice(fork.follow(until_end=True), 99) if row.writer == "probe"
    ] == shown
    assert fork.writers == ["eval"]
    assert not fork.problems()
    assert not list(fork.verify())
