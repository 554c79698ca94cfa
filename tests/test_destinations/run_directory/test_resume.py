"""Tests of opening a run again."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import yaml

import events
from destinations import RunDirectory
from destinations.history.sessions import read_sessions
from destinations.run_directory import RunExistsError, RunInUseError, RunPathError, read_rows, read_series
from destinations.runs import Run as Opened
from events import Run, Timestamp
from tests.test_destinations.run_directory.conftest import steps_left


def sidecar(tmp_path):
    """Returns the sidecar."""
    return json.loads((tmp_path / "run" / "sidecar.json").read_text())


def summary(tmp_path):
    """Returns the summary of each metric."""
    return json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]


def log_steps(run, steps, value):
    """Logs a loss for each step."""
    for step in steps:
        run.log({"loss": value + step}, step)


def test_missing_statistics_are_computed_from_all_rows(drive, tmp_path):
    """This holds if `summary.json` is missing or belongs to another file, and for a file read in pieces."""
    first = drive().fit()
    # Each row has one metric's maximum, so that a misread row shows.
    for step in range(300):
        first.log({f"m{index}": float(index == step) for index in range(300)}, step)
    first.close()
    assert (tmp_path / "run" / "metrics.csv").stat().st_size > 300_000
    before = summary(tmp_path)
    path = tmp_path / "run" / "summary.json"
    other = json.loads(path.read_text())
    other["csv"]["tail_crc32"] ^= 1
    other["metrics"]["m0"]["count"] = 1

    found = []
    for text in (None, json.dumps(other)):
        path.unlink() if text is None else path.write_text(text)
        drive().close()
        found.append(summary(tmp_path))

    assert [one["max_step"] for one in before.values()] == [*range(300)]
    assert found == [before, before]


@pytest.mark.parametrize("logs_after_the_batch", [False, True])
def test_a_loop_of_ones_own_keeps_the_evaluation_of_its_last_epoch(tmp_path, logs_after_the_batch):
    """At the step that it continues from, only metrics that training logs again are replaced."""

    def train(first_epoch, epochs=6, fails_in=None):
        folder = RunDirectory(tmp_path / "run")
        with Run(loggers=[folder], run_name="own") as run:
            run.fit_start(epoch=first_epoch, batch=4 * first_epoch)
            for epoch in range(first_epoch, epochs):
                run.epoch_start(length=4)
                for batch in range(4 * epoch, 4 * epoch + 4):
                    run.batch_start()
                    if not logs_after_the_batch:
                        run.log_metrics({"loss": batch + first_epoch / 10})
                        run.log_metrics({"lr": 0.5})
                    if (epoch, batch % 4) == (fails_in, 2):
                        raise RuntimeError
                    run.batch_end()
                    if logs_after_the_batch:
                        run.log_metrics({"loss": batch + first_epoch / 10})
                run.epoch_end()
                run.log_metrics({"val/acc": epoch / 10})

    with pytest.raises(RuntimeError):
        train(0, fails_in=3)
    evaluated_at = next(row.time for row in read_rows(tmp_path / "run") if row.metrics.get("val/acc") == 0.2)
    train(3)
    for name in ("loss", "lr")[: 1 + (not logs_after_the_batch)]:
        steps = [step for step, _ in read_series(tmp_path / "run", name)]
        assert steps == [step + logs_after_the_batch for step in range(24)]
    values = [value for _, value in read_series(tmp_path / "run", "loss")]
    assert values == [batch + (0.3 if batch >= 12 else 0.0) for batch in range(24)]
    assert read_series(tmp_path / "run", "val/acc") == [(4 * epoch + 4, epoch / 10) for epoch in range(6)]
    (kept,) = [row.time for row in read_rows(tmp_path / "run") if row.metrics.get("val/acc") == 0.2]
    assert kept == evaluated_at


def test_a_loop_that_evaluates_before_training_replaces_the_evaluation(drive, tmp_path):
    """Metrics that are logged again at the step are replaced, in any order and by any number of calls."""
    first = drive().fit()
    log_steps(first, range(4), 0.0)
    first.log({"val/acc": 0.1, "val/once": 7.0}, 4)
    first.log({"loss": 4.0}, 4)
    first.close()

    second = drive(batch=4).fit()
    second.log({"val/acc": 0.2}, 4)
    log_steps(second, range(4, 6), 100.0)
    second.close()

    assert read_series(tmp_path / "run", "val/acc") == [(4, 0.2)]
    assert read_series(tmp_path / "run", "val/once") == [(4, 7.0)]
    assert read_series(tmp_path / "run", "loss") == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 104.0),
        (5, 105.0),
    ]


def test_training_without_a_position_appends(drive, tmp_path, caplog):
    """Nothing is left behind, even if steps repeat; one log line names the call that would replace them."""
    first = drive().fit()
    log_steps(first, range(10), 0.0)
    first.close()

    second = drive().fit()
    log_steps(second, range(8, 11), 50.0)
    second.close()

    series = [(step, float(step)) for step in range(10)] + [(step, step + 50.0) for step in (8, 9, 10)]
    assert read_series(tmp_path / "run", "loss") == series
    assert steps_left(tmp_path / "run") == []
    (said,) = [one for one in caplog.messages if "earlier session" in one]
    assert "'loss' at step 8" in said
    assert "fit_start(batch=8)" in said


def test_edits_by_users_and_viewers_survive(drive, tmp_path):
    """Creation time, id, tags, notes, hyperparameters, unknown fields, and live edits survive a session."""
    first = drive(tags=["a"], notes="first", run_id="mine")
    first.logger.log_hyperparameters({"model": {"width": 4}})
    first.close()
    before = sidecar(tmp_path)
    edited = {
        **before,
        "tags": ["a", "edited"],
        "notes": "edited",
        "display_name": "My run",
        "archived": True,
    }
    (tmp_path / "run" / "sidecar.json").write_text(json.dumps(edited))

    second = drive(tags=["b"], notes="second", run_id="other", flush_seconds=1000)
    second.logger.log_hyperparameters({"model": {"depth": 2}, "lr": 0.1})
    second.stand_still()
    live = sidecar(tmp_path)
    (tmp_path / "run" / "sidecar.json").write_text(json.dumps({**live, "notes": "edited live"}))
    second.close()

    after = sidecar(tmp_path)
    assert (after["run_id"], after["created_at"]) == ("mine", before["created_at"])
    assert after["tags"] == ["a", "edited", "b"]
    assert (live["notes"], after["notes"]) == ("edited", "edited live")
    assert (after["display_name"], after["archived"]) == ("My run", True)
    assert after["hparams"] == {"model.width": 4, "model.depth": 2, "lr": 0.1}
    assert yaml.safe_load((tmp_path / "run" / "hparams.yaml").read_text()) == {
        "model": {"width": 4, "depth": 2},
        "lr": 0.1,
    }


def test_the_error_of_a_second_writer_names_the_first(drive, tmp_path):
    """The error names pid and host of the first run, which is unharmed; afterwards the folder is free."""
    first = drive()

    with pytest.raises(RunInUseError, match=rf"process {os.getpid()} on \S+ writes to it"):
        drive(if_exists="error")
    assert sidecar(tmp_path)["status"] == "running"
    first.close()
    second = drive()
    second.close()

    assert sidecar(tmp_path)["status"] == "completed"


def test_a_second_run_of_one_process_is_kept_beside_the_first(tmp_path, caplog):
    """This happens if a notebook cell is run again; the log says where the second run is."""
    runs = []
    for value in (1.0, 2.0):
        runs.append(Run(RunDirectory(tmp_path / "run"), run_name="cell"))
        runs[-1].log_metrics({"loss": value}, 0)
    folders = [run.logger.destinations[0].run_dir for run in runs]
    for run in runs:
        run.close()

    assert folders == [tmp_path / "run", tmp_path / "run-2"]
    assert [[row.metrics["loss"] for row in read_rows(folder)] for folder in folders] == [[1.0], [2.0]]
    assert [message for message in caplog.messages if "run-2" in message] == [
        f"run folder {folders[0]} is taken: this run is written to {folders[1]}."
    ]


def test_if_exists_decides_about_a_completed_run(tmp_path, caplog):
    """The run is refused, continued, or left alone on request; by default, the new run gets another name."""

    def log(value, **options):
        with Run(RunDirectory(tmp_path / "run", **options), run_name="mine") as run:
            run.log_metrics({"loss": value}, int(value))
            return run.logger.destinations[0].run_dir

    log(1.0, if_exists="error")
    assert caplog.messages == []
    with pytest.raises(RunExistsError, match=r'if_exists="resume".*if_exists="new"'):
        log(2.0, if_exists="error")
    assert sidecar(tmp_path)["status"] == "completed"
    folders = [log(3.0, if_exists="new"), log(4.0, if_exists="new"), log(5.0)]
    assert f"a run that was completed: this run is written to {folders[-1]}" in caplog.messages[-1]
    folders.append(log(6.0, if_exists="resume"))

    assert [folder.name for folder in folders] == ["run-2", "run-3", "run-4", "run"]
    assert [[row.metrics["loss"] for row in read_rows(folder)] for folder in folders] == [
        [3.0],
        [4.0],
        [5.0],
        [1.0, 6.0],
    ]


LOG_ONCE = """
import sys
from destinations import RunDirectory
from events import Run
with Run(RunDirectory(sys.argv[1]), run_name="mine") as run:
    run.log_metrics({"loss": 1.0}, 0)
    if sys.argv[2:]:
        raise SystemExit(3)
"""


def log_in_another_process(folder, *more):
    """Runs `LOG_ONCE`; more arguments make it fail."""
    command = [sys.executable, "-c", LOG_ONCE, folder, *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_script_run_again_writes_beside_its_completed_run(tmp_path):
    """The first run is unchanged; a warning names the second, and how to continue the first instead."""
    folder = tmp_path / "run"
    assert log_in_another_process(folder).returncode == 0

    again = log_in_another_process(folder)

    assert again.returncode == 0
    assert again.stderr.strip() == (
        f"run folder {folder} holds a run that was completed: this run is written to {folder}-2. To continue "
        'the earlier run, pass if_exists="resume", call run.fit_start(batch=...), or load its checkpoint in the '
        "trainer (ckpt_path, resume_from_checkpoint, autoresume)."
    )
    for one in (folder, tmp_path / "run-2"):
        assert [row.metrics for row in read_rows(one)] == [{"loss": 1.0}]


PROOFS = {
    "fit_start": ({}, {}, {"batch": 1}),
    "if_exists": ({"if_exists": "resume"}, {}, None),
    "run_id": ({"run_id": "abc"}, {}, None),
    "slurm": ({}, {"SLURM_RESTART_COUNT": "1"}, None),
    "torchrun": ({}, {"TORCHELASTIC_RESTART_COUNT": "2"}, None),
    "none": ({}, {"SLURM_RESTART_COUNT": "0"}, None),
    "fit_start at 0": ({}, {}, {"batch": 0}),
    "fit_start alone": ({}, {}, {}),
}


@pytest.mark.parametrize("proof", PROOFS)
def test_failed_run_is_continued_with_a_proof_alone(tmp_path, monkeypatch, proof):
    """Hyperparameters, a text, a file, and a row logged before the proof go to the folder of the run."""
    folder = tmp_path / "run"
    options, environment, position = PROOFS[proof]
    assert log_in_another_process(folder, "fail").returncode == 3
    if proof == "run_id":
        (folder / "sidecar.json").write_text('{"run_id": "abc", "status": "failed"}')
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "file.txt"
    file.write_text("mine")

    with Run(RunDirectory(folder, **options), run_name="mine") as run:
        run.log_hyperparameters({"lr": 0.5})
        run.log_text("before", "note")
        run.upload_file("file.txt", file)
        file.unlink()
        run.log_metrics({"val": 3.0}, 0)
        if position is not None:
            run.fit_start(**position)
        run.log_metrics({"loss": 2.0}, 1)

    is_continued = proof not in {"none", "fit_start alone"}
    (found,) = {path.parent for path in tmp_path.rglob("hparams.yaml")}
    assert found == (folder if is_continued else tmp_path / "run-2")
    assert [one.name for one in sorted(tmp_path.iterdir())] == (["run"] if is_continued else ["run", "run-2"])
    assert [row.metrics for row in read_rows(found)] == [
        *([{"loss": 1.0}] if is_continued else []),
        {"val": 3.0},
        {"loss": 2.0},
    ]
    assert (found / "artifacts" / "file.txt").read_text() == "mine"
    assert [json.loads(line)["name"] for line in (found / "texts.jsonl").read_text().splitlines()] == ["note"]
    assert [row.metrics for row in read_rows(folder)][:1] == [{"loss": 1.0}]


def test_restarted_job_leaves_its_own_runs_alone(tmp_path, monkeypatch):
    """In a sweep that Slurm has requeued, the second run doesn't continue the first one, which failed."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for value in (1.0, 2.0):
        run = Run(RunDirectory(tmp_path / "run"), run_name="mine")
        run.log_metrics({"loss": value}, 0)
        run.close(ValueError("diverged"))

    rows = {one.name: [row.metrics for row in read_rows(one)] for one in sorted(tmp_path.iterdir())}
    assert rows == {"run": [{"loss": 1.0}], "run-2": [{"loss": 2.0}]}


def test_ranks_that_all_write_refuse_a_run_without_a_proof(tmp_path):
    """Several ranks can't agree on a name beside it; a single rank takes one."""
    folder = tmp_path / "run"
    assert log_in_another_process(folder, "fail").returncode == 3
    with Run(RunDirectory(folder, all_ranks=True), run_name="mine") as run:
        run.log_metrics({"loss": 2.0}, 0)
        assert run.logger.destinations[0].run_dir == tmp_path / "run-2"

    run = Run(RunDirectory(folder, all_ranks=True), run_name="mine")
    run.state.world_size = 2
    with pytest.raises(RunExistsError, match="several ranks cannot agree on a name beside it"):
        run.run_event("init")


def test_run_that_lost_records_is_not_completed(tmp_path, monkeypatch):
    """A lost record changes the status, and the sidecar counts what was lost."""
    with Run(RunDirectory(tmp_path / "run"), run_name="mine") as run:
        run.log_metrics({"loss": 1.0}, 0)
        run.logger.destinations[0]._early.lost = 8  # Records that didn't fit before `init`.

    found = sidecar(tmp_path)
    assert (found["status"], found["exception"]) == ("failed to write", "lost 8 records logged before init")
    assert found["lost"] == {"early": 8}


@pytest.mark.parametrize("options", [{"autoresume": True}, {"if_exists": "resume"}])
def test_a_completed_run_of_another_process_is_continued_as_asked(tmp_path, options):
    """The caller asks with `autoresume` or `if_exists`."""
    torch = pytest.importorskip("torch")
    folder = tmp_path / "run"
    assert log_in_another_process(folder).returncode == 0
    kinds = {key: options[key] for key in options if key == "if_exists"}
    more = {key: options[key] for key in options if key == "autoresume"}

    trainer = events.Trainer(
        torch.nn.Linear(1, 1),
        run_name="mine",
        save_folder=str(tmp_path / "checkpoints"),
        loggers=RunDirectory(folder, **kinds),
        **more,
    )
    trainer.logger.log_metrics({"loss": 2.0}, 1)
    trainer.close()

    assert [row.metrics["loss"] for row in read_rows(folder)] == [1.0, 2.0]


def test_a_folder_used_without_a_run_is_an_error(tmp_path):
    """The error is logged when the program ends."""
    program = (
        "import sys; from destinations import RunDirectory\n"
        "destination = RunDirectory(sys.argv[1])\n"
        "destination.log_metrics({'loss': 1.0}, 0)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "run"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert f"run folder {tmp_path / 'run'} was never opened: what was logged to it is lost." in done.stderr


def test_a_run_never_closed_is_completed_at_exit(tmp_path):
    """No record is lost, and one log line reports it."""
    program = (
        "import sys; from destinations import RunDirectory; from events import Run\n"
        "run = Run(RunDirectory(sys.argv[1]), run_name='mine')\n"
        "for step in range(3):\n"
        "    run.log_metrics({'loss': float(step)}, step)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "run"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert [row.metrics["loss"] for row in read_rows(tmp_path / "run")] == [0.0, 1.0, 2.0]
    assert sidecar(tmp_path)["status"] == "completed"
    assert done.stderr.splitlines() == [
        "run 'mine' was not closed: it is closed now. Write `with Run(...) as run:`, or call run.close()."
    ]


def test_a_run_is_written_on_a_file_system_without_locks(drive, tmp_path, monkeypatch, caplog):
    """A warning says that nothing keeps two processes apart."""

    def refuse(fd, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    run = drive().fit()
    run.log({"a": 1.0}, 0)
    run.close()

    assert read_series(tmp_path / "run", "a") == [(0, 1.0)]
    assert not (tmp_path / "run" / ".lock").exists()
    assert "is on a file system without locks: let only one process write to it" in caplog.text


def test_a_run_with_byte_order_marks_is_continued(drive, tmp_path):
    """Editors may add one; steps, sessions, and metrics are still read correctly."""
    first = drive().fit()
    log_steps(first, range(3), 0.0)
    first.logger.log_table(["a"], [[1]], name="tab", step=1)
    first.close()
    for name in ("metrics.csv", "sessions.jsonl", "sidecar.json", "tables/tab/00000001_0.csv"):
        path = tmp_path / "run" / name
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())

    second = drive(batch=2).fit()
    log_steps(second, range(2, 4), 10.0)
    second.close()

    assert read_series(tmp_path / "run", "loss") == [(0, 0.0), (1, 1.0), (2, 12.0), (3, 13.0)]
    assert len(read_sessions(tmp_path / "run")) == 2
    assert Opened.open(tmp_path / "run").table("tab").columns == ("a",)


def test_a_moved_run_continues_at_its_new_place(drive, tmp_path):
    """A folder that was moved is read and continued at its new place."""
    run = drive().fit()
    log_steps(run, range(5), 0.0)
    run.close()
    shutil.move(tmp_path / "run", tmp_path / "moved")

    again = drive(tmp_path / "moved", batch=5, if_exists="resume").fit()
    log_steps(again, range(5, 8), 0.0)
    again.close()

    assert [step for step, _ in read_series(tmp_path / "moved", "loss")] == list(range(8))
    assert json.loads((tmp_path / "moved" / "sidecar.json").read_text())["run_dir"] == str(tmp_path / "moved")


def test_a_copy_of_a_live_run_has_its_rows(drive, tmp_path):
    """A copy made during writing has the rows in the CSV and those in the journal."""
    run = drive(flush_seconds=1000).fit()
    log_steps(run, range(3), 0.0)
    run.stand_still()
    log_steps(run, range(3, 5), 0.0)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")

    copied = read_series(tmp_path / "copy", "loss")
    run.close()

    assert [step for step, _ in copied] == list(range(5))


def test_a_killed_session_is_named_by_the_next(tmp_path):
    """The next session sets the status of a session that ended without closing to "killed"."""
    code = (
        "import os, sys, signal\nfrom destinations import RunDirectory\nfrom events import Engine, Logger, State\n"
        "s = State('x'); l = Logger(s, [RunDirectory(sys.argv[1])]); e = Engine(s, l); e.run_event('init')\n"
        "l.log_metrics({'a': 1.0}, 0); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=False)
    assert done.returncode == -signal.SIGKILL
    killed = sidecar(tmp_path)["status"]

    destination = RunDirectory(tmp_path / "run", if_exists="resume")
    from events import Engine, Logger, State

    state = State("x", timestamp=Timestamp(batch=1))
    engine = Engine(state, Logger(state, [destination]))
    engine.run_event("init")
    engine.close()

    assert killed == "running"
    assert [line["status"] for line in read_sessions(tmp_path / "run")] == ["killed", "completed"]
    assert [row.metrics for row in read_rows(tmp_path / "run")] == [{"a": 1.0}]


def test_a_csv_of_lightning_is_continued(drive, tmp_path):
    """Foreign columns stay, ours are added, and the torn last line is dropped."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.csv").write_bytes(b"epoch,loss,step\r\n0,0.5,0\r\n0,0.25,1\r\n0,0.1")

    run = drive(batch=2).fit()
    run.log({"acc": 1.0, "loss": 0.125}, 2)
    run.close()

    text = (folder / "metrics.csv").read_text().splitlines()
    assert text[:3] == ["epoch,loss,step,time,acc", "0,0.5,0,,", "0,0.25,1,,"]
    assert read_series(folder, "loss") == [(0, 0.5), (1, 0.25), (2, 0.125)]
    assert summary(tmp_path)["loss"]["count"] == 3


@pytest.mark.parametrize("content", [b"", b"step,epoch,time,lo", b"\0" * 100], ids=["empty", "torn", "zeros"])
def test_a_csv_without_a_first_line_is_replaced(drive, tmp_path, content):
    """A power loss may leave such a file; its rows, if any, are in the journal."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.csv").write_bytes(content)

    run = drive().fit()
    run.log({"loss": 0.5}, 0)
    run.close()

    assert (folder / "metrics.csv").read_text().splitlines()[0] == "step,epoch,time,loss"
    assert read_series(folder, "loss") == [(0, 0.5)]
    assert json.loads((folder / "sidecar.json").read_text())["overhead"]["errors"] == {}


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_the_path_of_a_file_raises_at_once(tmp_path, name):
    """The constructor raises for a path that can't be a folder."""
    (tmp_path / "file").write_text("x")

    with pytest.raises(RunPathError, match="is a file"):
        RunDirectory(tmp_path / name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_files": "yes"}, "keep_files must be one of"),
        ({"journal": "fast"}, "journal must be one of"),
        ({"flush_seconds": 0}, "flush_seconds must be more than 0"),
    ],
)
def test_invalid_arguments_raise(tmp_path, options, message):
    """Bad arguments raise in the constructor."""
    with pytest.raises(ValueError, match=message):
        RunDirectory(tmp_path / "run", **options)


def test_a_string_as_tags_raises(tmp_path):
    """A string isn't mistaken for a list of letters."""
    with pytest.raises(TypeError, match=r"Write tags=\['a'\]"):
        RunDirectory(tmp_path / "run", tags="a")


def test_temporary_files_of_a_killed_session_are_removed(drive, tmp_path):
    """The next session removes them when it begins and when it ends."""
    folder = tmp_path / "run" / "journal" / "rank0"
    folder.mkdir(parents=True)
    left = folder / ".segment.1-0.tmp"
    left.write_bytes(bytes(100))

    run = drive(flush_seconds=1000).fit()
    is_left = left.exists()
    run.log({"a": 1.0}, 0)
    left.write_bytes(bytes(100))
    run.close()

    assert not is_left
    assert not (tmp_path / "run" / "journal").exists()
    assert read_series(tmp_path / "run", "a") == [(0, 1.0)]
