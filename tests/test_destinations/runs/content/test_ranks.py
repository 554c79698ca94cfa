"""Merges the metrics of several ranks, and reads the files of flight recorders."""

import json

import numpy as np
import pytest

from destinations import cli
from destinations.runs import MetricNotFoundError, Run
from destinations.runs.content.flight import describe_flights, read_flights
from tests.test_destinations.runs.written import Written


class Clock:
    """A clock that a test sets."""

    now = 1_700_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def run(tmp_path):
    """A run with three ranks: rank 2 takes twice as long, and has NaN one step before the others."""
    folder = tmp_path / "run"
    for rank in (0, 1, 2):
        clock = Clock()
        with Written(folder, rank=rank, all_ranks=True, clock=clock) as written:
            for step in range(5):
                clock.now += 2.0 if rank == 2 else 1.0
                is_nan = step >= (3 if rank == 2 else 4)
                written.log({"loss": float("nan") if is_nan else step + rank / 10}, step)
                if rank == 1 and step == 1:
                    written.log({"loss": 9.0}, step)
            written.log({"lr": 0.1, "only": 3.0} if rank == 1 else {"lr": 0.1}, 5)
    return Run.open(folder)


def test_a_metric_is_merged_by_step_with_the_rank_of_each_bound(run):
    """If a step was logged twice, the last value counts; a step without finite values is left out."""
    loss = run.ranks("loss")

    assert loss.ranks == [0, 1, 2]
    assert loss.step.tolist() == [0, 1, 2, 3]
    assert loss.band.low.tolist() == [0, 1, 2, 3]
    assert loss.band.median.tolist() == pytest.approx([0.1, 1.2, 2.1, 3.05])
    assert loss.band.high.tolist() == pytest.approx([0.2, 9, 2.2, 3.1])
    assert loss.band.count.tolist() == [3, 3, 3, 2]
    assert loss.lowest_rank.tolist() == [0, 0, 0, 0]
    assert loss.highest_rank.tolist() == [2, 1, 2, 1]
    assert loss.outlier == 1
    assert np.isnan(loss.table[2, 3])


def test_the_rank_that_went_nan_first_and_the_slowest_one_are_named(run):
    """The step decides, not the order of the files."""
    loss = run.ranks("loss")

    assert loss.first_nan == (2, 3)
    assert loss.seconds_per_step == {0: 1.0, 1: 1.0, 2: 2.0}
    assert loss.slowest_rank == 2


def test_a_metric_of_one_rank_is_a_band_of_one_and_an_unknown_one_is_refused(run):
    """The error suggests the closest name."""
    only = run.ranks("only")

    assert (only.ranks, only.band.low.tolist(), only.outlier, only.first_nan) == ([1], [3.0], None, None)
    assert only.seconds_per_step == {1: None}
    assert only.slowest_rank is None
    with pytest.raises(MetricNotFoundError, match="did you mean"):
        run.ranks("los")
    assert run.ranks() == [0, 1, 2]


def test_the_command_line_shows_ranks(run, capsys):
    """They are available as a table and as JSON."""
    assert cli.main(["runs", "show", str(run.path), "--ranks"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert cli.main(["runs", "show", str(run.path), "--ranks", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert ["loss", *["–", "–", "–", "–", "–"], "rank", "2,", "step", "3"] in lines  # noqa: RUF001
    assert ["seconds", "per", "step", "1.0", "0", "1.0", "2.0", "2", "–"] in lines  # noqa: RUF001
    assert found["first_nan"] == {"loss": {"rank": 2, "step": 3}}
    assert found["metrics"]["lr"] == {"0": 0.1, "1": 0.1, "2": 0.1}
    assert found["seconds_per_step"] == {"0": 1.0, "1": 1.0, "2": 2.0}


def write_flight(folder, rank, *, line=42, function="all_reduce", reason="hang", **more):
    """Writes a file as `FlightRecorder` does."""
    folder.mkdir(exist_ok=True)
    frames = [
        {"file": "/home/me/train.py", "line": line, "function": "main", "code": "x", "is_library": False},
        {"file": "/lib/c10d.py", "line": 7, "function": f"a.{function}", "code": "", "is_library": True},
    ]
    threads = [
        {"name": "other", "is_main": False, "frames": []},
        {"name": "MainThread", "is_main": True, "frames": frames[: 1 if function == "" else 2]},
    ]
    steps = [{"step": 3, "time": 1.0, "metrics": {"loss": "NaN"}}]
    document = {"rank": rank, "world_size": 5, "reason": reason, "detail": "d", "time": 2.0, "steps": steps}
    (folder / f"rank-{rank}.json").write_text(json.dumps({**document, "threads": threads, **more}))


def test_ranks_that_wait_at_the_same_place_are_one_line_and_the_odd_one_comes_first(tmp_path):
    """Ranks without a file come last."""
    for rank in (0, 2, 3):
        write_flight(tmp_path, rank)
    write_flight(tmp_path, 1, line=40, function="")

    assert describe_flights(read_flights(tmp_path)) == [
        "rank 1: hang, waits at train.py:40",
        "ranks 0, 2, 3: hang, wait in all_reduce at train.py:42",
        "rank 4: wrote nothing",
    ]


def test_an_exception_is_reported_with_the_line_that_raised(tmp_path):
    """Its stack replaces the main thread's."""
    frames = [{"file": "model.py", "line": 9, "function": "forward", "code": "", "is_library": False}]
    write_flight(
        tmp_path, 0, reason="exception", detail="ValueError: no", exception={"frames": frames}, world_size=1
    )

    assert describe_flights(read_flights(tmp_path)) == ["rank 0: exception, at model.py:9, ValueError: no"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"rank": -1, "reason": "hang"}',
        '{"rank": "0", "reason": "hang"}',
        '{"rank": 0}',
        "[" * 10_000,
    ],
)
def test_a_damaged_file_is_left_out(tmp_path, text):
    """Files that belong to no rank are too."""
    (tmp_path / "rank-0.json").write_text(text)
    (tmp_path / "rank-1.json").mkdir()
    (tmp_path / "rank-x.json").write_text("{}")
    write_flight(tmp_path, 2, threads=[{"is_main": True, "frames": [{"line": "x"}, 5]}, 3], steps=4)

    (found,) = read_flights(tmp_path)

    assert (found.rank, found.waits_at, found.steps) == (2, "at ?:0", [])


def test_the_command_line_shows_flights(run, capsys):
    """It shows where ranks wait, each group's stack and the last steps; control characters are escaped."""
    assert cli.main(["runs", "show", str(run.path), "--flight"]) == 0
    assert "no flight records" in capsys.readouterr().err
    write_flight(run.path / "flight", 0)
    write_flight(run.path / "flight", 1, reason="hang\x1b[2J", line=40)

    assert cli.main(["runs", "show", str(run.path), "--flight"]) == 0
    out = capsys.readouterr().out
    assert cli.main(["runs", "show", str(run.path), "--flight", "--json"]) == 0
    documents = json.loads(capsys.readouterr().out)["flights"]

    assert "rank 0: hang, waits in all_reduce at train.py:42" in out.splitlines()
    assert "\x1b[2J" not in out
    assert "train.py:40 main" in out
    assert "last steps of rank 0" in out
    assert [one["rank"] for one in documents] == [0, 1]


def collectives(*numbers, group=("0", "default_pg")):
    """Returns a rank's last collectives as torch's recorder reports them."""
    return [
        {"profiling_name": "nccl:all_reduce", "collective_seq_id": one, "process_group": group}
        for one in numbers
    ]


def test_ranks_that_have_not_entered_a_collective_are_named(tmp_path):
    """The line says what they do instead; a group that all ranks have entered isn't named."""
    doing = {"bucket": "data", "seconds": 3.0, "spans": ["epoch", "tokenize"]}
    for rank in (0, 2, 3):
        write_flight(tmp_path, rank, collectives=collectives(6, 7) + collectives(2, group="tp"))
    write_flight(
        tmp_path,
        1,
        line=40,
        function="",
        doing=doing,
        collectives=collectives(6) + collectives(2, group="tp"),
    )

    assert describe_flights(read_flights(tmp_path))[0] == (
        "rank 1 has not entered nccl:all_reduce (number 7), where ranks 0, 2, 3 wait: it is at train.py:40 "
        "(data, in 'tokenize')"
    )


@pytest.mark.parametrize("damaged", [3, [3], [{"collective_seq_id": "x"}], [{"collective_seq_id": 1e30}]])
def test_damaged_collectives_are_left_out(tmp_path, damaged):
    """The rank's other data is too."""
    for rank in range(2):
        write_flight(tmp_path, rank, world_size=2, collectives=damaged, doing=damaged)

    assert describe_flights(read_flights(tmp_path)) == ["ranks 0, 1: hang, wait in all_reduce at train.py:42"]
