"""`Run`: the position of a custom loop, and hints for unknown names."""

import io
import traceback

import pytest

from destinations import Console, InMemory, ProgressBar, RunDirectory
from destinations.run_directory import read_rows
from events import Callback, RecordError, Run


def train(folder, epochs, *, begin=0, fails=False):
    """Runs epochs of two batches; returns what the console printed."""
    text = io.StringIO()
    loggers = [RunDirectory(folder), Console(stream=text), ProgressBar(stream=io.StringIO())]
    with Run(loggers=loggers, run_name="own", max_duration="6ep") as run:
        if begin:
            run.fit_start(epoch=begin, batch=2 * begin)
        for epoch in range(begin, epochs):
            run.epoch_start(length=2)
            for _ in range(2):
                run.batch_start()
                run.log_metrics({"loss": epoch})
                run.batch_end()
            run.epoch_end()
        if fails:
            raise RuntimeError("gone")
    return text.getvalue()


def test_a_custom_loop_continues_at_its_position(tmp_path):
    """Epochs, steps and the summary count from there, and rows of later steps are taken back."""
    with pytest.raises(RuntimeError):
        train(tmp_path / "own", 4, fails=True)

    said = train(tmp_path / "own", 6, begin=3)

    assert [(row.step, row.metrics["loss"]) for row in read_rows(tmp_path / "own")] == [
        (step, step // 2) for step in range(12)
    ]
    assert [line.split(",")[0] for line in said.splitlines() if line.startswith("Epoch")] == [
        "Epoch 4/6",
        "Epoch 5/6",
        "Epoch 6/6",
    ]
    assert "own completed: 6 epochs, 12 batches" in said


def test_the_position_of_a_loop_must_be_set_before_it_begins():
    """Later, and for less than nothing, it is an error."""
    with Run(loggers=[InMemory()], run_name="own") as run:
        with pytest.raises(ValueError, match="epoch and batch must be 0 or more, got epoch=-1, batch=0"):
            run.fit_start(epoch=-1)
        run.fit_start(batch=3)
        run.fit_start()
        with pytest.raises(ValueError, match="training has begun"):
            run.fit_start(batch=4)

        assert int(run.state.timestamp.batch) == 3


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("log", "run.log_metrics?"),
        ("log_image", "run.log_images?"),
        ("add_scalar", "run.log_scalar?"),
        ("stop", "run.state.stop_training?"),
        ("log_metric", "run.log_scalar?"),
        ("log_hyperparameter", "run.log_hyperparameters?"),
    ],
)
def test_names_of_other_loggers_lead_to_ours(name, hint):
    """A habitual name from another logger gets a hint with ours."""
    run = Run(run_name="own")

    with pytest.raises(AttributeError, match=f"a Run has no {name!r}. Did you mean {hint[:-1]}"):
        getattr(run, name)

    assert not hasattr(run, "_private")
    run.close()


def test_arguments_that_are_nearly_right_are_named(tmp_path):
    """`logger` and `tag` are `loggers` and `tags`."""
    with pytest.raises(TypeError, match=r"Run has no argument 'logger'\. Did you mean 'loggers'"):
        Run(logger=InMemory())
    for name in ("tag", "tags"):
        with pytest.raises(TypeError, match=rf"Run has no argument '{name}'\. .*RunDirectory\(\.\.\., tags="):
            Run(**{name: "a"})
    with pytest.raises(TypeError, match=r"RunDirectory has no argument 'tag'\. Did you mean 'tags'"):
        RunDirectory(tmp_path / "own", tag=["a"])


def frames_of(error):
    """The modules of the frames of a traceback, outermost first."""
    return [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]


class NotesItself(Callback):
    def init(self, state, logger):
        raise RecordError("mine")


@pytest.mark.parametrize("begin", [Run.__enter__, Run.batch_start, lambda run: run.log_metrics({"a": 1.0})])
def test_a_taken_folder_raises_without_our_frames(tmp_path, begin):
    """The traceback ends with the user's line, and the message helps."""
    with Run(RunDirectory(tmp_path / "own"), run_name="own") as run:
        run.log_metrics({"a": 1.0})

    with pytest.raises(FileExistsError, match="pass if_exists=") as raised:
        begin(Run(RunDirectory(tmp_path / "own", if_exists="error"), run_name="own"))

    frames = frames_of(raised.value)
    assert set(frames) == {__name__, "events.run"}
    assert len(frames) <= 5
    assert raised.value.__suppress_context__


def test_frames_of_the_users_callback_stay():
    """Where a callback raises what a destination would, its line is in the traceback."""
    with pytest.raises(RecordError, match="mine") as raised:
        Run(callbacks=[NotesItself()], run_name="own").batch_start()

    assert frames_of(raised.value)[-1] == __name__


def test_row_without_a_step_takes_the_last_one_given():
    """A loop that gives its own steps counts no batches; one that counts them keeps its count."""
    memory = InMemory()
    with Run([memory], run_name="mine") as run:
        run.log_metrics({"loss": 1.0}, step=40)
        run.log_metrics({"val/loss": 2.0})
        run.log_text("fine", "note")
        run.batch_end()
        run.log_metrics({"loss": 3.0})

    assert [(record.kind, record.step) for record in memory.records] == [
        ("metrics", 40),
        ("metrics", 40),
        ("text", 40),
        ("metrics", 1),
    ]


def test_pruned_trial_is_stopped():
    """Optuna's exception ends a run in order, and says why."""

    class TrialPruned(Exception):
        pass

    run = Run([InMemory()], run_name="mine")
    run.batch_end()
    run.close(TrialPruned("at step 1"))

    assert (run.state.status, run.state.stop_reason) == ("stopped", "pruned: at step 1")
