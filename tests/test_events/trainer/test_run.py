"""`Run`: a run in a custom loop."""

import re

import pytest

from destinations import InMemory
from events import Callback, EngineClosedError, Run
from tests.test_events.trainer.conftest import EventList


def test_the_events_of_a_custom_loop(event_list):
    """Entering, batches, epochs, evaluation and leaving fire the events they stand for."""
    with Run(callbacks=event_list, run_name="mine") as run:
        run.epoch_start(length=1)
        run.batch_start()
        run.run_event("before_forward")
        run.batch_end()
        run.eval_start("test", length=1)
        run.eval_batch_start()
        run.eval_batch_end()
        run.eval_end()
        run.epoch_end()

    assert event_list.events == [
        *[
            "init",
            "fit_start",
            "epoch_start",
            "batch_start",
            "before_forward",
            "batch_end",
            "batch_checkpoint",
        ],
        *[
            "eval_start",
            "eval_batch_start",
            "eval_batch_end",
            "eval_end",
            "epoch_end",
            "epoch_checkpoint",
            "fit_end",
        ],
    ]


def test_records_have_the_step_of_the_batch(metric_list):
    """Before `batch_end` the step counts the batches before, after it this one too."""
    with Run(metric_list, run_name="mine") as run:
        run.log_hyperparameters({"lr": 0.1})
        for loss in (0.5, 0.25):
            run.batch_start()
            run.log_metrics({"loss": loss})
            run.batch_end(samples=8, tokens=100)
        run.log_scalar("final", 1)

    assert metric_list.metrics == [(0, {"loss": 0.5}), (1, {"loss": 0.25}), (2, {"final": 1})]
    assert metric_list.hyperparameters == {"lr": 0.1}
    assert (run.state.timestamp.sample, run.state.timestamp.token) == ("16sp", "200tok")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "completed"),
        (ValueError("bad data"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(143), "preempted"),
        (SystemExit(1), "failed"),
        (SystemExit(), "completed"),
    ],
)
def test_how_the_run_ended_is_known_where_it_is_closed(metric_list, error, status):
    """The status that destinations see in `close` is the one of the exception that left the block."""

    def body():
        with Run(metric_list, run_name="mine") as run:
            run.log_metrics({"loss": 1.0})
            if error is not None:
                raise error

    if error is None:
        body()
    else:
        with pytest.raises(type(error)):
            body()

    assert metric_list.closed_as == [(status, error)]
    assert metric_list.metrics == [(0, {"loss": 1.0})]


def test_fit_end_comes_only_where_the_block_ends_well(event_list):
    """A failed run has no FIT_END."""

    def body():
        with Run(callbacks=event_list, run_name="mine") as run:
            run.fit_start()
            raise ValueError("bad data")

    with pytest.raises(ValueError, match="bad data"):
        body()

    assert event_list.events == ["init", "fit_start"]


def test_training_begins_once_and_ends_only_where_it_has_begun():
    """However the run begins, FIT_START runs first and once; a run with only an evaluation has none."""
    for begin in ("fit_start", "epoch_start", "batch_start", "batch_end"):
        events = EventList()
        with Run(callbacks=events, run_name="mine") as run:
            getattr(run, begin)()
            run.batch_start()
            run.batch_end()
        assert events.events[:2] == ["init", "fit_start"]
        assert (events.events.count("fit_start"), events.events[-1]) == (1, "fit_end")

    events = EventList()
    with Run(callbacks=events, run_name="mine") as run:
        run.eval_start()
        run.eval_end()
    assert events.events == ["init", "eval_start", "eval_end"]


def test_an_error_in_init_closes_opened_callbacks(metric_list):
    """Destinations are free for another run when a callback fails to start."""

    class FailsToStart(Callback):
        def init(self, state, logger):
            raise RuntimeError("no licence")

    with pytest.raises(RuntimeError, match="no licence"), Run(metric_list, FailsToStart(), "mine"):
        pass

    assert [status for status, _ in metric_list.closed_as] == ["failed"]
    with Run(metric_list, run_name="again") as run:
        run.log_metrics({"loss": 1.0})
    assert metric_list.metrics == [(0, {"loss": 1.0})]


def test_logging_after_the_block_is_an_error(metric_list):
    """A record that can't arrive any more is refused."""
    with Run(metric_list, run_name="mine") as run:
        pass

    with pytest.raises(EngineClosedError, match="after the run was closed"):
        run.log_metrics({"late": 1.0})


def test_an_unnamed_run_gets_a_name_that_sorts_by_time(monkeypatch):
    """The environment may have one instead."""
    monkeypatch.delenv("RUN_NAME", raising=False)
    with Run() as first, Run() as second:
        assert first.state.run_name != second.state.run_name
        assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{8}", first.state.run_name)

    monkeypatch.setenv("RUN_NAME", "from-the-environment")
    with Run() as third:
        assert third.state.run_name == "from-the-environment"


def test_several_ranks_need_a_name(monkeypatch):
    """Ranks that make up names each would be several runs."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(ValueError, match="run_name must be given with several ranks"):
        Run()


def test_progress_can_be_shown(event_list):
    """Length, phase and label are in the state while they apply."""
    with Run(max_duration="3ep", train_dataloader=[1, 2], run_name="mine") as run:
        run.epoch_start()
        assert (run.state.dataloader_label, run.state.dataloader_len, run.state.phase) == (
            "train",
            2,
            "train",
        )
        run.eval_start("test", length=7)
        assert (run.state.dataloader_label, run.state.dataloader_len, run.state.phase) == ("test", 7, "eval")
        run.eval_end()
        assert (run.state.dataloader_label, run.state.dataloader_len, run.state.phase) == (
            "train",
            2,
            "train",
        )
        assert not run.state.is_done
        for _ in range(3):
            run.epoch_end()
        assert run.state.is_done


def test_without_a_with_block_a_run_begins_at_its_first_use():
    """`INIT` runs once, before the first record or event, whichever method is called first."""
    for use in (
        lambda run: run.log_metrics({"a": 1.0}),
        lambda run: run.log_text("x"),
        lambda run: run.batch_start(),
        lambda run: run.eval_start(),
        lambda run: run.run_event("init"),
        lambda run: run.namespace("x").__enter__(),
        lambda run: run.flush(),
    ):
        events = []

        class Hears(Callback):
            def run_event(self, event, state, logger, events=events):
                events.append(event.value)

        run = Run(InMemory(), Hears(), "mine")
        use(run)
        run.log_metrics({"b": 2.0})
        run.close()

        assert events.count("init") == 1
        assert events[0] == "init"
        assert 2.0 in run.logger.destinations[0].most_recent_values.values()


def test_a_run_that_was_never_used_says_nothing(caplog):
    """There is nothing to close."""
    run = Run(InMemory(), run_name="mine")
    del run

    assert caplog.messages == []


def test_a_step_that_never_moves_is_reported_once(caplog):
    """A loop without `batch_end` writes everything at step 0."""
    memory = InMemory()
    with Run(memory, run_name="mine") as run:
        for value in range(250):
            run.log_metrics({"loss": float(value)})

    (said,) = caplog.messages
    assert said.startswith(
        "metric 'loss' was logged 100 times at step 0: the step moves only with run.batch_"
    )
    assert len(memory.records) == 250


@pytest.mark.parametrize("how", ["batch_end", "step", "names", "evaluation", "bad values"])
def test_a_correct_step_is_not_reported(how, caplog):
    """It moves, is given, or is the first one of many metrics; the first calls find that out."""
    with Run(InMemory(), run_name="mine") as run:
        if how == "evaluation":
            run.eval_start()
        for value in range(250):
            if how == "bad values":
                run.log_metrics({3: 1.0})
                continue
            run.log_metrics(
                {f"loss/{value}" if how == "names" else "loss": 1.0}, step=value if how == "step" else None
            )
            if how == "batch_end":
                run.batch_end()
        if how in {"batch_end", "step"}:
            assert run.log_metrics == run.logger.log_metrics

    assert "step 0" not in caplog.text
