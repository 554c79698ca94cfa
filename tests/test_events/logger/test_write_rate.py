"""Tests how often a destination is written to, and that records in between aren't lost."""

import pickle

import pytest
import torch

from destinations import Console, InMemory, LoggerDestination, ProgressBar, TextFile
from events import Engine, Event, Logger, Phase, RecordError, State, WriteRate
from tests.clock import Clock


class Run:
    """A run with one destination that has a rate."""

    def __init__(self, destination=None, **rate):
        self.clock = Clock()
        self.state = State("r")
        self.memory = destination or InMemory(write_rate=WriteRate(**rate, clock=self.clock))
        self.logger = Logger(self.state, self.memory, raise_errors=True, strict=True)
        self.engine = Engine(self.state, self.logger)
        self.memory.init(self.state, self.logger)

    def log(self, metrics, *, seconds=0, phase=None):
        """Logs a batch's metrics, some seconds after the last."""
        self.clock.now += seconds
        self.state.phase = phase or self.state.phase
        self.logger.log_metrics(metrics)
        self.state.timestamp = self.state.timestamp.to_next_batch()

    @property
    def written(self):
        return [(one.step, one.value) for one in self.memory.records if one.kind == "metrics"]


@pytest.mark.parametrize(
    ("rate", "train", "other"),
    [
        ({}, None, None),
        ({"every_seconds": 1}, 1, 1),
        ({"train_seconds": 2}, 2, None),
        ({"eval_seconds": 3}, None, 3),
        ({"every_seconds": 1, "train_seconds": 2}, 2, 1),
        ({"every_seconds": 1, "eval_seconds": 3}, 1, 3),
        ({"every_seconds": 1, "train_seconds": 2, "eval_seconds": 3}, 2, 3),
        ({"every_seconds": 1, "train_seconds": 0}, 0, 1),
    ],
)
def test_a_phase_has_its_own_seconds_else_the_general_ones(rate, train, other):
    """Every phase but training counts as evaluation."""
    rate = WriteRate(**rate)

    assert rate.seconds(Phase.TRAIN) == train
    assert rate.seconds(Phase.EVAL) == rate.seconds(Phase.PREDICT) == other


@pytest.mark.parametrize(
    "bad",
    [
        {"every_seconds": -1},
        {"train_seconds": -0.1},
        {"eval_seconds": float("nan")},
        {"every_steps": 0},
        {"aggregate": "median"},
    ],
)
def test_a_rate_that_makes_no_sense_is_refused(bad):
    """The message names the argument and the value."""
    (name,) = bad

    with pytest.raises(ValueError, match=f"{name} must be .*, got"):
        WriteRate(**bad)


def test_the_last_value_waits_and_comes_with_the_next_write_at_its_own_step():
    """A metric logged once in between is written too."""
    run = Run(every_seconds=10)

    run.log({"loss": 0})
    run.log({"loss": 1, "once": 11}, seconds=1)
    run.log({"loss": 2, "lr": 0.1}, seconds=1)
    before = run.written
    run.log({"loss": 3}, seconds=8)

    assert before == [(0, {"loss": 0})]
    assert run.written[1:] == [(1, {"once": 11}), (2, {"lr": 0.1}), (3, {"loss": 3})]


def test_a_delayed_record_has_the_timestamp_of_its_call():
    """Destinations read it from the state."""
    run = Run(every_seconds=10)
    run.log({"a": 0})
    run.log({"b": 1})
    run.log({"c": 2}, seconds=10)

    assert [int(record.timestamp.batch) for record in run.memory.records] == [0, 1, 2]


def test_exactly_at_the_interval_it_is_due():
    """It is not due earlier."""
    run = Run(every_seconds=10)
    run.log({"a": 0})

    run.log({"a": 1}, seconds=9.999)
    early = len(run.written)
    run.log({"a": 2}, seconds=0.001)

    assert (early, len(run.written)) == (1, 2)


def test_several_calls_in_one_step_are_written_together():
    """Loss and learning rate of a step are written together; a repeated name begins the next write."""
    run = Run(every_seconds=10)

    run.logger.log_metrics({"loss": 0})
    run.logger.log_metrics({"lr": 0.1})
    run.logger.log_metrics({"lr": 0.2})
    run.logger.log_metrics({"loss": 1})

    assert run.written == [(0, {"loss": 0}), (0, {"lr": 0.1})]


def test_each_phase_has_its_own_clock():
    """An evaluation is written though training was a moment ago, and what waits of training keeps waiting."""
    run = Run(every_seconds=10)

    run.log({"loss": 0}, phase=Phase.TRAIN)
    run.log({"loss": 1}, seconds=1)
    run.log({"accuracy": 2}, seconds=1, phase=Phase.EVAL)
    run.log({"accuracy": 3}, seconds=1)
    written = run.written
    run.log({"loss": 4}, seconds=7, phase=Phase.TRAIN)

    assert written == [(0, {"loss": 0}), (2, {"accuracy": 2})]
    assert run.written[2:] == [(4, {"loss": 4})]


@pytest.mark.parametrize("end", ["fit_end", "flush", "close"])
def test_waiting_records_are_written_at_the_end(end):
    """Every phase is, in the order in which it was logged."""
    run = Run(every_seconds=10)
    run.log({"loss": 0}, phase=Phase.TRAIN)
    run.log({"loss": 1})
    run.log({"accuracy": 2}, phase=Phase.EVAL)
    run.log({"accuracy": 3})

    {
        "fit_end": lambda: run.engine.run_event(Event.FIT_END),
        "flush": run.logger.flush,
        "close": run.engine.close,
    }[end]()

    assert run.written == [(0, {"loss": 0}), (2, {"accuracy": 2}), (1, {"loss": 1}), (3, {"accuracy": 3})]


def test_steps_count_batches_since_the_last_write():
    """The first is written at once, then every third."""
    run = Run(every_steps=3)

    for value in range(8):
        run.log({"loss": value})

    assert run.written == [(0, {"loss": 0}), (3, {"loss": 3}), (6, {"loss": 6})]


def test_with_seconds_and_steps_the_earlier_counts():
    """It is due as soon as either has passed."""
    run = Run(every_steps=3, every_seconds=10)

    run.log({"loss": 0})
    run.log({"loss": 1}, seconds=10)
    for value in range(2, 6):
        run.log({"loss": value})

    assert [step for step, _ in run.written] == [0, 1, 4]


def test_a_timestamp_that_decreases_makes_a_destination_due():
    """This happens when a checkpoint is loaded."""
    run = Run(every_steps=100)
    run.state.timestamp = run.state.timestamp.copy(batch=500)
    run.log({"loss": 0})
    run.state.timestamp = run.state.timestamp.copy(batch=10)

    run.log({"loss": 1})

    assert [step for step, _ in run.written] == [500, 10]


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [("last", 2), ("first", 4), ("mean", 3), ("min", 2), ("max", 4), ("sum", 9), ("count", 3)],
)
def test_an_aggregate_covers_values_since_the_last_write(aggregate, expected):
    """It has the step of the last value, and counts every value once."""
    run = Run(every_steps=3, aggregate=aggregate)
    for value in (100, 4, 3, 2):
        run.log({"loss": value})

    assert run.written[-1] == (3, {"loss": expected})


def test_aggregates_continue_from_write_to_write():
    """Written values aren't counted again, and none is left out.

    There are more values than are kept one by one.
    """
    run = Run(every_steps=1000, aggregate="sum")

    for _ in range(2501):
        run.log({"loss": 1})
    run.logger.flush()

    assert run.written == [
        (0, {"loss": 1}),
        (1000, {"loss": 1000}),
        (2000, {"loss": 1000}),
        (2500, {"loss": 500}),
    ]


def test_an_aggregate_takes_tensors_and_keeps_nan():
    """A NaN in between is not hidden by min and max."""
    run = Run(every_steps=3, aggregate="max")
    for value in (0.0, 1.0, float("nan"), 2.0):
        run.log({"loss": torch.tensor(value)})

    assert str(run.written[-1]) == "(3, {'loss': nan})"


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [("mean", float("inf")), ("sum", float("inf")), ("min", 0.5), ("max", float("inf")), ("count", 3)],
)
def test_an_aggregate_takes_integers_of_any_size(aggregate, expected):
    """An integer too large for a float counts as infinite, and doesn't stop training."""
    run = Run(every_steps=3, aggregate=aggregate)
    for value in (0, 10**400, 0.5, 2):
        run.log({"loss": value})

    assert run.written[-1] == (3, {"loss": expected})


def test_an_aggregate_counts_functions_that_were_called_for_another_destination():
    """One destination writes each value, the other the sum of three."""
    run = Run(every_steps=3, aggregate="sum")
    each = InMemory()
    run.logger = Logger(run.state, [each, run.memory], raise_errors=True, strict=True)

    for value in range(4):
        run.log({"loss": lambda value=value: 10 + value})

    assert [record.value for record in each.records] == [{"loss": 10 + value} for value in range(4)]
    assert run.written == [(0, {"loss": 10}), (3, {"loss": 11 + 12 + 13})]


def test_memory_is_bounded_by_the_number_of_names():
    """It doesn't matter in which combinations the names come."""
    run = Run(every_seconds=10)
    run.log({"a": 0})

    for index in range(2000):
        run.log({str(index % 7): index, str(index % 11): index})
    (waiting,) = run.logger._delivery._targets[0].pending.values()
    kept = len(waiting.calls)
    run.logger.flush()

    assert kept <= 64
    assert {name: value for _, metrics in run.written[1:] for name, value in metrics.items()} == {
        str(name): max(index for index in range(2000) if name in {index % 7, index % 11})
        for name in range(11)
    }


def test_changes_by_the_caller_do_not_affect_waiting_records():
    """The dict is the caller's, and so is a tensor in it."""
    run = Run(every_seconds=10)
    run.log({"a": 0})
    metrics, tensor = {"b": 1}, torch.tensor(1.0)

    run.log(metrics)
    run.log({"c": tensor})
    metrics["b"] = 2
    tensor.fill_(2)
    run.logger.flush()

    assert run.written[1:] == [(1, {"b": 1}), (2, {"c": 1.0})]


def test_the_last_value_of_each_name_waits():
    """The same names again and again, others, tensors, another phase, names that are none: each last one is written once."""
    run = Run(every_seconds=10)
    run.log({"a": 0})

    for index, metrics in enumerate(
        [{"b": 1}, {"b": 2}, {"c": torch.tensor(3.0)}, {"b": 4}, {"d": 5}, {"b": 6}]
    ):
        run.logger.log_metrics(metrics, index + 1)
    run.log({"b": 7}, phase=Phase.EVAL)
    run.state.phase = Phase.TRAIN
    with pytest.raises(RecordError, match="must have a string as its name"):
        run.logger.log_metrics({2: 1}, 8)
    with run.logger.namespace("deep"):
        run.logger.log_metrics({"b": 9}, 9)
    run.logger.log_metrics({"e": 10}, 10)
    run.logger.flush()

    assert sorted(run.written, key=lambda one: one[0]) == [
        (0, {"a": 0}),
        (1, {"b": 7}),
        (3, {"c": 3.0}),
        (5, {"d": 5}),
        (6, {"b": 6}),
        (9, {"deep/b": 9}),
        (10, {"e": 10}),
    ]


def test_a_bad_value_is_refused_though_it_would_wait():
    """The call refuses it; the other values wait."""
    run = Run(every_seconds=10)
    run.log({"a": 0})

    with pytest.raises(RecordError, match="metric 'bad' must be a scalar"):
        run.logger.log_metrics({"good": 1, "bad": [1]})
    with pytest.raises(RecordError, match="must have a string as its name"):
        run.logger.log_metrics({1: 1})
    run.logger.flush()

    assert run.written[1:] == [(1, {"good": 1})]


def test_a_destination_added_while_others_wait_gets_later_records():
    """At once, or when its own rate says so."""
    run = Run(every_seconds=10)
    run.log({"loss": 0})
    run.log({"loss": 1})
    free, paced = InMemory(), InMemory(write_rate=WriteRate(every_seconds=10, clock=run.clock))

    run.logger.add_destination(paced)
    run.log({"loss": 2})
    run.log({"loss": 3})
    run.logger.add_destination(free)
    run.log({"loss": 4})

    assert run.written == [(0, {"loss": 0})]
    assert [(one.step, one.value) for one in paced.records] == [(2, {"loss": 2})]
    assert [(one.step, one.value) for one in free.records] == [(4, {"loss": 4})]


def test_media_are_written_at_once_unless_the_rate_says_media():
    """Then the last of each kind and name waits."""
    at_once, waits = Run(every_seconds=10), Run(every_seconds=10, media=True)

    for run in (at_once, waits):
        for text in ("a", "b", "c"):
            run.logger.log_text(text, "t")
        run.logger.log_text("d", "other")

    assert [record.value for record in at_once.memory.records] == ["a", "b", "c", "d"]
    assert [record.value for record in waits.memory.records] == ["a"]
    waits.clock.now += 10
    waits.logger.log_text("e", "t")
    assert [record.value for record in waits.memory.records] == ["a", "d", "e"]


def test_media_that_wait_are_copies_and_come_at_the_end():
    """The array is the caller's again."""
    run = Run(every_seconds=10, media=True)
    run.logger.log_histogram(torch.zeros(2), "h")
    values = torch.ones(2)

    run.logger.log_histogram(values, "h")
    values.fill_(7)
    run.logger.flush()

    assert run.memory.records[-1].value["values"].tolist() == [1.0, 1.0]


def test_files_and_hyperparameters_never_wait(tmp_path):
    """A file is delivered only once."""
    files = []

    class TakesFiles(InMemory):
        def can_upload_files(self):
            return True

        def upload_file(self, state, remote_file_name, file_path, *, overwrite):
            files.append(remote_file_name)

    run = Run(TakesFiles(write_rate=WriteRate(every_seconds=10, media=True)))
    (tmp_path / "a").write_text("x")

    for name in ("a", "b"):
        run.logger.upload_file(name, tmp_path / "a")
        run.logger.log_hyperparameters({name: 1})

    assert files == ["a", "b"]
    assert [record.value for record in run.memory.records] == [{"a": 1}, {"b": 1}]


def test_should_write_may_be_overridden():
    """It sees the state and may ask the rate; unwritten records wait."""

    class EvenBatches(InMemory):
        def should_write(self, state):
            return int(state.timestamp.batch) % 2 == 0 and super().should_write(state)

    run = Run(EvenBatches())
    for value in range(4):
        run.log({str(value): value})
    run.logger.flush()

    assert run.written == [(0, {"0": 0}), (1, {"1": 1}), (2, {"2": 2}), (3, {"3": 3})]


def test_asking_should_write_changes_nothing():
    """Asking twice gives the same answer."""
    run = Run(every_seconds=10)

    assert [run.memory.should_write(run.state) for _ in range(3)] == [True] * 3
    run.log({"a": 0})
    assert [run.memory.should_write(run.state) for _ in range(3)] == [False] * 3


def test_should_write_that_raises_is_a_failure_of_the_destination():
    """Training continues, and what was logged waits."""

    class Raises(InMemory):
        def should_write(self, state):
            raise OSError("no")

    memory = Raises()
    logger = Logger(State("r"), memory)
    logger.log_metrics({"a": 1})
    logger.flush()

    assert logger.faults.counts == {("Raises", "should_write", "OSError"): 1}
    assert [record.value for record in memory.records] == [{"a": 1}]


def test_a_destination_may_have_a_rate_by_default():
    """Its author knows how much it can take; an explicit rate overrides it."""

    class Slow(InMemory):
        write_rate = WriteRate(every_seconds=10)

    run, eager = Run(Slow()), Run(Slow(write_rate=WriteRate(every_seconds=0)))
    for one in (run, eager):
        for value in range(3):
            one.log({"a": value})

    assert (len(run.written), len(eager.written)) == (1, 3)


def test_a_destination_that_knows_nothing_of_rates_may_have_one():
    """One written for Composer, whose constructor does not call ours; on the object or the class."""

    class Theirs(LoggerDestination):
        def __init__(self):
            self.steps = []

        def log_metrics(self, metrics, step=None):
            self.steps.append(step)

    class Paced(Theirs):
        write_rate = WriteRate(every_steps=2)

    theirs, paced, free = Theirs(), Paced(), Theirs()
    theirs.write_rate = WriteRate(every_steps=3)
    state = State("r")
    logger = Logger(state, [theirs, paced, free], raise_errors=True, strict=True)

    for _ in range(5):
        logger.log_metrics({"a": 1})
        state.timestamp = state.timestamp.to_next_batch()

    assert (theirs.steps, paced.steps, free.steps) == ([0, 3], [0, 2, 4], [0, 1, 2, 3, 4])


@pytest.mark.parametrize("kind", [Console, InMemory, ProgressBar, TextFile])
def test_every_destination_takes_a_rate(kind):
    """Each takes it by name; it can be pickled with it."""
    rate = WriteRate(every_seconds=10)

    destination = pickle.loads(pickle.dumps(kind(write_rate=rate)))  # noqa: S301  # our own bytes

    assert destination.write_rate == rate
    assert kind().write_rate is None


def test_a_second_run_starts_a_new_schedule():
    """Its first record is written at once."""
    memory = InMemory(write_rate=WriteRate(every_seconds=1e9))

    for _ in range(2):
        Logger(State("r"), memory, raise_errors=True, strict=True).log_metrics({"a": 1})

    assert len(memory.records) == 2
