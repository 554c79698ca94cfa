"""The contract of a destination, as tests."""

import inspect
import math
import pickle
import threading
from pathlib import Path
from typing import Any

from destinations.base import LoggerDestination
from events import TimeUnit

from .dry_run import DryRun
from .recording import RecordingDestination
from .samples import (
    WEIRD_NAMES,
    LogsInClose,
    UploadsThatFail,
    every_kind_of_record,
    is_lone_surrogate,
    pixels,
)

__all__ = ["DestinationContract"]


class DestinationContract:
    """The contract of a destination; subclass it in a test module, with a fixture that returns yours.

    ```python
    class TestMine(DestinationContract):
        @pytest.fixture
        def destination(self):
            return Mine()
    ```

    Override `read_metrics` and `read_output` to check results too.
    """

    def read_metrics(self, destination: Any) -> "list[tuple[int, dict[str, float]]] | None":
        """Returns step and values of every metrics record that has arrived; None if they cannot be read back.

        NaN and infinities are to be floats again.
        """
        return None

    def read_output(self, destination: Any) -> object:
        """Returns the destination's output or contents, for comparison; None if they are not visible."""
        return None

    def test_is_a_destination(self, destination: Any) -> None:
        """It is a LoggerDestination, and its methods take what the base class's take, by position too.

        `caption`, `captions` and `format` may be missing: a logger passes them only where they are taken.
        """
        assert isinstance(destination, LoggerDestination), f"{destination!r} must be a LoggerDestination."
        for name, base in inspect.getmembers(LoggerDestination, inspect.isfunction):
            if name.startswith("_"):
                continue
            parameters = list(inspect.signature(base).parameters.values())[1:]
            positional = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
            keywords = {
                one.name: None
                for one in parameters
                if one.kind is one.KEYWORD_ONLY and one.default is one.empty
            }
            inspect.signature(getattr(destination, name)).bind(*positional, **keywords)

    def test_lives_through_a_whole_run(self, destination: Any) -> None:
        """Two fits, evaluations in and outside fit, a prediction, close: no error, no metric is lost."""
        recording = RecordingDestination()
        run = DryRun(destination, recording)

        run.init()
        run.logger.log_hyperparameters({"lr": 1e-5, "optimizer": {"name": "sgd", "nesterov": True}})
        run.fit(eval_every=2)
        run.state.max_duration = run.state.timestamp.get(TimeUnit.EPOCH) + 1
        run.fit()
        run.evaluate_standalone(label="val")
        run.predict()
        run.logger.flush()
        _close(run, destination)

        self._has_metrics(destination, recording)

    def test_closes_without_init(self, destination: Any) -> None:
        """A run that failed before `init` closes it all the same."""
        run = DryRun(destination)

        _close(run, destination)

        assert run.engine.is_closed

    def test_closes_twice(self, destination: Any) -> None:
        """A second close, and a flush after it, do nothing."""
        run = DryRun(destination)
        run.init()
        run.fit()
        _close(run, destination)
        before = self.read_output(destination)

        destination.close(run.state, run.logger)
        destination.post_close()
        destination.flush()

        assert self.read_output(destination) == before, "close must write nothing the second time."

    def test_serves_a_second_run(self, destination: Any) -> None:
        """After close, another run may have it."""
        recording = RecordingDestination()
        first = DryRun(destination, run_name="first")
        first.init()
        first.fit()
        _close(first, destination)
        second = DryRun(destination, recording, run_name="second")

        second.init()
        second.fit()
        _close(second, destination)

        self._has_metrics(destination, recording)

    def test_closes_after_an_exception(self, destination: Any) -> None:
        """A run that fails inside a batch is closed without FIT_END, and keeps its records."""
        recording = RecordingDestination()
        run = DryRun(destination, recording)
        run.init()
        run.fire("fit_start", "epoch_start", "before_dataloader", "batch_start")
        run.logger.log_metrics({"loss/train": 0.5})

        _close(run, destination, ZeroDivisionError("the user's own"))

        self._has_metrics(destination, recording)

    def test_takes_what_others_log_in_close(self, destination: Any) -> None:
        """Other callbacks are closed before it, and may log."""
        recording = RecordingDestination()
        run = DryRun(destination, recording, callbacks=[LogsInClose()])
        run.init()

        _close(run, destination)

        assert recording.metrics == [(99, {"last": 1.0})]
        self._has_metrics(destination, recording)

    def test_takes_records_outside_of_fit(self, destination: Any) -> None:
        """A custom loop may fire only INIT, log, and close."""
        recording = RecordingDestination()
        run = DryRun(destination, recording, max_duration=None)
        run.fire("init")

        for step in range(5):
            run.logger.log_metrics({"loss": step / 3}, step=step)
        _close(run, destination)

        self._has_metrics(destination, recording)

    def test_takes_records_before_init(self, destination: Any) -> None:
        """A record that comes before INIT is no error."""
        run = DryRun(destination)

        run.logger.log_hyperparameters({"lr": 0.1})
        run.logger.log_metrics({"loss": 1.0}, step=0)
        run.logger.flush()
        run.init()
        _close(run, destination)

    def test_takes_batches_without_fit(self, destination: Any) -> None:
        """A custom loop may only fire the starts and ends of batches, and not know its length."""
        recording = RecordingDestination()
        run = DryRun(destination, recording, max_duration=None, knows_length=False)
        run.init()

        for _ in range(4):
            run.fire("batch_start")
            run.logger.log_metrics({"loss": 0.1})
            run.state.timestamp = run.state.timestamp.to_next_batch(1)
            run.fire("batch_end")
        _close(run, destination)

        self._has_metrics(destination, recording)

    def test_goes_on_where_a_checkpoint_was(self, destination: Any) -> None:
        """Its state is plain, and can be loaded again; a run may begin in the middle of an epoch."""
        first = DryRun(destination)
        first.init()
        first.fit()
        saved = pickle.loads(pickle.dumps(destination.state_dict()))  # noqa: S301  # our own bytes
        _close(first, destination)
        run = DryRun(destination, run_name="resumed", max_duration="3ep")

        run.fire("init", "before_load")
        run.state.timestamp = run.state.timestamp.copy(epoch=1, batch=4, sample=16, batch_in_epoch=1)
        destination.load_state_dict(saved)
        run.fire("after_load")
        run.fit()
        _close(run, destination)

        assert int(run.state.timestamp.epoch) == 3  # noqa: PLR2004  # its max_duration

    def test_keeps_nan_and_infinities(self, destination: Any) -> None:
        """NaN, infinities, very small and very large numbers, int and bool arrive unchanged."""
        recording = RecordingDestination()
        run = DryRun(destination, recording)
        run.init()

        run.logger.log_metrics({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e-300, "e": 0.1 + 0.2})
        run.logger.log_metrics({"a": 2**60, "b": True, "c": -0.0, "d": 5e-324, "e": 1.7976931348623157e308})
        run.logger.log_metrics({})
        _close(run, destination)

        self._has_metrics(destination, recording)

    def test_takes_weird_names(self, destination: Any) -> None:
        """Any string may be the name of a metric, hyperparameter, table, column, text or trace."""
        recording = RecordingDestination()
        run = DryRun(destination, recording)
        run.init()

        run.logger.log_metrics({name: 1.0 for name in WEIRD_NAMES if not is_lone_surrogate(name)})
        for name in WEIRD_NAMES:
            run.logger.log_hyperparameters({name: name})
            run.logger.log_table([name], [[name]], name)
            run.logger.log_text(name, name)
            run.logger.log_traces({name: name})
        run.logger.log_metrics({"lone\udc80surrogate": 1.0}, step=7)
        _close(run, destination)
        self._has_metrics(destination, recording, except_names={"lone\udc80surrogate"})

    def test_takes_steps_in_any_order(self, destination: Any) -> None:
        """The same step again, an earlier one after a later one, and other names at each step."""
        recording = RecordingDestination()
        run = DryRun(destination, recording)
        run.init()

        for step in (5, 5, 3, 0, 2**40):
            run.logger.log_metrics({"loss": float(step), f"only at {step}": 1.0}, step=step)
        _close(run, destination)

        self._has_metrics(destination, recording)

    def test_owns_what_it_keeps(self, destination: Any) -> None:
        """Changes that the caller makes to its objects after the call don't change the records."""
        run = DryRun(destination)
        run.init()
        metrics, parameters, row = {"loss": 1.0}, {"lr": {"value": 0.1}}, [1, 2]

        destination.log_metrics(metrics, 1)
        destination.log_hyperparameters(parameters)
        destination.log_table(["a", "b"], [row], "table", 1)
        metrics["loss"], metrics["more"] = 2.0, 3.0
        parameters["lr"]["value"] = 7.0
        row[0] = 9
        _close(run, destination)

        found = self.read_metrics(destination)
        assert found is None or found == [(1, {"loss": 1.0})], f"must be what was logged, got {found}."

    def test_changes_nothing_that_it_is_given(self, destination: Any) -> None:
        """A call leaves the caller's objects unchanged."""
        run = DryRun(destination)
        run.init()
        metrics, parameters, rows, labels = {"loss": 1.0}, {"lr": {"value": 0.1}}, [[1, None]], {1: "cat"}

        destination.log_metrics(metrics, 1)
        destination.log_hyperparameters(parameters)
        destination.log_table(["a", "b"], rows, "table", 1)
        masks = {"mask": pixels(8, 8)}
        destination.log_images(pixels(8, 8), "image", False, 1, masks, labels, True)  # noqa: FBT003
        run.fit()
        _close(run, destination)

        assert (metrics, parameters, rows, labels) == (
            {"loss": 1.0},
            {"lr": {"value": 0.1}},
            [[1, None]],
            {1: "cat"},
        )

    def test_takes_every_kind_of_record(self, destination: Any, tmp_path: Path) -> None:
        """Each method accepts each documented shape and type: numpy, torch, PIL, lists, paths, bytes."""
        run = DryRun(destination)
        run.init()

        for log in every_kind_of_record(tmp_path):
            log(run.logger)
        run.fit()
        _close(run, destination)

    def test_can_be_called_directly(self, destination: Any) -> None:
        """Without a Logger no step is given, and defaults are the base class's."""
        run = DryRun(destination)
        run.init()

        destination.log_metrics({"loss": 1.0})
        destination.log_hyperparameters({"lr": 0.1})
        destination.log_table(["a"], [[1]])
        destination.log_text("text")
        destination.log_images(pixels(8, 8))
        destination.log_audio(pixels(64).astype("int16"), 8000)
        destination.log_video(pixels(2, 3, 8, 8), 10)
        destination.log_histogram(pixels(8))
        destination.log_point_cloud(pixels(4, 3))
        destination.log_traces({"trace": object()})
        destination.flush()
        _close(run, destination)

        found = self.read_metrics(destination)
        assert found is None or [values for _, values in found] == [{"loss": 1.0}]

    def test_is_silent_on_other_ranks(self, destination: Any) -> None:
        """On rank 1 it lives through a run too; one that writes something shared writes nothing."""
        before = self.read_output(destination)
        run = DryRun(destination, rank=1)

        run.init()
        run.logger.log_hyperparameters({"lr": 0.1})
        run.logger.log_table(["a"], [[1]])
        run.logger.log_text("text")
        run.fit(eval_every=2)
        run.predict()
        _close(run, destination)

        assert self.read_output(destination) == before, "must be silent on rank 1."

    def test_leaves_no_thread_behind(self, destination: Any) -> None:
        """When it is closed, its threads are gone."""
        before = set(threading.enumerate())
        run = DryRun(destination)
        run.init()
        run.fit(eval_every=2)

        _close(run, destination)

        left = [thread.name for thread in threading.enumerate() if thread not in before]
        assert left == [], f"threads must be gone after close, got {left}."

    def test_starts_nothing_before_init(self, destination: Any) -> None:
        """Before its run begins it has no thread, so thousands can be made."""
        before = set(threading.enumerate())

        destination.state_dict()

        assert set(threading.enumerate()) <= before

    def test_can_be_sent_to_another_process(self, destination: Any) -> None:
        """Before `init` it can be pickled, and the copy works."""
        copied = pickle.loads(pickle.dumps(destination))  # noqa: S301  # our own bytes
        run = DryRun(copied)

        run.init()
        run.fit()
        _close(run, copied)

    def test_survives_neighbours_that_fail(self, destination: Any) -> None:
        """A store that takes no file and a destination that always raises do not keep it from its work."""
        recording = RecordingDestination()
        run = DryRun(UploadsThatFail(), destination, recording, raise_errors=False)

        run.init()
        run.fit(eval_every=2)
        _close(run, destination)
        self._has_metrics(destination, recording)

    def _has_metrics(
        self, destination: Any, recording: RecordingDestination, except_names: "set[str] | None" = None
    ) -> None:
        """Compares the values read back with another destination's; earlier runs may add more."""
        found = self.read_metrics(destination)
        if found is None:
            return
        expected = [
            (step, {name: value for name, value in values.items() if name not in (except_names or ())})
            for step, values in recording.metrics
        ]
        expected = [(step, values) for step, values in expected if values]
        last = [
            (step, values) for step, values in found if values and not set(values) & (except_names or set())
        ]
        last = last[len(last) - len(expected) :] if expected else []
        assert repr(last) == repr(expected), f"metrics must be {expected}, got {last}."


def _close(run: DryRun, destination: LoggerDestination, exception: BaseException | None = None) -> None:
    """Closes a run, and checks that the destination has not failed, not even in `close`."""
    run.close(exception)
    name = type(destination).__name__
    failures = {kind: count for kind, count in run.logger.faults.counts.items() if kind[0] == name}
    assert failures == {}, f"{name} must not raise, got {failures}."
