"""Time strings, arithmetic that keeps units apart, and timestamps that move forward."""

import copy
import datetime as dt
import functools
import operator
import pickle
from datetime import timedelta

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from events import EventsError, Time, Timestamp, TimeStringError, TimeUnit, TimeUnitError

WHOLE_UNITS = ["iter", "ep", "ba", "sp", "tok"]
# Neither a slow machine nor a busy one makes a property wrong.
SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("10ep", 10, TimeUnit.EPOCH),
        ("500ba", 500, TimeUnit.BATCH),
        ("3e10sp", 30_000_000_000, TimeUnit.SAMPLE),
        ("1.5e3sp", 1500, TimeUnit.SAMPLE),
        ("2iter", 2, TimeUnit.ITERATION),
        ("0.5dur", 0.5, TimeUnit.DURATION),
        ("0.25sec", 0.25, TimeUnit.SECOND),
        ("1h20m40s", 4840, TimeUnit.SECOND),
        ("100h90m", 365_400, TimeUnit.SECOND),
        ("1d12h", 129_600, TimeUnit.SECOND),
        ("-5ba", -5, TimeUnit.BATCH),
        (" 10EP ", 10, TimeUnit.EPOCH),
        ("9007199254740993tok", 9_007_199_254_740_993, TimeUnit.TOKEN),
    ],
)
def test_a_time_string_is_a_number_and_a_unit(text, value, unit):
    """Each notation gives exactly its value, as an `int` where the unit is whole."""
    time = Time.from_timestring(text)

    assert (time.value, type(time.value), time.unit) == (value, type(value), unit)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        *(
            (functools.partial(Time.from_timestring, text), TimeStringError, "time must be")
            for text in (
                "",
                "10",
                "ep",
                "10 ep",
                "10xy",
                "1ep2ba",
                "1h1h",
                "1.5h",
                "0x10ep",
                "_e5ba",
                "nanep",
                "٣ep",
            )
        ),
        (
            lambda: Time.from_timestring("1.5ep"),
            TimeStringError,
            "must be a whole number, got .*Only durations",
        ),
        (
            lambda: Time(1, "hours"),
            TimeStringError,
            "must be one of iter, ep, ba, sp, tok, dur, sec, got 'hours'",
        ),
        *(
            (functools.partial(Time, value, "ba"), TimeUnitError, "must have a number as its value")
            for value in ("5", None, True)
        ),
        (lambda: Time(float("nan"), "ba"), TimeStringError, "must be finite"),
        (lambda: Time.from_input(5), TimeStringError, r'must have a unit, got 5\. Write "5ep" or "5ba"'),
        (
            lambda: Time.from_input(1.5, "ep"),
            TimeUnitError,
            "must be a Time, a string, a timedelta or an int",
        ),
        (lambda: Time.from_timedelta("3ep"), TimeStringError, "'3ep'"),
        (
            lambda: Time(1, "ep") < "5ba",
            TimeUnitError,
            r'got 1ep and 5ba; .*timestamp\.get\("ba"\) .* in batches',
        ),
        (lambda: Time(1, "ba") + None, TimeUnitError, "must be a time, string or number"),
        (lambda: Timestamp().copy(batches=1), TypeError, "batches"),
        (
            lambda: Timestamp(batch="1ep"),
            TimeUnitError,
            "count of batches must be a time in batches, got 1ep",
        ),
        (lambda: Timestamp(batch=-1), TimeStringError, "count of batches must be at least 0, got -1ba"),
        (lambda: Timestamp().get("dur"), TimeUnitError, r"use state\.get_elapsed_duration\(\)"),
        (lambda: Timestamp() < 3, TimeUnitError, "a timestamp compares with a time such as"),
    ],
)
def test_what_is_no_time_is_refused(make, error, message):
    """The error is our own, and says what to write."""
    with pytest.raises(error, match=message):
        make()


def test_units_do_not_mix():
    """Arithmetic, comparison and `==` raise, because `==` would always be false."""
    names = "add sub mod truediv mul lt le gt ge eq ne"
    for operation in (getattr(operator, name) for name in names.split()):
        with pytest.raises(TimeUnitError) as caught:
            operation(Time(1, "ep"), Time(1, "ba"))
        assert isinstance(caught.value, TypeError)
        assert isinstance(caught.value, EventsError)


def test_a_time_has_many_notations():
    """A unit goes by suffix or name, a bare number has the default unit, and composer's constructors are there."""
    assert str(Time(5, "ep")) == "5ep"
    assert repr(Time(5, "ep")) == "Time(5, TimeUnit.EPOCH)"
    assert {Time(1, name).unit for name in ("ep", "EPOCH", TimeUnit.EPOCH)} == {TimeUnit.EPOCH}
    for value, text in (
        (Time.from_input("3ba", "ep"), "3ba"),
        (Time.from_input(timedelta(minutes=2), "ep"), "120sec"),
        (Time.from_input(3, "ep"), "3ep"),
        (Time.from_iteration(1), "1iter"),
        (Time.from_epoch(2), "2ep"),
        (Time.from_batch(3), "3ba"),
        (Time.from_sample(4), "4sp"),
        (Time.from_token(5), "5tok"),
        (Time.from_duration(0.5), "0.5dur"),
        (Time.from_timedelta("1h20m40s"), "4840sec"),
        (Time.from_timedelta(timedelta(seconds=1.5)), "1.5sec"),
    ):
        assert value.to_timestring() == str(value) == text
        assert Time.from_timestring(text) == value


@SLOW
@given(st.text(max_size=12) | st.text("0123456789e+-._hmsepba", max_size=12))
def test_any_text_is_parsed_or_refused_by_our_own_error(text):
    """The parser raises no other exception, also of a text that nearly matches."""
    try:
        time = Time.from_timestring(text)
    except TimeStringError:
        return

    assert isinstance(time, Time)


@SLOW
@given(st.integers(), st.sampled_from(WHOLE_UNITS))
def test_a_whole_time_survives_its_string_and_its_repr(value, unit):
    """`str` parses back and `repr` evaluates back, to the last digit."""
    time = Time(value, unit)

    assert Time.from_timestring(str(time)) == time
    assert eval(repr(time)) == time  # noqa: S307  # our own text


@SLOW
@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["dur", "sec"]))
def test_a_fractional_time_survives_its_string_and_its_repr(value, unit):
    """Floats come back bit for bit."""
    time = Time(value, unit)

    assert Time.from_timestring(str(time)) == time
    assert eval(repr(time)) == time  # noqa: S307  # our own text


def test_numbers_of_numpy_count():
    """A length that numpy computed is a count, and becomes Python's own number."""
    time = Time(np.int64(3), "ba") + np.int32(4)

    assert (time.value, type(time.value)) == (7, int)
    assert Time(1, "sec") * np.float32(0.5) == Time(0.5, "sec")
    assert Timestamp().to_next_batch(samples=np.int64(32)).sample == Time(32, "sp")
    assert Time.from_input(np.int64(4), "ep") == Time(4, "ep")


@SLOW
@given(st.integers(), st.integers(), st.sampled_from(WHOLE_UNITS))
def test_equal_units_add_subtract_and_compare_as_their_numbers_do(left, right, unit):
    """Arithmetic within a unit equals integer arithmetic."""
    one, other = Time(left, unit), Time(right, unit)

    assert (one + other).value == left + right
    assert (one - other).value == left - right
    assert (one < other, one <= other, one > other, one >= other, one == other, one != other) == (
        left < right,
        left <= right,
        left > right,
        left >= right,
        left == right,
        left != right,
    )


def test_bare_numbers_and_strings_take_part():
    """A number takes the unit that it meets, from either side; a string is parsed."""
    time = Time(10, "ba")

    assert time + 1 == 1 + time == time + "1ba" == "1ba" + time == Time(11, "ba")
    assert time - 1 == Time(9, "ba")
    assert 12 - time == "12ba" - time == Time(2, "ba")
    assert time % 4 == time % "4ba" == Time(2, "ba")
    assert -time == Time(-10, "ba")
    assert +time == time
    assert time > 9
    assert time < "11ba"
    assert (int(time), float(time), bool(time), bool(Time(0, "ba"))) == (10, 10.0, True, False)


def test_products_and_quotients_keep_to_their_units():
    """A number scales, a duration is a share, and equal units divide into a duration."""
    time = Time(10, "ep")

    assert time * 2 == 2 * time == Time(20, "ep")
    assert time * "0.5dur" == "0.5dur" * time == Time(5, "ep")
    assert time / 4 == Time(2, "ep")
    assert time / "20ep" == Time(0.5, "dur")
    assert Time(7, "sec") / 2 == Time(3.5, "sec")
    assert Time(0.5, "dur") * "0.5dur" == Time(0.25, "dur")


def test_a_share_is_rounded_toward_zero_and_not_by_errors_of_floats():
    """0.29 of 100 batches is 29, though 0.29 * 100 is 28.999999999999996; 0.55 of 10 batches is 5."""
    shares = [Time(100, "ba") * Time(percent / 100, "dur") for percent in range(101)]

    assert shares == [Time(percent, "ba") for percent in range(101)]
    assert Time(10, "ba") * "0.55dur" == Time(5, "ba")
    assert Time(-10, "ba") * "0.55dur" == Time(-5, "ba")


def test_times_are_keys_and_are_not_equal_to_something_of_another_kind():
    """Equal ones have equal hashes, and units keep keys apart."""
    times = {Time(1, "ep"): "epoch", Time(1, "ba"): "batch", Time(1, "sec"): "second"}

    assert times[Time.from_timestring("1ba")] == "batch"
    assert times[Time(1.0, "sec")] == "second"
    assert Time(1, "ba") != None  # noqa: E711  # the operator is what is tested
    assert Time(1, "ba") != [1]


@pytest.mark.parametrize("value", [Time(3, "ba"), Timestamp(batch=3)])
def test_times_are_frozen_and_survive_copy_and_pickle(value):
    """Nothing can change them; copies are equal."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        value.batch = value.value = 4

    assert copy.deepcopy(value) == value
    assert pickle.loads(pickle.dumps(value)) == value  # noqa: S301  # our own bytes


def _counts(timestamp):
    return {name: value for name, value in timestamp.to_numbers().items() if value}


def test_a_batch_is_counted_in_total_and_within_everything_around_it():
    """`to_next_batch` moves all counts of batches, samples, tokens and durations."""
    second = timedelta(seconds=1)

    timestamp = Timestamp().to_next_batch(4, 40, second).to_next_batch(Time(2, "sp"), "20tok", 2 * second)

    assert _counts(timestamp) == {
        "batch": 2,
        "batch_in_epoch": 2,
        "sample": 6,
        "sample_in_epoch": 6,
        "token": 60,
        "token_in_epoch": 60,
        "token_in_iteration": 60,
        "total_wct": 3.0,
        "iteration_wct": 3.0,
        "epoch_wct": 3.0,
        "batch_wct": 2.0,
    }


def test_an_epoch_and_an_iteration_end_the_counts_within_them():
    """A timestamp begins at zero; a move makes a new one."""
    second, begin = timedelta(seconds=1), Timestamp()

    batch = begin.to_next_batch(4, 40, second)
    epoch, iteration = batch.to_next_epoch(second), batch.to_next_epoch().to_next_iteration(second)

    assert (_counts(begin), begin.batch, begin.batch.unit) == ({}, "0ba", TimeUnit.BATCH)
    total = {"epoch": 1, "batch": 1, "sample": 4, "token": 40, "total_wct": 2.0}
    within = {"epoch_in_iteration": 1, "token_in_iteration": 40, "iteration_wct": 2.0}
    assert _counts(epoch) == total | within
    assert _counts(iteration) == total | {"iteration": 1}


def test_a_total_is_read_by_unit_and_fields_are_changed_by_copy():
    """Seconds are the wall clock of training; values may be times, strings or bare numbers."""
    timestamp = Timestamp(
        batch=7, epoch=2, iteration=1, sample=70, token=700, total_wct=timedelta(seconds=90), batch_in_epoch=3
    )

    for text in ("7ba", "2ep", "1iter", "70sp", "700tok", "90sec"):
        time = Time.from_timestring(text)
        assert timestamp.get(time.unit) == timestamp.get(time.unit.value) == time
    assert _counts(Timestamp(batch=3, epoch=1).copy(batch="5ba", sample=7)) == {
        "batch": 5,
        "epoch": 1,
        "sample": 7,
    }


def test_a_timestamp_compares_with_a_time_in_its_unit():
    """All six comparisons look at the total in that unit, from either side."""
    timestamp = Timestamp(batch=10, epoch=2)

    assert timestamp >= "10ba"
    assert timestamp <= "10ba"
    assert timestamp == "10ba"
    assert timestamp != "11ba"
    assert timestamp < Time(3, "ep")
    assert timestamp > "1ep"
    assert Time(10, "ba") == timestamp
    assert timestamp < "3ep"


def test_timestamps_are_equal_where_all_fields_are():
    """Equal ones have equal hashes; one field makes the difference."""
    assert Timestamp(batch=1) == Timestamp(batch=1)
    assert hash(Timestamp(batch=1)) == hash(Timestamp(batch=1))
    assert Timestamp(batch=1) != Timestamp(batch=1, batch_in_epoch=1)
    assert Timestamp() != None  # noqa: E711  # the operator is what is tested


timestamps = st.builds(
    Timestamp,
    **{
        field.name: st.timedeltas(timedelta(0), timedelta(days=10_000))
        if field.name.endswith("_wct")
        else st.integers(0, 2**62)
        for field in attrs.fields(Timestamp)
    },
)


@SLOW
@given(timestamps)
def test_a_timestamp_survives_its_state_dict_and_its_repr(timestamp):
    """All give the same timestamp back; durations are timedeltas as in Composer, or plain numbers."""
    state = timestamp.state_dict()

    assert Timestamp.from_state_dict(state) == timestamp
    assert Timestamp(**state) == timestamp
    assert {type(value) for value in state.values()} == {int, timedelta}
    numbers = timestamp.to_numbers()
    assert Timestamp.from_state_dict(numbers) == timestamp
    assert {type(value) for value in numbers.values()} <= {int, float}
    assert eval(repr(timestamp), {"datetime": dt, **globals()}) == timestamp  # noqa: S307  # our own text


def test_a_state_dict_of_another_version_is_read_as_far_as_it_goes():
    """Fields that are missing are zero, fields that are unknown are ignored."""
    timestamp = Timestamp.from_state_dict({"batch": 3, "epoch_wct": 1.5, "galaxy": 9})

    assert timestamp == Timestamp(batch=3, epoch_wct=timedelta(seconds=1.5))


def test_the_type_of_the_value_may_be_named():
    """Code that was written for Composer does so, in annotations that are evaluated."""

    def later(time: Time[int], by: Time[float] | None = None) -> Time[int]:
        return time * 2

    assert later(Time(2, "ep")) == "4ep"
    assert isinstance(Time[int](3, "ba"), Time)
