"""The contract catches destinations that break it, and its helpers work."""

import math
import threading

import pytest

from destinations import LoggerDestination
from destinations.testing import Call, DestinationContract, DryRun, RecordingDestination
from events import Event


class Base(LoggerDestination):
    """Keeps metrics as a list, and the contract."""

    def __init__(self):
        self.kept = []

    def log_metrics(self, metrics, step=None):
        self.kept.append((step, dict(metrics)))


class KeepsTheCallersDict(Base):
    def log_metrics(self, metrics, step=None):
        self.kept.append((step, metrics))


class DropsNan(Base):
    def log_metrics(self, metrics, step=None):
        self.kept.append((step, {name: value for name, value in metrics.items() if not math.isnan(value)}))


class RoundsToFourDigits(Base):
    def log_metrics(self, metrics, step=None):
        self.kept.append((step, {name: round(value, 4) for name, value in metrics.items()}))


class ForgetsTheLastRecord(Base):
    def close(self, state, logger):
        del self.kept[-1:]


class RefusesEarlierSteps(Base):
    last = 0

    def log_metrics(self, metrics, step=None):
        if step >= self.last:
            self.last = step
            super().log_metrics(metrics, step)


class ChangesRows(Base):
    def log_table(self, columns, rows, name="Table", step=None):
        rows.insert(0, columns)


class IsLoudOnEachRank(Base):
    def epoch_end(self, state, logger):
        self.kept.append((0, {"loud": 1.0}))


class WritesAtEachClose(Base):
    def close(self, state, logger):
        self.kept.append((0, {"closed": 1.0}))


class LeavesAThread(Base):
    def __init__(self):
        super().__init__()
        self.stop = threading.Event()

    def init(self, state, logger):
        threading.Thread(target=self.stop.wait, daemon=True).start()


class StartsAThreadWhenMade(Base):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class NeedsInit(Base):
    def close(self, state, logger):
        self.file.close()


class NeedsFitStart(Base):
    def fit_start(self, state, logger):
        self.count = 0

    def batch_end(self, state, logger):
        self.count += 1


class ServesOneRun(Base):
    is_closed = False

    def init(self, state, logger):
        if self.is_closed:
            raise RuntimeError("closed")

    def close(self, state, logger):
        self.is_closed = True


class TakesNumpyAlone(Base):
    def log_images(self, images, name="Images", *arguments, **keywords):
        images.dtype.itemsize  # noqa: B018  # lists and pictures have none


class HasOtherArguments(Base):
    def log_text(self, text):
        """Takes no name."""


class NeedsCaptions(Base):
    def log_images(self, *arguments, captions):
        len(captions)


class EncodesNames(Base):
    def log_text(self, text, name="Text", step=None):
        name.encode("utf-8")


class Contract(DestinationContract):
    """Reads the records that the doubles above keep."""

    def read_metrics(self, destination):
        return destination.kept

    def read_output(self, destination):
        return repr(destination.kept)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (KeepsTheCallersDict, "test_owns_what_it_keeps"),
        (DropsNan, "test_keeps_nan_and_infinities"),
        (RoundsToFourDigits, "test_keeps_nan_and_infinities"),
        (ForgetsTheLastRecord, "test_lives_through_a_whole_run"),
        (ForgetsTheLastRecord, "test_closes_after_an_exception"),
        (RefusesEarlierSteps, "test_takes_steps_in_any_order"),
        (ChangesRows, "test_changes_nothing_that_it_is_given"),
        (IsLoudOnEachRank, "test_is_silent_on_other_ranks"),
        (WritesAtEachClose, "test_closes_twice"),
        (LeavesAThread, "test_leaves_no_thread_behind"),
        (StartsAThreadWhenMade, "test_can_be_sent_to_another_process"),
        (NeedsInit, "test_closes_without_init"),
        (NeedsFitStart, "test_takes_batches_without_fit"),
        (ServesOneRun, "test_serves_a_second_run"),
        (HasOtherArguments, "test_is_a_destination"),
        (NeedsCaptions, "test_is_a_destination"),
        (EncodesNames, "test_takes_weird_names"),
    ],
)
def test_the_contract_catches_broken_destinations(broken, test):
    """Each broken destination fails the test about what it does wrong."""
    destination = broken()

    try:
        with pytest.raises(Exception, match=r"(?s).*"):
            getattr(Contract(), test)(destination)
    finally:
        getattr(destination, "stop", threading.Event()).set()


def test_the_contract_catches_a_destination_that_accepts_only_arrays(tmp_path):
    """It tries every documented kind of image."""
    with pytest.raises(AttributeError, match="dtype"):
        Contract().test_takes_every_kind_of_record(TakesNumpyAlone(), tmp_path)


def test_a_correct_double_passes():
    """The base class of the broken doubles keeps the contract, so they fail only for what they override."""
    for name in dir(Contract):
        if name.startswith("test_") and name not in {
            "test_takes_every_kind_of_record",
            "test_is_silent_on_other_ranks",
        }:
            getattr(Contract(), name)(Base())


def test_a_recording_destination_records_calls_with_copies():
    """Calls have their arguments by name; views show events, metrics and hyperparameters."""
    recording = RecordingDestination()
    run = DryRun(recording)
    metrics, rows = {"loss": 1.0}, [[1]]

    run.fire("init")
    recording.log_metrics(metrics, 3)
    recording.log_table(["a"], rows, "t", 4)
    run.logger.log_hyperparameters({"lr": 0.1})
    metrics["loss"], rows[0][0] = 2.0, 2
    run.close()

    assert recording.calls == [
        Call("run_event", {"event": Event.INIT}),
        Call("log_metrics", {"metrics": {"loss": 1.0}, "step": 3}),
        Call("log_table", {"columns": ["a"], "rows": [[1]], "name": "t", "step": 4}),
        Call("log_hyperparameters", {"hyperparameters": {"lr": 0.1}}),
        Call("close", {}),
        Call("post_close", {}),
    ]
    assert (recording.events, recording.metrics) == ([Event.INIT], [(3, {"loss": 1.0})])
    assert recording.hyperparameters == {"lr": 0.1}


def test_a_recording_destination_can_store_files(tmp_path):
    """With stores_files=True it accepts uploads."""
    recording = RecordingDestination(stores_files=True)
    run = DryRun(recording)
    (tmp_path / "file").write_bytes(b"content")

    run.logger.upload_file("remote", tmp_path / "file")

    assert recording.files == {"remote": b"content"}


def test_a_dry_run_fires_the_events_of_the_loop_in_order():
    """One epoch of one batch, with an evaluation of one batch, fires the events of Event's docs."""
    recording = RecordingDestination()
    run = DryRun(recording, max_duration="1ep", batches_per_epoch=1, eval_batches=1)

    run.init()
    run.fit(eval_every=1)

    drawn = [
        line.strip().strip("<>").lower()
        for line in (text.split("#")[0] for text in Event.__doc__.split("```")[1].splitlines())
        if line.strip().startswith("<")
    ]
    evaluation = drawn[drawn.index("eval_before_all") : drawn.index("eval_standalone_start")]
    skipped = {"iteration_start", "iteration_end", "iteration_checkpoint"}
    fit = [event for event in drawn[: drawn.index("fit_end") + 1] if event not in skipped]
    after_batch = fit.index("batch_end") + 1
    assert recording.events == [*fit[:after_batch], *evaluation, *fit[after_batch:]]
