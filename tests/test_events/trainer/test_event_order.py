"""Every event of a training run, in the order in which they come."""

from events import Event

_MICROBATCH = [
    "before_forward",
    "after_forward",
    "before_loss",
    "after_loss",
    "before_backward",
    "after_backward",
]
_READ = ["before_dataloader", "after_dataloader"]
_BATCH = [
    *_READ,
    "batch_start",
    "before_train_batch",
    *_MICROBATCH,
    *_MICROBATCH,
    "after_train_batch",
    "batch_end",
]
_EVAL_BATCH = ["eval_batch_start", "eval_before_forward", "eval_after_forward", "eval_batch_end"]
_EVAL_LABEL = ["eval_start", *_EVAL_BATCH, *_EVAL_BATCH, "eval_end"]
_EVALUATION = ["eval_before_all", *_EVAL_LABEL, *_EVAL_LABEL, "eval_after_all"]
_PREDICT_BATCH = [
    "predict_batch_start",
    "predict_before_forward",
    "predict_after_forward",
    "predict_batch_end",
]


def test_every_event_comes_at_its_place(make_trainer, make_dataloader, event_list):
    """Two evaluations, microbatches, an iteration and a stop within an epoch fire all 40 events."""
    trainer = make_trainer(
        samples=4,
        batch_size=2,
        device_train_microbatch_size=1,
        max_duration="3ba",
        eval_dataloader={"near": make_dataloader(), "far": make_dataloader()},
        eval_interval="1ep",
        iteration_length="1ep",
        callbacks=[event_list],
    )

    trainer.fit()
    trainer.eval()
    trainer.predict(make_dataloader())

    assert event_list.events == [
        *["init", "before_load", "after_load", "fit_start"],
        *["iteration_start", "epoch_start"],
        *_BATCH,
        "batch_checkpoint",
        *_BATCH,
        "batch_checkpoint",
        "before_dataloader",  # The end of the data: no after_dataloader.
        "epoch_end",
        *_EVALUATION,
        *["epoch_checkpoint", "iteration_end", "iteration_checkpoint"],
        *["iteration_start", "epoch_start"],
        *_BATCH,
        "batch_checkpoint",  # max_duration, within the epoch: no epoch_end.
        *_EVALUATION,
        "fit_end",
        *["eval_standalone_start", *_EVAL_LABEL, *_EVAL_LABEL, "eval_standalone_end"],
        *["predict_start", *_PREDICT_BATCH, *_PREDICT_BATCH, "predict_end"],
    ]
    assert set(event_list.events) == {event.value for event in Event}


def test_evaluation_after_a_batch_comes_between_batch_end_and_batch_checkpoint(
    make_trainer, make_dataloader, event_list
):
    """A callback that saves on BATCH_CHECKPOINT has the evaluation's results."""
    trainer = make_trainer(
        eval_dataloader=make_dataloader(), eval_interval="2ba", max_duration="2ba", callbacks=event_list
    )

    trainer.fit()

    events = event_list.events
    assert events[events.index("eval_before_all") - 1] == "batch_end"
    assert events[events.index("eval_after_all") + 1] == "batch_checkpoint"
    assert events.count("eval_before_all") == 1


def test_reaching_the_duration_on_the_last_batch_ends_the_epoch(make_trainer, event_list):
    """max_duration in batches that is a whole number of epochs gives each epoch its end."""
    trainer = make_trainer(max_duration="10ba", callbacks=event_list)

    trainer.fit()

    assert event_list.events.count("epoch_end") == 2
    assert trainer.state.timestamp.epoch == "2ep"


def test_stop_training_ends_after_the_batch_at_hand(make_trainer, event_list):
    """`state.stop_training()` leaves the epoch without an end, and fit with one."""

    class Stopper(type(event_list)):
        def batch_end(self, state, logger):
            raise AssertionError("run_event is overridden: this hook is not called")

        def run_event(self, event, state, logger):
            super().run_event(event, state, logger)
            if event == "batch_end":
                state.stop_training()

    stopper = Stopper()
    trainer = make_trainer(callbacks=stopper)

    trainer.fit()

    assert stopper.events.count("batch_end") == 1
    assert "epoch_end" not in stopper.events
    assert stopper.events[-1] == "fit_end"
