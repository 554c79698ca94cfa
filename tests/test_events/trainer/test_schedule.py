"""Tests when `AutoInterval` saves checkpoints, that all ranks agree, and the cost of a kill."""

import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from destinations import LoggerDestination
from events import (
    AutoInterval,
    Callback,
    CheckpointSaver,
    CheckpointWriting,
    State,
    TimeStringError,
    read_checkpoint,
)
from events.trainer.checkpoint.schedule import AutoSchedule

_PROGRAM = Path(__file__).with_name("auto_program.py")


class Seconds(Callback):
    """A clock that moves one second for each batch, and by what a checkpoint costs."""

    def __init__(self, *costs):
        self.now = 0.0
        self.costs = list(costs)
        self.saved_at = []

    def batch_start(self, state, logger):
        self.now += 1.0

    def batch_end(self, state, logger):
        self.batch = state.timestamp.batch.value

    def state_dict(self):
        self.saved_at.append(self.batch)
        self.now += self.costs.pop(0) if self.costs else 0.0
        return {}


class SlowStore(LoggerDestination):
    """Takes files, and has them after it was asked a number of times."""

    def __init__(self, asked):
        self.asked = asked
        self.left = {}

    def can_upload_files(self):
        return True

    def upload_file(self, state, remote_file_name, file_path, *, overwrite):
        self.left[remote_file_name] = self.asked

    def has_uploaded(self, remote_file_name):
        self.left[remote_file_name] -= 1
        return self.left[remote_file_name] < 0


def saved_at(make_trainer, tmp_path, seconds, loggers=(), **policy):
    """Returns the batches at which a run of nineteen batches saves."""
    interval = AutoInterval(clock=lambda: seconds.now, **policy)
    saver = CheckpointSaver(
        tmp_path, save_interval=interval, writing=CheckpointWriting(asynchronous=False), keep=100
    )
    with make_trainer(callbacks=[seconds, saver], loggers=loggers, max_duration="19ba") as trainer:
        trainer.fit()
    return seconds.saved_at


class TestDecisions:
    """When a checkpoint begins, by a clock of our own."""

    def test_the_next_begins_once_the_one_before_is_paid(self, make_trainer, tmp_path):
        """One of 0.3 s is paid by 6 s at five percent, its own time among them."""
        found = saved_at(
            make_trainer, tmp_path, Seconds(0.3, 0.1), save_overhead=0.05, min_seconds=1, max_seconds=100
        )

        assert found == [1, 7, 9, *range(10, 20)]

    def test_two_begin_no_closer_than_the_least_time(self, make_trainer, tmp_path):
        """What costs nothing does not fill the disk; where training ends the state is saved."""
        assert saved_at(make_trainer, tmp_path, Seconds(), min_seconds=8) == [8, 16, 19]

    def test_one_that_is_dear_delays_the_next_up_to_the_longest_time(self, make_trainer, tmp_path):
        """At a percent, 0.5 s would be paid after 50 s."""
        found = saved_at(make_trainer, tmp_path, Seconds(0.5, 0.5), min_seconds=3, max_seconds=7)

        assert found == [3, 10, 17, 19]

    def test_the_next_waits_until_a_store_has_the_one_before(self, make_trainer, tmp_path):
        """The store is asked once a batch, and answers after the third that it has the file."""
        found = saved_at(make_trainer, tmp_path, Seconds(), loggers=SlowStore(3), min_seconds=1)

        assert found == [1, 5, 9, 13, 17, 19]

    def test_a_store_that_is_away_is_waited_for_up_to_the_longest_time(self, make_trainer, tmp_path):
        """The checkpoint on this machine is worth as much."""
        found = saved_at(
            make_trainer, tmp_path, Seconds(), loggers=SlowStore(1000), min_seconds=1, max_seconds=6
        )

        assert found == [1, 7, 13, 19]

    def test_a_decision_holds_for_one_checkpoint(self):
        """The end of an epoch after it does not save again."""
        schedule, state = AutoSchedule(AutoInterval()), State("test")
        schedule.is_agreed = True

        found = [schedule.passed(state) for _ in range(2)]

        assert found == [True, False]

    def test_two_are_kept_by_default(self, make_trainer, tmp_path):
        """Keeping all of them would fill the disk."""
        seconds = Seconds()
        interval = AutoInterval(min_seconds=1, clock=lambda: seconds.now)
        with make_trainer(callbacks=seconds, save_folder=tmp_path, save_interval=interval) as trainer:
            trainer.fit()

        assert len(seconds.saved_at) > 2
        assert len(list(tmp_path.glob("*.pt"))) == 2


@pytest.mark.parametrize("share", [0, 1, -0.1, 2, float("nan")])
def test_a_share_outside_of_zero_and_one_raises(share):
    """The message says what to write."""
    with pytest.raises(
        ValueError, match=r"save_overhead must be a share between 0 and 1, got .* Write 0\.01"
    ):
        AutoInterval(save_overhead=share)


@pytest.mark.parametrize("bounds", [(-1, 10), (20, 10), (float("nan"), 10), (1, float("nan"))])
def test_bounds_that_exclude_each_other_raise(bounds):
    """Both numbers are named."""
    with pytest.raises(ValueError, match="min_seconds must be at least 0 and at most max_seconds, got"):
        AutoInterval(min_seconds=bounds[0], max_seconds=bounds[1])


def test_auto_is_the_default_policy_and_another_word_raises(tmp_path):
    """A saver by policy has no fixed interval."""
    assert CheckpointSaver(tmp_path, save_interval="auto").interval is None
    with pytest.raises(TimeStringError):
        CheckpointSaver(tmp_path, save_interval="often")


@pytest.mark.parametrize("mode", ["whole", "sharded"])
def test_two_ranks_save_the_same_batches(torch_server, tmp_path, mode):
    """Rank 0 decides: by the clock of rank 1, which runs six times as fast, there would be more."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}

    outcome = torch_server.torchrun(2, _PROGRAM, tmp_path, mode, env=environment, timeout_s=120)

    assert outcome.returncode == 0, outcome.stdout
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text())["saved_at"] for rank in range(2)]
    assert found[0] == found[1] == [2, 6, 10, 14, 18, 20]


def test_a_kill_costs_what_the_policy_says_and_the_resumed_run_is_the_one_that_was_not_killed(
    torch_server, tmp_path
):
    """A checkpoint of 20 ms at half a percent begins each 4 s: a kill costs at most four batches of one."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    killed_at = random.Random(os.environ.get("CHECKPOINT_SEED", "0")).randint(3, 19)
    folders = tmp_path / "whole", tmp_path / "killed"

    def train(folder, *killed):
        folder.mkdir(exist_ok=True)
        arguments = folder, "whole", *killed
        return torch_server.run(_PROGRAM.read_text(), *arguments, env=environment).returncode

    assert train(folders[0]) == 0
    assert train(folders[1], killed_at) == -signal.SIGKILL
    newest = read_checkpoint(folders[1] / "saved")["timestamp"]["batch"]
    assert train(folders[1]) == 0

    whole, resumed = (json.loads((folder / "rank0.json").read_text()) for folder in folders)
    assert killed_at - newest <= 4
    assert resumed["began_at"] == newest
    assert resumed["weights"] == whole["weights"]
