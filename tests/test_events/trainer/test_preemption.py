"""A signal of the scheduler ends training in order: a checkpoint, a status with its reason, and the process."""

import json
import os
import signal
import stat
import threading

import pytest

from destinations import RunDirectory
from events import Callback, Preemption, Trainer, read_checkpoint
from events.trainer.preemption import SignalWatch

from .conftest import MetricList


class Signals(Callback):
    """Sends a signal to this process at an event, once as many batches are trained."""

    def __init__(self, event, batches, number=signal.SIGTERM):
        super().__init__()
        self._at, self._number = (event, batches), number

    def run_event(self, event, state, logger):
        if (event.value, int(state.timestamp.batch)) == self._at:
            self._at = ()
            os.kill(os.getpid(), self._number)


@pytest.fixture(autouse=True)
def handlers():
    """Nothing is left installed."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def series(*lists):
    """Returns what was logged, in order."""
    return [(step, {k: float(v) for k, v in row.items()}) for one in lists for step, row in one.metrics]


@pytest.mark.parametrize(
    ("event", "batches", "saved", "number"),
    [
        ("fit_start", 0, "ep0-ba0.pt", signal.SIGTERM),
        ("before_forward", 3, "ep0-ba4.pt", signal.SIGUSR1),
        ("batch_end", 5, "ep0-ba5.pt", signal.SIGTERM),
        ("eval_start", 2, "ep0-ba2.pt", signal.SIGUSR1),
        ("eval_batch_end", 5, "ep1-ba5.pt", signal.SIGTERM),
        ("eval_batch_start", 10, "ep2-ba10.pt", signal.SIGTERM),
    ],
)
def test_a_preempted_run_saves_where_it_is_and_resumes_as_if_it_were_not(
    make_trainer, make_dataloader, tmp_path, event, batches, saved, number
):
    """Wherever the signal arrives; an interrupted evaluation is made by the run that resumes."""

    def fit(name, *callbacks):
        metrics = MetricList()
        trainer = make_trainer(
            callbacks=callbacks,
            loggers=[metrics, RunDirectory(tmp_path / "run" / name)],
            eval_dataloader=make_dataloader(shuffle=True),
            eval_interval="2ba" if batches == 2 else "1ep",
            save_folder=tmp_path / name,
            save_interval="100ba",
            run_name=name,
            autoresume=True,
        )
        try:
            trainer.fit()
        finally:
            weights = [one.tolist() for one in trainer.state.model.parameters()]
            seen.append((metrics, weights))
        return trainer

    seen = []
    with pytest.raises(SystemExit) as ended:
        fit("preempted", Signals(event, batches, number))
    sidecar = json.loads((tmp_path / "run" / "preempted" / "sidecar.json").read_text())
    checkpoint = read_checkpoint(tmp_path / "preempted" / saved)
    resumed = fit("preempted")
    fit("whole")

    assert ended.value.code == 128 + number
    assert (sidecar["status"], sidecar["stop_reason"]) == ("preempted", f"{number.name} on rank 0")
    assert checkpoint["random"][0].get("evaluating", []) == (["eval"] if "eval" in event else [])
    assert resumed.state.status == "completed"
    (first, _), (second, weights), (whole, expected) = seen
    assert weights == expected
    assert series(first, second) == series(whole)


def test_an_existing_handler_is_called_and_its_exception_ends_the_run(make_trainer, tmp_path):
    """One example is `uploads.exit_on_sigterm`, which raises at once outside of a trainer."""

    class Enough(Exception):
        pass

    def ends(number, frame):
        raise Enough(number)

    earlier = signal.signal(signal.SIGTERM, ends)
    trainer = make_trainer(callbacks=Signals("before_forward", 3), save_folder=tmp_path)
    try:
        with pytest.raises(Enough):
            trainer.fit()
        assert signal.getsignal(signal.SIGTERM) is ends
    finally:
        signal.signal(signal.SIGTERM, earlier)

    assert trainer.state.status == "preempted"
    assert (tmp_path / "ep0-ba4.pt").exists()


@pytest.mark.parametrize(
    ("number", "handler", "preemption"),
    [
        (signal.SIGUSR1, lambda number, frame: None, Preemption()),
        (signal.SIGTERM, signal.SIG_IGN, Preemption()),
        (signal.SIGTERM, lambda number, frame: None, None),
    ],
)
def test_signals_that_are_not_the_trainers_are_left_alone(make_trainer, number, handler, preemption):
    """They are SIGUSR1 with a handler of the program, an ignored signal, and all signals with None."""
    earlier = signal.signal(number, handler)
    trainer = make_trainer(callbacks=Signals("batch_end", 3, number), preemption=preemption)
    try:
        trainer.fit()
    finally:
        signal.signal(number, earlier)

    assert (trainer.state.status, trainer.state.timestamp.batch.value) == ("completed", 10)


def test_a_run_without_a_saver_says_that_nothing_is_saved(make_trainer, caplog):
    """The run still ends."""
    trainer = make_trainer(callbacks=Signals("batch_end", 3))

    with pytest.raises(SystemExit):
        trainer.fit()

    assert "SIGTERM on rank 0: training ends after 3ba." in caplog.text
    assert "The run is not saved: pass save_folder=" in caplog.text


def test_training_that_ends_by_itself_is_not_preempted(make_trainer):
    """A signal during a stop, or after the last batch, ends the process but not the run."""

    class Stops(Callback):
        def batch_end(self, state, logger):
            if state.timestamp.batch == 3:
                state.stop_training("enough")

    stopped = make_trainer(callbacks=[Signals("batch_end", 3), Stops()])
    with pytest.raises(SystemExit):
        stopped.fit()
    completed = make_trainer(callbacks=Signals("fit_end", 10))
    with pytest.raises(SystemExit):
        completed.fit()

    assert (stopped.state.status, stopped.state.stop_reason) == ("stopped", "enough")
    assert completed.state.status == "completed"


def test_fit_in_another_thread_installs_nothing(make_trainer):
    """Python allows it in the main thread only."""
    trainer = make_trainer()
    seen = []
    trainer.engine.run_event("init")
    thread = threading.Thread(target=lambda: (trainer.fit(), seen.append(signal.getsignal(signal.SIGTERM))))

    thread.start()
    thread.join()

    assert seen == [signal.getsignal(signal.SIGTERM)]


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({"SLURM_JOB_ID": "17"}, "requeue 17\n"),
        ({"SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2"}, "requeue 17_2\n"),
        ({}, None),
    ],
)
def test_slurm_is_asked_once_to_queue_the_job_again(
    make_trainer, tmp_path, monkeypatch, caplog, environment, asked
):
    """Once everything is closed; without a job, the log says so."""
    program, calls = tmp_path / "scontrol", tmp_path / "calls"
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    trainer = make_trainer(
        callbacks=Signals("batch_end", 3), save_folder=tmp_path / "saved", preemption=Preemption(requeue=True)
    )

    with pytest.raises(SystemExit):
        trainer.fit()
    trainer.close()

    assert (calls.read_text() if calls.exists() else None) == asked
    assert ("not queued again" in caplog.text) == (asked is None)


def test_a_handler_in_c_is_left_alone():
    """`faulthandler.register` replaces a handler that Python does not know of."""
    import faulthandler

    with open(os.devnull, "w") as file:  # noqa: PTH123  # a descriptor is needed
        faulthandler.register(signal.SIGUSR1, file)
        try:
            watch = SignalWatch(Preemption())
            with watch.watching():
                os.kill(os.getpid(), signal.SIGUSR1)
                assert watch.number is None
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def test_a_budget_of_no_seconds_raises():
    """There would be no time to save."""
    with pytest.raises(ValueError, match="save_seconds"):
        Preemption(save_seconds=0)


def test_a_cell_that_is_run_again_takes_the_run_over(make_trainer, tmp_path):
    """The previous trainer, which held the lock of the folder, is closed."""
    options = {"save_folder": tmp_path, "run_name": "cell", "autoresume": True}
    first = make_trainer(schedulers=(), **options)
    first.fit()
    given = first.state

    second = Trainer(
        given.model,
        given.train_dataloader,
        max_duration="3ep",
        loss_fn=lambda outputs, targets: outputs.sum(),
        optimizers=given.optimizers,
        device="cpu",
        **options,
    )
    second.fit()
    second.close()

    assert first.engine.is_closed
    assert second.state.timestamp.batch == 15
